"""start_engine: the one way to an EngineClient, whatever is behind it."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from batchgen.config import EngineConfig
from batchgen.engine.client import EngineClient
from batchgen.engine.output_processor import OutputTokenizer

if TYPE_CHECKING:
    from batchgen.engine.child_process import ChildProcess


def begin_engine(config: EngineConfig) -> "ChildProcess | None":
    """A child that imports what an engine needs, while its caller loads a tokenizer for `start_engine`.

    Whoever does not hand it to `start_engine` must kill it.

    Args:
        config: settings of the engine; None is returned for one that needs no child.
    """
    if config.model.model.startswith("echo:"):
        return None
    from batchgen.engine.child_process import ChildProcess
    from batchgen.engine.loading import DEFAULT_EXECUTOR

    return ChildProcess(DEFAULT_EXECUTOR.partition(":")[0])


def start_engine(
    config: EngineConfig,
    tokenizer: OutputTokenizer,
    *,
    in_process: bool = False,
    on_loading: Callable[[str], None] | None = None,
    begun: "ChildProcess | None" = None,
) -> EngineClient:
    """Start an engine and wait until it is ready.

    Args:
        config: its settings; a model `echo:` needs no model and runs here.
        tokenizer: makes text of tokens on this side.
        in_process: compute in this process instead of in a child.
        on_loading: called with what is about to be done while a model loads, which else goes to the log.
        begun: of `begin_engine`; without one a child is started now.

    Raises:
        ConfigError, ModelError, CapacityError: as the loader raised them, wherever it ran.
        EngineError: the child died while loading.
    """
    if config.model.model.startswith("echo:"):
        from batchgen.echo import EchoEngine

        return EchoEngine.from_config(config)
    if in_process:
        from batchgen.engine.in_process import InProcessClient
        from batchgen.engine.loading import load_core, telling

        with nullcontext() if on_loading is None else telling(on_loading):
            core = load_core(config, tokenizer_eos_ids=tokenizer.eos_token_ids)
        return InProcessClient(core, tokenizer)
    from batchgen.engine.child_client import ChildClient

    return ChildClient(config, tokenizer, on_loading=on_loading, process=begun)
