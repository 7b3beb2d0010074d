"""CSV with a header line, as Python's csv module reads it; text columns unless `input.schema` says more."""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.errors import SourceError
from batchgen.jobs.sources.base import BATCH_BYTES, BATCH_ROWS, FORMATS, Chunk, FileFormat
from batchgen.jobs.sources.byte_lines import open_bytes
from batchgen.jobs.sources.json_cells import Misfit
from batchgen.outputs import FailureCode, RowFailure

# A quote that is never closed swallows the file; a cell of this length means that it was.
MAX_CELL_CHARS = 64 * 1024 * 1024
# Read as one more line after the last: within quotes that are still open it ends a cell.
_END = "\0end of file\0"
_Cells = list[str] | None
# Bytes that are no UTF-8, as the surrogateescape decoder shows them.
_UNDECODED = re.compile("[\udc80-\udcff]")


class CsvFormat(FileFormat):
    """See `FileFormat`. A record is a row, a blank line is none, one of another length is a failed row."""

    suffixes = (".csv",)
    is_typed = False
    is_json = False
    declares = True
    delimiter = ","

    def schema(self, path: Path, declared: Mapping[str, pa.DataType]) -> pa.Schema:
        """The header's columns: as declared, else text."""
        with self._records(path) as records:
            header = _header(records, path)
        return pa.schema([(name, declared.get(name, pa.string())) for name in header])

    def read(self, path: Path, schema: pa.Schema, start: int, *, is_projection: bool) -> Iterator[Chunk]:
        """Rows from `start` on; records before it are read and dropped, for a line may be inside a cell."""
        with self._records(path) as records:
            header = _header(records, path)
            for _ in range(start):
                next(records, None)
            batch = _Batch(start, header)
            for line, cells in records:
                batch.add(line, cells)
                if batch.is_full:
                    yield batch.finish(schema)
                    batch = _Batch(batch.row + len(batch.lines), header)
            if batch.lines:
                yield batch.finish(schema)

    @contextmanager
    def _records(self, path: Path) -> Iterator[Iterator[tuple[int, _Cells]]]:
        """The records that are not blank, each with the number of its last line.

        None, with the number of its first line, is one with a quote that is open at the end of the file.
        """
        # The limit belongs to the whole process; its default of 128 KiB would refuse long documents.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_CELL_CHARS))
        with open_bytes(path) as file:
            # newline="" leaves line ends to the csv module, which must see those inside of quotes unchanged.
            text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
            reader = csv.reader(chain(text, (_END,)), delimiter=self.delimiter)

            def records() -> Iterator[tuple[int, _Cells]]:
                begin = 1
                try:
                    for cells in reader:
                        if cells and cells[-1].endswith(_END):
                            if reader.line_num > begin:
                                yield begin, None
                            return
                        if cells:
                            yield reader.line_num, cells
                        begin = reader.line_num + 1
                except csv.Error as error:
                    raise SourceError(
                        f"{path}, line {reader.line_num}: {error}; is a closing quote missing before it?"
                    ) from None

            yield records()


def _header(records: Iterator[tuple[int, _Cells]], path: Path) -> list[str]:
    _, header = next(records, (0, []))
    if header is None:
        raise SourceError(f"{path}: a quote in its line of column names is never closed")
    if not header:
        raise SourceError(f"{path} is empty; a CSV file begins with a line of column names")
    for name in header:
        if _UNDECODED.search(name):
            raise SourceError(f"{path} is not UTF-8 (its column names); convert it with iconv")
    return header


class _Batch:
    """Records gathered for one chunk."""

    def __init__(self, row: int, header: list[str]):
        self.row = row
        self.lines: list[int] = []
        self._header = header
        self._cells: list[_Cells] = []
        self._failures: dict[int, RowFailure] = {}
        self._num_chars = 0

    @property
    def is_full(self) -> bool:
        return len(self.lines) >= BATCH_ROWS or self._num_chars >= BATCH_BYTES

    def add(self, line: int, cells: _Cells) -> None:
        """Take in a record."""
        if cells is None:
            self._fail(
                len(self.lines),
                FailureCode.SCHEMA_MISMATCH,
                f"line {line}: a quote that opens in this record is never closed; all lines after it, to the "
                f"end of the file, are inside the quotes",
            )
        elif len(cells) != len(self._header):
            self._fail(
                len(self.lines),
                FailureCode.SCHEMA_MISMATCH,
                f"line {line}: {len(cells)} cells where the header has {len(self._header)}",
            )
        self.lines.append(line)
        self._cells.append(cells)
        self._num_chars += sum(map(len, cells or ()))

    def finish(self, schema: pa.Schema) -> Chunk:
        """The chunk. A row with a bad cell is a failed row, all null."""
        positions = {name: position for position, name in enumerate(self._header)}
        wanted = [(field.name, field.type, positions[field.name]) for field in schema]
        for offset, cells in enumerate(self._cells):
            if offset not in self._failures:
                self._check(offset, cells or [], wanted)
        arrays = [self._column(position, kind) for _, kind, position in wanted]
        return Chunk(self.row, pa.RecordBatch.from_arrays(arrays, schema=schema), self._failures)

    def _check(self, offset: int, cells: list[str], wanted: list[tuple[str, Any, int]]) -> None:
        for name, kind, position in wanted:
            cell = cells[position]
            if not cell.isascii() and _UNDECODED.search(cell):
                message = f"line {self.lines[offset]}, column {name!r}: not UTF-8"
                self._fail(offset, FailureCode.INVALID_ENCODING, message)
            elif not _is_text(kind) and not _casts(cell, kind):
                message = f"line {self.lines[offset]}, {Misfit(cell, kind).describe(name)}"
                self._fail(offset, FailureCode.SCHEMA_MISMATCH, message)

    def _fail(self, offset: int, code: FailureCode, message: str) -> None:
        self._failures.setdefault(offset, RowFailure(code, message))

    def _column(self, position: int, kind: Any) -> Any:
        texts = [
            None if cells is None or offset in self._failures else cells[position]
            for offset, cells in enumerate(self._cells)
        ]
        if _is_text(kind):
            return pa.array(texts, kind)
        return pa.array([text or None for text in texts], pa.string()).cast(kind)


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _casts(cell: str, kind: Any) -> bool:
    """Whether a typed cell can be read; an empty one is null."""
    if not cell:
        return True
    try:
        pa.scalar(cell).cast(kind)
    except pa.ArrowException:
        return False
    return True


FORMATS.register("csv")(CsvFormat())
