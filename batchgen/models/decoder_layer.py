"""DecoderLayer: what one layer of a decoder holds, and what may stand at the places in it."""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from batchgen.kernels.kv import LayerKV
from batchgen.kernels.ops import Activation
from batchgen.layers.norm import RMSNorm
from batchgen.layers.rotary import RotaryEmbedding


class Linear(Protocol):
    """What stands at the place of a linear layer: the layer itself, or an adapter around it."""

    def __call__(self, x: Activation, out: Tensor | None = None) -> Tensor:
        """Multiply: x [T, K] -> [T, N]."""


def input_bits(layer: Linear) -> int | None:
    """In which form the layer wants its input; what stands around a layer may not say, and gets floats."""
    bits: int | None = getattr(layer, "input_bits", None)
    return bits


class WeightTarget(Protocol):
    """What takes tensors of a checkpoint."""

    def load(self, part: int, parameter: str, tensor: Tensor) -> None:
        """Take one tensor."""

    def missing(self) -> list[tuple[int, str]]:
        """(part, parameter) of the tensors that have not come."""

    def tensors(self) -> list[Tensor]:
        """The weights in memory."""


@dataclass(slots=True)
class DecoderLayer:
    """Weights and cache of one layer; `window` None sees all positions, `rotary` None rotates nothing.

    `group` is that of its cache: which block tables are its own.
    """

    input_norm: RMSNorm
    qkv: Linear
    output: Linear
    post_norm: RMSNorm
    gate_up: Linear
    down: Linear
    window: int | None
    rotary: RotaryEmbedding | None
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None
    kv: LayerKV | None = field(default=None, repr=False)
    group: int = 0
