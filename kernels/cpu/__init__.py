"""The cpu backend: plain C with OpenMP for float32, compiled at first use for the machine's own vectors."""

from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import override

from batchgen.errors import KernelError
from batchgen.kernels.backend import BACKENDS, OPERATIONS, KernelBackend, OpShape, PackedLinear
from batchgen.kernels.cpu import sampling
from batchgen.kernels.cpu.library import Library, load
from batchgen.kernels.cpu.memory import Arena, allocate
from batchgen.kernels.kv import AttentionMeta, KVCacheSpec, LayerKV
from batchgen.kernels.sampling import Draws, Penalties, Scores

UNIT = 16  # tokens, or dimensions, that the kernels count in (simd.h)

_ATTENTION_ERRORS = {
    -1: "query_start_loc, seq_lens and the block tables disagree",
    -2: "a block table points outside of the pool",
    -4: "out of memory for scratch space",
}


class CpuLinear(PackedLinear):
    """A weight in panels of columns (linear.c)."""

    def __init__(self, library: Library, arena: Arena, weight: Tensor, bias: Tensor | None):
        self._library = library
        self.out_features, self.in_features = weight.shape
        panels = -(-self.out_features // library.panel)
        self.panels = arena.take(panels * self.in_features * library.panel)
        self.address = self.panels.data_ptr()
        weight = weight.detach().to(torch.float32).contiguous()
        library.linear_pack(weight.data_ptr(), self.address, *weight.shape, torch.get_num_threads())
        self.bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self.bias_address = None if self.bias is None else self.bias.data_ptr()

    @override
    def rows(self, ids: Tensor) -> Tensor:
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty((ids.shape[0], self.in_features), dtype=torch.float32)
        status = self._library.linear_rows(
            self.address,
            ids.data_ptr(),
            out.data_ptr(),
            ids.shape[0],
            self.out_features,
            self.in_features,
            torch.get_num_threads(),
        )
        if status:
            raise KernelError(f"rows: an id is outside of the {self.out_features} rows")
        return out

    @override
    def tensors(self) -> list[Tensor]:
        return [self.panels] if self.bias is None else [self.panels, self.bias]


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
    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return CpuLinear(self.library, self._weights, weight, bias)

    @override
    def linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None) -> Tensor:
        assert isinstance(packed, CpuLinear)
        rows, depth = x.shape
        if out is None:
            out = torch.empty((rows, packed.out_features))
        self.library.linear(
            x.data_ptr(),
            x.stride(0),
            packed.address,
            packed.bias_address,
            out.data_ptr(),
            rows,
            packed.out_features,
            depth,
            torch.get_num_threads(),
        )
        return out

    @override
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
        if out is None:
            out = torch.empty(x.shape)
        tokens, width = x.shape[0], x.shape[-1]
        self.library.rms_norm(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            tokens,
            x.shape[1] if x.dim() == 3 else 1,
            width,
            eps,
            torch.get_num_threads(),
        )
        return out

    @override
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if out is None:
            out = torch.empty(x.shape)
        self.library.add_rms_norm(
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *x.shape,
            eps,
            torch.get_num_threads(),
        )
        return out, residual

    @override
    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, is_neox: bool) -> None:
        tokens, heads, head_dim = query.shape
        status = self.library.rotary(
            query.data_ptr(),
            query.stride(0),
            heads,
            key.data_ptr(),
            key.stride(0),
            key.shape[1],
            head_dim,
            positions.data_ptr(),
            tokens,
            cos_sin.data_ptr(),
            cos_sin.shape[0],
            cos_sin.shape[1] // 2,
            is_neox,
            torch.get_num_threads(),
        )
        if status:
            raise KernelError(f"rotary: a position is outside of the {cos_sin.shape[0]} in the table")

    @override
    def silu_mul(self, gate_up: Tensor, out: Tensor | None) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if out is None:
            out = torch.empty((rows, width))
        self.library.silu_mul(
            gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), rows, width, torch.get_num_threads()
        )
        return out

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


BACKENDS.register("cpu")(CpuBackend())
