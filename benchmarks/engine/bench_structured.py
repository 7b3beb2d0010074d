"""What structured output costs: time of grammars for each row, their share of a step, compilation.

    python -m benchmarks.engine.bench_structured --batches 1,16,64

A real model draws texts at temperature 1 under three grammars; the engine runs in this process, and the calls
that find masks, apply them and take the drawn tokens are timed inside it.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from batchgen.structured.grammars import Grammars
from batchgen.structured.masks import GrammarMasks
from batchgen.structured.vocabulary import Vocabulary
from benchmarks import record
from benchmarks.engine.bench_offline import MODEL
from benchmarks.engine.example_texts import example_texts

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 10, "maxLength": 80},
        "language": {"enum": ["en", "de", "fr", "es", "other"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 100},
        "topics": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 2,
            "maxItems": 4,
        },
        "summary": {"type": "string", "minLength": 100},
    },
    "required": ["title", "language", "score", "topics", "summary"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"json": SCHEMA},
    "json_object": {"json_object": True},
    "regex": {"regex": r"([A-Z][a-z]{1,12}( [a-z]{1,12}){3,9}[.?!]\n?){8,}"},
}


class Timer:
    """Seconds and rows that went through the methods it watches."""

    def __init__(self) -> None:
        self.seconds, self.rows = 0.0, 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time `GrammarMasks.apply` and `advance` meanwhile."""
        apply, advance = GrammarMasks.apply, GrammarMasks.advance
        GrammarMasks.apply, GrammarMasks.advance = (  # type: ignore[method-assign]
            self._timed(apply, counts=True),
            self._timed(advance, counts=False),
        )
        try:
            yield
        finally:
            GrammarMasks.apply, GrammarMasks.advance = apply, advance  # type: ignore[method-assign]

    def _timed(self, method: Callable[..., Any], counts: bool) -> Callable[..., Any]:
        def call(masks: GrammarMasks, *args: Any) -> Any:
            start = time.perf_counter()
            found = method(masks, *args)
            self.seconds += time.perf_counter() - start
            self.rows += sum(row.params.structured_outputs is not None for row in args[1]) if counts else 0
            return found

        return call


def main() -> None:
    """Measure compilation, then every grammar at every batch size; print, and add a line each to results/."""
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    from batchgen import LLM, SamplingParams
    from batchgen.sampling_params import StructuredOutputsParams

    texts = example_texts()
    with LLM(args.model, in_process=True, disable_log_stats=True) as llm:
        tokenizer: Any = llm.get_tokenizer()
        compiled = _compile_times(tokenizer)
        print("compile: " + "  ".join(f"{name} {value}" for name, value in compiled.items()), flush=True)
        for name, grammar in GRAMMARS.items():
            for batch in map(int, args.batches.split(",")):
                chats = [
                    [{"role": "user", "content": f"Describe this text as JSON: {text[:300]}"}]
                    for text in (texts * batch)[:batch]
                ]
                measured = {}
                for kind, given in (("with", StructuredOutputsParams(**grammar)), ("without", None)):
                    params = SamplingParams(
                        structured_outputs=given, max_tokens=args.max_tokens, seed=0, ignore_eos=given is None
                    )
                    llm.chat(chats, params, use_tqdm=False)  # warms the prefix cache and the grammar
                    timer, before = Timer(), llm.get_metrics()
                    with timer.watching():
                        llm.chat(chats, params, use_tqdm=False)
                    after = llm.get_metrics()
                    step_s = after.step_time_s - before.step_time_s
                    tokens = after.generation_tokens - before.generation_tokens
                    measured[kind] = (timer, step_s, tokens)
                timer, step_s, tokens = measured["with"]
                line = {
                    "us_per_row": round(timer.seconds / max(1, timer.rows) * 1e6, 1),
                    "share_of_step": round(timer.seconds / step_s, 4),
                    "tokens_per_s": round(tokens / step_s, 1),
                    "tokens_per_s_without": round(measured["without"][2] / measured["without"][1], 1),
                }
                print(f"{name:12}batch {batch:3}   {json.dumps(line)}", flush=True)
                if not args.no_save:
                    record.append(
                        "structured", {"grammar": name, "batch": batch}, line | {"compile": compiled}
                    )


def _compile_times(tokenizer: Any) -> dict[str, float]:
    """Milliseconds for the vocabulary, and for each grammar the first time (its first mask included)."""
    from batchgen.sampling_params import StructuredOutputsParams

    start = time.perf_counter()
    vocabulary = Vocabulary(tokenizer, tokenizer.eos_token_ids)
    assert vocabulary.table is not None
    found = {"vocabulary_ms": round((time.perf_counter() - start) * 1e3, 1)}
    for name, grammar in GRAMMARS.items():
        grammars, params = Grammars(vocabulary), StructuredOutputsParams(**grammar)
        start = time.perf_counter()
        assert grammars.refusal(params) is None
        found[f"{name}_ms"] = round((time.perf_counter() - start) * 1e3, 2)
    return found


if __name__ == "__main__":
    main()
