"""Tally: the counts over rows that a summary, a sidecar and a progress line show."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.jobs.columns import OutputColumns
from batchgen.jobs.row import RowResult


@dataclass(slots=True)
class Tally:
    """Counts over finished rows.

    Args:
        rows: finished rows, failed ones included.
        failures: `error.code` -> rows.
        finish_reasons: reason -> samples.
    """

    rows: int = 0
    input_tokens: int = 0
    generated_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)

    @property
    def rows_failed(self) -> int:
        """Rows with an error."""
        return self.failures.total()

    def count(self, result: RowResult) -> None:
        """Add one row."""
        self.rows += 1
        self.input_tokens += result.num_input_tokens
        if result.failure is not None:
            self.failures[str(result.failure.code)] += 1
        for sample in result.samples:
            self.generated_tokens += sample.num_generated_tokens
            self.finish_reasons[sample.finish_reason] += 1
        if not result.samples:
            self.finish_reasons["error"] += 1

    def count_batch(self, batch: pa.RecordBatch, columns: OutputColumns) -> None:
        """Add rows read back from a file."""
        reasons = batch.column(columns.finish_reason)
        generated = batch.column(columns.num_generated_tokens)
        self.rows += batch.num_rows
        if columns.num_samples > 1:
            # A row without samples counts once, as in `count`.
            self.finish_reasons["error"] += generated.null_count
            reasons, generated = (
                pc.list_flatten(reasons.filter(generated.is_valid())),
                pc.list_flatten(generated),
            )
        self.input_tokens += pc.sum(batch.column(columns.num_input_tokens)).as_py() or 0
        self.generated_tokens += pc.sum(generated).as_py() or 0
        _add(self.finish_reasons, reasons)
        _add(self.failures, pc.struct_field(batch.column(columns.error), "code"))
        for counts in (self.failures, self.finish_reasons):
            counts += Counter()  # drops the zeros

    def add(self, other: "Tally") -> None:
        """Add another tally's counts."""
        self.rows += other.rows
        self.input_tokens += other.input_tokens
        self.generated_tokens += other.generated_tokens
        self.failures.update(other.failures)
        self.finish_reasons.update(other.finish_reasons)

    def to_mapping(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {
            "rows": self.rows,
            "input_tokens": self.input_tokens,
            "generated_tokens": self.generated_tokens,
            "failures": dict(sorted(self.failures.items())),
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
        }

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> "Tally":
        """The tally of `to_mapping`."""
        return cls(
            data["rows"],
            data["input_tokens"],
            data["generated_tokens"],
            Counter(data["failures"]),
            Counter(data["finish_reasons"]),
        )


def _add(counts: Counter[str], values: Any) -> None:
    for entry in values.drop_null().value_counts().to_pylist():
        counts[entry["values"]] += entry["counts"]
