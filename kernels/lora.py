"""LoRA in the kernels: adapters of one layer in slots, and which rows of a step belong to which slot."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.errors import KernelError, ShapeError
from batchgen.kernels.quantized import Quantized

MOST_RANK = 512
# How A and B may be kept; sums are float32 all the same.
LORA_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# A in integers, for layers whose inputs are integers.
INT8 = "int8"


@dataclass(frozen=True, slots=True)
class LoraPart:
    """What one adapter adds to one fused part of a layer: x · aᵀ · bᵀ + bias.

    Args:
        a: [r, K] of any floating dtype; of an embedding [r, V].
        b: [N of the part, r] of any floating dtype, the adapter's scaling multiplied in.
        bias: [N of the part], added as it is, or None.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        """r, of this part alone."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """The layer that an adapter or a bank is for.

    Args:
        in_features: K; of an embedding V.
        part_sizes: outputs of each fused part; they add up to N.
        is_table: whether it is an embedding, whose inputs are ids.
    """

    in_features: int
    part_sizes: tuple[int, ...]
    is_table: bool = False

    @property
    def out_features(self) -> int:
        """N."""
        return sum(self.part_sizes)

    def __str__(self) -> str:
        kind = "an embedding" if self.is_table else "a layer"
        return f"{kind} of {self.in_features} inputs and {list(self.part_sizes)} outputs"


class PackedLora(ABC):
    """One adapter's parts for one layer in the layout of the backend that made it; opaque outside of it.

    It never changes: any thread may make one, and several banks may hold it.
    """

    layer: LoraLayer

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All that is kept."""


class LoraBank(ABC):
    """The slots of one layer, empty at first. What is recorded with a bank stays right when slots change."""

    def __init__(self, layer: LoraLayer, num_slots: int):
        self.layer, self.num_slots = layer, num_slots
        self._held: list[PackedLora | None] = [None] * num_slots

    def put(self, slot: int, packed: PackedLora | None) -> None:
        """Let a slot hold this from the next operation on; None empties it. Not while a step runs.

        Raises:
            KernelError: no such slot, or the adapter is packed for another layer or by another backend.
        """
        if not 0 <= slot < self.num_slots:
            raise KernelError(f"lora_bank: slot {slot} is outside of the {self.num_slots} there are")
        if packed is not None and packed.layer != self.layer:
            raise KernelError(f"lora_bank: an adapter of {packed.layer} in a bank of {self.layer}")
        self._place(slot, packed)
        self._held[slot] = packed

    @abstractmethod
    def _place(self, slot: int, packed: PackedLora | None) -> None:
        """Make it known to what runs."""


@dataclass(frozen=True, slots=True)
class LoraSegments:
    """Which rows of a step's activations belong to which slot. Rows in no segment are left alone to the bit.

    Args:
        rows: int32, room for all T rows of a step or more; the first starts[S] are in use: those of slot 0,
            then of slot 1, … No row twice.
        starts: int32 [S + 1], where each slot's begin in `rows`; S is the number of slots, starts[0] is 0.
    """

    rows: Tensor
    starts: Tensor

    def __post_init__(self) -> None:
        """Check what kernels rely on, once for all layers of a step.

        Raises:
            ShapeError: not contiguous int32 vectors on one device.
        """
        for name, tensor in (("rows", self.rows), ("starts", self.starts)):
            if (
                tensor.dim() != 1
                or tensor.dtype is not torch.int32
                or not tensor.is_contiguous()
                or tensor.device != self.rows.device
            ):
                raise ShapeError(
                    f"LoraSegments wants contiguous int32 vectors on one device; {name} is "
                    f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}, rows on {self.rows.device}"
                )

    @staticmethod
    def empty(max_rows: int, num_slots: int, device: str | torch.device = "cpu") -> "LoraSegments":
        """Room for that many rows; none is in a slot."""
        rows = torch.zeros(max_rows, dtype=torch.int32, device=device)
        return LoraSegments(rows, torch.zeros(num_slots + 1, dtype=torch.int32, device=device))

    def fill(self, slots: Sequence[int] | np.ndarray) -> None:
        """Say which slot each row of a step belongs to; negative: to none.

        In place: rows and starts, which recorded programs read.
        """
        room, num_slots = self.rows.shape[0], self.starts.shape[0] - 1
        of_row = np.asarray(slots, dtype=np.int64)
        if len(of_row) > room:
            raise ShapeError(f"LoraSegments: {len(of_row)} rows in room for {room}")
        if of_row.size and of_row.max() >= num_slots:
            raise KernelError(f"LoraSegments: slot {of_row.max()} is outside of the {num_slots} there are")
        # Rows of no slot come first in this order, then slot by slot.
        order = np.argsort(of_row, kind="stable")[np.count_nonzero(of_row < 0) :]
        starts = np.zeros(num_slots + 1, dtype=np.int32)
        np.cumsum(np.bincount(of_row[of_row >= 0], minlength=num_slots), out=starts[1:])
        self.starts.copy_(torch.from_numpy(starts))
        self.rows[: len(order)].copy_(torch.from_numpy(order))


class LoraBackend:
    """What a kernel backend with the operation "lora" does; `LoraOps` checks and documents it."""

    def pack_lora(self, layer: LoraLayer, parts: Sequence[LoraPart | None], dtype: torch.dtype) -> PackedLora:
        """See `LoraOps.pack_lora`; a table's one part too."""
        raise NotImplementedError

    def pack_lora_int8(self, layer: LoraLayer, parts: Sequence[LoraPart | None]) -> PackedLora:
        """See `LoraOps.pack_lora`, dtype "int8"; where that is not faster, as float16."""
        return self.pack_lora(layer, parts, torch.float16)

    def lora_bank(self, layer: LoraLayer, num_slots: int) -> LoraBank:
        """See `LoraOps.lora_bank`."""
        raise NotImplementedError

    def lora_add(self, x: Tensor | Quantized, bank: LoraBank, segments: LoraSegments, out: Tensor) -> None:
        """See `LoraOps.lora_add`."""
        raise NotImplementedError

    def lora_gather_add(self, ids: Tensor, bank: LoraBank, segments: LoraSegments, out: Tensor) -> None:
        """See `LoraOps.lora_gather_add`."""
        raise NotImplementedError
