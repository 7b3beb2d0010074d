"""Weights of any float checkpoint rounded to 8 bits as they are loaded, multiplied by rounded activations.

Each output's weights share a scale, and so does each token's input: the sums between are sums of integers,
which are exact in any order. What rounding the weights does to a layer's mean input is the same for every
token, so it is taken back in the bias. What the scheme loses, and why these inputs have these many bits,
stands in docs/decisions/0003-int8.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.kernels.ops import Activation, Kernels, PackedLinear, Quantized
from batchgen.quantization.base import AT_LOAD, LinearMethod, LinearShape, ParameterLayout
from batchgen.quantization.float_tensors import check_float_tensor, float_layouts
from batchgen.quantization.seen_inputs import mean_of

# A gated product has outliers that no rotation of the residual stream reaches.
_INPUT_BITS = {"down_proj": 16}
_DEFAULT_INPUT_BITS = 8
# Values rounded at a time: of those that must become float32 first, few are in memory twice.
_SLAB_VALUES = 1 << 22


@dataclass(slots=True)
class IntegerWeights:
    """rounded [N, K], bias and lost [N] while loading; `packed` from then on.

    lost: what the mean input's product lacks.
    """

    input_bits: int
    rounded: Quantized | None = None
    bias: Tensor | None = None
    lost: Tensor | None = None
    packed: PackedLinear | None = None


@AT_LOAD.register("int8")
class Int8(LinearMethod):
    """Weights of 8 bits, activations of 8 or 16."""

    wants_rotation = True
    wants_inputs = True

    def __init__(
        self, kernels: Kernels, dtype: torch.dtype, device: torch.device,
        config: Mapping[str, Any] | None = None, name: str = "",
    ):  # fmt: skip
        super().__init__(kernels, dtype, device, config, name)
        self.mean_inputs: dict[str, Tensor] = {}

    @override
    def see_inputs(self, shape: LinearShape, x: Tensor) -> None:
        self.mean_inputs[shape.name] = mean_of(x)

    @override
    def layouts(self, shape: LinearShape) -> Mapping[str, ParameterLayout]:
        return float_layouts(shape)

    @override
    def input_bits(self, shape: LinearShape) -> int:
        return _INPUT_BITS.get(shape.kind, _DEFAULT_INPUT_BITS)

    @override
    def create_weights(self, shape: LinearShape) -> IntegerWeights:
        return IntegerWeights(self.input_bits(shape))

    @override
    def load(
        self, weights: IntegerWeights, shape: LinearShape, part: int, parameter: str, tensor: Tensor
    ) -> None:
        check_float_tensor(shape, part, parameter, tensor)
        rows = shape.rows(part)
        if parameter == "bias":
            if weights.bias is None:
                weights.bias = torch.empty(shape.out_features, dtype=torch.float32, device=self.device)
            weights.bias[rows].copy_(tensor)
            return
        if weights.rounded is None:
            weights.rounded = Quantized.empty(shape.out_features, shape.in_features, 8, self.device)
        mean = self.mean_inputs.get(shape.name)
        if mean is not None and weights.lost is None:
            weights.lost = torch.empty(shape.out_features, dtype=torch.float32, device=self.device)
        slab_rows = max(1, _SLAB_VALUES // shape.in_features)
        for begin in range(0, tensor.shape[0], slab_rows):
            slab = tensor[begin : begin + slab_rows].to(dtype=torch.float32, device=self.device).contiguous()
            at = slice(rows.start + begin, rows.start + begin + len(slab))
            # A row of weights is rounded as a token's activations are.
            rounded = self.kernels.quantize(slab, weights.rounded[at])
            if mean is not None and weights.lost is not None:
                weights.lost[at] = self.kernels.rounding_loss(slab, rounded, mean.to(slab))

    @override
    def process(self, weights: IntegerWeights, shape: LinearShape) -> None:
        assert weights.rounded is not None
        rounded, bias, lost = weights.rounded, weights.bias, weights.lost
        weights.rounded = weights.bias = weights.lost = None
        if lost is not None:
            bias = lost if bias is None else bias + lost
        values = rounded.values[:, 0, : shape.in_features]
        weights.packed = self.kernels.pack_int8(values.contiguous(), rounded.scale, bias)

    @override
    def apply(self, weights: IntegerWeights, x: Activation, out: Tensor | None = None) -> Tensor:
        assert weights.packed is not None
        if not isinstance(x, Quantized):
            x = self.quantized(x, weights.input_bits)
        return self.kernels.linear(x, weights.packed, out)

    @override
    def argmax(self, weights: IntegerWeights, x: Activation, width: int) -> Tensor | None:
        assert weights.packed is not None
        return self.kernels.linear_argmax(x, weights.packed, width) if isinstance(x, Quantized) else None

    @override
    def draw(
        self, weights: IntegerWeights, x: Activation, width: int, temperature: Tensor, uniform: Tensor
    ) -> Tensor | None:
        assert weights.packed is not None
        if not isinstance(x, Quantized):
            return None
        return self.kernels.linear_draw(x, weights.packed, width, temperature, uniform)

    @override
    def tensors(self, weights: IntegerWeights) -> list[Tensor]:
        return [] if weights.packed is None else weights.packed.tensors()
