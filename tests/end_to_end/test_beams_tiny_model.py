"""Beam search gives the ids and the ranking of transformers' beams (case BG-19)."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen import LLM, SamplingParams
from batchgen.outputs import CompletionOutput
from batchgen.tiny_models import random_ids, tiny_model, write_folder

EOS = 257
MAX_TOKENS = 16
PROMPTS = [random_ids(6, 1, 256), random_ids(200, 2, 256)]

Beams = list[tuple[list[int], float]]


@pytest.fixture(scope="module")
def model() -> Any:
    # Every id has a token: what has none is never generated.
    return tiny_model(vocab_size=260, max_position_embeddings=256)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), in_process=True, dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs(model: Any, beams_of_transformers: Callable[..., Beams]) -> Callable[..., Beams]:
    """transformers' beams of a prompt."""
    settings = {"max_new_tokens": MAX_TOKENS, "eos_token_id": EOS, "pad_token_id": EOS}
    return lambda prompt, width, **options: beams_of_transformers(
        model, prompt, width, **{**settings, **options}
    )


def search(llm: LLM, prompts: list[list[int]], width: int, **params: Any) -> list[list[CompletionOutput]]:
    settings = {"temperature": 0, "use_beam_search": True, "max_tokens": MAX_TOKENS, "n": width, **params}
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(**settings), use_tqdm=False
    )
    for output in outputs:
        assert output.error is None, output.error
    return [output.outputs for output in outputs]


def assert_equal(found: list[CompletionOutput], truth: Beams, length_penalty: float = 1.0) -> None:
    assert [sample.token_ids for sample in found] == [ids for ids, _ in truth]
    for sample, (ids, score) in zip(found, truth, strict=True):
        assert sample.cumulative_logprob is not None
        assert sample.cumulative_logprob / len(ids) ** length_penalty == pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0])
def test_same_beams_as_transformers(
    llm: LLM, theirs: Callable[..., Beams], length_penalty: float, early_stopping: bool | str
) -> None:
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    for width, prompts in ((2, PROMPTS[:1]), (4, PROMPTS)):
        found = search(llm, prompts, width, **options)
        for prompt, samples in zip(prompts, found, strict=True):
            assert_equal(samples, theirs(prompt, width, **options), length_penalty)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_ends_that_come_early(llm: LLM, theirs: Callable[..., Beams], early_stopping: bool | str) -> None:
    for bias, length_penalty in ((3.0, 2.0), (6.0, 0.5)):
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        found = search(llm, PROMPTS, 4, logit_bias={EOS: bias}, **options)
        for prompt, samples in zip(PROMPTS, found, strict=True):
            assert_equal(samples, theirs(prompt, 4, sequence_bias={(EOS,): bias}, **options), length_penalty)
    # A likely end and a penalty on length: no beam is long.
    assert all(len(sample.token_ids) < MAX_TOKENS for samples in found for sample in samples)


