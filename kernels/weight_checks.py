"""Checks at the door of what is done to weights as they are loaded: laid out, turned, rounded."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.errors import KernelError, ShapeError
from batchgen.kernels.checks import Home, disagree, given, is_at, is_out, is_quantized
from batchgen.kernels.coded import MOST_BITS, Coded
from batchgen.kernels.quantized import MAX_WIDTH, Quantized


def check_weight(home: Home, weight: Tensor, bias: Tensor | None) -> None:
    """Want weight [N, K] and bias [N], of any floating dtype."""
    tensors = given(weight=weight, bias=bias)
    if (
        weight.dim() != 2
        or (bias is not None and bias.shape != weight.shape[:1])
        or not is_at(home.device, *tensors.values())
        or not all(tensor.is_floating_point() for tensor in tensors.values())
    ):
        raise disagree("pack_linear", home, **tensors)


def check_int8_weight(home: Home, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    """Want weight int8 [N, K], scale float32 [N], bias [N] of any floating dtype."""
    tensors = given(weight=weight, scale=scale, bias=bias)
    if (
        weight.dim() != 2
        or weight.dtype is not torch.int8
        or scale.dtype is not torch.float32
        or scale.shape != weight.shape[:1]
        or (bias is not None and (bias.shape != scale.shape or not bias.is_floating_point()))
        or not is_at(home.device, *tensors.values())
    ):
        raise disagree("pack_int8", home, **tensors)
    if weight.shape[1] > MAX_WIDTH:
        raise ShapeError(f"pack_int8: sums over more than {MAX_WIDTH} inputs overflow; got {weight.shape[1]}")


def check_coded_weight(home: Home, coded: Coded, bias: Tensor | None) -> None:
    """Want all parts of a `Coded` as it says, codes and groups in range; bias [N] of any floating dtype."""
    (outputs, inputs), groups = coded.shape, coded.groups
    tensors = given(
        codes=coded.codes, scale=coded.scale, zero=coded.zero, least=coded.least, table=coded.table,
        groups=groups, bias=bias,
    )  # fmt: skip
    per_group = [tensor for tensor in (coded.scale, coded.zero, coded.least) if tensor is not None]
    wanted_groups = coded.num_groups if groups is not None else -(-inputs // max(coded.group_size, 1))
    if (
        coded.codes.dim() != 2
        or coded.codes.dtype is not torch.uint8
        or not 1 <= coded.bits <= MOST_BITS
        or (groups is None and not 1 <= coded.group_size <= max(inputs, 1))
        or any(tensor.shape != (outputs, wanted_groups) for tensor in per_group)
        or coded.scale.dtype not in (torch.float32, torch.float16, torch.bfloat16)
        or (coded.zero is not None and (coded.zero.dtype is not torch.uint8 or coded.least is not None))
        or (coded.least is not None and coded.least.dtype is not coded.scale.dtype)
        or (coded.table is not None and coded.table.shape != (2**coded.bits,))
        or (groups is not None and (groups.shape != (inputs,) or groups.dtype is not torch.int32))
        or (bias is not None and (bias.shape != (outputs,) or not bias.is_floating_point()))
        or not is_at(home.device, *tensors.values())
    ):
        error = disagree("pack_coded", home, **tensors)
        raise type(error)(f"{error}; {coded.bits} bits, groups of {coded.group_size}")
    if coded.bits < MOST_BITS and coded.codes.numel() and int(coded.codes.max()) >= 2**coded.bits:
        raise KernelError(f"pack_coded: a code of {int(coded.codes.max())} has more than {coded.bits} bits")
    if groups is not None and inputs and not 0 <= int(groups.min()) <= int(groups.max()) < wanted_groups:
        raise KernelError(f"pack_coded: an input belongs to a group outside of the {wanted_groups} there are")


def check_rounding_loss(home: Home, weight: Tensor, rounded: Quantized, mean: Tensor) -> None:
    """Want weight [N, K] contiguous, rounded to 8 bits; mean [K]."""
    rows, width = rounded.shape
    if (
        weight.shape != (rows, width)
        or mean.shape != (width,)
        or not is_quantized(rounded, rows, width, home.device)
        or rounded.bits != 8
        or not _are_dense_floats(home, weight, mean)
    ):
        raise disagree("rounding_loss", home, weight=weight, values=rounded.values, mean=mean)


def check_kronecker(
    home: Home, x: Tensor, scale: Tensor, factors: Sequence[Tensor], dim: int, out: Tensor | None
) -> None:
    """Want x of two dimensions, scale [E], factors square with sizes that multiply to E."""
    sizes = [len(factor) for factor in factors]
    if (
        x.dim() != 2
        or scale.shape != x.shape[dim : dim + 1]
        or math.prod(sizes) != x.shape[dim]
        or any(factor.shape != (size, size) for factor, size in zip(factors, sizes, strict=True))
        or not _are_dense_floats(home, x, scale, *factors)
        or not is_out(out, home, tuple(x.shape))
    ):
        shown = {f"factor_{number}": factor for number, factor in enumerate(factors)}
        raise disagree("kronecker", home, **given(x=x, scale=scale, out=out), **shown)


def _are_dense_floats(home: Home, *tensors: Tensor) -> bool:
    return is_at(home.device, *tensors) and all(
        tensor.dtype is torch.float32 and tensor.is_contiguous() for tensor in tensors
    )
