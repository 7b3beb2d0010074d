"""AdaptedLinear and AdaptedEmbedding: layers of a decoder with slots for adapters around them."""

import torch
from torch import Tensor

from batchgen.kernels.lora import LoraSegments
from batchgen.kernels.ops import Activation, Kernels, PackedLinear, Quantized
from batchgen.layers.embedding import Embedding
from batchgen.layers.linear import LinearLayer
from batchgen.models.adapter_lane import AdapterLane

# Where a fused part stands among a layer's outputs, and the weight that stands in its place.
WholeWeights = list[tuple[slice, PackedLinear]]


class AdaptedLinear:
    """A linear layer, and what the adapters in its slots add to it.

    Args:
        layer: on one rank.
        num_slots: S.
        kernels: of the model.
        lane: of the model.

    Attributes:
        input_bits: as the layer's own.
        bank: its slots.
        whole: slot -> the weights that an adapter has in place of the layer's.
    """

    def __init__(self, layer: LinearLayer, num_slots: int, kernels: Kernels, lane: AdapterLane):
        self.layer, self.input_bits = layer, layer.input_bits
        self._kernels, self._lane = kernels, lane
        self.bank = kernels.lora_bank(layer.shape.in_features, layer.shape.part_sizes, num_slots)
        self.whole: dict[int, WholeWeights] = {}

    def __call__(self, x: Activation, out: Tensor | None = None) -> Tensor:
        """Multiply: x [T, K] -> [T, N], each row with its adapter."""
        out = self.layer(x, out)
        segments = self._lane.segments
        if segments is not None:
            self.add(x, segments, self._lane.whole_slots, out)
        return out

    def add(self, x: Activation, segments: LoraSegments, whole_slots: tuple[int, ...], out: Tensor) -> None:
        """Let adapters change what the layer gave, in place.

        Shapes: x [T, K]; out [T, N].
        """
        for slot in whole_slots:
            if slot in self.whole:
                self._replace(x, rows_of(segments, slot), self.whole[slot], out)
        self._kernels.lora_add(x, self.bank, segments, out)

    def _replace(self, x: Activation, rows: Tensor, weights: WholeWeights, out: Tensor) -> None:
        if isinstance(x, Quantized):
            picked = Quantized(x.values[rows], x.scale[rows], x.width).dense().to(out.dtype)
        else:
            picked = x[rows]
        for part, packed in weights:
            out[:, part].index_copy_(0, rows, self._kernels.linear(picked.contiguous(), packed))


class AdaptedEmbedding:
    """An embedding, and what the adapters in its slots add to its rows.

    Args:
        embedding: on one rank.
        num_slots: S.
        kernels: of the model.
        lane: of the model.

    Attributes:
        bank: its slots.
        tables: slot -> the table [V, E] that an adapter has in place of the embedding's.
    """

    def __init__(self, embedding: Embedding, num_slots: int, kernels: Kernels, lane: AdapterLane):
        self.embedding, self._kernels, self._lane = embedding, kernels, lane
        vocab_size, hidden_size = embedding.size
        self.bank = kernels.lora_bank(vocab_size, (hidden_size,), num_slots, is_table=True)
        self.tables: dict[int, Tensor] = {}

    def __call__(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Look up: ids [T] int64 -> [T, E], each row with its adapter."""
        out = self.embedding(ids, out)
        segments = self._lane.segments
        if segments is not None:
            for slot in self._lane.whole_slots:
                if slot in self.tables:
                    rows = rows_of(segments, slot)
                    out.index_copy_(0, rows, self._kernels.gather_rows(self.tables[slot], ids[rows]))
            self._kernels.lora_gather_add(ids, self.bank, segments, out)
        return out


def rows_of(segments: LoraSegments, slot: int) -> Tensor:
    """The rows of a slot, int64."""
    begin, end = segments.starts[slot : slot + 2].tolist()
    return segments.rows[begin:end].to(torch.int64)
