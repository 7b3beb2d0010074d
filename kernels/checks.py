"""Checks of shapes, dtypes and devices at the door: a kernel that follows reads memory without looking.

They run at every call of a step, so each asks a tensor for its shape and strides once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.errors import DeviceError, KernelError, ShapeError
from batchgen.kernels.backend import PackedLinear
from batchgen.kernels.kv import AttentionMeta, LayerKV
from batchgen.kernels.quantized import GROUP, Quantized


@dataclass(frozen=True, slots=True)
class Home:
    """What every activation must be: of this dtype, on a device of this type."""

    dtype: torch.dtype
    device: str


def disagree(op: str, home: Home, **tensors: Tensor) -> KernelError:
    """The error that describes the tensors: DeviceError if they are elsewhere, ShapeError otherwise."""
    parts = ", ".join(
        f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} strides {tensor.stride()} "
        f"on {tensor.device}"
        for name, tensor in tensors.items()
    )
    if any(tensor.device.type != home.device for tensor in tensors.values()):
        return DeviceError(f"{op}: every tensor must be on {home.device}: {parts}")
    return ShapeError(
        f"{op}: wrong or disagreeing tensors (kernels of {home.dtype}): {parts}; see Kernels.{op}"
    )


def is_at(device: str, *tensors: Tensor) -> bool:
    """Whether all are on devices of that type."""
    # A loop: a generator costs twice the time.
    for tensor in tensors:  # noqa: SIM110
        if tensor.device.type != device:
            return False
    return True


def is_out(out: Tensor | None, home: Home, shape: tuple[int, ...]) -> bool:
    """Whether it can take a result of that shape; None can."""
    return out is None or (
        out.shape == shape
        and out.dtype is home.dtype
        and out.is_contiguous()
        and out.device.type == home.device
    )


def is_part_out(out: Tensor | None, home: Home, shape: tuple[int, int]) -> bool:
    """The same for a result that may be some columns of a wider one; None can take it."""
    return out is None or (
        out.shape == shape
        and (out.stride()[1] == 1 or shape[1] == 1)
        and out.dtype is home.dtype
        and out.device.type == home.device
    )


def given(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Those that are there."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def check_linear(home: Home, x: Tensor, packed: PackedLinear, out: Tensor | None) -> None:
    """Want x [T, K] with dense rows; out [T, N] contiguous."""
    shape = x.shape
    if (
        len(shape) != 2
        or shape[1] != packed.in_features
        or x.stride()[1] != 1
        or x.dtype is not home.dtype
        or not is_at(home.device, x)
        or not is_out(out, home, (shape[0], packed.out_features))
    ):
        error = disagree("linear", home, **given(x=x, out=out))
        raise type(error)(f"{error}; the weight is [{packed.out_features}, {packed.in_features}]")


def check_linear_coded(home: Home, x: Tensor, packed: PackedLinear, out: Tensor | None) -> None:
    """Want what `check_linear` wants; rows of out need only be dense."""
    check_linear(home, x, packed, None)
    if not is_part_out(out, home, (x.shape[0], packed.out_features)):
        error = disagree("linear", home, **given(x=x, out=out))
        raise type(error)(f"{error}; the weight is [{packed.out_features}, {packed.in_features}]")


def is_quantized(x: Quantized, rows: int, width: int, device: str) -> bool:
    """Whether it holds rows of that width as `Quantized` says, dense in a token."""
    shape, stride = x.values.shape, x.values.stride()
    depth = -(-width // GROUP) * GROUP
    return (
        x.width == width
        and len(shape) == 3
        and shape[0] == rows
        and shape[1] in (1, 2)
        and shape[2] == depth
        and stride[2] == 1
        and stride[1] == depth
        and x.values.dtype is torch.int8
        and x.scale.shape == shape[:1]
        and x.scale.dtype is torch.float32
        and x.scale.is_contiguous()
        and is_at(device, x.values, x.scale)
    )


def check_linear_int8(home: Home, x: Quantized, packed: PackedLinear, out: Tensor | None) -> None:
    """Want x [T, K], planes and values dense in a token; rows of out [T, N] dense."""
    rows = x.values.shape[0]
    if not is_quantized(x, rows, packed.in_features, home.device) or not is_part_out(
        out, home, (rows, packed.out_features)
    ):
        error = disagree("linear", home, **given(values=x.values, scale=x.scale, out=out))
        raise type(error)(f"{error}; the weight is [{packed.out_features}, {packed.in_features}]")


def check_quantized_out(op: str, home: Home, rows: int, width: int, out: Quantized) -> None:
    """Want room for [T, K], planes and values dense in a token."""
    if not is_quantized(out, rows, width, home.device):
        raise disagree(op, home, values=out.values, scale=out.scale)


def check_quantized_like(op: str, home: Home, x: Tensor, out: Quantized) -> None:
    """Want x [T, K], and room for it."""
    if x.dim() != 2:
        raise disagree(op, home, x=x, values=out.values)
    check_quantized_out(op, home, x.shape[0], x.shape[1], out)


def check_quantize(home: Home, x: Tensor, out: Quantized) -> None:
    """Want x [T, K] with dense rows, and room for it."""
    if x.stride()[-1] != 1 or x.dtype is not home.dtype or not is_at(home.device, x):
        raise disagree("quantize", home, x=x, values=out.values)
    check_quantized_like("quantize", home, x, out)


def check_gather_rows(home: Home, source: Tensor | PackedLinear, ids: Tensor, out: Tensor | None) -> None:
    """Want source [P, E] contiguous, or packed; ids [T] int64."""
    if isinstance(source, PackedLinear):
        width, table = source.in_features, None
    else:
        width, table = source.shape[-1], source
    if (
        ids.dim() != 1
        or ids.dtype is not torch.int64
        or not ids.is_contiguous()
        or not is_at(home.device, ids)
        or not is_out(out, home, (ids.shape[0], width))
        or (table is not None and (table.dim() != 2 or not is_out(table, home, table.shape)))
    ):
        raise disagree("gather_rows", home, **given(source=table, ids=ids, out=out))


def check_rows(op: str, home: Home, x: Tensor, weight: Tensor, out: Tensor | None) -> None:
    """Want x [T, E] or [T, H, E], dense in all but the first dimension; weight [E]."""
    shape, stride = x.shape, x.stride()
    if (
        stride[-1] != 1
        or not (len(shape) == 2 or (len(shape) == 3 and stride[1] == shape[2]))
        or weight.shape != shape[-1:]
        or x.dtype is not home.dtype
        or weight.dtype is not home.dtype
        or not weight.is_contiguous()
        or not is_at(home.device, x, weight)
        or not is_out(out, home, shape)
    ):
        raise disagree(op, home, **given(x=x, weight=weight, out=out))


def check_residual(home: Home, x: Tensor, residual: Tensor) -> None:
    """Want residual [T, E] contiguous, like x [T, E]."""
    if x.dim() != 2 or not is_out(residual, home, x.shape):
        raise disagree("add_rms_norm", home, x=x, residual=residual)


def _is_heads(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return len(shape) == 3 and stride[2] == 1 and stride[1] == shape[2]


def check_rotary(home: Home, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Want query [T, H, D] and key [T, G, D] dense in a token, positions [T] int64, cos_sin [P, rot_dim]."""
    shape, key_shape, table = query.shape, key.shape, cos_sin.shape
    if (
        not _is_heads(shape, query.stride())
        or not _is_heads(key_shape, key.stride())
        or shape[0] != key_shape[0]
        or shape[2] != key_shape[2]
        or query.dtype is not home.dtype
        or key.dtype is not home.dtype
        or positions.shape != shape[:1]
        or positions.dtype is not torch.int64
        or not positions.is_contiguous()
        or len(table) != 2
        or table[1] > shape[2]
        or table[1] % 2
        or cos_sin.dtype is not (torch.float64 if home.dtype is torch.float64 else torch.float32)
        or not cos_sin.is_contiguous()
        or not is_at(home.device, query, key, positions, cos_sin)
    ):
        raise disagree("rotary", home, query=query, key=key, positions=positions, cos_sin=cos_sin)


