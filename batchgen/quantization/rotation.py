"""Rotation: an orthogonal matrix that spreads what is in few dimensions over all of them, applied in place.

Integers with one scale for a token suit activations whose dimensions are about equally large. In the residual
stream of a language model a few are a hundred times as large as the rest. Turned by an orthogonal matrix it
carries the same, evenly spread, and the matrix disappears in the weights around it.
Source: Ashkboos et al. 2024, arXiv:2404.00456, section 3.
"""

import math

import torch
from torch import Tensor

# Largest factor by butterflies; the rest is one small matrix.
_MOST_BUTTERFLIES = 64


class Rotation:
    """The orthogonal matrix R [E, E] = signs · (M ⊗ H): M of size E / 2^n, H the Hadamard matrix of size 2^n.

    M is the discrete Hartley transform: orthogonal at any size, symmetric, its entries at most √2 times as
    large as if all were equal. Signs break up what the first, constant column would sum.

    Args:
        size: E.
        seed: of the signs.
    """

    def __init__(self, size: int, seed: int = 0):
        self.size = size
        butterflies = math.gcd(size, _MOST_BUTTERFLIES)
        self._hadamard = _hadamard(butterflies)
        self._hartley = _hartley(size // butterflies)
        generator = torch.Generator().manual_seed(seed)
        self._signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0

    def inputs(self, weight: Tensor) -> Tensor:
        """What turned inputs are multiplied by: weight [..., E] -> weight · R, as float32."""
        signs, hartley, hadamard = (
            part.to(weight.device) for part in (self._signs, self._hartley, self._hadamard)
        )
        parts = (weight.to(torch.float32) * signs).unflatten(-1, (len(hartley), len(hadamard)))
        # M is symmetric, as H is.
        return torch.matmul(hartley, torch.matmul(parts, hadamard)).flatten(-2)

    def outputs(self, weight: Tensor) -> Tensor:
        """What gives turned outputs: weight [E, ...] or a bias [E] -> Rᵀ · weight, as float32."""
        return self.inputs(weight.movedim(0, -1)).movedim(-1, 0)


def _hadamard(size: int) -> Tensor:
    """The symmetric Hadamard matrix of a power of two, scaled to be orthogonal. Sylvester 1867."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def _hartley(size: int) -> Tensor:
    """The cosine plus the sine of 2πij / size, scaled to be orthogonal.

    Source: Hartley 1942, doi:10.1109/JRPROC.1942.234333.
    """
    index = torch.arange(size, dtype=torch.float64)
    # The product modulo the size keeps angles small, hence exact.
    angles = torch.outer(index, index) % size * (2 * math.pi / size)
    return ((angles.cos() + angles.sin()) / math.sqrt(size)).to(torch.float32)
