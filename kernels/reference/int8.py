"""Linear layer on integers, and activations made integers, of the reference backend."""

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import KernelError
from batchgen.kernels.backend import PackedLinear
from batchgen.kernels.quantized import LEVELS, Quantized

SMALLEST = 2.0**-100  # a token whose largest |x| is below counts as zeros


class ReferenceInt8Linear(PackedLinear):
    """The weight as it came."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None):
        self.out_features, self.in_features = weight.shape
        self.weight, self.scale = weight, scale
        self.bias = None if bias is None else bias.to(torch.float32)

    @override
    def tensors(self) -> list[Tensor]:
        kept = [self.weight, self.scale]
        return kept if self.bias is None else [*kept, self.bias]


def linear(x: Quantized, packed: PackedLinear) -> Tensor:
    """X · weightᵀ + bias, float32. Sums of integers are exact in float64."""
    if not isinstance(packed, ReferenceInt8Linear):
        raise KernelError("linear: quantized activations need a weight from pack_int8 of the same kernels")
    weight, planes = packed.weight.to(torch.float64), x.values[:, :, : x.width]
    total = (planes[:, 0].to(torch.float64) @ weight.T).to(torch.float32)
    if planes.shape[1] == 2:
        low = (planes[:, 1].to(torch.int32) & 255).to(torch.float64)
        total = total * 256.0 + (low @ weight.T).to(torch.float32)
    total = total * x.scale[:, None] * packed.scale
    return total if packed.bias is None else total + packed.bias


def quantize(x: Tensor, out: Quantized) -> Quantized:
    """Round each row by its largest |x|."""
    x = x.to(torch.float32)
    levels = LEVELS[out.bits]
    most = x.abs().amax(dim=1) if x.shape[1] else x.new_zeros(x.shape[0])
    is_broken, is_tiny = ~most.isfinite(), most < SMALLEST
    # Not `levels / most`, which torch rounds twice: it multiplies by the reciprocal.
    factor = torch.where(is_broken | is_tiny, 0.0, torch.full_like(most, levels) / most)
    values = torch.where(is_broken[:, None], 0.0, x * factor[:, None]).round().to(torch.int32)
    out.values.zero_()
    if out.bits == 8:
        out.values[:, 0, : out.width] = values.to(torch.int8)
    else:
        out.values[:, 0, : out.width] = (values >> 8).to(torch.int8)
        out.values[:, 1, : out.width] = values.to(torch.uint8).view(torch.int8)
    out.scale.copy_(
        torch.where(is_broken, torch.nan, torch.where(is_tiny, 0.0, most / torch.full_like(most, levels)))
    )
    return out


def rounding_loss(weight: Tensor, rounded: Quantized, mean: Tensor) -> Tensor:
    """Sums in float64 over the rows of the difference."""
    return (weight - rounded.dense()).to(torch.float64).mul(mean).sum(dim=1).to(torch.float32)
