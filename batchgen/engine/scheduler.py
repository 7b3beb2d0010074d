"""Scheduler: decides in each step who computes how many tokens, and takes in what the step drew. No torch."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from batchgen.engine.adapter_gate import AdapterGate
from batchgen.engine.admission import Admission
from batchgen.engine.beam_group import Accepts, BeamGroups, Beams
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.costs import CostModel, Costs
from batchgen.engine.detokenizer import Decoder
from batchgen.engine.drafting import Drafting
from batchgen.engine.going_on import StepInFlight
from batchgen.engine.intake import Intake
from batchgen.engine.messages import EngineRequest, Limits, SampleOutput
from batchgen.engine.metrics import Counters
from batchgen.engine.pins import Pins
from batchgen.engine.policy import Rank, fcfs
from batchgen.engine.preemption import Preemption
from batchgen.engine.refusals import refusal, too_big, too_wide
from batchgen.engine.request import Request
from batchgen.engine.request_table import RequestTable
from batchgen.engine.rules import Chunks, PromptDelay, Rules
from batchgen.engine.running import RunningPass
from batchgen.engine.scheduler_output import SchedulerOutput, StepResult
from batchgen.engine.speculation import Speculation
from batchgen.engine.step import StepBuilder
from batchgen.engine.swap import Swapper
from batchgen.errors import EngineError
from batchgen.outputs import RowFailure
from batchgen.worker.executor import AdapterMemory


class Scheduler:
    """One token-budget loop over all groups of sequences.

    Every sequence has tokens that exist and tokens that are computed; `schedule` gives each as many as it
    lacks, running ones first, within `max_num_batched_tokens`. `update` takes in the drawn tokens. A step may
    be scheduled before the result of the one before it is known; the token not known yet is then a
    placeholder.

    Args:
        blocks: the KV blocks.
        max_model_len: most tokens of a sequence, prompt included.
        vocab_size: number of token ids.
        eos_token_ids: ids that end a sample unless its request says `ignore_eos`.
        rank: order of the queues, of `POLICIES`.
        speculation: drafts tokens ahead, if that is on.
        decoder: gives the tokenizer, which stop strings of a beam search need.
        accepts: says whether a beam's grammar may end after its tokens.
        costs: decides between recompute and swap; by default measured as steps come.
        preemption_mode: "recompute" or "swap" whatever they cost.
        block_bytes: size of a block in host memory.
        clock: seconds; for tests.
        continues: whether steps may name sequences that go on (`SchedulerOutput.continued`).
        adapters: where adapters are brought before sequences with them run.
        rules: see `Rules`.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        rank: Rank = fcfs,
        speculation: Speculation | None = None,
        decoder: Callable[[], Decoder] | None = None,
        accepts: Accepts | None = None,
        costs: Costs | None = None,
        preemption_mode: str | None = None,
        block_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        continues: bool = False,
        adapters: AdapterMemory | None = None,
        **rules: Any,
    ):
        self.blocks = blocks
        self.rules = Rules(**rules)
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.decoder = decoder
        self.counters = Counters()
        self.table = RequestTable(blocks, self.counters, rank)
        self.drafting = None if speculation is None else Drafting(speculation, blocks, self.counters)
        self.pins = Pins(blocks, self.counters)
        swapper = Swapper(blocks)
        self.costs = costs or CostModel(block_bytes)
        self._preemption = Preemption(
            blocks,
            self.table,
            swapper,
            self.counters,
            self.costs,
            mode=preemption_mode,
            block_bytes=block_bytes,
        )
        self._chunks = Chunks(self.rules, self.table)
        self._delay = PromptDelay(self.rules, self.table, clock)
        self._running = RunningPass(blocks, self.table, self._preemption, self.pins, self._chunks)
        self._gate = AdapterGate(self.rules, self.table, self.counters, adapters)
        self._admission = Admission(
            self.rules,
            blocks,
            self.table,
            swapper,
            self.pins,
            self.counters,
            self._chunks,
            self._delay,
            self._running.run,
            clock,
            self._gate,
        )
        beams = BeamGroups(self.table, self.counters, accepts)
        self._intake = Intake(self.table, self.pins, self.counters, beams, self.drafting)
        self._clock = clock
        self._in_flight: dict[int, StepInFlight] = {}
        # Drafts lengthen a sequence's part, so it has to be spelled out.
        self._continues = continues and speculation is None
        self._last: StepInFlight | None = None
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or an answer waits to be taken."""
        return bool(self.table.requests) or bool(self.table.outbox)

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
            arrived_at=self._clock(),
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            vocab_size=self.vocab_size,
            cache_root=cache_root,
        )
        self._num_arrivals += 1
        group = self.table.add(request)
        failure = failure or refusal(request, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        failure = failure or too_wide(
            request,
            max_num_seqs=self.rules.max_num_seqs,
            max_num_batched_tokens=self.rules.max_num_batched_tokens,
        )
        leader = group.sequences[0]
        if failure is None and self.blocks.blocks_for(leader.num_tokens) > self.blocks.num_blocks:
            failure = too_big(leader, self.blocks)
        if failure is not None:
            self.table.fail(request, failure)
        elif request.params.use_beam_search:
            group.beam = Beams(request, self.decoder)

    def set_limits(self, limits: Limits) -> None:
        """Change limits from the next step on. Nobody who runs is stopped."""
        rules = self.rules
        rules.max_num_seqs = limits.max_num_seqs or rules.max_num_seqs
        rules.max_num_batched_tokens = limits.max_num_batched_tokens or rules.max_num_batched_tokens

    def schedule(self) -> SchedulerOutput:
        """Put together the next step; it is empty when nothing can be computed now."""
        self._chunks.begin_step()
        self._delay.begin_step()
        self._gate.begin_step()
        step = StepBuilder(
            self.rules.max_num_batched_tokens,
            self.blocks,
            self.table,
            can_draft=self.drafting is not None,
            last=None if self._in_flight else self._last,
        )
        self._last = None
        self._preemption.evict_for_head(step, self._admission)
        self._running.run_all(step)
        if not step.has_preempted:
            self._admission.admit(step)
            if self.drafting is not None:
                self.drafting.extend(step)
        number = self.counters.num_steps
        if not step.is_empty:
            self.counters.num_steps += 1
            self._in_flight[number] = step.in_flight
        return step.output(number)

    def update(self, result: StepResult) -> list[SampleOutput]:
        """Take in the tokens that a step drew, and tell what is new since the last call."""
        step = self._in_flight.pop(result.step)
        self._intake.take(step, result, self._clock())
        if self._continues:
            self._last = step
        return self.table.outbox.take()

    def step_ended(self, step: SchedulerOutput, result: StepResult, seconds: float) -> None:
        """Be told how long a step took, its scheduling left out."""
        self.counters.step_time_s += seconds
        self.costs.observe(step, result, seconds)
        if self.drafting is not None:
            self.drafting.speculation.step_ended(step.num_tokens, len(result.token_ids), seconds)
            self.drafting.speculation.forget(step.finished_seq_ids)

    def take_outputs(self) -> list[SampleOutput]:
        """What is to be told although no step has ended: refusals and failures."""
        return self.table.outbox.take()

    def abandon_steps(self) -> None:
        """Forget the steps under way, of which nobody knows how far they were computed.

        Whoever runs is recomputed, and the prefix cache is emptied, because blocks offered to it may not have
        been written.
        """
        self._in_flight.clear()
        self._last = None
        for request in self.table.requests.values():
            request.next_scored = request.first_scored + request.num_scores
            for group in request.groups:
                for sequence in group.sequences:
                    sequence.num_placeholders = 0
                self.table.unfork(group)
        for group in self.table.swapped.copy():
            self.table.forget_swapped(group)
        for group in self.table.running.copy():
            self.counters.preempted("recompute")
            self.table.preempt(group)
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forget what blocks hold, and every pinned prefix; whoever uses blocks keeps them."""
        self.pins.clear()
        self.blocks.pool.forget_all()
