"""Draws, scores and penalties of every backend against the reference in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.errors import KernelError, ShapeError
from batchgen.kernels.ops import Kernels, choose
from batchgen.kernels.sampling import Draws, Penalties

NEVER = float("-inf")


def logits(rows: int, width: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * spread


def draws(rows: int, u: Any = 0.5, replaced: bool = False, **ways: float) -> Draws:
    def column(name: str, default: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full((rows,), ways.get(name, default)).to(dtype)

    return Draws(
        temperature=column("temperature", 1.0),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0),
        min_p=column("min_p", 0.0),
        uniform=torch.as_tensor(u, dtype=torch.float64).expand(rows).contiguous(),
        is_replaced=torch.full((rows,), replaced) if replaced else None,
    )


def mixed(rows: int, seed: int) -> Draws:
    draw = np.random.default_rng(seed)
    return Draws(
        temperature=torch.tensor(draw.choice([0.0, 0.01, 0.5, 1.0, 1.7, 100.0], rows)),
        top_k=torch.tensor(draw.choice([0, 0, 1, 5, 50, 1000, 10**9], rows)),
        top_p=torch.tensor(draw.choice([1.0, 1.0, 0.9, 0.5, 0.999, 1e-9], rows)),
        min_p=torch.tensor(draw.choice([0.0, 0.0, 0.05, 0.5, 1.0], rows)),
        uniform=torch.tensor(draw.random(rows)),
        is_replaced=torch.tensor(draw.random(rows) < 0.5),
    )


def row_of(given: Draws, row: int) -> Draws:
    return Draws(
        **{
            name: None if (value := getattr(given, name)) is None else value[row : row + 1].clone()
            for name in Draws.__slots__
        }
    )


@pytest.fixture
def truth() -> Kernels:
    return choose("cpu", "float32", backend="reference", head_dim=64)


@pytest.mark.parametrize("width", [1, 5, 128, 129, 1000, 5000])
@pytest.mark.parametrize("spread", [0.5, 3.0, 9.0])
def test_sample(width: int, spread: float, make_kernels, truth) -> None:
    values, ways = logits(96, width, seed=width, spread=spread), mixed(96, seed=width)
    expected, found = values.clone(), values.clone()
    assert torch.equal(make_kernels().sample(found, ways), truth.sample(expected, ways))
    # What was drawn from: the same tokens left out, the same scores.
    assert torch.equal(found == NEVER, expected == NEVER)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    untouched = ~ways.is_replaced | (ways.temperature == 0)
    assert torch.equal(found[untouched], values[untouched])


@pytest.mark.parametrize(
    "way",
    [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8, "temperature": 1.5}],
    ids=str,
)
def test_every_token_has_its_share_of_the_unit_interval(way: dict[str, float], make_kernels, truth) -> None:
    values, count = logits(1, 40, seed=5, spread=1.5), 4000
    kept = values.clone()
    truth.sample(kept, draws(1, replaced=True, **way))
    us = (torch.arange(count) + 0.5) / count
    tokens = make_kernels().sample(values.expand(count, -1).clone(), draws(count, us, **way))
    # In the order of ids, and as long as it is likely.
    assert torch.equal(tokens.sort().values, tokens)
    share = np.bincount(tokens.numpy(), minlength=40) / count
    np.testing.assert_allclose(share, kept[0].double().softmax(0).numpy(), atol=6e-4)


def test_the_largest_of_equal_ones_is_the_lowest_id(make_kernels) -> None:
    values = torch.zeros(3, 600)
    values[0, [599, 17, 400]] = 5.0
    values[2, 599] = 1.0
    assert make_kernels().sample(values, draws(3, temperature=0)).tolist() == [17, 0, 599]


@pytest.mark.parametrize(
    "way", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str
)
@pytest.mark.parametrize("place", [0, 40, 130, 299])
def test_nothing_to_draw_from(way: dict[str, float], place: int, make_kernels) -> None:
    values = logits(5, 300)
    values[1, place] = float("nan")
    values[2, place] = float("inf")
    values[3] = NEVER
    tokens = make_kernels().sample(values, draws(5, **way)).tolist()
    assert tokens[1:4] == [-1, -1, -1]
    assert min(tokens[0], tokens[4]) >= 0


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("way", [{}, {"top_k": 5000}, {"top_p": 0.999}, {"min_p": 1e-30}], ids=str)
def test_the_ends_of_the_interval_fall_on_tokens_that_can_be_drawn(
    u: float, way: dict[str, float], make_kernels
) -> None:
    values = torch.full((1, 3000), NEVER)
    values[0, 700:2000] = logits(1, 1300, spread=8.0)[0]
    token = int(make_kernels().sample(values.clone(), draws(1, u, **way))[0])
    assert values[0, token] > NEVER


def test_a_nucleus_of_equal_tokens_keeps_the_lowest_ids(make_kernels) -> None:
    values = torch.full((1, 8), NEVER)
    values[0, [6, 1, 4, 3]] = 2.0
    us = torch.linspace(0, 0.999, 60)

    def found(top_p: float) -> set[int]:
        many = values.expand(60, -1).clone()
        return set(make_kernels().sample(many, draws(60, us, top_p=top_p)).tolist())

    assert found(0.5) == {1, 3}
    assert found(0.51) == {1, 3, 4}
    assert found(1e-9) == {1}


def test_a_nucleus_of_nearly_all_tokens(make_kernels, truth) -> None:
    values = logits(1, 5000, spread=1e-3)
    expected, found = values.clone(), values.clone()
    way = draws(1, replaced=True, top_p=0.9)
    truth.sample(expected, way)
    make_kernels().sample(found, way)
    kept, right = (found > NEVER).sum().item(), (expected > NEVER).sum().item()
    assert abs(kept - right) <= 1
    assert 4400 < kept < 4600


def test_no_order_of_values_is_slow(make_kernels) -> None:
    # Selections that pick a bad pivot each time would take the square of this width.
    ramp = torch.linspace(0, 1e-3, 60000)
    for values in (ramp, ramp.flip(0), torch.cat([ramp[::2], ramp[1::2].flip(0)]), torch.zeros(60000)):
        rows = values.expand(4, -1).clone()
        make_kernels().sample(rows, draws(4, top_k=30000, top_p=0.7))


def test_same_bits_in_any_batch(make_invariant_kernels, num_threads) -> None:
    # Enough for several threads.
    kernels, values, ways = make_invariant_kernels(), logits(60, 2500, seed=3), mixed(60, seed=4)
    together = values.clone()
    tokens = kernels.sample(together, ways)
    numbers = torch.tensor([row % 40 for row in range(60)])
    scores = kernels.score_tokens(values, tokens[:, None], numbers)
    for row in range(60):
        alone = values[row : row + 1].clone()
        assert kernels.sample(alone, row_of(ways, row)).item() == tokens[row]
        assert torch.equal(alone[0], together[row])
        one = kernels.score_tokens(values[row : row + 1], tokens[row : row + 1, None], numbers[row : row + 1])
        assert one.log_total[0] == scores.log_total[row]
        assert torch.equal(one.top_ids[0], scores.top_ids[row, : row % 40])


@pytest.mark.parametrize("width", [1, 7, 128, 300, 5000])
def test_score_tokens(width: int, make_kernels, truth) -> None:
    values = (logits(40, width, seed=width) * 4).round() / 4  # many equal ones
    draw = np.random.default_rng(width)
    numbers = torch.tensor(draw.integers(0, min(width, 300) + 1, 40))
    tokens = torch.tensor(draw.integers(-1, width, (40, 3)))
    expected, found = (each.score_tokens(values, tokens, numbers) for each in (truth, make_kernels()))
    torch.testing.assert_close(found.log_total, expected.log_total, rtol=0, atol=1e-6)
    assert torch.equal(found.ranks, expected.ranks)
    assert torch.equal(found.values.isnan(), tokens < 0)
    assert torch.equal(found.values.nan_to_num(0), expected.values.nan_to_num(0))
    for row, number in enumerate(numbers.tolist()):
        assert torch.equal(found.top_ids[row, :number], expected.top_ids[row, :number])
        assert torch.equal(found.top_values[row, :number], expected.top_values[row, :number])


def test_scores_by_hand(make_kernels) -> None:
    values = torch.tensor([[0.0, math.log(3.0), NEVER, 0.0]])
    scores = make_kernels().score_tokens(values, torch.tensor([[1, 3, 2]]), torch.tensor([4]))
    assert scores.log_total.item() == pytest.approx(math.log(5.0), abs=1e-7)
    assert scores.ranks.tolist() == [[1, 2, 4]]
    assert scores.top_ids.tolist() == [[1, 0, 3, 2]]


def test_scores_of_a_row_that_overflowed(make_kernels) -> None:
    values = logits(3, 200)
    values[1, 60] = float("nan")
    scores = make_kernels().score_tokens(
        values, torch.zeros(3, 1, dtype=torch.int64), torch.tensor([2, 2, 2])
    )
    assert scores.log_total.isnan().tolist() == [False, True, False]


def penalties(**given: Any) -> Penalties:
    ones = torch.ones(len(given["rows"]), dtype=torch.float64)
    kinds = {"tokens": torch.int32, "rows": torch.int64, "starts": torch.int64, "num_prompt": torch.int64}
    values = {"repetition": ones, "frequency": ones * 0, "presence": ones * 0, **given}
    return Penalties(
        **{
            name: torch.as_tensor(value, dtype=kinds.get(name, torch.float64))
            for name, value in values.items()
        }
    )


def test_penalties_by_hand(make_kernels) -> None:
    values = torch.tensor([[9.0, 9.0], [4.0, -4.0], [1.0, 2.0]])
    make_kernels().penalise(
        values,
        # Token 0 stands in the prompt and is drawn twice; token 1 only in the prompt.
        penalties(rows=[1], tokens=[0, 1, 0, 0], starts=[0, 4], num_prompt=[2], repetition=[2.0],
                  frequency=[0.25], presence=[1.0]),
    )  # fmt: skip
    assert values.tolist() == [[9.0, 9.0], [2.0 - 0.5 - 1.0, -8.0], [1.0, 2.0]]


@pytest.mark.parametrize("width", [5, 1000])
def test_penalise(width: int, make_kernels, truth, num_threads) -> None:
    draw, values = np.random.default_rng(width), logits(50, width)
    lengths = draw.integers(0, 3000, 40)
    given = penalties(
        rows=draw.permutation(50)[:40], tokens=draw.integers(-1, width + 2, lengths.sum()),
        starts=np.concatenate([[0], lengths.cumsum()]), num_prompt=lengths // 2,
        repetition=draw.choice([0.7, 1.0, 1.3], 40), frequency=draw.choice([0, 0.5, -1.0], 40),
        presence=draw.choice([0, 0.5, -1.0], 40),
    )  # fmt: skip
    expected, found = values.clone(), values.clone()
    truth.penalise(expected, given)
    make_kernels().penalise(found, given)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_what_does_not_fit_is_refused(make_kernels) -> None:
    kernels, values, none = make_kernels(), logits(2, 10), torch.tensor([0, 0])
    with pytest.raises(ShapeError, match="float32"):
        kernels.sample(values.double(), draws(2))
    with pytest.raises(ShapeError, match="temperature must be"):
        kernels.sample(values, draws(3))
    with pytest.raises(KernelError, match="outside of the 10 logits"):
        kernels.score_tokens(values, torch.tensor([[10], [0]]), none)
    with pytest.raises(KernelError, match="num_top must be 0 to 10"):
        kernels.score_tokens(values, torch.zeros(2, 0, dtype=torch.int64), none + 11)
    with pytest.raises(KernelError, match="a row is outside of the 2"):
        kernels.penalise(values, penalties(rows=[2], tokens=[1], starts=[0, 1], num_prompt=[0]))
    with pytest.raises(KernelError, match="starts must run"):
        kernels.penalise(values, penalties(rows=[1], tokens=[1], starts=[0, 2], num_prompt=[0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_what_a_cpu_gives(truth) -> None:
    kernels = choose("cuda", "float16", head_dim=64)
    values, ways = logits(64, 5000, seed=8), mixed(64, seed=8)
    expected, found = values.clone(), values.cuda()
    assert torch.equal(kernels.sample(found, ways), truth.sample(expected, ways))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=0)
    asked, numbers = torch.tensor([[7, -1]] * 64), torch.tensor([9] * 64)
    told, right = (
        kernels.score_tokens(values.cuda(), asked, numbers),
        truth.score_tokens(values, asked, numbers),
    )
    assert torch.equal(told.top_ids, right.top_ids)
    assert torch.equal(told.ranks, right.ranks)
    torch.testing.assert_close(told.log_total, right.log_total)
    given = penalties(rows=[3, 60], tokens=[1, 1, 4999, 2], starts=[0, 3, 4], num_prompt=[1, 0],
                      repetition=[1.5, 0.5], frequency=[1.0, 0.0], presence=[0.0, 2.0])  # fmt: skip
    expected, found = values.clone(), values.cuda()
    truth.penalise(expected, given)
    kernels.penalise(found, given)
    torch.testing.assert_close(found.cpu(), expected)
