"""Attention of the reference backend: one sequence after the other, whole score matrices."""

import torch
from torch import Tensor

from batchgen.errors import KernelError
from batchgen.kernels.kv import AttentionMeta, LayerKV
from batchgen.kernels.reference.elementwise import working_dtype
from batchgen.kernels.reference.kv_cache import read


def attention(
    query: Tensor, kv: LayerKV, meta: AttentionMeta, scale: float, window: int | None, soft_cap: float | None
) -> Tensor:
    """Attention of a mixed batch; see `Kernels.attention`."""
    out = torch.empty_like(query)
    starts, lengths = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    for sequence, length in enumerate(lengths):
        first, last = starts[sequence], starts[sequence + 1]
        # What no query sees may be gone.
        unseen = 0 if window is None else max(length - (last - first) - window + 1, 0)
        slots = sequence_slots(meta.block_tables[sequence], unseen, length, kv)
        key, value = read(kv, slots)
        out[first:last] = attend(query[first:last], key, value, scale, window, soft_cap)
    return out


def sequence_slots(table: Tensor, first: int, length: int, kv: LayerKV) -> Tensor:
    """Slots of a sequence's tokens from `first` up to `length`, in order."""
    positions = torch.arange(first, length, device=table.device)
    blocks = table[positions // kv.spec.block_size].long()
    if length > first and (int(blocks.min()) < 0 or int(blocks.max()) >= kv.num_blocks):
        raise KernelError(f"attention: block table outside of {kv.num_blocks} blocks: {table.tolist()}")
    return blocks * kv.spec.block_size + positions % kv.spec.block_size


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, soft_cap: float | None
) -> Tensor:
    """Queries [Q, H, D], the last Q of n tokens that follow each other: key and value [n, G, D]."""
    num_queries, num_heads, _ = query.shape
    length, num_kv_heads, _ = key.shape
    dtype = working_dtype(query)
    key = key.to(dtype).repeat_interleave(num_heads // num_kv_heads, dim=1)
    value = value.to(dtype).repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.to(dtype), key) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(length - num_queries, length, device=query.device)[:, None]
    seen = torch.arange(length, device=query.device)[None, :]
    is_visible = seen <= position
    if window is not None:
        is_visible &= seen > position - window
    weights = torch.softmax(scores.masked_fill(~is_visible, float("-inf")), dim=-1)
    if num_queries == 0 or bool(torch.isfinite(value).all()):
        return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
    # 0 times an infinity is no number: each query sums what it sees alone.
    rows = [
        torch.einsum("hk,khd->hd", weights[:, row, visible], value[visible])
        for row, visible in enumerate(is_visible)
    ]
    return torch.stack(rows).to(query.dtype)
