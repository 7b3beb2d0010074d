"""Triton kernels for LoRA: one launch reduces x to the ranks of all slots' adapters, one expands that."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.errors import KernelError
from batchgen.kernels.lora import LoraBank, LoraLayer, LoraPart, LoraSegments, PackedLora

# Rows, ranks, inputs and outputs of a program. 16 is the least that tl.dot takes.
ROWS, RANKS, INPUTS, OUTPUTS = 16, 16, 64, 64
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# Numbers of a slot and part in a bank's table: addresses of A, B and bias, rank, type.
_FIELDS = 5


class GpuLora(PackedLora):
    """A [r, K] (of a table [V, r]) and B [N, r] of each part, dense; biases in float32."""

    def __init__(self, layer: LoraLayer, parts: Sequence[LoraPart | None], dtype: torch.dtype):
        self.layer, self.dtype = layer, dtype
        self.parts: list[tuple[Tensor, Tensor, Tensor | None, int] | None] = [
            None if part is None else self._kept(part) for part in parts
        ]

    def _kept(self, part: LoraPart) -> tuple[Tensor, Tensor, Tensor | None, int]:
        a = part.a.detach().T if self.layer.is_table else part.a.detach()
        bias = None if part.bias is None else part.bias.detach().to(torch.float32).contiguous()
        b = part.b.detach()
        return a.to(self.dtype).contiguous(), b.to(self.dtype).contiguous(), bias, part.rank

    def tensors(self) -> list[Tensor]:
        """See `PackedLora.tensors`."""
        kept = [each[:3] for each in self.parts if each is not None]
        return [tensor for part in kept for tensor in part if tensor is not None]

    def fields(self) -> list[list[int]]:
        """Its rows of a bank's table."""
        return [
            [0] * _FIELDS
            if each is None
            else [
                each[0].data_ptr(), each[1].data_ptr(), 0 if each[2] is None else each[2].data_ptr(), each[3],
                _TYPES[self.dtype],
            ]
            for each in self.parts
        ]  # fmt: skip


class GpuLoraBank(LoraBank):
    """Addresses and ranks in a table that kernels read: [S, P, fields] int64."""

    def __init__(self, layer: LoraLayer, num_slots: int, device: str):
        super().__init__(layer, num_slots)
        shape = (num_slots, len(layer.part_sizes), _FIELDS)
        self.table = torch.zeros(shape, dtype=torch.int64, device=device)
        self.most_rank = 0

    def _place(self, slot: int, packed: PackedLora | None) -> None:
        if packed is not None and not isinstance(packed, GpuLora):
            raise KernelError("lora_bank: the adapter is packed by another backend")
        if packed is None:
            self.table[slot] = 0
        else:
            self.table[slot] = torch.tensor(packed.fields(), dtype=torch.int64)
            self.most_rank = max(self.most_rank, *(field[3] for field in packed.fields()))


