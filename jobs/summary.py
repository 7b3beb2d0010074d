"""JobSummary: what became of a run, as numbers and as the lines that end it."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from batchgen.outputs import FinishReason
from batchgen.quantities import counted, duration

_EXIT_GOOD, _EXIT_ROWS_FAILED = 0, 3
# Above this share of samples that were cut off, max_tokens is probably too low.
_MUCH_CUT = 0.20
# Adapters that the last lines name.
_MOST_ADAPTERS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """What became of a run. Rows and tokens count all runs below this one's limit, `rows_now` this run alone.

    Args:
        output: the output folder.
        rows_total: rows of the job, or None when a run was stopped before that was known.
        failures: `error.code` -> rows.
        finish_reasons: reason -> samples.
        adapters: adapter -> rows of this run that it was used for.
        was_finished: there was nothing to do.
        stopped: exit code of an interrupted run, 128 and the signal's number; None when it ended by itself.
    """

    output: Path
    rows_total: int | None
    rows_done: int
    rows_failed: int
    rows_now: int
    failures: Mapping[str, int] = field(default_factory=dict)
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    adapters: Mapping[str, int] = field(default_factory=dict)
    input_tokens: int = 0
    generated_tokens: int = 0
    elapsed_s: float = 0.0
    was_finished: bool = False
    stopped: int | None = None

    @property
    def exit_code(self) -> int:
        """0 all rows good; 3 finished, some rows failed; 130 or 143 interrupted with progress saved."""
        if self.stopped is not None:
            return self.stopped
        return _EXIT_ROWS_FAILED if self.rows_failed else _EXIT_GOOD

    @property
    def rows_ok(self) -> int:
        """Rows without an error."""
        return self.rows_done - self.rows_failed

    def to_mapping(self) -> dict[str, Any]:
        """As plain JSON types, the exit code included."""
        return asdict(self) | {"output": str(self.output), "exit_code": self.exit_code}

    def lines(self) -> list[str]:
        """The end of a run, in words."""
        lines = [self._first_line()]
        if self.rows_failed:
            codes = ", ".join(f"{code} {count:,}" for code, count in sorted(self.failures.items()))
            lines.append(f"{counted(self.rows_failed, 'row')} failed ({codes}); the `error` column says why")
        if self.adapters:
            lines.append(f"adapters: {_used(self.adapters)}")
        reasons = self.finish_reasons
        samples = sum(reasons.values()) - reasons.get(FinishReason.ERROR, 0)
        cut = reasons.get(FinishReason.LENGTH, 0)
        if samples and cut / samples > _MUCH_CUT:
            lines.append(
                f"warning: {cut / samples:.0%} of the texts were cut off at their token limit (finish_reason "
                f"length); raise sampling.max_tokens, or engine.max_model_len where the context is full, if "
                f"they should be whole"
            )
        if self.stopped is not None:
            lines.append("run the same command again to go on")
        elif self.rows_done:
            lines.append(f"results: {self.output}")
            # A JSON string is a Python string, in quotes that the shell's own do not disturb.
            place = json.dumps(str(self.output), ensure_ascii=False)
            look = f"import datasets; print(datasets.load_from_disk({place})[0])"
            lines.append(f"see them: python -c {shlex.quote(look)}")
        return lines

    def _first_line(self) -> str:
        rows = counted(self.rows_done, "row")
        if self.rows_total is not None:
            rows = f"{self.rows_done:,} of {counted(self.rows_total, 'row')}"
        if self.rows_total == 0:
            return f"the input has no rows: {self.output} holds an empty dataset"
        if self.was_finished:
            return f"{rows} done before; there is nothing to do"
        took = f"{self.rows_now:,} of them in this run, {duration(self.elapsed_s)}"
        state = "stopped" if self.stopped is not None else "finished"
        return f"{state}: {rows} done ({took}), {self.generated_tokens:,} tokens generated"


def _used(adapters: Mapping[str, int]) -> str:
    """How many rows each adapter was used for, the most used first."""
    ranked = sorted(adapters.items(), key=lambda each: (-each[1], each[0]))
    shown = [f"{name} {counted(rows, 'row')}" for name, rows in ranked[:_MOST_ADAPTERS]]
    rest = len(ranked) - len(shown)
    return ", ".join(shown) + (f" and {rest:,} more adapters" if rest else "")
