"""Linear layer of the reference backend."""

from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from batchgen.kernels.backend import PackedLinear


class ReferenceLinear(PackedLinear):
    """The weight as it came."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    @override
    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids]

    @override
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def linear(x: Tensor, packed: ReferenceLinear) -> Tensor:
    """X · weightᵀ + bias."""
    return functional.linear(x, packed.weight, packed.bias)
