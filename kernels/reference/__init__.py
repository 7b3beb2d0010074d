"""The reference backend: plain torch, any device and dtype, obviously right; the specification."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.kernels.backend import BACKENDS, OPERATIONS, KernelBackend, PackedLinear
from batchgen.kernels.coded import Coded
from batchgen.kernels.kv import AttentionMeta, KVCacheSpec, LayerKV
from batchgen.kernels.lora import LoraBank, LoraLayer, LoraPart, LoraSegments, PackedLora
from batchgen.kernels.quantized import Quantized
from batchgen.kernels.reference import attention, elementwise, int8, kronecker, kv_cache, lora, sampling
from batchgen.kernels.reference.coded import ReferenceCodedLinear
from batchgen.kernels.reference.coded import gather_rows as gather_coded_rows
from batchgen.kernels.reference.coded import linear as linear_coded
from batchgen.kernels.reference.linear import ReferenceLinear, gather_rows, linear
from batchgen.kernels.sampling import Draws, Penalties, Scores


class ReferenceBackend(KernelBackend):
    """Plain torch."""

    name = "reference"
    operations = frozenset(OPERATIONS)
    # Each of these computes a row by itself; torch's matrix products do not.
    invariant = frozenset(
        {"linear_int8", "gather_rows", "rms_norm", "add_rms_norm", "rotary", "silu_mul", "quantize"}
    )

    @override
    def pack_linear(self, weight: Tensor, bias: Tensor | None, is_head: bool) -> PackedLinear:
        return ReferenceLinear(weight, bias)

    @override
    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None) -> Tensor:
        assert isinstance(packed, ReferenceLinear)
        return _into(out, linear(x, packed))

    @override
    def pack_int8(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> PackedLinear:
        return int8.ReferenceInt8Linear(weight, scale, bias)

    @override
    def linear_int8(self, x: Quantized, packed: PackedLinear, out: Tensor) -> Tensor:
        return out.copy_(int8.linear(x, packed))

    @override
    def pack_coded(self, coded: Coded, bias: Tensor | None) -> PackedLinear:
        return ReferenceCodedLinear(coded, bias)

    @override
    def linear_coded(self, x: Tensor, packed: PackedLinear, out: Tensor) -> Tensor:
        assert isinstance(packed, ReferenceCodedLinear)
        return out.copy_(linear_coded(x, packed))

    @override
    def quantize(self, x: Tensor, out: Quantized) -> Quantized:
        return int8.quantize(x, out)

    @override
    def rounding_loss(self, weight: Tensor, rounded: Quantized, mean: Tensor) -> Tensor:
        return int8.rounding_loss(weight, rounded, mean)

    @override
    def kronecker(
        self, x: Tensor, scale: Tensor, factors: Sequence[Tensor], dim: int, out: Tensor | None
    ) -> Tensor:
        return _into(out, kronecker.kronecker(x, scale, factors, dim))

    @override
    def pack_lora(self, layer: LoraLayer, parts: Sequence[LoraPart | None], dtype: torch.dtype) -> PackedLora:
        return lora.ReferenceLora(layer, parts, dtype)

    @override
    def lora_bank(self, layer: LoraLayer, num_slots: int) -> LoraBank:
        return lora.ReferenceLoraBank(layer, num_slots)

    @override
    def lora_add(self, x: Tensor | Quantized, bank: LoraBank, segments: LoraSegments, out: Tensor) -> None:
        assert isinstance(bank, lora.ReferenceLoraBank)
        lora.lora_add(x.dense() if isinstance(x, Quantized) else x, bank, segments, out)

    @override
    def lora_gather_add(self, ids: Tensor, bank: LoraBank, segments: LoraSegments, out: Tensor) -> None:
        assert isinstance(bank, lora.ReferenceLoraBank)
        lora.lora_gather_add(ids, bank, segments, out)

    @override
    def gather_rows(self, source: Tensor | PackedLinear, ids: Tensor, out: Tensor | None) -> Tensor:
        assert isinstance(source, Tensor | ReferenceLinear | ReferenceCodedLinear)
        if isinstance(source, ReferenceCodedLinear):
            return _into(out, gather_coded_rows(source, ids))
        return _into(out, gather_rows(source, ids))

    @override
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
        return _into(out, elementwise.rms_norm(x, weight, eps))

    @override
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        residual += x
        return _into(out, elementwise.rms_norm(residual, weight, eps)), residual

    @override
    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, is_neox: bool) -> None:
        elementwise.rotary(query, positions, cos_sin, is_neox)
        elementwise.rotary(key, positions, cos_sin, is_neox)

    @override
    def silu_mul(self, gate_up: Tensor, out: Tensor | None) -> Tensor:
        return _into(out, elementwise.silu_mul(gate_up))

    @override
    def kv_block_bytes(self, spec: KVCacheSpec) -> int:
        return kv_cache.block_bytes(spec)

    @override
    def allocate_kv(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> LayerKV:
        return kv_cache.allocate(spec, num_blocks, device, self.name)

    @override
    def store_kv(self, key: Tensor, value: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        kv_cache.store(key, value, kv, slot_mapping)

    @override
    def read_kv(self, kv: LayerKV, slots: Tensor) -> tuple[Tensor, Tensor]:
        return kv_cache.read(kv, slots)

    @override
    def attention(
        self,
        query: Tensor,
        kv: LayerKV,
        meta: AttentionMeta,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        out: Tensor | None,
    ) -> Tensor:
        return _into(out, attention.attention(query, kv, meta, scale, window, soft_cap))

    @override
    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        return sampling.sample(logits, draws)

    @override
    def score_tokens(self, logits: Tensor, tokens: Tensor, num_top: Tensor) -> Scores:
        return sampling.score_tokens(logits, tokens, num_top)

    @override
    def penalise(self, logits: Tensor, penalties: Penalties) -> None:
        sampling.penalise(logits, penalties)


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


BACKENDS.register("reference")(ReferenceBackend())
