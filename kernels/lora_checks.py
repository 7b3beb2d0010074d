"""Checks at the door of the LoRA operations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.errors import KernelError, ShapeError
from batchgen.kernels.checks import Home, disagree, is_at, is_part_out, is_quantized
from batchgen.kernels.lora import LORA_DTYPES, MOST_RANK, LoraBank, LoraLayer, LoraPart, LoraSegments
from batchgen.kernels.quantized import Quantized


def check_adapter(
    op: str, home: Home, layer: LoraLayer, parts: Sequence[LoraPart | None], dtype: str
) -> torch.dtype:
    """Want a part or None for each of the layer's, that fit it and can be kept in the dtype; returns that."""
    if dtype not in LORA_DTYPES:
        raise KernelError(f"{op}: A and B are kept as {', '.join(LORA_DTYPES)}, not {dtype!r}")
    check_layer(op, layer)
    if len(parts) != len(layer.part_sizes):
        raise ShapeError(f"{op}: {len(parts)} parts of an adapter for {layer}")
    for number, (part, size) in enumerate(zip(parts, layer.part_sizes, strict=True)):
        if part is not None:
            _check_part(f"{op}: part {number}", home, layer, part, size, LORA_DTYPES[dtype])
    return LORA_DTYPES[dtype]


def _check_part(
    where: str, home: Home, layer: LoraLayer, part: LoraPart, size: int, kept: torch.dtype
) -> None:
    tensors = [part.a, part.b] if part.bias is None else [part.a, part.b, part.bias]
    if (
        part.a.dim() != 2
        or part.a.shape[1] != layer.in_features
        or part.b.shape != (size, part.rank)
        or (part.bias is not None and part.bias.shape != (size,))
        or not all(tensor.is_floating_point() for tensor in tensors)
        or not is_at(home.device, *tensors)
    ):
        shown = ", ".join(
            f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
            for name, tensor in zip(("a", "b", "bias"), tensors, strict=False)
        )
        raise ShapeError(
            f"{where}: wants a [r, {layer.in_features}], b [{size}, r] and bias [{size}] or None, floats on "
            f"{home.device}; got {shown}"
        )
    if not 1 <= part.rank <= MOST_RANK:
        raise KernelError(f"{where}: a rank of 1 to {MOST_RANK} is possible; got {part.rank}")
    most = torch.finfo(kept).max
    for name, tensor in (("a", part.a), ("b", part.b)):
        if tensor.numel() and float(tensor.detach().abs().max()) > most:
            raise KernelError(f"{where}: {name} holds a number beyond {most:g}, the largest of {kept}")


def check_layer(op: str, layer: LoraLayer) -> None:
    """Want inputs, and outputs of each part."""
    if layer.in_features < 1 or not layer.part_sizes or min(layer.part_sizes) < 1:
        raise ShapeError(f"{op}: {layer} makes no sense")


def _check_segments(
    op: str, home: Home, bank: LoraBank, segments: LoraSegments, rows: int, out: Tensor, is_table: bool
) -> None:
    if bank.layer.is_table != is_table:
        raise KernelError(f"{op}: the bank is one of {bank.layer}")
    if (
        out.dim() != 2
        or not is_part_out(out, home, (rows, bank.layer.out_features))
        or segments.rows.shape[0] < rows
        or segments.starts.shape[0] != bank.num_slots + 1
        or not is_at(home.device, segments.rows)
    ):
        error = disagree(op, home, out=out, rows=segments.rows, starts=segments.starts)
        raise type(error)(f"{error}; {rows} rows, {bank.num_slots} slots of {bank.layer}")


def check_lora_add(
    home: Home, x: Tensor | Quantized, bank: LoraBank, segments: LoraSegments, out: Tensor
) -> None:
    """Want x [T, K], quantized or with dense rows; out [T, N] with dense rows; segments with room for T."""
    width = bank.layer.in_features
    if isinstance(x, Quantized):
        if not is_quantized(x, x.values.shape[0], width, home.device):
            raise disagree("lora_add", home, values=x.values, scale=x.scale, out=out)
    elif (
        x.dim() != 2
        or x.shape[1] != width
        or (x.stride()[1] != 1 and width > 1)
        or x.dtype is not home.dtype
        or not is_at(home.device, x)
    ):
        error = disagree("lora_add", home, x=x, out=out)
        raise type(error)(f"{error}; the bank is one of {bank.layer}")
    _check_segments("lora_add", home, bank, segments, x.shape[0], out, is_table=False)


def check_lora_gather_add(
    home: Home, ids: Tensor, bank: LoraBank, segments: LoraSegments, out: Tensor
) -> None:
    """Want ids [T] int64; out [T, E] with dense rows; segments with room for T."""
    if (
        ids.dim() != 1
        or ids.dtype is not torch.int64
        or not ids.is_contiguous()
        or not is_at(home.device, ids)
    ):
        raise disagree("lora_gather_add", home, ids=ids, out=out)
    _check_segments("lora_gather_add", home, bank, segments, ids.shape[0], out, is_table=True)


def check_num_slots(num_slots: int) -> None:
    """Want one or more."""
    if num_slots < 1:
        raise KernelError(f"lora_bank: a bank has 1 slot or more; got {num_slots}")
