"""The Python API over a small real model in this process, beside transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen import LLM, BeamSearchParams, FlatLogprobs, SamplingParams
from batchgen.tiny_models import random_ids, tiny_model, write_folder

LONG = 120
CLOSE = 1e-4


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(model, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), in_process=True, dtype="float32", max_num_seqs=8) as made:
        yield made


def truth(model: Any, ids: list[int]) -> torch.Tensor:
    """Log probabilities after each token: [tokens, vocabulary]."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)


def test_log_probabilities_are_transformers(llm: LLM, model: Any) -> None:
    prompt = random_ids(20, seed=1)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    (sample,) = output.outputs
    expected = truth(model, prompt + sample.token_ids)
    ids = prompt + sample.token_ids
    positions = [*output.prompt_logprobs, *sample.logprobs]
    assert positions[0] is None
    for number in range(1, len(ids)):
        found, row = positions[number], expected[number - 1]
        assert next(iter(found)) == ids[number], "the token that stands there is the first"
        best = row.topk(3 if number >= len(prompt) else 2).indices.tolist()
        assert set(found) == {ids[number], *best}
        for token, entry in found.items():
            assert entry.logprob == pytest.approx(row[token].item(), abs=CLOSE)
            assert entry.rank == (row > row[token]).sum().item() + 1
            assert entry.decoded_token == llm.get_tokenizer().decode([token], skip_special_tokens=False)
    chosen = sum(
        expected[len(prompt) - 1 + step, token].item() for step, token in enumerate(sample.token_ids)
    )
    assert sample.cumulative_logprob == pytest.approx(chosen, abs=1e-3)


def test_prompt_scores_do_not_depend_on_the_prefix_cache(folder: Path, model: Any) -> None:  # BG-17
    prompts = [random_ids(count, seed=3) for count in (31, 32, 33, 64)] * 2
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for enable in (True, False):
        with LLM(str(folder), in_process=True, dtype="float32", enable_prefix_caching=enable) as llm:
            llm.generate(prompts[:4], SamplingParams(max_tokens=1), use_tqdm=False)  # fills the cache
            for order in (prompts, prompts[::-1]):
                for prompt, output in zip(order, llm.generate(order, params, use_tqdm=False), strict=True):
                    assert len(output.prompt_logprobs) == len(prompt)
                    assert output.prompt_logprobs[0] is None
                    assert output.num_cached_tokens == 0
                    expected = truth(model, prompt)
                    for number in range(1, len(prompt)):
                        value = output.prompt_logprobs[number][prompt[number]].logprob
                        assert value == pytest.approx(expected[number - 1, prompt[number]].item(), abs=CLOSE)


def test_a_score_is_the_sum_over_the_continuation_and_its_prompt_comes_from_the_cache(
    llm: LLM, model: Any
) -> None:
    prompt = random_ids(40, seed=5)
    continuations = [random_ids(count, seed=count) for count in (1, 7, 20)]
    best = truth(model, prompt)[-1].argmax().item()
    llm.reset_prefix_cache()
    scores = llm.score([prompt], [*continuations, [best]], use_tqdm=False)
    for continuation, score in zip([*continuations, [best]], scores, strict=True):
        rows = truth(model, prompt + continuation)[len(prompt) - 1 :]
        expected = [rows[step, token].item() for step, token in enumerate(continuation)]
        assert score.token_logprobs == pytest.approx(expected, abs=CLOSE)
        assert score.logprob == pytest.approx(sum(expected), abs=1e-3)
        assert score.is_greedy == all(
            rows[step].argmax().item() == token for step, token in enumerate(continuation)
        )
    assert scores[-1].is_greedy
    assert [score.num_cached_tokens for score in scores] == [0, 32, 32, 32]


