"""LinearMethod: what a linear layer asks of a way to store and multiply weights; and the registry of ways."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from batchgen.errors import UnsupportedModelError, WeightsError
from batchgen.kernels.ops import Activation, Kernels, PackedLinear, Quantized
from batchgen.registry import Registry

# Made-up tokens that layers' inputs are seen from.
_NUM_TOKENS = 512


class PartError(WeightsError):
    """Tensors of a module do not fit together; the message names one by what it is to the module."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What a method must know of one layer on this rank.

    Args:
        name: of the layer, for messages ("model.layers.0.self_attn.qkv_proj").
        in_features: K on this rank.
        part_sizes: rows of each fused part on this rank; their sum is N.
        has_bias: whether each part has a bias.
    """

    name: str
    in_features: int
    part_sizes: tuple[int, ...]
    has_bias: bool

    @property
    def kind(self) -> str:
        """The last word of its name: qkv_proj, o_proj, gate_up_proj, down_proj or lm_head."""
        return self.name.rpartition(".")[2]

    @property
    def out_features(self) -> int:
        """N on this rank."""
        return sum(self.part_sizes)

    def rows(self, part: int) -> slice:
        """Where a part stands among the N rows."""
        begin = sum(self.part_sizes[:part])
        return slice(begin, begin + self.part_sizes[part])


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """Along which dimension of a stored tensor the layer's outputs and inputs run; None: along none."""

    output_dim: int | None
    input_dim: int | None


# How checkpoints lay out tensors: [N, K], also with groups of K in its place; [K, N]; [N]; [K]; neither.
BY_OUTPUT_AND_INPUT = ParameterLayout(output_dim=0, input_dim=1)
BY_INPUT_AND_OUTPUT = ParameterLayout(output_dim=1, input_dim=0)
BY_OUTPUT = ParameterLayout(output_dim=0, input_dim=None)
BY_INPUT = ParameterLayout(output_dim=None, input_dim=0)
BY_NEITHER = ParameterLayout(output_dim=None, input_dim=None)


