"""Random cases for attention: what tests, benchmarks and the GPU check hold kernels to the reference with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.kernels.kv import SCALED, AttentionMeta, KVCacheSpec, LayerKV, torch_dtype
from batchgen.kernels.ops import Kernels, choose

# Largest relative RMS error against the reference in float64 on inputs rounded to the dtype.
TOLERANCE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
# The same of float32 activations over a KV cache of another dtype, against the reference over that cache.
# With integers a kernel may round queries to 16 bits and weights to 15.
KV_TOLERANCE = {"float32": 1e-6, "float16": 1e-6, "bfloat16": 1e-6, "fp8": 1e-6, "int8": 3e-4}


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One mixed batch; `query_lens[s]` of the `seq_lens[s]` tokens of sequence s are this step's."""

    name: str
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    shared: int = 0  # leading tokens, whole blocks, that all sequences read from the same blocks
    seed: int = 0

    def __str__(self) -> str:
        return self.name


CASES = (
    AttentionCase(name="one-token", query_lens=[1], seq_lens=[1]),
    AttentionCase(name="around-block-edges", query_lens=[1] * 6, seq_lens=[15, 16, 17, 63, 64, 65]),
    AttentionCase(
        name="mixed-chunks-and-decodes", query_lens=[1, 40, 17, 1, 5], seq_lens=[130, 40, 81, 7, 64],
        num_heads=9, num_kv_heads=3,
    ),
    AttentionCase(name="no-groups", query_lens=[3, 1], seq_lens=[20, 33], num_heads=2, num_kv_heads=2),
    AttentionCase(name="one-kv-head", query_lens=[2, 33], seq_lens=[50, 33], num_heads=7, num_kv_heads=1),
    AttentionCase(name="odd-head", query_lens=[4, 1], seq_lens=[21, 70], head_dim=33),
    AttentionCase(name="head-of-80", query_lens=[4, 1], seq_lens=[21, 70], head_dim=80),
    AttentionCase(name="head-of-128", query_lens=[4, 1], seq_lens=[21, 70], head_dim=128),
    AttentionCase(name="small-head", query_lens=[4, 1], seq_lens=[21, 40], head_dim=8),
    AttentionCase(name="blocks-of-48", query_lens=[9, 1], seq_lens=[97, 100], block_size=48),
    AttentionCase(name="window-1", query_lens=[5, 1], seq_lens=[30, 40], window=1),
    AttentionCase(name="window-in-a-block", query_lens=[20, 1, 1], seq_lens=[60, 90, 3], window=11),
    AttentionCase(name="window-of-blocks", query_lens=[20, 1], seq_lens=[100, 200], window=64),
    AttentionCase(name="soft-cap", query_lens=[6, 1], seq_lens=[30, 90], soft_cap=2.0),
    AttentionCase(
        name="shared-beginning", query_lens=[1, 1, 3, 1, 40, 1], seq_lens=[140, 129, 200, 131, 180, 140],
        num_heads=6, shared=128,
    ),
    AttentionCase(name="window-and-soft-cap", query_lens=[6, 1], seq_lens=[80, 90], window=37, soft_cap=50.0),
)  # fmt: skip


@dataclass
class AttentionInputs:
    """A case made real for one set of kernels: every slot that holds no token is NaN, blocks are shuffled."""

    kernels: Kernels
    query: Tensor
    kv: LayerKV
    meta: AttentionMeta
    scale: float

    def attend(self, case: AttentionCase) -> Tensor:
        """The operation under test."""
        return self.kernels.attention(self.query, self.kv, self.meta, self.scale, case.window, case.soft_cap)


