"""Checkpoints of compressed-tensors (llm-compressor): integers packed or plain, and floats of 8 bits.

Layout: pack-quantized: weight_packed int32 [N, K * bits / 32], a stream of codes along K with half their
range added (older versions put as many in a word as fit whole), weight_scale [N, G], weight_zero_point int32
[N * bits / 32, G] packed along N, weight_g_idx [K]; int-quantized: weight int8 [N, K]; float-quantized:
weight float8 [N, K]; naive-quantized: either. Scales are one for all, for each output, for each group of
inputs or for each block.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import UnsupportedModelError, WeightsError
from batchgen.kernels.coded import Coded
from batchgen.quantization.base import BY_INPUT, BY_NEITHER, BY_OUTPUT_AND_INPUT, METHODS, ParameterLayout
from batchgen.quantization.bit_packing import codes_of_signed, unpack_stream, unpack_words
from batchgen.quantization.float8 import Float8Scheme, scale_per_output
from batchgen.quantization.stored import (
    Rounded,
    Scheme,
    Stored,
    checked_group_size,
    is_listed,
    scattered,
    want_shape,
)

# Formats whose weights are read, by the name of a group's format.
_PACKED, _INTEGERS, _FLOATS = "pack-quantized", ("int-quantized", "naive-quantized"), (
    "float-quantized", "naive-quantized",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class IntegerScheme:
    """Integers, packed or one to a byte.

    Args:
        bits: of a code.
        group_size: inputs of a group; -1: all of them.
        is_packed: in words of 32 bits.
        is_symmetric: without zero points.
        input_bits: of activations that are rounded too; None: they stay floats.
    """

    bits: int
    group_size: int
    is_packed: bool
    is_symmetric: bool
    input_bits: int | None = None

    def __str__(self) -> str:
        inputs = "" if self.input_bits is None else f" by {self.input_bits}-bit activations"
        return f"integers of {self.bits} bits in groups of {self.group_size}{inputs}"

    @property
    def layouts(self) -> Mapping[str, ParameterLayout]:
        """See `Scheme`."""
        names = {"weight_scale": BY_OUTPUT_AND_INPUT, "weight_zero_point": BY_OUTPUT_AND_INPUT}
        if self.is_packed:
            return {
                **names,
                "weight_packed": BY_OUTPUT_AND_INPUT,
                "weight_shape": BY_NEITHER,
                "weight_g_idx": BY_INPUT,
            }
        return {**names, "weight": BY_OUTPUT_AND_INPUT, "weight_g_idx": BY_INPUT}

    @property
    def optional(self) -> frozenset[str]:
        """See `Scheme`."""
        left_out = {"weight_g_idx", "weight_shape"}
        return frozenset(left_out | {"weight_zero_point"} if self.is_symmetric else left_out)

    def decode(self, tensors: Mapping[str, Tensor], outputs: int, inputs: int) -> Coded | Rounded:
        """See `Scheme`."""
        group_size = checked_group_size(self.group_size, inputs)
        half = 2 ** (self.bits - 1)
        if self.is_packed:
            codes = self._unpacked(tensors["weight_packed"], "weight_packed", (outputs, inputs), dim=1)
        else:
            values = want_shape(tensors, "weight", outputs, inputs)
            if values.dtype is not torch.int8:
                raise WeightsError(f"weight is stored as {values.dtype}, the config says integers")
            if self.input_bits is not None:
                scale = scale_per_output(tensors["weight_scale"], "weight_scale", outputs)
                return Rounded(values, scale.flatten())
            codes = codes_of_signed(values, self.bits)
        scale = tensors["weight_scale"]
        num_groups = inputs // group_size
        scale = (
            scale_per_output(scale, "weight_scale", outputs)
            if num_groups == 1
            else want_shape(tensors, "weight_scale", outputs, num_groups).contiguous()
        )
        zero = torch.full_like(scale, half, dtype=torch.uint8)
        if not self.is_symmetric:
            zero = self._zeros(tensors["weight_zero_point"], outputs, num_groups)
        # -1 everywhere: the order was kept.
        has_order = "weight_g_idx" in tensors and not bool((tensors["weight_g_idx"] < 0).all())
        groups = scattered(tensors, "weight_g_idx", group_size, inputs) if has_order else None
        return Coded(
            codes=codes, bits=self.bits, scale=scale, zero=zero, group_size=group_size, groups=groups
        )

    def _unpacked(self, words: Tensor, name: str, shape: tuple[int, int], dim: int) -> Tensor:
        """Codes packed along a dimension: a stream or, as older versions did, whole ones in each word."""
        packed, whole = list(shape), list(shape)
        packed[dim], whole[dim] = -(-shape[dim] * self.bits // 32), -(-shape[dim] // (32 // self.bits))
        if list(words.shape) == whole:
            return unpack_words(words, self.bits, dim, shape[dim]).contiguous()
        want_shape({name: words}, name, *packed)
        return unpack_stream(words, self.bits, dim, shape[dim]).contiguous()

    def _zeros(self, stored: Tensor, outputs: int, num_groups: int) -> Tensor:
        if stored.dtype is torch.int32 and self.is_packed:
            return self._unpacked(stored, "weight_zero_point", (outputs, num_groups), dim=0)
        if stored.numel() == 1:
            stored = stored.reshape(1, 1).expand(outputs, num_groups)
        stored = want_shape(
            {"weight_zero_point": stored.reshape(outputs, -1)}, "weight_zero_point", outputs, num_groups
        )
        return codes_of_signed(stored, self.bits).contiguous()


@METHODS.register("compressed-tensors")
class CompressedTensors(Stored):
    """Weights of a compressed-tensors checkpoint."""

    unused: ClassVar[tuple[str, ...]] = (
        ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point",
        ".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point",
    )  # fmt: skip

    @override
    def read_config(self) -> None:
        config = self.config
        if (config.get("sparsity_config") or {}).get("format") not in (None, "dense"):
            raise self._not_built("sparsity_config", config["sparsity_config"].get("format"), "dense")
        if (config.get("transform_config") or {}).get("config_groups"):
            raise self._not_built("transform_config", "transforms", "none")
        self.floats_in = tuple(config.get("ignore") or ())
        self._groups = list(self._read_groups(config))

    @override
    def scheme(self, module: str) -> Scheme | None:
        if is_listed(module, self.floats_in):
            return None
        for targets, scheme in self._groups:
            if "Linear" in targets or is_listed(module, targets):
                return scheme
        return None

    def _read_groups(self, config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Scheme]]:
        groups = config.get("config_groups")
        if not groups:
            raise self._not_built("config_groups", groups, "one or more")
        for name, group in groups.items():
            where = f"config_groups.{name}"
            form = str(group.get("format") or config.get("format"))
            yield tuple(group.get("targets") or ("Linear",)), self._read_group(group, form, where)

    def _read_group(self, group: Mapping[str, Any], form: str, where: str) -> Scheme:
        weights = group.get("weights") or {}
        kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("strategy")
        if kind == "float":
            if bits != 8 or form not in _FLOATS:
                raise self._not_built(
                    f"{where}.format", f"{form}, floats of {bits} bits", "float-quantized, 8 bits"
                )
            if strategy != "block":
                return Float8Scheme("weight_scale")
            rows, columns = weights.get("block_structure") or (0, 0)
            if min(rows, columns) < 1:
                raise self._not_built(f"{where}.weights.block_structure", (rows, columns), "two numbers")
            return Float8Scheme("weight_scale", (rows, columns))
        if form != _PACKED and form not in _INTEGERS:
            raise self._not_built(f"{where}.format", form, "pack-quantized, int-quantized, float-quantized")
        if not 2 <= bits <= 8:
            raise self._not_built(f"{where}.weights.num_bits", bits, "2 to 8")
        if strategy not in ("tensor", "channel", "group", None):
            raise self._not_built(
                f"{where}.weights.strategy", strategy, "tensor, channel, group, block for floats"
            )
        inputs, symmetric = group.get("input_activations"), bool(weights.get("symmetric", True))
        rounds = inputs is not None and inputs.get("num_bits") == 8 and inputs.get("type", "int") == "int"
        size = weights.get("group_size") if strategy == "group" else -1
        # Products of integers want one scale for an output, and no zero points.
        by_integers = rounds and bits == 8 and symmetric and size == -1 and form != _PACKED
        return IntegerScheme(bits, size or -1, form == _PACKED, symmetric, 8 if by_integers else None)

    def _not_built(self, key: str, value: Any, built: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.name}: quantization_config: {key}: {value!r} is not built (built: {built})"
        )
