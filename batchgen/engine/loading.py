"""From a config to an EngineCore: finds the executor's loader by name, loads, and measures."""

import time
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import cast

from batchgen.config import EngineConfig
from batchgen.engine.core import EngineCore
from batchgen.worker.executor import Executor

DEFAULT_EXECUTOR = "batchgen.worker.load:load_executor"


def load_core(
    config: EngineConfig, *, tokenizer_eos_ids: Iterable[int] = (), executor: str = DEFAULT_EXECUTOR
) -> EngineCore:
    """Load a model and put an engine around it.

    Args:
        config: the engine's settings; "auto" is decided by the loader.
        tokenizer_eos_ids: end-of-sequence ids of the tokenizer.
        executor: "module:function" of a function from EngineConfig to Executor.

    Raises:
        BatchgenError: what the loader raises; ModelError and CapacityError mostly.
    """
    started = time.perf_counter()
    module, _, function = executor.partition(":")
    load = cast(Callable[[EngineConfig], Executor], getattr(import_module(module), function))
    loaded = load(config)
    return EngineCore(
        config, loaded, tokenizer_eos_ids=tokenizer_eos_ids, load_s=time.perf_counter() - started
    )
