"""The same row gives the same bytes: alone or among 63, in any order, preempted, cached, chunked, drafted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from batchgen import LLM, SamplingParams
from batchgen.engine import speculation
from batchgen.testing import FreeDrafts
from batchgen.tiny_models import random_ids, tiny_model, write_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 16
NUM_ROWS = 64
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# One row's block tables need at most 10 blocks; 24 hold two or three of them at once.
TINY_POOL = {"num_gpu_blocks_override": 24}


@dataclass(frozen=True)
class Row:
    """A prompt and how to draw."""

    prompt: list[int]
    params: SamplingParams


PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}

# What may be different about a run without changing a byte: engine arguments, and what they must have caused.
AXES: dict[str, tuple[dict[str, Any], str | None]] = {
    "three at a time": ({"max_num_seqs": 3}, None),
    "in small chunks": ({"max_num_batched_tokens": 16, "max_num_seqs": 16}, None),
    "in odd chunks": ({"max_num_batched_tokens": 61, "long_prefill_token_threshold": 13}, None),
    "whole prompts": ({"enable_chunked_prefill": False, "max_num_batched_tokens": 256}, None),
    "without a prefix cache": ({"enable_prefix_caching": False}, None),
    "preempted by recompute": ({**TINY_POOL, "preemption_mode": "recompute"}, "preempt_recompute"),
    "recomputed without a cache": (
        {**TINY_POOL, "preemption_mode": "recompute", "enable_prefix_caching": False},
        "preempt_recompute",
    ),
    "preempted by swap": ({**TINY_POOL, "preemption_mode": "swap", "swap_space": 0.01}, "preempt_swap"),
    "swapped without a cache": (
        {**TINY_POOL, "preemption_mode": "swap", "swap_space": 0.01, "enable_prefix_caching": False},
        "preempt_swap",
    ),
    "drafted": ({"speculative": DRAFTS, "max_num_seqs": 4}, "drafts"),
    "drafted and preempted": ({"speculative": DRAFTS, **TINY_POOL}, "preempt_recompute"),
}


def rows(temperature: float) -> list[Row]:
    """64 rows: shared and own beginnings, lengths around block edges, every way to change a draw."""
    shared = random_ids(3 * BLOCK, seed=1)
    ways: list[dict[str, Any]] = [
        {},
        {"top_k": 20, "top_p": 0.9},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"min_p": 0.05, "frequency_penalty": 0.5, "min_tokens": 6},
        {"logprobs": 3, "logit_bias": {5: 4.0, 9: -3.0}},
        {"n": 3} if temperature else {"allowed_token_ids": list(range(40, 90))},
        {"structured_outputs": {"regex": "[a-f]{4,30}x"}},
        {"n": 2, "best_of": 4} if temperature else {"n": 2, "best_of": 3, "use_beam_search": True},
    ]
    made = []
    for number in range(NUM_ROWS):
        own = random_ids(1 + (number * 7) % 40, seed=100 + number)
        # A row that repeats itself gives the drafting something to find.
        prompt = {0: shared + own, 1: own, 2: (own[:5] or [3]) * 8}[number % 3]
        way = ways[number % len(ways)]
        params = SamplingParams(
            temperature=temperature, max_tokens=12 + number % 21, ignore_eos=number % 2 == 0 and len(way) < 3,
            seed=None if "use_beam_search" in way else number, **way,
        )  # fmt: skip
        made.append(Row(prompt, params))
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Sharp logits, so that greedy rows run into cycles as those of a real model do.
    made = tiny_model(num_hidden_layers=2, max_position_embeddings=256)
    return write_folder(made, tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _drafting_always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MeasuredTimes", FreeDrafts)


def run(
    model: str | Path, some: Sequence[Row], **engine_args: Any
) -> tuple[list[list[Any]], Mapping[str, int], Any]:
    """Per row the samples' ids, texts, reasons and log probabilities; and what the engine counted."""
    with LLM(str(model), in_process=True, max_model_len=256, **engine_args) as llm:
        assert llm.info.reproducible
        outputs = llm.generate(
            [{"prompt_token_ids": row.prompt} for row in some], [row.params for row in some], use_tqdm=False
        )
        stats = llm.get_metrics()
    assert not [output.error for output in outputs if output.error]
    told = [
        [
            (sample.index, sample.token_ids, sample.text, sample.finish_reason, sample.logprobs)
            for sample in output.outputs
        ]
        for output in outputs
    ]
    return told, stats.choices, stats


@dataclass(frozen=True)
class Truth:
    """Rows, what they gave all at once, and the engine arguments that say in which precision."""

    rows: list[Row]
    told: list[list[Any]]
    precision: dict[str, Any]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((0.0, "float32"), id="greedy float32"),
        pytest.param((1.0, "float32"), id="temperature 1 float32"),
        pytest.param((0.0, "int8"), id="greedy int8"),
        # Drawing does not know how logits were multiplied: once in a while is enough.
        pytest.param((1.0, "int8"), id="temperature 1 int8", marks=pytest.mark.long),
    ],
)
def truth(request: pytest.FixtureRequest, model: Path) -> Truth:
    temperature, name = request.param
    some, precision = rows(temperature), PRECISIONS[name]
    return Truth(some, run(model, some, max_num_seqs=64, **precision)[0], precision)


@pytest.mark.parametrize("axis", AXES)
def test_a_row_is_the_same_bytes(axis: str, model: Path, truth: Truth) -> None:
    engine_args, must_have_happened = AXES[axis]
    told, choices, stats = run(model, truth.rows, **engine_args, **truth.precision)
    assert told == truth.told
    if must_have_happened == "drafts":
        assert stats.num_accepted_tokens > 0
        assert stats.num_draft_tokens > stats.num_accepted_tokens
    elif must_have_happened is not None:
        assert choices[must_have_happened] > 0


def test_a_row_is_the_same_bytes_in_any_order(model: Path, truth: Truth) -> None:
    order = sorted(range(NUM_ROWS), key=lambda number: (number * 37) % NUM_ROWS)
    told, _, _ = run(model, [truth.rows[number] for number in order], max_num_seqs=7, **truth.precision)
    assert told == [truth.told[number] for number in order]


def test_a_row_is_the_same_bytes_alone(model: Path, truth: Truth) -> None:
    for number in range(0, NUM_ROWS, 9):
        told, _, _ = run(model, [truth.rows[number]], **truth.precision)
        assert told == [truth.told[number]]


def test_a_row_is_the_same_bytes_when_its_prompt_is_known(model: Path, truth: Truth) -> None:
    with LLM(str(model), in_process=True, max_model_len=256, **truth.precision) as llm:
        prompts: Any = [{"prompt_token_ids": row.prompt} for row in truth.rows]
        for _ in range(2):
            outputs = llm.generate(prompts, [row.params for row in truth.rows], use_tqdm=False)
            assert [[each.token_ids for each in output.outputs] for output in outputs] == [
                [each[1] for each in samples] for samples in truth.told
            ]
        # The second time every full block of every prompt was there.
        assert all(
            output.num_cached_tokens >= (len(row.prompt) - 1) // BLOCK * BLOCK
            for row, output in zip(truth.rows, outputs, strict=True)
        )
