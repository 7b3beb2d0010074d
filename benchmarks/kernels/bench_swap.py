"""How fast KV blocks go to host memory and back, through the operation that the engine uses.

    python -m benchmarks.kernels.bench_swap [--device cuda]

On a CPU both pools are host memory, so this is the rate of copying memory block by block; on a GPU it is that
of the bus. Rates count each byte once. The choice between swap and recompute begins with such a rate.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from batchgen.kernels.kv import KVCacheSpec
from batchgen.kernels.ops import choose
from benchmarks import record

# name, layers, key/value heads, head size; what a block of 16 tokens then takes in a layer, in float32
MODELS = (
    ("0.1B", 30, 3, 64),  # 24 KiB
    ("0.5B", 24, 2, 64),  # 16 KiB
    ("8B", 32, 8, 128),  # 128 KiB
)
POOL_BLOCKS = 256


def measure(
    layers: int, kv_heads: int, head_dim: int, blocks: int, repeats: int, device: str
) -> dict[str, Any]:
    """GB/s out and in of `blocks` blocks: in runs, as a young pool hands them out, and scattered."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    kernels = choose(device, dtype, head_dim=head_dim)
    spec = KVCacheSpec(kv_heads, head_dim, 16, dtype)
    caches = [kernels.allocate_kv(spec, POOL_BLOCKS, device) for _ in range(layers)]
    hosts = kernels.allocate_host_kv(caches, POOL_BLOCKS)
    for kv in [*caches, *hosts]:
        kv.data.fill_(1.0)
    scattered = torch.randperm(POOL_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()
    orders = {"in runs": list(range(blocks)), "scattered": scattered[:blocks]}
    num_bytes = blocks * layers * kernels.kv_block_bytes(spec)
    found: dict[str, Any] = {"mbytes": round(num_bytes / 1e6, 1)}
    for name, order in orders.items():
        out = list(zip(order, range(blocks), strict=True))
        back = [(host, block) for block, host in out]
        found[f"out_{name}"] = rate(
            lambda out=out: [kernels.swap_blocks(*pair, out) for pair in zip(caches, hosts, strict=True)],
            num_bytes,
            repeats,
            device,
        )
        found[f"in_{name}"] = rate(
            lambda back=back: [kernels.swap_blocks(*pair, back) for pair in zip(hosts, caches, strict=True)],
            num_bytes,
            repeats,
            device,
        )
    return found


def rate(work: Callable[[], object], num_bytes: int, repeats: int, device: str) -> float:
    """GB/s, the median."""
    times = []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat:
            times.append(time.perf_counter() - start)
    return round(num_bytes / sorted(times)[len(times) // 2] / 1e9, 2)


def main() -> None:
    """Measure every model's shape; print, and add a line each to results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    path = None
    for name, layers, kv_heads, head_dim in MODELS:
        for blocks in (8, 64):
            measured = measure(layers, kv_heads, head_dim, blocks, arguments.repeats, arguments.device)
            details = {"name": name, "layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
            path = record.append(
                "kernels_swap", {**details, "blocks": blocks, "device": arguments.device}, measured
            )
            shown = "  ".join(f"{key} {value}" for key, value in measured.items())
            print(f"{name:6}{blocks:4} blocks   {shown}", flush=True)
    print(f"lines in {path}")


if __name__ == "__main__":
    main()
