"""LoRA of the reference backend: one slot and one part after the other."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import KernelError
from batchgen.kernels.lora import LoraBank, LoraLayer, LoraPart, LoraSegments, PackedLora
from batchgen.kernels.reference.elementwise import working_dtype


class ReferenceLora(PackedLora):
    """The parts as they came, rounded to the dtype that they are kept in."""

    def __init__(self, layer: LoraLayer, parts: Sequence[LoraPart | None], dtype: torch.dtype):
        self.layer = layer
        self.parts = [None if part is None else _rounded(part, dtype) for part in parts]

    @override
    def tensors(self) -> list[Tensor]:
        kept = [(part.a, part.b, part.bias) for part in self.parts if part is not None]
        return [tensor for part in kept for tensor in part if tensor is not None]


def _rounded(part: LoraPart, dtype: torch.dtype) -> LoraPart:
    return LoraPart(part.a.detach().to(dtype), part.b.detach().to(dtype), part.bias)


class ReferenceLoraBank(LoraBank):
    """The slots are the list that every bank keeps."""

    @override
    def _place(self, slot: int, packed: PackedLora | None) -> None:
        if packed is not None and not isinstance(packed, ReferenceLora):
            raise KernelError("lora_bank: the adapter is packed by another backend")

    def parts_of(
        self, op: str, segments: LoraSegments, num_rows: int
    ) -> Iterator[tuple[Tensor, slice, LoraPart]]:
        """For each slot and each part that its adapter has: the slot's rows, the part's columns, the part."""
        starts = segments.starts.tolist()
        used = segments.rows[: starts[-1]]
        if (
            starts != sorted(starts)
            or not starts[0] == 0 <= starts[-1] <= num_rows
            or (used.numel() and not 0 <= int(used.min()) <= int(used.max()) < num_rows)
        ):
            raise KernelError(f"{op}: segments name rows outside of the {num_rows} that there are")
        for slot, packed in enumerate(self._held):
            rows = segments.rows[starts[slot] : starts[slot + 1]].long()
            if packed is None or not rows.numel():
                continue
            assert isinstance(packed, ReferenceLora)
            column = 0
            for size, part in zip(self.layer.part_sizes, packed.parts, strict=True):
                if part is not None:
                    yield rows, slice(column, column + size), part
                column += size


def lora_add(x: Tensor, bank: ReferenceLoraBank, segments: LoraSegments, out: Tensor) -> None:
    """See `Kernels.lora_add`."""
    for rows, columns, part in bank.parts_of("lora_add", segments, x.shape[0]):
        dtype = working_dtype(x)
        _add(x[rows].to(dtype) @ part.a.to(dtype).T, rows, columns, part, out)


def lora_gather_add(ids: Tensor, bank: ReferenceLoraBank, segments: LoraSegments, out: Tensor) -> None:
    """See `Kernels.lora_gather_add`."""
    vocab_size = bank.layer.in_features
    for rows, columns, part in bank.parts_of("lora_gather_add", segments, ids.shape[0]):
        wanted = ids[rows]
        if not 0 <= int(wanted.min()) <= int(wanted.max()) < vocab_size:
            raise KernelError(f"lora_gather_add: an id is outside of the table of {vocab_size}")
        _add(part.a[:, wanted].T.to(working_dtype(out)), rows, columns, part, out)


def _add(reduced: Tensor, rows: Tensor, columns: slice, part: LoraPart, out: Tensor) -> None:
    """Out[rows, columns] += reduced · bᵀ + bias."""
    added = reduced @ part.b.to(reduced.dtype).T
    if part.bias is not None:
        added += part.bias.to(added.dtype)
    out[rows, columns] = (out[rows, columns].to(added.dtype) + added).to(out.dtype)
