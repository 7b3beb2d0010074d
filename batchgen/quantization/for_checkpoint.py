"""Weights rounded to be written down: what `batchgen quantize` runs a model with.

Each layer is rounded as it is loaded, given away in the layout of the checkpoint, and runs on rounded, so
that the layers behind it are rounded for the inputs that they will see.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import ConfigError
from batchgen.kernels.ops import Kernels
from batchgen.kernels.rounding import Grid
from batchgen.quantization.at_load import RoundedAtLoad
from batchgen.quantization.base import LinearShape
from batchgen.quantization.compressed_layout import Layout
from batchgen.quantization.rounding import Recipe, RoundedWeight
from batchgen.quantization.stored import Scheme, is_listed, module_names

SCHEMES = ("int4", "int8", "fp8")
# Gets the name of a module, and its tensors by what they are to it.
Taker = Callable[[str, Mapping[str, Tensor]], None]


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a checkpoint is made.

    Args:
        layouts: of its layers; of two that name one the first counts.
        most_inputs: inputs within which errors are taken back.
        damping: see `seen_inputs`.
    """

    layouts: Sequence[Layout]
    most_inputs: int
    damping: float

    def layout(self, module: str) -> Layout:
        """Of a module."""
        return next(
            layout
            for layout in self.layouts
            if "Linear" in layout.targets or is_listed(module, layout.targets)
        )


def layouts_of(scheme: str, group_size: int, has_zeros: bool, scale_dtype: torch.dtype) -> list[Layout]:
    """The layouts of a scheme.

    Args:
        scheme: one of `SCHEMES`.
        group_size: inputs that share a scale of 4 bits.
        has_zeros: whether groups of 4 bits have zero points.
        scale_dtype: of the scales.

    Raises:
        ConfigError: there is no such scheme.
    """
    if scheme == "int4":
        return [Layout(Recipe(Grid("zero" if has_zeros else "symmetric", 4, scale_dtype), group_size))]
    if scheme == "int8":
        grid = Grid("symmetric", 8, scale_dtype)
        # A gated product has outliers that 8 bits a token do not hold.
        return [Layout(Recipe(grid, -1), (r"re:.*down_proj",)), Layout(Recipe(grid, -1, 8))]
    if scheme == "fp8":
        return [Layout(Recipe(Grid("e4m3", 8, scale_dtype), -1))]
    raise ConfigError(f"scheme {scheme!r} is not built (built: {', '.join(SCHEMES)})")


class ForCheckpoint(RoundedAtLoad):
    """Rounds layers and gives them away.

    Args:
        kernels, dtype, device, config, name: see `LinearMethod`.
        rounding: how.
        take: gets what the checkpoint will hold of each module that is rounded.
    """

    def __init__(
        self, kernels: Kernels, dtype: torch.dtype, device: torch.device,
        config: Mapping[str, Any] | None = None, name: str = "", *, rounding: Rounding, take: Taker,
    ):  # fmt: skip
        self._rounding, self._take = rounding, take
        super().__init__(kernels, dtype, device, config, name)
        self.most_inputs, self.damping = rounding.most_inputs, rounding.damping
        self.keeps_bits = False

    @override
    def scheme(self, module: str) -> Scheme | None:
        return None if module == "lm_head" else self._rounding.layout(module).recipe

    @override
    def round(self, shape: LinearShape, part: int, weight: Tensor) -> RoundedWeight:
        rounded = super().round(shape, part, weight)
        module = module_names(shape.name)[part]
        self._take(module, self._rounding.layout(module).tensors(rounded))
        return rounded
