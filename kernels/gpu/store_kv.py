"""Triton kernel that writes a step's keys and values into the cache."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.kv import LayerKV


@triton.jit
def _store_kernel(
    p_key,
    p_value,
    p_slots,
    p_data,  # [N, 2, B, G, D]
    key_stride,
    value_stride,
    block_size,
    WIDTH: tl.constexpr,  # G * D
    PADDED: tl.constexpr,
):
    """One program writes one token: grid (T,)."""
    i_token = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + i_token).to(tl.int64)
    o_width = tl.arange(0, PADDED)
    # Nothing is written for slot -1.
    mask = o_width < tl.where(slot >= 0, WIDTH, 0)
    b_key = tl.load(p_key + i_token * key_stride + o_width, mask=mask, other=0.0)
    b_value = tl.load(p_value + i_token * value_stride + o_width, mask=mask, other=0.0)
    # The keys of a block come first, then its values.
    p_slot = p_data + (slot // block_size * 2 * block_size + slot % block_size) * WIDTH
    tl.store(p_slot + o_width, b_key, mask=mask)
    tl.store(p_slot + block_size * WIDTH + o_width, b_value, mask=mask)


def store_kv(key: Tensor, value: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
    """See `Kernels.store_kv`. A slot outside of the pool is not noticed: that would wait for the GPU."""
    tokens, heads, head_dim = key.shape
    if tokens == 0:
        return
    width = heads * head_dim
    _store_kernel[(tokens,)](
        key,
        value,
        slot_mapping,
        kv.data,
        key.stride(0),
        value.stride(0),
        kv.spec.block_size,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
    )
