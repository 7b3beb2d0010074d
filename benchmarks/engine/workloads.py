"""Workloads: requests of token ids with exact output counts, from files or made here."""

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

DATA_VARIABLE = "BATCHGEN_BENCH_DATA"


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and how many tokens are to be generated for it, no more and no fewer."""

    id: str
    prompt_token_ids: list[int]
    max_tokens: int


def workloads(names: str, limit: int | None, vocab_size: int) -> dict[str, list[Request]]:
    """Name -> requests: files of the folder that BATCHGEN_BENCH_DATA names, else three small ones made here.

    Args:
        names: comma-separated, or "all".
        limit: only the first so many requests of each.
        vocab_size: for the ids of made-up prompts.
    """
    folder = os.environ.get(DATA_VARIABLE)
    found = _from_files(Path(folder)) if folder else _made(vocab_size)
    wanted = list(found) if names == "all" else names.split(",")
    unknown = sorted(set(wanted) - set(found))
    if unknown:
        raise SystemExit(f"no workload {', '.join(unknown)}; there are: {', '.join(found)}")
    return {name: found[name][:limit] for name in wanted}


def _from_files(folder: Path) -> dict[str, list[Request]]:
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
        found[path.stem] = [Request(row["id"], row["prompt_token_ids"], row["max_tokens"]) for row in rows]
    if not found:
        raise SystemExit(f"{DATA_VARIABLE}: no *.jsonl in {folder}")
    return found


def _made(vocab_size: int) -> dict[str, list[Request]]:
    """Short prompts; mixed lengths, where continuous batching shows; and prompts behind one long prefix."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(100, vocab_size) for _ in range(count)]

    prefix = ids(320)
    return {
        "made_short": [Request(f"s{n}", ids(draw.randint(20, 60)), 32) for n in range(32)],
        "made_mixed": [Request(f"m{n}", ids(draw.randint(10, 200)), draw.randint(4, 64)) for n in range(32)],
        "made_shared": [Request(f"p{n}", prefix + ids(draw.randint(10, 30)), 16) for n in range(32)],
    }
