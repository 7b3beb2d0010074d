"""The cpu backend's linear layers beside torch's own, on the shapes of a small model, in one run.

    python -m benchmarks.kernels.bench_linear --threads 2 --rows 1 8 64 512

Float32 and 8-bit integers. All take turns, so a drift of the machine hits all. Each goes round copies of the
weight that exceed the caches, as the layers of a model do. Rates are of the fastest repeat; `spread` has the
milliseconds of all. In brackets, the share of what the machine gives at most, measured in the same run: its
matrix rate, or reading the weights once, whichever is lower. Integers are quantized beforehand; ours and
oneDNN's also scale the sums to float32, `_int_mm` leaves them as int32.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from batchgen.kernels.ceilings import Ceilings
from batchgen.kernels.cpu import ceilings
from batchgen.kernels.ops import Quantized, choose
from benchmarks import record

# (inputs, outputs) of SmolLM2-135M: qkv, attention output, gate and up, down, head.
SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))
BEYOND_CACHES_BYTES = 100 << 20

# Name -> multiplies by every weight once.
Contestants = dict[str, Callable[[], Any]]


def float_contestants(weights: list[torch.Tensor], rows: int) -> Contestants:
    """Ours, torch's, and oneDNN with the weight laid out for it once."""
    kernels, x = choose("cpu", "float32", backend="cpu", head_dim=64), torch.randn(rows, weights[0].shape[1])
    packed = [kernels.pack_linear(weight.clone()) for weight in weights]
    out = torch.empty(rows, weights[0].shape[0])
    reordered = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
    pointwise = torch.ops.mkldnn._linear_pointwise
    return {
        "batchgen": lambda: [kernels.linear(x, weight, out) for weight in packed],
        "F.linear": lambda: [functional.linear(x, weight) for weight in weights],
        "oneDNN reordered": lambda: [pointwise(x, weight, None, "none", [], "") for weight in reordered],
    }


def int8_contestants(weights: list[torch.Tensor], rows: int) -> Contestants:
    """Ours with 8 and 16 bits of activations, torch's bare product, and oneDNN's with scales."""
    outputs, inputs = weights[0].shape
    kernels, x = choose("cpu", "float32", backend="cpu", head_dim=64), torch.randn(rows, inputs)
    narrow, wide = (kernels.quantize(x, Quantized.empty(rows, inputs, bits)) for bits in (8, 16))
    integers = [torch.randint(-127, 128, weight.shape, dtype=torch.int8) for weight in weights]
    scale, out = torch.rand(outputs), torch.empty(rows, outputs)
    packed = [kernels.pack_int8(weight.clone(), scale) for weight in integers]
    values = narrow.values[:, 0, :inputs].contiguous()
    turned = [weight.t().contiguous() for weight in integers]
    found: Contestants = {
        "batchgen int8": lambda: [kernels.linear(narrow, weight, out) for weight in packed],
        "batchgen 16 bits": lambda: [kernels.linear(wide, weight, out) for weight in packed],
        "_int_mm": lambda: [torch._int_mm(values, weight) for weight in turned],
    }
    onednn = torch.ops.onednn
    if hasattr(onednn, "qlinear_prepack"):
        reordered = [onednn.qlinear_prepack(weight, [rows, inputs]) for weight in integers]
        zeros = torch.zeros(outputs, dtype=torch.int64)

        def multiply(weight: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = onednn.qlinear_pointwise(
                values, 0.01, 0, weight, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
            )
            return result

        found["oneDNN int8"] = lambda: [multiply(weight) for weight in reordered]
    return found


def measure(inputs: int, outputs: int, rows: int, repeats: int) -> dict[str, list[float]]:
    """Name -> milliseconds of one product, per repeat."""
    times: dict[str, list[float]] = {}
    for make, weight_bytes in ((float_contestants, 4), (int8_contestants, 1)):
        copies = max(1, BEYOND_CACHES_BYTES // (inputs * outputs * weight_bytes))
        works = make([torch.randn(outputs, inputs) for _ in range(copies)], rows)
        times |= {name: [] for name in works}
        for repeat in range(repeats + 1):
            for name, work in works.items():
                start = time.perf_counter()
                work()
                if repeat:  # the first is a warm-up
                    times[name].append((time.perf_counter() - start) / copies * 1e3)
    return times


def share_of_bound(name: str, gops: float, rows: int, most: Ceilings) -> float:
    """How much of the lower of both limits a rate is: the matrix rate, or each weight read once."""
    if "int" not in name and "bits" not in name:
        return gops * 1e9 / min(most.float_ops, most.read_bytes / 4 * 2 * rows)
    planes = 2 if "bits" in name else 1
    return gops * 1e9 / min(most.int8_ops / planes, most.read_bytes * 2 * rows)


def main() -> None:
    """Measure every shape for every number of rows; print, and add a line each to results/."""
    parser = record.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    most = ceilings.measure(1 << 40)
    assert most is not None, "the C kernels are not available"
    print(
        f"{most.float_ops / 1e9:.0f} GFLOP/s, {most.int8_ops / 1e9:.0f} Gop/s of 8 bits, "
        f"{most.read_bytes / 1e9:.1f} GB/s read"
    )
    with torch.inference_mode():
        for rows in arguments.rows:
            for inputs, outputs in SHAPES:
                times = measure(inputs, outputs, rows, arguments.repeats)
                gops = {name: 2e-6 * rows * inputs * outputs / min(values) for name, values in times.items()}
                bound = {name: share_of_bound(name, value, rows, most) for name, value in gops.items()}
                case = {"inputs": inputs, "outputs": outputs, "rows": rows, "threads": arguments.threads}
                measured = {
                    "gops": {name: round(value, 1) for name, value in gops.items()},
                    "bound": {name: round(value, 3) for name, value in bound.items()},
                    "spread": {name: record.spread(values) for name, values in times.items()},
                    "ceilings": [most.float_ops, most.int8_ops, most.read_bytes],
                }
                if not arguments.no_save:
                    record.append("kernels_linear", case, measured)
                shown = "  ".join(f"{name} {value:.0f} ({bound[name]:.0%})" for name, value in gops.items())
                print(f"{rows:5} x {inputs:5} x {outputs:6}  Gop/s (of bound):  {shown}", flush=True)


if __name__ == "__main__":
    main()
