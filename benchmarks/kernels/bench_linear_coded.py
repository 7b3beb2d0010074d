"""Linear layers on weights of a few bits beside the float layer on the same weights, in one run.

    python -m benchmarks.kernels.bench_linear_coded --threads 2 --rows 1 8 64 512

All take turns, so a drift of the machine hits all; what one thread alone does is measured in its own CPU
time. Each goes round copies of the weight that exceed the caches where those of the float layer do, as the
layers of a model do. What counts is the ratio: how many times as fast as the float layer the fastest repeat
is. `spread` has the milliseconds of all.
"""

import time
from collections.abc import Callable

import torch

from batchgen.kernels.coded import Coded, float8_values
from batchgen.kernels.ops import choose
from benchmarks import record

# (inputs, outputs): of SmolLM2-135M attention output, gate and up, down; and of a model of a few billion.
SHAPES = ((576, 576), (576, 3072), (1536, 576), (2048, 2048), (2048, 8192))
# Bytes that a float layer's copies of a weight take together.
BEYOND_CACHES_BYTES = 256 << 20
FLOAT = "float32"


def four_bits(codes: torch.Tensor) -> Coded:
    """GPTQ and AWQ: groups of 64, with zeros."""
    outputs, inputs = codes.shape
    groups = -(-inputs // 64)
    return Coded(
        codes=codes & 15, bits=4, scale=torch.rand(outputs, groups).half(), group_size=64,
        zero=torch.full((outputs, groups), 8, dtype=torch.uint8),
    )  # fmt: skip


def eight_bits(codes: torch.Tensor) -> Coded:
    """One scale for each output."""
    outputs, inputs = codes.shape
    return Coded(
        codes=codes, bits=8, scale=torch.rand(outputs, 1), group_size=inputs,
        zero=torch.full((outputs, 1), 128, dtype=torch.uint8),
    )  # fmt: skip


def float8(codes: torch.Tensor) -> Coded:
    """E4M3 with one scale for each output, of a weight whose numbers are drawn from a bell."""
    weight = torch.randn(codes.shape)
    scale = weight.abs().amax(1, keepdim=True) / 448
    values, table = (
        (weight / scale).to(torch.float8_e4m3fn),
        float8_values(torch.float8_e4m3fn).nan_to_num(480.0),
    )
    return Coded(codes=values.view(torch.uint8), bits=8, scale=scale, group_size=codes.shape[1], table=table)


def three_bits(codes: torch.Tensor) -> Coded:
    """Groups of 64 with a least value each."""
    scale = torch.rand(codes.shape[0], -(-codes.shape[1] // 64)).bfloat16()
    return Coded(codes=codes & 7, bits=3, scale=scale, group_size=64, least=-4 * scale)


def table(codes: torch.Tensor) -> Coded:
    """NF4: 16 values, groups of 64."""
    scale = torch.rand(codes.shape[0], -(-codes.shape[1] // 64))
    return Coded(codes=codes & 15, bits=4, scale=scale, group_size=64, table=torch.randn(16).sort().values)


FORMATS: dict[str, Callable[[torch.Tensor], Coded]] = {
    "4 bits, groups of 64": four_bits,
    "8 bits, channels": eight_bits,
    "fp8, channels": float8,
    "3 bits, groups of 64": three_bits,
    "table of 16": table,
}


def measure(inputs: int, outputs: int, rows: int, repeats: int) -> dict[str, list[float]]:
    """Name -> milliseconds of one product, per repeat."""
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    kernels, x = choose("cpu", "float32", backend="cpu", head_dim=64), torch.randn(rows, inputs)
    out, copies = torch.empty(rows, outputs), max(1, BEYOND_CACHES_BYTES // (inputs * outputs * 4))
    codes = torch.randint(256, (outputs, inputs), dtype=torch.uint8)
    works = {FLOAT: [kernels.pack_linear(torch.randn(outputs, inputs)) for _ in range(copies)]}
    works |= {
        name: [kernels.pack_coded(make(codes)) for _ in range(copies)] for name, make in FORMATS.items()
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    # Many rows take long enough with a part of the copies.
    count = max(1, min(copies, 200_000_000_000 // (2 * rows * inputs * outputs * 16)))
    for repeat in range(repeats + 1):
        for name, packed in works.items():
            start = now()
            for number in range(count):
                kernels.linear(x, packed[(repeat * count + number) % copies], out)
            if repeat:  # the first is a warm-up
                times[name].append((now() - start) / count * 1e3)
    return times


def main() -> None:
    """Measure every shape for every number of rows; print, and add a line each to results/."""
    parser = record.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--shapes", type=int, nargs="+", default=range(len(SHAPES)), help="numbers of shapes")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        for rows in arguments.rows:
            for inputs, outputs in (SHAPES[number] for number in arguments.shapes):
                times = measure(inputs, outputs, rows, arguments.repeats)
                fastest = {name: min(values) for name, values in times.items()}
                ratios = {name: round(fastest[FLOAT] / value, 3) for name, value in fastest.items()}
                case = {"inputs": inputs, "outputs": outputs, "rows": rows, "threads": arguments.threads}
                spread = {name: record.spread(values) for name, values in times.items()}
                if not arguments.no_save:
                    record.append("kernels_linear_coded", case, {"ratios": ratios, "spread": spread})
                shown = "  ".join(f"{name} {value:.2f}" for name, value in ratios.items() if name != FLOAT)
                gflops = 2e-6 * rows * inputs * outputs / fastest[FLOAT]
                print(
                    f"{rows:5} x {inputs:5} x {outputs:6}  {FLOAT} {gflops:.0f} GFLOP/s; {shown}", flush=True
                )


if __name__ == "__main__":
    main()
