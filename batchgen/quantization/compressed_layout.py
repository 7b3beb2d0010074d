"""Rounded weights in the layouts of compressed-tensors, and what config.json says of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchgen.quantization.bit_packing import pack_stream
from batchgen.quantization.rounding import Recipe, RoundedWeight

PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"


@dataclass(frozen=True, slots=True)
class Layout:
    """How the layers that some targets name are stored.

    Args:
        recipe: how they are rounded.
        targets: as compressed-tensors has them: "Linear", a module's name, or "re:" and a pattern.
    """

    recipe: Recipe
    targets: tuple[str, ...] = ("Linear",)

    @property
    def format(self) -> str:
        """Name of the format."""
        if self.recipe.grid.kind == "e4m3":
            return FLOATS
        return PACKED if self.recipe.input_bits is None else INTEGERS

    def tensors(self, rounded: RoundedWeight) -> dict[str, Tensor]:
        """What a module holds, by what it is to the module."""
        grid, groups = self.recipe.grid, rounded.groups
        found = {"weight_scale": groups.scale.to(grid.scale_dtype)}
        if self.format == FLOATS:
            return found | {"weight": rounded.values}
        if self.format == INTEGERS:
            return found | {"weight": rounded.integers()}
        found["weight_packed"] = pack_stream(rounded.values, grid.bits, dim=1)
        found["weight_shape"] = torch.tensor(rounded.values.shape)
        if grid.kind == "zero":
            found["weight_zero_point"] = pack_stream(groups.offset.to(torch.uint8), grid.bits, dim=0)
        return found

    def group(self) -> dict[str, Any]:
        """The entry of `config_groups`."""
        recipe, has_groups = self.recipe, self.recipe.group_size != -1
        weights = _arguments(
            "float" if recipe.grid.kind == "e4m3" else "int", recipe.grid.bits, recipe.grid.kind != "zero",
            "group" if has_groups else "channel",
        )  # fmt: skip
        inputs = None
        if recipe.input_bits is not None:
            inputs = _arguments("int", recipe.input_bits, True, "token") | {"dynamic": True}
        if has_groups:
            weights["group_size"] = recipe.group_size
        return {
            "format": self.format,
            "targets": list(self.targets),
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
        }


def quantization_config(layouts: Sequence[Layout], ignore: Sequence[str]) -> Mapping[str, Any]:
    """The section of config.json; of two layouts that name a module the first counts."""
    formats = {layout.format for layout in layouts}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": {f"group_{number}": layout.group() for number, layout in enumerate(layouts)},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def _arguments(kind: str, bits: int, is_symmetric: bool, strategy: str) -> dict[str, Any]:
    return {
        "type": kind,
        "num_bits": bits,
        "symmetric": is_symmetric,
        "strategy": strategy,
        "dynamic": False,
        "actorder": None,
    }
