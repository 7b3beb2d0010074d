"""Admission: which waiting groups may run now, and who may overtake whom."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.group import Group
from batchgen.engine.metrics import Counters
from batchgen.engine.refusals import too_big
from batchgen.engine.request_table import RequestTable
from batchgen.engine.step import StepBuilder

# Blocks may appear in the prefix cache, so a group that lacked some is looked at again after this many steps.
_LOOK_AGAIN = 16


class Verdict(Enum):
    """Whether a waiting group can have its blocks."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(slots=True)
class Rules:
    """How requests share the steps; what may change while running is changed here.

    Args:
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens computed in a step.
        enable_chunked_prefill: whether a prompt may be computed over several steps.
        long_prefill_token_threshold: most tokens of one sequence in a step, 0 for no such limit; not heeded
            while its request is alone.
        delay_factor: while others run, new prompts wait this many times the duration of the last step that
            admitted one.
        max_loras: most adapters among those that run; None for no limit.
        skip_window: how many waiting groups that cannot run now are passed over in search of one that can.
        most_overtaken: how many may be admitted before a group that stands ahead of them. Then nobody is
            admitted until it is, so nobody waits for ever.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    delay_factor: float = 0.0
    max_loras: int | None = None
    skip_window: int = 8
    most_overtaken: int = 32


class Admission:
    """Takes groups from `waiting` and `swapped` into `running`, in the policy's order as far as they fit.

    Attributes:
        most_at_once: tokens of one sequence that a step may compute.
    """

    def __init__(
        self,
        rules: Rules,
        blocks: BlockManager,
        table: RequestTable,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._rules = rules
        self._blocks = blocks
        self._table = table
        self._counters = counters
        self._delay = PromptDelay(rules, table, clock)
        self.most_at_once = rules.max_num_batched_tokens

    def begin_step(self) -> None:
        """A step begins; the one before it has ended."""
        self._delay.begin_step()
        table, threshold = self._table, self._rules.long_prefill_token_threshold
        is_alone = len(table.running) + len(table.waiting) + len(table.swapped) == 1
        self.most_at_once = self._rules.max_num_batched_tokens if is_alone or not threshold else threshold

    def admit(self, step: StepBuilder) -> None:
        """Take in whoever fits into the rest of a step."""
        waiting = self._table.waiting
        if not (waiting or self._table.swapped) or step.budget <= 0:
            return
        passed_over: list[Group] = []
        if self._delay.holds():
            return
        place = 0
        while place < len(waiting) and step.budget > 0 and self._num_free_seqs() > 0:
            group = waiting[place]
            if any(self._must_not_pass(group, other) for other in passed_over):
                return
            verdict = self.try_admit(group, step)
            if verdict is Verdict.OK:
                for other in passed_over:
                    other.num_overtaken += group.rank == other.rank
            elif verdict is Verdict.LATER:
                passed_over.append(group)
                place += 1
                if len(passed_over) > self._rules.skip_window:
                    return

    def try_admit(self, group: Group, step: StepBuilder) -> Verdict:
        """Let a waiting group run if it fits now; one that never fits ends with an error."""
        if group.has_placeholders or not self._has_adapter_slot(group):
            return Verdict.LATER
        width = self._width(group)
        if width == 0:
            return Verdict.LATER
        verdict = self._take_blocks(group, width, step)
        if verdict is Verdict.OK:
            self._start(group, step)
        return verdict

    def _must_not_pass(self, group: Group, other: Group) -> bool:
        """Whether a group has to wait for another that stands ahead of it and was not admitted."""
        return group.rank > other.rank or (
            group.rank == other.rank and other.num_overtaken >= self._rules.most_overtaken
        )

    def _num_free_seqs(self) -> int:
        return self._rules.max_num_seqs - sum(group.width for group in self._table.running)

    def _has_adapter_slot(self, group: Group) -> bool:
        adapter, most = group.request.source.adapter, self._rules.max_loras
        if adapter is None or most is None:
            return True
        others = {each.request.source.adapter for each in self._table.running} - {None}
        if adapter in others or len(others) < most:
            return True
        self._counters.choices["skip_adapter"] += 1
        return False

    def _width(self, group: Group) -> int:
        """How many sequences of a group may run now; 0: it must wait.

        Samples that are still to be forked may come later. Those that were forked stay together unless there
        are more than may ever run at once, which happens when the limit was lowered.
        """
        room = self._num_free_seqs()
        if group.width <= room:
            return group.width
        if room > 0 and group.pending and group.can_split:
            return room
        if self._table.running:
            return 0
        return max(room, 1) if group.can_split else group.width

    def _take_blocks(self, group: Group, width: int, step: StepBuilder) -> Verdict:
        """Give the leader blocks, if there are enough for the first `width` samples."""
        blocks, pool = self._blocks, self._blocks.pool
        is_alone = not self._table.running
        number = self._counters.num_steps
        if not is_alone and pool.num_free < group.lacking and number - group.tried_at < _LOOK_AGAIN:
            return Verdict.LATER
        leader = group.sequences[0]
        is_forked = min(len(group.sequences), width) > 1
        num_shared = group.num_shared_tokens() if is_forked else leader.num_tokens
        total = blocks.blocks_for_group(group, num_shared, width)
        while total > blocks.num_blocks and group.can_split and width > 1:
            width -= 1
            total = blocks.blocks_for_group(group, num_shared, width)
        if total > blocks.num_blocks:
            self._table.fail_group(group, too_big(leader, blocks, total))
            return Verdict.NEVER
        is_forked = is_forked and width > 1
        if not is_forked:
            num_shared = leader.num_tokens
        hits = blocks.lookup(leader, _most_hit_tokens(group, num_shared - 1))
        chunk = self._chunk(num_shared - hits.num_blocks * blocks.block_size, step)
        needed = blocks.num_needed(hits, num_shared, chunk) + max(total - blocks.blocks_for(num_shared), 0)
        needed += 0 if is_alone else blocks.watermark_blocks
        if needed > pool.num_free or not chunk:
            group.lacking, group.tried_at = needed, number
            return Verdict.LATER
        if width < group.width:
            self._table.split(group, width)
        blocks.take(leader, hits, num_shared, chunk)
        group.shared_until = num_shared if is_forked else 0
        return Verdict.OK

    def _chunk(self, rest: int, step: StepBuilder) -> int:
        """How many of the tokens that a sequence lacks it computes in this step."""
        rules = self._rules
        if not rules.enable_chunked_prefill and step.budget < rest <= rules.max_num_batched_tokens:
            return 0
        return min(rest, step.budget, self.most_at_once)

    def _start(self, group: Group, step: StepBuilder) -> None:
        leader, request = group.sequences[0], group.request
        self._table.run(group)
        if leader.index == 0 and group.num_preemptions == 0:
            request.num_cached_tokens = leader.num_computed_tokens
            self._counters.prompt_tokens += leader.num_prompt_tokens
        self._delay.admitted()
        end = group.shared_until or leader.num_tokens
        count = self._chunk(end - leader.num_computed_tokens, step)
        step.schedule(leader, count)


class PromptDelay:
    """Holds new prompts back while others run, so that more of them are computed together."""

    def __init__(self, rules: Rules, table: RequestTable, clock: Callable[[], float]):
        self._rules = rules
        self._table = table
        self._clock = clock
        self._begun_at = 0.0
        self._has_admitted = False
        self._latency_s = 0.0

    def begin_step(self) -> None:
        """A step begins; the one before it has ended."""
        if self._rules.delay_factor:
            now = self._clock()
            if self._has_admitted:
                self._latency_s = now - self._begun_at
            self._begun_at, self._has_admitted = now, False

    def admitted(self) -> None:
        """This step computes a prompt."""
        self._has_admitted = True

    def holds(self) -> bool:
        """Whether waiting groups must wait on: somebody runs, and the oldest has not waited long enough."""
        factor = self._rules.delay_factor
        if not factor or not self._table.running or not self._table.waiting:
            return False
        oldest = min(group.request.arrived_at for group in self._table.waiting)
        return self._clock() - oldest <= factor * self._latency_s


def _most_hit_tokens(group: Group, most: int) -> int:
    """How far the cache may cover a group's beginning: prompt tokens that need a score are computed."""
    request = group.request
    if request.next_scored < len(request.prompt):
        return min(most, request.next_scored - 1)
    return most
