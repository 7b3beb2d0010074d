"""What changes logits before a draw, against transformers' processors and warpers in float64."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from batchgen.engine.scheduler_output import DrawRules, SamplingRow
from batchgen.errors import EngineError
from batchgen.kernels.ops import Kernels, choose
from batchgen.sampling_params import SamplingParams
from batchgen.worker.row_rules import KnownRules
from batchgen.worker.sampler import Sampler

VOCAB = 400
NEVER = float("-inf")


@pytest.fixture(params=["cpu", "reference"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return choose("cpu", "float32", backend=request.param, head_dim=64)


def logits(rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def text(count: int, seed: int) -> list[int]:
    # Few ids, so that many come more than once.
    return np.random.default_rng(seed).integers(0, 30, count).tolist()


def make_row(
    history: Sequence[int] = (), prompt: int = 0, *, bad_words: Any = (), stop_ids: Any = (), **params: Any
) -> SamplingRow:
    made = SamplingParams(logprobs=-1, **params)
    rules = DrawRules(
        made, frozenset(stop_ids), tuple(map(tuple, bad_words)), prompt, made.needs_history or bool(bad_words)
    )
    return SamplingRow(0, rules, (1, 0, len(history)), len(history) - prompt, history=array("i", history))


def processed(kernels: Kernels, values: Tensor, rows: list[SamplingRow], **known: Any) -> Tensor:
    """The logits that the rows are drawn from, in the order of ids: [R, V]."""
    sampler = Sampler(kernels, VOCAB, logprobs_mode="processed_logits")
    drawn = sampler.draw(values.clone(), rows, known.get("newest", {}))
    found = torch.full(values.shape, float("nan"))
    for index in range(len(rows)):
        told = drawn.logprobs[index]
        found[index, list(told.ids[1:])] = torch.tensor(told.values[1:], dtype=torch.float32)
    return found


def transformed(values: Tensor, history: Sequence[int], *processors: Any) -> Tensor:
    """transformers' answer for one row, in float64."""
    return LogitsProcessorList(processors)(torch.tensor([list(history)]), values.double().clone())


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found == NEVER, expected == NEVER)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3])
def test_repetition_penalty_over_prompt_and_output(penalty: float, kernels: Kernels) -> None:
    values, history = logits(), text(50, 1)
    found = processed(kernels, values, [make_row(history, 20, temperature=0, repetition_penalty=penalty)])
    assert_same(found, transformed(values, history, RepetitionPenaltyLogitsProcessor(penalty)))


def test_presence_and_frequency_penalties_over_output_only(kernels: Kernels) -> None:
    values, history = logits(), text(60, 2)
    for presence, frequency in ((0.5, 0.0), (0.0, 0.75), (1.5, -2.0)):
        way = {"temperature": 0, "presence_penalty": presence, "frequency_penalty": frequency}
        found = processed(kernels, values, [make_row(history, 25, **way)])
        counts = torch.bincount(torch.tensor(history[25:]), minlength=VOCAB).double()
        assert_same(found, values.double() - frequency * counts - presence * (counts > 0))


@pytest.mark.parametrize("generated", [0, 3, 4, 5])
@pytest.mark.parametrize("prompt", [3, 40])
def test_min_tokens(generated: int, prompt: int, kernels: Kernels) -> None:
    # BG-13: the prompt does not count.
    values, history = logits(), text(prompt + generated, 3)
    found = processed(
        kernels, values, [make_row(history, prompt, temperature=0, min_tokens=4, stop_ids=[2, 7])]
    )
    processor = MinNewTokensLengthLogitsProcessor(prompt, 4, [2, 7])
    assert_same(found, transformed(values, history, processor))


@pytest.mark.parametrize("end", [[5, 6], [9, 5, 6], [6], [4, 4], [5, 5]])
def test_bad_words(end: list[int], kernels: Kernels) -> None:
    words = [[11], [12], [5, 6, 7], [5, 6, 8], [6, 9], [4, 4, 4], [5, 3]]
    values, history = logits(), [*text(10, 4), *end]
    found = processed(kernels, values, [make_row(history, 5, temperature=0, bad_words=words)])
    assert_same(found, transformed(values, history, NoBadWordsLogitsProcessor(words)))


def test_a_bad_word_may_begin_in_the_prompt_and_in_drafts(kernels: Kernels) -> None:
    values, words = logits(), [[5, 6, 7]]
    for history, drafts in (([1, 5, 6], ()), ([1, 5], (6,)), ([1], (5, 6))):
        row = make_row([1, 5, 6], 3, temperature=0, bad_words=words)
        row = SamplingRow(0, row.rules, row.key, 0, history=array("i", history), drafts=drafts)
        assert processed(kernels, values, [row])[0, 7] == NEVER


