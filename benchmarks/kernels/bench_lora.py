"""Adapters beside the linear layers of a small model, in one run with the layers themselves.

    python -m benchmarks.kernels.bench_lora --threads 2 --rows 64 --slots 8 --rank 16

The four linear layers of each of the model's layers run as one recorded program over activations of their
own, without adapters and with them, in turns. Adapters differ from slot to slot and from layer to layer, so
that they exceed the caches, as those of a model do. What counts is what adapters add, for the fastest repeat
of each: milliseconds of a step, and a share of the linear layers' time. What one thread alone does is
measured in its own CPU time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from batchgen.kernels.lora import LoraPart, LoraSegments
from batchgen.kernels.ops import Activation, Kernels, choose
from batchgen.kernels.program import StepSizes
from batchgen.kernels.quantized import Quantized
from benchmarks import record

# Inputs and parts of the linear layers of SmolLM2-135M.
SHAPES = {
    "qkv": (576, (576, 192, 192)),
    "out": (576, (576,)),
    "gate_up": (576, (1536, 1536)),
    "down": (1536, (576,)),
}
LAYERS = 30


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of a step are dealt out to the slots evenly; each adapter is of one rank in all layers."""

    rows: int
    slots: int
    rank: int
    dtype: str
    base: str  # "float32", "int8" (rows of 8 bits) or "none"


def build(kernels: Kernels, case: Case, has_adapters: bool) -> Callable[[], None]:
    """A step of all layers' linear layers."""
    segments = LoraSegments.empty(case.rows, case.slots)
    segments.fill([row * case.slots // case.rows for row in range(case.rows)])
    works = [
        _layer(kernels, case, inputs, parts, segments, has_adapters)
        for _ in range(LAYERS)
        for inputs, parts in SHAPES.values()
    ]
    sizes = StepSizes(case.rows, case.rows + 1, case.rows + 2, case.rows + 3)
    program = kernels.record(partial(_run_all, works), sizes)
    assert program is not None
    return lambda: program.run(sizes)


def _run_all(works: list[Callable[[], None]]) -> None:
    for work in works:
        work()


def _layer(
    kernels: Kernels,
    case: Case,
    inputs: int,
    parts: tuple[int, ...],
    segments: LoraSegments,
    has_adapters: bool,
) -> Callable[[], None]:
    outputs, x = sum(parts), _activations(kernels, case, inputs)
    out = torch.zeros(case.rows, outputs)
    bank = kernels.lora_bank(inputs, parts, case.slots)
    packed = None
    if case.base == "int8":
        weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        packed = kernels.pack_int8(weight, torch.rand(outputs) / 1000)
    elif case.base == "float32":
        packed = kernels.pack_linear(torch.randn(outputs, inputs))
    for slot in range(case.slots if has_adapters else 0):
        pieces = [
            LoraPart(torch.randn(case.rank, inputs), torch.randn(size, case.rank) / 1000) for size in parts
        ]
        bank.put(slot, kernels.pack_lora(inputs, parts, pieces, case.dtype))

    def work() -> None:
        if packed is not None:
            kernels.linear(x, packed, out)
        if has_adapters:
            kernels.lora_add(x, bank, segments, out)

    return work


def _activations(kernels: Kernels, case: Case, inputs: int) -> Activation:
    x: Tensor = torch.randn(case.rows, inputs)
    return kernels.quantize(x, Quantized.empty(case.rows, inputs, 8)) if case.base == "int8" else x


def measure(case: Case, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of a step without adapters and with them, per repeat."""
    kernels = choose("cpu", "float32", backend="cpu", head_dim=64)
    steps = {"with": build(kernels, case, True)}
    if case.base != "none":
        steps["without"] = build(kernels, case, False)
    times: dict[str, list[float]] = {name: [] for name in steps}
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for repeat in range(repeats + 2):
        for name, step in steps.items():
            start = now()
            step()
            if repeat > 1:  # the first warm up
                times[name].append((now() - start) * 1e3)
    return times


def main() -> None:
    """Measure every case; print, and add a line each to results/."""
    parser = record.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[64])
    parser.add_argument("--slots", type=int, nargs="+", default=[8])
    parser.add_argument("--rank", type=int, nargs="+", default=[16])
    parser.add_argument("--dtype", nargs="+", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--base", nargs="+", default=["none", "float32", "int8"])
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    cases = [
        Case(rows=rows, slots=slots, rank=rank, dtype=dtype, base=base)
        for rows in given.rows
        for slots in given.slots
        for rank in given.rank
        for base in given.base
        for dtype in given.dtype
    ]
    with torch.inference_mode():
        for case in cases:
            times = measure(case, given.repeats)
            fastest = {name: min(values) for name, values in times.items()}
            without = fastest.get("without")
            added = fastest["with"] - (without or 0.0)
            if not given.no_save:
                spread = {name: record.spread(values) for name, values in times.items()}
                setting = {**vars(case), "threads": given.threads}
                record.append("kernels_lora", setting, {"added_ms": added, "spread": spread})
            share = "" if without is None else f", {added / without:.0%} of {without:.2f} ms"
            print(f"{case}: {added:.2f} ms a step, {added / LAYERS * 1e3:.0f} us a layer{share}", flush=True)


if __name__ == "__main__":
    main()
