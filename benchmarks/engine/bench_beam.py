"""Beam search beside sampling with the same number of sequences: seconds per beam-token.

    python -m benchmarks.engine.bench_beam --width 4 --prompts 16 --repeat 5

Both generate width × prompts × max_tokens tokens in one engine, taking turns, with end-of-text ignored and
the prefix cache emptied in between.
"""

import statistics
import time
from typing import Any

from benchmarks import record
from benchmarks.engine.bench_offline import MODEL
from benchmarks.engine.example_texts import beginnings


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=record.machine()["cores"])
    parser.add_argument("--profile", help="write a cProfile of the beam searches here; runs in this process")
    args = parser.parse_args()

    from batchgen import LLM, SamplingParams

    common = {"n": args.width, "max_tokens": args.max_tokens, "ignore_eos": True}
    ways = {
        "sampling": SamplingParams(temperature=1.0, seed=0, **common),
        "beams": SamplingParams(temperature=0.0, use_beam_search=True, **common),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with LLM(args.model, dtype="float32", num_threads=args.threads, in_process=bool(args.profile)) as llm:
        prompts = beginnings(llm.get_tokenizer(), args.prompts, args.prompt_tokens)
        for params in ways.values():
            _run(llm, prompts[:2], params)
        for _ in range(args.repeat):
            for way, params in ways.items():
                seconds[way].append(_run(llm, prompts, params))
        if args.profile:
            import cProfile

            with cProfile.Profile() as profile:
                _run(llm, prompts, ways["beams"])
            profile.dump_stats(args.profile)
    tokens = args.width * args.prompts * args.max_tokens
    for way, values in seconds.items():
        print(f"{way:9s} {statistics.median(values) / tokens * 1e6:8.1f} us per token of a sequence")
    ratio = statistics.median(
        beam / plain for beam, plain in zip(seconds["beams"], seconds["sampling"], strict=True)
    )
    print(f"beams / sampling {ratio:.3f}", flush=True)
    if not args.no_save:
        case = {
            name: getattr(args, name)
            for name in ("model", "width", "prompts", "prompt_tokens", "max_tokens", "threads")
        }
        measured = {
            "ratio": round(ratio, 3),
            "seconds": {way: record.spread(values) for way, values in seconds.items()},
        }
        record.append("beam", case, measured)


def _run(llm: Any, prompts: list[Any], params: Any) -> float:
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - start
    for output in outputs:
        assert output.error is None, output.error
        assert [len(sample.token_ids) for sample in output.outputs] == [params.max_tokens] * params.n
    return took


if __name__ == "__main__":
    main()
