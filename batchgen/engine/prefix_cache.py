"""PrefixCache: chained hashes of full blocks, and which block holds each."""

import hashlib
from collections.abc import Sequence as Items
from typing import NamedTuple

from batchgen.engine.block_pool import BlockPool, ContentKey
from batchgen.engine.messages import Feature
from batchgen.engine.sequence import Sequence
from batchgen.windows import first_in_window


def cache_root(
    *,
    adapter_hash: bytes = b"",
    cache_salt: str | None = None,
    features: Items[Feature] = (),
    kv_dtype: str = "auto",
) -> bytes:
    """The first link of a chain: everything besides token ids that a block's keys and values depend on.

    Args:
        adapter_hash: hash of the LoRA adapter's content; empty for the base model. Never its name: an adapter
            loaded anew under the same name is another one.
        cache_salt: requests with different salts share nothing.
        features: stretches whose embeddings come from elsewhere.
        kv_dtype: type in which the cache is kept.
    """
    digest = hashlib.sha256()
    # A salt may be any text, half an emoji included.
    salt = b"" if cache_salt is None else b"s" + cache_salt.encode("utf-8", "surrogatepass")
    parts = [adapter_hash, salt, kv_dtype.encode()]
    parts += [b"%d:%d:" % (feature.offset, feature.length) + feature.content_hash for feature in features]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


class Hits(NamedTuple):
    """Cached blocks at the beginning of a sequence: a table for each KV group, all equally long.

    -1 stands where a block lies behind a sliding window and is not needed.
    """

    tables: tuple[list[int], ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence that need not be computed."""
        return len(self.tables[0])


class PrefixCache:
    """Finds the blocks that already hold the beginning of a sequence.

    One hash covers a block's token ids and, through its parent, everything before it. With several KV groups
    each group keeps its own block for a hash; a hit needs all of them, of a group with a sliding window only
    those that the next query reads. Of two blocks with equal content the first one is kept.

    Args:
        num_blocks, block_size: of the pool.
        group_windows: per KV group the window of its layers, None for full attention.
    """

    def __init__(self, num_blocks: int, block_size: int, group_windows: Items[int | None] = (None,)):
        self.pool = BlockPool(num_blocks, on_evict=self._evicted)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._block_size = block_size
        self._windows = tuple(group_windows)
        self._has_windows = any(window is not None for window in self._windows)
        self._groups = range(len(self._windows))
        self._blocks: dict[ContentKey, int] = {}

    def lookup(self, sequence: Sequence, most_tokens: int) -> Hits:
        """The longest cached prefix of at most `most_tokens` known tokens."""
        longest = most_tokens // self._block_size
        if self._has_windows:
            return self._lookup_windows(sequence, longest)
        hits: tuple[list[int], ...] = tuple([] for _ in self._groups)
        for index in range(longest):
            found = self.blocks_at(sequence, index)
            if None in found:
                break
            for table, block in zip(hits, found, strict=True):
                assert block is not None
                table.append(block)
        return Hits(hits)

    def blocks_at(self, sequence: Sequence, index: int) -> list[int | None]:
        """Per KV group, the block known to hold what the sequence's block `index` holds."""
        content = self._hash(sequence, index)
        return [self._blocks.get((group, content)) for group in self._groups]

    def count(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Add one admitted sequence to the statistics."""
        self.num_queried_tokens += num_queried_tokens
        self.num_hit_tokens += num_hit_tokens

    def insert(self, sequence: Sequence, num_full_blocks: int) -> None:
        """Make the first blocks of a sequence findable; their tokens are known and accepted."""
        for index in range(sequence.num_cached_blocks, num_full_blocks):
            content = self._hash(sequence, index)
            for group, table in zip(self._groups, sequence.block_tables, strict=True):
                key = (group, content)
                if key not in self._blocks and table[index] >= 0:
                    self._blocks[key] = table[index]
                    self.pool.set_key(table[index], key)
        sequence.num_cached_blocks = max(sequence.num_cached_blocks, num_full_blocks)

    def _lookup_windows(self, sequence: Sequence, longest: int) -> Hits:
        """As `lookup` when some group has a window: such a group may lack blocks that no query reads."""
        found: list[list[int | None]] = []
        for index in range(longest):
            blocks = self.blocks_at(sequence, index)
            lacks_full = (
                block is None and window is None for block, window in zip(blocks, self._windows, strict=True)
            )
            if any(lacks_full):
                break
            found.append(blocks)
        for count in range(len(found), 0, -1):
            starts = [first_in_window(count * self._block_size, w, self._block_size) for w in self._windows]
            if all(
                found[index][group] is not None
                for group in self._groups
                for index in range(starts[group], count)
            ):
                return Hits(
                    tuple(
                        [-1] * min(starts[group], count)
                        + [found[index][group] or 0 for index in range(starts[group], count)]
                        for group in self._groups
                    )
                )
        return Hits(tuple([] for _ in self._groups))

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self._block_size
            parent = hashes[-1] if hashes else sequence.request.cache_root
            tokens = sequence.token_ids[start : start + self._block_size].tobytes()
            hashes.append(hashlib.sha256(parent + tokens).digest())
        return hashes[index]

    def _evicted(self, key: ContentKey, block: int) -> None:
        del self._blocks[key]
