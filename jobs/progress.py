"""ProgressState: the numbers of a running job, and the words for them that every display shares."""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self, TextIO

from batchgen.quantities import counted, duration

# Rates that are shown are means over the last so many seconds.
RATE_SPAN_S = 20.0
# What is to come is judged by more, for rows finish in bursts.
ETA_SPAN_S = 180.0
_LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressState:
    """A job at one moment.

    Args:
        phase: "loading", "running", "paused", "draining" or "finished".
        rows_total: rows that the job is to do, or None while that is not known.
        rows_done: rows with a result, those of earlier runs and failed ones included.
        rows_before: those of `rows_done` that earlier runs did.
        generated_tokens, prompt_tokens: of this run.
        generated_tokens_per_s, prompt_tokens_per_s, rows_per_s: over the last seconds; None before there is
            anything to tell.
        kv_usage: fraction of the KV blocks in use, 0 to 1.
        eta_s: seconds to go, or None while too few rows have finished to tell.
    """

    phase: str
    rows_total: int | None = None
    rows_done: int = 0
    rows_failed: int = 0
    rows_before: int = 0
    elapsed_s: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    generated_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    rows_per_s: float | None = None
    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 0
    num_preemptions: int = 0
    kv_usage: float = 0.0
    prefix_cache_hit_rate: float | None = None
    eta_s: float | None = None

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Self:
        """The state that an `interval` event holds, among other things."""
        names = {spec.name for spec in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names})

    def numbers(self) -> dict[str, str]:
        """Everything beside the rows, as words; what is not known is left out.

        The most wanted come first: a narrow display shows only these. While nobody can tell the time to go,
        the speed of the prompts shows that work is going on.
        """
        kv = f"{self.kv_usage:.1%}" if 0 < self.kv_usage < 0.1 else f"{self.kv_usage:.0%}"
        shown = {"tok/s": _rate(self.generated_tokens_per_s)}
        if self.eta_s is None:
            shown["prompt tok/s"] = _rate(self.prompt_tokens_per_s)
        shown["eta"] = duration(self.eta_s)
        if self.rows_failed:
            shown["failed"] = f"{self.rows_failed:,}"
        shown["kv"] = kv
        return {name: text for name, text in shown.items() if text}

    def line(self) -> str:
        """One line of text, without end."""
        if self.phase == "loading":
            return "starting the engine"
        if self.rows_total is None:
            rows = counted(self.rows_done, "row")
        else:
            rows = f"{self.rows_done:,}/{counted(self.rows_total, 'row')}"
        return f"{self.phase}: {rows}, {self.words()}"

    def words(self) -> str:
        """`numbers` in one text."""
        return ", ".join(f"{name} {text}" for name, text in self.numbers().items())


def _rate(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


@dataclass(slots=True)
class RateMeter:
    """Means of counters over the last seconds.

    Args:
        clock: seconds that never go back.
        span_s: how far back.
    """

    clock: Callable[[], float] = time.monotonic
    span_s: float = RATE_SPAN_S
    _points: deque[tuple[float, tuple[int, ...]]] = field(default_factory=deque)

    def add(self, *counters: int) -> None:
        """Note the counters as they are now."""
        now = self.clock()
        self._points.append((now, counters))
        while len(self._points) > 2 and now - self._points[1][0] > self.span_s:
            self._points.popleft()

    def rates(self) -> tuple[float | None, ...]:
        """Each counter's increase a second; None before half a second has passed."""
        (then, first), (now, last) = self._points[0], self._points[-1]
        if now - then < 0.5:
            return (None,) * len(last)
        return tuple((b - a) / (now - then) for a, b in zip(first, last, strict=True))


class Reporter(Protocol):
    """Who shows a job to its user. Called from the thread that runs the job."""

    def say(self, line: str) -> None:
        """Show a line that stays: a decision, a warning, what became of something."""

    def show(self, state: ProgressState) -> None:
        """Show the state of this moment, a few times a second."""

    def close(self) -> None:
        """The job is over; whatever is drawn stays as it is."""


class LineReporter:
    """Plain lines on a stream, one with the progress every ten seconds: for log files and scripts.

    Args:
        stream: where; by default stderr.
        quiet: show nothing.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False):
        self._stream, self._quiet = stream or sys.stderr, quiet
        self._last = -_LINE_EVERY_S
        self._phase = ""

    def say(self, line: str) -> None:
        """Write the line."""
        if not self._quiet:
            print(line, file=self._stream, flush=True)

    def show(self, state: ProgressState) -> None:
        """Write a line when the phase changed or ten seconds have passed."""
        now = time.monotonic()
        if state.phase == self._phase and now - self._last < _LINE_EVERY_S:
            return
        self._phase, self._last = state.phase, now
        self.say(state.line())

    def close(self) -> None:
        """Nothing to do."""
