"""Pins: prefixes that a caller wants kept in the prefix cache, as long as others can run beside them."""

import logging

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.metrics import Counters
from batchgen.engine.sequence import Sequence

log = logging.getLogger(__name__)


class Pins:
    """Holds blocks of finished requests, by request id; the oldest yield first."""

    def __init__(self, blocks: BlockManager, counters: Counters):
        self._blocks = blocks
        self._counters = counters
        self._held: dict[str, list[int]] = {}

    def held_blocks(self) -> list[int]:
        """The blocks held, one that several prefixes begin with once for each."""
        return [block for held in self._held.values() for block in held]

    def pin(self, sequence: Sequence) -> None:
        """Hold the full blocks of a sequence's prompt, all of which are computed."""
        request_id = sequence.request.request_id
        self.unpin(request_id)
        count = sequence.num_prompt_tokens // self._blocks.block_size
        known = [self._blocks.cache.blocks_at(sequence, index) for index in range(count)]
        held = [block for blocks in known for block in blocks if block is not None]
        for block in held:
            self._blocks.pool.share(block)
        self._held[request_id] = held

    def unpin(self, request_id: str) -> bool:
        """Let go of a prefix; whether there was one of that name."""
        held = self._held.pop(request_id, None)
        if held is None:
            return False
        self._blocks.pool.release(reversed(held))
        return True

    def clear(self) -> None:
        """Let go of all."""
        for request_id in list(self._held):
            self.unpin(request_id)

    def yield_oldest(self) -> bool:
        """Let go of the oldest prefix because nothing else could run; False when there is none."""
        oldest = next(iter(self._held), None)
        if oldest is None:
            return False
        self._counters.choices["unpin_for_room"] += 1
        log.warning("pinned prefix %s gives way: without its blocks no request could run", oldest)
        return self.unpin(oldest)
