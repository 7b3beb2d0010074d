"""Linear layers of the cpu backend, float32: calls into linear.c."""

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.kernels.backend import PackedLinear
from batchgen.kernels.cpu.calls import Calls, Operation
from batchgen.kernels.cpu.memory import Arena
from batchgen.kernels.cpu.screen import Screen

_LINEAR = Operation("linear", "pnpppsnn")
_GATHER_PACKED = Operation("gather_packed", "pppsnn", door="gather_rows")
_GATHER_ROWS = Operation("gather_rows", "pppsnn")


class CpuLinear(PackedLinear):
    """A weight in panels of columns (linear.c)."""

    screen: Screen | None

    def __init__(self, calls: Calls, arena: Arena, weight: Tensor, bias: Tensor | None, is_head: bool):
        library = calls.library
        self.out_features, self.in_features = weight.shape
        panels = -(-self.out_features // library.panel)
        self.panels = arena.take(panels * self.in_features * library.panel)
        weight = weight.detach().to(torch.float32).contiguous()
        library.linear_pack(weight.data_ptr(), self.panels.data_ptr(), *weight.shape, torch.get_num_threads())
        self.bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self.screen = None
        if is_head and bias is None and Screen.pays(library):
            self.screen = Screen(calls, arena, weight)

    @override
    def tensors(self) -> list[Tensor]:
        found = [self.panels] if self.bias is None else [self.panels, self.bias]
        return found if self.screen is None else [*found, *self.screen.tensors()]


def linear(calls: Calls, x: Tensor, packed: CpuLinear, out: Tensor | None) -> Tensor:
    """See `Kernels.linear`."""
    rows, depth = x.shape
    if out is None:
        out = torch.empty((rows, packed.out_features))
    calls(_LINEAR, x, x.stride(0), packed.panels, packed.bias, out, rows, packed.out_features, depth)
    return out


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
