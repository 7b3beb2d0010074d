"""ShardPlan: which rows belong to which shard."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The rows `first_row` to `stop_row` (exclusive) of one shard."""

    shard: int
    first_row: int
    stop_row: int

    def __len__(self) -> int:
        return self.stop_row - self.first_row


class ShardPlan:
    """Fixed ranges of `shard_rows` rows; after a shard that a limit ended short they go on from its end.

    Args:
        shard_rows: rows in a whole shard.
        known: ranges of shards that were described on disk before, in any order.
    """

    def __init__(self, shard_rows: int, known: Iterable[ShardRange] = ()):
        self.shard_rows = shard_rows
        # (first row, its shard) of each stretch of whole shards.
        self._stretches: list[tuple[int, int]] = [(0, 0)]
        for shard_range in sorted(known, key=lambda known_range: known_range.shard):
            if self.range_of(shard_range.shard).first_row != shard_range.first_row:
                self._stretches.append((shard_range.first_row, shard_range.shard))
            self.close(shard_range)

    def close(self, shard_range: ShardRange) -> None:
        """Take note of a shard's real range, once it is sealed."""
        if shard_range.stop_row < self.range_of(shard_range.shard).stop_row:
            self._stretches.append((shard_range.stop_row, shard_range.shard + 1))
            self._stretches.sort()

    def shard_of(self, row: int) -> int:
        """The shard that a row belongs to."""
        first_row, first_shard = self._stretches[bisect_right(self._stretches, (row, 1 << 62)) - 1]
        return first_shard + (row - first_row) // self.shard_rows

    def range_of(self, shard: int) -> ShardRange:
        """The range of a shard, as if the rows never ended."""
        at = bisect_right(self._stretches, shard, key=lambda stretch: stretch[1]) - 1
        first_row, first_shard = self._stretches[at]
        start = first_row + (shard - first_shard) * self.shard_rows
        stop = start + self.shard_rows
        if at + 1 < len(self._stretches):
            stop = max(start, min(stop, self._stretches[at + 1][0]))
        return ShardRange(shard, start, stop)