@pytest.mark.parametrize(
    ("ours", "transformers"),
    [
        ({"min_tokens": 8, "logit_bias": {EOS: 6.0}}, {"min_new_tokens": 8, "sequence_bias": {(EOS,): 6.0}}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        (
            {"ignore_eos": True, "logit_bias": {EOS: 6.0}},
            {"eos_token_id": None, "sequence_bias": {(EOS,): 6.0}},
        ),
        (
            {"stop_token_ids": list(range(0, 60, 2))},
            {"eos_token_id": [EOS, *range(0, 60, 2)]},
        ),
        ({"max_tokens": 1}, {"max_new_tokens": 1}),
        (
            {"allowed_token_ids": [65, 66, 67, EOS]},
            {"suppress_tokens": sorted({*range(260)} - {65, 66, 67, EOS})},
        ),
    ],
    ids=lambda value: next(iter(value)),
)
def test_what_else_changes_a_search(
    llm: LLM, theirs: Callable[..., Beams], ours: dict[str, Any], transformers: dict[str, Any]
) -> None:
    found = search(llm, PROMPTS, 4, **ours)
    for prompt, samples in zip(PROMPTS, found, strict=True):
        assert_equal(samples, theirs(prompt, 4, **transformers))


def test_a_stop_string_ends_the_beam_that_contains_it(
    llm: LLM, theirs: Callable[..., Beams], folder: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    letters = sorted({*range(260)} - set(range(97, 123)))
    num_stopped = 0
    for prompt in PROMPTS:
        # Only letters come, so that ends of text are characters.
        options = {"suppress_tokens": letters, "max_new_tokens": 12}
        best = theirs(prompt, 4, **options)[0][0]
        for start, length in ((3, 2), (5, 1), (2, 4)):
            stop = bytes(best[start : start + length]).decode()
            truth = theirs(prompt, 4, stop_strings=[stop, "qqqq"], tokenizer=tokenizer, **options)
            (found,) = search(
                llm, [prompt], 4, stop=[stop, "qqqq"], allowed_token_ids=list(range(97, 123)), max_tokens=12
            )
            assert_equal(found, truth)
            for sample in found:
                text = bytes(sample.token_ids).decode()
                if stop in text:
                    num_stopped += 1
                    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
                    assert sample.text == text[: text.index(stop)]
                else:
                    assert (sample.finish_reason, sample.text) == ("length", text)
    assert num_stopped > 6


def test_a_grammar_leaves_only_what_it_allows_and_the_models_own_probabilities_rank_it(
    llm: LLM, model: Any
) -> None:
    choices = ["ABBA", "AB", "CAD", "DDDDD", "ACDC"]
    (found,) = search(llm, PROMPTS[:1], 4, structured_outputs={"choice": choices}, length_penalty=0.0)
    expected = []
    for choice in choices:
        ids = [*choice.encode(), EOS]
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPTS[0] + ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
        expected.append((sum(logits.log_softmax(-1)[range(len(ids)), ids].tolist()), choice))
    likeliest = sorted(expected, reverse=True)
    assert [sample.text for sample in found] == [choice for _, choice in likeliest[: len(found)]]
    assert [sample.cumulative_logprob for sample in found] == pytest.approx(
        [logprob for logprob, _ in likeliest[: len(found)]], abs=1e-3
    )
    assert all(sample.valid and sample.finish_reason == "stop" for sample in found)


def test_a_beam_that_is_cut_is_valid_where_its_grammar_may_end(llm: LLM) -> None:
    # Long sequences rank first, so beams that reached the limit are given.
    (found,) = search(
        llm, PROMPTS[:1], 8, structured_outputs={"regex": "(AB|CDC)+"}, max_tokens=6, length_penalty=16.0
    )
    cut = [sample for sample in found if sample.finish_reason == "length"]
    assert [each.valid for each in cut] == [re.fullmatch("(AB|CDC)+", each.text) is not None for each in cut]
    assert {each.valid for each in cut} == {True, False}


def test_of_a_wide_search_the_n_best_are_given(llm: LLM, theirs: Callable[..., Beams]) -> None:
    (found,) = search(llm, PROMPTS[:1], 2, best_of=4)
    assert_equal(found, theirs(PROMPTS[0], 4)[:2])


def test_log_probabilities_of_beams_add_up(llm: LLM) -> None:
    (found,) = search(llm, PROMPTS[:1], 3, logprobs=2)
    for sample in found:
        assert sample.logprobs is not None and len(sample.logprobs) == len(sample.token_ids)
        own = [
            position[token].logprob for position, token in zip(sample.logprobs, sample.token_ids, strict=True)
        ]
        assert sum(own) == pytest.approx(sample.cumulative_logprob, abs=1e-4)
        assert all(min(each.rank for each in position.values()) >= 1 for position in sample.logprobs)
        assert all(len(position) in (2, 3) for position in sample.logprobs)


MANY = [random_ids(20 + 9 * number, number, 256) for number in range(5)]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[list[int]]]:
    found = [search(llm, [prompt], 4, max_tokens=40, ignore_eos=True)[0] for prompt in MANY]
    return [[sample.token_ids for sample in samples] for samples in found]


@pytest.mark.parametrize(
    "engine_args",
    [
        {"num_gpu_blocks_override": 24, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 24, "swap_space": 0.01, "preemption_mode": "swap"},
        {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 24},
        {"max_num_seqs": 4},
    ],
    ids=str,
)
def test_beams_do_not_depend_on_preemption_swap_chunks_or_neighbours(
    alone: list[list[list[int]]], folder: Path, engine_args: dict[str, Any]
) -> None:
    with LLM(str(folder), in_process=True, dtype="float32", **engine_args) as small:
        found = search(small, MANY, 4, max_tokens=40, ignore_eos=True)
        stats = small.get_metrics()
    assert [[sample.token_ids for sample in samples] for samples in found] == alone
    if "num_gpu_blocks_override" in engine_args:
        assert stats.num_preemptions > 0
    if "swap_space" in engine_args:
        assert stats.choices["preempt_swap"] > 0
