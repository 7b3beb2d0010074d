"""Executor: the seam between the engine core, which has no torch, and the ranks that compute."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from batchgen.engine.messages import AdapterInfo
from batchgen.engine.scheduler_output import DrawRules, SchedulerOutput, StepResult
from batchgen.kernels.ceilings import Ceilings
from batchgen.outputs import RowFailure
from batchgen.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInfo:
    """What the core must know of a loaded model.

    `group_windows` has an entry for each KV group: the window of its layers, None for full attention.
    `num_cpu_blocks` is the pool in host memory for swapping, `block_bytes` what one block takes in it;
    `no_thinking` says why `thinking_token_budget` cannot be served, None if it can. `continues` says whether
    steps may name sequences that go on instead of spelling out their parts.
    """

    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    group_windows: tuple[int | None, ...] = (None,)
    num_cpu_blocks: int = 0
    block_bytes: int = 0
    no_thinking: str | None = None
    decisions: tuple[str, ...] = ()
    resolved: dict[str, Any]
    environment: dict[str, str]
    reproducible: bool
    continues: bool = False

    @property
    def num_groups(self) -> int:
        """KV groups, each with block tables of its own."""
        return len(self.group_windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorProfile:
    """What the steps between `begin_profile` and `end_profile` took, and what they must take at least.

    Args:
        seconds: part of a step -> time in kernels, and in drawing tokens.
        num_tokens: computed.
        num_rows: of logits.
        ceilings: of this machine, the mean over that time; None where they cannot be measured.
        bound_s: part -> the least seconds of it on this machine, whatever the kernels; empty without
            ceilings.
        measuring_s: time in the midst of steps that measuring the machine took; in no part.
    """

    seconds: Mapping[str, float]
    num_tokens: int
    num_rows: int
    ceilings: Ceilings | None
    bound_s: Mapping[str, float]
    measuring_s: float = 0.0


class AdapterMemory(Protocol):
    """The adapters that an executor can compute with; known by their content hash, in hex.

    Their files are read in the background, between steps at most pointers are put. An adapter that is
    `want`ed in a step stays in memory at least until the next one is planned.
    """

    def load(self, name: str, path: str) -> AdapterInfo:
        """Check an adapter's files and know its content from now on.

        Raises:
            ConfigError, ModelError: no such adapter, or one that does not fit; says why.
        """

    def drop(self, adapter: str) -> None:
        """Know an adapter no longer, and free its memory. No sequence computes with it any more."""

    def pin(self, adapter: str) -> None:
        """Keep an adapter in memory until it is dropped.

        Raises:
            ConfigError: no memory would be left for others.
        """

    def begin_step(self, running: Collection[str]) -> None:
        """A step is about to be planned, in which the sequences with these adapters may compute."""

    def want(self, adapter: str) -> bool | RowFailure:
        """Whether an adapter is in memory; if not it is brought there, as soon as others leave room.

        A failure says why it cannot be had any more.
        """

    def wait(self, timeout_s: float) -> bool:
        """Wait until one that is on its way has arrived; False, at once, if none is."""


class Executor(Protocol):
    """Runs steps on every rank."""

    info: ExecutorInfo

    @property
    def adapters(self) -> AdapterMemory | None:
        """Those that sequences may be computed with; None where there are no slots for any."""

    def execute(self, step: SchedulerOutput) -> StepResult:
        """Swap and copy blocks, write KV, run the model, draw. Blocks until the tokens are known."""

    def refusal(self, params: SamplingParams) -> str | None:
        """Why this model cannot draw as `params` say (a grammar that cannot be enforced); None if it can."""

    def accepts(self, rules: DrawRules, token_ids: Sequence[int]) -> bool:
        """Whether the grammar of `rules` may end after these drawn tokens, of which no draw has told it."""

    def begin_profile(self) -> None:
        """Keep time from the next step on; takes a second or two for a look at the machine."""

    def end_profile(self) -> ExecutorProfile:
        """What was kept since `begin_profile`; takes as long again."""

    def sleep(self, level: int) -> None:
        """Give memory back: 1 drops KV blocks and moves weights to host memory, 2 drops both."""

    def wake_up(self) -> None:
        """Be ready again after `sleep`; the content of KV blocks is lost."""

    def shutdown(self) -> None:
        """Free weights and KV blocks. May be called twice."""
