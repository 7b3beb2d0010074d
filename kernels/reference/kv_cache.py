"""KV cache of the reference backend: data [N, 2, B, G, D], keys then values.

With int8 and fp8 a row is D bytes, padded to a multiple of four, and the four of a float32 scale.
"""

import torch
from torch import Tensor

from batchgen.errors import KernelError
from batchgen.kernels.kv import SCALE_BYTES, SCALED, KVCacheSpec, LayerKV, torch_dtype

# The largest number that a byte holds.
LEVELS = {"int8": 127, "fp8": 448}


def block_bytes(spec: KVCacheSpec) -> int:
    """Bytes of a block."""
    row_bytes = _width(spec) * torch_dtype(spec.dtype).itemsize
    return 2 * spec.block_size * spec.num_kv_heads * row_bytes


def allocate(spec: KVCacheSpec, num_blocks: int, device: torch.device, backend: str) -> LayerKV:
    """Blocks of one layer, uninitialised."""
    shape = (num_blocks, 2, spec.block_size, spec.num_kv_heads, _width(spec))
    return LayerKV(spec, torch.empty(shape, dtype=torch_dtype(spec.dtype), device=device), backend)


def store(key: Tensor, value: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
    """Write one token into each slot; -1 is skipped."""
    block_size = kv.spec.block_size
    if slot_mapping.numel() and int(slot_mapping.max()) >= kv.num_blocks * block_size:
        raise KernelError(f"store_kv: slot {int(slot_mapping.max())} is outside of {kv.num_blocks} blocks")
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored].long()
    key, value = key[is_stored], value[is_stored]
    if kv.spec.dtype in SCALED:
        key, value = _quantize(key, value, kv.spec.dtype)
    else:
        key, value = key.to(kv.data.dtype), value.to(kv.data.dtype)
    kv.data[slots // block_size, 0, slots % block_size] = key
    kv.data[slots // block_size, 1, slots % block_size] = value


def read(kv: LayerKV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens in the slots, as floats."""
    block, offset = slots.long() // kv.spec.block_size, slots.long() % kv.spec.block_size
    key, value = kv.data[block, 0, offset], kv.data[block, 1, offset]
    if kv.spec.dtype in SCALED:
        return _dense(key, kv.spec), _dense(value, kv.spec)
    wide = torch.float64 if kv.data.dtype == torch.float64 else torch.float32
    return key.to(wide), value.to(wide)


def _width(spec: KVCacheSpec) -> int:
    return -(-spec.head_dim // 4) * 4 + SCALE_BYTES if spec.dtype in SCALED else spec.head_dim


def _quantize(key: Tensor, value: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Rows of bytes and scale: the largest magnitude becomes the largest number, ties go to the even one.

    A token that is not finite gets NaN as the scale of its keys and zeros elsewhere.
    """
    key, value = key.float(), value.float()
    key_scale, value_scale = (x.abs().amax(-1, keepdim=True) / LEVELS[dtype] for x in (key, value))
    is_bad = ~(torch.isfinite(key).all(-1) & torch.isfinite(value).all(-1)).unsqueeze(-1)
    value_scale = value_scale.masked_fill(is_bad, 0.0)
    key_bytes = _bytes(key, key_scale.masked_fill(is_bad, 0.0), dtype)
    return (
        _rows(key_bytes, key_scale.masked_fill(is_bad, float("nan"))),
        _rows(_bytes(value, value_scale, dtype), value_scale),
    )


def _bytes(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    numbers = torch.where(scale > 0, x / scale, 0.0).clamp(-LEVELS[dtype], LEVELS[dtype])
    if dtype == "fp8":
        return numbers.to(torch.float8_e4m3fn).view(torch.int8)
    return numbers.round().to(torch.int8)


def _rows(numbers: Tensor, scale: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % 4))
    return torch.cat([padded, scale.contiguous().view(torch.int8)], dim=-1)


def _dense(rows: Tensor, spec: KVCacheSpec) -> Tensor:
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    numbers = rows[..., : spec.head_dim].contiguous()
    return (numbers.view(torch.float8_e4m3fn) if spec.dtype == "fp8" else numbers).float() * scale
