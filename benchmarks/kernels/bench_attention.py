"""The cpu backend's paged attention for every type of KV cache, as shares of what the machine gives.

    python -m benchmarks.kernels.bench_attention --threads 2

Beside it torch's scaled_dot_product_attention in float32, on keys and values that lie dense, which a server
never has. All take turns, so a drift of the machine hits all. Each goes round several caches, as the layers
of a model do. Decode is bound by reading the cache: its rate counts the bytes of the cache, and in brackets
stands the share of what a plain read does in the same run; where sequences share a beginning, tokens that
are read once count once. Prefill is bound by arithmetic: its rate counts scores and weighted values of what
queries see, the share is of float32 multiply-adds (8-bit products may exceed it). Rates are of the fastest
repeat.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from batchgen.kernels.cases import AttentionCase, AttentionInputs, make_inputs
from batchgen.kernels.ceilings import Ceilings
from batchgen.kernels.cpu import ceilings
from batchgen.kernels.kv import SCALED
from batchgen.kernels.ops import Kernels, choose
from benchmarks import record

LAYERS = 8  # caches that take turns, as the layers of a model do
KV_DTYPES = ("float32", "float16", "bfloat16", "int8", "fp8")

# name, queries a sequence, tokens a sequence, sequences, query heads, key/value heads, head size, shared
CASES = (
    ("decode", 1, 512, 64, 9, 3, 64, 0),
    ("decode, short", 1, 90, 128, 9, 3, 64, 0),
    ("decode, long", 1, 4096, 8, 9, 3, 64, 0),
    ("decode, large heads", 1, 512, 32, 32, 8, 128, 0),
    ("decode, shared prefix", 1, 1000, 64, 9, 3, 64, 928),
    ("prefill", 512, 512, 2, 9, 3, 64, 0),
    ("prefill, short", 92, 92, 8, 9, 3, 64, 0),
    ("chunk of a long prompt", 256, 6000, 1, 9, 3, 64, 0),
)


def measure(case: AttentionCase, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of one layer for each contestant, per repeat."""
    works: dict[str, Callable[[], Any]] = {}
    for kv_dtype in KV_DTYPES:
        kernels = choose(
            "cpu",
            "float32",
            backend="cpu",
            head_dim=case.head_dim,
            block_size=case.block_size,
            kv_dtype=kv_dtype,
        )
        layers = [make_inputs(case, kernels, "float32", kv_dtype=kv_dtype) for _ in range(LAYERS)]
        works[kv_dtype] = partial(_attend, kernels, layers, torch.empty_like(layers[0].query))
    works["SDPA, dense"] = _dense(case)
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if repeat:  # the first is a warm-up
                times[name].append((time.perf_counter() - start) / LAYERS * 1e3)
    return times


def _attend(kernels: Kernels, layers: Sequence[AttentionInputs], out: torch.Tensor) -> None:
    for each in layers:
        kernels.attention(each.query, each.kv, each.meta, each.scale, out=out)


def _dense(case: AttentionCase) -> Callable[[], Any]:
    """Torch's attention over as many tokens; all sequences are of one length."""
    sequences, length, queries = len(case.seq_lens), case.seq_lens[0], case.query_lens[0]
    cached = [torch.randn(2, sequences, case.num_kv_heads, length, case.head_dim) for _ in range(LAYERS)]
    query = torch.randn(sequences, case.num_heads, queries, case.head_dim)
    mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    attend = functional.scaled_dot_product_attention
    return lambda: [attend(query, key, value, attn_mask=mask, enable_gqa=True) for key, value in cached]


def bytes_read(case: AttentionCase, kv_dtype: str) -> float:
    """Of the cache, without padding; what is shared counts once."""
    number = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}[kv_dtype]
    row = case.head_dim * number + (4 if kv_dtype in SCALED else 0)
    tokens = sum(length - case.shared for length in case.seq_lens) + case.shared
    return 2.0 * case.num_kv_heads * row * tokens


def operations(case: AttentionCase) -> float:
    """Multiplications and additions of scores and weighted values."""
    seen = sum(
        queries * (length - queries) + queries * (queries + 1) / 2
        for queries, length in zip(case.query_lens, case.seq_lens, strict=True)
    )
    return 4.0 * case.num_heads * case.head_dim * seen


def main() -> None:
    """Measure every case; print, and add a line each to results/."""
    parser = record.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    most = ceilings.measure(1 << 40)
    assert most is not None, "the C kernels are not available"
    print(f"{most.float_ops / 1e9:.0f} GFLOP/s, {most.read_bytes / 1e9:.1f} GB/s read")
    with torch.inference_mode():
        for name, queries, length, sequences, heads, kv_heads, dim, shared in CASES:
            case = AttentionCase(
                name=name, query_lens=[queries] * sequences, seq_lens=[length] * sequences,
                num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, shared=shared,
            )  # fmt: skip
            again = ceilings.measure(1 << 40)
            most = most if again is None else Ceilings.best([most, again])
            times = measure(case, arguments.repeats)
            if not arguments.no_save:
                record.append("kernels_attention", *_line(case, times, most, arguments.threads))
            print(f"{name:24}{_shown(case, times, most)}", flush=True)


def _rate(case: AttentionCase, kv_dtype: str, milliseconds: float) -> float:
    work = bytes_read(case, kv_dtype) if case.query_lens[0] == 1 else operations(case)
    return work / milliseconds * 1e-6


def _most(case: AttentionCase, most: Ceilings) -> float:
    return (most.read_bytes if case.query_lens[0] == 1 else most.float_ops) * 1e-9


def _shown(case: AttentionCase, times: dict[str, list[float]], most: Ceilings) -> str:
    unit = "GB/s" if case.query_lens[0] == 1 else "GFLOP/s"
    parts = []
    for name, values in times.items():
        rate = _rate(case, name if name in KV_DTYPES else "float32", min(values))
        parts.append(f"{name} {min(values):.3f} ms, {rate:.1f} {unit} ({rate / _most(case, most):.0%})")
    return "  ".join(parts)


def _line(
    case: AttentionCase, times: dict[str, list[float]], most: Ceilings, threads: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    details = {
        "name": case.name, "queries": case.query_lens[0], "tokens": case.seq_lens[0],
        "sequences": len(case.seq_lens), "heads": case.num_heads, "kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim, "shared": case.shared, "threads": threads,
    }  # fmt: skip
    best = {name: min(values) for name, values in times.items()}
    rates = {name: _rate(case, name if name in KV_DTYPES else "float32", ms) for name, ms in best.items()}
    measured = {
        "gbytes_per_s" if case.query_lens[0] == 1 else "gflops": {n: round(r, 2) for n, r in rates.items()},
        "share": {name: round(rate / _most(case, most), 3) for name, rate in rates.items()},
        "times_as_fast_as_sdpa": {n: round(best["SDPA, dense"] / best[n], 2) for n in KV_DTYPES},
        "spread": {name: record.spread(values) for name, values in times.items()},
        "ceilings": [most.float_ops, most.int8_ops, most.read_bytes],
    }
    return details, measured


if __name__ == "__main__":
    main()
