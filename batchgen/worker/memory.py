"""How many KV blocks the pool and the host's pool get, and why."""

from dataclasses import dataclass

from batchgen.config import CacheConfig, Decision
from batchgen.errors import CapacityError, ConfigError
from batchgen.models.kv_layout import KVLayout
from batchgen.worker.decisions import Limits

# Of the memory that is free once the weights are in. The rest is for activations, the row window of the
# caller and everybody else on the machine.
CPU_SHARE = 0.5
# A finished sequence's blocks stay as cache, so a pool fills up however little a job needs. On a CPU it is
# taken from everybody else, and beyond this size it buys nothing, unless sequences are long or the model is
# large.
CPU_ENOUGH_BYTES = 4 << 30
CPU_ENOUGH_SEQS = 4


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The pool's size and the decision behind it."""

    num_blocks: int
    decision: Decision


def plan_blocks(
    cache: CacheConfig, layout: KVLayout, limits: Limits, *, block_bytes: int, free_bytes: int, on_cpu: bool
) -> PoolPlan:
    """Size the pool of KV blocks.

    `num_gpu_blocks_override` is taken as it is, else `kv_cache_memory_bytes`, else a share of the free
    memory; the last never exceeds what `max_num_seqs` sequences of full length need, nor on a CPU the larger
    of 4 GiB and what four such sequences need.

    Args:
        cache: the settings.
        layout: how layers share blocks.
        limits: the longest sequence, how many at once, and the longest chunk.
        block_bytes: of one block at all places.
        free_bytes: memory free now, weights loaded.
        on_cpu: whether blocks live in host memory; then `gpu_memory_utilization` has no say.

    Raises:
        ConfigError: `kv_cache_memory_bytes` is less than a block.
        CapacityError: no block fits what is free, or not all that were asked for.
    """
    blocks_per_seq = layout.blocks_for(limits.max_model_len, limits.max_num_batched_tokens)
    asked = _asked_for(cache, block_bytes, free_bytes)
    if asked is not None:
        blocks, reason = asked
    else:
        share = CPU_SHARE if on_cpu else cache.gpu_memory_utilization
        blocks, reason = _share_of_free(share, limits, blocks_per_seq, block_bytes, free_bytes, on_cpu)
    if len(layout.windows) == 1:
        holds = f"{blocks * cache.block_size} tokens"
    else:
        holds = f"{blocks / blocks_per_seq:.3g} sequences of {limits.max_model_len} tokens"
    text = f"{reason}: {holds}, {blocks * block_bytes / 2**20:.0f} MiB"
    return PoolPlan(blocks, Decision("num_blocks", blocks, text))


def _asked_for(cache: CacheConfig, block_bytes: int, free_bytes: int) -> tuple[int, str] | None:
    """Blocks that the settings name, and the setting's name; None if they leave it to us."""
    if cache.num_gpu_blocks_override is not None:
        blocks, name = cache.num_gpu_blocks_override, "num_gpu_blocks_override"
    elif cache.kv_cache_memory_bytes is not None:
        blocks, name = cache.kv_cache_memory_bytes // block_bytes, "kv_cache_memory_bytes"
        if blocks < 1:
            raise ConfigError(
                f"kv_cache_memory_bytes={cache.kv_cache_memory_bytes} does not hold one block of "
                f"{cache.block_size} tokens ({block_bytes} bytes); give more"
            )
    else:
        return None
    # On a CPU pages are taken when they are first written: too large a pool would end a job hours later.
    if blocks * block_bytes > free_bytes:
        raise CapacityError(
            f"{name} asks for {blocks * block_bytes / 2**20:.0f} MiB of KV blocks, but only "
            f"{free_bytes / 2**20:.0f} MiB of memory are free; give less"
        )
    return blocks, name


def _share_of_free(
    share: float, limits: Limits, blocks_per_seq: int, block_bytes: int, free_bytes: int, on_cpu: bool
) -> tuple[int, str]:
    """Blocks for a share of the free memory, no more than are of use, and why so many."""
    most = limits.max_num_seqs * blocks_per_seq
    blocks = min(most, int(free_bytes * share) // block_bytes)
    enough = max(CPU_ENOUGH_BYTES // block_bytes, CPU_ENOUGH_SEQS * blocks_per_seq)
    if on_cpu and enough < blocks:
        return enough, "enough for most jobs, kv_cache_memory_bytes gives more"
    if blocks < 1:
        raise CapacityError(
            f"{free_bytes / 2**20:.0f} MiB of memory are free, of which {share:.0%} do not hold one KV block "
            f"({block_bytes} bytes); free memory or set kv_cache_memory_bytes"
        )
    if blocks == most:
        return blocks, f"all that {limits.max_num_seqs} sequences of {limits.max_model_len} tokens need"
    return blocks, f"{share:.0%} of {free_bytes / 2**30:.1f} GiB free"


def plan_host_blocks(swap_space: float, *, block_bytes: int, free_bytes: int) -> int:
    """How many blocks `swap_space` GiB of host memory hold; none for 0.

    Raises:
        CapacityError: not a single block fits, or not so much is free.
    """
    if not swap_space:
        return 0
    blocks = int(swap_space * 2**30) // block_bytes
    if blocks < 1:
        raise CapacityError(
            f"swap_space={swap_space:g} GiB does not hold one KV block ({block_bytes} bytes); give more, or "
            f"0 for none"
        )
    if blocks * block_bytes > free_bytes:
        raise CapacityError(
            f"swap_space={swap_space:g} asks for {blocks * block_bytes / 2**20:.0f} MiB of host memory for "
            f"swapped KV blocks, but only {free_bytes / 2**20:.0f} MiB are free; give less"
        )
    return blocks
