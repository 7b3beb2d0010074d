"""Whole KV blocks: copied within a pool, swapped to host memory and back. Needs no layout.

A block is outermost and contiguous in `LayerKV.data`, so these serve every backend.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from batchgen.errors import KernelError, ShapeError
from batchgen.kernels.kv import LayerKV


def copy(kv: LayerKV, pairs: Tensor) -> None:
    """See `Kernels.copy_blocks`."""
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64:
        raise ShapeError(f"copy_blocks: pairs must be [P, 2] int64; got {list(pairs.shape)} {pairs.dtype}")
    if pairs.shape[0]:
        kv.data[pairs[:, 1]] = kv.data[pairs[:, 0]]


def swap(source: LayerKV, target: LayerKV, pairs: Sequence[tuple[int, int]]) -> None:
    """See `Kernels.swap_blocks`."""
    if source.data.shape[1:] != target.data.shape[1:] or source.data.dtype != target.data.dtype:
        raise ShapeError(
            f"swap_blocks: blocks of {list(source.data.shape[1:])} {source.data.dtype} do not go into blocks "
            f"of {list(target.data.shape[1:])} {target.data.dtype}"
        )
    for first, then in pairs:
        if not (0 <= first < source.num_blocks and 0 <= then < target.num_blocks):
            raise KernelError(
                f"swap_blocks: pair ({first}, {then}) is outside of pools of {source.num_blocks} and "
                f"{target.num_blocks} blocks"
            )
    for first, then, count in _runs(pairs):
        target.data[then : then + count].copy_(source.data[first : first + count], non_blocking=True)


def allocate_host(caches: Sequence[LayerKV], num_blocks: int) -> list[LayerKV]:
    """See `Kernels.allocate_host_kv`, for blocks on a GPU: pinned, so that copies need not wait."""
    # One piece for all: the allocator of pinned memory rounds each piece up to a power of two.
    sizes = [num_blocks * kv.data[0].nbytes for kv in caches]
    pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    ends = list(accumulate(sizes, initial=0))
    return [
        LayerKV(
            kv.spec, pinned[begin:end].view(kv.data.dtype).view(num_blocks, *kv.data.shape[1:]), kv.backend
        )
        for kv, (begin, end) in zip(caches, pairwise(ends), strict=True)
    ]


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Pairs that follow each other on both sides as one: (source, target, count)."""
    at = 0
    while at < len(pairs):
        first, then = pairs[at]
        count = 1
        while at + count < len(pairs) and pairs[at + count] == (first + count, then + count):
            count += 1
        yield first, then, count
        at += count
