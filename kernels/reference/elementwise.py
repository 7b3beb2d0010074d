"""Norm, rotary embedding and gate of the reference backend."""

import torch
from torch import Tensor
from torch.nn import functional

from batchgen.errors import KernelError


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums are kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X / sqrt(mean(x²) + eps) * weight, over the last dimension."""
    wide = x.to(working_dtype(x))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def rotary(x: Tensor, positions: Tensor, cos_sin: Tensor, is_neox: bool) -> None:
    """Rotate x [T, heads, D] in place."""
    if positions.numel() and (int(positions.min()) < 0 or int(positions.max()) >= cos_sin.shape[0]):
        raise KernelError(f"rotary: a position is outside of the {cos_sin.shape[0]} in the table")
    half = cos_sin.shape[1] // 2
    angles = cos_sin[positions].to(working_dtype(x))
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    if is_neox:
        first, second = x[..., :half], x[..., half : 2 * half]
    else:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    first.copy_(rotated_first)
    second.copy_(rotated_second)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate_up holds gate and up side by side."""
    gate, up = gate_up.to(working_dtype(gate_up)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)
