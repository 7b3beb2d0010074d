"""Arrow IPC files and streams, memory-mapped, cut into bounded batches."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from batchgen.errors import SourceError
from batchgen.jobs.sources.base import BATCH_BYTES, BATCH_ROWS, FORMATS, Chunk, FileFormat

_FILE_MAGIC = b"ARROW1"


class ArrowFormat(FileFormat):
    """See `FileFormat`. Which of the two layouts a file has is seen from its first bytes."""

    suffixes = (".arrow", ".ipc", ".feather", ".arrows")
    is_typed = True
    is_json = False
    declares = False

    def schema(self, path: Path, declared: Mapping[str, pa.DataType]) -> pa.Schema:
        """The columns as the file declares them."""
        with _reader(path) as reader:
            return reader.schema

    def num_rows(self, path: Path) -> int:
        """Rows, from the headers of the batches; their data stays on disk unless it is compressed."""
        with _reader(path) as reader:
            return sum(int(batch.num_rows) for batch in _batches(reader, path))

    def read(self, path: Path, schema: pa.Schema, start: int, *, is_projection: bool) -> Iterator[Chunk]:
        """Rows from `start` on."""
        row = 0
        with _reader(path) as reader:
            for batch in _batches(reader, path):
                step = _batch_rows(batch)
                for begin in range(max(0, start - row), batch.num_rows, step):
                    yield Chunk(row + begin, batch.slice(begin, step).select(schema.names))
                row += batch.num_rows


@contextmanager
def _reader(path: Path) -> Iterator[pa.RecordBatchFileReader | pa.RecordBatchStreamReader]:
    try:
        with pa.memory_map(str(path)) as file:
            is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            file.seek(0)
            with pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file) as reader:
                yield reader
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path} is not a readable Arrow file: {error}") from None


def _batches(
    reader: pa.RecordBatchFileReader | pa.RecordBatchStreamReader, path: Path
) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.RecordBatchFileReader):
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from reader


def _batch_rows(batch: pa.RecordBatch) -> int:
    return max(1, min(BATCH_ROWS, BATCH_BYTES * int(batch.num_rows) // max(1, int(batch.nbytes))))


FORMATS.register("arrow")(ArrowFormat())
