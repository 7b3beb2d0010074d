"""Checkpoints in auto-round's own form: GPTQ's layout without g_idx, or AWQ's, and a config that says which.

`packing_format` is "auto_round:auto_gptq" (GPTQ's version 1), "auto_round" or "auto_round:gptqmodel" (version
2), or "auto_round:auto_awq". `extra_config` has other values for some modules, by name or pattern; 16 bits
mean floats there.
"""

import re
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from batchgen.errors import UnsupportedModelError
from batchgen.quantization.awq import AWQScheme
from batchgen.quantization.base import METHODS
from batchgen.quantization.gptq import gptq_scheme
from batchgen.quantization.stored import Scheme, Stored

# What must be added to a stored zero point; None: AWQ's layout.
_ZERO_OFFSETS = {
    "auto_round:auto_gptq": 1,
    "auto_round": 0,
    "auto_round:gptqmodel": 0,
    "auto_round:auto_awq": None,
}


@METHODS.register("auto-round")
class AutoRound(Stored):
    """Weights of a checkpoint of auto-round."""

    @override
    def read_config(self) -> None:
        self._form = self.config.get("packing_format", "auto_round")
        if self._form not in _ZERO_OFFSETS:
            raise UnsupportedModelError(
                f"{self.name}: quantization_config: packing_format {self._form!r} is not built (built: "
                f"{', '.join(_ZERO_OFFSETS)})"
            )
        blocks = self.config.get("block_name_to_quantize") or ()
        self._blocks = tuple(blocks.split(",") if isinstance(blocks, str) else blocks)
        self.whole = self._scheme_of(self.config, "quantization_config")
        self._named: dict[str, Scheme | None] = {
            name: self._scheme_of({**self.config, **values}, f"quantization_config.extra_config.{name}")
            for name, values in (self.config.get("extra_config") or {}).items()
        }

    @override
    def scheme(self, module: str) -> Scheme | None:
        if module in self._named:
            return self._named[module]
        for pattern, scheme in self._named.items():
            if re.search(pattern, module):
                return scheme
        if module == "lm_head" or (self._blocks and not module.startswith(self._blocks)):
            return None
        return self.whole

    def _scheme_of(self, config: Mapping[str, Any], where: str) -> Scheme | None:
        if isinstance(config.get("bits"), int) and config["bits"] >= 16:
            return None
        if str(config.get("data_type", "int")) != "int" or config.get("act_bits", 16) < 16:
            raise UnsupportedModelError(
                f"{self.name}: {where}: data_type {config.get('data_type')!r} with activations of "
                f"{config.get('act_bits', 16)} bits is not built (built: int, 16)"
            )
        offset = _ZERO_OFFSETS[self._form]
        whole = gptq_scheme(config, offset or 0, f"{self.name}: {where}")
        if offset is not None:
            return whole
        if whole.bits != 4:
            raise UnsupportedModelError(
                f"{self.name}: {where}: AWQ of {whole.bits} bits is not built (built: 4)"
            )
        return AWQScheme(whole.group_size)
