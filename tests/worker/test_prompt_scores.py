"""Log probabilities of prompt tokens, and several draws from one sequence, on a model."""

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.scheduler_output import (
    DrawRules,
    PromptScores,
    SamplingRow,
    ScheduledSequence,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
)
from batchgen.sampling_params import SamplingParams
from batchgen.tiny_models import random_ids
from batchgen.worker import prompt_scores
from batchgen.worker.model_runner import ModelRunner
from batchgen.worker.prompt_scores import chunk_rows

PARAMS = SamplingParams(prompt_logprobs=1, temperature=0)


@pytest.fixture(scope="module")
def executor(folder: Path, load: Any) -> ModelRunner:
    made: ModelRunner = load(folder)
    return made


@pytest.fixture(scope="module")
def transformers_logprobs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logprobs(prompt: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([prompt])).logits[0].log_softmax(-1)

    return logprobs


def run(executor: ModelRunner, *sequences: ScheduledSequence) -> StepResult:
    return executor.execute(SchedulerOutput(0, sequences))


def scored(
    executor: ModelRunner,
    prompt: list[int],
    cuts: list[int],
    blocks: list[int],
    params: SamplingParams = PARAMS,
) -> list[TokenLogprobs]:
    """Scores of a prompt computed in pieces that end at `cuts`, from the first piece on."""
    found: list[TokenLogprobs] = []
    for begin, end in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
        # The token at p is scored by the logits of p - 1; the prompt's last ones are for the draw.
        last = min(end + 1, len(prompt))
        scores = PromptScores(begin + 1, prompt[begin + 1 : last], params)
        found += run(
            executor, ScheduledSequence(9, prompt[begin:end], begin, (blocks,), scores=scores)
        ).prompt_logprobs[9]
    return found


