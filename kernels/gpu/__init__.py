"""The gpu backend: Triton kernels for attention, KV cache and LoRA; the rest falls to the reference."""

import os
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.kernels.backend import BACKENDS, KernelBackend, OpShape
from batchgen.kernels.kv import AttentionMeta, KVCacheSpec, LayerKV
from batchgen.kernels.lora import LoraBank, LoraLayer, LoraPart, LoraSegments, PackedLora
from batchgen.kernels.quantized import Quantized
from batchgen.kernels.reference import kv_cache

MAX_HEAD_DIM = 256


class GpuBackend(KernelBackend):
    """Triton. Its cache has the reference's layout, [N, 2, B, G, D]: a token's heads are contiguous.

    Triton is imported on first use, and decides then whether it interprets kernels on the CPU
    (TRITON_INTERPRET=1): a process does one or the other.
    """

    name = "gpu"
    operations = frozenset({"attention", "store_kv", "lora"})

    @override
    def unavailable(self, device: str) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed"
        if device == "cuda":
            return None if torch.cuda.is_available() else "there is no CUDA device"
        if _is_interpreted():
            return None
        return "the gpu kernels run on a GPU, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1)"

    @override
    def unsupported(self, op: str, dtype: str, shape: OpShape) -> str | None:
        if dtype not in ("float32", "float16", "bfloat16"):
            return f"the gpu kernels have no {dtype}"
        if dtype == "bfloat16" and _is_interpreted():
            return "Triton's interpreter computes bfloat16 wrongly"
        if op == "lora":
            return None
        if shape.kv_dtype not in (None, dtype):
            return (
                f"the gpu kernels keep the KV cache in {dtype}, as activations are, not in {shape.kv_dtype}"
            )
        if shape.head_dim > MAX_HEAD_DIM:
            return f"the gpu kernels hold heads of at most {MAX_HEAD_DIM}, not {shape.head_dim}"
        return None

    @override
    def allocate_kv(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> LayerKV:
        return kv_cache.allocate(spec, num_blocks, device, self.name)

    @override
    def store_kv(self, key: Tensor, value: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        from batchgen.kernels.gpu import store_kv

        store_kv.store_kv(key, value, kv, slot_mapping)

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
        from batchgen.kernels.gpu import attention

        return attention.attention(query, kv, meta, scale, window, soft_cap, out)

    @override
    def pack_lora(self, layer: LoraLayer, parts: Sequence[LoraPart | None], dtype: torch.dtype) -> PackedLora:
        from batchgen.kernels.gpu import lora

        return lora.GpuLora(layer, parts, dtype)

    @override
    def lora_bank(self, layer: LoraLayer, num_slots: int) -> LoraBank:
        from batchgen.kernels.gpu import lora

        return lora.GpuLoraBank(layer, num_slots, "cpu" if _is_interpreted() else "cuda")

    @override
    def lora_add(self, x: Tensor | Quantized, bank: LoraBank, segments: LoraSegments, out: Tensor) -> None:
        from batchgen.kernels.gpu import lora

        assert isinstance(bank, lora.GpuLoraBank)
        lora.lora_add(x.dense() if isinstance(x, Quantized) else x, bank, segments, out)

    @override
    def lora_gather_add(self, ids: Tensor, bank: LoraBank, segments: LoraSegments, out: Tensor) -> None:
        self.lora_add(ids, bank, segments, out)


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


BACKENDS.register("gpu")(GpuBackend())
