"""BlockPool: the fixed set of KV blocks, who holds them, and which may be reused next."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from batchgen.engine.messages import BLOCK_CACHED, BLOCK_FREE, BLOCK_SHARED, BLOCK_USED

ContentKey = tuple[int, bytes]  # KV group and chained hash: what a full block holds


class BlockPool:
    """Blocks 0 to `num_blocks - 1` with reference counts.

    A block with no holder is free. A free block whose content is known (it has a key) stays usable as cache
    until it is handed out again: blocks without content go first, then the least recently released.

    Args:
        num_blocks: size of the pool.
        on_evict: told the key and the block whenever a block with content is handed out for something else.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[ContentKey, int], None] | None = None):
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._on_evict = on_evict
        self._keys: list[ContentKey | None] = [None] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, those that serve as cache included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that still serve as cache."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one holder each; the caller has checked `num_free`."""
        blocks = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Add a holder; a free block that serves as cache is taken into use."""
        if self.ref_counts[block] == 0:
            del self._cached[block]
        self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one holder from each block, in the order given: the first are reused first."""
        counts = self.ref_counts
        for block in blocks:
            counts[block] -= 1
            if counts[block] == 0:
                if self._keys[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def set_key(self, block: int, key: ContentKey) -> None:
        """Say what a full block in use holds; it is never written again."""
        self._keys[block] = key

    def is_free(self, block: int) -> bool:
        """Whether nobody holds the block."""
        return self.ref_counts[block] == 0

    def forget_all(self) -> None:
        """Drop what is known of every block's content; holders keep their blocks."""
        for block in range(self.num_blocks):
            self._forget(block)
        self._blank.extend(self._cached)
        self._cached.clear()

    def block_map(self) -> bytes:
        """One byte a block: BLOCK_FREE, BLOCK_CACHED, BLOCK_USED or BLOCK_SHARED."""
        return bytes(
            (BLOCK_FREE if key is None else BLOCK_CACHED)
            if count == 0
            else BLOCK_USED
            if count == 1
            else BLOCK_SHARED
            for count, key in zip(self.ref_counts, self._keys, strict=True)
        )

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            if self._on_evict is not None:
                self._on_evict(key, block)
