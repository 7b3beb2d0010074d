"""Linear layers of the cpu backend, float32: calls into linear.c."""

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.kernels.backend import PackedLinear
from batchgen.kernels.cpu.calls import Calls, Field, Operation
from batchgen.kernels.cpu.memory import Arena

FIELDS = "pnppppsnn"  # of LinearFloat
_LINEAR = Operation("linear", FIELDS)
_CUT = Operation("linear_cut", "pnpsn", door="linear")
_GATHER_PACKED = Operation("gather_packed", "pppsnn", door="gather_rows")
_GATHER_ROWS = Operation("gather_rows", "pppsnn")

Fields = tuple[Field, ...]
Steps = Sequence[tuple[Operation, Fields]]


class CpuLinear(PackedLinear):
    """A weight in panels of columns (linear.c)."""

    def __init__(self, calls: Calls, arena: Arena, weight: Tensor, bias: Tensor | None):
        library = calls.library
        self.out_features, self.in_features = weight.shape
        panels = -(-self.out_features // library.panel)
        self.panels = arena.take(panels * self.in_features * library.panel)
        weight = weight.detach().to(torch.float32).contiguous()
        library.linear_pack(weight.data_ptr(), self.panels.data_ptr(), *weight.shape, torch.get_num_threads())
        self.bias = None if bias is None else bias.detach().to(torch.float32).contiguous()

    def tensors(self) -> list[Tensor]:
        """The panels and the bias."""
        return [self.panels] if self.bias is None else [self.panels, self.bias]


def linear(calls: Calls, x: Tensor, packed: CpuLinear, out: Tensor | None) -> Tensor:
    """See `Kernels.linear`."""
    rows, depth = x.shape
    if out is None:
        out = torch.empty((rows, packed.out_features))
    first, fields = product(calls, x, packed, out)
    calls.together([*first, (_LINEAR, fields)])
    return out


def product(calls: Calls, x: Tensor, packed: CpuLinear, out: Tensor | None) -> tuple[Steps, Fields]:
    """What goes before a product, and its fields.

    Where tiles multiply pieces of floats, x is cut into them once, for all threads.
    """
    rows, depth = x.shape
    num_bytes, cut, first = calls.library.cut_bytes(rows, depth), None, []
    if num_bytes:
        cut = calls.scratch(num_bytes)
        first = [(_CUT, (x, x.stride(0), cut, rows, depth))]
    fields = (x, x.stride(0), cut, packed.panels, packed.bias, out, rows, packed.out_features, depth)
    return first, fields


def gather_rows(calls: Calls, source: Tensor | CpuLinear, ids: Tensor, out: Tensor | None) -> Tensor:
    """See `Kernels.gather_rows`."""
    if isinstance(source, CpuLinear):
        operation, table = _GATHER_PACKED, source.panels
        num_rows, width = source.out_features, source.in_features
    else:
        operation, table = _GATHER_ROWS, source
        num_rows, width = source.shape
    if out is None:
        out = torch.empty((ids.shape[0], width))
    says = f"an id is outside of the {num_rows} rows"
    calls(operation, table, ids, out, ids.shape[0], num_rows, width, says=says)
    return out