@triton.jit
def _load(address, offset, mask, kind):
    """What an adapter's tensor of any type holds, as float32."""
    if kind == 0:
        found = tl.load(address.to(tl.pointer_type(tl.float32)) + offset, mask=mask, other=0.0)
    elif kind == 1:
        p_half = address.to(tl.pointer_type(tl.float16)) + offset
        found = tl.load(p_half, mask=mask, other=0.0).to(tl.float32)
    else:
        p_bfloat = address.to(tl.pointer_type(tl.bfloat16)) + offset
        found = tl.load(p_bfloat, mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit
def _reduce_kernel(
    p_x,  # [T, K]; of a table ids [T]
    p_rows,
    p_starts,
    p_table,
    p_reduced,  # [T, P, RANK], by place in `rows`
    x_stride,
    inputs,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    IS_TABLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some rows of one slot, some ranks of one part. Grid (S, tiles of rows, P * tiles of ranks)."""
    i_slot = tl.program_id(0)
    i_part = tl.program_id(2) // (RANK // RANKS)
    o_rank = tl.program_id(2) % (RANK // RANKS) * RANKS + tl.arange(0, RANKS)
    end = tl.load(p_starts + i_slot + 1)
    o_place = tl.load(p_starts + i_slot) + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    p_fields = p_table + (i_slot * PARTS + i_part) * FIELDS
    rank = tl.load(p_fields + 3)
    if tl.load(p_starts + i_slot) + tl.program_id(1) * ROWS < end:
        address = tl.load(p_fields)
        kind = tl.load(p_fields + 4)
        is_row = o_place < end
        is_rank = o_rank < rank
        row = tl.load(p_rows + o_place, mask=is_row, other=0).to(tl.int64)
        if IS_TABLE:
            ids = tl.load(p_x + row, mask=is_row, other=0)
            offset = ids[:, None] * rank + o_rank[None, :]
            b_sum = _load(address, offset, is_row[:, None] & is_rank[None, :], kind)
        else:
            b_sum = tl.zeros([ROWS, RANKS], tl.float32)
            for i_input in range(0, inputs, INPUTS):
                o_input = i_input + tl.arange(0, INPUTS)
                is_input = o_input < inputs
                b_x = tl.load(
                    p_x + row[:, None] * x_stride + o_input[None, :],
                    mask=is_row[:, None] & is_input[None, :],
                    other=0.0,
                )
                b_a = _load(
                    address,
                    o_rank[None, :].to(tl.int64) * inputs + o_input[:, None],
                    is_rank[None, :] & is_input[:, None],
                    kind,
                )
                b_sum += tl.dot(b_x, b_a.to(b_x.dtype), input_precision=PRECISION)
        p_to = p_reduced + (o_place[:, None].to(tl.int64) * PARTS + i_part) * RANK + o_rank[None, :]
        tl.store(p_to, b_sum, mask=is_row[:, None])


@triton.jit
def _expand_kernel(
    p_reduced,
    p_rows,
    p_starts,
    p_table,
    p_out,  # the part's first column
    out_stride,
    outputs,
    i_part,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some rows of one slot, some columns of a part. Grid (S, tiles of rows, tiles of columns)."""
    i_slot = tl.program_id(0)
    end = tl.load(p_starts + i_slot + 1)
    o_place = tl.load(p_starts + i_slot) + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    p_fields = p_table + (i_slot * PARTS + i_part) * FIELDS
    rank = tl.load(p_fields + 3)
    if (tl.load(p_starts + i_slot) + tl.program_id(1) * ROWS < end) & (rank > 0):
        address = tl.load(p_fields + 1)
        bias = tl.load(p_fields + 2)
        kind = tl.load(p_fields + 4)
        is_row = o_place < end
        row = tl.load(p_rows + o_place, mask=is_row, other=0).to(tl.int64)
        o_column = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
        is_column = o_column < outputs
        b_sum = tl.zeros([ROWS, OUTPUTS], tl.float32)
        p_from = p_reduced + (o_place[:, None].to(tl.int64) * PARTS + i_part) * RANK
        for i_rank in range(0, rank, RANKS):
            o_rank = i_rank + tl.arange(0, RANKS)
            is_rank = o_rank < rank
            b_reduced = tl.load(p_from + o_rank[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0)
            b_b = _load(
                address,
                o_column[None, :].to(tl.int64) * rank + o_rank[:, None],
                is_column[None, :] & is_rank[:, None],
                kind,
            )
            b_sum += tl.dot(b_reduced, b_b, input_precision=PRECISION)
        if bias != 0:
            p_bias = bias.to(tl.pointer_type(tl.float32)) + o_column
            b_sum += tl.load(p_bias, mask=is_column, other=0.0)[None, :]
        p_to = p_out + row[:, None] * out_stride + o_column[None, :]
        mask = is_row[:, None] & is_column[None, :]
        b_out = tl.load(p_to, mask=mask, other=0.0).to(tl.float32) + b_sum
        tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=mask)


def lora_add(x: Tensor, bank: GpuLoraBank, segments: LoraSegments, out: Tensor) -> None:
    """See `Kernels.lora_add` and `Kernels.lora_gather_add`. Rows and ids outside are not noticed.

    To notice them would be to wait for the GPU.
    """
    rows, layer = x.shape[0], bank.layer
    if not rows or not bank.most_rank:
        return
    parts, rank = len(layer.part_sizes), triton.cdiv(bank.most_rank, RANKS) * RANKS
    reduced = torch.empty((rows, parts, rank), dtype=torch.float32, device=x.device)
    precision = "ieee" if out.dtype == torch.float32 else "tf32"
    shared = {"PARTS": parts, "FIELDS": _FIELDS, "RANK": rank, "ROWS": ROWS, "RANKS": RANKS}
    tiles = triton.cdiv(rows, ROWS)
    _reduce_kernel[(bank.num_slots, tiles, parts * (rank // RANKS))](
        x, segments.rows, segments.starts, bank.table, reduced, x.stride(0), layer.in_features,
        **shared, INPUTS=INPUTS, IS_TABLE=layer.is_table, PRECISION=precision,
    )  # fmt: skip
    column = 0
    for number, size in enumerate(layer.part_sizes):
        _expand_kernel[(bank.num_slots, tiles, triton.cdiv(size, OUTPUTS))](
            reduced, segments.rows, segments.starts, bank.table, out[:, column:], out.stride(0), size, number,
            **shared, OUTPUTS=OUTPUTS, PRECISION=precision,
        )  # fmt: skip
        column += size
