"""JSON lines, plain or compressed: one object a line; a bad line is a failed row, not the end of the job."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.errors import SourceError
from batchgen.jobs.sources.base import BATCH_BYTES, BATCH_ROWS, FORMATS, Chunk, FileFormat
from batchgen.jobs.sources.byte_lines import MAX_LINE_BYTES, Line, open_bytes, read_lines
from batchgen.jobs.sources.json_cells import Misfit, make_column, mend_surrogates
from batchgen.jobs.sources.json_shape import Shape, arrow_type, join_shapes, nulls_as_text, shape_of
from batchgen.outputs import FailureCode, RowFailure

# The schema is taken from so many lines at the head of each file.
SCHEMA_LINES = 10_000
# A line nested deeper is a failed row: what reads it later, templates too, goes down level by level.
MAX_DEPTH = 100
_KINDS = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


class JsonLinesFormat(FileFormat):
    """See `FileFormat`. Blank lines are no rows; messages count lines from 1 as an editor does."""

    suffixes = (".jsonl", ".ndjson", ".json")
    is_typed = False
    is_json = True
    declares = True

    def schema(self, path: Path, declared: Mapping[str, pa.DataType]) -> pa.Schema:
        """Declared columns as declared, others from the first lines; null where only nulls were seen."""
        shapes: dict[str, Shape] = dict.fromkeys(declared)
        with open_bytes(path) as file:
            for line in read_lines(file):
                if line.number > SCHEMA_LINES:
                    break
                if line.number == 1:
                    _refuse_array(path, line)
                row = _parse(line)
                if isinstance(row, _Record):
                    for name, value in row.values.items():
                        if name not in declared:
                            shapes[name] = join_shapes(shapes.get(name), shape_of(value))
        return pa.schema([(name, declared.get(name) or arrow_type(shape)) for name, shape in shapes.items()])

    def finish_schema(self, schema: pa.Schema) -> pa.Schema:
        """Columns in which no file has anything but nulls become string."""
        return pa.schema([field.with_type(nulls_as_text(field.type)) for field in schema])

    def read(self, path: Path, schema: pa.Schema, start: int, *, is_projection: bool) -> Iterator[Chunk]:
        """Rows from `start` on; lines before it are counted, not parsed."""
        with open_bytes(path) as file:
            rows = (line for line in read_lines(file) if line.is_too_long or not _is_blank(line.content))
            for _ in range(start):
                next(rows, None)
            batch = _Batch(start)
            for line in rows:
                batch.add(line)
                if batch.is_full:
                    yield batch.finish(schema, is_projection)
                    batch = _Batch(batch.row + len(batch.rows))
            if batch.rows:
                yield batch.finish(schema, is_projection)


def _is_blank(content: bytes) -> bool:
    return not content or content.isspace()


def _refuse_array(path: Path, line: Line) -> None:
    """A .json file that is one array over many lines holds no JSON lines."""
    if path.name.lower().endswith(".json") and line.content.lstrip().startswith(b"["):
        raise SourceError(f"{path} is one JSON array, not JSON lines; convert it: jq -c '.[]' {path.name}")


@dataclass(frozen=True, slots=True)
class _Record:
    """A good line."""

    values: dict[str, Any]
    is_mended: bool


def _parse(line: Line) -> _Record | RowFailure:
    """A line as a record, or why it is none."""
    if line.is_too_long:
        return RowFailure(
            FailureCode.INVALID_JSON, f"line {line.number} is longer than {MAX_LINE_BYTES} bytes"
        )
    try:
        text = line.content.decode()
    except UnicodeDecodeError as error:
        message = f"line {line.number} is not UTF-8 (byte {error.start + 1} of the line)"
        return RowFailure(FailureCode.INVALID_ENCODING, message)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        message = f"line {line.number} is not JSON: {error.msg}, at character {error.pos + 1}"
        return RowFailure(FailureCode.INVALID_JSON, message)
    except (ValueError, RecursionError) as error:
        return RowFailure(FailureCode.INVALID_JSON, f"line {line.number} cannot be read as JSON: {error}")
    if not isinstance(value, dict):
        message = f"line {line.number} is a JSON {_KINDS[type(value)]}, not an object"
        return RowFailure(FailureCode.NOT_AN_OBJECT, message)
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_too_deep(value):
        return RowFailure(FailureCode.INVALID_JSON, f"line {line.number} is nested deeper than {MAX_DEPTH}")
    # Bytes that are UTF-8 can hold a lone surrogate only as an escape.
    if "\\ud" in text or "\\uD" in text:
        mended = mend_surrogates(value)
        return _Record(mended, mended != value)
    return _Record(value, False)


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)


@dataclass(slots=True)
class _Batch:
    """Lines gathered for one chunk."""

    row: int
    rows: list[_Record | None] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    failures: dict[int, RowFailure] = field(default_factory=dict)
    warnings: dict[int, tuple[str, ...]] = field(default_factory=dict)
    num_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.rows) >= BATCH_ROWS or self.num_bytes >= BATCH_BYTES

    def add(self, line: Line) -> None:
        """Parse a line and take it in."""
        parsed = _parse(line)
        offset = len(self.rows)
        if isinstance(parsed, RowFailure):
            self.failures[offset] = parsed
            self.rows.append(None)
        else:
            self.rows.append(parsed)
            if parsed.is_mended:
                self.warnings[offset] = ("lone surrogates in the input were replaced by U+FFFD",)
        self.lines.append(line.number)
        self.num_bytes += len(line.content)

    def finish(self, schema: pa.Schema, is_projection: bool) -> Chunk:
        """The chunk. A row with a misfit anywhere is a failed row, all null."""
        if not is_projection:
            self._refuse_unknown(set(schema.names))
        columns, json_text = self._columns(schema)
        return Chunk(self.row, columns, self.failures, self.warnings, json_text)

    def _refuse_unknown(self, known: set[str]) -> None:
        for offset, record in enumerate(self.rows):
            if record is not None and not record.values.keys() <= known:
                for name, value in record.values.items():
                    if name not in known and value is not None:
                        self._misfit(name, offset, Misfit(value, None))

    def _columns(self, schema: pa.Schema) -> tuple[pa.RecordBatch, dict[str, frozenset[int]]]:
        while True:
            arrays, json_text = [], {}
            num_failures = len(self.failures)
            for column in schema:
                values = [
                    None if record is None or offset in self.failures else record.values.get(column.name)
                    for offset, record in enumerate(self.rows)
                ]
                text_rows: set[int] = set()
                refuse = partial(self._misfit, column.name)
                arrays.append(make_column(values, column.type, refuse, text_rows.add))
                if text_rows:
                    json_text[column.name] = frozenset(text_rows - self.failures.keys())
            # A misfit found in a later column empties its row in the earlier ones too.
            if len(self.failures) == num_failures:
                return pa.RecordBatch.from_arrays(arrays, schema=schema), json_text

    def _misfit(self, column: str, offset: int, misfit: Misfit) -> None:
        message = f"line {self.lines[offset]}, {misfit.describe(column)}"
        self.failures.setdefault(offset, RowFailure(FailureCode.SCHEMA_MISMATCH, message))


FORMATS.register("jsonl", "json")(JsonLinesFormat())
