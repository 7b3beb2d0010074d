"""The sampler: transformers' distributions, exact ties, and rows that do not know their neighbours."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from batchgen.engine.scheduler_output import DrawRules, SamplingRow
from batchgen.kernels.ops import Kernels, choose
from batchgen.sampling_params import SamplingParams
from batchgen.worker.random_stream import uniform, uniforms
from batchgen.worker.sampler import ALL_HELD_BACK, Sampler

VOCAB = 1000


Draw = Callable[..., list[int | None]]


@pytest.fixture(params=["cpu", "reference"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return choose("cpu", "float32", backend=request.param, head_dim=64)


@pytest.fixture
def draw(kernels: Kernels) -> Draw:
    """Draws from a copy of some logits."""

    def draw(values: Tensor, rows: list[SamplingRow], vocab_size: int | None = None) -> list[int | None]:
        return Sampler(kernels, vocab_size or values.shape[1]).draw(values.clone(), rows, {}).token_ids

    return draw


def logits(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def row(
    key: tuple[int, int, int] = (0, 0, 0), generated: int = 0, stop_ids: Any = (), **params: Any
) -> SamplingRow:
    return SamplingRow(0, DrawRules(SamplingParams(**params), frozenset(stop_ids)), key, generated)


def chi_square_z(observed: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations the chi-square statistic is above its mean (Wilson and Hilferty 1931)."""
    statistic, degrees = float(((observed - expected) ** 2 / expected).sum()), len(observed) - 1
    spread = 2 / (9 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5)


class TestGreedy:
    def test_the_lowest_id_of_equal_logits(self, draw: Draw) -> None:
        values = torch.zeros(2, VOCAB)
        values[0, [900, 17, 400]] = 5.0
        assert draw(values, [row(temperature=0), row(temperature=0)]) == [17, 0]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_logits(self, draw: Draw, dtype: torch.dtype) -> None:
        values = torch.zeros(1, VOCAB, dtype=dtype)
        values[0, [500, 3]] = 1.0
        assert draw(values, [row(temperature=0)]) == [3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_numbers_overflowed_draws_nothing_and_its_neighbours_go_on(
    draw: Draw, temperature: float
) -> None:
    values = logits(4)
    clean = draw(values, [row(temperature=temperature)] * 4)
    values[1, 700] = float("nan")
    values[2, 3] = float("inf")
    drawn = draw(values, [row(temperature=temperature)] * 4)
    assert drawn == [clean[0], None, None, clean[3]]


def warped(values: Tensor, params: dict[str, Any]) -> np.ndarray:
    """transformers' distribution of one row, in float64."""
    scores = values.double().unsqueeze(0)
    for name, warper in (
        ("temperature", TemperatureLogitsWarper), ("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):  # fmt: skip
        if name in params:
            scores = warper(params[name])(torch.zeros(1, 1, dtype=torch.long), scores)
    return scores.softmax(-1)[0].numpy()


WAYS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 0.9, "min_p": 0.07},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.7, "min_p": 0.02},
]


@pytest.mark.parametrize("params", WAYS, ids=str)
def test_draws_follow_transformers_distribution(draw: Draw, params: dict[str, Any]) -> None:
    values = logits(1, vocab=300, seed=3, spread=1.5)
    expected = warped(values[0], params)
    count = 2000
    found = np.zeros(300)
    for start in range(0, count, 500):
        rows = [row((seed, 0, 9), **params) for seed in range(start, start + 500)]
        for token in draw(values.expand(500, -1), rows):
            found[token] += 1
    assert not found[expected == 0].any(), "a token that the warpers exclude was drawn"
    # Rare tokens are counted together: a chi-square needs a handful of expected draws in each bin.
    rare = expected * count < 8
    observed = np.append(found[~rare], found[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum()) * count
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) > 1:
        assert chi_square_z(observed, wanted * observed.sum() / wanted.sum()) < 4


def test_rows_do_not_know_their_neighbours(draw: Draw) -> None:
    values = logits(len(WAYS) * 8, seed=7)
    rows = [row((index, index % 3, index), **WAYS[index % len(WAYS)]) for index in range(len(WAYS) * 8)]
    together = draw(values, rows)
    assert together == [draw(values[index : index + 1], [rows[index]])[0] for index in range(len(rows))]
    order = np.random.default_rng(0).permutation(len(rows))
    assert [together[index] for index in order] == draw(values[order], [rows[index] for index in order])


def test_mixed_rows_in_one_batch(draw: Draw) -> None:
    # BS-11: none crashes, a huge top_k is off, the greedy row is not touched.
    one = logits(1, seed=11)
    ways = [{"temperature": 0}, {"top_k": 5}, {"top_k": 9999999}, {"top_k": 0}, {"top_k": -1},
            {"top_p": 1e-9},
            {"min_p": 1.0}]  # fmt: skip
    for seed in range(20):
        greedy, five, huge, off, minus, tiny_p, full_p = draw(
            one.expand(len(ways), -1), [row((seed, 0, 0), **way) for way in ways]
        )
        best = int(one.argmax())
        assert greedy == tiny_p == full_p == best
        assert huge == off == minus
        assert five in one[0].topk(5).indices.tolist()
    assert draw(one.expand(2, -1), [row(temperature=0), row((1, 0, 0), temperature=1.9)])[0] == best