def check_silu_mul(home: Home, gate_up: Tensor, out: Tensor | None) -> None:
    """Want gate_up [T, 2I] with dense rows."""
    shape = gate_up.shape
    if (
        len(shape) != 2
        or shape[1] % 2
        or gate_up.stride()[1] != 1
        or gate_up.dtype is not home.dtype
        or not is_at(home.device, gate_up)
        or not is_out(out, home, (shape[0], shape[1] // 2))
    ):
        raise disagree("silu_mul", home, **given(gate_up=gate_up, out=out))


def check_store_kv(home: Home, key: Tensor, value: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
    """Want key and value [T, G, D] dense in a token, heads as the cache has them; slot_mapping [T] int32."""
    shape, spec, data = key.shape, kv.spec, kv.data
    if (
        not _is_heads(shape, key.stride())
        or not _is_heads(value.shape, value.stride())
        or value.shape != shape
        or shape[1] != spec.num_kv_heads
        or shape[2] != spec.head_dim
        or key.dtype is not home.dtype
        or value.dtype is not home.dtype
        or slot_mapping.shape != shape[:1]
        or slot_mapping.dtype is not torch.int32
        or not slot_mapping.is_contiguous()
        or not is_at(home.device, key, value, data, slot_mapping)
    ):
        raise disagree("store_kv", home, key=key, value=value, slot_mapping=slot_mapping, kv=data)


def check_attention(
    home: Home,
    query: Tensor,
    kv: LayerKV,
    meta: AttentionMeta,
    window: int | None,
    soft_cap: float | None,
    out: Tensor | None,
) -> None:
    """Want query [T, H, D] dense in a token, H a multiple of the cache's heads; the meta checked itself."""
    shape, spec, data = query.shape, kv.spec, kv.data
    if (
        not _is_heads(shape, query.stride())
        or shape[2] != spec.head_dim
        or shape[1] % spec.num_kv_heads
        or query.dtype is not home.dtype
        or not is_at(home.device, query, data, meta.seq_lens)
        or not is_out(out, home, shape)
    ):
        raise disagree("attention", home, **given(query=query, kv=data, seq_lens=meta.seq_lens, out=out))
    room = meta.block_tables.shape[1] * spec.block_size
    if meta.max_seq_len > room:
        raise ShapeError(f"attention: max_seq_len {meta.max_seq_len} exceeds the {room} tokens of the tables")
    if window is not None and window < 1:
        raise KernelError(f"attention: window must be 1 or more; got {window}")
    if soft_cap is not None and not soft_cap > 0:
        raise KernelError(f"attention: soft_cap must be above 0; got {soft_cap}")


def check_logits(op: str, logits: Tensor, device: str) -> None:
    """Want logits [R, V] float32 with dense rows, V at least 1."""
    shape = logits.shape
    if len(shape) != 2 or not shape[1] or logits.stride()[1] != 1 or logits.dtype is not torch.float32:
        raise ShapeError(
            f"{op}: logits must be [R, V] float32 with dense rows; got {list(shape)} {logits.dtype} "
            f"strides {logits.stride()}"
        )
    if not is_at(device, logits):
        raise DeviceError(f"{op}: logits must be on {device}; got {logits.device}")
