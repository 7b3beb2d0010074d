"""round_groups: weights to codes of a few bits or floats of 8, with a scale for each group of inputs.

A group's scale (and zero or least value) is that of least squared error among some that are searched: a few
parts of the group's range to begin with, each improved by the straight line of least squares through the
weights and their codes, in turn with the codes of that line. An input's count says how much its error weighs.

What rounding the weights of one input does to the outputs can be taken back by the inputs after it, as far as
they go together: factor[j, k] of input k's error is added to the weights of input j > k before these are
rounded. Source: Frantar et al. 2022, arXiv:2210.17323, section 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.kernels.cpu.round_groups import by_kernel
from batchgen.kernels.reference.round_groups import by_torch

# Inputs whose errors are taken back together in the inputs after them.
_BLOCK = 64
_FRACTION_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that a weight may take.

    Args:
        kind: "least": code * scale + least; "zero": (code - zero) * scale with a whole zero among the codes;
            "symmetric": the same with half of all codes as zero; "e4m3": a float of 8 bits * scale.
        bits: of a code.
        scale_dtype: in which scales and least values are kept.
    """

    kind: str
    bits: int
    scale_dtype: torch.dtype = torch.float16

    @property
    def number(self) -> int:
        """Of the kind."""
        return ("least", "zero", "symmetric", "e4m3").index(self.kind)

    @property
    def fraction_bits(self) -> int:
        """Of a scale's dtype."""
        return _FRACTION_BITS[self.scale_dtype]

    @property
    def has_offset(self) -> bool:
        """Whether groups differ in zero or least value."""
        return self.kind in ("least", "zero")


@dataclass(frozen=True, slots=True)
class Groups:
    """How inputs share scales.

    Args:
        scale, offset: float32 [N, G], of values that the grid's `scale_dtype` holds; offset: zero or least
            value.
        size: inputs of a group, one after the other; the last may have fewer.
        of_input: int32 [K], the group of each input, where they do not lie one after the other.
    """

    scale: Tensor
    offset: Tensor
    size: int
    of_input: Tensor | None = None


def round_groups(
    weight: Tensor,
    grid: Grid,
    counts: Tensor,
    group_size: int,
    *,
    factor: Tensor | None = None,
    groups: Groups | None = None,
) -> Groups:
    """Round a weight in place to values of a grid.

    Args:
        weight: float32 [N, K], contiguous; from then on codes, or floats of 8 bits, as float32.
        grid: the values.
        counts: float32 [K], above 0: what the square of an error weighs.
        group_size: inputs that share a scale.
        factor: float32 [K, K] contiguous, of which the part below the diagonal counts, or None: no error is
            taken back.
        groups: scales that are known; None: they are searched, each when its first input is reached.

    Returns: the scales.
    """
    outputs, inputs = weight.shape
    searches = groups is None
    if groups is None:
        num_groups = -(-inputs // group_size)
        groups = Groups(torch.empty(outputs, num_groups), torch.empty(outputs, num_groups), group_size)
    block = _BLOCK
    if searches and factor is not None and group_size % _BLOCK and inputs > _BLOCK:
        # A group begins where all errors before it have been taken back, or within the block.
        block = group_size * max(1, _BLOCK // group_size)
    arguments = (weight, grid, counts, groups, factor, block, searches)
    if not by_kernel(*arguments):
        by_torch(*arguments)
    return groups
