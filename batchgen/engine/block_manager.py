"""BlockManager: gives sequences their blocks, shares them on forks and cache hits, and says what fits."""

from enum import Enum

from batchgen.engine.block_pool import BlockPool
from batchgen.engine.prefix_cache import PrefixCache
from batchgen.engine.sequence import Sequence

BlockCopy = tuple[int, int]  # source block, target block


class Verdict(Enum):
    """Whether a waiting sequence can have its blocks."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockManager:
    """The block tables of all sequences over one pool.

    Args:
        num_blocks: blocks in the pool, shared by all groups.
        block_size: tokens a block holds.
        num_groups: KV groups; each has its own table of blocks for a sequence.
        enable_prefix_caching: whether full blocks can be found again.
        watermark: share of the pool that admission leaves free while others run, so that they can grow for
            some steps before somebody must be preempted.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_groups: int = 1,
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
    ):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_groups = num_groups
        self.enable_prefix_caching = enable_prefix_caching
        self.watermark_blocks = int(num_blocks * watermark)
        self.cache = PrefixCache(num_blocks, block_size, num_groups)
        self.pool: BlockPool = self.cache.pool

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens in all groups together."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def admit(self, sequence: Sequence, *, is_alone: bool) -> Verdict:
        """Give a waiting sequence blocks for all its tokens, as many as possible out of the prefix cache.

        On OK the sequence holds its blocks and `num_computed_tokens` is what the cache covered; otherwise
        nothing has changed.

        Args:
            sequence: holds no blocks.
            is_alone: nothing else runs, so nothing needs to be kept free for it.
        """
        num_tokens = sequence.num_tokens
        total = self.blocks_for(num_tokens)
        if total > self.num_blocks:
            return Verdict.NEVER
        reads_cache = self.enable_prefix_caching and not sequence.request.params.skip_reading_prefix_cache
        hits = self.cache.lookup(sequence) if reads_cache else [[] for _ in range(self.num_groups)]
        num_hits = sum(map(len, hits))
        num_revived = sum(self.pool.is_free(block) for blocks in hits for block in blocks)
        reserve = 0 if is_alone else self.watermark_blocks
        if total - num_hits + num_revived + reserve > self.pool.num_free:
            return Verdict.LATER
        for blocks in hits:
            for block in blocks:
                self.pool.share(block)
        needed = total // self.num_groups - len(hits[0])
        for table, blocks in zip(sequence.block_tables, hits, strict=True):
            table += blocks
            table += self.pool.allocate(needed)
        sequence.num_computed_tokens = len(hits[0]) * self.block_size
        sequence.num_cached_blocks = len(hits[0])
        if reads_cache:
            self.cache.count(num_tokens, sequence.num_computed_tokens)
        return Verdict.OK

    def grow(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        """Make room to write tokens `num_computed_tokens` up to `num_tokens` of a running sequence.

        A partly filled block that others hold too is replaced by a copy of its own.

        Returns: the copies to make before the step writes, or None (nothing changed) when blocks are lacking.
        """
        tables = sequence.block_tables
        computed = sequence.num_computed_tokens
        missing = -(-num_tokens // self.block_size) - len(tables[0])
        tail = computed // self.block_size if computed % self.block_size else None
        counts = self.pool.ref_counts
        shared = [] if tail is None else [table for table in tables if counts[table[tail]] > 1]
        if missing <= 0 and not shared:
            return []
        if max(missing, 0) * self.num_groups + len(shared) > self.pool.num_free:
            return None
        copies = []
        for table in shared:
            assert tail is not None
            (own,) = self.pool.allocate(1)
            copies.append((table[tail], own))
            self.pool.release((table[tail],))
            table[tail] = own
        if missing > 0:
            for table in tables:
                table += self.pool.allocate(missing)
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` hold all blocks of `parent`; the first to write into a partly filled one copies it."""
        child.block_tables = tuple(list(table) for table in parent.block_tables)
        for table in child.block_tables:
            for block in table:
                self.pool.share(block)
        child.num_computed_tokens = parent.num_computed_tokens
        child.block_hashes = list(parent.block_hashes)
        child.num_cached_blocks = parent.num_cached_blocks

    def cache_computed(self, sequence: Sequence) -> None:
        """Offer the sequence's full blocks of known, computed tokens to the prefix cache."""
        if self.enable_prefix_caching:
            full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self.block_size
            if full > sequence.num_cached_blocks:
                self.cache.insert(sequence, full)

    def free(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence; tails first, so that beginnings of prompts stay cached longest."""
        for table in sequence.block_tables:
            self.pool.release(reversed(table))
            table.clear()
        sequence.num_computed_tokens = 0
        sequence.num_cached_blocks = 0
