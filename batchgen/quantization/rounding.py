"""Recipe: how float weights are rounded; and a weight that was rounded by it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.kernels.coded import Coded
from batchgen.kernels.rounding import Grid, Groups, round_groups
from batchgen.quantization.base import BY_OUTPUT_AND_INPUT, ParameterLayout
from batchgen.quantization.float8 import float8_codes
from batchgen.quantization.seen_inputs import Stretch

# Weights that are rounded at a time, as float32.
_SLAB_VALUES = 1 << 22


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A weight as values on a grid.

    Args:
        values: [N, K] uint8, or 8-bit floats.
        groups: scales of the values.
        grid: what they mean.
    """

    values: Tensor
    groups: Groups
    grid: Grid

    def integers(self) -> Tensor:
        """Symmetric values as integers with a sign: int8 [N, K]."""
        signed: Tensor = self.values.to(torch.int16) - 2 ** (self.grid.bits - 1)
        return signed.to(torch.int8)

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

    def rounded(self, weight: Tensor, seen: Sequence[Stretch] | None) -> RoundedWeight:
        """Round a weight, float [N, K], knowing something of its inputs or nothing."""
        outputs, inputs = weight.shape
        size = self.group_inputs(inputs)
        dtype = torch.float8_e4m3fn if self.grid.kind == "e4m3" else torch.uint8
        values = torch.empty(outputs, inputs, dtype=dtype)
        scale, offset = (torch.empty(outputs, -(-inputs // size)) for _ in range(2))
        slab_rows = max(1, _SLAB_VALUES // inputs)
        for begin in range(0, outputs, slab_rows):
            at = slice(begin, begin + slab_rows)
            slab = torch.empty(len(weight[at]), inputs).copy_(weight[at])
            groups = self._round(slab, size, seen)
            values[at], scale[at], offset[at] = slab.to(dtype), groups.scale, groups.offset
        return RoundedWeight(values, Groups(scale, offset, size), self.grid)

    def _round(self, weight: Tensor, size: int, seen: Sequence[Stretch] | None) -> Groups:
        """Round in place."""
        inputs = weight.shape[1]
        if seen is None:
            return round_groups(weight, self.grid, torch.ones(inputs), size)
        known = None
        if size == inputs:
            # The one group is in several stretches.
            counts = torch.cat([each.counts for each in seen])
            known = round_groups(weight.clone(), self.grid, counts, size)
        found = []
        for each in seen:
            part = weight[:, each.inputs].contiguous()
            own = None if known is None else Groups(known.scale, known.offset, part.shape[1])
            found.append(round_groups(part, self.grid, each.counts, size, factor=each.factor, groups=own))
            weight[:, each.inputs] = part
        if known is not None:
            return known
        scales, offsets = [each.scale for each in found], [each.offset for each in found]
        return Groups(torch.cat(scales, dim=1), torch.cat(offsets, dim=1), size)
