"""Vectors times a Kronecker product, of the reference backend."""

from collections.abc import Sequence

from torch import Tensor


def kronecker(x: Tensor, scale: Tensor, factors: Sequence[Tensor], dim: int) -> Tensor:
    """Each factor along its own axis of the vectors."""
    vectors = (x if dim == 1 else x.T) * scale
    product = vectors.reshape(len(vectors), *(len(factor) for factor in factors))
    for axis, factor in enumerate(factors, start=1):
        product = (product.movedim(axis, -1) @ factor).movedim(-1, axis)
    product = product.reshape(vectors.shape)
    return product if dim == 1 else product.T.contiguous()
