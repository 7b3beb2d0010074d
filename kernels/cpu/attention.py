"""KV cache and attention of the cpu backend: layouts, and calls into kv_cache.c and attention.c."""

import threading
import weakref

import torch
from torch import Tensor

from batchgen.errors import KernelError
from batchgen.kernels.cpu.calls import Calls, Field, Operation, Tape
from batchgen.kernels.cpu.library import Library
from batchgen.kernels.cpu.memory import allocate
from batchgen.kernels.kv import SCALED, AttentionMeta, KVCacheSpec, LayerKV, torch_dtype

UNIT = 16  # tokens, or dimensions, that the kernels count in (simd.h)
KEY_OFFSET = 128  # bytes of 8-bit keys are so much too high (kv_cache.h)
# What kv_cache.h calls them.
TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "fp8": 4}
# Scales of fp8 are kept so many times too large, as its numbers are read too small (kv_float.h).
E4M3_UNIT = 256

_ERRORS = {
    -1: "query_start_loc, seq_lens and the block tables disagree",
    -2: "a block table points outside of the pool",
}
_STORE = Operation("store_kv", "pnpnpspnnnnn")
_PLAN = Operation("plan_attention", "ppppsssnnnnnnn", _ERRORS, "attention")
_ATTENTION = Operation("attention", "ppnpddp", _ERRORS)


class Plan:
    """Memory of the library's own: the work of a step's attention, the same for all layers of a group."""

    def __init__(self, library: Library):
        self.address = library.attention_plan_new()
        if not self.address:
            raise KernelError("attention: out of memory")
        weakref.finalize(self, library.attention_plan_free, self.address)


class PlanOfThread(threading.local):
    """The plan of calls that run at once."""

    plan: Plan | None = None


_MINE = PlanOfThread()


def block_bytes(spec: KVCacheSpec) -> int:
    """Bytes of a block as kv_cache.h lays it out."""
    key_dim = -(-spec.head_dim // 4) * 4 if spec.dtype == "int8" else spec.head_dim
    numbers = (key_dim + _value_dim(spec)) * torch_dtype(spec.dtype).itemsize
    scales = 8 if spec.dtype in SCALED else 0
    return spec.num_kv_heads * spec.block_size * (numbers + scales)


def allocate_kv(spec: KVCacheSpec, num_blocks: int, backend: str) -> LayerKV:
    """See `Kernels.allocate_kv`."""
    if spec.dtype not in TYPES or spec.block_size % UNIT:
        raise KernelError(
            f"the C kernels keep {', '.join(TYPES)} in blocks of a multiple of {UNIT} tokens; got {spec}"
        )
    data = allocate(num_blocks * block_bytes(spec) // 4).view(torch_dtype(spec.dtype))
    return LayerKV(spec, data.view(num_blocks, -1), backend)


def store_kv(calls: Calls, key: Tensor, value: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
    """See `Kernels.store_kv`."""
    spec = kv.spec
    calls(
        _STORE,
        key,
        key.stride(0),
        value,
        value.stride(0),
        slot_mapping,
        key.shape[0],
        kv.data,
        TYPES[spec.dtype],
        kv.num_blocks,
        spec.block_size,
        spec.num_kv_heads,
        spec.head_dim,
        says=f"a slot is outside of {kv.num_blocks} blocks of {spec.block_size} tokens",
    )


def read_kv(kv: LayerKV, slots: Tensor) -> tuple[Tensor, Tensor]:
    """See `Kernels.read_kv`."""
    spec, count = kv.spec, kv.num_blocks
    block, offset = slots.long() // spec.block_size, slots.long() % spec.block_size
    heads = kv.data.view(count, spec.num_kv_heads, -1)
    width = 4 if spec.dtype == "int8" else 1
    key_dim = -(-spec.head_dim // width) * width
    keys_end = key_dim * spec.block_size
    values_end = keys_end + _value_dim(spec) * spec.block_size
    keys = heads[:, :, :keys_end].reshape(count, spec.num_kv_heads, -1, spec.block_size, width)
    keys = keys.transpose(3, 4).reshape(count, spec.num_kv_heads, key_dim, spec.block_size)
    values = heads[:, :, keys_end:values_end].reshape(
        count, spec.num_kv_heads, spec.block_size // width, -1, width
    )
    values = values.transpose(3, 4).reshape(count, spec.num_kv_heads, spec.block_size, -1)
    key = keys[block, :, : spec.head_dim, offset]
    value = values[block, :, offset, : spec.head_dim]
    if spec.dtype not in SCALED:
        return key.float(), value.float()
    scales = heads[:, :, values_end:].contiguous().view(torch.float32).view(count, -1, 2, spec.block_size)
    scale = scales[block, :, :, offset]
    if spec.dtype == "fp8":
        scale = scale / E4M3_UNIT
        key, value = (numbers.contiguous().view(torch.float8_e4m3fn).float() for numbers in (key, value))
    else:
        key, value = key.view(torch.uint8).float() - KEY_OFFSET, value.float()
    return key * scale[:, :, :1], value * scale[:, :, 1:]


def attention(
    calls: Calls,
    query: Tensor,
    kv: LayerKV,
    meta: AttentionMeta,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    out: Tensor | None,
) -> Tensor:
    """See `Kernels.attention`. Calls of one recording that only differ in the layer share a plan."""
    if out is None:
        out = torch.empty(query.shape)
    steps: list[tuple[Operation, tuple[Field, ...]]] = []
    tape = calls.tape
    plan = _plan_of_thread(calls.library) if tape is None else None
    if tape is not None:
        key = ("attention", id(meta), window, query.shape[1], kv.num_blocks, kv.spec)
        found = tape.notes.get(key)
        if isinstance(found, Plan):
            return _walk(calls, [], found, query, kv, scale, soft_cap, out)
        plan = tape.notes[key] = _plan_of_tape(calls.library, tape, meta)
    assert plan is not None
    tables, spec = meta.block_tables, kv.spec
    steps.append(
        (
            _PLAN,
            (
                plan.address,
                meta.query_start_loc,
                meta.seq_lens,
                tables,
                query.shape[0],
                *tables.shape,
                query.shape[1],
                TYPES[spec.dtype],
                kv.num_blocks,
                spec.block_size,
                spec.num_kv_heads,
                spec.head_dim,
                window or 0,
            ),
        )
    )
    return _walk(calls, steps, plan, query, kv, scale, soft_cap, out)


def _walk(
    calls: Calls,
    steps: list[tuple[Operation, tuple[Field, ...]]],
    plan: Plan,
    query: Tensor,
    kv: LayerKV,
    scale: float,
    soft_cap: float | None,
    out: Tensor,
) -> Tensor:
    walk: tuple[Field, ...] = (
        plan.address, query, query.stride(0), kv.data, float(scale), float(soft_cap or 0.0), out
    )  # fmt: skip
    calls.together([*steps, (_ATTENTION, walk)])
    return out


def _plan_of_thread(library: Library) -> Plan:
    if _MINE.plan is None:
        _MINE.plan = Plan(library)
    return _MINE.plan


def _plan_of_tape(library: Library, tape: Tape, meta: AttentionMeta) -> Plan:
    plan = Plan(library)
    # The meta too: notes know it by its identity.
    tape.kept += [plan, meta]
    return plan


def _value_dim(spec: KVCacheSpec) -> int:
    return -(-spec.head_dim // UNIT) * UNIT
