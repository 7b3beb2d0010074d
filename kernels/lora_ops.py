"""LoraOps: the operations of `Kernels` that add what adapters say to the rows that belong to them."""

from collections.abc import Sequence

from torch import Tensor

from batchgen.kernels import checks, lora_checks
from batchgen.kernels.lora import INT8, LoraBackend, LoraBank, LoraLayer, LoraPart, LoraSegments, PackedLora
from batchgen.kernels.quantized import Quantized


class LoraOps:
    """Adapters beside linear layers and embeddings.

    Args:
        home: dtype and device of activations.
        lora: the backend that serves the operation.
    """

    def __init__(self, home: checks.Home, lora: LoraBackend):
        self.home, self._lora = home, lora

    def pack_lora(
        self,
        in_features: int,
        part_sizes: Sequence[int],
        parts: Sequence[LoraPart | None],
        dtype: str = "float32",
    ) -> PackedLora:
        """Lay out what one adapter adds to one linear layer. Any thread may, while steps run in others.

        Args:
            in_features: K of the layer.
            part_sizes: outputs of each of its fused parts: one number for a layer that is not fused.
            parts: for each of these what the adapter adds, or None. Ranks are 1 to MOST_RANK, each its own.
            dtype: how A and B are kept: "float32", "float16" or "bfloat16". Sums are float32. "int8", for a
                layer whose inputs are integers and only these: as float16, but A rounded to 8 bits with a
                scale for each of its rows where that is faster.

        Raises: ShapeError if a part does not fit; KernelError if a rank or a number is out of range.
        """
        layer = LoraLayer(in_features, tuple(part_sizes))
        if dtype == INT8:
            lora_checks.check_adapter("pack_lora", self.home, layer, parts, "float16")
            return self._lora.pack_lora_int8(layer, parts)
        kept = lora_checks.check_adapter("pack_lora", self.home, layer, parts, dtype)
        return self._lora.pack_lora(layer, parts, kept)

    def pack_lora_table(self, vocab_size: int, part: LoraPart, dtype: str = "float32") -> PackedLora:
        """Lay out what one adapter adds to an embedding: `part.a` is [r, V]. Otherwise as `pack_lora`."""
        layer = LoraLayer(vocab_size, tuple(part.b.shape[:1]), is_table=True)
        kept = lora_checks.check_adapter("pack_lora_table", self.home, layer, [part], dtype)
        return self._lora.pack_lora(layer, [part], kept)

    def lora_bank(
        self, in_features: int, part_sizes: Sequence[int], num_slots: int, *, is_table: bool = False
    ) -> LoraBank:
        """Slots for adapters of one layer, all empty.

        Args:
            in_features: K of the layer; of an embedding V.
            part_sizes: outputs of each of its fused parts; of an embedding [E].
            num_slots: S, how many adapters a step may have; at least 1.
            is_table: for an embedding: it takes what `pack_lora_table` gives.
        """
        layer = LoraLayer(in_features, tuple(part_sizes), is_table)
        lora_checks.check_layer("lora_bank", layer)
        lora_checks.check_num_slots(num_slots)
        return self._lora.lora_bank(layer, num_slots)

    def lora_add(self, x: Tensor | Quantized, bank: LoraBank, segments: LoraSegments, out: Tensor) -> None:
        """Add to each slot's rows what its adapter says: out[row] += x[row] · aᵀ · bᵀ + bias, part by part.

        Rows of a slot that is empty, or whose adapter has no part there, are left alone.

        Shapes: x [T, K] with dense rows, the stride between them is free, or quantized: then it stands for
            `Quantized.dense`; segments as LoraSegments says; out [T, N] with dense rows.
        In place: out.
        Raises: KernelError if segments name a row outside of the T there are.
        Source: Hu et al. 2021, arXiv:2106.09685; rows of many adapters in one step: Chen et al. 2023,
            arXiv:2310.18547.
        """
        lora_checks.check_lora_add(self.home, x, bank, segments, out)
        self._lora.lora_add(x, bank, segments, out)

    def lora_gather_add(self, ids: Tensor, bank: LoraBank, segments: LoraSegments, out: Tensor) -> None:
        """Do what `lora_add` does beside an embedding: out[row] += b · a[:, ids[row]] + bias.

        Shapes: ids [T] int64; bank: one for a table; segments as LoraSegments says; out [T, E], dense rows.
        In place: out.
        Raises: KernelError if segments name a row outside of the T there are, or an id of such a row is
            outside of the V.
        """
        lora_checks.check_lora_gather_add(self.home, ids, bank, segments, out)
        self._lora.lora_gather_add(ids, bank, segments, out)
