"""StepTimes: how long a step of so many tokens takes, learnt from the steps that ran. No torch."""

from bisect import bisect_left
from typing import Protocol

# An average of the last ten or so, in which one slow step counts as twice the average at most.
_WEIGHT = 0.1
_LARGEST_SURPRISE = 2.0


class StepTimes(Protocol):
    """Seconds of a step by the number of its tokens."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in a step that ran."""

    def seconds(self, num_tokens: int) -> float:
        """How long a step of so many tokens takes."""

    def is_known(self, least: int, most: int) -> bool:
        """Whether a step of `least` to `most` tokens ran."""


class MeasuredTimes:
    """Averages by size class, four classes to a doubling, and straight lines between them.

    Below the smallest size that ran a step takes as long as that one; above the largest, its share more.
    """

    def __init__(self) -> None:
        # Size class -> average number of tokens, average seconds, steps.
        self._classes: dict[int, tuple[float, float, int]] = {}
        self._points: list[tuple[float, float]] | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in a step that ran."""
        size = _size_class(num_tokens)
        mean_tokens, mean_seconds, count = self._classes.get(size, (0.0, 0.0, 0))
        if count > 2:
            seconds = min(seconds, _LARGEST_SURPRISE * mean_seconds)
        weight = max(_WEIGHT, 1.0 / (count + 1))
        self._classes[size] = (
            mean_tokens + weight * (num_tokens - mean_tokens),
            mean_seconds + weight * (seconds - mean_seconds),
            count + 1,
        )
        self._points = None

    def seconds(self, num_tokens: int) -> float:
        """How long a step of so many tokens takes; some step has run."""
        if self._points is None:
            self._points = sorted((tokens, seconds) for tokens, seconds, _ in self._classes.values())
        points = self._points
        place = bisect_left(points, (num_tokens, 0.0))
        if place == len(points):
            return points[-1][1] * max(num_tokens / points[-1][0], 1.0)
        right_tokens, right_s = points[place]
        if place == 0:
            return right_s
        left_tokens, left_s = points[place - 1]
        return left_s + (right_s - left_s) * (num_tokens - left_tokens) / (right_tokens - left_tokens)

    def is_known(self, least: int, most: int) -> bool:
        """Whether a step of `least` to `most` tokens, roughly, ran."""
        first, last = _size_class(least), _size_class(most)
        return any(first <= size <= last for size in self._classes)


def _size_class(num_tokens: int) -> int:
    """0 to 7 are classes of their own; from there on every doubling has four."""
    shift = max(num_tokens.bit_length() - 3, 0)
    return shift * 4 + (num_tokens >> shift)
