"""Tokens straight from a head's product, without logits in memory: calls into greedy.c."""

import torch
from torch import Tensor

from batchgen.kernels.backend import PackedLinear
from batchgen.kernels.cpu import int8
from batchgen.kernels.cpu.calls import Calls, Field, Operation
from batchgen.kernels.cpu.int8 import CpuInt8Linear
from batchgen.kernels.cpu.linear import CpuLinear
from batchgen.kernels.quantized import Quantized

_PRODUCT = "pnpppsnn"
_GREEDY = Operation("greedy_linear", _PRODUCT + "nnp", door="linear_argmax")
_GREEDY_INT8 = Operation("greedy_linear_int8", int8.PRODUCT + "nnp", door="linear_argmax")
_PICK = Operation("greedy_pick", "pnps", door="linear_argmax")
_DRAW = tuple(
    Operation(f"draw_linear_{part}", _PRODUCT + "nnppppp", door="linear_draw") for part in ("scan", "pick")
)
_DRAW_INT8 = tuple(
    Operation(f"draw_linear_int8_{part}", int8.PRODUCT + "nnppppp", door="linear_draw")
    for part in ("scan", "pick")
)

# In greedy.c and stretch.h.
_COLUMNS, _STRETCH = 256, 128
_BEST_BYTES = 16


def linear_argmax(calls: Calls, x: Tensor | Quantized, packed: PackedLinear, width: int) -> Tensor:
    """See `Kernels.linear_argmax`."""
    product, rows = _product(x, packed)
    tokens = torch.empty(rows, dtype=torch.int64)
    slots = _chunks(width)
    if isinstance(packed, CpuLinear) and packed.screen is not None:
        assert isinstance(x, Tensor)
        packed.screen.argmax(calls, x, product, width, slots, tokens)
        return tokens
    best = torch.empty(slots * rows * _BEST_BYTES, dtype=torch.uint8)
    search = _GREEDY_INT8 if isinstance(x, Quantized) else _GREEDY
    calls.together([(search, (*product, width, slots, best)), (_PICK, (best, slots, tokens, rows))])
    return tokens


def linear_draw(
    calls: Calls,
    x: Tensor | Quantized,
    packed: PackedLinear,
    width: int,
    temperature: Tensor,
    uniform: Tensor,
) -> Tensor:
    """See `Kernels.linear_draw`."""
    product, rows = _product(x, packed)
    tokens = torch.empty(rows, dtype=torch.int64)
    stretches = -(-width // _STRETCH)
    tops, sums = torch.empty(rows * stretches), torch.empty(rows * stretches, dtype=torch.float64)
    fields = (*product, width, _chunks(width), temperature, uniform, tops, sums, tokens)
    calls.together([(part, fields) for part in (_DRAW_INT8 if isinstance(x, Quantized) else _DRAW)])
    return tokens


def _chunks(width: int) -> int:
    return max(1, min(4 * torch.get_num_threads(), -(-width // _COLUMNS)))


def _product(x: Tensor | Quantized, packed: PackedLinear) -> tuple[tuple[Field, ...], int]:
    """The fields of a product that is written nowhere, and its rows."""
    if isinstance(x, Quantized):
        assert isinstance(packed, CpuInt8Linear)
        return int8.product(x, packed), x.values.shape[0]
    assert isinstance(packed, CpuLinear)
    rows, depth = x.shape
    return (x, x.stride(0), packed.panels, packed.bias, None, rows, packed.out_features, depth), rows
