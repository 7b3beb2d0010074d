"""StepBuilder: a step while it is put together, and what must be remembered of it until its result comes."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from batchgen.engine.block_manager import BlockCopy, BlockManager
from batchgen.engine.group import Group
from batchgen.engine.request import Request
from batchgen.engine.request_table import RequestTable
from batchgen.engine.scheduler_output import (
    Continued,
    PromptScores,
    SamplingRow,
    ScheduledSequence,
    SchedulerOutput,
)
from batchgen.engine.sequence import Sequence

Drafts = tuple[int, ...]


class Work(NamedTuple):
    """What a sequence computes in a step."""

    sequence: Sequence
    num_tokens: int


class Draftable(NamedTuple):
    """A sequence that computes one token and draws the next, so drafted tokens may follow.

    `place` is that of its part in the step, `draw` that of its draw among all.
    """

    sequence: Sequence
    place: int
    draw: int


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


class StepBuilder:
    """One step.

    Args:
        budget: most tokens.
        blocks, table: of the scheduler.
        can_draft: whether somebody asks for `draftable`.
        last: the step before, if its sequences may go on and its tokens are known.

    Attributes:
        budget: tokens that may still be scheduled.
        has_preempted: whether somebody lost his blocks; then nobody is admitted.
        draftable: who may draft, if anybody asks.
    """

    def __init__(
        self,
        budget: int,
        blocks: BlockManager,
        table: RequestTable,
        *,
        can_draft: bool = False,
        last: StepInFlight | None = None,
    ):
        self.budget = budget
        self.has_preempted = False
        self.sequences: list[ScheduledSequence] = []
        self.copies: list[BlockCopy] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.in_flight = StepInFlight()
        self.draftable: list[Draftable] = []
        self._can_draft = can_draft
        self._blocks = blocks
        self._table = table
        self._last = last
        self._may_continue = {} if last is None else last.may_continue
        self._rows: list[int] = []
        # Sequence -> its row among those of `sequences`, if the next step may continue it.
        self._fresh: dict[Sequence, int] = {}
        self._tables: dict[int, tuple[list[int], ...]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the executor has nothing to do."""
        return not (self.sequences or self._rows or self.swap_out or self.swap_in)

    def carry_on(self, group: Group) -> bool:
        """Let all sequences of a running group go on from the step before, if that is all there is to do.

        Nothing has happened when it is not, or when there is no block for them.
        """
        rows = self._may_continue
        if not rows:
            return False
        sequences = group.sequences
        if len(sequences) > 1:
            return self._carry_on_together(group)
        sequence = sequences[0]
        row = rows.get(sequence)
        if row is None:
            return False
        blocks, computed = self._blocks, sequence.num_computed_tokens
        # A block that was written to is its own, and has room up to its end.
        if (computed % blocks.block_size == 0 or blocks.has_windows) and not self._grow([sequence]):
            return False
        self._carry(sequence, row)
        return True

    def _carry_on_together(self, group: Group) -> bool:
        sequences = group.sequences
        rows = [self._may_continue.get(sequence, -1) for sequence in sequences]
        if min(rows) < 0 or len(rows) > self.budget or not self._grow(sequences):
            return False
        for sequence, row in zip(sequences, rows, strict=True):
            self._carry(sequence, row)
        return True

    def _grow(self, sequences: list[Sequence]) -> bool:
        """Room for a token more of each, if there is; what that changes in their tables is noted."""
        before = [self._shape(each) for each in sequences]
        copies = self._blocks.grow([(each, each.num_computed_tokens + 1) for each in sequences])
        if copies is None:
            return False
        self.copies += copies
        for place, (sequence, shape) in enumerate(zip(sequences, before, strict=True), len(self._rows)):
            if copies or self._shape(sequence) != shape:
                self._tables[place] = tuple([table.copy() for table in sequence.block_tables])
        return True

    @staticmethod
    def _shape(sequence: Sequence) -> tuple[list[int], list[int]]:
        return [len(table) for table in sequence.block_tables], sequence.num_released.copy()

    def _carry(self, sequence: Sequence, row: int) -> None:
        flight = self.in_flight
        flight.may_continue[sequence] = len(self._rows)
        flight.continued.append(sequence)
        self._rows.append(row)
        end = sequence.num_computed_tokens + 1
        sequence.num_computed_tokens = end
        sequence.num_placeholders = 1
        if end % self._blocks.block_size == 0:
            self._blocks.cache_computed(sequence)
        self.budget -= 1

    def schedule(self, sequence: Sequence, count: int) -> None:
        """Let a sequence, which has its blocks, compute `count` tokens, and draw if it can."""
        start = sequence.num_computed_tokens
        end = start + count
        tokens = sequence.tokens_to_compute(count)
        request = sequence.request
        scores = self._scores(sequence, end) if request.next_scored < len(request.prompt) else None
        sequence.num_computed_tokens = end
        self._blocks.cache_computed(sequence)
        samples: tuple[SamplingRow, ...] = ()
        if end == sequence.num_tokens and not sequence.group.shared_until:
            samples = self._draws(sequence)
            if self._can_draft and count == len(samples) == sequence.num_placeholders == 1:
                self._may_draft(sequence)
        self.budget -= len(tokens)
        self.sequences.append(
            ScheduledSequence(
                sequence.seq_id,
                tokens,
                start,
                tuple([table.copy() for table in sequence.block_tables]),
                samples,
                request.source.adapter,
                scores,
            )
        )

    def add_drafts(self, draftable: Draftable, drafts: Drafts) -> None:
        """Let a scheduled sequence, which has blocks for them, compute drafted tokens too."""
        sequence, place, draw = draftable
        part = self.sequences[place]
        self.sequences[place] = replace(
            part,
            token_ids=[*part.token_ids, *drafts],
            block_ids=tuple([table.copy() for table in sequence.block_tables]),
            samples=_drafted_rows(part.samples[0], drafts),
        )
        self.in_flight.draws[draw] = (sequence, drafts)
        self.in_flight.num_rows += len(drafts)
        sequence.num_computed_tokens += len(drafts)
        self.budget -= len(drafts)

    def _may_draft(self, sequence: Sequence) -> None:
        """Note a sequence that is about to be scheduled, and whose draw is the last so far."""
        if sequence.group.beam is None:
            draw = len(self.in_flight.draws) - 1
            self.draftable.append(Draftable(sequence, len(self.sequences), draw))

    def output(self, number: int) -> SchedulerOutput:
        """The step as the executor gets it; nothing can be added to it any more."""
        flight = self.in_flight
        flight.number = number
        # Rows of those that go on are the first.
        first = len(self._rows)
        flight.num_rows += first
        for sequence, row in self._fresh.items():
            flight.may_continue[sequence] = first + row
        return SchedulerOutput(
            step=number,
            sequences=tuple(self.sequences),
            block_copies=tuple(self.copies),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            finished_seq_ids=self._table.take_finished_seq_ids(),
            continued=Continued(self._last.number, self._rows, self._tables)
            if self._last is not None and self._rows
            else None,
        )

    def _draws(self, sequence: Sequence) -> tuple[SamplingRow, ...]:
        """The draws of a sequence that computes its last token."""
        group, flight = sequence.group, self.in_flight
        if sequence.request.source.is_pinned:
            flight.pinned.append(sequence)
            return ()
        num_candidates = group.num_candidates
        forked = self._table.fork(group) if group.pending and not num_candidates else []
        if not forked and not num_candidates:
            self._fresh[sequence] = flight.num_rows
        flight.draws.append((sequence, ()))
        flight.draws += [(each, ()) for each in forked]
        flight.num_rows += 1 + len(forked)
        return (_row(sequence, num_candidates), *[_row(each, 0) for each in forked])

    def _scores(self, sequence: Sequence, end: int) -> PromptScores | None:
        """The prompt tokens that positions up to `end` score, each once."""
        request = sequence.request
        start, stop = request.next_scored, min(end + 1, len(request.prompt))
        if start >= stop:
            return None
        assert start > sequence.num_computed_tokens
        request.next_scored = stop
        self.in_flight.scored[sequence.seq_id] = request
        return PromptScores(start, request.prompt[start:stop].tolist(), request.params)


def _row(sequence: Sequence, num_candidates: int) -> SamplingRow:
    """The draw of a sequence's next token; its key is the same whoever else runs."""
    request = sequence.request
    rules = request.rules
    position = sequence.num_tokens
    sequence.num_placeholders += 1
    return SamplingRow(
        sequence.seq_id,
        rules,
        (request.seed, sequence.index, position),
        position - len(request.prompt),
        -1,
        sequence.token_ids if rules.needs_history else None,
        (),
        num_candidates,
    )


def _drafted_rows(first: SamplingRow, drafts: Drafts) -> tuple[SamplingRow, ...]:
    """A draw after the last token, and one after each draft, as if those before it had been drawn."""
    seed, index, position = first.key
    return tuple(
        [
            replace(
                first,
                key=(seed, index, position + ahead),
                num_generated=first.num_generated + ahead,
                token_index=ahead,
                drafts=drafts[:ahead],
            )
            for ahead in range(len(drafts) + 1)
        ]
    )
