"""GPTQ checkpoints: 2, 3, 4 or 8 bits along the inputs, a scale and a zero point for each group of them.

Layout (AutoGPTQ, gptqmodel, auto-round): qweight int32 [K * bits / 32, N], a stream of codes along K; qzeros
int32 [G, N * bits / 32], one along N, which in format version 1 are one less than the zero points; scales
float16 [G, N]; g_idx int32 [K], the group of each input, which act-order scatters.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import UnsupportedModelError
from batchgen.kernels.coded import Coded
from batchgen.quantization.base import BY_INPUT, BY_INPUT_AND_OUTPUT, METHODS, ParameterLayout
from batchgen.quantization.bit_packing import unpack_stream
from batchgen.quantization.stored import Scheme, Stored, checked_group_size, scattered, want_shape

BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class GPTQScheme:
    """Bits of a code, inputs of a group, and what must be added to a stored zero point."""

    bits: int
    group_size: int
    zero_offset: int

    layouts: ClassVar[Mapping[str, ParameterLayout]] = {
        "qweight": BY_INPUT_AND_OUTPUT,
        "qzeros": BY_INPUT_AND_OUTPUT,
        "scales": BY_INPUT_AND_OUTPUT,
        "g_idx": BY_INPUT,
    }
    optional = frozenset({"g_idx"})
    input_bits = None

    def __str__(self) -> str:
        return f"GPTQ of {self.bits} bits in groups of {self.group_size}"

    def decode(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Coded:
        """See `Scheme`."""
        group_size = checked_group_size(self.group_size, inputs)
        num_groups = inputs // group_size
        words = want_shape(tensors, "qweight", inputs * self.bits // 32, outputs)
        stored_zeros = want_shape(tensors, "qzeros", num_groups, outputs * self.bits // 32)
        scale = want_shape(tensors, "scales", num_groups, outputs).T.contiguous()
        zero = unpack_stream(stored_zeros, self.bits, dim=1).T.to(torch.int32) + self.zero_offset
        groups = scattered(tensors, "g_idx", group_size, inputs)
        codes = unpack_stream(words, self.bits, dim=0).T.contiguous()
        if int(zero.max()) > 255:  # a byte holds all but 255 + 1
            wide = scale.to(torch.float32)
            return Coded(
                codes=codes,
                bits=self.bits,
                scale=wide,
                least=-wide * zero,
                group_size=group_size,
                groups=groups,
            )
        return Coded(
            codes=codes, bits=self.bits, scale=scale, zero=zero.to(torch.uint8), group_size=group_size,
            groups=groups,
        )  # fmt: skip


@METHODS.register("gptq")
class GPTQ(Stored):
    """Weights of a GPTQ checkpoint."""

    @override
    def read_config(self) -> None:
        form = self.config.get("checkpoint_format") or self.config.get("format") or "gptq"
        if form not in ("gptq", "gptq_v2"):
            raise UnsupportedModelError(
                f"{self.name}: quantization_config: checkpoint_format {form!r} is not "
                f"built (built: gptq, gptq_v2)"
            )
        self._zero_offset = 1 if form == "gptq" else 0
        self.whole = self._scheme_of(self.config, "quantization_config")
        # optimum: the modules of a block that are quantized, in lists by the order of rounding.
        listed = self.config.get("modules_in_block_to_quantize") or ()
        self._only = tuple(
            f".{name}" for names in listed for name in ([names] if isinstance(names, str) else names)
        )
        # gptqmodel: a pattern of module names -> other values, or with "-:" in front: left in floats.
        self._dynamic: dict[str, Scheme | None] = {}
        for pattern, values in (self.config.get("dynamic") or {}).items():
            changed = {**self.config, **values}
            self._dynamic[pattern.removeprefix("+:").removeprefix("-:")] = (
                None
                if pattern.startswith("-:")
                else self._scheme_of(changed, f"quantization_config.dynamic.{pattern}")
            )

    @override
    def scheme(self, module: str) -> Scheme | None:
        if module == "lm_head" and not self.config.get("lm_head"):
            return None
        for pattern, scheme in self._dynamic.items():
            if re.match(pattern, module):
                return scheme
        if self._only and not module.endswith(self._only):
            return None
        return self.whole

    def _scheme_of(self, config: Mapping[str, Any], where: str) -> GPTQScheme:
        return gptq_scheme(config, self._zero_offset, f"{self.name}: {where}")


def gptq_scheme(config: Mapping[str, Any], zero_offset: int, where: str) -> GPTQScheme:
    """The scheme of a config with bits and group_size.

    Raises:
        UnsupportedModelError: what is not built; begins with `where`.
    """
    bits = config.get("bits")
    if bits not in BITS:
        raise UnsupportedModelError(
            f"{where}: bits {bits!r} are not built (built: {', '.join(map(str, BITS))})"
        )
    group_size = config.get("group_size", 128)
    if type(group_size) is not int or group_size < -1:
        raise UnsupportedModelError(f"{where}: group_size {group_size!r} is not a number of inputs")
    return GPTQScheme(bits, group_size, zero_offset)
