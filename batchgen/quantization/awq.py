"""AWQ checkpoints in the GEMM layout: 4 bits, with a scale and a zero point for each group of inputs.

Layout (AutoAWQ, auto-round): qweight int32 [K, N / 8], packed along the outputs, qzeros int32 [G, N / 8],
scales float16 [G, N]. The eight codes of a word are those of columns 0, 2, 4, 6, 1, 3, 5, 7, the lowest bits
first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import UnsupportedModelError
from batchgen.kernels.coded import Coded
from batchgen.quantization.base import BY_INPUT_AND_OUTPUT, METHODS, ParameterLayout
from batchgen.quantization.bit_packing import unpack_stream
from batchgen.quantization.stored import Stored, checked_group_size, want_shape

# Where the codes of columns 0 to 7 stand in a word.
_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


@dataclass(frozen=True, slots=True)
class AWQScheme:
    """Inputs of a group."""

    group_size: int

    layouts: ClassVar[Mapping[str, ParameterLayout]] = dict.fromkeys(
        ("qweight", "qzeros", "scales"), BY_INPUT_AND_OUTPUT
    )
    optional = frozenset[str]()
    input_bits = None

    def __str__(self) -> str:
        return f"AWQ of 4 bits in groups of {self.group_size}"

    def decode(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Coded:
        """See `Scheme`."""
        group_size = checked_group_size(self.group_size, inputs)
        num_groups = inputs // group_size
        words = want_shape(tensors, "qweight", inputs, outputs // 8)
        zeros = want_shape(tensors, "qzeros", num_groups, outputs // 8)
        return Coded(
            codes=_columns(words).T.contiguous(),
            bits=4,
            scale=want_shape(tensors, "scales", num_groups, outputs).T.contiguous(),
            zero=_columns(zeros).T.contiguous(),
            group_size=group_size,
        )


@METHODS.register("awq")
class AWQ(Stored):
    """Weights of an AWQ checkpoint."""

    @override
    def read_config(self) -> None:
        version, bits = self.config.get("version", "gemm"), self.config.get("bits", 4)
        if str(version).lower() != "gemm" or bits != 4:
            raise UnsupportedModelError(
                f"{self.name}: quantization_config: AWQ of version {version!r} and {bits!r} bits is not "
                f"built (built: version gemm, 4 bits)"
            )
        self.whole = AWQScheme(self.config.get("group_size", 128))
        self.floats_in = ("lm_head", *(self.config.get("modules_to_not_convert") or ()))


def _columns(words: Tensor) -> Tensor:
    """[R, W] int32 -> [R, 8 W] uint8, in the order of columns."""
    stored = unpack_stream(words, 4, dim=1)
    return stored.view(len(stored), -1, 8)[:, :, _PLACES].flatten(1)
