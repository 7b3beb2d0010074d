"""Stored: weights in the form in which a checkpoint holds them, kept in few bits and multiplied from there.

A format says by `scheme` how each module is stored; a scheme names the tensors and makes of them a weight of
few bits. What a checkpoint leaves in floats is an `Unquantized` layer. A fused layer keeps a weight for each
of its parts.
"""

import copy
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import UnsupportedModelError, WeightsError
from batchgen.kernels.coded import Coded
from batchgen.kernels.ops import Activation, Kernels, PackedLinear, Quantized
from batchgen.quantization.base import BY_OUTPUT, LinearMethod, LinearShape, ParameterLayout, PartError
from batchgen.quantization.unquantized import Unquantized

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight for products of integers: values int8 [N, K], each output's times scale float32 [N]."""

    values: Tensor
    scale: Tensor


class Scheme(Protocol):
    """How one kind of layer is stored."""

    @property
    def layouts(self) -> Mapping[str, ParameterLayout]:
        """The tensors of a module, without its bias."""

    @property
    def optional(self) -> frozenset[str]:
        """Those that need not be there."""

    @property
    def input_bits(self) -> int | None:
        """Of activations that are rounded before the product; None: they stay floats."""

    def decode(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Coded | Rounded:
        """The weight [outputs, inputs] that the tensors hold.

        Raises:
            WeightsError: they do not fit; names the tensor.
        """


@dataclass(slots=True)
class StoredWeights:
    """For each part: tensors that have come, until it is complete; then the packed weight."""

    waiting: list[dict[str, Tensor]]
    parts: list[PackedLinear | None]


class Stored(LinearMethod):
    """Reads what a format stores.

    Args:
        kernels, dtype, device: see `LinearMethod`.
        config: the checkpoint's `quantization_config`.
        name: of the checkpoint, for messages.

    Attributes:
        whole: the scheme of every module but those in `floats_in`, where a checkpoint has but one.
        floats_in: the modules that it leaves in floats, see `is_listed`.
    """

    whole: Scheme | None = None
    floats_in: tuple[str, ...] = ()

    def __init__(
        self, kernels: Kernels, dtype: torch.dtype, device: torch.device,
        config: Mapping[str, Any] | None = None, name: str = "",
    ):  # fmt: skip
        super().__init__(kernels, dtype, device, config, name)
        self._floats = Unquantized(kernels, dtype, device)
        self._scheme: Scheme | None = None
        self.read_config()

    @abstractmethod
    def read_config(self) -> None:
        """Take what is needed of the checkpoint's config, `whole` and `floats_in` for `scheme` as it is here.

        Raises:
            UnsupportedModelError: what is not built, by name.
        """

    def scheme(self, module: str) -> Scheme | None:
        """How a module ("model.layers.0.mlp.up_proj") is stored; None: as floats."""
        return None if is_listed(module, self.floats_in) else self.whole

    @override
    def of(self, name: str) -> LinearMethod:
        modules = module_names(name)
        schemes = [self.scheme(module) for module in modules]
        found = schemes[0]
        if any(each != found for each in schemes):
            kinds = ", ".join(
                f"{module}: {each or 'floats'}" for module, each in zip(modules, schemes, strict=True)
            )
            raise UnsupportedModelError(
                f"{self.name}: the parts of {name} are quantized differently ({kinds}), which is not built"
            )
        if found is None:
            return self._floats
        bound = copy.copy(self)
        bound._scheme = found
        return bound

    @override
    def layouts(self, shape: LinearShape) -> Mapping[str, ParameterLayout]:
        return {**self._of_layer.layouts, "bias": BY_OUTPUT}

    @override
    def optional(self, shape: LinearShape) -> frozenset[str]:
        # Some writers add a bias of zeros to every layer.
        return self._of_layer.optional if shape.has_bias else self._of_layer.optional | {"bias"}

    @override
    def input_bits(self, shape: LinearShape) -> int | None:
        return self._of_layer.input_bits

    @override
    def create_weights(self, shape: LinearShape) -> StoredWeights:
        count = len(shape.part_sizes)
        return StoredWeights([{} for _ in range(count)], [None] * count)

    @override
    def load(
        self, weights: StoredWeights, shape: LinearShape, part: int, parameter: str, tensor: Tensor
    ) -> None:
        weights.waiting[part][parameter] = tensor

    @override
    def process_part(self, weights: StoredWeights, shape: LinearShape, part: int) -> None:
        tensors, outputs = weights.waiting[part], shape.part_sizes[part]
        weights.waiting[part] = {}
        try:
            bias = want_shape(tensors, "bias", outputs) if "bias" in tensors else None
            weight = self._of_layer.decode(tensors, outputs, shape.in_features)
        except WeightsError as error:
            raise PartError(str(error)) from error
        if bias is not None:
            bias = bias.to(device=self.device, dtype=torch.float32)
        if isinstance(weight, Rounded):
            scale = weight.scale.to(self.device)
            weights.parts[part] = self.kernels.pack_int8(weight.values.to(self.device), scale, bias)
        else:
            weights.parts[part] = self.kernels.pack_coded(weight.to(self.device), bias)

    @override
    def process(self, weights: StoredWeights, shape: LinearShape) -> None:
        pass

    @override
    def apply(self, weights: StoredWeights, x: Activation, out: Tensor | None = None) -> Tensor:
        parts = [part for part in weights.parts if part is not None]
        bits = self._of_layer.input_bits
        if bits is None:
            x = x.dense() if isinstance(x, Quantized) else x
        elif isinstance(x, Tensor):
            x = self.quantized(x, bits)
        if len(parts) == 1:
            return self.kernels.linear(x, parts[0], out)
        if out is None:
            width = sum(part.out_features for part in parts)
            device = x.device if isinstance(x, Tensor) else x.values.device
            out = torch.empty((x.shape[0], width), dtype=self.dtype, device=device)
        column = 0
        for part in parts:
            self.kernels.linear(x, part, out[:, column : column + part.out_features])
            column += part.out_features
        return out

    @override
    def tensors(self, weights: StoredWeights) -> list[Tensor]:
        return [tensor for part in weights.parts if part is not None for tensor in part.tensors()]

    @property
    def _of_layer(self) -> Scheme:
        assert self._scheme is not None, "ask `of` for the method of a layer"
        return self._scheme


def module_names(name: str) -> list[str]:
    """The modules of a checkpoint that a layer fuses."""
    place, dot, kind = name.rpartition(".")
    return [f"{place}{dot}{part}" for part in _FUSED.get(kind, (kind,))]


def is_listed(module: str, listed: Iterable[str]) -> bool:
    """Whether a list names a module: whole, by its last words, by its folder, or by "re:" pattern."""
    for entry in listed:
        if entry.startswith("re:"):
            if re.match(entry[3:], module):
                return True
        elif f".{entry}." in f".{module}.":
            return True
    return False


def want_shape(tensors: Mapping[str, Tensor], name: str, *shape: int) -> Tensor:
    """The tensor of a name, which must have that shape.

    Raises:
        WeightsError: another shape.
    """
    tensor = tensors[name]
    if tuple(tensor.shape) != shape:
        raise WeightsError(f"{name} has shape {list(tensor.shape)}, the model needs {list(shape)}")
    return tensor


def checked_group_size(group_size: int, inputs: int) -> int:
    """Inputs of a group; -1 and 0 are all of them.

    Raises:
        WeightsError: the inputs do not divide into groups.
    """
    if group_size in (-1, 0):
        return inputs
    if inputs % group_size:
        raise WeightsError(f"{inputs} inputs do not divide into groups of {group_size}")
    return group_size


def scattered(tensors: Mapping[str, Tensor], name: str, group_size: int, inputs: int) -> Tensor | None:
    """The groups of the inputs, int32 [K], under a name; None if missing, or if they lie one after the other.

    Raises:
        WeightsError: another number of them, or one that is none of the groups.
    """
    if name not in tensors:
        return None
    groups = want_shape(tensors, name, inputs).to(torch.int32)
    if torch.equal(groups, torch.arange(inputs, dtype=torch.int32) // group_size):
        return None
    num_groups = inputs // group_size
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise WeightsError(f"{name} names group {int(groups.max())} of {num_groups}")
    return groups
