"""Rounding weights by groups: a call into round_groups.c."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from batchgen.kernels.cpu.library import Library, load

if TYPE_CHECKING:
    from batchgen.kernels.rounding import Grid, Groups


def by_kernel(
    weight: Tensor,
    grid: "Grid",
    counts: Tensor,
    groups: "Groups",
    factor: Tensor | None,
    block: int,
    searches: bool,
) -> bool:
    """See `rounding.round_groups`; False where the C kernels are not available, and nothing was done."""
    library = load()
    if not isinstance(library, Library) or not weight.numel():
        return False
    of_input = groups.of_input
    is_done = library.round_groups(
        weight.data_ptr(), *weight.shape, None if factor is None else factor.data_ptr(), counts.data_ptr(),
        groups.scale.data_ptr(), groups.offset.data_ptr(), None if of_input is None else of_input.data_ptr(),
        groups.scale.shape[1], groups.size, grid.number, grid.bits, grid.fraction_bits, block, searches,
        torch.get_num_threads(),
    )  # fmt: skip
    if not is_done:
        raise MemoryError(f"no memory to round {weight.shape[1]} inputs of a weight")
    return True
