"""Checkpoints of torchao, as transformers saves them: a byte a number, scales for groups of inputs.

Layout: _weight_qdata int8 [N, K], one number to a byte whatever its bits, _weight_scale [N, G],
_weight_zero_point [N, G] or none; floats of 8 bits the same without zero points. What is said of activations
is not used: they stay floats here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import UnsupportedModelError, WeightsError
from batchgen.kernels.coded import Coded
from batchgen.quantization.base import BY_OUTPUT_AND_INPUT, METHODS, ParameterLayout
from batchgen.quantization.bit_packing import codes_of_signed
from batchgen.quantization.float8 import float8_codes
from batchgen.quantization.stored import Stored, want_shape


@dataclass(frozen=True, slots=True)
class NumberScheme:
    """Integers or floats, whichever the bytes are; how large a group is follows from the number of scales."""

    layouts: ClassVar[Mapping[str, ParameterLayout]] = {
        "_weight_qdata": BY_OUTPUT_AND_INPUT,
        "_weight_scale": BY_OUTPUT_AND_INPUT,
        "_weight_zero_point": BY_OUTPUT_AND_INPUT,
    }
    optional = frozenset({"_weight_zero_point"})
    input_bits = None

    def __str__(self) -> str:
        return "torchao"

    def decode(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Coded:
        """See `Scheme`."""
        values = want_shape(tensors, "_weight_qdata", outputs, inputs)
        scale = tensors["_weight_scale"]
        if scale.dim() != 2 or scale.shape[0] not in (1, outputs) or inputs % scale.shape[1]:
            raise WeightsError(
                f"_weight_scale has shape {list(scale.shape)} for a weight of {[outputs, inputs]}"
            )
        num_groups = scale.shape[1]
        scale = scale.expand(outputs, num_groups).contiguous()
        if values.dtype is not torch.int8:
            codes, table = float8_codes(values)
            return Coded(
                codes=codes,
                bits=8,
                scale=scale.to(torch.float32),
                table=table,
                group_size=inputs // num_groups,
            )
        zero = tensors.get("_weight_zero_point")
        zero = torch.zeros_like(scale) if zero is None else zero.expand(outputs, num_groups)
        # Integers of fewer bits lie between these; then they take no more than that here.
        low, high = int(values.min()), int(values.max())
        bits = max(2, (max(-low, high + 1) - 1).bit_length() + 1)
        half = 2 ** (bits - 1)
        zero = (zero.to(torch.int32) + half).contiguous()
        if int(zero.min()) < 0 or int(zero.max()) > 255:
            raise WeightsError(
                f"_weight_zero_point goes from {int(zero.min()) - half} to {int(zero.max()) - half}"
            )
        codes = codes_of_signed(values, bits)
        return Coded(
            codes=codes, bits=bits, scale=scale, zero=zero.to(torch.uint8), group_size=inputs // num_groups
        )


@METHODS.register("torchao")
class TorchAO(Stored):
    """Weights of a torchao checkpoint."""

    built: ClassVar[tuple[str, ...]] = (
        "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig",
        "Int8DynamicActivationIntxWeightConfig", "Float8WeightOnlyConfig",
        "Float8DynamicActivationFloat8WeightConfig",
    )  # fmt: skip

    @override
    def read_config(self) -> None:
        kinds = self.config.get("quant_type")
        default: Any = kinds.get("default") if isinstance(kinds, Mapping) else kinds
        kind = default.get("_type") if isinstance(default, Mapping) else default
        if kind not in self.built:
            raise UnsupportedModelError(
                f"{self.name}: quantization_config: quant_type {kind!r} is not built (built: "
                f"{', '.join(self.built)})"
            )
        self.whole = NumberScheme()
        self.floats_in = ("lm_head", *(self.config.get("modules_to_not_convert") or ()))
