"""OpenShard: a shard that is not sealed: which of its rows are done, and in which segments they are."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchgen.jobs.journal import Segment
from batchgen.jobs.shard_plan import ShardRange


@dataclass(slots=True)
class OpenShard:
    """Rows are named by their number among all rows.

    Args:
        range: its rows.
        done: which of them are done: bool [rows].
        num_done: how many.
        segments: those of the journal that hold its rows.
    """

    range: ShardRange
    done: Any
    num_done: int = 0
    segments: list[Segment] = field(default_factory=list)

    @classmethod
    def empty(cls, shard_range: ShardRange) -> "OpenShard":
        """A shard of which nothing is done."""
        return cls(shard_range, np.zeros(len(shard_range), bool))

    def undone(self, rows: Any) -> Any:
        """Those of its row numbers that are not done."""
        return rows[~self.done[rows - self.range.first_row]]

    def num_done_before(self, row: int) -> int:
        """How many of its rows before a row number are done."""
        return int(self.done[: max(0, row - self.range.first_row)].sum())

    @property
    def reached(self) -> int:
        """The number after the last row that is done; some are."""
        return self.range.first_row + int(self.done.nonzero()[0][-1]) + 1

    def mark(self, rows: Any) -> None:
        """Count row numbers, of which none is done, as done."""
        self.done[rows - self.range.first_row] = True
        self.num_done += len(rows)

    def mark_row(self, row: int) -> None:
        """Count a row as done.

        Raises:
            AssertionError: it is done already.
        """
        offset = row - self.range.first_row
        if self.done[offset]:
            raise AssertionError(f"row {row} was finished twice")
        self.done[offset] = True
        self.num_done += 1

    def range_until(self, end: int | None) -> ShardRange:
        """Its range, cut where the rows end (None: not known, or beyond it)."""
        first = self.range.first_row
        stop = self.range.stop_row if end is None else max(first, min(self.range.stop_row, end))
        return ShardRange(self.range.shard, first, stop)
