"""Plain text, one row a line, in the column `text`."""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import pyarrow as pa

from batchgen.jobs.sources.base import BATCH_BYTES, BATCH_ROWS, FORMATS, Chunk, FileFormat
from batchgen.jobs.sources.byte_lines import MAX_LINE_BYTES, Line, open_bytes, read_lines
from batchgen.outputs import FailureCode, RowFailure

_SCHEMA = pa.schema([("text", pa.string())])


class TextFormat(FileFormat):
    """See `FileFormat`. A carriage return before a line feed ends the line with it; a blank line is a row."""

    suffixes = (".txt",)
    is_typed = True
    is_json = False
    declares = False

    def schema(self, path: Path, declared: Mapping[str, pa.DataType]) -> pa.Schema:
        """One column of text."""
        return _SCHEMA

    def read(self, path: Path, schema: pa.Schema, start: int, *, is_projection: bool) -> Iterator[Chunk]:
        """Rows from `start` on."""
        with open_bytes(path) as file:
            lines = islice(read_lines(file), start, None)
            row = start
            while batch := _take(lines):
                failures: dict[int, RowFailure] = {}
                texts = [_decode(line, offset, failures) for offset, line in enumerate(batch)]
                columns = pa.RecordBatch.from_arrays([pa.array(texts, pa.string())], schema=schema)
                yield Chunk(row, columns, failures)
                row += len(batch)


def _take(lines: Iterator[Line]) -> list[Line]:
    batch: list[Line] = []
    num_bytes = 0
    while len(batch) < BATCH_ROWS and num_bytes < BATCH_BYTES and (line := next(lines, None)) is not None:
        batch.append(line)
        num_bytes += len(line.content)
    return batch


def _decode(line: Line, offset: int, failures: dict[int, RowFailure]) -> str | None:
    if line.is_too_long:
        message = f"line {line.number} is longer than {MAX_LINE_BYTES} bytes"
        failures[offset] = RowFailure(FailureCode.INVALID_ENCODING, message)
        return None
    try:
        return line.content.removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        message = f"line {line.number} is not UTF-8 (byte {error.start + 1} of the line)"
        failures[offset] = RowFailure(FailureCode.INVALID_ENCODING, message)
        return None


FORMATS.register("text")(TextFormat())
