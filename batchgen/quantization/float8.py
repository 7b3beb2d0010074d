"""Weights as floats of 8 bits, with one scale for all, for each output, or for each block: FP8 checkpoints.

`fp8` is the style of DeepSeek (weight, and weight_scale_inv for each block of 128 x 128) and of plain FP8
checkpoints (weight_scale); `modelopt` that of ModelOpt. Scales of activations are not used: activations stay
floats here, which loses less.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import UnsupportedModelError, WeightsError
from batchgen.kernels.coded import Coded, float8_values
from batchgen.quantization.base import BY_OUTPUT_AND_INPUT, METHODS, ParameterLayout
from batchgen.quantization.stored import Stored, want_shape

# What stands for codes that are no numbers; none is in a weight that was read.
_NO_NUMBER = 480.0


@dataclass(frozen=True, slots=True)
class Float8Scheme:
    """How scales are laid out.

    Args:
        scale_name: of the tensor.
        block: outputs and inputs of a block, or None: one scale for all, or one for each output.
    """

    scale_name: str
    block: tuple[int, int] | None = None

    optional = frozenset[str]()
    input_bits = None

    def __str__(self) -> str:
        return "8-bit floats" if self.block is None else f"8-bit floats in blocks of {self.block}"

    @property
    def layouts(self) -> Mapping[str, ParameterLayout]:
        """See `Scheme`."""
        # A single scale has no dimension to share; one for each output or block has, like the weight.
        return {"weight": BY_OUTPUT_AND_INPUT, self.scale_name: BY_OUTPUT_AND_INPUT}

    def decode(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Coded:
        """See `Scheme`."""
        weight = want_shape(tensors, "weight", outputs, inputs)
        codes, table = float8_codes(weight)
        scale = tensors[self.scale_name].to(torch.float32)
        if self.block is not None:
            rows, columns = self.block
            wanted = (-(-outputs // rows), -(-inputs // columns))
            scale = want_shape({self.scale_name: scale}, self.scale_name, *wanted)
            scale = scale.repeat_interleave(rows, dim=0)[:outputs].contiguous()
            group_size = min(columns, inputs)
        else:
            scale, group_size = scale_per_output(scale, self.scale_name, outputs), inputs
        return Coded(codes=codes, bits=8, scale=scale, table=table, group_size=group_size)


def float8_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of a tensor of 8-bit floats, uint8, and what the 256 of them stand for.

    Raises:
        WeightsError: of another dtype, or with values that are no numbers.
    """
    if weight.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise WeightsError(f"weight is stored as {weight.dtype}, not as 8-bit floats")
    codes, values = weight.contiguous().view(torch.uint8), float8_values(weight.dtype)
    is_bad = ~values.isfinite()
    num_bad = int(is_bad[codes.long()].sum())
    if num_bad:
        raise WeightsError(
            f"{num_bad} of {weight.numel()} values are NaN or infinite; the checkpoint is damaged"
        )
    return codes, torch.where(is_bad, _NO_NUMBER, values)


def scale_per_output(scale: Tensor, name: str, outputs: int) -> Tensor:
    """One scale for all outputs, or one for each: [N, 1] float32.

    Raises:
        WeightsError: another number of them, or one that is no finite number.
    """
    if scale.numel() not in (1, outputs):
        raise WeightsError(f"{name} has {scale.numel()} scales for {outputs} outputs")
    if not bool(scale.isfinite().all()):
        raise WeightsError(f"{name} holds NaN or infinity; the checkpoint is damaged")
    return scale.to(torch.float32).reshape(-1, 1).expand(outputs, 1).contiguous()


@METHODS.register("fp8")
class Float8(Stored):
    """Weights of an FP8 checkpoint."""

    unused: ClassVar[tuple[str, ...]] = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")

    @override
    def read_config(self) -> None:
        block = self.config.get("weight_block_size")
        if block is not None and (
            len(block) != 2 or any(type(size) is not int or size < 1 for size in block)
        ):
            raise UnsupportedModelError(
                f"{self.name}: quantization_config: weight_block_size {block!r} is not two numbers"
            )
        name = "weight_scale" if block is None else "weight_scale_inv"
        self.whole = Float8Scheme(name, None if block is None else (block[0], block[1]))
        listed = self.config.get("modules_to_not_convert") or self.config.get("ignored_layers") or ()
        self.floats_in = ("lm_head", *listed)


@METHODS.register("modelopt")
class ModelOpt(Stored):
    """Weights of a ModelOpt checkpoint."""

    unused: ClassVar[tuple[str, ...]] = Float8.unused

    @override
    def read_config(self) -> None:
        config = self.config.get("quantization") or self.config
        algorithm = config.get("quant_algo")
        if algorithm != "FP8":
            raise UnsupportedModelError(
                f"{self.name}: quantization_config: quant_algo {algorithm!r} is not built (built: FP8)"
            )
        self.whole = Float8Scheme("weight_scale")
        self.floats_in = tuple(
            # Patterns of file names there: "model.layers.0*".
            entry.removesuffix("*").removesuffix(".")
            for entry in config.get("exclude_modules") or config.get("ignore") or ()
        )
