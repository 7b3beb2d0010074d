"""GoingOn: the sequences of a step that go on from the step before, and what must be remembered of a step."""

from dataclasses import dataclass, field

from batchgen.engine.block_manager import BlockCopy, BlockManager
from batchgen.engine.group import Group
from batchgen.engine.request import Request
from batchgen.engine.scheduler_output import Continued
from batchgen.engine.sequence import Sequence

Drafts = tuple[int, ...]


@dataclass(slots=True)
class StepInFlight:
    """What `update` needs of a step: who draws, in the order of the rows, and who only computes.

    Args:
        number: of the step.
        continued: those that go on from the step before; theirs are the first rows.
        draws: each with its drafts; one with k drafts has k + 1 rows.
        pinned: sequences whose prompt is computed and to be kept in the prefix cache.
        scored: seq_id -> the request whose prompt tokens it scores.
        num_rows: of draws, those of `continued` included.
        may_continue: row -> whose it is, of sequences that the next step may continue.
    """

    number: int = -1
    continued: list[Sequence] = field(default_factory=list)
    draws: list[tuple[Sequence, Drafts]] = field(default_factory=list)
    pinned: list[Sequence] = field(default_factory=list)
    scored: dict[int, Request] = field(default_factory=dict)
    num_rows: int = 0
    may_continue: dict[Sequence, int] = field(default_factory=dict)


class GoingOn:
    """Those that go on in one step.

    Args:
        blocks: of the scheduler.
        last: the step before, if its sequences may go on and its tokens are known.
        flight, copies: of this step; they and their copies of blocks are entered there.
    """

    def __init__(
        self, blocks: BlockManager, last: StepInFlight | None, flight: StepInFlight, copies: list[BlockCopy]
    ):
        self._blocks = blocks
        self._last = last
        self._may_continue = {} if last is None else last.may_continue
        self._flight = flight
        # One list for all of a step: a later copy may write to a block that an earlier one reads.
        self._copies = copies
        self._rows: list[int] = []
        self._tables: dict[int, tuple[list[int], ...]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def carry_on(self, groups: list[Group], first: int, budget: int) -> int:
        """Let all sequences of groups go on, from one group to the next, while that is all there is to do.

        Args:
            groups: those that run.
            first: place of the first that is to go on.
            budget: most tokens.

        Returns: place of the group that does not go on, for which nothing has happened; it may be that there
            is no block for it.
        """
        may_continue, following = self._may_continue, self._flight.may_continue
        rows, continued = self._rows, self._flight.continued
        blocks, size, has_windows = self._blocks, self._blocks.block_size, self._blocks.has_windows
        place, most = first, len(rows) + budget
        # What follows is done for every token.
        while place < len(groups) and len(rows) < most:
            sequences = groups[place].sequences
            leader = sequences[0]
            if leader not in may_continue:
                break
            # A block that was written to is its own, and has room up to its end.
            has_room = len(sequences) == 1 and leader.num_computed_tokens % size and not has_windows
            if not has_room and not self._make_room(sequences, most):
                break
            for sequence in sequences:
                end = sequence.num_computed_tokens + 1
                following[sequence] = len(rows)
                rows.append(may_continue[sequence])
                continued.append(sequence)
                sequence.num_computed_tokens = end
                sequence.num_placeholders = 1
                if end % size == 0:
                    blocks.cache_computed(sequence)
            place += 1
        return place

    def told(self) -> Continued | None:
        """All of them as the executor gets them."""
        return Continued(self._last.number, self._rows, self._tables) if self._last and self._rows else None

    def _make_room(self, sequences: list[Sequence], most: int) -> bool:
        """Whether all sequences of a group may go on; then they have room for a token more each.

        What that changes in their tables is noted.
        """
        if len(self._rows) + len(sequences) > most or any(
            each not in self._may_continue for each in sequences
        ):
            return False
        before = [_shape(each) for each in sequences]
        copies = self._blocks.grow([(each, each.num_computed_tokens + 1) for each in sequences])
        if copies is None:
            return False
        self._copies += copies
        for place, (sequence, shape) in enumerate(zip(sequences, before, strict=True), len(self._rows)):
            if copies or _shape(sequence) != shape:
                self._tables[place] = tuple([table.copy() for table in sequence.block_tables])
        return True


def _shape(sequence: Sequence) -> tuple[list[int], list[int]]:
    return [len(table) for table in sequence.block_tables], sequence.num_released.copy()