@pytest.mark.parametrize("length", [31, 32, 33, 64])
def test_scores_equal_transformers_and_do_not_depend_on_how_they_were_computed(
    length: int, executor: ModelRunner, transformers_logprobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # BG-17, without the scheduler.
    prompt = random_ids(length, seed=length, vocab_size=256)
    blocks = list(range(8))
    whole = scored(executor, prompt, [], blocks)
    right = transformers_logprobs(prompt)
    assert len(whole) == length - 1
    for place, told in enumerate(whole):
        assert told.ids == (prompt[place + 1], int(right[place].argmax()))
        np.testing.assert_allclose(told.values, right[place, list(told.ids)], atol=1e-4)
        above = right[place] - right[place, told.ids[0]]
        assert int((above > 1e-5).sum()) < told.ranks[0] <= int((above > -1e-5).sum())
    # In chunks, after a hit (the blocks are there), with logits three rows at a time: the same bits.
    assert scored(executor, prompt, [7, 16, 30], list(range(8, 16))) == whole
    hit = PromptScores(17, prompt[17:], PARAMS)
    rest = run(executor, ScheduledSequence(3, prompt[16:], 16, (blocks,), scores=hit)).prompt_logprobs[3]
    assert rest == whole[16:]
    monkeypatch.setattr(prompt_scores, "_MOST_ROWS", 3)
    assert scored(executor, prompt, [16], list(range(16, 24))) == whole


def test_scores_beside_draws_and_each_other(executor: ModelRunner) -> None:
    prompts = [random_ids(count, seed=count, vocab_size=256) for count in (5, 20, 33)]
    wide = SamplingParams(prompt_logprobs=0, prompt_logprob_token_ids=[7, 250], temperature=0)
    alone = [
        scored(executor, prompts[0], [], [0]),
        scored(executor, prompts[2], [], [4, 5, 6], wide),
    ]
    draw = SamplingRow(1, DrawRules(SamplingParams(logprobs=2)), (5, 0, 20), 0)
    lonely = run(executor, ScheduledSequence(1, prompts[1], 0, ([2, 3],), (draw,)))
    together = run(
        executor,
        ScheduledSequence(0, prompts[0], 0, ([0],), scores=PromptScores(1, prompts[0][1:], PARAMS)),
        ScheduledSequence(1, prompts[1], 0, ([2, 3],), (draw,)),
        ScheduledSequence(
            2, prompts[2], 0, ([4, 5, 6],), (draw,), scores=PromptScores(1, prompts[2][1:], wide)
        ),
    )
    assert [together.prompt_logprobs[0], together.prompt_logprobs[2]] == alone
    assert together.token_ids[0] == lonely.token_ids[0]
    assert together.logprobs[0] == lonely.logprobs[0]
    assert together.prompt_logprobs[2][0].ids == (prompts[2][1], 7, 250)


def test_all_log_probabilities_of_a_prompt(executor: ModelRunner) -> None:
    prompt = random_ids(6, seed=1, vocab_size=256)
    params = SamplingParams(prompt_logprobs=-1, temperature=0)
    for told in scored(executor, prompt, [], [0], params):
        assert sorted(told.ids[1:]) == list(range(300))
        assert np.exp(told.values[1:]).sum() == pytest.approx(1, abs=1e-6)


def test_rows_of_logits_at_once_fit_the_memory() -> None:
    assert chunk_rows(2**40, 50_000) == 256
    few = chunk_rows(10**9, 150_000)
    assert 1 < few < 256
    assert few * 150_000 * 4 * 4 <= 10**9 * 0.1
    assert chunk_rows(0, 50_000) == 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, logprobs=1),
        SamplingParams(
            temperature=1.3, logprobs=1, repetition_penalty=1.5, frequency_penalty=0.5, min_tokens=3
        ),
    ],
    ids=["greedy", "drawn-with-penalties"],
)
def test_draws_after_drafts_are_those_of_one_step_at_a_time(
    params: SamplingParams, executor: ModelRunner
) -> None:
    prompt, blocks = random_ids(20, seed=2, vocab_size=256), ([0, 1, 2],)
    rules = DrawRules(params, frozenset([4]), (), 20, params.needs_history)
    text, tokens, told = array("i", prompt), [], []
    for number in range(5):
        draw = SamplingRow(1, rules, (3, 0, len(text)), number, history=text)
        start = 0 if number == 0 else len(text) - 1
        result = run(executor, ScheduledSequence(1, text[start:].tolist(), start, blocks, (draw,)))
        tokens.append(result.token_ids[0])
        told.append(result.logprobs[0])
        text.append(result.token_ids[0] or 0)
    # The first token known, the next three drafted, the third of them wrong.
    drafts = (*tokens[1:3], (tokens[3] or 0) ^ 1)
    known = text[:21]
    rows = tuple(
        SamplingRow(1, rules, (3, 0, 21 + count), 1 + count, count, known, drafts[:count])
        for count in range(4)
    )
    run(executor, ScheduledSequence(1, prompt, 0, ([4, 5, 6],)))
    scheduled = ScheduledSequence(1, [known[20], *drafts], 20, ([4, 5, 6],), rows)
    result = run(executor, scheduled)
    assert result.token_ids[:3] == tokens[1:4]
    assert [result.logprobs[index] for index in range(3)] == told[1:4]


def test_a_sequence_scheduled_ahead_is_penalised_for_the_newest_token(executor: ModelRunner) -> None:
    params = SamplingParams(temperature=0, frequency_penalty=2.0, presence_penalty=2.0)
    prompt = random_ids(10, seed=3, vocab_size=256)
    rules = DrawRules(params, num_prompt_tokens=10, needs_history=True)

    def generate(is_ahead: bool) -> list[int | None]:
        text, tokens = array("i", prompt), []
        for number in range(6):
            scheduled = text[0 if number == 0 else 9 + number :].tolist() or [-1]
            start = 0 if number == 0 else 9 + number
            draw = SamplingRow(1, rules, (0, 0, 10 + number), number, history=text)
            result = run(executor, ScheduledSequence(1, scheduled, start, ([0],), (draw,)))
            if is_ahead and number:
                text.append(tokens[-1])
            tokens.append(result.token_ids[0])
            if not is_ahead:
                text.append(tokens[-1])
        return tokens

    assert generate(is_ahead=True) == generate(is_ahead=False)