def test_logit_bias_comes_before_the_penalties(kernels: Kernels) -> None:
    values, history = logits(), text(30, 5)
    bias = {3: 40.0, 8: -100.0, 20: 0.25, 399: 1.0}
    row = make_row(history, 10, temperature=0, logit_bias=bias, repetition_penalty=1.2)
    expected = transformed(
        values, history,
        SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]),
        RepetitionPenaltyLogitsProcessor(1.2),
    )  # fmt: skip
    assert_same(processed(kernels, values, [row]), expected)


def test_only_allowed_ids_are_left(kernels: Kernels) -> None:
    # BG-11: the last id of the vocabulary is one, the first beyond it is not.
    values = logits()
    found = processed(
        kernels, values, [make_row(temperature=0, allowed_token_ids=[5, 399, 400, 5], logit_bias={5: -1.0})]
    )
    left = torch.nonzero(found[0] > NEVER)[:, 0].tolist()
    assert left == [5, 399]
    assert found[0, 399] == values[0, 399]
    assert found[0, 5] == values[0, 5] - 1.0


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.6},
    {"temperature": 1.3, "top_k": 9},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.1, "min_p": 0.05},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.7, "min_p": 0.02},
    {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.4, "min_tokens": 100},
    {"temperature": 1.7, "top_p": 0.95, "repetition_penalty": 0.8, "logit_bias": {4: 6.0}},
]


def transformers_way(params: dict[str, Any]) -> list[Any]:
    made: list[Any] = []
    if "logit_bias" in params:
        made.append(SequenceBiasLogitsProcessor([[[k], v] for k, v in params["logit_bias"].items()]))
    if "repetition_penalty" in params:
        made.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    if "min_tokens" in params:
        made.append(MinNewTokensLengthLogitsProcessor(0, params["min_tokens"], [2]))
    for name, warper in (
        ("temperature", TemperatureLogitsWarper), ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper),
    ):  # fmt: skip
        if name in params:
            made.append(warper(params[name]))
    return made


@pytest.mark.parametrize("params", WAYS, ids=str)
def test_the_whole_way_of_a_row(params: dict[str, Any], kernels: Kernels) -> None:
    for seed in range(5):
        values, history = logits(seed=seed), text(20, seed)
        found = processed(kernels, values, [make_row(history, 10, stop_ids=[2], **params)])
        assert_same(found, transformed(values, history, *transformers_way(params)))


def test_rows_of_a_mixed_batch_are_as_alone(kernels: Kernels) -> None:
    values = logits(24, seed=9)
    rows = [
        make_row(text(20 + index, index), 10, stop_ids=[2], bad_words=[[1], [3, 4]] if index % 2 else [],
                 allowed_token_ids=range(0, 400, 3) if index % 5 == 0 else None, **WAYS[index % len(WAYS)])
        for index in range(24)
    ]  # fmt: skip
    together = processed(kernels, values, rows)
    for index, row in enumerate(rows):
        assert torch.equal(processed(kernels, values[index : index + 1], [row])[0], together[index])


class TestHistory:
    """Which tokens stand before a draw."""

    def row(self, given: list[int], position: int, drafts: tuple[int, ...] = ()) -> SamplingRow:
        return SamplingRow(
            7, DrawRules(SamplingParams(repetition_penalty=2.0)), (0, 0, position), 0,
            history=array("i", given), drafts=drafts,
        )  # fmt: skip

    def test_as_given(self) -> None:
        assert self.row([1, 2, 3], 3).tokens_before({}).tolist() == [1, 2, 3]

    def test_what_was_added_since_does_not_count(self) -> None:
        assert self.row([1, 2, 3, 4, 5], 3).tokens_before({}).tolist() == [1, 2, 3]
        assert self.row([1, 2, 3, 4], 3, (9,)).tokens_before({}).tolist() == [1, 2, 9]

    def test_one_short_is_followed_by_the_newest(self) -> None:
        row = self.row([1, 2], 3)
        assert row.tokens_before({7: 50, 8: 60}).tolist() == [1, 2, 50]
        assert row.history is not None
        assert row.history.tolist() == [1, 2]

    def test_drafts_come_last(self) -> None:
        assert self.row([1, 2], 4, (8, 9)).tokens_before({}).tolist() == [1, 2, 8, 9]

    def test_too_little_is_a_mistake(self) -> None:
        with pytest.raises(EngineError, match="position 5 comes with 2 tokens"):
            self.row([1, 2], 5).tokens_before({7: 1})

    def test_the_sequence_may_grow_after_its_draw(self, kernels: Kernels) -> None:
        row = make_row([1, 2, 3], 1, temperature=0, repetition_penalty=1.5)
        processed(kernels, logits(), [row])
        assert row.history is not None
        row.history.append(4)


def test_rules_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchgen.worker import row_rules

    monkeypatch.setattr(row_rules, "_MOST_KNOWN", 10)
    known = KnownRules(VOCAB)
    for batch in range(20):
        rows = [make_row(temperature=0, logit_bias={batch: float(index)}) for index in range(6)]
        found = known.of(rows)
        assert [rules.rules for rules in found] == [row.rules for row in rows]
        assert [rules.bias_values[0] for rules in found] == list(range(6))
    assert len(known._known) <= 12
