"""Beam search against a plain implementation over whole vocabularies, and against transformers' own."""

import itertools
import math
import random
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchgen.engine.beam import BeamSearch, Hypothesis
from batchgen.engine.stop import Stop
from batchgen.outputs import FinishReason
from batchgen.tiny_models import random_ids, tiny_model

LENGTH = Stop(FinishReason.LENGTH)
STOPPED = Stop(FinishReason.STOP)

Distribution = Callable[[tuple[int, ...]], list[float]]


def search(
    width: int,
    most: int,
    prompt: list[int],
    distributions: Callable[[list[list[int]]], list[list[float]]],
    *,
    stop_ids: frozenset[int] = frozenset(),
    ends_text: Callable[[list[int]], bool] | None = None,
    **options: Any,
) -> BeamSearch:
    """Drive BeamSearch as a scheduler does; `distributions` gives every beam's log probabilities."""
    beam_search = BeamSearch(
        width, most, num_stop_ids=len(stop_ids), has_stop_strings=ends_text is not None, **options
    )
    beams = [SimpleNamespace(token_ids=array("i", prompt), logprobs=[])]
    num_steps = 0
    while not beam_search.is_done:
        num_steps += 1
        assert num_steps <= most, "the search never ends"
        candidates = []
        for values in distributions([beam.token_ids.tolist() for beam in beams]):
            likeliest = sorted(range(len(values)), key=lambda token: (-values[token], token))
            ids = likeliest[: beam_search.num_candidates]
            candidates.append((ids, [values[token] for token in ids]))

        def ends(parent: int, token: int, now: list[Any] = beams) -> Stop | None:
            generated = [*now[parent].token_ids[len(prompt) :], token]
            if token in stop_ids or (ends_text is not None and ends_text(generated)):
                return STOPPED
            return LENGTH if len(generated) >= most else None

        beams = [
            SimpleNamespace(
                token_ids=beams[going.parent].token_ids + array("i", [going.token]),
                logprobs=[*beams[going.parent].logprobs, going.logprobs],
            )
            for going in beam_search.advance(beams, candidates, ends)
        ]
    return beam_search


def plain(
    width: int,
    most: int,
    distribution: Distribution,
    stop_ids: frozenset[int],
    length_penalty: float,
    early_stopping: bool | str,
) -> list[tuple[float, tuple[int, ...]]]:
    """All continuations of all beams, ranked and sifted, with nothing clever."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, most + 1):
        everything = []
        for total, tokens in beams:
            for token, logprob in enumerate(distribution(tokens)):
                everything.append((total + logprob, (*tokens, token)))
        everything.sort(key=lambda each: -each[0])
        for total, tokens in everything[:width]:
            if tokens[-1] in stop_ids or length == most:
                finished.append((total / length**length_penalty, tokens))
        finished = sorted(finished, key=lambda each: -each[0])[:width]
        beams = [each for each in everything if each[1][-1] not in stop_ids][:width]
        if len(finished) == width:
            if early_stopping is True:
                break
            horizon = most if early_stopping == "never" and length_penalty > 0 else length
            if beams[0][0] / horizon**length_penalty <= finished[-1][0]:
                break
    return finished


def table(seed: int, vocab_size: int, sharpness: float) -> Distribution:
    """A language model that is a table of random numbers, made as it is asked."""

    def distribution(tokens: tuple[int, ...]) -> list[float]:
        draw = random.Random(f"{seed}:{tokens}")
        logits = [draw.gauss(0.0, sharpness) for _ in range(vocab_size)]
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    return distribution


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    list(itertools.product((1, 2, 3, 4), (-1.0, 0.0, 0.5, 1.0, 2.0), (False, True, "never"))),
)
def test_same_sequences_and_ranking_as_a_plain_search(
    width: int, length_penalty: float, early_stopping: bool | str
) -> None:
    for seed in range(12):
        stop_ids = frozenset(range(seed % 3))
        distribution = table(seed, 9, 0.5 + seed % 4)
        truth = plain(width, 7, distribution, stop_ids, length_penalty, early_stopping)
        found = search(
            width,
            7,
            [100],
            lambda beams, given=distribution: [given(tuple(beam[1:])) for beam in beams],
            stop_ids=stop_ids,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        assert [each.token_ids.tolist() for each in found.finished] == [list(ids) for _, ids in truth]
        assert [each.score for each in found.finished] == pytest.approx([score for score, _ in truth])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(seed=3)


def log_probabilities(model: Any, beams: list[list[int]]) -> list[list[float]]:
    with torch.inference_mode():
        logits = model(torch.tensor(beams)).logits[:, -1].float()
    values: list[list[float]] = logits.log_softmax(-1).tolist()
    return values


def of_transformers(model: Any, prompt: list[int], width: int, most: int, **options: Any) -> Any:
    """transformers' sequences without prompt and padding, and their scores."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=most,
            pad_token_id=299,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    # Generated tokens are those with a beam index; the rest of a row is padding.
    lengths = (output.beam_indices >= 0).sum(dim=1).tolist()
    rows = output.sequences[:, len(prompt) :].tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)], output.sequences_scores.tolist()


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0])
def test_same_sequences_and_ranking_as_transformers(
    model: Any, length_penalty: float, early_stopping: bool | str
) -> None:
    # With fifty of three hundred ids as ends, beams finish all along.
    for width, stop_ids in ((2, range(257, 258)), (4, range(50)), (4, range(12)), (3, range(0))):
        prompt = random_ids(6, width)
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        ids, scores = of_transformers(
            model, prompt, width, 12, eos_token_id=list(stop_ids) or None, **options
        )
        found = search(
            width,
            12,
            prompt,
            lambda beams: log_probabilities(model, beams),
            stop_ids=frozenset(stop_ids),
            **options,
        )
        assert [each.token_ids.tolist() for each in found.finished] == ids
        assert [each.score for each in found.finished] == pytest.approx(scores, abs=1e-4)


