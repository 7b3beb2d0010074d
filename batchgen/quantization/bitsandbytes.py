"""Checkpoints of bitsandbytes: 4 bits that stand for entries of a table (nf4, fp4), and integers of 8 bits.

Layout: 4 bits: weight uint8 [N * K / 2, 1], two codes to a byte, the first above; weight.absmax [N * K /
blocksize], a scale for each stretch of blocksize codes; weight.quant_map [16], the table;
weight.quant_state.bitsandbytes__nf4 (or fp4), JSON. With double quantization absmax is uint8, an entry of
weight.nested_quant_map [256] times weight.nested_absmax, plus an offset. 8 bits: weight int8 [N, K], SCB
float32 [N], 127 times the scale; the outliers that its own kernels keep in halves are no part of a file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import UnsupportedModelError, WeightsError
from batchgen.kernels.coded import Coded
from batchgen.quantization.base import BY_NEITHER, BY_OUTPUT, BY_OUTPUT_AND_INPUT, METHODS, ParameterLayout
from batchgen.quantization.bit_packing import codes_of_signed
from batchgen.quantization.float8 import scale_per_output
from batchgen.quantization.stored import Stored, want_shape

_NESTED = frozenset({"weight.nested_absmax", "weight.nested_quant_map"})


@dataclass(frozen=True, slots=True)
class FourBits:
    """nf4 or fp4."""

    kind: str

    optional = _NESTED
    input_bits = None

    def __str__(self) -> str:
        return f"bitsandbytes {self.kind}"

    @property
    def layouts(self) -> Mapping[str, ParameterLayout]:
        """See `Scheme`."""
        names = ("weight", "weight.absmax", "weight.quant_map", self._state_name, *_NESTED)
        return dict.fromkeys(names, BY_NEITHER)

    @property
    def _state_name(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def decode(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Coded:
        """See `Scheme`."""
        state = _state(tensors[self._state_name], self._state_name)
        block = state.get("blocksize")
        if type(block) is not int or block < 1 or inputs % block:
            raise WeightsError(f"{self._state_name}: {inputs} inputs do not divide into blocks of {block!r}")
        # With bnb_4bit_quant_storage the bytes pose as numbers of another dtype.
        stored = tensors["weight"].flatten().view(torch.uint8)
        if stored.numel() != outputs * inputs // 2:
            raise WeightsError(f"weight has {stored.numel()} bytes, the model needs {outputs * inputs // 2}")
        codes = torch.stack((stored >> 4, stored & 15), dim=-1).view(outputs, inputs)
        scale = self._scales(tensors, state, outputs * inputs // block)
        table = want_shape(tensors, "weight.quant_map", 16).to(torch.float32)
        return Coded(codes=codes, bits=4, scale=scale.view(outputs, -1), table=table, group_size=block)

    def _scales(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], count: int) -> Tensor:
        stored = tensors["weight.absmax"].flatten()
        if stored.numel() != count:
            raise WeightsError(f"weight.absmax has {stored.numel()} scales, the model needs {count}")
        if stored.dtype is not torch.uint8:
            if stored.dtype is not torch.float32:
                # A checkpoint saved after it had run holds them turned, for its own kernels.
                raise WeightsError(
                    f"weight.absmax is stored as {stored.dtype}, not float32: save the checkpoint before it "
                    f"generates"
                )
            return stored
        missing = sorted(_NESTED - tensors.keys())
        if missing:
            raise WeightsError(f"{missing[0]} is missing, which scales of 8 bits need")
        block, offset = state.get("nested_blocksize", 256), state.get("nested_offset", 0.0)
        table = want_shape(tensors, "weight.nested_quant_map", 256).to(torch.float32)
        coarse = want_shape(tensors, "weight.nested_absmax", -(-count // block)).to(torch.float32)
        scale: Tensor = table[stored.long()] * coarse.repeat_interleave(block)[:count] + offset
        return scale


@dataclass(frozen=True, slots=True)
class EightBits:
    """LLM.int8()."""

    layouts: ClassVar[Mapping[str, ParameterLayout]] = {
        "weight": BY_OUTPUT_AND_INPUT,
        "SCB": BY_OUTPUT,
        "weight_format": BY_NEITHER,
    }
    optional = frozenset({"weight_format"})
    input_bits = None

    def __str__(self) -> str:
        return "bitsandbytes int8"

    def decode(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Coded:
        """See `Scheme`."""
        values = want_shape(tensors, "weight", outputs, inputs)
        form = tensors.get("weight_format")
        if values.dtype is not torch.int8 or (form is not None and int(form) != 0):
            raise WeightsError(
                f"weight is stored as {values.dtype} in the form {form}, not as int8 row by row"
            )
        scale = scale_per_output(tensors["SCB"].to(torch.float32) / 127, "SCB", outputs)
        zero = torch.full((outputs, 1), 128, dtype=torch.uint8)
        return Coded(codes=codes_of_signed(values), bits=8, scale=scale, zero=zero, group_size=inputs)


@METHODS.register("bitsandbytes")
class BitsAndBytes(Stored):
    """Weights of a bitsandbytes checkpoint."""

    beside_bytes: ClassVar[tuple[str, ...]] = (".absmax",)

    @override
    def read_config(self) -> None:
        config = self.config
        if config.get("load_in_4bit"):
            kind = config.get("bnb_4bit_quant_type", "fp4")
            if kind not in ("nf4", "fp4"):
                raise UnsupportedModelError(
                    f"{self.name}: quantization_config: bnb_4bit_quant_type {kind!r} is not "
                    f"built (built: nf4, fp4)"
                )
            self.whole = FourBits(kind)
        else:
            self.whole = EightBits()
        skipped = config.get("llm_int8_skip_modules")
        self.floats_in = ("lm_head",) if skipped is None else tuple(skipped)


def _state(stored: Tensor, name: str) -> Mapping[str, Any]:
    try:
        state: Mapping[str, Any] = json.loads(bytes(stored.to(torch.uint8).tolist()))
    except ValueError as error:
        raise WeightsError(f"{name}: not the JSON of a quantized weight ({error})") from error
    return state
