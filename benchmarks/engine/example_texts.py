"""Prompts of real text for benchmarks: the example's texts."""

import json
from typing import Any

from benchmarks.record import ROOT


def example_texts() -> list[str]:
    """The texts of examples/summarize, the longer ones first."""
    lines = (ROOT / "examples/summarize/texts.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted((json.loads(line)["text"] for line in lines), key=len, reverse=True)


def beginnings(tokenizer: Any, count: int, num_tokens: int) -> list[dict[str, list[int]]]:
    """`count` prompts of `num_tokens` tokens: beginnings of texts that have as many."""
    encoded = [list(tokenizer.encode(text)) for text in example_texts()]
    prompts = [{"prompt_token_ids": ids[:num_tokens]} for ids in encoded if len(ids) >= num_tokens]
    assert len(prompts) >= count, f"only {len(prompts)} texts have {num_tokens} tokens"
    return prompts[:count]