def test_an_end_that_is_no_id_ends_a_beam_like_one_that_is(model: Any) -> None:
    from transformers import StoppingCriteria

    class EndsAtThird(StoppingCriteria):
        """Every token that is a multiple of three ends its sequence."""

        def __call__(self, input_ids: torch.Tensor, scores: Any, **unused: Any) -> torch.Tensor:
            return input_ids[:, -1] % 3 == 0

    prompt = random_ids(5, 9)
    ids, scores = of_transformers(model, prompt, 4, 10, eos_token_id=None, stopping_criteria=[EndsAtThird()])
    found = search(
        4,
        10,
        prompt,
        lambda beams: log_probabilities(model, beams),
        ends_text=lambda generated: generated[-1] % 3 == 0,
    )
    assert [each.token_ids.tolist() for each in found.finished] == ids
    assert [each.score for each in found.finished] == pytest.approx(scores, abs=1e-4)


def test_beams_are_fewer_where_fewer_continuations_exist() -> None:
    never = float("-inf")
    # Only 0 and 1 are allowed at first, then only the end, 2.
    steps = [[math.log(0.5), math.log(0.25), never], [never, never, math.log(0.1)]]
    found = search(4, 5, [7], lambda beams: [steps[len(beam) - 1] for beam in beams], stop_ids=frozenset({2}))
    assert [each.token_ids.tolist() for each in found.finished] == [[0, 2], [1, 2]]
    assert found.is_done


def test_no_more_is_asked_for_than_the_next_step_can_need() -> None:
    assert BeamSearch(4, 9, num_stop_ids=1).num_candidates == 5
    assert BeamSearch(4, 9, num_stop_ids=0).num_candidates == 4
    assert BeamSearch(4, 9, num_stop_ids=2, has_stop_strings=True).num_candidates == 12


def test_the_end_counts_in_the_length_and_the_prompt_does_not() -> None:
    # Sums of -1 after one token and of -1.5 after two, the ends included: at penalty 1 the longer one wins.
    found = search(
        2,
        2,
        list(range(50)),
        lambda beams: [[-1.0, -1.0] if len(beam) == 50 else [-0.5, -9.0] for beam in beams],
        stop_ids=frozenset({0}),
    )
    assert [(each.token_ids.tolist(), each.score) for each in found.finished] == [
        ([1, 0], -0.75),
        ([0], -1.0),
    ]
    assert found.finished[0] == Hypothesis(-0.75, -1.5, array("i", [1, 0]), STOPPED, [])


def test_log_probabilities_are_told_of_the_token_and_of_the_likeliest(model: Any) -> None:
    prompt = random_ids(6, 4)
    found = search(
        3, 5, prompt, lambda beams: log_probabilities(model, beams), stop_ids=frozenset({7}), num_logprobs=6
    )
    assert len(found.finished) == 3
    for each in found.finished:
        assert [told.ids[0] for told in each.logprobs] == each.token_ids.tolist()
        assert sum(told.values[0] for told in each.logprobs) == pytest.approx(each.logprob)
        for length, told in enumerate(each.logprobs):
            (truth,) = log_probabilities(model, [[*prompt, *each.token_ids[:length]]])
            likeliest = sorted(range(len(truth)), key=lambda token: -truth[token])
            assert list(told.ids[1:]) == likeliest[:6]
            assert told.values[1:] == pytest.approx([truth[token] for token in likeliest[:6]], abs=1e-5)
            assert told.ranks == (likeliest.index(told.ids[0]) + 1, 1, 2, 3, 4, 5, 6)
