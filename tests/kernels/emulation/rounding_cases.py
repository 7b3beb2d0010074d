"""Cases for driver.c: weights rounded by groups. `run` is a Run of write_cases.py."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from batchgen.kernels.cpu.round_groups import by_kernel
from batchgen.kernels.reference.round_groups import by_torch
from batchgen.kernels.rounding import Grid, Groups

GRIDS = (
    Grid("least", 4),
    Grid("zero", 3),
    Grid("symmetric", 8, torch.bfloat16),
    Grid("e4m3", 8, torch.float32),
)


def rounding_cases() -> Iterator[tuple[str, str, Callable[[Any], None]]]:
    """As all_cases of write_cases.py."""
    for grid in GRIDS:
        for searches in (False, True):
            name = f"rounded to {grid.kind} of {grid.bits} bits, scales {'searched' if searches else 'known'}"
            yield name, "float64", partial(rounded_weight, grid=grid, searches=searches)


def rounded_weight(run: Any, grid: Grid, searches: bool) -> None:
    """Scales that are known are powers of two: then every step is exact, and codes are the reference's."""
    rows, inputs, size = 21, 100, 32
    weight, counts = run.draw(rows, inputs).float(), run.draw(inputs).float().abs() + 0.1
    scale = 2.0 ** run.integers(-6, -2, rows, -(-inputs // size)).float()
    offset = run.integers(1, 5, *scale.shape).float() * (-scale if grid.kind == "least" else 1)
    if grid.kind == "symmetric":
        offset.fill_(2.0 ** (grid.bits - 1))
    elif grid.kind == "e4m3":
        offset.zero_()
    groups = Groups(scale, offset, size)
    factor = None if searches else torch.zeros(inputs, inputs)
    arguments = (weight, grid, counts, groups, factor, 64, searches)
    if run.dtype is torch.float64:
        by_torch(*arguments)
    else:
        run.kernels.know([weight, counts, scale, offset, [] if factor is None else factor])
        by_kernel(*arguments)
    # A weight in the middle between two values may fall to either side.
    run.close("values", weight, 0.03 if searches else 1e-7)
    run.close("scales", scale, 0.03 if searches else 1e-7)
