"""Parquet files: row groups streamed, only the wanted columns, rows skipped by whole row groups."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import SourceError
from batchgen.jobs.sources.base import BATCH_BYTES, BATCH_ROWS, FORMATS, Chunk, FileFormat

# With a buffer and no pre-buffering, columns are decoded page by page: memory does not grow with row groups.
_BUFFER_BYTES = 1024 * 1024


class ParquetFormat(FileFormat):
    """See `FileFormat`."""

    suffixes = (".parquet", ".pq", ".parq")
    is_typed = True
    is_json = False
    declares = False

    def schema(self, path: Path, declared: Mapping[str, pa.DataType]) -> pa.Schema:
        """The columns as the file declares them."""
        with _open(path) as file:
            return file.schema_arrow

    def num_rows(self, path: Path) -> int:
        """Rows, from the file's footer."""
        with _open(path) as file:
            return int(file.metadata.num_rows)

    def read(self, path: Path, schema: pa.Schema, start: int, *, is_projection: bool) -> Iterator[Chunk]:
        """Rows from `start` on; row groups before it are not read."""
        with _open(path) as file:
            groups, skip = _groups_from(file.metadata, start)
            if not groups:
                return
            row = start - skip
            # A column name with a dot would be taken for a path into a struct; then all columns are read.
            columns = None if any("." in name for name in file.schema_arrow.names) else schema.names
            batches = file.iter_batches(_batch_rows(file.metadata), groups, columns, use_threads=False)
            while True:
                try:
                    batch = next(batches, None)
                except (pa.ArrowException, OSError) as error:
                    raise SourceError(f"{path} cannot be read after row {row}: {error}") from None
                if batch is None:
                    return
                taken = min(skip, batch.num_rows)
                skip -= taken
                yield Chunk(row + taken, batch.slice(taken))
                row += batch.num_rows


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path} is not a readable Parquet file: {error}") from None


def _groups_from(metadata: pq.FileMetaData, start: int) -> tuple[list[int], int]:
    """The row groups from the one that holds row `start` on, and how many of their rows come before it."""
    first, skip = 0, start
    while first < metadata.num_row_groups and skip >= metadata.row_group(first).num_rows:
        skip -= metadata.row_group(first).num_rows
        first += 1
    return list(range(first, metadata.num_row_groups)), skip


def _batch_rows(metadata: pq.FileMetaData) -> int:
    num_bytes = sum(int(metadata.row_group(i).total_byte_size) for i in range(metadata.num_row_groups))
    return max(1, min(BATCH_ROWS, BATCH_BYTES * int(metadata.num_rows) // max(1, num_bytes)))


FORMATS.register("parquet")(ParquetFormat())
