"""RunningPass: gives running groups the tokens they lack, and makes room for them. No torch."""

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.group import Group
from batchgen.engine.pins import Pins
from batchgen.engine.preemption import Preemption
from batchgen.engine.refusals import outgrown
from batchgen.engine.request_table import RequestTable
from batchgen.engine.rules import Chunks
from batchgen.engine.step import StepBuilder, Work


class RunningPass:
    """The part of a step that running groups have.

    They stand in the order of the policy, so the victim of a preemption is always the last of them, and it
    has never been scheduled in the same step: neither tokens nor copies have to be taken back.
    """

    def __init__(
        self,
        blocks: BlockManager,
        table: RequestTable,
        preemption: Preemption,
        pins: Pins,
        chunks: Chunks,
    ):
        self._blocks = blocks
        self._table = table
        self._preemption = preemption
        self._pins = pins
        self._chunks = chunks

    def run_all(self, step: StepBuilder) -> None:
        """Give every running group as much as the step has, in their order; the last make room if need be."""
        running = self._table.running
        position = 0
        while position < len(running) and step.budget > 0:
            position = step.carry_on(running, position)
            if position < len(running) and step.budget > 0:
                group = running[position]
                work = self._work(group, step.budget)
                while work and not self._schedule_group(work, step):
                    work = self._make_room(group, work, step)
                position += 1

    def run(self, group: Group, step: StepBuilder) -> None:
        """Let a group that was just admitted compute; it waits for the next step if blocks are lacking."""
        work = self._work(group, step.budget)
        while work and not self._schedule_group(work, step):
            work = self._shortened(work)

    def _schedule_group(self, work: list[Work], step: StepBuilder) -> bool:
        """Schedule what sequences of a group compute, if there are blocks for all of it."""
        copies = self._blocks.grow([(each, each.num_computed_tokens + count) for each, count in work])
        if copies is None:
            return False
        step.copies += copies
        for sequence, count in work:
            step.schedule(sequence, count)
        return True

    def _work(self, group: Group, budget: int) -> list[Work]:
        """What the sequences of a running group compute in this step, as far as the budget goes."""
        if group.shared_until and group.sequences[0].num_computed_tokens >= group.shared_until:
            for sequence in group.sequences[1:]:
                self._blocks.fork(group.sequences[0], sequence)
            group.shared_until = 0
        if group.beam is not None and not group.shared_until:
            return _beam_work(group, budget, self._chunks.most)
        if group.shared_until:
            leader = group.sequences[0]
            count = self._chunks.size(group.shared_until - leader.num_computed_tokens, budget)
            return [Work(leader, count)] if count else []
        work: list[Work] = []
        for sequence in group.sequences:
            num_tokens = sequence.num_tokens
            count = num_tokens - sequence.num_computed_tokens
            # A sample that ends with the token under way, whatever that is, computes no other.
            if count <= 0 or num_tokens >= sequence.request.max_total_tokens:
                continue
            if budget == 0:
                break
            if count > 1:
                count = self._chunks.size(count, budget)
                if count == 0:
                    break
            work.append(Work(sequence, count))
            budget -= count
        return work

    def _make_room(self, group: Group, work: list[Work], step: StepBuilder) -> list[Work]:
        """Take blocks from the last; gives what the group can compute then, or nothing."""
        running = self._table.running
        if len(running) > 1:
            self._preemption.preempt(running[-1], step)
            return work if running and running[-1].order >= group.order else []
        if self._pins.yield_oldest():
            return work
        if shorter := self._shortened(work):
            return shorter
        if len(group.sequences) > 1 and group.can_split:
            step.has_preempted = True
            further = self._table.split(group, len(group.sequences) - 1)
            return [each for each in work if each.sequence.group is not further]
        if group.has_placeholders:
            return []  # The token under way may end it without another block.
        failure = outgrown(group, self._blocks)
        self._table.fail_group(group, failure)
        return []

    def _shortened(self, work: list[Work]) -> list[Work]:
        """Less for one sequence alone, whose chunk would hold more of a window than its next tokens read."""
        if len(work) > 1 or work[0].num_tokens == 1 or not self._blocks.has_windows:
            return []
        return [Work(work[0].sequence, work[0].num_tokens // 2)]


def _beam_work(group: Group, budget: int, most: int) -> list[Work]:
    """What the beams of a group compute, each `most` tokens at most: all draw in the same step, or none."""
    if group.has_placeholders:
        return []
    lacking = [each.num_tokens - each.num_computed_tokens for each in group.sequences]
    if sum(lacking) <= budget and max(lacking) <= most:
        return [Work(*each) for each in zip(group.sequences, lacking, strict=True)]
    work: list[Work] = []
    for sequence, count in zip(group.sequences, lacking, strict=True):
        count = min(count - 1, budget, most)
        if count:
            work.append(Work(sequence, count))
            budget -= count
    return work
