"""Linear layer on weights of a few bits, of the reference backend."""

from dataclasses import replace

from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from batchgen.errors import KernelError
from batchgen.kernels.backend import PackedLinear
from batchgen.kernels.coded import Coded


class ReferenceCodedLinear(PackedLinear):
    """The codes as they came, decoded for every product."""

    is_coded = True

    def __init__(self, coded: Coded, bias: Tensor | None):
        self.out_features, self.in_features = coded.shape
        self.coded, self.bias = coded, bias

    @override
    def tensors(self) -> list[Tensor]:
        coded = self.coded
        kept = (coded.codes, coded.scale, coded.zero, coded.least, coded.table, coded.groups, self.bias)
        return [tensor for tensor in kept if tensor is not None]


def linear(x: Tensor, packed: ReferenceCodedLinear) -> Tensor:
    """X · weightᵀ + bias."""
    bias = None if packed.bias is None else packed.bias.to(x.dtype)
    return functional.linear(x, packed.coded.dense().to(x.dtype), bias)


def gather_rows(packed: ReferenceCodedLinear, ids: Tensor) -> Tensor:
    """Rows of the decoded weight."""
    coded = packed.coded
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= packed.out_features):
        raise KernelError(f"gather_rows: an id is outside of the {packed.out_features} rows")
    picked = replace(
        coded,
        codes=coded.codes[ids],
        scale=coded.scale[ids],
        zero=None if coded.zero is None else coded.zero[ids],
        least=None if coded.least is None else coded.least[ids],
    )
    return picked.dense()
