"""From a config to an EngineCore: finds the executor's loader by name, loads, and measures."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, cast

from batchgen.config import EngineConfig

if TYPE_CHECKING:
    from batchgen.engine.core import EngineCore
    from batchgen.worker.executor import Executor

DEFAULT_EXECUTOR = "batchgen.worker.load:load_executor"
# Whoever does what takes seconds while a model loads says so here: a line before it begins.
_LOG = logging.getLogger("batchgen.loading")


@contextmanager
def telling(tell: Callable[[str], None]) -> Iterator[None]:
    """Within it, what is said of loading goes to `tell` and not into the log."""
    level, handler = _LOG.level, _Teller(tell)
    _LOG.setLevel(logging.INFO)
    _LOG.addHandler(handler)
    _LOG.propagate = False
    try:
        yield
    finally:
        _LOG.propagate = True
        _LOG.removeHandler(handler)
        _LOG.setLevel(level)


class _Teller(logging.Handler):
    def __init__(self, tell: Callable[[str], None]):
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


def load_core(
    config: EngineConfig, *, tokenizer_eos_ids: Iterable[int] = (), executor: str = DEFAULT_EXECUTOR
) -> "EngineCore":
    """Load a model and put an engine around it.

    Args:
        config: the engine's settings; "auto" is decided by the loader.
        tokenizer_eos_ids: end-of-sequence ids of the tokenizer.
        executor: "module:function" of a function from EngineConfig to Executor.

    Raises:
        BatchgenError: what the loader raises; ModelError and CapacityError mostly.
    """
    from batchgen.engine.core import EngineCore

    started = time.perf_counter()
    module, _, function = executor.partition(":")
    load = cast("Callable[[EngineConfig], Executor]", getattr(import_module(module), function))
    loaded = load(config)
    return EngineCore(
        config, loaded, tokenizer_eos_ids=tokenizer_eos_ids, load_s=time.perf_counter() - started
    )