def test_a_nucleus_wider_than_the_first_guess(draw: Draw) -> None:
    # Nearly equal logits: 90 % of the weight is 900 of 1000 tokens.
    values = logits(1, spread=1e-3)
    expected = warped(values[0], {"top_p": 0.9})
    rows = [row((seed, 0, 0), top_p=0.9) for seed in range(3000)]
    found = set(draw(values.expand(3000, -1), rows))
    kept = set(np.flatnonzero(expected))
    assert found <= kept
    assert len(found) > 0.9 * len(kept)


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}]
)
def test_ids_without_a_token_are_never_drawn(draw: Draw, params: dict[str, Any]) -> None:
    # BG-11: the head is padded to more rows than the tokenizer has ids; even a bias cannot reach them.
    values = logits(1)
    values[0, 996:] = 50.0
    for seed in range(50):
        token = draw(values, [row((seed, 0, 0), **params, logit_bias={998: 100.0})], vocab_size=996)[0]
        assert token < 996
    assert draw(values, [row(temperature=0, logit_bias={995: 100.0})], vocab_size=996) == [995]


class TestHoldingBack:
    """BG-13: exactly min_tokens other tokens come first, whatever would stop."""

    @pytest.mark.parametrize("stop_ids", [[2], [2, 0], [2, 5, 0]])
    def test_every_stop_id_is_held_back_until_min_tokens(self, draw: Draw, stop_ids: list[int]) -> None:
        values = logits(1)
        params: dict[str, Any] = {
            "temperature": 0,
            "min_tokens": 4,
            "logit_bias": dict.fromkeys(stop_ids, 100.0),
        }
        for generated in range(4):
            assert draw(values, [row(generated=generated, stop_ids=stop_ids, **params)])[0] not in stop_ids
        assert draw(values, [row(generated=4, stop_ids=stop_ids, **params)])[0] in stop_ids

    def test_only_the_row_that_asks(self, draw: Draw) -> None:
        values = logits(1)
        best = int(values.argmax())
        rows = [row(temperature=0, min_tokens=1, stop_ids=[best]), row(temperature=0, stop_ids=[best])]
        held, free = draw(values.expand(2, -1).clone(), rows)
        assert held != best
        assert free == best

    def test_stop_ids_past_the_vocabulary_do_no_harm(self, draw: Draw) -> None:
        values = logits(1)
        assert draw(values, [row(temperature=0, min_tokens=1, stop_ids=[VOCAB + 3])]) == [
            int(values.argmax())
        ]


def test_a_bias_moves_one_row(draw: Draw) -> None:
    values = logits(2)
    moved, plain = draw(values, [row(temperature=0, logit_bias={7: 100.0}), row(temperature=0)])
    assert moved == 7
    assert plain == int(values[1].argmax())
    away = draw(
        values, [row(temperature=0, logit_bias={int(values[0].argmax()): -100.0}), row(temperature=0)]
    )[0]
    assert away == int(values[0].topk(2).indices[1])


def test_nothing_possible_is_no_token(draw: Draw) -> None:
    values = torch.full((1, 8), float("-inf"))
    assert draw(values, [row(temperature=1.0)]) == [None]


def test_rules_that_leave_no_token_are_a_failure_of_their_row(kernels: Kernels) -> None:
    values = logits(4)
    values[2, 5] = float("nan")
    held = {"min_tokens": 1, "allowed_token_ids": [5, 6]}
    rows = [row(), row(stop_ids=[5, 6], **held), row(stop_ids=[6], **held), row(stop_ids=[5], **held)]
    drawn = Sampler(kernels, VOCAB).draw(values, rows, {})
    assert drawn.failures == {1: ALL_HELD_BACK}
    assert [token is None for token in drawn.token_ids] == [False, True, True, False]
    assert drawn.token_ids[3] == 6


class TestRandomStream:
    def test_a_function_of_the_key_alone(self) -> None:
        assert uniform(3, 1, 7) == uniform(3, 1, 7)
        keys = [
            (seed, sample, position) for seed in range(12) for sample in range(12) for position in range(12)
        ]
        assert len({uniform(*key) for key in keys}) == len(keys)
        assert all(0 <= uniform(*key) < 1 for key in keys)

    def test_many_at_once_are_each_by_itself(self) -> None:
        keys = [(-1, 0, 0), (2**64 - 1, 3, 9), (0, 0, 0), (2**63, 7, 2**31), (5, 1, 2)]
        assert uniforms(keys).tolist() == [uniform(*key) for key in keys]

    def test_any_seed_of_64_bits(self) -> None:
        assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
        assert uniform(2**63, 0, 0) != uniform(0, 0, 0)

    @pytest.mark.parametrize("vary", [0, 1, 2])
    def test_evenly_spread_along_each_part_of_the_key(self, vary: int) -> None:
        values = []
        for number in range(5000):
            key = [5, 0, 0]
            key[vary] = number
            values.append(uniform(key[0], key[1], key[2]))
        # Kolmogorov and Smirnov's distance; 1.95 / sqrt(n) is exceeded once in a thousand times.
        distance = np.abs(np.sort(values) - np.arange(5000) / 5000).max()
        assert distance < 1.95 / 5000**0.5
        # Neighbouring counters are not alike either.
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05


def test_a_nucleus_ends_exactly_where_its_share_is_reached(draw: Draw) -> None:
    values = torch.full((1, 8), float("-inf"))
    values[0, [6, 1, 4, 3]] = 2.0
    # Four equal tokens: half of the weight is two of them, and of equals the lower ids.
    assert {draw(values, [row((seed, 0, 0), top_p=0.5)])[0] for seed in range(60)} == {1, 3}
    assert {draw(values, [row((seed, 0, 0), top_p=0.51)])[0] for seed in range(60)} == {1, 3, 4}
