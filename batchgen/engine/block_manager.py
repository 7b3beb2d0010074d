"""BlockManager: gives sequences their blocks, shares them on forks and cache hits, and says what fits."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items

from batchgen.engine.block_pool import BlockPool
from batchgen.engine.group import Group
from batchgen.engine.prefix_cache import Hits, PrefixCache
from batchgen.engine.sequence import Sequence
from batchgen.windows import blocks_in_window, first_in_window

BlockCopy = tuple[int, int]  # source block, target block


class BlockManager:
    """The block tables of all sequences over one pool.

    Args:
        num_blocks: blocks in the pool, shared by all groups.
        block_size: tokens a block holds.
        group_windows: an entry for each KV group, each with its own table of blocks for a sequence: the
            sliding window of its layers, None for full attention. Blocks behind a window are released.
        num_cpu_blocks: blocks in host memory, for swapping.
        enable_prefix_caching: whether full blocks can be found again.
        watermark: share of the pool that admission leaves free while others run, so that they can grow for
            some steps before somebody must be preempted.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        group_windows: Items[int | None] = (None,),
        num_cpu_blocks: int = 0,
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
    ):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.group_windows = tuple(group_windows)
        self.num_groups = len(self.group_windows)
        self.enable_prefix_caching = enable_prefix_caching
        self.watermark_blocks = int(num_blocks * watermark)
        self.cache = PrefixCache(num_blocks, block_size, self.group_windows)
        self.pool: BlockPool = self.cache.pool
        self.host_pool = BlockPool(num_cpu_blocks)
        self._windowed = [group for group, window in enumerate(self.group_windows) if window is not None]

    @property
    def has_windows(self) -> bool:
        """Whether some KV group has a sliding window."""
        return bool(self._windowed)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens needs to compute its next, in all KV groups."""
        if not self._windowed:
            return -(-num_tokens // self.block_size) * self.num_groups
        return sum(blocks_in_window(num_tokens, window, self.block_size) for window in self.group_windows)

    def blocks_for_group(self, group: Group, width: int) -> int:
        """Blocks that the first `width` samples of a group need together, those to be forked included.

        Full blocks of what they share are counted once, the partly filled one for each of them.
        """
        lengths = [sequence.num_tokens for sequence in group.sequences[:width]]
        lengths += [lengths[0]] * (width - len(lengths))
        num_shared = group.num_shared_tokens() if len(group.sequences) > 1 else lengths[0]
        shared = num_shared // self.block_size if len(lengths) > 1 else 0
        apart = sum(map(self.blocks_for, lengths))
        blocks = shared + sum(-(-length // self.block_size) - shared for length in lengths)
        return min(apart, blocks * self.num_groups)

    def lookup(self, sequence: Sequence, most_tokens: int) -> Hits:
        """What the prefix cache has of a waiting sequence's first `most_tokens` tokens."""
        if not self.reads_cache(sequence):
            most_tokens = 0
        return self.cache.lookup(sequence, most_tokens)

    def reads_cache(self, sequence: Sequence) -> bool:
        """Whether a sequence may begin with blocks that others computed."""
        return self.enable_prefix_caching and not sequence.request.params.skip_reading_prefix_cache

    def num_needed(self, hits: Hits, num_tokens: int, chunk: int) -> int:
        """Free blocks that `take` uses up; hits that nobody holds are among the free ones."""
        revived = sum(block >= 0 and self.pool.is_free(block) for blocks in hits.tables for block in blocks)
        return revived + sum(self._num_new(hits, num_tokens, chunk))

    def take(self, sequence: Sequence, hits: Hits, num_tokens: int, chunk: int) -> None:
        """Give a waiting sequence its hits, and blocks for `num_tokens` tokens; the caller has checked.

        KV groups with a sliding window get blocks for the first `chunk` tokens only; `grow` gives the others.
        """
        for blocks in hits.tables:
            for block in blocks:
                if block >= 0:
                    self.pool.share(block)
        new = self._num_new(hits, num_tokens, chunk)
        for table, blocks, count in zip(sequence.block_tables, hits.tables, new, strict=True):
            table += blocks
            table += self.pool.allocate(count)
        sequence.num_released = [blocks.count(-1) for blocks in hits.tables]
        sequence.num_computed_tokens = hits.num_blocks * self.block_size
        sequence.num_cached_blocks = hits.num_blocks
        if self.reads_cache(sequence):
            self.cache.count(num_tokens, sequence.num_computed_tokens)

    def grow(self, work: Items[tuple[Sequence, int]]) -> list[BlockCopy] | None:
        """Make room for some sequences of a group to write tokens `num_computed_tokens` up to a given number.

        A partly filled block that others hold too is replaced by a copy of its own. Blocks behind a sliding
        window are released first.

        Returns: the copies to make before the step writes, or None (nobody has got anything) when blocks are
            lacking.
        """
        if self._windowed:
            for sequence, _ in work:
                self._release_behind(sequence)
        if len(work) == 1:
            return self._grow_one(*work[0])
        if self._num_lacking(work) > self.pool.num_free:
            return None
        copies: list[BlockCopy] = []
        for sequence, num_tokens in work:
            made = self._grow_one(sequence, num_tokens)
            assert made is not None
            copies += made
        return copies

    def _grow_one(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy] | None:
        tables = sequence.block_tables
        computed = sequence.num_computed_tokens
        size = self.block_size
        have = len(tables[0]) if self.num_groups == 1 else min(map(len, tables))
        missing = -(-num_tokens // size) - have
        tail = computed // size if computed % size else None
        counts = self.pool.ref_counts
        shared = [] if tail is None else [table for table in tables if counts[table[tail]] > 1]
        if missing <= 0 and not shared:
            return []
        if self._num_missing(tables, num_tokens) + len(shared) > self.pool.num_free:
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
                table += self.pool.allocate(max(-(-num_tokens // size) - len(table), 0))
        return copies

    def grow_for_drafts(self, sequence: Sequence, count: int) -> int:
        """Make room for `count` tokens more than a sequence computes in this step, out of free blocks alone.

        Returns: for how many there is room.
        """
        size = self.block_size
        tables = sequence.block_tables
        end = sequence.num_computed_tokens + count
        while self._num_missing(tables, end) > self.pool.num_free:
            end = (end - 1) // size * size
        for table in tables:
            table += self.pool.allocate(max(-(-end // size) - len(table), 0))
        return end - sequence.num_computed_tokens

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks that no accepted token needs: drafts had needed them."""
        needed = -(-len(sequence.token_ids) // self.block_size)
        for table in sequence.block_tables:
            if len(table) > needed:
                self.pool.release(table[: needed - 1 : -1] if needed else reversed(table))
                del table[needed:]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` hold all blocks of `parent`, in host memory too if they are swapped out.

        The first to write into a partly filled block copies it.
        """
        child.host_tables = tuple(list(table) for table in parent.host_tables)
        for table in child.host_tables:
            for block in table:
                if block >= 0:
                    self.host_pool.share(block)
        child.block_tables = tuple(list(table) for table in parent.block_tables)
        for table in child.block_tables:
            for block in table:
                if block >= 0:
                    self.pool.share(block)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_released = parent.num_released.copy()
        child.num_cached_blocks = parent.num_cached_blocks
        if len(child.block_hashes) < child.num_cached_blocks:
            child.block_hashes = parent.block_hashes[: child.num_cached_blocks]

    def cache_computed(self, sequence: Sequence) -> None:
        """Offer the sequence's full blocks of known, computed tokens to the prefix cache."""
        if self.enable_prefix_caching:
            full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self.block_size
            if full > sequence.num_cached_blocks:
                self.cache.insert(sequence, full)

    def free(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence; tails first, so that beginnings of prompts stay cached longest."""
        for table, released in zip(sequence.block_tables, sequence.num_released, strict=True):
            self.pool.release(table[: released - 1 : -1] if released else reversed(table))
            table.clear()
        self.forget_host(sequence)
        sequence.num_released = [0] * self.num_groups
        sequence.num_computed_tokens = 0
        sequence.num_cached_blocks = 0

    def forget_host(self, sequence: Sequence) -> None:
        """Give up what a sequence has in host memory."""
        for table in sequence.host_tables:
            self.host_pool.release([block for block in table if block >= 0])
        sequence.host_tables = ()

    def num_releasable(self, groups: Iterable[Group]) -> int:
        """Blocks that become free when these groups lose theirs."""
        held = Counter(
            block
            for group in groups
            for sequence in group.sequences
            for table in sequence.block_tables
            for block in table
            if block >= 0
        )
        return sum(self.pool.ref_counts[block] == count for block, count in held.items())

    def _num_new(self, hits: Hits, num_tokens: int, chunk: int) -> list[int]:
        """Per KV group, the blocks that a sequence needs besides its hits."""
        have = hits.num_blocks
        whole = -(-num_tokens // self.block_size) - have
        if not self._windowed:
            return [whole] * self.num_groups
        near = -(-min(num_tokens, have * self.block_size + chunk) // self.block_size) - have
        return [whole if window is None else near for window in self.group_windows]

    def _num_missing(self, tables: Items[list[int]], num_tokens: int) -> int:
        blocks = -(-num_tokens // self.block_size)
        return sum(max(blocks - len(table), 0) for table in tables)

    def _num_lacking(self, work: Items[tuple[Sequence, int]]) -> int:
        """Blocks that several sequences need together, copies of shared ones included."""
        total = 0
        writers: Counter[int] = Counter()
        for sequence, num_tokens in work:
            total += self._num_missing(sequence.block_tables, num_tokens)
            if sequence.num_computed_tokens % self.block_size:
                tail = sequence.num_computed_tokens // self.block_size
                writers.update(table[tail] for table in sequence.block_tables)
        counts = self.pool.ref_counts
        # The last holder of a block writes into it as it is.
        return total + sum(count - (counts[block] <= count) for block, count in writers.items())

    def _release_behind(self, sequence: Sequence) -> None:
        """Give back the blocks that neither the next query nor any after it reads."""
        for group in self._windowed:
            first = first_in_window(sequence.num_computed_tokens, self.group_windows[group], self.block_size)
            table, released = sequence.block_tables[group], sequence.num_released[group]
            first = min(first, len(table))
            if first > released:
                self.pool.release([block for block in table[released:first] if block >= 0])
                table[released:first] = [-1] * (first - released)
                sequence.num_released[group] = first
