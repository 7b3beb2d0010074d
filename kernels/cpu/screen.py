"""Screen: the largest of a float32 product, found among what integers leave: calls into screen.c."""

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.kernels.backend import PackedLinear
from batchgen.kernels.cpu import int8
from batchgen.kernels.cpu.calls import Calls, Field, Operation
from batchgen.kernels.cpu.library import Library
from batchgen.kernels.cpu.memory import Arena
from batchgen.kernels.quantized import Quantized

_DISTANCE = Operation("rounding_distance", "pnpnnnpppsn")
_SCREEN = Operation("greedy_screen", int8.PRODUCT + "ppppnnpp", door="linear_argmax")
_PICK = Operation("greedy_screen_pick", "pnpppsnn" + "nnppp", door="linear_argmax")
# In screen.c.
_COLUMNS, _SPAN = 256, 32


class Screen(PackedLinear):
    """A weight [N, K] rounded to integers, and how far each output's weights are from them."""

    def __init__(self, calls: Calls, arena: Arena, weight: Tensor):
        num_outputs, num_inputs = self.out_features, self.in_features = weight.shape
        padded = -(-num_outputs // _COLUMNS) * _COLUMNS
        self._length, self._distance = torch.empty(padded).zero_(), torch.empty(padded).zero_()
        rounded = Quantized.empty(num_outputs, num_inputs, 8)
        steps = (int8.quantizing(weight, rounded), _distance(weight, rounded, self._length, self._distance))
        calls.together(steps)
        # As wide as it is padded: zeros times zeros.
        self._coarse = int8.CpuInt8Linear(calls, arena, rounded.values[:, 0], rounded.scale, None)

    @staticmethod
    def pays(library: Library) -> bool:
        """Whether integers are so much faster here that looking twice costs less than multiplying floats."""
        return bool(library.int8_is_fast())

    @override
    def tensors(self) -> list[Tensor]:
        return [*self._coarse.tensors(), self._length, self._distance]

    def argmax(
        self, calls: Calls, x: Tensor, product: tuple[Field, ...], width: int, slots: int, tokens: Tensor
    ) -> None:
        """Where the largest of the first `width` results of each row stands.

        Args:
            calls: of the library.
            x: [T, K].
            product: the fields of the float product.
            width: how many results count.
            slots: parts of the columns that threads take.
            tokens: [T] int64, filled.
        """
        rows, num_inputs = x.shape
        rounded = Quantized.empty(rows, num_inputs, 16)
        length, distance = torch.empty(rows), torch.empty(rows)
        tops, lows = torch.empty(rows * -(-width // _SPAN)), torch.empty(slots * rows)
        bounds = (self._length, self._distance, length, distance, width, slots, tops, lows)
        calls.together([
            int8.quantizing(x, rounded),
            _distance(x, rounded, length, distance),
            (_SCREEN, (*int8.product(rounded, self._coarse), *bounds)),
            (_PICK, (*product, width, slots, tops, lows, tokens)),
        ])  # fmt: skip


def _distance(
    x: Tensor, rounded: Quantized, length: Tensor, distance: Tensor
) -> tuple[Operation, tuple[Field, ...]]:
    values = rounded.values
    rows, planes, depth = values.shape
    return _DISTANCE, (
        x, x.stride(0), values, values.stride(0), planes, depth, rounded.scale, length, distance, rows,
        x.shape[1],
    )  # fmt: skip
