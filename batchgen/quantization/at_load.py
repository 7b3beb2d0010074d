"""Weights of any float checkpoint rounded as they are loaded: `quantization: int4 | fp8`.

Activations stay floats. The scale of each group is searched for the least error, and what an input's rounding
does to the outputs is taken back by the inputs after it, as far as they go together. How a layer's inputs go
together is seen from made-up tokens (`load_while_running`), some of which are frequent and most rare as in
real text: vocabularies begin with what is frequent.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.kernels.ops import Kernels
from batchgen.kernels.rounding import Grid
from batchgen.quantization.base import AT_LOAD, LinearShape, ParameterLayout
from batchgen.quantization.float_tensors import check_float_tensor, float_layouts
from batchgen.quantization.rounding import Recipe, RoundedWeight
from batchgen.quantization.seen_inputs import Stretch, one_thread, seen_inputs
from batchgen.quantization.stored import Scheme, Stored, StoredWeights

_NUM_TOKENS, _LENGTH = 1024, 256
# Tokens that are about equally frequent; then it falls as in Zipf's law.
_FREQUENT = 100


class RoundedAtLoad(Stored):
    """What the schemes have in common.

    Attributes:
        recipe: of all layers but a head.
        of_head: of a head that is not the embedding; that stays as it is, for it is in memory anyway.
        most_inputs, damping: see `seen_inputs`. A stretch of more inputs would need more tokens, and time and
            memory that grow with its square.
        keeps_bits: whether the number of threads must not change a bit.
    """

    wants_inputs = True
    recipe: ClassVar[Recipe]
    of_head: ClassVar[Recipe]
    most_inputs: int = 512
    damping: float = 0.5
    keeps_bits: bool = True

    def __init__(
        self, kernels: Kernels, dtype: torch.dtype, device: torch.device,
        config: Mapping[str, Any] | None = None, name: str = "",
    ):  # fmt: skip
        super().__init__(kernels, dtype, device, config, name)
        self._seen: dict[str, Sequence[Stretch]] = {}

    @override
    def read_config(self) -> None:
        self._ties_head = bool(self.config.get("tie_word_embeddings"))

    @override
    def scheme(self, module: str) -> Scheme | None:
        if module != "lm_head":
            return self.recipe
        return None if self._ties_head else self.of_head

    @override
    def made_up_texts(self, vocab_size: int, most: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(0)
        frequency = 1 / (torch.arange(vocab_size, dtype=torch.float64) + _FREQUENT)
        ids = torch.multinomial(frequency, _NUM_TOKENS, replacement=True, generator=generator).tolist()
        length = min(_LENGTH, most)
        return [ids[begin : begin + length] for begin in range(0, _NUM_TOKENS, length)]

    @override
    def layouts(self, shape: LinearShape) -> Mapping[str, ParameterLayout]:
        return float_layouts(shape)

    @override
    def see_inputs(self, shape: LinearShape, x: Tensor) -> None:
        recipe = self._of_layer
        assert isinstance(recipe, Recipe)
        with one_thread() if self.keeps_bits else nullcontext():
            self._seen[shape.name] = seen_inputs(
                x.to(device="cpu", dtype=torch.float32), group_size=recipe.group_inputs(shape.in_features),
                most=self.most_inputs, damping=self.damping,
            )  # fmt: skip

    @override
    def load(
        self, weights: StoredWeights, shape: LinearShape, part: int, parameter: str, tensor: Tensor
    ) -> None:
        check_float_tensor(shape, part, parameter, tensor)
        super().load(weights, shape, part, parameter, tensor)

    @override
    def process_part(self, weights: StoredWeights, shape: LinearShape, part: int) -> None:
        tensors = weights.waiting[part]
        weights.waiting[part] = {}
        rounded = self.round(shape, part, tensors["weight"])
        bias = tensors.get("bias")
        if bias is not None:
            bias = bias.to(device=self.device, dtype=torch.float32)
        if self._of_layer.input_bits is None:
            weights.parts[part] = self.kernels.pack_coded(rounded.coded().to(self.device), bias)
        else:
            integers, scale = rounded.integers().to(self.device), rounded.groups.scale.to(self.device)
            weights.parts[part] = self.kernels.pack_int8(integers, scale.flatten(), bias)

    @override
    def process(self, weights: StoredWeights, shape: LinearShape) -> None:
        self._seen.pop(shape.name, None)

    def round(self, shape: LinearShape, part: int, weight: Tensor) -> RoundedWeight:
        """A part's weight, rounded."""
        recipe = self._of_layer
        assert isinstance(recipe, Recipe)
        return recipe.rounded(weight, self._seen.get(shape.name))


@AT_LOAD.register("int4")
class Int4(RoundedAtLoad):
    """Weights of 4 bits, with a scale and a least value for 64 inputs."""

    recipe = Recipe(Grid("least", 4), 64)
    of_head = Recipe(Grid("symmetric", 8), -1)


@AT_LOAD.register("fp8")
class Float8AtLoad(RoundedAtLoad):
    """Weights as floats of 8 bits, with a scale for each output."""

    recipe = Recipe(Grid("e4m3", 8, torch.float32), -1)
    of_head = recipe
