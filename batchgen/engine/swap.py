"""Swapper: moves the blocks of a group to host memory and back, each distinct block once."""

from itertools import chain
from typing import NamedTuple

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.group import Group
from batchgen.engine.sequence import Sequence

BlockMoves = list[tuple[int, int]]  # source, target; one of the two is in host memory


class SwapIn(NamedTuple):
    """How a swapped group can come back.

    Args:
        found: host block -> the block of the prefix cache that holds the same.
        missing: host blocks that must be copied, each once.
        num_needed: free blocks that this and the next token of every sequence use up.
    """

    found: dict[int, int]
    missing: list[int]
    num_needed: int


class Swapper:
    """Keeps the computed blocks of swapped groups in host memory.

    What sequences of a group share stays shared there. Blocks that others hold as well lose the group's
    reference only; they are copied like the rest, for nobody knows how long the others keep them.

    Args:
        blocks: the tables and both pools.
    """

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks
        self._host: BlockPool = blocks.host_pool

    def num_distinct(self, group: Group) -> int:
        """Blocks that a swap-out copies."""
        return len(self._computed_blocks(group))

    def swap_out(self, group: Group) -> BlockMoves | None:
        """Move a group's computed blocks to the host; None (nothing changed) when there is no room."""
        distinct = self._computed_blocks(group)
        if len(distinct) > self._host.num_free:
            return None
        targets = dict(zip(distinct, self._host.allocate(len(distinct)), strict=True))
        seen: set[int] = set()
        for sequence in group.sequences:
            computed, released = sequence.num_computed_tokens, sequence.num_released
            count = self._num_blocks(sequence)
            tables = tuple(
                [targets.get(block, -1) for block in table[:count]] for table in sequence.block_tables
            )
            for host in chain.from_iterable(tables):
                if host in seen:
                    self._host.share(host)
                elif host >= 0:
                    seen.add(host)
            self._blocks.free(sequence)
            sequence.host_tables = tables
            sequence.num_computed_tokens, sequence.num_released = computed, released
        return list(targets.items())

    def plan_in(self, group: Group) -> SwapIn:
        """What a swapped group needs to come back. Full blocks are looked for in the prefix cache first."""
        size, pool = self._blocks.block_size, self._blocks.pool
        found: dict[int, int] = {}
        wanted: dict[int, int] = {}  # host block -> sequences that hold it
        num_growing = 0
        for sequence in group.sequences:
            full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // size
            count = self._num_blocks(sequence)
            for index in range(count):
                hosts = [table[index] for table in sequence.host_tables]
                reads = index < full and self._blocks.reads_cache(sequence)
                cached = self._blocks.cache.blocks_at(sequence, index) if reads else [None] * len(hosts)
                for host, block in zip(hosts, cached, strict=True):
                    if host >= 0:
                        wanted[host] = wanted.get(host, 0) + 1
                        if block is not None:
                            found[host] = block
            num_growing += max(-(-sequence.num_tokens // size) - count, 0) * self._blocks.num_groups
        missing = [host for host in wanted if host not in found]
        # Partly filled blocks are never in the cache; all holders of one but the last will copy it.
        num_copied = sum(wanted[host] - 1 for host in self._partial(group))
        revived = len({block for block in found.values() if pool.is_free(block)})
        return SwapIn(found, missing, len(missing) + revived + num_growing + num_copied)

    def swap_in(self, group: Group, plan: SwapIn) -> BlockMoves:
        """Give a swapped group blocks again; the caller has seen that there are enough."""
        pool = self._blocks.pool
        place: dict[int, int] = {}
        fresh: set[int] = set()
        for host, block in plan.found.items():
            pool.share(block)
            place[host] = block
        for host, block in zip(plan.missing, pool.allocate(len(plan.missing)), strict=True):
            place[host] = block
        for sequence in group.sequences:
            count = self._num_blocks(sequence)
            for table, hosts in zip(sequence.block_tables, sequence.host_tables, strict=True):
                for host in hosts[:count]:
                    table.append(place.get(host, -1))
                    if host in fresh:
                        pool.share(place[host])
                    elif host >= 0:
                        fresh.add(host)
            sequence.num_cached_blocks = 0
            self._blocks.forget_host(sequence)
        return [(host, place[host]) for host in plan.missing]

    def _computed_blocks(self, group: Group) -> dict[int, None]:
        """The distinct blocks that hold computed tokens, in order."""
        return {
            block: None
            for sequence in group.sequences
            for table in sequence.block_tables
            for block in table[: self._num_blocks(sequence)]
            if block >= 0
        }

    def _partial(self, group: Group) -> set[int]:
        """Host blocks that are partly filled."""
        size = self._blocks.block_size
        return {
            table[sequence.num_computed_tokens // size]
            for sequence in group.sequences
            for table in sequence.host_tables
            if sequence.num_computed_tokens % size
        }

    def _num_blocks(self, sequence: Sequence) -> int:
        return -(-sequence.num_computed_tokens // self._blocks.block_size)
