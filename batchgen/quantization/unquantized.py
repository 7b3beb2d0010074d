"""Float weights, multiplied as they are."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.kernels.ops import Activation, PackedLinear, Quantized
from batchgen.quantization.base import METHODS, LinearMethod, LinearShape, ParameterLayout
from batchgen.quantization.float_tensors import check_float_tensor, float_layouts


@dataclass(slots=True)
class FloatWeights:
    """weight [N, K] and bias [N] while loading; `packed` from then on."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    packed: PackedLinear | None = None


@METHODS.register("none")
class Unquantized(LinearMethod):
    """Weights in the dtype of the activations, packed as the kernel wants them."""

    has_rows = True

    @override
    def layouts(self, shape: LinearShape) -> Mapping[str, ParameterLayout]:
        return float_layouts(shape)

    @override
    def create_weights(self, shape: LinearShape) -> FloatWeights:
        # Memory is taken at the first load: layers are filled one after the other.
        return FloatWeights()

    @override
    def load(
        self, weights: FloatWeights, shape: LinearShape, part: int, parameter: str, tensor: Tensor
    ) -> None:
        check_float_tensor(shape, part, parameter, tensor)
        whole = (shape.out_features, *tensor.shape[1:])
        if len(shape.part_sizes) == 1 and tensor.dtype == self.dtype and tensor.device == self.device:
            filled = tensor
        else:
            held = getattr(weights, parameter)
            filled = torch.empty(whole, dtype=self.dtype, device=self.device) if held is None else held
            filled[shape.rows(part)].copy_(tensor)
        setattr(weights, parameter, filled)

    @override
    def process(self, weights: FloatWeights, shape: LinearShape) -> None:
        assert weights.weight is not None
        weight, bias = weights.weight.contiguous(), weights.bias
        weights.weight = weights.bias = None
        weights.packed = self.kernels.pack_linear(weight, bias, is_head=shape.kind == "lm_head")

    @override
    def apply(self, weights: FloatWeights, x: Activation, out: Tensor | None = None) -> Tensor:
        assert weights.packed is not None
        return self.kernels.linear(x.dense() if isinstance(x, Quantized) else x, weights.packed, out)

    @override
    def argmax(self, weights: FloatWeights, x: Activation, width: int) -> Tensor | None:
        assert weights.packed is not None
        return None if isinstance(x, Quantized) else self.kernels.linear_argmax(x, weights.packed, width)

    @override
    def screen(self, weights: FloatWeights) -> PackedLinear | None:
        return None if weights.packed is None else weights.packed.screen

    @override
    def draw(
        self, weights: FloatWeights, x: Activation, width: int, temperature: Tensor, uniform: Tensor
    ) -> Tensor | None:
        assert weights.packed is not None
        if isinstance(x, Quantized):
            return None
        return self.kernels.linear_draw(x, weights.packed, width, temperature, uniform)

    @override
    def tensors(self, weights: FloatWeights) -> list[Tensor]:
        return [] if weights.packed is None else weights.packed.tensors()

    @override
    def rows(self, weights: FloatWeights, ids: Tensor, out: Tensor | None = None) -> Tensor:
        assert weights.packed is not None
        return self.kernels.gather_rows(weights.packed, ids, out)
