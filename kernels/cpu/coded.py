"""Linear layers on weights of a few bits: calls into linear_coded.c."""

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.kernels.backend import PackedLinear
from batchgen.kernels.coded import Coded, float8_values
from batchgen.kernels.cpu.calls import Calls, Field, Operation
from batchgen.kernels.cpu.library import Library
from batchgen.kernels.cpu.memory import Arena

_WEIGHT = "pppppnnnnnnnn"  # fields of Coded in coded.h
_LINEAR = Operation("linear_coded", "pnppns" + _WEIGHT, door="linear")
_GATHER = Operation("gather_coded", "pps" + _WEIGHT, door="gather_rows")

# As in coded.h and kv_cache.h.
_CODE, _TABLE, _E4M3 = range(3)
_NONE, _ZERO, _LEAST = range(3)
_TABLE_ENTRIES = 32
_SCALE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class CpuCodedLinear(PackedLinear):
    """Codes and scales in panels of columns."""

    is_coded = True

    def __init__(self, calls: Calls, arena: Arena, coded: Coded, bias: Tensor | None):
        library = calls.library
        self.out_features, self.in_features = coded.shape
        self.bits, self.group_size, self.num_groups = coded.bits, coded.group_size, coded.num_groups
        self.scale_type = _SCALE_TYPES[coded.scale.dtype]
        panels = -(-self.out_features // library.panel)
        num_bytes = panels * self.in_features * library.panel * coded.bits // 8
        self.codes = arena.take(-(-num_bytes // 4)).view(torch.uint8)[:num_bytes]
        codes = coded.codes.contiguous()
        library.coded_pack(
            codes.data_ptr(), self.codes.data_ptr(), *codes.shape, coded.bits, torch.get_num_threads()
        )
        self.scales = _in_panels(library, coded.scale)
        beside = coded.zero if coded.least is None else coded.least
        self.offset = _NONE if beside is None else _ZERO if coded.least is None else _LEAST
        self.offsets = None if beside is None else _in_panels(library, beside)
        self.table = None if coded.table is None else _padded(coded.table)
        self.value = _CODE if self.table is None else _E4M3 if _is_e4m3(coded) else _TABLE
        self.groups = None if coded.groups is None else coded.groups.to(torch.int32).contiguous()
        self.bias = None if bias is None else bias.detach().to(torch.float32).contiguous()

    def fields(self) -> tuple[Field, ...]:
        """What operations are told of it."""
        return (
            self.codes, self.scales, self.offsets, self.table, self.groups, self.out_features,
            self.in_features, self.bits, self.value, self.offset, self.scale_type, self.group_size,
            self.num_groups,
        )  # fmt: skip

    @override
    def tensors(self) -> list[Tensor]:
        kept = (self.codes, self.scales, self.offsets, self.table, self.groups, self.bias)
        return [tensor for tensor in kept if tensor is not None]


def linear(calls: Calls, x: Tensor, packed: CpuCodedLinear, out: Tensor) -> Tensor:
    """See `Kernels.linear`."""
    calls(_LINEAR, x, x.stride(0), packed.bias, out, out.stride(0), x.shape[0], *packed.fields())
    return out


def gather_rows(calls: Calls, packed: CpuCodedLinear, ids: Tensor, out: Tensor) -> Tensor:
    """See `Kernels.gather_rows`."""
    says = f"an id is outside of the {packed.out_features} rows"
    calls(_GATHER, ids, out, ids.shape[0], *packed.fields(), says=says)
    return out


def _padded(table: Tensor) -> Tensor:
    """At least as many entries as registers are filled with."""
    padded = torch.zeros(max(_TABLE_ENTRIES, table.shape[0]))
    padded[: table.shape[0]] = table
    return padded


def _is_e4m3(coded: Coded) -> bool:
    """Whether codes are such floats: computing these takes a fraction of the time of looking them up."""
    if coded.table is None or coded.bits != 8 or coded.zero is not None or coded.least is not None:
        return False
    numbers = float8_values(torch.float8_e4m3fn)
    is_number = numbers.isfinite()
    if not torch.equal(coded.table.to(torch.float32)[is_number], numbers[is_number]):
        return False
    # The kernel multiplies scales by 256 first, and knows no codes that stand for no number.
    is_in_range = not bool((coded.scale.to(torch.float32).abs() > 2.0**119).any())
    return is_in_range and not bool((coded.codes & 127 == 127).any())


def _in_panels(library: Library, per_group: Tensor) -> Tensor:
    """[N, G] -> [panels, G, panel], zeros past N."""
    per_group = per_group.contiguous()
    outputs, groups = per_group.shape
    packed = per_group.new_zeros(-(-outputs // library.panel) * library.panel * groups)
    item_bytes, threads = per_group.element_size(), torch.get_num_threads()
    library.coded_pack_groups(per_group.data_ptr(), packed.data_ptr(), outputs, groups, item_bytes, threads)
    return packed