class LinearMethod(ABC):
    """A way to store and multiply the weights of linear layers. One object serves all layers of a model.

    Life of a layer's weights: `create_weights` once, `load` for every tensor of the checkpoint that belongs
    to the layer, `process_part` when a part has all of its own, `process` when all are there, then `apply`
    for every step. The layer slices a tensor to its rank's share before `load`, by `layouts`.

    Args:
        kernels: the operations of the model.
        dtype: of the activations.
        device: where weights live.
        config: the checkpoint's `quantization_config`, for those that read a form of its own.
        name: of the checkpoint, for messages.

    Attributes:
        has_rows: whether `rows` is built, so that a tied embedding needs no table of its own.
        wants_rotation: whether a rotated residual stream makes its results better.
        wants_inputs: whether it rounds weights better when it knows what a layer sees.
    """

    # Ends of names of tensors that a checkpoint of its form holds beside the weights, and nobody here needs.
    unused: ClassVar[tuple[str, ...]] = ()
    # What is added to the name of a tensor gives the names of those beside it; where one of these is there,
    # the tensor holds bytes, whatever its dtype.
    beside_bytes: ClassVar[tuple[str, ...]] = ()
    has_rows: ClassVar[bool] = False
    wants_rotation: ClassVar[bool] = False
    wants_inputs: ClassVar[bool] = False

    def __init__(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        config: Mapping[str, Any] | None = None,
        name: str = "",
    ):
        self.kernels, self.dtype, self.device = kernels, dtype, device
        self.config, self.name = dict(config or {}), name

    def of(self, name: str) -> "LinearMethod":
        """The method of the layer of that name; a checkpoint may hold some in another form than the rest.

        Raises:
            UnsupportedModelError: the parts of a fused layer are in different forms.
        """
        return self

    @abstractmethod
    def layouts(self, shape: LinearShape) -> Mapping[str, ParameterLayout]:
        """The tensors that a checkpoint must hold for each part of the layer, and how they are laid out."""

    def optional(self, shape: LinearShape) -> frozenset[str]:
        """Those of `layouts` that a checkpoint may leave out."""
        return frozenset()

    def input_bits(self, shape: LinearShape) -> int | None:
        """In which form the layer wants its input: None for floats, else the bits of a `Quantized`."""
        return None

    def made_up_texts(self, vocab_size: int, most: int) -> list[list[int]]:
        """Token ids that run through a model to show its layers' inputs; in a text at most so many."""
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(0, vocab_size, (min(_NUM_TOKENS, most),), generator=generator).tolist()]

    def see_inputs(self, shape: LinearShape, x: Tensor) -> None:  # noqa: B027
        """Be shown what the layer multiplies, float [T, K], before its weights are loaded."""

    @abstractmethod
    def create_weights(self, shape: LinearShape) -> Any:
        """What holds the layer's weights; opaque to the layer."""

    @abstractmethod
    def load(self, weights: Any, shape: LinearShape, part: int, parameter: str, tensor: Tensor) -> None:
        """Take one tensor of one part, already sliced. It may be kept without a copy.

        Raises:
            WeightsError: the tensor does not fit.
        """

    def process_part(self, weights: Any, shape: LinearShape, part: int) -> None:  # noqa: B027
        """All tensors of a part are there; most methods wait for the whole layer.

        Raises:
            PartError: they do not fit together.
        """

    @abstractmethod
    def process(self, weights: Any, shape: LinearShape) -> None:
        """Bring the weights into the form that `apply` reads, and free the form in which they were loaded."""

    @abstractmethod
    def apply(self, weights: Any, x: Activation, out: Tensor | None = None) -> Tensor:
        """Multiply: x [T, K] -> [T, N], into `out` when it is given."""

    def argmax(self, weights: Any, x: Activation, width: int) -> Tensor | None:
        """Where the largest of the first `width` results of each row stands, without writing them anywhere.

        See `Kernels.linear_argmax`; None where that is not built.
        """
        return None

    def screen(self, weights: Any) -> PackedLinear | None:
        """What `argmax` multiplies first and reads whole; None: the weights themselves."""
        return None

    def draw(
        self, weights: Any, x: Activation, width: int, temperature: Tensor, uniform: Tensor
    ) -> Tensor | None:
        """A token drawn from the first `width` results of each row, without writing them anywhere.

        See `Kernels.linear_draw`; None where that is not built.
        """
        return None

    def quantized(self, x: Tensor, bits: int) -> Quantized:
        """Activations [T, K] rounded to integers, in memory of their own."""
        return self.kernels.quantize(x, Quantized.empty(x.shape[0], x.shape[1], bits, x.device))

    @abstractmethod
    def tensors(self, weights: Any) -> list[Tensor]:
        """All that the weights keep in memory once they are processed."""

    def rows(self, weights: Any, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows of the weight as floats: ids [T] int64 -> [T, K]; for an embedding tied to a head."""
        raise NotImplementedError(type(self).__name__)


# By the checkpoint's own `quant_method`; "none" is float weights.
METHODS: Registry[type[LinearMethod]] = Registry("quantization method", "batchgen.quantization")
# By the setting `quantization`: what is made of the weights of any checkpoint that is not quantized.
AT_LOAD: Registry[type[LinearMethod]] = Registry("quantization", "batchgen.quantization")


def method_for(
    quantization: Mapping[str, Any] | None, name: str, wanted: str | None = None
) -> type[LinearMethod]:
    """The method for a checkpoint.

    Args:
        quantization: its config's `quantization_config`, None for float weights.
        name: of the checkpoint, for messages.
        wanted: the setting `quantization`, decided.

    Raises:
        UnsupportedModelError: a scheme that is not built, by name, or one on top of another.
    """
    quant_method = "none" if quantization is None else quantization.get("quant_method")
    if not isinstance(quant_method, str) or quant_method not in METHODS:
        raise UnsupportedModelError(
            f"{name}: the checkpoint is quantized ({quant_method or 'without a quant_method'!r}), which is "
            f"not built (built: {', '.join(METHODS)}); take the unquantized model or a GGUF file"
        )
    if wanted is None:
        return METHODS.get(quant_method)
    if quantization is not None:
        raise UnsupportedModelError(
            f"{name}: quantization: {wanted} rounds float weights, but the checkpoint is quantized already "
            f"({quant_method!r}); leave quantization out"
        )
    return AT_LOAD.get(wanted)
