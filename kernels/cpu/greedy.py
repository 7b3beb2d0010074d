"""The largest result of a linear layer for each row: calls into greedy.c."""

import torch
from torch import Tensor

from batchgen.kernels.backend import PackedLinear
from batchgen.kernels.cpu.calls import Calls, Operation
from batchgen.kernels.cpu.int8 import CpuInt8Linear
from batchgen.kernels.cpu.linear import CpuLinear
from batchgen.kernels.quantized import Quantized

_FLOAT = Operation("greedy_linear", "pnpppsnnnnp", door="linear_argmax")
_INT8 = Operation("greedy_linear_int8", "pnnpppnsnnnnp", door="linear_argmax")
_PICK = Operation("greedy_pick", "pnps", door="linear_argmax")

_COLUMNS = 256  # in greedy.c
_BEST_BYTES = 16


def linear_argmax(calls: Calls, x: Tensor | Quantized, packed: PackedLinear, width: int) -> Tensor:
    """See `Kernels.linear_argmax`."""
    rows = x.values.shape[0] if isinstance(x, Quantized) else x.shape[0]
    tokens = torch.empty(rows, dtype=torch.int64)
    slots = max(1, min(4 * torch.get_num_threads(), -(-width // _COLUMNS)))
    best = torch.empty(slots * rows * _BEST_BYTES, dtype=torch.uint8)
    search = (width, slots, best)
    pick = (_PICK, (best, slots, tokens, rows))
    if isinstance(x, Quantized):
        assert isinstance(packed, CpuInt8Linear)
        planes, columns = x.values.shape[1], packed.out_features
        product = (
            x.values, x.values.stride(0), planes, x.scale, packed.panels, None, columns, rows, columns,
            packed.depth,
        )  # fmt: skip
        calls.together([(_INT8, (*product, *search)), pick])
    else:
        assert isinstance(packed, CpuLinear)
        product = (x, x.stride(0), packed.panels, packed.bias, None, rows, packed.out_features, x.shape[1])
        calls.together([(_FLOAT, (*product, *search)), pick])
    return tokens
