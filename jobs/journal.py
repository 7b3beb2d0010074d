"""Journal: segments of finished rows, published whole by one rename each, checked by content when read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchgen.jobs.atomic import Disk, sha256_of
from batchgen.jobs.columns import OutputColumns
from batchgen.jobs.layout import OutputFolder
from batchgen.jobs.tally import Tally


@dataclass(frozen=True, slots=True)
class Segment:
    """A committed segment; its rows are sorted by row index and come from any shards."""

    number: int
    num_rows: int
    path: Path


class Journal:
    """The segments of an output folder.

    A row may stand in several segments after a repair; the first committed copy counts.

    Args:
        folder: where.
        disk: the hand that writes.
        row_index: name of the column with the row's number.
    """

    def __init__(self, folder: OutputFolder, disk: Disk, row_index: str):
        self._folder, self._disk, self._row_index = folder, disk, row_index
        self._next = 1

    def load(self) -> tuple[list[Segment], list[Path]]:
        """The segments that match their checksum, in the order of their commits; and the damaged ones."""
        good, damaged = [], []
        for number, num_rows, sha256, path in self._folder.segment_files():
            self._next = max(self._next, number + 1)
            if sha256_of(path) == sha256:
                good.append(Segment(number, num_rows, path))
            else:
                damaged.append(path)
        return good, damaged

    def commit(self, batch: pa.RecordBatch) -> Segment:
        """Publish finished rows. When this returns they survive anything but the loss of the disk.

        Args:
            batch: rows of the output schema, sorted by row index.
        """
        number = self._next
        self._next += 1
        temporary = self._folder.scratch / f"{number:08d}.segment.tmp"
        with self._disk.create(temporary) as file, pa.ipc.new_stream(file.stream, batch.schema) as writer:
            writer.write_batch(batch)
        final = self._folder.segment(number, batch.num_rows, file.sha256)
        self._disk.publish(temporary, final)
        return Segment(number, batch.num_rows, final)

    def remove(self, segment: Segment) -> None:
        """Drop a segment whose rows are all sealed."""
        self._disk.remove(segment.path)

    def read(
        self, segments: Sequence[Segment], start: int, stop: int, batch_rows: int
    ) -> Iterator[list[pa.RecordBatch]]:
        """For each `batch_rows` row numbers from `start` to `stop`: these rows, segment by segment."""
        readers = [SegmentReader(segment, self._row_index) for segment in segments]
        for first in range(start, stop, batch_rows):
            last = min(first + batch_rows, stop)
            yield [piece for reader in readers for piece in reader.rows(first, last)]

    def tally(self, segments: Sequence[Segment], start: int, stop: int, columns: OutputColumns) -> Tally:
        """Counts over the rows `start` to `stop` - 1 that are there; of copies of a row one counts."""
        tally, seen = Tally(), np.array([], np.int64)
        for reader in (SegmentReader(segment, self._row_index) for segment in segments):
            for batch in reader.rows(start, stop):
                rows = batch.column(self._row_index).to_numpy()
                is_new = ~np.isin(rows, seen)
                tally.count_batch(batch.select(columns.counted).filter(pa.array(is_new)), columns)
                seen = np.concatenate((seen, rows[is_new]))
        return tally


class SegmentReader:
    """A segment mapped into memory; holds no file descriptor.

    Attributes:
        table: all its rows.
        indices: their row numbers, ascending: int64 [rows].
    """

    def __init__(self, segment: Segment, row_index: str):
        # What is mapped stays mapped while the table lives, also after the file is closed or removed.
        with pa.memory_map(str(segment.path)) as file:
            self.table = pa.ipc.open_stream(file).read_all()
        self.indices = self.table.column(row_index).to_numpy()

    def rows(self, start: int, stop: int) -> list[pa.RecordBatch]:
        """The rows with these numbers, as batches that still point into the file."""
        low, high = np.searchsorted(self.indices, (start, stop))
        pieces: list[pa.RecordBatch] = self.table.slice(low, high - low).to_batches() if high > low else []
        return pieces
