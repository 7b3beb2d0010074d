"""Counters of the engine since its start, and the snapshot made of them."""

import time
from collections import Counter
from typing import TYPE_CHECKING

from batchgen.engine.messages import EngineStats

if TYPE_CHECKING:
    from batchgen.engine.scheduler import Scheduler


class Counters:
    """What has happened since the start."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_requests_finished = 0
        self.step_time_s = 0.0
        self.choices: Counter[str] = Counter()

    def preempted(self, mode: str) -> int:
        """Count a preemption and how it was done; returns its running number."""
        self.choices[f"preempt_{mode}"] += 1
        return self.num_preemptions

    @property
    def num_preemptions(self) -> int:
        """Sequences whose blocks were taken."""
        return sum(count for choice, count in self.choices.items() if choice.startswith("preempt_"))


def snapshot(scheduler: "Scheduler", *, is_paused: bool = False, with_block_map: bool = False) -> EngineStats:
    """The numbers of this moment; the block map costs a byte and some tens of nanoseconds a block."""
    counters, blocks, table = scheduler.counters, scheduler.blocks, scheduler.table
    pool, cache = blocks.pool, blocks.cache
    return EngineStats(
        time_s=time.time(),
        num_waiting=sum(group.width for group in table.waiting),
        num_running=sum(len(group.sequences) for group in table.running),
        num_swapped=sum(group.width for group in table.swapped),
        num_blocks=pool.num_blocks,
        num_cpu_blocks=blocks.host_pool.num_blocks,
        num_used_cpu_blocks=blocks.host_pool.num_blocks - blocks.host_pool.num_free,
        num_pinned_blocks=len(set(scheduler.pins.held_blocks())),
        num_used_blocks=pool.num_blocks - pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_steps=counters.num_steps,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        prefix_cache_queries=cache.num_queried_tokens,
        prefix_cache_hits=cache.num_hit_tokens,
        num_preemptions=counters.num_preemptions,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_tokens=counters.num_accepted_tokens,
        num_requests_finished=counters.num_requests_finished,
        step_time_s=counters.step_time_s,
        is_paused=is_paused,
        max_num_seqs=scheduler.rules.max_num_seqs,
        choices=dict(counters.choices),
        block_map=pool.block_map() if with_block_map else None,
    )
