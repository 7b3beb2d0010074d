"""StepBuilder: a step while it is put together, and what must be remembered of it until its result comes."""

from dataclasses import dataclass, field
from typing import NamedTuple

from batchgen.engine.block_manager import BlockCopy, BlockManager
from batchgen.engine.request import Request
from batchgen.engine.request_table import RequestTable
from batchgen.engine.scheduler_output import PromptScores, SamplingRow, ScheduledSequence, SchedulerOutput
from batchgen.engine.sequence import Sequence

Drafts = tuple[int, ...]


class Work(NamedTuple):
    """What a sequence computes in a step: `num_known` tokens that exist, then drafted ones."""

    sequence: Sequence
    num_known: int
    drafts: Drafts = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the step's budget."""
        return self.num_known + len(self.drafts)


@dataclass(slots=True)
class StepInFlight:
    """What `update` needs of a step: who draws, in the order of the rows, and who only computes.

    Args:
        draws: each with its drafts; one with k drafts has k + 1 rows.
        pinned: sequences whose prompt is computed and to be kept in the prefix cache.
        scored: seq_id -> the request whose prompt tokens it scores.
    """

    draws: list[tuple[Sequence, Drafts]] = field(default_factory=list)
    pinned: list[Sequence] = field(default_factory=list)
    scored: dict[int, Request] = field(default_factory=dict)
    num_rows: int = 0


class StepBuilder:
    """One step.

    Attributes:
        budget: tokens that may still be scheduled.
        has_preempted: whether somebody lost his blocks; then nobody is admitted.
    """

    def __init__(self, budget: int, blocks: BlockManager, table: RequestTable):
        self.budget = budget
        self.has_preempted = False
        self.sequences: list[ScheduledSequence] = []
        self.copies: list[BlockCopy] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.in_flight = StepInFlight()
        self._blocks = blocks
        self._table = table

    @property
    def is_empty(self) -> bool:
        """Whether the executor has nothing to do."""
        return not (self.sequences or self.swap_out or self.swap_in)

    def schedule(self, sequence: Sequence, count: int, drafts: Drafts = ()) -> None:
        """Let a sequence, which has its blocks, compute `count` tokens and its drafts, and draw if it can."""
        start = sequence.num_computed_tokens
        end = start + count
        tokens = sequence.tokens_to_compute(count)
        request = sequence.request
        scores = None if request.next_scored > end else self._scores(sequence, end)
        sequence.num_computed_tokens = end + len(drafts)
        self._blocks.cache_computed(sequence)
        samples: tuple[SamplingRow, ...] = ()
        if end == sequence.num_tokens and not sequence.group.shared_until:
            samples = self._rows(sequence, drafts)
        if drafts:
            tokens += drafts
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

    def output(self, number: int) -> SchedulerOutput:
        """The step as the executor gets it."""
        return SchedulerOutput(
            step=number,
            sequences=tuple(self.sequences),
            block_copies=tuple(self.copies),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            finished_seq_ids=self._table.take_finished_seq_ids(),
        )

    def _rows(self, sequence: Sequence, drafts: Drafts) -> tuple[SamplingRow, ...]:
        """The draws of a sequence that computes its last token."""
        group, flight = sequence.group, self.in_flight
        if sequence.request.source.is_pinned:
            flight.pinned.append(sequence)
            return ()
        num_candidates = group.num_candidates
        drawing = [sequence]
        if group.pending and not num_candidates:
            drawing += self._table.fork(group)
        rows = [_row(each, num_candidates) for each in drawing]
        flight.draws += [(each, drafts) for each in drawing]
        if drafts:
            rows = _drafted_rows(rows[0], drafts)
        flight.num_rows += len(rows)
        return tuple(rows)

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


def _drafted_rows(first: SamplingRow, drafts: Drafts) -> list[SamplingRow]:
    """A draw after the last token, and one after each draft, as if those before it had been drawn."""
    seed, index, position = first.key
    return [
        SamplingRow(
            first.slot,
            first.rules,
            (seed, index, position + ahead),
            first.num_generated + ahead,
            ahead,
            first.history,
            drafts[:ahead],
        )
        for ahead in range(len(drafts) + 1)
    ]
