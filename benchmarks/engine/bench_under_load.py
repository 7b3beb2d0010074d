"""Tokens per second on a machine that has nothing else to do, and beside a busy process on each core.

    python -m benchmarks.engine.bench_under_load --repeat 3

The busy processes have the priority of the engine, so a fair system leaves it half of each core: a ratio of
two cannot be helped. What it is worse by is time that its threads spend waiting for one another. Quiet runs
and busy ones take turns on one engine, without a prefix cache.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import record
from benchmarks.engine.bench_offline import MODEL, WARM_UP
from benchmarks.engine.workloads import DATA_VARIABLE, Request, workloads

VOCAB_SIZE = 49152


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """As many processes that do nothing but keep a core busy."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def rate(llm: Any, requests: list[Request]) -> float:
    """Output tokens per second."""
    from batchgen import SamplingParams

    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=r.max_tokens) for r in requests]
    prompts = [{"prompt_token_ids": r.prompt_token_ids} for r in requests]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def main() -> None:
    """Measure, print, and add a line for each workload to results/."""
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument(
        "--workloads", default="made_short", help=f"names of files in ${DATA_VARIABLE}, or all"
    )
    parser.add_argument("--limit", type=int, help="only the first N requests of each")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quantization", help="int8, or as the checkpoint has it")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()

    from batchgen import LLM

    given = {"quantization": args.quantization} if args.quantization else {}
    with LLM(args.model, num_threads=args.threads, enable_prefix_caching=False, **given) as llm:
        for name, requests in workloads(args.workloads, args.limit, VOCAB_SIZE).items():
            rate(llm, WARM_UP)
            quiet: list[float] = []
            loaded: list[float] = []
            for _ in range(args.repeat):
                quiet.append(rate(llm, requests))
                with busy(args.threads):
                    loaded.append(rate(llm, requests))
            ratio = statistics.median(quiet) / statistics.median(loaded)
            print(
                f"{name}: {statistics.median(quiet):.0f} tokens/s, beside {args.threads} busy processes "
                f"{statistics.median(loaded):.0f} tokens/s: {ratio:.2f} times slower",
                flush=True,
            )
            if not args.no_save:
                case = {"model": args.model, "workload": name, "n": len(requests), **given}
                rates = {"quiet": record.spread(quiet), "busy": record.spread(loaded)}
                record.append(
                    "under_load",
                    {**case, "threads": args.threads},
                    {"ratio": round(ratio, 3), "tokens_per_s": rates},
                )


if __name__ == "__main__":
    main()
