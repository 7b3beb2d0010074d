"""BenchReport: what `bench` has measured, as numbers, as JSON and as a table with bars."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen.engine.messages import EngineProfile
from batchgen.quantities import counted

_BAR = 24  # characters of a bar for the whole time
_ABOVE = (
    "Above 100 %: the machine was faster than when it was measured, or weights stayed in the processor's "
    "cache, which is read faster than memory."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """One run of a workload. `print(report)` shows it.

    Args:
        model: its name.
        workload: in words.
        precision: of weights and KV cache, in words.
        num_requests, num_failed: handed over; refused or failed, and counted nowhere else.
        first_failure: which request failed first, and why.
        input_tokens, cached_tokens: of the prompts; of these, found in the prefix cache.
        output_tokens: generated.
        seconds: from the first request to the last output, without what measuring the machine took.
        profile: of the engine in that time.
        decisions: what the engine resolved, with reasons.
        environment: library versions, instruction set, threads.
    """

    model: str
    workload: str
    precision: str
    num_requests: int
    num_failed: int
    first_failure: str | None = None
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    profile: EngineProfile
    decisions: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def input_tokens_per_s(self) -> float:
        """Prompt tokens a second of the whole run, cached ones included."""
        return self.input_tokens / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens a second of the whole run."""
        return self.output_tokens / self.seconds

    @property
    def bound_s(self) -> float | None:
        """The least seconds that this workload takes on this machine; None where it has no known ceilings."""
        return sum(self.profile.bound_s.values()) if self.profile.bound_s else None

    @property
    def bound_share(self) -> float | None:
        """How much of what the machine allows was reached: `bound_s` over `seconds`.

        It is above 1 where the machine ran faster than in the moments when it was measured, or where weights
        that are counted as read from memory had stayed in the processor's cache.
        """
        return None if self.bound_s is None else self.bound_s / self.seconds

    def to_mapping(self) -> dict[str, Any]:
        """All numbers, as JSON types."""
        profile = self.profile
        return {
            "model": self.model,
            "workload": self.workload,
            "precision": self.precision,
            "num_requests": self.num_requests,
            "num_failed": self.num_failed,
            "first_failure": self.first_failure,
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "seconds": self.seconds,
            "input_tokens_per_s": self.input_tokens_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "num_steps": profile.num_steps,
            "bound_s": self.bound_s,
            "bound_share": self.bound_share,
            "ceilings_per_s": dict(profile.ceilings),
            "parts_s": dict(profile.seconds),
            "parts_bound_s": dict(profile.bound_s),
            "decisions": list(self.decisions),
            "environment": dict(self.environment),
        }

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", *self._table(), *self._foot()])

    def _head(self) -> list[str]:
        lines = [
            f"{self.model}: {self.workload}",
            self.precision,
            f"{self.output_tokens_per_s:,.1f} output tokens/s, {self.input_tokens_per_s:,.1f} input tokens/s "
            f"({self.output_tokens:,} and {self.input_tokens:,} in {self.seconds:.2f} s, "
            f"{counted(self.profile.num_steps, 'step')})",
        ]
        if self.cached_tokens:
            lines.append(f"{self.cached_tokens:,} of the input tokens came from the prefix cache")
        if self.num_failed:
            failed = f"{self.num_failed} of {counted(self.num_requests, 'request')}"
            lines.append(f"{failed} failed, not counted here; the first: {self.first_failure}")
        return lines

    def _table(self) -> list[str]:
        profile = self.profile
        lines = [f"{'part':<20} {'seconds':>8} {'share':>6} {'at least':>9} {'reached':>8}"]
        total = sum(profile.seconds.values())
        for name, seconds in sorted(profile.seconds.items(), key=lambda part: -part[1]):
            share = seconds / total if total else 0.0
            least = profile.bound_s.get(name)
            columns = "" if least is None else f"{least:9.2f} {_percent(least, seconds):7}%"
            bar = "█" * round(share * _BAR)
            lines.append(f"{name:<20} {seconds:8.2f} {100 * share:5.1f}% {columns:<18} {bar}".rstrip())
        least = self.bound_s
        columns = "" if least is None else f"{least:9.2f} {_percent(least, total):7}%"
        lines.append(f"{'in all':<20} {total:8.2f} {'':6} {columns}".rstrip())
        return lines

    def _foot(self) -> list[str]:
        ceilings = self.profile.ceilings
        if not ceilings:
            return ["", "This machine's ceilings are not measured here: the C kernels do not run."]
        # Any sum of parts that is above has a part that is.
        is_above = any(
            _percent(least, self.profile.seconds[name]) > 100 for name, least in self.profile.bound_s.items()
        )
        above = [_ABOVE] if is_above else []
        return [
            "",
            f"This machine did at most {ceilings['float_ops'] / 1e9:,.0f} float32 GFLOP/s and "
            f"{ceilings['int8_ops'] / 1e9:,.0f} int8 Gop/s, and read {ceilings['read_bytes'] / 1e9:.1f} "
            "GB/s (the mean of measurements before, during and after the run).",
            "'At least' is the time of a step's matrix products, or of reading the weights once, and of its "
            "attention, or of reading each KV block once, at these rates.",
            *above,
            "elementwise: norms, rotations, activations; scheduling: Python around the kernels; "
            "idle: between two steps.",
        ]


def _percent(part: float, whole: float) -> int:
    return round(100 * part / whole) if whole else 0
