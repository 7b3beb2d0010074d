"""Preemption: takes the blocks of running groups, by swap or for recompute, and says so."""

import logging

from batchgen.engine.admission import Admission
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.costs import Costs
from batchgen.engine.group import Group, GroupState
from batchgen.engine.metrics import Counters
from batchgen.engine.request_table import RequestTable
from batchgen.engine.step import StepBuilder
from batchgen.engine.swap import Swapper

log = logging.getLogger(__name__)

# Groups that one waiting group may evict in one step; if it needs more, the others follow in the next.
MOST_EVICTED = 4


class Preemption:
    """Makes room by letting running groups wait.

    Args:
        costs: what recomputing and swapping would take.
        mode: "recompute" or "swap" whatever they cost; None: the cheaper.
        block_bytes: size of a block.
    """

    def __init__(
        self,
        blocks: BlockManager,
        table: RequestTable,
        swapper: Swapper,
        counters: Counters,
        costs: Costs,
        *,
        mode: str | None = None,
        block_bytes: int = 0,
    ):
        self._blocks = blocks
        self._table = table
        self._swapper = swapper
        self._counters = counters
        self._costs = costs
        self._mode = mode
        self._block_bytes = block_bytes

    def preempt(self, victim: Group, step: StepBuilder, ahead: Group | None = None) -> None:
        """Take a running group's blocks, for one `ahead` of it or because there are too few of them.

        Nobody is admitted in this step.
        """
        step.has_preempted = True
        num_running = sum(len(group.sequences) for group in self._table.running)
        mode = "swap" if self._swaps(victim, step) else "recompute"
        if mode == "recompute":
            self._table.preempt(victim)
        number = self._counters.preempted(mode)
        if number % 50 == 1:
            log.warning(
                "request %s was preempted and will be %s (preemption %d): %s",
                victim.request.request_id,
                "swapped back in" if mode == "swap" else "recomputed",
                number,
                f"request {ahead.request.request_id} has a higher priority"
                if ahead
                else f"the KV cache of {self._blocks.num_blocks} blocks is too small for {num_running} "
                f"sequences at once; give it more memory (kv_cache_memory_bytes, gpu_memory_utilization or "
                f"num_gpu_blocks_override) or lower max_num_seqs",
            )

    def evict_for_head(self, step: StepBuilder, admission: Admission) -> None:
        """Let the head of the line in, if it is strictly ahead of running groups and lacks only their room.

        A victim is strictly behind, so it can never evict in turn. The head gets its blocks at once; the
        running pass, which comes next, gives it tokens.
        """
        table = self._table
        heads = [queue[0] for queue in (table.swapped, table.waiting) if queue]
        head = min(heads, key=lambda group: group.order, default=None)
        if head is None or not table.running or table.running[-1].rank <= head.rank:
            return
        lacking = admission.lacking(head, step)
        if lacking is None:
            return
        behind = [group for group in reversed(table.running) if group.rank > head.rank]
        count = self._num_victims(behind, *lacking)
        if count == 0:
            return
        for victim in behind[: min(count, MOST_EVICTED)]:
            self._counters.choices["evict_priority"] += 1
            self.preempt(victim, step, ahead=head)
        if head.state is GroupState.SWAPPED:
            # Swap-ins of a step come after its swap-outs, and may not wait for them.
            if not step.swap_out:
                admission.try_swap_in(head, step)
        elif count <= MOST_EVICTED and head.state is GroupState.WAITING:
            admission.try_admit(head, step)

    def _num_victims(self, behind: list[Group], num_seqs: int, num_blocks: int) -> int:
        """How many of the first groups must go to make that much room; 0 when all of them are too few."""
        held = [len(table) for group in behind for each in group.sequences for table in each.block_tables]
        if sum(held) < num_blocks:
            return 0
        for count in range(1, len(behind) + 1):
            num_seqs -= behind[count - 1].width
            if num_seqs <= 0 and self._blocks.num_releasable(behind[:count]) >= num_blocks:
                return count
        return 0

    def _swaps(self, victim: Group, step: StepBuilder) -> bool:
        """Move a victim to host memory if that is the way for it; whether it was done."""
        # A block that this step swaps in is not there yet to be swapped out.
        if self._mode == "recompute" or self._blocks.host_pool.num_blocks == 0 or step.swap_in:
            return False
        num_blocks = self._swapper.num_distinct(victim)
        if num_blocks == 0 or (self._mode is None and not self._is_swap_cheaper(victim, num_blocks)):
            return False
        moves = self._swapper.swap_out(victim)
        if moves is None:
            self._counters.choices["swap_pool_full"] += 1
            return False
        step.swap_out += moves
        self._table.swap_out(victim)
        return True

    def _is_swap_cheaper(self, victim: Group, num_blocks: int) -> bool:
        there_and_back = self._costs.swap_s(2 * num_blocks * self._block_bytes)
        return there_and_back < self._costs.recompute_s(victim.num_distinct_tokens())
