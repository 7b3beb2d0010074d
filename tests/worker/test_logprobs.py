"""Log probabilities of drawn tokens, and the candidates of beams."""

import math
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from batchgen.engine.scheduler_output import DrawRules, SamplingRow
from batchgen.kernels.ops import Kernels, choose
from batchgen.sampling_params import SamplingParams
from batchgen.worker.sampler import ALL_HELD_BACK, Drawn, Sampler

VOCAB = 300
NEVER = float("-inf")


@pytest.fixture(params=["cpu", "reference"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return choose("cpu", "float32", backend=request.param, head_dim=64)


def logits(rows: int = 1, seed: int = 0, width: int = VOCAB) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3


def row(
    history: Any = (), seed: int = 0, num_candidates: int = 0, stop_ids: Any = (), **params: Any
) -> SamplingRow:
    made = SamplingParams(**params)
    rules = DrawRules(made, frozenset(stop_ids), (), 0, made.needs_history)
    given = array("i", history)
    return SamplingRow(
        0, rules, (seed, 0, len(given)), len(given), history=given, num_candidates=num_candidates
    )


def draw(
    kernels: Kernels, values: Tensor, rows: list[SamplingRow], mode: str = "raw_logprobs", **sizes: int
) -> Drawn:
    return Sampler(kernels, sizes.get("vocab_size", VOCAB), logprobs_mode=mode).draw(values.clone(), rows, {})


def test_the_drawn_token_then_the_likeliest_then_those_asked_for(kernels: Kernels) -> None:
    values = logits(8)
    rows = [row(seed=index, logprobs=3, logprob_token_ids=[250, 4]) for index in range(8)]
    drawn = draw(kernels, values, rows)
    right = values.double().log_softmax(-1)
    for index in range(8):
        told, token = drawn.logprobs[index], drawn.token_ids[index]
        assert told.ids == (token, *right[index].topk(3).indices.tolist(), 250, 4)
        np.testing.assert_allclose(told.values, right[index, list(told.ids)], atol=1e-6)
        assert told.ranks == tuple(1 + int((right[index] > right[index, each]).sum()) for each in told.ids)


def test_only_rows_that_ask_are_told(kernels: Kernels) -> None:
    drawn = draw(
        kernels, logits(5),
        [row(), row(logprobs=0), row(temperature=0), row(logprob_token_ids=[9]), row(n=1, best_of=2)],
    )  # fmt: skip
    assert {index: len(told.ids) for index, told in drawn.logprobs.items()} == {1: 1, 3: 2, 4: 1}


def test_all_of_them(kernels: Kernels) -> None:
    values = logits()
    told = draw(kernels, values, [row(logprobs=-1)]).logprobs[0]
    assert sorted(told.ids[1:]) == list(range(VOCAB))
    assert list(told.values[1:]) == sorted(told.values[1:], reverse=True)
    assert sum(map(math.exp, told.values[1:])) == pytest.approx(1, abs=1e-6)


def test_equal_ones_share_a_rank_and_stand_in_the_order_of_ids(kernels: Kernels) -> None:
    values = torch.zeros(1, VOCAB)
    values[0, [50, 20, 80]] = 2.0
    told = draw(kernels, values, [row(logprobs=5, temperature=0, logprob_token_ids=[80, 7])]).logprobs[0]
    assert told.ids == (20, 20, 50, 80, 0, 1, 80, 7)
    assert told.ranks == (1, 1, 1, 1, 4, 4, 1, 4)


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_modes(mode: str, temperature: float, kernels: Kernels) -> None:
    # Rows whose logits are changed before the draw, beside rows whose are not.
    values = logits(4, seed=3)
    edits: dict[str, Any] = {"logit_bias": {3: 5.0, 9: -4.0}, "repetition_penalty": 1.5}
    rows = [
        row([7, 9], index, temperature=temperature, logprobs=-1, top_k=20, **(edits if index % 2 else {}))
        for index in range(4)
    ]
    drawn = draw(kernels, values, rows, mode)
    for index in range(4):
        right = values[index].double()
        if mode.startswith("processed"):
            if index % 2:
                right[3], right[9] = right[3] + 5.0, right[9] - 4.0
                for token in (7, 9):
                    right[token] = right[token] / 1.5 if right[token] > 0 else right[token] * 1.5
            if temperature:
                right = (right / temperature).masked_fill(right < right.topk(20).values[-1], NEVER)
        if mode.endswith("logprobs"):
            right = right.log_softmax(-1)
        told = drawn.logprobs[index]
        np.testing.assert_allclose(told.values, right[list(told.ids)], atol=2e-6)
        assert told.ranks[0] == 1 + int((right > right[told.ids[0]]).sum())


def test_a_mode_does_not_change_what_is_drawn(kernels: Kernels) -> None:
    values, rows = logits(20), [row(seed=seed, logprobs=2, top_p=0.9, min_p=0.01) for seed in range(20)]
    modes = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
    first, *others = [draw(kernels, values, rows, mode).token_ids for mode in modes]
    assert others == [first] * 3
    assert (
        first
        == draw(kernels, values, [row(seed=seed, top_p=0.9, min_p=0.01) for seed in range(20)]).token_ids
    )


def test_a_row_without_a_token_is_told_nothing(kernels: Kernels) -> None:
    values = logits(3)
    values[1, 8] = float("nan")
    drawn = draw(kernels, values, [row(logprobs=1, logit_bias={2: 1.0}), row(logprobs=1), row(logprobs=1)])
    assert sorted(drawn.logprobs) == [0, 2]
    assert drawn.token_ids[1] is None
    assert drawn.failures == {}


class TestCandidates:
    """Rows of beams: transformers' scores of the likeliest tokens."""

    def test_log_softmax_of_the_logits(self, kernels: Kernels) -> None:
        values = logits(6)
        drawn = draw(kernels, values, [row(temperature=0, num_candidates=1 + index) for index in range(6)])
        right = values.double().log_softmax(-1)
        for index in range(6):
            ids, scores = drawn.candidates[index]
            assert ids == right[index].topk(1 + index).indices.tolist()
            np.testing.assert_allclose(scores, right[index, ids], atol=1e-6)
            assert drawn.token_ids[index] == ids[0]

    def test_processors_come_after_log_softmax_and_nothing_is_normalised_again(
        self, kernels: Kernels
    ) -> None:
        # As in transformers' beam search.
        values, history = logits(3, seed=4), [3, 5, 5, 8]
        bias = {2: 30.0, 8: 2.0}
        ways: list[tuple[dict[str, Any], list[Any]]] = [
            ({"logit_bias": bias}, [SequenceBiasLogitsProcessor([[[k], v] for k, v in bias.items()])]),
            ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
            ({"min_tokens": 9, "repetition_penalty": 0.6},
             [RepetitionPenaltyLogitsProcessor(0.6), MinNewTokensLengthLogitsProcessor(0, 9, [2])]),
        ]  # fmt: skip
        rows = [row(history, temperature=0, num_candidates=8, stop_ids=[2], **way) for way, _ in ways]
        drawn = draw(kernels, values, rows)
        for index, (_, processors) in enumerate(ways):
            right = LogitsProcessorList(processors)(
                torch.tensor([history]), values[index : index + 1].log_softmax(-1)
            )[0]
            ids, scores = drawn.candidates[index]
            assert ids == right.topk(8).indices.tolist()
            np.testing.assert_allclose(scores, right[ids], atol=2e-5)

    def test_beside_draws(self, kernels: Kernels) -> None:
        values = logits(5)
        mixed = [row(temperature=0, num_candidates=4) if index % 2 else row(seed=index) for index in range(5)]
        drawn = draw(kernels, values, mixed)
        alone = draw(kernels, values[[0, 2, 4]], [mixed[0], mixed[2], mixed[4]])
        assert [drawn.token_ids[index] for index in (0, 2, 4)] == alone.token_ids
        beams = draw(kernels, values[[1, 3]], [mixed[1], mixed[3]])
        assert [drawn.candidates[index] for index in (1, 3)] == [beams.candidates[0], beams.candidates[1]]
        assert sorted(drawn.candidates) == [1, 3]

    def test_fewer_when_fewer_are_possible(self, kernels: Kernels) -> None:
        values = logits(3)
        values[2, 0] = float("nan")
        few = {"temperature": 0, "num_candidates": 8, "allowed_token_ids": [5, 6, 7], "min_tokens": 1}
        drawn = draw(
            kernels,
            values,
            [row(**few), row(stop_ids=[5, 6, 7], **few), row(temperature=0, num_candidates=8)],
        )
        assert sorted(drawn.candidates) == [0]
        assert sorted(drawn.candidates[0][0]) == [5, 6, 7]
        assert drawn.failures == {1: ALL_HELD_BACK}
        assert drawn.token_ids[1:] == [None, None]

    def test_ids_without_a_token_are_no_candidates_but_count(self, kernels: Kernels) -> None:
        values = logits()
        values[0, 290:] = 9.0
        drawn = draw(kernels, values, [row(temperature=0, num_candidates=300)], vocab_size=290)
        ids, scores = drawn.candidates[0]
        assert sorted(ids) == list(range(290))
        np.testing.assert_allclose(scores, values.double().log_softmax(-1)[0, ids], atol=1e-6)
