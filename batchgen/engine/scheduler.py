"""Scheduler: decides in each step who computes how many tokens, and takes in what the step drew. No torch."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from batchgen.engine.admission import outgrown, overflowed, refusal, too_big
from batchgen.engine.block_manager import BlockCopy, BlockManager, Verdict
from batchgen.engine.messages import EngineRequest, Limits, SampleOutput
from batchgen.engine.metrics import Counters
from batchgen.engine.policy import OrderKey, fcfs
from batchgen.engine.request import Request
from batchgen.engine.request_table import RequestTable
from batchgen.engine.scheduler_output import SamplingRow, ScheduledSequence, SchedulerOutput, StepResult
from batchgen.engine.sequence import Sequence, SequenceState
from batchgen.engine.stop import Stop
from batchgen.errors import EngineError
from batchgen.outputs import FinishReason, RowFailure

log = logging.getLogger(__name__)

_ERROR = Stop(FinishReason.ERROR)


@dataclass(slots=True)
class _Step:
    """A step while it is put together."""

    budget: int
    sequences: list[ScheduledSequence] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    rows: list[Sequence] = field(default_factory=list)
    forked: list[Sequence] = field(default_factory=list)
    has_preempted: bool = False


class Scheduler:
    """One token-budget loop over all sequences.

    Every sequence has tokens that exist and tokens that are computed; `schedule` gives each as many as it
    lacks, running ones first, within `max_num_batched_tokens`. `update` takes in the drawn tokens. A step may
    be scheduled before the result of the one before it is known; the token not known yet is then a
    placeholder.

    The running sequences are kept in the order of the policy, so the victim of a preemption is always the
    last of
    them, and it has never been scheduled in the same step: neither tokens nor block copies have to be taken
        back.

    Args:
        blocks: the KV blocks.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens computed in a step.
        max_model_len: most tokens of a sequence, prompt included.
        vocab_size: number of token ids.
        eos_token_ids: ids that end a sample unless its request says `ignore_eos`.
        policy: order of the queues.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        policy: OrderKey = fcfs,
    ):
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.counters = Counters()
        self.table = RequestTable(blocks, self.counters, policy)
        self._in_flight: dict[int, list[Sequence]] = {}
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or an answer waits to be taken."""
        return bool(self.table.requests) or self.table.has_outputs

    @property
    def has_step_in_flight(self) -> bool:
        """Whether a step was scheduled whose result is not known yet."""
        return bool(self._in_flight)

    def add(self, source: EngineRequest, cache_root: bytes = b"", failure: RowFailure | None = None) -> None:
        """Queue a request; one that cannot run at all is answered with a row failure by `take_outputs`.

        Args:
            source: its id must not be in flight.
            cache_root: first link of the prefix cache's hash chain.
            failure: why the caller of this knows that it cannot run.
        """
        if source.request_id in self.table.requests:
            raise EngineError(f"request id {source.request_id!r} is already in flight")
        request = Request(
            source,
            self._num_arrivals,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            vocab_size=self.vocab_size,
            cache_root=cache_root,
        )
        self._num_arrivals += 1
        leader = self.table.add(request)
        failure = failure or refusal(request, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        if failure is None and self.blocks.blocks_for(leader.num_tokens) > self.blocks.num_blocks:
            failure = too_big(leader, self.blocks)
        if failure is not None:
            self.table.fail(request, failure)

    def set_limits(self, limits: Limits) -> None:
        """Change limits from the next step on. Nobody who runs is stopped."""
        self.max_num_seqs = limits.max_num_seqs or self.max_num_seqs
        self.max_num_batched_tokens = limits.max_num_batched_tokens or self.max_num_batched_tokens

    def schedule(self) -> SchedulerOutput:
        """Put together the next step; it is empty when nothing can be computed now."""
        step = _Step(budget=self.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.has_preempted:
            self._admit(step)
        for sequence in step.forked:
            self.table.run(sequence)
        number = self.counters.num_steps
        if step.sequences:
            self.counters.num_steps += 1
            self._in_flight[number] = step.rows
        return SchedulerOutput(
            step=number,
            sequences=tuple(step.sequences),
            block_copies=tuple(step.copies),
            finished_seq_ids=self.table.take_finished_seq_ids(),
        )

    def update(self, result: StepResult) -> list[SampleOutput]:
        """Take in the tokens that a step drew, and tell what is new since the last call."""
        rows = self._in_flight.pop(result.step)
        if len(rows) != len(result.token_ids):
            raise EngineError(f"step {result.step} drew {len(result.token_ids)} tokens; {len(rows)} were due")
        for sequence, token in zip(rows, result.token_ids, strict=True):
            sequence.num_placeholders -= 1
            if sequence.state is SequenceState.FINISHED:
                continue
            if token is None:
                self.table.finish(sequence, _ERROR, overflowed(sequence))
            else:
                self.table.accept(sequence, token)
        return self.table.take_outputs()

    def take_outputs(self) -> list[SampleOutput]:
        """What is to be told although no step has ended: refusals and failures."""
        return self.table.take_outputs()

    def abandon_steps(self) -> None:
        """Forget the steps under way, of which nobody knows how far they were computed.

        Whoever runs is recomputed, and the prefix cache is emptied, because blocks offered to it may not have
        been written.
        """
        self._in_flight.clear()
        for sequences in self.table.requests.values():
            for sequence in sequences:
                sequence.num_placeholders = 0
        while self.table.running:
            self.table.preempt_last()
        self.blocks.pool.forget_all()

    def _schedule_running(self, step: _Step) -> None:
        running = self.table.running
        position = 0
        while position < len(running) and step.budget > 0:
            sequence = running[position]
            position += 1
            count = min(sequence.num_tokens - sequence.num_computed_tokens, step.budget)
            # A sample that ends with the token under way, whatever that is, computes no other.
            if count == 0 or sequence.num_tokens >= sequence.request.max_total_tokens:
                continue
            copies = self._make_room(sequence, count, step)
            if copies is None:
                return
            step.copies += copies
            self._schedule_sequence(sequence, count, step)

    def _make_room(self, sequence: Sequence, count: int, step: _Step) -> list[BlockCopy] | None:
        """Blocks for the next tokens, if need be taken from the last; None: it cannot run now."""
        running = self.table.running
        while True:
            copies = self.blocks.grow(sequence, sequence.num_computed_tokens + count)
            if copies is not None:
                return copies
            if len(running) == 1:
                # The token under way may end it without another block; else it has outgrown the pool.
                if not sequence.num_placeholders:
                    self.table.finish(sequence, _ERROR, outgrown(sequence, self.blocks))
                return None
            self._preempt_last()
            step.has_preempted = True
            if sequence.state is not SequenceState.RUNNING:
                return None

    def _preempt_last(self) -> None:
        victim = self.table.preempt_last()
        number = self.counters.preempted("recompute")
        if number % 50 == 1:
            log.warning(
                "request %s was preempted and will be recomputed (preemption %d): the KV cache of %d blocks "
                "is too small for %d sequences at once; give it more memory (kv_cache_memory_bytes, "
                "gpu_memory_utilization or num_gpu_blocks_override) or lower max_num_seqs",
                victim.request.request_id,
                number,
                self.blocks.num_blocks,
                len(self.table.running) + 1,
            )

    def _admit(self, step: _Step) -> None:
        """Take in waiting sequences until one does not fit: nobody overtakes the head of the line."""
        table = self.table
        while step.budget > 0 and len(table.running) + len(step.forked) < self.max_num_seqs:
            sequence = table.waiting.head()
            if sequence is None or sequence.num_placeholders:
                return
            verdict = self.blocks.admit(sequence, is_alone=not table.running)
            if verdict is Verdict.LATER:
                return
            if verdict is Verdict.NEVER:
                table.finish(sequence, _ERROR, too_big(sequence, self.blocks))
                continue
            table.run(table.waiting.pop())
            if sequence.index == 0 and sequence.num_preemptions == 0:
                sequence.request.num_cached_tokens = sequence.num_computed_tokens
                self.counters.prompt_tokens += sequence.num_prompt_tokens
            count = min(sequence.num_tokens - sequence.num_computed_tokens, step.budget)
            self._schedule_sequence(sequence, count, step)

    def _schedule_sequence(self, sequence: Sequence, count: int, step: _Step) -> None:
        start = sequence.num_computed_tokens
        tokens = sequence.tokens_to_compute(count)
        sequence.num_computed_tokens = start + count
        step.budget -= count
        samples: tuple[SamplingRow, ...] = ()
        if start + count == sequence.num_tokens:
            drawing = [sequence]
            if not sequence.request.is_forked:
                drawing += self._fork(sequence, step)
            samples = tuple([_sampling_row(each) for each in drawing])
            step.rows += drawing
        step.sequences.append(
            ScheduledSequence(
                seq_id=sequence.seq_id,
                token_ids=tokens,
                num_computed_tokens=start,
                block_ids=tuple([table.copy() for table in sequence.block_tables]),
                samples=samples,
                adapter=sequence.request.source.adapter,
            )
        )
        self.blocks.cache_computed(sequence)

    def _fork(self, leader: Sequence, step: _Step) -> list[Sequence]:
        """The samples drawn beside the leader's first token; those without room wait on their own."""
        request = leader.request
        room = max(self.max_num_seqs - len(self.table.running) - len(step.forked), 0)
        end = min(request.params.n, 1 + room)
        siblings = [self.table.new_sequence(request, index) for index in range(1, end)]
        for sibling in siblings:
            self.blocks.fork(leader, sibling)
        step.forked += siblings
        self.table.wait_apart(request, range(end, request.params.n))
        return siblings


def _sampling_row(sequence: Sequence) -> SamplingRow:
    """The draw of a sequence's next token; its key is the same whoever else runs."""
    request = sequence.request
    position = sequence.num_tokens
    sequence.num_placeholders += 1
    return SamplingRow(
        slot=sequence.seq_id,
        rules=request.rules,
        key=(request.seed, sequence.index, position),
        num_generated=position - len(request.prompt),
        history=sequence.token_ids if request.rules.needs_history else None,
    )
