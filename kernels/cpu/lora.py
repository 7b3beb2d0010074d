"""LoRA of the cpu backend: calls into lora.c, and how adapters are laid out for it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import KernelError
from batchgen.kernels.cpu.calls import Calls, Field, Operation
from batchgen.kernels.cpu.library import Library
from batchgen.kernels.cpu.memory import Arena
from batchgen.kernels.lora import LoraBank, LoraLayer, LoraPart, LoraSegments, PackedLora
from batchgen.kernels.quantized import Quantized

_FIELDS = "pnnnpnsppnnpppnpn"
_BAD_POSITION, _BAD_ROW = -5, -6  # as in op.h
_ERRORS = {
    _BAD_ROW: "segments name rows outside of those that there are",
    _BAD_POSITION: "an id is outside of the table",
}
_ADD = tuple(Operation(name, _FIELDS, _ERRORS, "lora_add") for name in ("lora", "lora_expand"))
_GATHER_ADD = tuple(Operation(each.name, _FIELDS, _ERRORS, "lora_gather_add") for each in _ADD)

# As in simd.h, lora.h and kv_cache.h.
UNIT = 16
_FLOATS, _BITS_8, _BITS_16, _IDS = range(4)
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_INTEGERS = 16
# Inputs are filled up to a multiple of this where A is of integers.
_STEP = 64
_SLOT_WORDS, _PART_WORDS = 3, 4
# Floats that work which is split keeps between its two operations.
ROOM = 1 << 18


class CpuLora(PackedLora):
    """A and B of all parts, one after the other, in panels of UNIT columns.

    Args:
        arena: where they are kept.
        layer, parts, dtype: see `LoraOps.pack_lora`.
        has_integers: round A to integers of 8 bits, for lora_amx.c.
    """

    def __init__(
        self,
        arena: Arena,
        layer: LoraLayer,
        parts: Sequence[LoraPart | None],
        dtype: torch.dtype,
        *,
        has_integers: bool = False,
    ):
        self.layer, self.dtype, self.has_integers = layer, dtype, has_integers
        self.ranks = [0 if part is None else part.rank for part in parts]
        self.units = sum(_units(rank) for rank in self.ranks)
        sizes = [_units(size) * UNIT * rank for size, rank in zip(layer.part_sizes, self.ranks, strict=True)]
        depth = -(-layer.in_features // _STEP) * _STEP
        a_size = layer.in_features * self.units * UNIT
        if has_integers:
            # In halves: a byte for each number, and a float for each column.
            a_size = self.units * UNIT * (depth // 2 + 2)
        num_floats = -(-(a_size + sum(sizes)) * dtype.itemsize // 4)
        memory = arena.take(num_floats).view(dtype)
        self.a = memory[:a_size]
        self.b: list[Tensor | None] = []
        self.bias: list[Tensor | None] = []
        unit, begin = 0, a_size
        for part, size in zip(parts, sizes, strict=True):
            self.b.append(None if part is None else memory[begin : begin + size])
            self.bias.append(None if part is None or part.bias is None else _plain(part.bias))
            if part is not None and has_integers:
                _fill_integers(self.a, part.a.detach(), unit, self.units, depth)
            elif part is not None:
                self._fill_a(part.a.detach(), unit)
            if part is not None:
                _fill(memory[begin : begin + size], part.b.detach())
                unit += _units(part.rank)
            begin += size

    def _fill_a(self, a: Tensor, unit: int) -> None:
        rank, depth = a.shape
        if self.layer.is_table:
            self.a.view(depth, -1)[:, unit * UNIT :][:, :rank] = a.T
        else:
            _fill(self.a[unit * UNIT * depth :][: _units(rank) * UNIT * depth], a)

    @override
    def tensors(self) -> list[Tensor]:
        kept = [self.a, *self.b, *self.bias]
        return [tensor for tensor in kept if tensor is not None]


class CpuLoraBank(LoraBank):
    """Addresses of adapters in memory that stays where it is."""

    def __init__(self, library: Library, layer: LoraLayer, num_slots: int):
        super().__init__(layer, num_slots)
        self._library = library
        words = _SLOT_WORDS + _PART_WORDS * len(layer.part_sizes)
        self.table = torch.zeros((num_slots, words), dtype=torch.int64)
        starts = [0]
        for size in layer.part_sizes:
            starts.append(starts[-1] + size)
        self.columns = torch.tensor(starts, dtype=torch.int64)

    @property
    def has_integers(self) -> bool:
        """Whether an adapter in it is for rows of integers alone."""
        return any(isinstance(packed, CpuLora) and packed.has_integers for packed in self._held)

    @override
    def _place(self, slot: int, packed: PackedLora | None) -> None:
        if packed is not None and not isinstance(packed, CpuLora):
            raise KernelError("lora_bank: the adapter is packed by another backend")
        library, row = self._library, self.table[slot].data_ptr()
        if packed is None or not packed.units:
            library.lora_put(row, None, 0, 0)
            for number in range(len(self.layer.part_sizes)):
                library.lora_put_part(row, number, None, None, 0, 0)
            return
        kind = _INTEGERS if packed.has_integers else _TYPES[packed.dtype]
        library.lora_put(row, packed.a.data_ptr(), packed.units, kind)
        unit = 0
        for number, (b, bias, rank) in enumerate(zip(packed.b, packed.bias, packed.ranks, strict=True)):
            library.lora_put_part(row, number, _address(b), _address(bias), rank, unit)
            unit += _units(rank)


def lora_add(
    calls: Calls, x: Tensor | Quantized, bank: CpuLoraBank, segments: LoraSegments, out: Tensor
) -> None:
    """See `Kernels.lora_add`."""
    if isinstance(x, Quantized):
        rows, planes, depth = x.values.shape
        kind = _BITS_8 if planes == 1 else _BITS_16
        given: tuple[Field, ...] = (x.values, x.values.stride(0), depth, kind, x.scale)
    else:
        if bank.has_integers:
            raise KernelError("lora_add: an adapter of dtype int8 is for rows of integers; these are floats")
        rows = x.shape[0]
        given = (x, 4 * x.stride(0), 0, _FLOATS, None)
    _run(calls, _ADD, given, rows, bank, segments, out)


def lora_gather_add(
    calls: Calls, ids: Tensor, bank: CpuLoraBank, segments: LoraSegments, out: Tensor
) -> None:
    """See `Kernels.lora_gather_add`."""
    _run(calls, _GATHER_ADD, (ids, 0, 0, _IDS, None), ids.shape[0], bank, segments, out)


def _run(
    calls: Calls,
    operations: Sequence[Operation],
    given: tuple[Field, ...],
    rows: int,
    bank: CpuLoraBank,
    segments: LoraSegments,
    out: Tensor,
) -> None:
    fields = (
        *given, bank.layer.in_features, rows, segments.rows, segments.starts, bank.num_slots,
        len(bank.layer.part_sizes), bank.table, bank.columns, out, out.stride(0), _scratch(calls), ROOM,
    )  # fmt: skip
    if calls.tape is not None:
        # The table alone would not keep the adapters that it points to.
        calls.tape.kept.append(bank)
    calls.together([(operation, fields) for operation in operations])


def _scratch(calls: Calls) -> Tensor:
    """What lies between two operations; those of a program run one after the other and share it."""
    notes: dict[object, object] = {} if calls.tape is None else calls.tape.notes
    scratch = notes.get("lora")
    if not isinstance(scratch, Tensor):
        scratch = notes["lora"] = torch.empty(ROOM)
    return scratch


def _units(count: int) -> int:
    return -(-count // UNIT)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _plain(bias: Tensor) -> Tensor:
    return bias.detach().to(torch.float32).contiguous()


def _fill(to: Tensor, matrix: Tensor) -> None:
    """Lay rows [n, depth] out as columns, [n / UNIT, depth, UNIT]; the last panel's others stay zero."""
    count, depth = matrix.shape
    panels, full = to.view(_units(count), depth, UNIT), count // UNIT
    panels[:full] = matrix[: full * UNIT].reshape(full, UNIT, depth).transpose(1, 2)
    if count > full * UNIT:
        panels[full, :, : count - full * UNIT] = matrix[full * UNIT :].T


def _fill_integers(to: Tensor, matrix: Tensor, unit: int, units: int, depth: int) -> None:
    """Lay rows [n, K] out as integers, [units, depth / 4, UNIT, 4], from a unit on; scales come last."""
    count, inputs = matrix.shape
    panels = _units(count)
    padded = torch.zeros((panels * UNIT, depth))
    padded[:count, :inputs] = matrix
    scale = padded.abs().amax(dim=1) / 127
    values = (padded / scale.clamp(min=1e-30)[:, None]).round_().to(torch.int8)
    whole = to.view(torch.int8)
    room = whole[: units * UNIT * depth].view(units, depth // 4, UNIT, 4)
    room[unit : unit + panels] = values.view(panels, UNIT, depth // 4, 4).transpose(1, 2)
    whole[units * UNIT * depth :].view(torch.float32)[unit * UNIT :][: panels * UNIT] = scale
