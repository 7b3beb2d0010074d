"""Tokens per second with and without prompt-lookup speculation, by batch size.

    python -m benchmarks.engine.bench_speculation --batches 1,8,64 --repeat 3

The model continues the third copy of a text, greedily, which drafts well; and plain beginnings of texts at
temperature 1, which draft badly. Two engines take turns on the same requests; the tokens must be equal.
"""

import statistics
import time
from typing import Any

from benchmarks import record
from benchmarks.engine.bench_offline import MODEL
from benchmarks.engine.example_texts import beginnings, example_texts


def copies(tokenizer: Any, count: int) -> list[dict[str, list[int]]]:
    """A text twice, and its beginning again."""
    prompts = []
    for text in example_texts():
        ids = list(tokenizer.encode(text))[:128]
        if len(ids) == 128:
            prompts.append({"prompt_token_ids": ids * 2 + ids[:16]})
    return (prompts * (count // len(prompts) + 1))[:count]


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=record.machine()["cores"])
    args = parser.parse_args()

    from batchgen import LLM, SamplingParams

    settings: dict[str, Any] = {"dtype": "float32", "num_threads": args.threads, "reproducible": True}
    common = {"max_tokens": args.max_tokens, "ignore_eos": True}
    with (
        LLM(args.model, **settings) as plain,
        LLM(args.model, **settings, speculative={"method": "ngram"}) as drafting,
    ):
        tokenizer = plain.get_tokenizer()
        works = {
            "copy": (lambda count: copies(tokenizer, count), SamplingParams(temperature=0, **common)),
            "sampled": (
                lambda count: beginnings(tokenizer, count, 32),
                SamplingParams(temperature=1, seed=1, **common),
            ),
        }
        for name, (make, params) in works.items():
            for batch in map(int, args.batches.split(",")):
                prompts = make(min(batch, 48) if name == "sampled" else batch)
                measured = _compare(plain, drafting, prompts, params, args.repeat)
                print(f"{name:8s} batch {len(prompts):3d}: {_words(measured)}", flush=True)
                if not args.no_save:
                    case = {"model": args.model, "work": name, "batch": len(prompts), "threads": args.threads}
                    record.append("speculation", case, measured)


def _compare(plain: Any, drafting: Any, prompts: list[Any], params: Any, repeat: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"plain": [], "drafting": []}
    before = drafting.get_metrics()
    for _ in range(repeat):
        tokens = {}
        for name, llm in (("plain", plain), ("drafting", drafting)):
            llm.reset_prefix_cache()
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            took = time.perf_counter() - start
            tokens[name] = [output.outputs[0].token_ids for output in outputs]
            rates[name].append(sum(map(len, tokens[name])) / took)
        assert tokens["plain"] == tokens["drafting"], "speculation changed a token"
    after = drafting.get_metrics()
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    ratio = statistics.median(new / old for new, old in zip(rates["drafting"], rates["plain"], strict=True))
    choices = {
        name: after.choices.get(name, 0) - before.choices.get(name, 0)
        for name in ("draft", "draft_trial", "draft_not")
    }
    return {
        "ratio": round(ratio, 3),
        "tokens_per_s": {name: record.spread(values) for name, values in rates.items()},
        "drafted": drafted,
        "accepted": accepted,
        "steps": choices,
    }


def _words(measured: dict[str, Any]) -> str:
    rates = measured["tokens_per_s"]
    return (
        f"{rates['plain']['median']:.1f} -> {rates['drafting']['median']:.1f} tokens/s "
        f"({measured['ratio']:.3f}); "
        f"{measured['accepted']} of {measured['drafted']} drafted tokens accepted; steps {measured['steps']}"
    )


if __name__ == "__main__":
    main()
