"""What every engine is given: the workloads, a few requests one after another, and long prompts.

Also the columns: how each engine is set for a precision. Standard library only, as all that a peer's
environment imports from here.
"""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.engine.workloads import Request, workloads

SINGLE_REQUESTS = 4
LONG_REQUESTS, LONG_PROMPT, LONG_OUTPUT = 16, 6000, 64
# Names of the usual workloads, by the beginning of their files' names.
SHORT_NAMES = {"w1_short": "w1", "w2_mixed": "w2", "w3_shared": "w3"}


@dataclass(frozen=True, slots=True)
class Case:
    """Requests given at once or, with `one_by_one`, each after the one before has ended."""

    name: str
    requests: list[Request]
    one_by_one: bool = False

    @property
    def generated(self) -> int:
        """Tokens that a run generates, the same for every engine."""
        return sum(request.max_tokens for request in self.requests)

    def plain(self) -> dict[str, Any]:
        """For a child's JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Column:
    """One precision: what it means, and each engine's own settings for it."""

    name: str
    meaning: str
    settings: Mapping[str, Mapping[str, Any]]


COLUMNS = {
    column.name: column
    for column in (
        Column(
            "fp32",
            "float32 weights, activations and KV cache",
            {
                "batchgen": {"dtype": "float32"},
                "vllm": {"model": "hf", "dtype": "float32"},
                "openvino": {"model": "ov-f16", "hint": "f32", "kv": "f32"},
                "transformers": {"model": "hf", "dtype": "float32"},
            },
        ),
        Column(
            "fp32-kv16",
            "float32 weights and activations, KV cache of 16 bits",
            {
                "batchgen": {"dtype": "float32", "kv_cache_dtype": "float16"},
                "openvino": {"model": "ov-f16", "hint": "f32", "kv": "f16"},
            },
        ),
        Column(
            "int8",
            "int8 weights; each engine's own choice for activations and KV cache",
            {
                "batchgen": {"dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8"},
                "vllm": {"model": "w8a8", "dtype": "bfloat16"},
                "openvino": {"model": "ov-q8_0"},
            },
        ),
        Column(
            "bf16",
            "bfloat16 weights, activations and KV cache",
            {
                "batchgen": {"dtype": "bfloat16"},
                "vllm": {"model": "hf", "dtype": "bfloat16"},
                "openvino": {"model": "ov-f16", "hint": "bf16", "kv": "bf16"},
                "transformers": {"model": "hf", "dtype": "bfloat16"},
            },
        ),
    )
}


def make_cases(names: str, limit: int | None, vocab_size: int) -> list[Case]:
    """The workloads, then "single" and "long" made of their prompts.

    Args:
        names: comma-separated, or "all".
        limit: only the first so many requests of each.
        vocab_size: for the ids of made-up workloads.
    """
    found = {SHORT_NAMES.get(name, name): some for name, some in workloads("all", None, vocab_size).items()}
    cases = [Case(name, requests[:limit]) for name, requests in found.items()]
    first = next(iter(found.values()))
    cases.append(Case("single", first[: min(SINGLE_REQUESTS, limit or SINGLE_REQUESTS)], one_by_one=True))
    prompts = [request.prompt_token_ids for requests in found.values() for request in requests]
    cases.append(Case("long", long_requests(prompts)[:limit]))
    by_name = {case.name: case for case in cases}
    wanted = list(by_name) if names == "all" else names.split(",")
    unknown = sorted(set(wanted) - set(by_name))
    if unknown:
        raise SystemExit(f"no case {', '.join(unknown)}; there are: {', '.join(by_name)}")
    return [by_name[name] for name in wanted]


def long_requests(
    prompts: list[list[int]], count: int = LONG_REQUESTS, length: int = LONG_PROMPT, output: int = LONG_OUTPUT
) -> list[Request]:
    """Prompts joined in other orders to `length` tokens; no two begin alike.

    Prompts with a common beginning of more than their half count once: joined, they would only repeat it.
    """
    unlike: list[list[int]] = []
    for ids in prompts:
        if not any(ids[: len(ids) // 2 + 1] == other[: len(ids) // 2 + 1] for other in unlike):
            unlike.append(ids)
    made: list[Request] = []
    for number in range(count):
        draw = random.Random(number)
        order = draw.sample(unlike, len(unlike))
        # A different token first: not even one block is shared.
        ids = [100 + number]
        while len(ids) < length:
            ids += [token for prompt in order for token in prompt]
        made.append(Request(f"long-{number}", ids[:length], output))
    return made


def warm_up(case: Case) -> list[Request]:
    """Eight short requests that no case begins with: they wake every kernel and prime no prefix."""
    width = min(96, max(len(request.prompt_token_ids) for request in case.requests))
    return [Request(f"warm-{number}", [7 + number] * (width - number), 8) for number in range(8)]


def common_tokens(requests: list[Request]) -> int:
    """With how many tokens every prompt begins, the last of each left out: it is always computed."""
    prompts = [request.prompt_token_ids[:-1] for request in requests]
    low, high = min(prompts), max(prompts)
    return next(
        (n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high))
    )
