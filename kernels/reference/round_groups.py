"""Rounding weights by groups, of the reference backend: all rows at once, one input after the other."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from batchgen.kernels.rounding import Grid, Groups

# Parts of a group's range that are tried; of floats, where the powers of two fall.
_PARTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)
_PARTS_OF_FLOATS = (1.0, 0.9375, 0.875, 0.8125, 0.75, 0.6875, 0.625, 0.5625)
_ROUNDS = 2
_LARGEST = 448.0


class _Line(NamedTuple):
    """scale, offset [N]."""

    scale: Tensor
    offset: Tensor

    def value(self, w: Tensor, grid: "Grid") -> Tensor:
        """The nearest values on the grid: w [N, g]."""
        scale, offset = torch.where(self.scale == 0, 1.0, self.scale).unsqueeze(1), self.offset.unsqueeze(1)
        if grid.kind == "e4m3":
            inside = (w / scale).clamp(-_LARGEST, _LARGEST)
            return inside.to(torch.float8_e4m3fn).to(torch.float32)
        x = (w - offset) / scale if grid.kind == "least" else w / scale + offset
        return x.clamp(0, 2**grid.bits - 1).round()

    def decoded(self, value: Tensor, grid: "Grid") -> Tensor:
        """What values [N, g] stand for."""
        scale, offset = self.scale.unsqueeze(1), self.offset.unsqueeze(1)
        if grid.kind == "least":
            return value * scale + offset
        return (value if grid.kind == "e4m3" else value - offset) * scale


def by_torch(
    weight: Tensor,
    grid: "Grid",
    counts: Tensor,
    groups: "Groups",
    factor: Tensor | None,
    block: int,
    searches: bool,
) -> None:
    """See `rounding.round_groups`; errors are taken back at once, whatever the block."""
    for k in range(weight.shape[1]):
        group = k // groups.size if groups.of_input is None else int(groups.of_input[k])
        if searches and k % groups.size == 0:
            at = slice(k, k + groups.size)
            found = _search(weight[:, at], counts[at], grid)
            groups.scale[:, group], groups.offset[:, group] = found
        line = _Line(groups.scale[:, group], groups.offset[:, group])
        column = weight[:, k : k + 1].clone()
        value = line.value(column, grid)
        if factor is not None:
            error = column - line.decoded(value, grid)
            weight[:, k + 1 :] += error * factor[k + 1 :, k]
        weight[:, k : k + 1] = value


def _search(w: Tensor, counts: Tensor, grid: "Grid") -> _Line:
    best, least = None, torch.empty(0)
    for part in _PARTS_OF_FLOATS if grid.kind == "e4m3" else _PARTS:
        line = _first(w, part, grid)
        for _ in range(_ROUNDS):
            line = _better(w, counts, line, grid)
        scale, offset = (each.to(grid.scale_dtype).to(torch.float32) for each in line)
        line = _Line(scale, offset if grid.kind == "least" else line.offset)
        error = ((w - line.decoded(line.value(w, grid), grid)).square() * counts).sum(dim=1)
        if best is None:
            best, least = line, error
            continue
        is_better = error < least
        least = torch.where(is_better, error, least)
        best = _Line(*(torch.where(is_better, new, old) for new, old in zip(line, best, strict=True)))
    assert best is not None
    return best


def _first(w: Tensor, part: float, grid: "Grid") -> _Line:
    """The line to begin with, which reaches over a part of the range."""
    low, high, top, half = w.amin(dim=1), w.amax(dim=1), 2**grid.bits - 1, 2 ** (grid.bits - 1)
    reach = w.abs().amax(dim=1)
    if grid.kind == "least":
        return _Line((high - low) * part / top, (high + low) / 2 - (high - low) * part / 2)
    if grid.kind == "zero":
        start, stop = low.clamp(max=0) * part, high.clamp(min=0) * part
        scale = (stop - start) / top
        zero = (-start / torch.where(scale == 0, 1.0, scale)).round().clamp(0, top)
        return _Line(scale, zero)
    if grid.kind == "symmetric":
        return _Line(reach * part / (half - 1), torch.full_like(reach, half))
    return _Line(reach * part / _LARGEST, torch.zeros_like(reach))


def _better(w: Tensor, counts: Tensor, line: _Line, grid: "Grid") -> _Line:
    """The line of least squared error for the codes that a line gives; as it was where that is not known."""
    value = line.value(w, grid)
    if not grid.has_offset:
        if grid.kind == "symmetric":
            value = value - line.offset.unsqueeze(1)
        squares = (value.square() * counts).sum(dim=1)
        scale = (value * w * counts).sum(dim=1) / torch.where(squares > 0, squares, 1.0)
        return _Line(torch.where(squares > 0, scale, line.scale), line.offset)
    whole = counts.sum()
    sum_v, sum_w = (value * counts).sum(dim=1), (w * counts).sum(dim=1)
    squares, products = (value.square() * counts).sum(dim=1), (value * w * counts).sum(dim=1)
    spread = squares * whole - sum_v.square()
    is_known = spread > 1e-6 * squares * whole
    scale = (products * whole - sum_v * sum_w) / torch.where(is_known, spread, 1.0)
    offset = (sum_w - scale * sum_v) / whole
    if grid.kind == "zero":
        # The nearest whole zero, and the best scale beside it.
        offset = (-offset / torch.where(scale == 0, 1.0, scale)).clamp(0, 2**grid.bits - 1).round()
        squares = squares - 2 * offset * sum_v + offset.square() * whole
        is_known = is_known & (squares > 0)
        scale = (products - offset * sum_w) / torch.where(is_known, squares, 1.0)
    return _Line(torch.where(is_known, scale, line.scale), torch.where(is_known, offset, line.offset))
