"""Source and FileFormat: what an input is to the rest of a job, and what one file format must do."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from batchgen.jobs.row import RowPosition, SourceBatch
from batchgen.jobs.sources.identity import SourceFile
from batchgen.outputs import RowFailure
from batchgen.registry import Registry

# A batch ends at whichever of the two comes first, so that memory is bounded for short and for long rows.
BATCH_ROWS = 1024
BATCH_BYTES = 4 * 1024 * 1024


class Source(Protocol):
    """The rows of a job's input, in a fixed order.

    Args:
        files: the files (or the one dataset) in order; a row is (file ordinal, row in that file).
        schema: the pass-through columns as they will be written.
        num_rows: rows in all, where that is known without reading everything.
        is_typed: whether the input declares its types, as Parquet does; JSON lines' and CSV's are guessed.
        remarks: what the user should know before the job starts.
    """

    files: tuple[SourceFile, ...]
    schema: pa.Schema
    num_rows: int | None
    is_typed: bool
    remarks: tuple[str, ...]

    def batches(self, start: RowPosition) -> Iterator[SourceBatch]:
        """All rows from `start` on, in order; getting there is cheap.

        Raises:
            SourceError: a file cannot be read any more, or is damaged.
        """
        ...

    def identity(self) -> dict[str, Any]:
        """What fixes the rows, as JSON types: files with sizes and hashes, schema, options."""
        ...

    def verify(self, stored: Mapping[str, Any]) -> None:
        """Check that this is the input that a first run's `identity` describes.

        Raises:
            ResumeError: names the file that is missing, changed or new, or the option that differs.
        """
        ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one file, under its own column names; the other fields as in `SourceBatch`."""

    row: int
    columns: pa.RecordBatch
    failures: Mapping[int, RowFailure] = field(default_factory=dict)
    warnings: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    json_text: Mapping[str, frozenset[int]] = field(default_factory=dict)


class FileFormat(ABC):
    """One file format. Stateless; entered in `FORMATS` under its name.

    Args:
        suffixes: endings of file names, without that of a compression.
        is_typed: whether files declare their types.
        is_json: whether several files join as JSON does: a column may be missing, numbers are of one kind.
        declares: whether `input.schema` may say a column's type.
    """

    suffixes: ClassVar[tuple[str, ...]]
    is_typed: ClassVar[bool]
    is_json: ClassVar[bool]
    declares: ClassVar[bool]

    @abstractmethod
    def schema(self, path: Path, declared: Mapping[str, pa.DataType]) -> pa.Schema:
        """The file's columns. Of a file whose types are guessed, declared ones are taken as they are."""

    def finish_schema(self, schema: pa.Schema) -> pa.Schema:
        """The joined schema of all files, with types settled that a single file leaves open."""
        return schema

    def num_rows(self, path: Path) -> int | None:
        """Rows in the file, when known without reading it."""
        return None

    @abstractmethod
    def read(self, path: Path, schema: pa.Schema, start: int, *, is_projection: bool) -> Iterator[Chunk]:
        """The rows from number `start` on; columns of `schema`, of its types or ones that cast to them.

        Args:
            path: the file.
            schema: the columns to read.
            start: the first row.
            is_projection: whether other columns may be left out in silence.
        """


FORMATS: Registry[FileFormat] = Registry("input format", "batchgen.jobs.sources")
