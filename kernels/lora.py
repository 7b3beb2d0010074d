"""LoRA in the kernels: adapters of one linear layer in slots, and which tokens of a step belong to which slot."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraPart:
    """What one adapter adds to one fused part of a layer: x · aᵀ · bᵀ + bias.

    Args:
        a: float32 [r, K].
        b: float32 [N of the part, r], the adapter's scaling multiplied in.
        bias: float32 [N of the part], added as it is, or None.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None = None


class PackedLora(ABC):
    """One adapter's parts for one layer in the layout of the backend that made it; opaque outside of it."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All that is kept."""


class LoraBank(ABC):
    """The slots of one layer. What is recorded with a bank stays right when its slots change."""

    num_slots: int

    @abstractmethod
    def put(self, slot: int, packed: PackedLora | None) -> None:
        """Let a slot hold this from the next operation on; None empties it."""


@dataclass(frozen=True, slots=True)
class LoraSegments:
    """Which rows of a step's activations belong to which slot. Rows in no segment are left alone to the bit.

    Args:
        rows: int32 [T], room for all rows; the first starts[S] are in use: those of slot 0, then of slot 1, …
        starts: int32 [S + 1], where each slot's begin in `rows`; S is the number of slots, starts[0] is 0.
    """

    rows: Tensor
    starts: Tensor


Parts = Sequence[LoraPart | None]
