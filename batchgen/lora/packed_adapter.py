"""PackedAdapter: an adapter as the kernels read it, ready for any slot; and how it is made of its files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from batchgen.kernels.kv import torch_dtype
from batchgen.kernels.lora import LoraPart, PackedLora
from batchgen.kernels.ops import Kernels
from batchgen.lora.adapter_parts import AdapterParts
from batchgen.lora.base_modules import HEAD, TABLE
from batchgen.lora.layers import WholeWeights
from batchgen.quantization.base import LinearShape

# Beyond this a number has no place in float16; such an adapter is kept in float32.
_FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What packing must know of one of our layers.

    Args:
        in_features, part_sizes: of the layer; of the embedding V and (E,).
        dtype: how A and B are kept for it.
    """

    in_features: int
    part_sizes: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(shape: LinearShape, input_bits: int | None, dtype: str) -> "LayerFacts":
        """Of a linear layer: beside one of small integers an adapter in floats would be slow."""
        kept = "int8" if input_bits is not None else dtype
        return LayerFacts(shape.in_features, shape.part_sizes, kept)


@dataclass(slots=True)
class PackedAdapter:
    """An adapter in memory.

    Args:
        added: layer -> what it adds there.
        whole: layer -> weights in place of the layer's.
        table_added: what it adds to the embedding's rows.
        table: in place of the embedding's, [V, E].
    """

    added: dict[str, PackedLora] = field(default_factory=dict)
    whole: dict[str, WholeWeights] = field(default_factory=dict)
    table_added: PackedLora | None = None
    table: Tensor | None = None

    @property
    def changes_head(self) -> bool:
        """Whether logits of its rows are not those of the model's own head."""
        return HEAD in self.added or HEAD in self.whole

    @property
    def has_whole(self) -> bool:
        """Whether it has a weight in place of a layer's."""
        return bool(self.whole) or self.table is not None

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _tensors(self) -> Iterable[Tensor]:
        for packed in self.added.values():
            yield from packed.tensors()
        for weights in self.whole.values():
            for _, weight in weights:
                yield from weight.tensors()
        if self.table_added is not None:
            yield from self.table_added.tensors()
        if self.table is not None:
            yield self.table


def pack_adapter(
    parts: AdapterParts, layers: Mapping[str, LayerFacts], kernels: Kernels, dtype: str
) -> PackedAdapter:
    """Lay an adapter out for the kernels, on their device. Any thread may.

    Args:
        parts: read and folded; let go of as they are packed.
        layers: the layers that it may change, by name.
        kernels: of the model.
        dtype: of the model's activations.
    """
    packed, at = PackedAdapter(), kernels.home.device
    while parts.added:
        name, by_part = parts.added.popitem()
        facts = layers[name]
        listed = [_moved(by_part.get(part), at) for part in range(len(facts.part_sizes))]
        largest = max(float(t.abs().max()) for part in listed if part for t in (part.a, part.b))
        kept = "float32" if facts.dtype == "int8" and largest > _FLOAT16_MAX else facts.dtype
        packed.added[name] = kernels.pack_lora(facts.in_features, facts.part_sizes, listed, kept)
    while parts.whole:
        name, wholes = parts.whole.popitem()
        sizes = layers[name].part_sizes
        packed.whole[name] = [
            (
                slice(sum(sizes[:part]), sum(sizes[: part + 1])),
                kernels.pack_linear(
                    whole.weight.to(at, torch_dtype(dtype)).contiguous(),
                    None if whole.bias is None else whole.bias.to(at, torch_dtype(dtype)).contiguous(),
                ),
            )
            for part, whole in sorted(wholes.items())
        ]
    added = _moved(parts.table_added, at)
    if added is not None:
        packed.table_added = kernels.pack_lora_table(layers[TABLE].in_features, added, layers[TABLE].dtype)
    if parts.table is not None:
        packed.table = parts.table.to(at, torch_dtype(dtype)).contiguous()
    return packed


def _moved(part: LoraPart | None, device: str) -> LoraPart | None:
    if part is None:
        return None
    bias = None if part.bias is None else part.bias.to(device)
    return LoraPart(part.a.to(device), part.b.to(device), bias)