def make_inputs(
    case: AttentionCase,
    kernels: Kernels,
    dtype: str,
    device: str = "cpu",
    rounded_to: str | None = None,
    kv_dtype: str | None = None,
) -> AttentionInputs:
    """Draw a case: always the same numbers, rounded to `rounded_to` (by default `dtype`) first.

    The cache is of `kv_dtype`, by default `dtype` too.
    """
    generator = torch.Generator().manual_seed(case.seed)
    rounding, working = torch_dtype(rounded_to or dtype), torch_dtype(dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(rounding).to(working)

    spec = KVCacheSpec(case.num_kv_heads, case.head_dim, case.block_size, kv_dtype or dtype)
    counts = [-(-length // case.block_size) for length in case.seq_lens]
    num_blocks = sum(counts) + 2
    shuffled = torch.randperm(num_blocks, generator=generator).to(torch.int32)
    kv = kernels.allocate_kv(spec, num_blocks, device)
    poison(kv)
    tables = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)
    queries, taken = [], 0
    for row, (length, count, num_queries) in enumerate(
        zip(case.seq_lens, counts, case.query_lens, strict=True)
    ):
        tables[row, :count] = shuffled[taken : taken + count]
        num_shared = min(case.shared, length - num_queries) if row else 0
        tables[row, : num_shared // case.block_size] = tables[0, : num_shared // case.block_size]
        taken += count
        key, value = (draw(length, case.num_kv_heads, case.head_dim).to(device) for _ in range(2))
        slots = slots_of(tables[row], length, case.block_size).to(device)
        kernels.store_kv(key[num_shared:], value[num_shared:], kv, slots[num_shared:])
        # Drawn for the whole sequence, so that a query has the same numbers however the prompt is chunked.
        queries.append(draw(length, case.num_heads, case.head_dim)[length - num_queries :])
    starts = [0, *torch.tensor(case.query_lens).cumsum(0).tolist()]
    meta = AttentionMeta(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slot_mapping=torch.full((starts[-1],), -1, dtype=torch.int32, device=device),
        max_query_len=max(case.query_lens),
        max_seq_len=max(case.seq_lens),
    )
    return AttentionInputs(kernels, torch.cat(queries).to(device), kv, meta, case.head_dim**-0.5)


def poison_unseen(inputs: AttentionInputs, case: AttentionCase) -> int:
    """Take blocks behind the windows out of the tables and fill them with NaN; returns how many."""
    assert case.window is not None
    gone: list[int] = []
    for row, (num_queries, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        count = max(length - num_queries - case.window + 1, 0) // case.block_size
        gone += inputs.meta.block_tables[row, :count].tolist()
        inputs.meta.block_tables[row, :count] = -1
    poison(inputs.kv, gone)
    return len(gone)


def poison(kv: LayerKV, blocks: Sequence[int] | slice = slice(None)) -> None:
    """Fill blocks with NaN; of 8 bits the scales become NaN."""
    kv.data[blocks] = -1 if kv.spec.dtype in SCALED else float("nan")


def truth(case: AttentionCase, rounded_to: str, kv_dtype: str | None = None) -> Tensor:
    """The reference in float64, on inputs rounded to the dtype; with `kv_dtype` over a cache of that."""
    kernels = choose(
        "cpu", "float64", backend="reference", head_dim=case.head_dim, block_size=case.block_size
    )
    return make_inputs(case, kernels, "float64", rounded_to=rounded_to, kv_dtype=kv_dtype).attend(case)


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of what is expected; infinite if anything is NaN."""
    wide, right = actual.to("cpu", torch.float64), expected.to("cpu", torch.float64)
    if wide.shape != right.shape:
        raise AssertionError(f"shapes {list(wide.shape)} and {list(right.shape)}")
    error = ((wide - right).square().mean() / right.square().mean().clamp_min(1e-300)).sqrt().item()
    return error if error == error else float("inf")


def slots_of(table: Tensor, length: int, block_size: int) -> Tensor:
    """Slots of a sequence's tokens, in order: table [M] int32 -> [length] int32."""
    positions = torch.arange(length)
    return (table[positions // block_size] * block_size + positions % block_size).to(torch.int32)
