"""Recipe: how float weights are rounded; and a weight that was rounded by it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.coded import Coded
from batchgen.kernels.rounding import Grid, Groups, round_groups
from batchgen.quantization.base import BY_OUTPUT_AND_INPUT, ParameterLayout
from batchgen.quantization.float8 import float8_codes
from batchgen.quantization.seen_inputs import SeenInputs, Stretch

# Weights that are rounded at a time, as float32.
_SLAB_VALUES = 1 << 22


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A weight as values on a grid.

    Args:
        values: [N, K] uint8, or 8-bit floats.
        groups: scales of the values.
        grid: what they mean.
        lost: float32 [N], what the mean input's product lacks; None if no mean is known.
    """

    values: Tensor
    groups: Groups
    grid: Grid
    lost: Tensor | None = None

    def integers(self) -> Tensor:
        """Symmetric values as integers with a sign: int8 [N, K]."""
        return (self.values.to(torch.int16) - 2 ** (self.grid.bits - 1)).to(torch.int8)

    def coded(self) -> Coded:
        """As kernels take it."""
        grid, offset = self.grid, self.groups.offset
        codes, table = (self.values, None) if grid.kind != "e4m3" else float8_codes(self.values)
        return Coded(
            codes=codes,
            bits=grid.bits,
            scale=self.groups.scale.to(grid.scale_dtype),
            zero=offset.to(torch.uint8) if grid.kind in ("zero", "symmetric") else None,
            least=offset.to(grid.scale_dtype) if grid.kind == "least" else None,
            table=table,
            group_size=self.groups.size,
        )


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a layer's weights are rounded. A `Scheme` whose checkpoint holds floats.

    Args:
        grid: the values.
        group_size: inputs that share a scale; -1: all.
        input_bits: of activations that are rounded too; None: they stay floats.
    """

    grid: Grid
    group_size: int
    input_bits: int | None = None

    optional = frozenset[str]()

    def __str__(self) -> str:
        what = "8-bit floats" if self.grid.kind == "e4m3" else f"integers of {self.grid.bits} bits"
        return what if self.group_size == -1 else f"{what} in groups of {self.group_size}"

    @property
    def layouts(self) -> Mapping[str, ParameterLayout]:
        """See `Scheme`."""
        return {"weight": BY_OUTPUT_AND_INPUT}

    def group_inputs(self, inputs: int) -> int:
        """Inputs of a group in a layer of so many."""
        return inputs if self.group_size == -1 else min(self.group_size, inputs)

    def decode(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Coded:
        """See `Scheme`; nothing is known of the inputs."""
        return self.rounded(tensors["weight"], None).coded()

    def rounded(self, weight: Tensor, seen: SeenInputs | None) -> RoundedWeight:
        """Round a weight, float [N, K], knowing something of its inputs or nothing."""
        outputs, inputs = weight.shape
        size = self.group_inputs(inputs)
        dtype = torch.float8_e4m3fn if self.grid.kind == "e4m3" else torch.uint8
        values = torch.empty(outputs, inputs, dtype=dtype)
        num_groups = -(-inputs // size)
        scale, offset = (torch.empty(outputs, num_groups) for _ in range(2))
        mean = None if seen is None else seen.mean
        lost = None if mean is None else torch.empty(outputs)
        slab_rows = max(1, _SLAB_VALUES // inputs)
        for begin in range(0, outputs, slab_rows):
            at = slice(begin, begin + slab_rows)
            slab = weight[at].to(torch.float32).contiguous()
            rounded = slab.clone()
            groups = self._round(rounded, size, seen)
            values[at], scale[at], offset[at] = rounded.to(dtype), groups.scale, groups.offset
            if mean is not None and lost is not None:
                # Summed by numpy, whose bits do not depend on the number of threads.
                error = (slab - _dense(rounded, groups, self.grid)).numpy() * mean.to(torch.float32).numpy()
                lost[at] = torch.from_numpy(np.add.reduce(error, axis=1))
        return RoundedWeight(values, Groups(scale, offset, size), self.grid, lost)

    def _round(self, weight: Tensor, size: int, seen: SeenInputs | None) -> Groups:
        """Round in place."""
        inputs = weight.shape[1]
        if seen is None:
            return round_groups(weight, self.grid, torch.ones(inputs), size)
        stretches = seen.stretches
        known = None
        if size >= inputs or any(each.order is not None for each in stretches):
            # Scales come before everything: a group is not rounded in one go.
            counts = torch.cat([each.counts for each in stretches])
            known = round_groups(weight.clone(), self.grid, counts, size)
        found = [self._round_stretch(weight, size, each, known) for each in stretches]
        if known is not None:
            return known
        scales, offsets = [each.scale for each in found], [each.offset for each in found]
        return Groups(torch.cat(scales, dim=1), torch.cat(offsets, dim=1), size)

    def _round_stretch(self, weight: Tensor, size: int, stretch: Stretch, known: Groups | None) -> Groups:
        columns, order = weight[:, stretch.inputs], stretch.order
        counts = stretch.counts
        own = None
        if known is not None:
            of_input = (torch.arange(stretch.inputs.start, stretch.inputs.stop) // size).to(torch.int32)
            first = int(of_input[0])
            held = slice(first, int(of_input[-1]) + 1)
            of_input = of_input - first if order is None else (of_input - first)[order].contiguous()
            own = Groups(
                known.scale[:, held].contiguous(), known.offset[:, held].contiguous(), size, of_input
            )
        part = (columns if order is None else columns[:, order]).contiguous()
        counts = counts if order is None else counts[order]
        groups = round_groups(part, self.grid, counts, size, factor=stretch.factor, groups=own)
        weight[:, stretch.inputs] = part if order is None else part[:, order.argsort()]
        return groups


def _dense(values: Tensor, groups: Groups, grid: Grid) -> Tensor:
    """What values as float32 stand for."""
    inputs = values.shape[1]
    scale, offset = (
        each.repeat_interleave(groups.size, dim=1)[:, :inputs] for each in (groups.scale, groups.offset)
    )
    if grid.kind == "e4m3":
        return values * scale
    return values * scale + offset if grid.kind == "least" else (values - offset) * scale
