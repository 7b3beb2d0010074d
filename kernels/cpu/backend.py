"""CpuBackend: the C kernels behind the interface of a backend."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import KernelError
from batchgen.kernels.backend import OPERATIONS, KernelBackend, OpShape, PackedLinear
from batchgen.kernels.cpu import elementwise, linear, sampling
from batchgen.kernels.cpu.calls import Calls, CpuProgram
from batchgen.kernels.cpu.library import Library, load
from batchgen.kernels.cpu.memory import Arena, allocate
from batchgen.kernels.kv import AttentionMeta, KVCacheSpec, LayerKV
from batchgen.kernels.program import Program, StepSizes
from batchgen.kernels.sampling import Draws, Penalties, Scores

UNIT = 16  # tokens, or dimensions, that the kernels count in (simd.h)

_ATTENTION_ERRORS = {
    -1: "query_start_loc, seq_lens and the block tables disagree",
    -2: "a block table points outside of the pool",
    -4: "out of memory for scratch space",
}


class CpuBackend(KernelBackend):
    """C kernels. Each gives a row the same bits whatever is computed with it, on any number of threads."""

    name = "cpu"
    operations = frozenset(OPERATIONS)
    invariant = operations

    def __init__(self) -> None:
        self._weights = Arena()

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
        if op in ("attention", "store_kv") and shape.block_size % UNIT:
            return f"the C kernels need a block_size that is a multiple of {UNIT}, not {shape.block_size}"
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
    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return linear.CpuLinear(self.calls, self._weights, weight, bias)

    @override
    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None) -> Tensor:
        assert isinstance(packed, linear.CpuLinear)
        return linear.linear(self.calls, x, packed, out)

    @override
    def gather_rows(self, source: Tensor | PackedLinear, ids: Tensor, out: Tensor | None) -> Tensor:
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
        return 4 * _block_floats(spec)

    @override
    def allocate_kv(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> LayerKV:
        if spec.dtype != "float32" or spec.block_size % UNIT:
            raise KernelError(
                f"the C kernels keep float32 in blocks of a multiple of {UNIT} tokens; got {spec}"
            )
        data = allocate(num_blocks * _block_floats(spec)).view(num_blocks, _block_floats(spec))
        return LayerKV(spec, data, self.name)

    @override
    def store_kv(self, key: Tensor, value: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        spec = kv.spec
        status = self.library.store_kv(
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            slot_mapping.data_ptr(),
            key.shape[0],
            kv.data.data_ptr(),
            kv.data.shape[0],
            spec.block_size,
            spec.num_kv_heads,
            spec.head_dim,
            torch.get_num_threads(),
        )
        if status:
            raise KernelError(
                f"store_kv: a slot is outside of {kv.num_blocks} blocks of {spec.block_size} tokens"
            )

    @override
    def read_kv(self, kv: LayerKV, slots: Tensor) -> tuple[Tensor, Tensor]:
        spec = kv.spec
        block, offset = slots.long() // spec.block_size, slots.long() % spec.block_size
        heads = kv.data.view(kv.num_blocks, spec.num_kv_heads, -1)
        key_floats = spec.head_dim * spec.block_size
        keys, values = heads[:, :, :key_floats], heads[:, :, key_floats:]
        keys = keys.reshape(*keys.shape[:2], spec.head_dim, spec.block_size)[block, :, :, offset]
        values = values.reshape(*values.shape[:2], spec.block_size, -1)[block, :, offset, : spec.head_dim]
        return keys, values

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
        spec, tables = kv.spec, meta.block_tables
        if out is None:
            out = torch.empty(query.shape)
        status = self.library.attention(
            query.data_ptr(),
            query.stride(0),
            query.shape[1],
            kv.data.data_ptr(),
            kv.data.shape[0],
            spec.block_size,
            spec.num_kv_heads,
            spec.head_dim,
            query.shape[0],
            meta.query_start_loc.data_ptr(),
            meta.seq_lens.data_ptr(),
            tables.data_ptr(),
            tables.shape[0],
            tables.shape[1],
            scale,
            soft_cap or 0.0,
            window or 0,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if status < 0:
            raise KernelError(f"attention: {_ATTENTION_ERRORS[status]}")
        return out

    @override
    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        return sampling.sample(self.library, logits, draws)

    @override
    def score_tokens(self, logits: Tensor, tokens: Tensor, num_top: Tensor) -> Scores:
        return sampling.score_tokens(self.library, logits, tokens, num_top)

    @override
    def penalise(self, logits: Tensor, penalties: Penalties) -> None:
        sampling.penalise(self.library, logits, penalties)


def _value_dim(spec: KVCacheSpec) -> int:
    return -(-spec.head_dim // UNIT) * UNIT


def _block_floats(spec: KVCacheSpec) -> int:
    return spec.num_kv_heads * spec.block_size * (spec.head_dim + _value_dim(spec))
