"""ShardStore: finished rows go in, segments and sealed shards come out; what is done is read from disk."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchgen.jobs.atomic import Disk
from batchgen.jobs.columns import OutputColumns
from batchgen.jobs.dataset_files import write_dataset_files
from batchgen.jobs.journal import Journal, Segment, SegmentReader
from batchgen.jobs.layout import OutputFolder
from batchgen.jobs.open_shard import OpenShard
from batchgen.jobs.row import RowPosition, RowResult
from batchgen.jobs.shard_plan import ShardPlan, ShardRange
from batchgen.jobs.shards import BATCH_ROWS, ShardFolder, Sidecar
from batchgen.jobs.tally import Tally
from batchgen.quantities import counted

# A commit comes early when so much is waiting for it: what a kill may cost, and memory, stay bounded.
_MAX_PENDING_ROWS = 8192
_MAX_PENDING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Gap:
    """Rows that no sealed shard holds: from a position to a row number (None: to the end of the source)."""

    start: RowPosition
    stop_row: int | None


class ShardStore:
    """The rows of one output folder. One thread uses it; another may ask for `undone` rows that it reads.

    Opening it reads what is on disk: sealed shards by their sidecars, the rest from the journal. Damaged
    files are reported, put aside, and their rows count as not done. Rows of sealed shards cost no memory.

    Args:
        folder: where; its folders exist and its lock is held.
        columns: what a row is made of.
        shard_rows: rows in a whole shard, as fixed by the first run.
        disk: the hand that writes.
        say: called with a line for the user.

    Raises:
        SinkError: something cannot be written. What was committed is kept.
    """

    def __init__(
        self,
        folder: OutputFolder,
        columns: OutputColumns,
        shard_rows: int,
        *,
        disk: Disk | None = None,
        say: Callable[[str], None] = lambda line: None,
    ):
        self._folder, self._columns, self._say = folder, columns, say
        self._disk = disk or Disk()
        self._journal = Journal(folder, self._disk, columns.row_index)
        self._shards = ShardFolder(folder, self._disk, columns)
        self._sealed: dict[int, Sidecar] = {}
        self._open: dict[int, OpenShard] = {}
        self._live: dict[Segment, set[int]] = {}
        self._pending: list[RowResult] = []
        self._pending_bytes = 0
        self._pending_batches: set[int] = set()
        self._end: int | None = None
        self.tally = Tally()
        self._load(shard_rows)

    @property
    def num_sealed(self) -> int:
        """Shards that are final."""
        return len(self._sealed)

    @property
    def num_pending(self) -> int:
        """Rows appended and not committed."""
        return len(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether so much is pending that it should be committed now."""
        return len(self._pending) >= _MAX_PENDING_ROWS or self._pending_bytes >= _MAX_PENDING_BYTES

    def undone(self, first_row: int, count: int) -> Any:
        """Which of `count` rows from `first_row` on are neither committed nor pending.

        Returns: their offsets from `first_row`: int64 [undone rows].
        """
        rows = np.arange(first_row, first_row + count)
        kept = [self._undone_in(shard, part) for shard, part in self._by_shard(rows)]
        return np.concatenate(kept) - first_row if kept else rows

    def gaps(self) -> Iterator[Gap]:
        """The stretches of rows that no shard sealed at this moment holds, in order."""
        start = RowPosition(file=0, row=0, index=0)
        for sidecar in sorted(self._sealed.values(), key=lambda sealed: sealed.first_row):
            if sidecar.first_row > start.index:
                yield Gap(start, sidecar.first_row)
            start = sidecar.end
        yield Gap(start, None)

    def count_done_before(self, row: int) -> int:
        """How many of the rows 0 to `row` - 1 are done."""
        sealed = (min(shard.range.stop_row, row) - shard.first_row for shard in self._sealed.values())
        opened = (shard.num_done_before(row) for shard in self._open.values())
        return sum(max(0, count) for count in sealed) + sum(opened)

    def tally_before(self, row: int) -> Tally:
        """Counts over the rows 0 to `row` - 1, all committed. Files are read where rows beyond are done."""
        if self.count_done_before(row) == self.tally.rows:
            return self.tally
        tally = Tally()
        for sidecar in self._sealed.values():
            tally.add(self._shards.tally_before(sidecar, row))
        for opened in self._open.values():
            stop = min(opened.range.stop_row, row)
            tally.add(self._journal.tally(opened.segments, opened.range.first_row, stop, self._columns))
        return tally

    def append(self, result: RowResult) -> None:
        """Take a finished row; the next commit makes it last."""
        self._mark_row(result.row.index)
        self.tally.count(result)
        self._pending.append(result)
        self._pending_bytes += sum(len(sample.text) for sample in result.samples)
        # One row keeps its whole batch, and with it columns that no prompt uses.
        batch = result.row.batch
        if id(batch) not in self._pending_batches:
            self._pending_batches.add(id(batch))
            self._pending_bytes += batch.columns.nbytes

    def end_at(self, num_rows: int) -> None:
        """There are no rows from this number on: the last row's shard is complete without more.

        If rows beyond are done (a limit below what an earlier run reached) no shard is ended short: its rows
        stay in the journal until it is whole. An input without rows gets one shard without rows.
        """
        reached = [shard.range.stop_row for shard in self._sealed.values()]
        reached += [shard.reached for shard in self._open.values()]
        self._end = num_rows if max(reached, default=0) <= num_rows else None
        if self._end == 0 and not self._sealed:
            self._open[0] = OpenShard.empty(ShardRange(0, 0, 0))

    def commit(self) -> None:
        """Make the pending rows last, then seal every shard that has become complete."""
        if self._pending:
            self._pending.sort(key=lambda result: result.row.index)
            batch = self._columns.batch(self._pending)
            segment = self._journal.commit(batch)
            self._enter(segment, batch.column(self._columns.row_index).to_numpy())
            self._pending.clear()
            self._pending_bytes = 0
            self._pending_batches.clear()
        self._seal_complete()

    def _load(self, shard_rows: int) -> None:
        for path in self._folder.scratch_files():
            self._disk.remove(path)
        found = self._shards.find()
        self._generations = found.next_generation
        self._plan = ShardPlan(shard_rows, found.described)
        self._sealed = found.sealed
        for shard, path in sorted(found.damaged.items()):
            aside = self._folder.damaged / f"{path.name}.{found.next_generation.get(shard, 0)}"
            self._say(f"{path} is not what was written: it is put aside as {aside}; its rows are done again")
            self._disk.publish(path, aside)
        for path in found.stale:
            self._disk.remove(path)
        for sidecar in self._sealed.values():
            self.tally.add(sidecar.tally)
        self._load_journal()
        for known in found.described:
            # A run that died between a shard's description and its name has its rows in the journal.
            num_undone = self._undone_in(known.shard, _rows(known)).size
            if known.shard not in {*found.damaged, *self._sealed} and num_undone == len(known):
                path = self._folder.data_file(known.shard)
                self._say(f"{path} is missing: it is done again ({counted(len(known), 'row')})")
        self._seal_complete()
        write_dataset_files(self._folder, self._disk, self._sealed_in_order())

    def _load_journal(self) -> None:
        segments, damaged = self._journal.load()
        for path in damaged:
            self._say(f"{path} is damaged: it is removed; its rows are done again")
            self._disk.remove(path)
        for segment in segments:
            reader = SegmentReader(segment, self._columns.row_index)
            rows = reader.indices
            kept = [self._undone_in(shard, part) for shard, part in self._by_shard(rows)]
            new = np.concatenate(kept) if kept else rows
            self._mark(new)
            picked = np.flatnonzero(np.isin(rows, new))
            for batch in reader.table.take(picked).to_batches() if len(picked) else ():
                self.tally.count_batch(batch, self._columns)
            self._enter(segment, new)

    def _by_shard(self, rows: Any) -> Iterator[tuple[int, Any]]:
        """Ascending row numbers, cut by shard."""
        while len(rows):
            shard = self._plan.shard_of(int(rows[0]))
            cut = int(np.searchsorted(rows, self._plan.range_of(shard).stop_row))
            yield shard, rows[:cut]
            rows = rows[cut:]

    def _undone_in(self, shard: int, rows: Any) -> Any:
        """Those of a shard's row numbers that are not done."""
        # In this order: another thread may ask while a shard is sealed, entered there and then gone here.
        opened = self._open.get(shard)
        if shard in self._sealed:
            return rows[:0]
        return rows if opened is None else opened.undone(rows)

    def _mark(self, rows: Any) -> None:
        """Count ascending row numbers as done."""
        for shard, part in self._by_shard(rows):
            opened = self._open.get(shard)
            if opened is None:
                opened = self._open[shard] = OpenShard.empty(self._plan.range_of(shard))
            opened.mark(part)

    def _mark_row(self, row: int) -> None:
        opened = self._open.get(self._plan.shard_of(row))
        if opened is None:
            self._mark(np.array([row]))
        else:
            opened.mark_row(row)

    def _enter(self, segment: Segment, rows: Any) -> None:
        """Note which shards need a segment; one that none needs goes."""
        shards = {shard for shard, _ in self._by_shard(rows)}
        if not shards:
            self._journal.remove(segment)
            return
        self._live[segment] = shards
        for shard in shards:
            self._open[shard].segments.append(segment)

    def _seal_complete(self) -> None:
        complete = [shard for shard, opened in sorted(self._open.items()) if self._is_complete(opened)]
        for shard in complete:
            self._seal(self._open[shard])
        if complete:
            write_dataset_files(self._folder, self._disk, self._sealed_in_order())
            self._drop_sealed_segments()

    def _is_complete(self, opened: OpenShard) -> bool:
        return len(opened.range_until(self._end)) <= opened.num_done

    def _seal(self, opened: OpenShard) -> None:
        shard_range = opened.range_until(self._end)
        shard, generation = shard_range.shard, self._generations.get(shard_range.shard, 0)
        stretches = self._journal.read(
            opened.segments, shard_range.first_row, shard_range.stop_row, BATCH_ROWS
        )
        self._sealed[shard] = self._shards.seal(shard_range, generation, stretches)
        self._generations[shard] = generation + 1
        self._plan.close(shard_range)
        if generation:
            self._shards.remove_older(shard, generation)
        del self._open[shard]

    def _drop_sealed_segments(self) -> None:
        for segment, shards in list(self._live.items()):
            shards -= self._sealed.keys()
            if not shards:
                self._journal.remove(segment)
                del self._live[segment]

    def _sealed_in_order(self) -> list[Sidecar]:
        return [self._sealed[shard] for shard in sorted(self._sealed)]


def _rows(shard_range: ShardRange) -> Any:
    return np.arange(shard_range.first_row, shard_range.stop_row)
