"""Admission: which waiting groups may run now, and who may overtake whom."""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from batchgen.engine.adapter_gate import AdapterGate
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.group import Group, GroupState
from batchgen.engine.metrics import Counters
from batchgen.engine.pins import Pins
from batchgen.engine.prefix_cache import Hits
from batchgen.engine.refusals import too_big
from batchgen.engine.request_table import RequestTable
from batchgen.engine.rules import Chunks, PromptDelay, Rules
from batchgen.engine.step import StepBuilder
from batchgen.engine.swap import Swapper

# Blocks may appear in the prefix cache, so a group that lacked some is looked at again after this many steps.
_LOOK_AGAIN = 16


class Verdict(Enum):
    """Whether a waiting group can have its blocks."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class Plan(NamedTuple):
    """How a waiting group can begin.

    Args:
        width: samples that run; the others wait as a further group.
        num_tokens: what the leader computes: all its tokens, or those that all samples have in common.
        hits: of these, what the prefix cache has.
        chunk: tokens of the first step; 0: its budget does not do.
        num_needed: blocks that must be free.
    """

    width: int
    num_tokens: int
    hits: Hits
    chunk: int
    num_needed: int


class Admission:
    """Takes groups from `swapped` and `waiting` into `running`, in the policy's order as far as they fit.

    Args:
        run: lets an admitted group compute in a step.
        clock: seconds.
    """

    def __init__(
        self,
        rules: Rules,
        blocks: BlockManager,
        table: RequestTable,
        swapper: Swapper,
        pins: Pins,
        counters: Counters,
        chunks: Chunks,
        delay: PromptDelay,
        run: Callable[[Group, StepBuilder], None],
        clock: Callable[[], float],
        gate: AdapterGate,
    ):
        self._rules = rules
        self._blocks = blocks
        self._table = table
        self._swapper = swapper
        self._pins = pins
        self._counters = counters
        self._run = run
        self._clock = clock
        self._chunks = chunks
        self._delay = delay
        self._gate = gate

    def admit(self, step: StepBuilder) -> None:
        """Take in whoever fits into the rest of a step: swapped groups first, then waiting ones."""
        table = self._table
        passed_over: list[Group] = []
        while table.swapped and not passed_over and step.budget > 0 and self.num_free_seqs > 0:
            group = table.swapped[0]
            verdict = self.try_swap_in(group, step)
            if verdict is Verdict.OK:
                self._run(group, step)
            elif verdict is Verdict.LATER:
                passed_over.append(group)
        if self._delay.holds():
            return
        most_passed = self._rules.skip_window + len(passed_over)
        place = 0
        while place < len(table.waiting) and step.budget > 0 and self.num_free_seqs > 0:
            group = table.waiting[place]
            if any(self._must_not_pass(group, other) for other in passed_over):
                return
            verdict = self.try_admit(group, step)
            if verdict is Verdict.OK:
                for other in passed_over:
                    other.num_overtaken += group.rank == other.rank
                self._run(group, step)
            elif verdict is Verdict.LATER:
                passed_over.append(group)
                place += 1
                if len(passed_over) > most_passed:
                    return

    def try_admit(self, group: Group, step: StepBuilder) -> Verdict:
        """Move a waiting group to those that run, with its blocks, if it fits; fail it if it never does."""
        width = self._width(group)
        if self._gate.turns_away(group):
            return Verdict.NEVER
        if width == 0 or not self._may_run(group) or not self._may_fit(group):
            return Verdict.LATER
        is_alone = not self._table.running
        plan = self._plan(group, width, step)
        if plan is None:
            return Verdict.NEVER
        while is_alone and plan.num_needed > self._blocks.pool.num_free:
            if self._pins.yield_oldest():
                plan = self._plan(group, width, step) or plan
            elif self._blocks.has_windows and plan.chunk > 1:
                # A long chunk holds more of a window than the tokens after it read.
                plan = self._plan(group, width, step, most=plan.chunk // 2) or plan
            else:
                break
        if plan.num_needed > self._blocks.pool.num_free or not plan.chunk:
            return self._later(group, plan.num_needed)
        self._take(group, plan)
        return Verdict.OK

    def try_swap_in(self, group: Group, step: StepBuilder) -> Verdict:
        """Move a swapped group to those that run, if it fits; one that never does is recomputed or fails."""
        if self._gate.turns_away(group):
            return Verdict.NEVER
        has_seats = group.width <= self.num_free_seqs or not self._table.running
        if not has_seats or not self._may_run(group) or not self._may_fit(group):
            return Verdict.LATER
        if self._blocks.blocks_for_group(group, group.width) > self._blocks.num_blocks:
            self._table.forget_swapped(group)
            return Verdict.NEVER
        is_alone = not self._table.running
        while True:
            plan = self._swapper.plan_in(group)
            if plan.num_needed + self._reserve <= self._blocks.pool.num_free:
                break
            if not is_alone:
                return self._later(group, plan.num_needed + self._reserve)
            if not self._pins.yield_oldest():
                # Samples that drew the same apart hold more blocks than they share when they are recomputed.
                self._table.forget_swapped(group)
                return Verdict.NEVER
        step.swap_in += self._swapper.swap_in(group, plan)
        self._table.run(group)
        return Verdict.OK

    def lacking(self, group: Group, step: StepBuilder) -> tuple[int, int] | None:
        """Sequences and blocks that a group lacks; None if it lacks nothing, or room would not help."""
        if not self._may_run(group) or self._delay.holds():
            return None
        num_free = self._blocks.pool.num_free
        if group.state is GroupState.SWAPPED:
            num_seqs = group.width - self.num_free_seqs
            num_blocks = self._swapper.plan_in(group).num_needed + self._reserve - num_free
        else:
            may_narrow = group.pending and group.can_split
            width = min(group.width, self._rules.max_num_seqs) if may_narrow else group.width
            plan = self._plan(group, width, step)
            if plan is None or not plan.chunk:
                return None
            num_seqs = plan.width - self.num_free_seqs
            num_blocks = plan.num_needed - num_free
        return (num_seqs, num_blocks) if num_seqs > 0 or num_blocks > 0 else None

    def _may_run(self, group: Group) -> bool:
        """Whether nothing but room can keep a group from running now."""
        return not group.has_placeholders and self._gate.is_open(group)

    def _may_fit(self, group: Group) -> bool:
        """Whether there are more free blocks than when a group lacked some, or that was long ago."""
        if not self._table.running or self._blocks.pool.num_free >= group.lacking:
            return True
        return self._counters.num_steps - group.tried_at >= _LOOK_AGAIN

    def _later(self, group: Group, num_needed: int) -> Verdict:
        group.lacking, group.tried_at = num_needed, self._counters.num_steps
        return Verdict.LATER

    @property
    def num_free_seqs(self) -> int:
        """Sequences that may run besides those that do."""
        return self._rules.max_num_seqs - sum(group.width for group in self._table.running)

    @property
    def _reserve(self) -> int:
        """Blocks that admission leaves free, for those that run to grow."""
        return self._blocks.watermark_blocks if self._table.running else 0

    def _plan(self, group: Group, width: int, step: StepBuilder, most: int | None = None) -> Plan | None:
        """How the first `width` samples of a waiting group can begin; None: never, and it has ended so.

        `most` tokens are computed at first, if it is given.
        """
        blocks = self._blocks
        leader = group.sequences[0]
        total = blocks.blocks_for_group(group, width)
        while total > blocks.num_blocks and group.can_split and width > 1:
            width -= 1
            total = blocks.blocks_for_group(group, width)
        if total > blocks.num_blocks:
            self._table.fail_group(group, too_big(leader, blocks, total))
            return None
        is_forked = min(len(group.sequences), width) > 1
        num_tokens = group.num_shared_tokens() if is_forked else leader.num_tokens
        hits = blocks.lookup(leader, _most_hit_tokens(group, num_tokens - 1))
        chunk = self._chunks.size(num_tokens - hits.num_blocks * blocks.block_size, step.budget)
        chunk = min(chunk, most or chunk)
        apart = max(total - blocks.blocks_for(num_tokens), 0)
        needed = self._num_needed(hits, num_tokens, chunk, apart)
        return Plan(width, num_tokens, hits, chunk, needed)

    def _num_needed(self, hits: Hits, num_tokens: int, chunk: int, apart: int) -> int:
        return self._blocks.num_needed(hits, num_tokens, chunk) + apart + self._reserve

    def _take(self, group: Group, plan: Plan) -> None:
        if plan.width < group.width:
            self._table.split(group, plan.width)
        leader, request = group.sequences[0], group.request
        self._blocks.take(leader, plan.hits, plan.num_tokens, plan.chunk)
        group.shared_until = plan.num_tokens if len(group.sequences) > 1 else 0
        self._table.run(group)
        self._delay.admitted()
        if leader.index == 0 and group.num_preemptions == 0:
            request.scheduled_at = self._clock()
            request.num_cached_tokens = leader.num_computed_tokens
            self._counters.prompt_tokens += leader.num_prompt_tokens

    def _must_not_pass(self, group: Group, other: Group) -> bool:
        """Whether a group has to wait for another that stands ahead of it and was not admitted."""
        return group.rank > other.rank or (
            group.rank == other.rank and other.num_overtaken >= self._rules.most_overtaken
        )

    def _width(self, group: Group) -> int:
        """How many sequences of a group may run now; 0: it must wait.

        Samples that are still to be forked may come later. Those that were forked stay together unless there
        are more than may ever run at once, which happens when the limit was lowered.
        """
        room = self.num_free_seqs
        if group.width <= room:
            return group.width
        if room > 0 and group.pending and group.can_split:
            return room
        if self._table.running:
            return 0
        return max(room, 1) if group.can_split else group.width


def _most_hit_tokens(group: Group, most: int) -> int:
    """How far the cache may cover a group's beginning: prompt tokens that need a score are computed."""
    request = group.request
    if request.next_scored < len(request.prompt):
        return min(most, request.next_scored - 1)
    return most
