"""Norm, rotary embedding and gate of the cpu backend: calls into elementwise.c."""

import torch
from torch import Tensor

from batchgen.kernels.cpu.calls import Calls, Operation

_RMS_NORM = Operation("rms_norm", "pnppsnnd")
_ADD_RMS_NORM = Operation("add_rms_norm", "pnpppsnd")
_ROTARY = Operation("rotary", "pnnpnnnpspnnn")
_SILU_MUL = Operation("silu_mul", "pnpsn")


def rms_norm(calls: Calls, x: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    """See `Kernels.rms_norm`."""
    if out is None:
        out = torch.empty(x.shape)
    heads = x.shape[1] if x.dim() == 3 else 1
    calls(_RMS_NORM, x, x.stride(0), weight, out, x.shape[0], heads, x.shape[-1], eps)
    return out


def add_rms_norm(
    calls: Calls, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None
) -> Tensor:
    """See `Kernels.add_rms_norm`."""
    if out is None:
        out = torch.empty(x.shape)
    calls(_ADD_RMS_NORM, x, x.stride(0), residual, weight, out, *x.shape, eps)
    return out


def rotary(
    calls: Calls, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, is_neox: bool
) -> None:
    """See `Kernels.rotary`."""
    tokens, heads, head_dim = query.shape
    table_rows, rot_dim = cos_sin.shape
    calls(
        _ROTARY, query, query.stride(0), heads, key, key.stride(0), key.shape[1], head_dim, positions, tokens,
        cos_sin, table_rows, rot_dim // 2, int(is_neox),
        says=f"a position is outside of the {table_rows} in the table",
    )  # fmt: skip


def silu_mul(calls: Calls, gate_up: Tensor, out: Tensor | None) -> Tensor:
    """See `Kernels.silu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((rows, width))
    calls(_SILU_MUL, gate_up, gate_up.stride(0), out, rows, width)
    return out
