"""The cpu backend's paged attention beside torch's scaled_dot_product_attention on dense tensors, in one run.

    python -m benchmarks.kernels.bench_attention --threads 2

torch has no paged attention: it gets its keys and values dense, which a server never has. Decode is bound by
reading the cache, so its rate is also given as a share of what a plain sum over as much memory reads.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from batchgen.kernels.cases import AttentionCase, make_inputs
from batchgen.kernels.ops import choose
from benchmarks import record

LAYERS = 8  # caches that take turns, as the layers of a model do

# name, queries a sequence, tokens a sequence, sequences, query heads, key/value heads, head size
CASES = (
    ("decode", 1, 512, 64, 9, 3, 64),
    ("decode, short", 1, 90, 128, 9, 3, 64),
    ("decode, long", 1, 4096, 8, 9, 3, 64),
    ("decode, large heads", 1, 512, 32, 32, 8, 128),
    ("prefill", 512, 512, 2, 9, 3, 64),
    ("prefill, short", 92, 92, 8, 9, 3, 64),
    ("chunk of a long prompt", 256, 4096, 1, 9, 3, 64),
)


def fastest(works: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each, taking turns, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if repeat:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def measure(case: AttentionCase, repeats: int) -> tuple[dict[str, list[float]], float]:
    """Milliseconds of one layer for each contestant, and the bytes of keys and values it reads."""
    kernels = choose("cpu", "float32", backend="cpu", head_dim=case.head_dim, block_size=case.block_size)
    layers = [make_inputs(case, kernels, "float32") for _ in range(LAYERS)]
    out = torch.empty_like(layers[0].query)
    sequences, length, queries = len(case.seq_lens), case.seq_lens[0], case.query_lens[0]
    cached = [torch.randn(2, sequences, case.num_kv_heads, length, case.head_dim) for _ in range(LAYERS)]
    query = torch.randn(sequences, case.num_heads, queries, case.head_dim)
    mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    num_bytes = 2.0 * 4 * sequences * length * case.num_kv_heads * case.head_dim
    plain = torch.randn(LAYERS, int(num_bytes) // 4)

    def ours() -> None:
        for i in layers:
            kernels.attention(i.query, i.kv, i.meta, i.scale, out=out)

    def theirs() -> None:
        for key, value in cached:
            functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    works = {"batchgen": ours, "SDPA, dense": theirs, "plain read": plain.sum}
    times = fastest(works, repeats)
    return {name: [value / LAYERS for value in values] for name, values in times.items()}, num_bytes


def main() -> None:
    """Measure every case; print, and add a line each to results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = None
    with torch.inference_mode():
        for name, queries, length, sequences, heads, kv_heads, dim in CASES:
            case = AttentionCase(
                name=name, query_lens=[queries] * sequences, seq_lens=[length] * sequences,
                num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
            )  # fmt: skip
            times, num_bytes = measure(case, arguments.repeats)
            best = {contestant: min(values) for contestant, values in times.items()}
            measured: dict[str, Any] = {
                "spread": {contestant: record.spread(values) for contestant, values in times.items()},
                "times_as_fast_as_sdpa": round(best["SDPA, dense"] / best["batchgen"], 3),
            }
            if queries == 1:
                measured["gbytes_per_s"] = round(num_bytes / best["batchgen"] / 1e6, 2)
                measured["share_of_read_rate"] = round(best["plain read"] / best["batchgen"], 3)
            details = {
                "name": name,
                "queries": queries,
                "tokens": length,
                "sequences": sequences,
                "heads": heads,
            }
            details |= {"kv_heads": kv_heads, "head_dim": dim, "threads": arguments.threads}
            path = record.append("kernels_attention", details, measured)
            shown = "  ".join(f"{key} {value}" for key, value in measured.items() if key != "spread")
            print(f"{name:24}{best['batchgen']:8.3f} ms   {shown}", flush=True)
    print(f"lines in {path}")


if __name__ == "__main__":
    main()
