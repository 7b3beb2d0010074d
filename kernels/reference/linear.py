"""Linear layer of the reference backend."""

from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from batchgen.errors import KernelError
from batchgen.kernels.backend import PackedLinear


class ReferenceLinear(PackedLinear):
    """The weight as it came."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    @override
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def linear(x: Tensor, packed: ReferenceLinear) -> Tensor:
    """X · weightᵀ + bias."""
    return functional.linear(x, packed.weight, packed.bias)


def gather_rows(source: Tensor | ReferenceLinear, ids: Tensor) -> Tensor:
    """Rows of a table or of a weight."""
    table = source.weight if isinstance(source, ReferenceLinear) else source
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= table.shape[0]):
        raise KernelError(f"gather_rows: an id is outside of the {table.shape[0]} rows")
    return table[ids]
