"""RowReader: the rows of a source that are not done."""

from collections.abc import Iterator
from itertools import chain

from batchgen.jobs.row import SourceBatch
from batchgen.jobs.sources import Source
from batchgen.jobs.store import ShardStore


class RowReader:
    """The rows that are not done, batch by batch.

    Args:
        source: the input.
        store: knows what is done.
        limit: rows from this number on are left alone.

    Attributes:
        num_rows: rows in the whole source, once reading came to its end.
        rows_total: rows of the source that are wanted, once reading came to its end or to the limit.
    """

    def __init__(self, source: Source, store: ShardStore, limit: int | None = None):
        self._source, self._store, self._limit = source, store, limit
        self._gaps = list(store.gaps())
        self._batches: Iterator[tuple[SourceBatch, list[int]]] = self._read()
        self.num_rows: int | None = None
        self.rows_total: int | None = None

    def peek(self) -> bool:
        """Whether there is any row to do. Reads up to the first."""
        first = next(self._batches, None)
        if first is not None:
            self._batches = chain((first,), self._batches)
        return first is not None

    def __iter__(self) -> Iterator[tuple[SourceBatch, list[int]]]:
        """Batches with the offsets of their undone rows; once."""
        return self._batches

    def _read(self) -> Iterator[tuple[SourceBatch, list[int]]]:
        for gap in self._gaps:
            stop = min((row for row in (gap.stop_row, self._limit) if row is not None), default=None)
            index = gap.start.index
            self._reach(index)
            if stop is not None and index >= stop:
                continue
            for batch in self._source.batches(gap.start):
                index = batch.start.index
                count = len(batch) if stop is None else min(len(batch), stop - index)
                offsets = self._store.undone(index, count).tolist()
                self._reach(index + len(batch))
                if offsets:
                    yield batch, offsets
                index += len(batch)
                if stop is not None and index >= stop:
                    break
            else:
                if gap.stop_row is None:
                    self.num_rows = self.rows_total = index

    def _reach(self, index: int) -> None:
        """The source has so many rows at least."""
        if self._limit is not None and index >= self._limit:
            self.rows_total = self._limit
