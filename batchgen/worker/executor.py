"""Executor: the seam between the engine core, which has no torch, and the ranks that compute."""

from dataclasses import dataclass
from typing import Any, Protocol

from batchgen.engine.scheduler_output import SchedulerOutput, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInfo:
    """What the core must know of a loaded model."""

    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    num_groups: int = 1
    decisions: tuple[str, ...] = ()
    resolved: dict[str, Any]
    environment: dict[str, str]
    reproducible: bool


class Executor(Protocol):
    """Runs steps on every rank."""

    info: ExecutorInfo

    def execute(self, step: SchedulerOutput) -> StepResult:
        """Copy blocks, write KV, run the model, draw. Blocks until the tokens are known."""

    def shutdown(self) -> None:
        """Free weights and KV blocks. May be called twice."""
