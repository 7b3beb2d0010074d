"""StepTimes: how long a step of so many tokens takes, learnt from the steps that ran. No torch."""

from typing import Protocol

# A step is now and then slowed down by somebody else, never sped up: what is shorter than the mean counts
# more, and what is longer counts as twice the mean at most.
_SHORTER, _LONGER = 0.3, 0.05
_LARGEST_SURPRISE = 2.0
# Beyond so many steps a mean gets no surer.
_SURE = 20


class StepTimes(Protocol):
    """Seconds of a step by the number of its tokens."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in a step that ran."""

    def seconds(self, num_tokens: int) -> float | None:
        """How long a step of about so many tokens takes; None if none ran."""

    def more_s(self, num_tokens: int, most: int) -> float | None:
        """What each token more than `num_tokens` costs in steps of `most` at most; None if none ran."""


class MeasuredTimes:
    """Running means by size class, four classes to a doubling."""

    def __init__(self) -> None:
        # Size class -> mean number of tokens, mean seconds, steps.
        self._classes: dict[int, tuple[float, float, int]] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in a step that ran."""
        size = _size_class(num_tokens)
        mean_tokens, mean_seconds, count = self._classes.get(size, (num_tokens, seconds, 0))
        weight = _SHORTER if seconds < mean_seconds else _LONGER
        seconds = min(seconds, _LARGEST_SURPRISE * mean_seconds)
        self._classes[size] = (
            mean_tokens + weight * (num_tokens - mean_tokens),
            mean_seconds + weight * (seconds - mean_seconds),
            count + 1,
        )

    def seconds(self, num_tokens: int) -> float | None:
        """How long a step of about so many tokens takes; None if none ran."""
        found = self._classes.get(_size_class(num_tokens))
        return None if found is None else found[1]

    def more_s(self, num_tokens: int, most: int) -> float | None:
        """What each token more than `num_tokens` costs in steps of `most` at most; None if none ran.

        Of several sizes the surer and the larger count more.
        """
        base_s = self.seconds(num_tokens)
        if base_s is None:
            return None
        first, last = _size_class(num_tokens) + 1, _size_class(most)
        larger = [self._classes[size] for size in range(first, last + 1) if size in self._classes]
        tokens = sum(min(count, _SURE) * (mean - num_tokens) for mean, _, count in larger)
        seconds = sum(min(count, _SURE) * (mean_s - base_s) for _, mean_s, count in larger)
        return max(seconds, 0.0) / tokens if tokens > 0 else None


def _size_class(num_tokens: int) -> int:
    """0 to 7 are classes of their own; from there on every doubling has four."""
    shift = max(num_tokens.bit_length() - 3, 0)
    return shift * 4 + (num_tokens >> shift)
