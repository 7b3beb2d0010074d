"""KV cache of the reference backend: data [N, 2, B, G, D], keys then values."""

import torch
from torch import Tensor

from batchgen.errors import KernelError
from batchgen.kernels.kv import KVCacheSpec, LayerKV, torch_dtype


def allocate(spec: KVCacheSpec, num_blocks: int, device: torch.device, backend: str) -> LayerKV:
    """Blocks of one layer, uninitialised."""
    shape = (num_blocks, 2, spec.block_size, spec.num_kv_heads, spec.head_dim)
    return LayerKV(spec, torch.empty(shape, dtype=torch_dtype(spec.dtype), device=device), backend)


def store(key: Tensor, value: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
    """Write one token into each slot; -1 is skipped."""
    block_size = kv.spec.block_size
    if slot_mapping.numel() and int(slot_mapping.max()) >= kv.num_blocks * block_size:
        raise KernelError(f"store_kv: slot {int(slot_mapping.max())} is outside of {kv.num_blocks} blocks")
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored].long()
    kv.data[slots // block_size, 0, slots % block_size] = key[is_stored]
    kv.data[slots // block_size, 1, slots % block_size] = value[is_stored]


def read(kv: LayerKV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens in the slots."""
    block, offset = slots.long() // kv.spec.block_size, slots.long() % kv.spec.block_size
    return kv.data[block, 0, offset], kv.data[block, 1, offset]
