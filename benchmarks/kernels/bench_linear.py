"""The cpu backend's linear layer beside torch's own, on the shapes of a small model, in one run.

    python -m benchmarks.kernels.bench_linear --threads 2 --rows 1 8 64 512

The three take turns, so a drift of the machine hits all. Each goes round copies of the weight that exceed the
caches, as the layers of a model do. GFLOP/s are of the fastest repeat; `spread` has the milliseconds of all.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from batchgen.kernels.ops import choose
from benchmarks import record

# (inputs, outputs) of SmolLM2-135M: qkv, attention output, gate and up, down, head.
SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))
BEYOND_CACHES_BYTES = 100 << 20


def contestants(weights: list[torch.Tensor], rows: int) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Name -> multiplies by every weight once."""
    kernels = choose("cpu", "float32", backend="cpu", head_dim=64)
    packed = [kernels.pack_linear(weight.clone()) for weight in weights]
    out = torch.empty(rows, weights[0].shape[0])
    reordered = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
    pointwise = torch.ops.mkldnn._linear_pointwise
    return {
        "batchgen": lambda x: [kernels.linear(x, weight, out) for weight in packed],
        "F.linear": lambda x: [functional.linear(x, weight) for weight in weights],
        "oneDNN reordered": lambda x: [pointwise(x, weight, None, "none", [], "") for weight in reordered],
    }


def measure(inputs: int, outputs: int, rows: int, repeats: int) -> dict[str, list[float]]:
    """Name -> milliseconds of one product, per repeat."""
    copies = max(1, BEYOND_CACHES_BYTES // (inputs * outputs * 4))
    weights = [torch.randn(outputs, inputs) for _ in range(copies)]
    x = torch.randn(rows, inputs)
    works = contestants(weights, rows)
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work(x)
            if repeat:  # the first is a warm-up
                times[name].append((time.perf_counter() - start) / copies * 1e3)
    return times


def main() -> None:
    """Measure every shape for every number of rows; print, and add a line each to results/."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = None
    with torch.inference_mode():
        for rows in arguments.rows:
            for inputs, outputs in SHAPES:
                times = measure(inputs, outputs, rows, arguments.repeats)
                best = {name: min(values) for name, values in times.items()}
                gflops = {name: 2e-6 * rows * inputs * outputs / value for name, value in best.items()}
                ratio = min(value for name, value in best.items() if name != "batchgen") / best["batchgen"]
                case = {"inputs": inputs, "outputs": outputs, "rows": rows, "threads": arguments.threads}
                measured = {
                    "gflops": {name: round(value, 1) for name, value in gflops.items()},
                    "spread": {name: record.spread(values) for name, values in times.items()},
                    "times_as_fast_as_the_best_other": round(ratio, 3),
                }
                path = record.append("kernels_linear", case, measured)
                shown = "  ".join(f"{name} {value:6.1f}" for name, value in gflops.items())
                print(
                    f"{rows:5} x {inputs:5} x {outputs:6}:  {shown}  GFLOP/s   ratio {ratio:.2f}", flush=True
                )
    print(f"lines in {path}")


if __name__ == "__main__":
    main()
