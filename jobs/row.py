"""The records that pass between source, window, engine and store: SourceBatch, Row, RowResult."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from batchgen.logprobs import FlatLogprobs
from batchgen.outputs import RowFailure


@dataclass(frozen=True, slots=True)
class RowPosition:
    """Where a row stands: ordinal of its file in the stored list, row in that file, and its `row_index`."""

    file: int
    row: int
    index: int


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """Consecutive rows of one file.

    Args:
        start: position of the batch's first row.
        columns: the pass-through columns, in the source's declared schema. A row that could not be read is
            there, all null.
        failures: offset in the batch -> why that row could not be read.
        warnings: offset in the batch -> what was mended in that row, for its `warnings` column.
        json_text: column -> offsets of the rows whose value there was no text and is kept as JSON text.
    """

    start: RowPosition
    columns: pa.RecordBatch
    failures: Mapping[int, RowFailure] = field(default_factory=dict)
    warnings: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    json_text: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.columns.num_rows)


@dataclass(frozen=True, slots=True)
class Row:
    """One row in flight: its batch and its offset there."""

    batch: SourceBatch
    offset: int

    @property
    def index(self) -> int:
        """The row's number in the whole input."""
        return self.batch.start.index + self.offset

    @property
    def file(self) -> int:
        """Ordinal of the row's file."""
        return self.batch.start.file

    @property
    def row(self) -> int:
        """The row's number in its file."""
        return self.batch.start.row + self.offset

    def values(self) -> dict[str, Any]:
        """The row's columns as Python values, for templates."""
        names = self.batch.columns.schema.names
        return {name: self.batch.columns.column(i)[self.offset].as_py() for i, name in enumerate(names)}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row ready for the engine: rendered, tokenized, within limits."""

    row: Row
    text: str | None
    token_ids: list[int]
    seed: int
    warnings: tuple[str, ...] = ()
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One generated text of a row; log probabilities and its grammar's word when they were asked for."""

    text: str
    finish_reason: str
    num_generated_tokens: int
    logprobs: FlatLogprobs | None = None
    valid: bool | None = None


@dataclass(frozen=True, slots=True)
class RowResult:
    """What is stored for a row: samples (none when it failed before the engine), or a failure, or both."""

    row: Row
    samples: tuple[Sample, ...] = ()
    num_input_tokens: int = 0
    failure: RowFailure | None = None
    warnings: tuple[str, ...] = ()
    prompt_logprobs: FlatLogprobs | None = None
