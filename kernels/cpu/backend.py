"""CpuBackend: the C kernels behind the interface of a backend."""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.kernels.backend import OPERATIONS, KernelBackend, OpShape, PackedLinear
from batchgen.kernels.coded import Coded
from batchgen.kernels.cpu import attention, elementwise, greedy, int8, kronecker, linear, lora, sampling
from batchgen.kernels.cpu import coded as cpu_coded
from batchgen.kernels.cpu.calls import Calls, CpuProgram
from batchgen.kernels.cpu.library import Library, load
from batchgen.kernels.cpu.memory import Arena
from batchgen.kernels.kv import AttentionMeta, KVCacheSpec, LayerKV
from batchgen.kernels.lora import LoraBank, LoraLayer, LoraPart, LoraSegments, PackedLora
from batchgen.kernels.program import Program, StepSizes
from batchgen.kernels.quantized import Quantized
from batchgen.kernels.sampling import Draws, Penalties, Scores


class CpuBackend(KernelBackend):
    """C kernels. Each gives a row the same bits whatever is computed with it, on any number of threads."""

    name = "cpu"
    operations = frozenset(OPERATIONS)
    invariant = operations

    def __init__(self) -> None:
        self._weights = Arena()
        # Of their own: they come and go, and a chunk goes with the last that lies in it.
        self._adapters = Arena()

    @cached_property
    def library(self) -> Library:
        """The loaded library; only asked for once the backend was found available."""
        library = load()
        assert isinstance(library, Library), library
        return library

    @cached_property
    def calls(self) -> Calls:
        """How operations are run or recorded."""
        return Calls(self.library)

    @override
    def unavailable(self, device: str) -> str | None:
        if device != "cpu":
            return f"the C kernels run on the CPU, not on {device}"
        library = load()
        return None if isinstance(library, Library) else f"the C kernels are not available: {library}"

    @override
    def unsupported(self, op: str, dtype: str, shape: OpShape) -> str | None:
        if dtype != "float32" and op not in sampling.OPERATIONS:
            return f"the C kernels are float32 only, not {dtype}"
        if op in ("attention", "store_kv") and shape.block_size % attention.UNIT:
            unit = attention.UNIT
            return f"the C kernels need a block_size that is a multiple of {unit}, not {shape.block_size}"
        if op in ("attention", "store_kv") and (shape.kv_dtype or dtype) not in attention.TYPES:
            return f"the C kernels have no KV cache of {shape.kv_dtype}"
        return None

    @override
    def record(self, build: Callable[[], None], sizes: StepSizes) -> Program | None:
        tape = self.calls.start(sizes)
        try:
            build()
        finally:
            self.calls.stop()
        return CpuProgram(self.library, tape)

    @override
    def pack_linear(self, weight: Tensor, bias: Tensor | None, is_head: bool) -> PackedLinear:
        return linear.CpuLinear(self.calls, self._weights, weight, bias, is_head)

    @override
    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None) -> Tensor:
        assert isinstance(packed, linear.CpuLinear)
        return linear.linear(self.calls, x, packed, out)

    @override
    def linear_argmax(self, x: Tensor | Quantized, packed: PackedLinear, width: int) -> Tensor | None:
        if packed.is_coded:
            return None
        return greedy.linear_argmax(self.calls, x, packed, width)

    @override
    def linear_draw(
        self, x: Tensor | Quantized, packed: PackedLinear, width: int, temperature: Tensor, uniform: Tensor
    ) -> Tensor | None:
        if packed.is_coded:
            return None
        return greedy.linear_draw(self.calls, x, packed, width, temperature, uniform)

    @override
    def pack_int8(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> PackedLinear:
        return int8.CpuInt8Linear(self.calls, self._weights, weight, scale, bias)

    @override
    def linear_int8(self, x: Quantized, packed: PackedLinear, out: Tensor) -> Tensor:
        return int8.linear(self.calls, x, packed, out)

    @override
    def pack_coded(self, coded: Coded, bias: Tensor | None) -> PackedLinear:
        return cpu_coded.CpuCodedLinear(self.calls, self._weights, coded, bias)

    @override
    def linear_coded(self, x: Tensor, packed: PackedLinear, out: Tensor) -> Tensor:
        assert isinstance(packed, cpu_coded.CpuCodedLinear)
        return cpu_coded.linear(self.calls, x, packed, out)

    @override
    def quantize(self, x: Tensor, out: Quantized) -> Quantized:
        return int8.quantize(self.calls, x, out)

    @override
    def rounding_loss(self, weight: Tensor, rounded: Quantized, mean: Tensor) -> Tensor:
        return int8.rounding_loss(self.calls, weight, rounded, mean)

    @override
    def kronecker(
        self, x: Tensor, scale: Tensor, factors: Sequence[Tensor], dim: int, out: Tensor | None
    ) -> Tensor:
        return kronecker.kronecker(self.calls, x, scale, factors, dim, out)

    @override
    def rms_norm_quantize(self, x: Tensor, weight: Tensor, eps: float, out: Quantized) -> Quantized:
        return int8.norm_quantize(self.calls, x, None, weight, eps, out)

    @override
    def add_rms_norm_quantize(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Quantized
    ) -> tuple[Quantized, Tensor]:
        return int8.norm_quantize(self.calls, x, residual, weight, eps, out), residual

    @override
    def silu_mul_quantize(self, gate_up: Tensor, out: Quantized) -> Quantized:
        return int8.silu_mul_quantize(self.calls, gate_up, out)

    @override
    def pack_lora(self, layer: LoraLayer, parts: Sequence[LoraPart | None], dtype: torch.dtype) -> PackedLora:
        return lora.CpuLora(self._adapters, layer, parts, dtype)

    @override
    def pack_lora_int8(self, layer: LoraLayer, parts: Sequence[LoraPart | None]) -> PackedLora:
        has_integers = self.library.lora_has_integers
        return lora.CpuLora(self._adapters, layer, parts, torch.float16, has_integers=has_integers)

    @override
    def lora_bank(self, layer: LoraLayer, num_slots: int) -> LoraBank:
        return lora.CpuLoraBank(self.library, layer, num_slots)

    @override
    def lora_add(self, x: Tensor | Quantized, bank: LoraBank, segments: LoraSegments, out: Tensor) -> None:
        assert isinstance(bank, lora.CpuLoraBank)
        lora.lora_add(self.calls, x, bank, segments, out)

    @override
    def lora_gather_add(self, ids: Tensor, bank: LoraBank, segments: LoraSegments, out: Tensor) -> None:
        assert isinstance(bank, lora.CpuLoraBank)
        lora.lora_gather_add(self.calls, ids, bank, segments, out)

    @override
    def gather_rows(self, source: Tensor | PackedLinear, ids: Tensor, out: Tensor | None) -> Tensor:
        if isinstance(source, cpu_coded.CpuCodedLinear):
            assert out is not None
            return cpu_coded.gather_rows(self.calls, source, ids, out)
        assert isinstance(source, Tensor | linear.CpuLinear)
        return linear.gather_rows(self.calls, source, ids, out)

    @override
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
        return elementwise.rms_norm(self.calls, x, weight, eps, out)

    @override
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return elementwise.add_rms_norm(self.calls, x, residual, weight, eps, out), residual

    @override
    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, is_neox: bool) -> None:
        elementwise.rotary(self.calls, query, key, positions, cos_sin, is_neox)

    @override
    def silu_mul(self, gate_up: Tensor, out: Tensor | None) -> Tensor:
        return elementwise.silu_mul(self.calls, gate_up, out)

    @override
    def kv_block_bytes(self, spec: KVCacheSpec) -> int:
        return attention.block_bytes(spec)

    @override
    def allocate_kv(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> LayerKV:
        return attention.allocate_kv(spec, num_blocks, self.name)

    @override
    def store_kv(self, key: Tensor, value: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        attention.store_kv(self.calls, key, value, kv, slot_mapping)

    @override
    def read_kv(self, kv: LayerKV, slots: Tensor) -> tuple[Tensor, Tensor]:
        return attention.read_kv(kv, slots)

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
        return attention.attention(self.calls, query, kv, meta, scale, window, soft_cap, out)

    @override
    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        return sampling.sample(self.library, logits, draws)

    @override
    def score_tokens(self, logits: Tensor, tokens: Tensor, num_top: Tensor) -> Scores:
        return sampling.score_tokens(self.library, logits, tokens, num_top)

    @override
    def penalise(self, logits: Tensor, penalties: Penalties) -> None:
        sampling.penalise(self.library, logits, penalties)
