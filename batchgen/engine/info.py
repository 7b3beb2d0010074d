"""engine_info: what a started engine says of itself."""

import os
from typing import Any

from batchgen.engine.messages import EngineInfo
from batchgen.worker.executor import ExecutorInfo


def engine_info(
    model: str, loaded: ExecutorInfo, resolved: dict[str, Any], eos_token_ids: tuple[int, ...], load_s: float
) -> EngineInfo:
    """Put together what was asked for, what the executor found, and what was resolved."""
    return EngineInfo(
        model=model,
        architecture=loaded.architecture,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=eos_token_ids,
        num_blocks=loaded.num_blocks,
        block_size=resolved["block_size"],
        reproducible=loaded.reproducible,
        resolved=resolved,
        decisions=loaded.decisions,
        environment=loaded.environment,
        load_s=load_s,
        pid=os.getpid(),
        no_thinking=loaded.no_thinking,
    )