def test_beams_come_in_vllms_form_and_are_transformers(llm: LLM, model: Any) -> None:
    prompt = random_ids(12, seed=7)
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=8))
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([prompt]),
            num_beams=3,
            num_return_sequences=3,
            do_sample=False,
            max_new_tokens=8,
            # Ids that have no token are never drawn here.
            suppress_tokens=list(range(llm.get_tokenizer().vocab_size, 300)),
        )
    for sequence, ids in zip(output.sequences, expected.tolist(), strict=True):
        while ids[-1] == 257:
            ids.pop()
        assert sequence.tokens == ids
        rows = truth(model, ids)
        total = sum(rows[number - 1, ids[number]].item() for number in range(len(prompt), len(ids)))
        if sequence.finish_reason == "length":
            assert sequence.cum_logprob == pytest.approx(total, abs=1e-3)


def test_the_likeliest_of_several_samples_are_given_back(llm: LLM, model: Any) -> None:
    prompt = random_ids(9, seed=8)
    params = {"temperature": 1.0, "seed": 4, "max_tokens": 6, "ignore_eos": True}
    (every,) = llm.generate([prompt], SamplingParams(n=5, logprobs=0, **params), use_tqdm=False)
    (best,) = llm.generate([prompt], SamplingParams(n=2, best_of=5, **params), use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda sample: -sample.cumulative_logprob)[:2]
    assert [sample.token_ids for sample in best.outputs] == [sample.token_ids for sample in ranked]
    assert [sample.index for sample in best.outputs] == [0, 1]
    assert best.outputs[0].cumulative_logprob == pytest.approx(ranked[0].cumulative_logprob)
    assert best.outputs[0].logprobs is None


def test_all_tokens_can_be_told_when_the_engine_may(folder: Path, model: Any) -> None:
    with LLM(str(folder), in_process=True, dtype="float32", max_logprobs=-1) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, flat_logprobs=True)
        (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    logprobs = output.outputs[0].logprobs
    assert isinstance(logprobs, FlatLogprobs)
    assert sum(torch.tensor(logprobs.logprobs).exp()) == pytest.approx(1, abs=1e-4)


def test_a_prompt_is_cut_to_what_the_model_takes(llm: LLM) -> None:
    ids = random_ids(300, seed=9)
    params = SamplingParams(temperature=0, max_tokens=5, truncate_prompt_tokens=-1)
    (output,) = llm.generate([ids], params, use_tqdm=False)
    assert output.prompt_token_ids == ids[-127:]
    assert len(output.outputs[0].token_ids) == 1


def test_words_are_kept_out(llm: LLM) -> None:
    bias = {ord("a"): 20.0, ord("b"): 19.0}
    for words, text in ((None, "aaaa"), (["a"], "bbbb"), (["aa", "bb"], "abab")):
        params = SamplingParams(temperature=0, max_tokens=4, logit_bias=bias, bad_words=words)
        (output,) = llm.generate(["x"], params, use_tqdm=False)
        assert output.outputs[0].text == text


def test_a_choice_is_made_and_valid(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs={"choice": ["yes", "no"]})
    (output,) = llm.generate(["is it?"], params, use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no")
    assert output.outputs[0].valid is True


def test_sleep_gives_the_blocks_back_and_the_same_tokens_come_after(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    before = llm.generate([random_ids(20, seed=2)], params, use_tqdm=False)[0].outputs[0].token_ids
    for level in (1, 2):
        llm.sleep(level)
        assert llm.is_sleeping()
        llm.wake_up()
        after = llm.generate([random_ids(20, seed=2)], params, use_tqdm=False)[0]
        assert after.outputs[0].token_ids == before
        assert after.num_cached_tokens == 0


def test_a_pinned_prefix_stays_cached(llm: LLM) -> None:
    prefix = random_ids(40, seed=21)
    pin = llm.pin_prefix(prefix)
    assert llm.get_metrics().num_pinned_blocks == 2
    llm.generate(
        [random_ids(100, seed=seed) for seed in range(100, 130)], SamplingParams(max_tokens=1), False
    )
    (output,) = llm.generate([[*prefix, 5]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.num_cached_tokens == 32
    assert llm.unpin_prefix(pin) is True
    assert llm.unpin_prefix(pin) is False
    assert llm.get_metrics().num_pinned_blocks == 0
