"""warn_of_small_pool: says so at start when no sequence can grow to the length that the engine promises."""

import logging
from bisect import bisect_right

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.messages import EngineInfo

log = logging.getLogger(__name__)


def warn_of_small_pool(info: EngineInfo, blocks: BlockManager) -> None:
    """Warn if the pool holds fewer tokens than a sequence may have."""
    size, longest = info.block_size, info.max_model_len
    lengths = range(0, longest + size, size)
    capacity = lengths[bisect_right(lengths, info.num_blocks, key=blocks.blocks_for) - 1]
    if capacity < info.max_model_len:
        log.warning(
            "the KV cache holds %d tokens, fewer than max_model_len (%d): a longer sequence ends with an "
            "error; give it more memory (kv_cache_memory_bytes, gpu_memory_utilization or "
            "num_gpu_blocks_override) or lower max_model_len",
            capacity,
            info.max_model_len,
        )
