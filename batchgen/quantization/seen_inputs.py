"""seen_inputs: how a layer's inputs go together, in the form that rounding its weights wants."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

# Tokens whose products are summed in float32, before float64 takes them.
_SLAB_TOKENS = 4096
# Of the mean square: what is added for inputs that were never other than zero.
_LEAST = 1e-4


@dataclass(frozen=True, slots=True)
class Stretch:
    """Inputs whose errors are taken back within one another.

    Args:
        inputs: which.
        factor: float32 [K, K], see `round_groups`.
        counts: float32 [K], what an input's squared error weighs once the inputs after it have taken back
            what they can; 1 on average.
    """

    inputs: slice
    factor: Tensor
    counts: Tensor


def mean_of(x: Tensor) -> Tensor:
    """The mean over tokens: [T, K] -> float64 [K]; its bits do not depend on the number of threads."""
    rows = np.ascontiguousarray(x.cpu().numpy())
    return torch.from_numpy(np.add.reduce(rows, axis=0, dtype=np.float64) / len(rows))


def seen_inputs(x: Tensor, *, group_size: int, most: int, damping: float) -> tuple[Stretch, ...]:
    """What rounding wants to know of inputs: all of them, in stretches.

    Args:
        x: float32 [T, K], of as many tokens as there are.
        group_size: inputs that share a scale; a stretch ends where a group does, unless one group holds all.
        most: inputs of a stretch.
        damping: what is added to each input's square, as a share of it: so much less is made of how inputs
            went together here.
    """
    inputs = x.shape[1]
    stretches = []
    for at in _stretches(inputs, group_size if group_size < inputs else 1, most):
        factor, counts = _factored(_products(x[:, at]), damping)
        stretches.append(Stretch(at, factor, counts))
    return tuple(stretches)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, sums of torch have the same bits whatever the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _stretches(inputs: int, unit: int, most: int) -> Sequence[slice]:
    """Pieces of about the same size, each but the last of whole units."""
    units = -(-inputs // unit)
    count = -(-inputs // max(most, unit))
    ends = [min(round(units * number / count) * unit, inputs) for number in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _products(x: Tensor) -> Tensor:
    """The mean product of every two inputs, float64 [K, K]."""
    total = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for begin in range(0, len(x), _SLAB_TOKENS):
        slab = x[begin : begin + _SLAB_TOKENS].to(torch.float32)
        total += slab.T @ slab
    return total / len(x)


def _factored(squares: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """The factor and counts of a stretch.

    With squares = U · D · Uᵀ, U upper triangular with ones on its diagonal, the error e of input k is made up
    for best by −e · U⁻¹[k, j] in the inputs j after it, and costs D[k] · e² then.
    """
    size = len(squares)
    mean = float(squares.diagonal().mean())
    squares = squares / mean if mean > 0 else torch.eye(size, dtype=torch.float64)
    squares.diagonal().mul_(1 + damping).add_(_LEAST)
    # Turned around, the lower factor that a library gives is the upper one.
    lower = torch.linalg.cholesky(squares.flip(0, 1))
    inverse = torch.linalg.solve_triangular(lower, torch.eye(size, dtype=torch.float64), upper=False)
    inverse = inverse.flip(0, 1)
    factor = -(inverse / inverse.diagonal().unsqueeze(1)).T
    counts = lower.diagonal().flip(0).square()
    return factor.to(torch.float32).contiguous(), (counts / counts.mean()).to(torch.float32)
