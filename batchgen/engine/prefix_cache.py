"""PrefixCache: chained hashes of full blocks, and which block holds each."""

import hashlib
from collections.abc import Sequence as Items

from batchgen.engine.block_pool import BlockPool, ContentKey
from batchgen.engine.messages import Feature
from batchgen.engine.sequence import Sequence


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
    parts = [adapter_hash, b"" if cache_salt is None else b"s" + cache_salt.encode(), kv_dtype.encode()]
    parts += [b"%d:%d:" % (feature.offset, feature.length) + feature.content_hash for feature in features]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


class PrefixCache:
    """Finds the blocks that already hold the beginning of a sequence.

    One hash covers a block's token ids and, through its parent, everything before it. With several KV groups
    each group keeps its own block for a hash; a hit needs all of them. Of two blocks with equal content the
    first one is kept.
    """

    def __init__(self, num_blocks: int, block_size: int, num_groups: int = 1):
        self.pool = BlockPool(num_blocks, on_evict=self._evicted)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._block_size = block_size
        self._groups = range(num_groups)
        self._blocks: dict[ContentKey, int] = {}

    def lookup(self, sequence: Sequence) -> list[list[int]]:
        """Per group, the blocks of the longest cached prefix, which never covers the last token."""
        longest = (len(sequence.token_ids) - 1) // self._block_size
        hits: list[list[int]] = [[] for _ in self._groups]
        for index in range(longest):
            content = self._hash(sequence, index)
            found = [self._blocks.get((group, content)) for group in self._groups]
            if None in found:
                break
            for group, block in zip(hits, found, strict=True):
                assert block is not None
                group.append(block)
        return hits

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
                if key not in self._blocks:
                    self._blocks[key] = table[index]
                    self.pool.set_key(table[index], key)
        sequence.num_cached_blocks = max(sequence.num_cached_blocks, num_full_blocks)

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
