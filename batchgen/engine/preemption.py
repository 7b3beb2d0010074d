"""Preemption: takes the blocks of running groups, and says so."""

import logging

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.group import Group
from batchgen.engine.metrics import Counters
from batchgen.engine.request_table import RequestTable
from batchgen.engine.step import StepBuilder

log = logging.getLogger(__name__)


class Preemption:
    """Makes room by letting running groups wait."""

    def __init__(self, blocks: BlockManager, table: RequestTable, counters: Counters):
        self._blocks = blocks
        self._table = table
        self._counters = counters

    def preempt(self, victim: Group, step: StepBuilder) -> None:
        """Take a running group's blocks; nobody is admitted in this step."""
        step.has_preempted = True
        num_running = sum(len(group.sequences) for group in self._table.running)
        self._table.preempt(victim)
        self._tell(victim, self._counters.preempted("recompute"), num_running)

    def _tell(self, victim: Group, number: int, num_running: int) -> None:
        if number % 50 == 1:
            log.warning(
                "request %s was preempted and will be recomputed (preemption %d): the KV cache of %d blocks "
                "is too small for %d sequences at once; give it more memory (kv_cache_memory_bytes, "
                "gpu_memory_utilization or num_gpu_blocks_override) or lower max_num_seqs",
                victim.request.request_id,
                number,
                self._blocks.num_blocks,
                num_running,
            )
