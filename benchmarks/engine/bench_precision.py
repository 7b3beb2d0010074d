"""What each precision does to a model: perplexity, greedy tokens and memory, beside float32.

    python -m benchmarks.engine.bench_precision --text math=gsm8k.jsonl:question,answer --text prose=book.txt

A text is a file, plain or with a JSON object in each line, of which some fields are joined
("instances.0.output" goes into what a field holds). It is cut into pieces of `--context` tokens, each scored
by itself with `LLM.score`: all but its first token. Greedy texts go on from the first `--prompt-tokens` of a
piece; two texts agree up to the first token that differs. The error of a difference is that of its mean over
the pieces.
"""

import argparse
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.engine.bench_offline import MODEL

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, KV float16": {"kv_cache_dtype": "float16"},
    "float32, KV bfloat16": {"kv_cache_dtype": "bfloat16"},
    "float32, KV int8": {"kv_cache_dtype": "int8"},
    "int8, KV float32": {"quantization": "int8", "kv_cache_dtype": "float32"},
    "int8, KV float16": {"quantization": "int8", "kv_cache_dtype": "float16"},
    "int8, KV int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}


def main() -> None:
    args = _arguments()
    ids = _texts(args)
    truth: dict[str, Any] = {}
    print(f"{'precision':22s} {'text':10s} {'perplexity':>10s} {'change':>17s} {'same tokens':>11s} "
          f"{'first other':>11s} {'MiB':>6s}")  # fmt: skip
    for name in args.precision:
        found = _measure(args, ids, PRECISIONS[name])
        truth = truth or found
        for text, of_text in found["texts"].items():
            line = _compared(of_text, truth["texts"][text])
            print(f"{name:22s} {text:10s} {line['perplexity']:10.4f} {line['change']:+8.3%} ± "
                  f"{line['error']:.3%} {line['same_tokens']:11.1%} {line['first_other_token']:11.1f} "
                  f"{found['mib']:6.0f}", flush=True)  # fmt: skip
            if not args.no_save:
                case = {
                    "model": args.model, "precision": name, "text": text, "tokens": of_text["tokens"],
                    "context": args.context, "max_tokens": args.max_tokens,
                }  # fmt: skip
                record.append("precision", case, {**line, "mib": found["mib"]})


def _arguments() -> argparse.Namespace:
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument(
        "--text", action="append", required=True, metavar="NAME=FILE[:FIELD,FIELD]", help="may be repeated"
    )
    parser.add_argument("--tokens", type=int, default=20_480, help="most tokens of each text")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--greedy", type=int, default=32, help="pieces of each text that are continued")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    args: argparse.Namespace = parser.parse_args()
    if args.precision[0] != "float32":
        args.precision.insert(0, "float32")
    return args


def _texts(args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Name of a text -> its pieces, as token ids."""
    from batchgen.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.model)
    found = {}
    for given in args.text:
        name, _, where = given.partition("=")
        file, _, fields = where.partition(":")
        text = Path(file).read_text(encoding="utf-8")
        if fields:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            text = "\n\n".join("\n".join(_field(row, path) for path in fields.split(",")) for row in rows)
        ids = tokenizer.encode(text, add_special_tokens=False)[: args.tokens]
        whole = len(ids) // args.context * args.context
        found[name] = [ids[begin : begin + args.context] for begin in range(0, whole, args.context)]
    return found


def _field(row: Any, path: str) -> str:
    for word in path.split("."):
        row = row[int(word)] if isinstance(row, list) else row[word]
    return str(row)


def _measure(
    args: argparse.Namespace, ids: Mapping[str, list[list[int]]], engine_args: dict[str, Any]
) -> dict[str, Any]:
    from batchgen import LLM, SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    texts: dict[str, Any] = {}
    # A pool of a fixed size, so that memory differs by weights alone.
    with LLM(
        args.model, dtype="float32", max_model_len=args.context + args.max_tokens,
        kv_cache_memory_bytes=256 << 20, in_process=False, **engine_args,
    ) as llm:  # fmt: skip
        for name, pieces in ids.items():
            firsts = [{"prompt_token_ids": piece[:1]} for piece in pieces]
            rests = [{"prompt_token_ids": piece[1:]} for piece in pieces]
            scores = llm.score(firsts, rests, use_tqdm=False)
            prompts = [{"prompt_token_ids": piece[: args.prompt_tokens]} for piece in pieces[: args.greedy]]
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            texts[name] = {
                "tokens": sum(map(len, pieces)),
                "loss": [-score.logprob / (args.context - 1) for score in scores],
                "greedy": [output.outputs[0].token_ids for output in outputs],
            }
        mib = _resident_mib()
    return {"texts": texts, "mib": mib}


def _compared(found: Mapping[str, Any], truth: Mapping[str, Any]) -> dict[str, float]:
    more = [ours - theirs for ours, theirs in zip(found["loss"], truth["loss"], strict=True)]
    error = statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else 0.0
    pairs = list(zip(found["greedy"], truth["greedy"], strict=True))
    same = [[a == b for a, b in zip(ours, theirs, strict=True)] for ours, theirs in pairs]
    return {
        "perplexity": round(math.exp(statistics.mean(found["loss"])), 4),
        "change": round(math.expm1(statistics.mean(more)), 6),
        "error": round(error, 6),
        "same_tokens": round(statistics.mean(map(statistics.mean, same)), 4),
        "first_other_token": round(statistics.mean(_first_other(row) for row in same), 1),
    }


def _first_other(same: Sequence[bool]) -> int:
    return same.index(False) if False in same else len(same)


def _resident_mib() -> float:
    """Memory that the engine's process holds, without what it maps of files; 0 where nobody tells."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*/status"):
        try:
            told = dict(line.split(":", 1) for line in entry.read_text().splitlines() if ":" in line)
        except OSError:
            continue
        if told.get("PPid", "").strip() == str(os.getpid()):
            total += int(told.get("RssAnon", "0").split()[0])
    return round(total / 1024, 1)


if __name__ == "__main__":
    main()
