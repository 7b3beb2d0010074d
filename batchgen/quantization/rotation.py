"""Rotation: an orthogonal matrix that spreads what is in few dimensions over all of them, applied in place.

Integers with one scale for a token suit activations whose dimensions are about equally large. In the residual
stream of a language model a few are a hundred times as large as the rest. Turned by an orthogonal matrix it
carries the same, evenly spread, and the matrix disappears in the weights around it.
Source: Ashkboos et al. 2024, arXiv:2404.00456, section 3.
"""

import math

import torch
from torch import Tensor

from batchgen.kernels.ops import Kernels
from batchgen.trigonometry import cos_and_sin

# Largest Hadamard matrix of a power of two that is multiplied as one; larger ones are products of several.
_LARGEST_POWER = 64
# Values of a table turned at a time: what is made of them on the way is small beside the table.
_SLAB_VALUES = 1 << 22


class Rotation:
    """An orthogonal matrix R [E, E]: random signs, then a Kronecker product of small orthogonal matrices.

    It is a Hadamard matrix where one is known by the constructions below, so for the sizes of most models:
    all its entries are equally large, and an outlier is spread evenly. Other sizes get a discrete Hartley
    transform in it, with entries up to √2 times as large.

    Args:
        size: E.
        kernels: multiply by it.
        seed: of the signs, which keep a constant direction from going into one dimension.
    """

    def __init__(self, size: int, kernels: Kernels, seed: int = 0):
        self.size, self._kernels = size, kernels
        self._factors = _factors(size)
        generator = torch.Generator().manual_seed(seed)
        self._signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0

    def inputs(self, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        """What turned inputs are multiplied by: weight [..., E] -> weight · R, as float32.

        Args:
            weight: of any floating dtype.
            scale: [E], multiplied to the weight's last dimension first.
        """
        signs = self._signs if scale is None else self._signs * scale.to(self._signs)
        rows = weight.reshape(-1, self.size)
        turned = torch.empty(rows.shape)
        slab_rows = max(1, _SLAB_VALUES // self.size)
        for begin in range(0, len(rows), slab_rows):
            slab = rows[begin : begin + slab_rows].to(torch.float32).contiguous()
            out = turned[begin : begin + slab_rows]
            self._kernels.kronecker(slab, signs, self._factors, dim=1, out=out)
        return turned.view(weight.shape)

    def outputs(self, weight: Tensor) -> Tensor:
        """What gives turned outputs: weight [E, ...] or a bias [E] -> Rᵀ · weight, as float32."""
        columns = weight.reshape(self.size, -1).to(torch.float32).contiguous()
        return self._kernels.kronecker(columns, self._signs, self._factors, dim=0).view(weight.shape)


def _factors(size: int) -> list[Tensor]:
    """Orthogonal matrices whose sizes multiply to `size`, Hadamard matrices if possible."""
    power = size & -size
    for small in (size // power << shift for shift in range(power.bit_length())):
        matrix = _paley(small)
        if matrix is not None:
            return [*_sylvester(size // small), matrix / math.sqrt(small)]
    return [*_sylvester(power), _hartley(size // power)]


def _sylvester(size: int) -> list[Tensor]:
    """Hadamard matrices of powers of two whose sizes multiply to `size`, scaled. Sylvester 1867."""
    factors = []
    while size > 1:
        matrix = torch.ones(1, 1)
        while len(matrix) < min(size, _LARGEST_POWER):
            matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
        factors.append(matrix / math.sqrt(len(matrix)))
        size //= len(matrix)
    return factors


def _paley(size: int) -> Tensor | None:
    """A Hadamard matrix from quadratic residues modulo a prime, or None if that gives none of this size.

    Source: Paley 1933, doi:10.1002/sapm1933121311, both constructions.
    """
    if size == 1:
        return torch.ones(1, 1)
    if size % 4 == 0 and _is_prime(size - 1):  # then it is 3 modulo 4
        matrix = _bordered(size - 1)
        matrix[1:, 0] = -1.0
        return matrix + torch.eye(size)
    if size % 4 == 0 and size // 2 % 4 == 2 and _is_prime(size // 2 - 1):  # then it is 1 modulo 4
        symmetric = _bordered(size // 2 - 1)
        ones = torch.eye(size // 2)
        return torch.kron(symmetric, torch.tensor([[1.0, 1.0], [1.0, -1.0]])) + torch.kron(
            ones, torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
        )
    return None


def _bordered(prime: int) -> Tensor:
    """The matrix of residue symbols of i − j, zero where they are equal, with a row and a column of ones."""
    residues = {index * index % prime for index in range(1, prime)}
    symbols = torch.tensor([0.0, *(1.0 if index in residues else -1.0 for index in range(1, prime))])
    index = torch.arange(prime)
    matrix = torch.ones(prime + 1, prime + 1)
    matrix[0, 0] = 0.0
    matrix[1:, 1:] = symbols[(index[:, None] - index[None, :]) % prime]
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _hartley(size: int) -> Tensor:
    """The cosine plus the sine of 2πij / size, scaled to be orthogonal.

    Source: Hartley 1942, doi:10.1109/JRPROC.1942.234333.
    """
    index = torch.arange(size, dtype=torch.float64)
    # The product modulo the size keeps angles small, hence exact.
    angles = torch.outer(index, index) % size * (2 * math.pi / size)
    cosine, sine = cos_and_sin(angles)
    return ((cosine + sine) / math.sqrt(size)).to(torch.float32)
