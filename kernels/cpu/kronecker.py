"""Vectors times a Kronecker product: calls into kronecker.c."""

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.kernels.cpu.calls import Calls, Operation

_KRONECKER = Operation("kronecker", "pppppnnnnn")


def kronecker(
    calls: Calls, x: Tensor, scale: Tensor, factors: Sequence[Tensor], dim: int, out: Tensor | None
) -> Tensor:
    """See `Kernels.kronecker`."""
    if out is None:
        out = torch.empty(x.shape)
    inner_first = factors[::-1]
    matrices = torch.empty(sum(factor.numel() for factor in inner_first))
    torch.cat([factor.flatten() for factor in inner_first], out=matrices)
    sizes = torch.empty(len(factors), dtype=torch.int64)
    sizes.copy_(torch.tensor([len(factor) for factor in inner_first]))
    calls(
        _KRONECKER, x, out, scale, matrices, sizes, len(factors), x.shape[1 - dim], x.shape[dim],
        x.stride(dim), x.stride(1 - dim),
    )  # fmt: skip
    return out
