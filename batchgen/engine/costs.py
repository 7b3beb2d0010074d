"""CostModel: what recomputing and swapping cost here, measured from the steps themselves."""

from typing import Protocol

from batchgen.engine.scheduler_output import SchedulerOutput, StepResult

# Until something is measured: a small model on a few cores, and memory copied at a modest rate.
_FIRST_TOKENS_PER_S = 1000.0
_FIRST_BYTES_PER_S = 4e9
# Steps with fewer tokens tell the cost of a step rather than that of a token.
_LEAST_TOKENS = 32
# Weight of the newest measurement.
_NEW = 0.2


class Costs(Protocol):
    """How long a preempted group's return takes, by either way."""

    def recompute_s(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens anew."""

    def swap_s(self, num_bytes: int) -> float:
        """Seconds to copy so many bytes between the device and the host."""

    def observe(self, step: SchedulerOutput, result: StepResult, seconds: float) -> None:
        """Be told how long a step took."""


class CostModel:
    """Rates, each a running mean of what steps showed.

    Attributes:
        tokens_per_s: prompt tokens computed in a second.
        bytes_per_s: bytes copied to or from host memory in a second.
    """

    def __init__(self, block_bytes: int):
        self.tokens_per_s = _FIRST_TOKENS_PER_S
        self.bytes_per_s = _FIRST_BYTES_PER_S
        self._block_bytes = block_bytes
        self._has_tokens = self._has_bytes = False

    def recompute_s(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens anew."""
        return num_tokens / self.tokens_per_s

    def swap_s(self, num_bytes: int) -> float:
        """Seconds to copy so many bytes between the device and the host."""
        return num_bytes / self.bytes_per_s

    def observe(self, step: SchedulerOutput, result: StepResult, seconds: float) -> None:
        """Learn from a step that took `seconds` in all."""
        num_bytes = (len(step.swap_in) + len(step.swap_out)) * self._block_bytes
        if num_bytes and result.swap_s > 0:
            rate = num_bytes / result.swap_s
            self.bytes_per_s = _mean(self.bytes_per_s, rate, self._has_bytes)
            self._has_bytes = True
        num_tokens = step.num_tokens
        # Mostly prompts: several tokens a sequence.
        if num_tokens >= max(_LEAST_TOKENS, 4 * step.num_sequences) and seconds > result.swap_s:
            rate = num_tokens / (seconds - result.swap_s)
            self.tokens_per_s = _mean(self.tokens_per_s, rate, self._has_tokens)
            self._has_tokens = True


def _mean(old: float, new: float, has_old: bool) -> float:
    return old + _NEW * (new - old) if has_old else new
