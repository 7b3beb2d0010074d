"""Tokens per second with all that the processor has, and with narrower instruction sets, in float32 and int8.

    python -m benchmarks.engine.bench_instruction_sets --repeat 3

Every run is an engine in a process of its own, under another cap of `BATCHGEN_CPU_ISA`. Caps take turns. The
first run under a cap compiles the kernels for it, which is not timed.
"""

import os
import platform
import statistics

from batchgen.kernels.cpu.build import ISA_CAPS, ISA_VARIABLE
from benchmarks import record
from benchmarks.engine.bench_offline import MODEL, WARM_UP
from benchmarks.engine.bench_under_load import VOCAB_SIZE, rate
from benchmarks.engine.workloads import DATA_VARIABLE, workloads

EVERYTHING = "native"


def main() -> None:
    """Measure, print, and add a line for each workload to results/."""
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument(
        "--workloads", default="made_short", help=f"names of files in ${DATA_VARIABLE}, or all"
    )
    parser.add_argument("--limit", type=int, help="only the first N requests of each")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--caps", default=",".join([EVERYTHING, *ISA_CAPS.get(platform.machine(), {})]))
    parser.add_argument("--precisions", default="float32,int8")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()

    from batchgen import LLM

    ways = [(cap, precision) for precision in args.precisions.split(",") for cap in args.caps.split(",")]
    for name, requests in workloads(args.workloads, args.limit, VOCAB_SIZE).items():
        rates: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        for _ in range(args.repeat):
            for cap, precision in ways:
                # The engine's process takes it over from here.
                os.environ[ISA_VARIABLE] = "" if cap == EVERYTHING else cap
                given = {"quantization": precision} if precision == "int8" else {"dtype": precision}
                with LLM(args.model, num_threads=args.threads, **given) as llm:
                    rate(llm, WARM_UP)
                    rates[cap, precision].append(rate(llm, requests))
        for (cap, precision), values in rates.items():
            print(f"{name}, {precision}, {cap}: {statistics.median(values):.0f} tokens/s", flush=True)
            if not args.no_save:
                case = {"model": args.model, "workload": name, "n": len(requests), "threads": args.threads}
                measured = {"tokens_per_s": record.spread(values)}
                record.append("instruction_sets", {**case, "cap": cap, "precision": precision}, measured)


if __name__ == "__main__":
    main()
