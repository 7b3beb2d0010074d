"""StepBuilder: a step while it is put together."""

from dataclasses import replace
from typing import NamedTuple

from batchgen.engine.block_manager import BlockCopy, BlockManager
from batchgen.engine.going_on import Drafts, GoingOn, StepInFlight
from batchgen.engine.group import Group
from batchgen.engine.request_table import RequestTable
from batchgen.engine.scheduler_output import (
    PromptScores,
    SamplingRow,
    ScheduledSequence,
    SchedulerOutput,
)
from batchgen.engine.sequence import Sequence


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
        self._going_on = GoingOn(blocks, last, self.in_flight, self.copies)
        # Sequence -> its row among those of `sequences`, if the next step may continue it.
        self._fresh: dict[Sequence, int] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the executor has nothing to do."""
        return not (self.sequences or self._going_on or self.swap_out or self.swap_in)

    def carry_on(self, groups: list[Group], first: int) -> int:
        """Let running groups go on from the step before as far as the budget goes: see `GoingOn.carry_on`."""
        before = len(self._going_on)
        place = self._going_on.carry_on(groups, first, self.budget)
        self.budget -= len(self._going_on) - before
        return place

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
        first = len(self._going_on)
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
            continued=self._going_on.told(),
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
