"""Checks of shapes, dtypes and devices at the door: a kernel that follows reads memory without looking."""

from torch import Tensor

from batchgen.errors import DeviceError, KernelError, ShapeError
from batchgen.kernels.backend import PackedLinear
from batchgen.kernels.kv import AttentionMeta, LayerKV


def _disagree(op: str, **tensors: Tensor) -> ShapeError:
    parts = (
        f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} strides {tensor.stride()}"
        for name, tensor in tensors.items()
    )
    return ShapeError(f"{op}: tensors disagree: {', '.join(parts)}; see Kernels.{op} for the shapes")


def _same_device(op: str, first: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        if tensor.device != first.device:
            raise DeviceError(f"{op}: {name} is on {tensor.device}, the first argument on {first.device}")


def check_linear(x: Tensor, packed: PackedLinear, out: Tensor | None) -> None:
    """Want x [T, K] with dense rows; out [T, N] contiguous."""
    if x.dim() != 2 or x.shape[1] != packed.in_features or x.stride(1) != 1:
        raise ShapeError(
            f"linear: x is {list(x.shape)} with strides {x.stride()}; the weight wants "
            f"[T, {packed.in_features}] with dense rows"
        )
    check_out("linear", x, out, (x.shape[0], packed.out_features))


def check_out(op: str, like: Tensor, out: Tensor | None, shape: tuple[int, ...]) -> None:
    """An `out` that was given is contiguous, of that shape, and of the dtype and device of `like`."""
    if out is None:
        return
    if out.shape != shape or out.dtype != like.dtype or not out.is_contiguous():
        raise _disagree(op, input=like, out=out)
    _same_device(op, like, out=out)


def check_rows(op: str, x: Tensor, weight: Tensor, out: Tensor | None) -> None:
    """Want x [T, E] or [T, H, E], dense in all but the first dimension; weight [E]."""
    is_dense = x.stride(-1) == 1 and (x.dim() == 2 or (x.dim() == 3 and x.stride(1) == x.shape[2]))
    if not is_dense or weight.dim() != 1 or weight.shape[0] != x.shape[-1] or weight.dtype != x.dtype:
        raise _disagree(op, x=x, weight=weight)
    _same_device(op, x, weight=weight)
    check_out(op, x, out, tuple(x.shape))


def check_residual(x: Tensor, residual: Tensor) -> None:
    """Want residual [T, E] contiguous, like x [T, E]."""
    if x.shape != residual.shape or x.dtype != residual.dtype or x.dim() != 2 or not residual.is_contiguous():
        raise _disagree("add_rms_norm", x=x, residual=residual)
    _same_device("add_rms_norm", x, residual=residual)


def _is_heads(x: Tensor) -> bool:
    return x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]


def check_rotary(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Want query [T, H, D] and key [T, G, D] dense in a token, positions [T] int64, cos_sin [P, rot_dim]."""
    if (
        not _is_heads(query)
        or not _is_heads(key)
        or query.shape[0] != key.shape[0]
        or query.shape[2] != key.shape[2]
        or positions.shape != query.shape[:1]
        or not positions.is_contiguous()
        or str(positions.dtype) != "torch.int64"
        or cos_sin.dim() != 2
        or cos_sin.shape[1] > query.shape[2]
        or cos_sin.shape[1] % 2
        or not cos_sin.is_contiguous()
        or query.dtype != key.dtype
    ):
        raise _disagree("rotary", query=query, key=key, positions=positions, cos_sin=cos_sin)
    _same_device("rotary", query, key=key, positions=positions, cos_sin=cos_sin)


def check_silu_mul(gate_up: Tensor, out: Tensor | None) -> None:
    """Want gate_up [T, 2I] with dense rows."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise _disagree("silu_mul", gate_up=gate_up)
    check_out("silu_mul", gate_up, out, (gate_up.shape[0], gate_up.shape[1] // 2))


def check_store_kv(key: Tensor, value: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
    """Want key and value [T, G, D] dense in a token, as the cache has them; slot_mapping [T] int32."""
    spec = kv.spec
    if (
        not _is_heads(key)
        or not _is_heads(value)
        or key.shape != value.shape
        or key.shape[1] != spec.num_kv_heads
        or key.shape[2] != spec.head_dim
        or slot_mapping.shape != key.shape[:1]
        or str(slot_mapping.dtype) != "torch.int32"
        or not slot_mapping.is_contiguous()
        or key.dtype != kv.data.dtype
        or value.dtype != kv.data.dtype
    ):
        raise _disagree("store_kv", key=key, value=value, slot_mapping=slot_mapping, kv=kv.data)
    _same_device("store_kv", key, value=value, slot_mapping=slot_mapping, kv=kv.data)


def check_attention(
    query: Tensor,
    kv: LayerKV,
    meta: AttentionMeta,
    window: int | None,
    soft_cap: float | None,
    out: Tensor | None,
) -> None:
    """Want query [T, H, D] dense in a token, H a multiple of the cache's heads; tables and lengths int32."""
    spec = kv.spec
    if (
        not _is_heads(query)
        or query.shape[2] != spec.head_dim
        or query.shape[1] % spec.num_kv_heads
        or query.dtype != kv.data.dtype
    ):
        raise _disagree("attention", query=query, kv=kv.data)
    starts, lens, tables = meta.query_start_loc, meta.seq_lens, meta.block_tables
    if (
        tables.dim() != 2
        or lens.shape != tables.shape[:1]
        or starts.dim() != 1
        or starts.shape[0] != lens.shape[0] + 1
        or any(str(t.dtype) != "torch.int32" or not t.is_contiguous() for t in (starts, lens, tables))
    ):
        raise _disagree("attention", query_start_loc=starts, seq_lens=lens, block_tables=tables)
    if meta.max_seq_len > tables.shape[1] * spec.block_size:
        raise ShapeError(
            f"attention: max_seq_len {meta.max_seq_len} exceeds the {tables.shape[1]} blocks of "
            f"{spec.block_size} tokens that the tables have room for"
        )
    if window is not None and window < 1:
        raise KernelError(f"attention: window must be 1 or more; got {window}")
    if soft_cap is not None and not soft_cap > 0:
        raise KernelError(f"attention: soft_cap must be above 0; got {soft_cap}")
    _same_device("attention", query, kv=kv.data, query_start_loc=starts, seq_lens=lens, block_tables=tables)
    check_out("attention", query, out, tuple(query.shape))
