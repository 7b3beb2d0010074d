"""Rounding by groups: the C kernel against plain torch, the grids against other libraries, what it costs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from batchgen.kernels.cpu.library import Library, load
from batchgen.kernels.cpu.round_groups import by_kernel
from batchgen.kernels.reference.round_groups import by_torch
from batchgen.kernels.rounding import Grid, Groups, round_groups
from batchgen.quantization.rounding import Recipe
from batchgen.quantization.seen_inputs import seen_inputs

KINDS = [Grid("least", 4), Grid("zero", 4), Grid("symmetric", 4), Grid("symmetric", 8), Grid("e4m3", 8)]
each_grid = pytest.mark.parametrize("grid", KINDS, ids=lambda grid: f"{grid.kind}{grid.bits}")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decoded(values: Tensor, groups: Groups, grid: Grid) -> Tensor:
    of_input = groups.of_input
    if of_input is None:
        of_input = torch.arange(values.shape[1]) // groups.size
    scale, offset = groups.scale[:, of_input.long()], groups.offset[:, of_input.long()]
    if grid.kind == "e4m3":
        return values * scale
    return values * scale + offset if grid.kind == "least" else (values - offset) * scale


def by_either(
    rounds: Callable[..., object], weight: Tensor, grid: Grid, counts: Tensor, size: int,
    factor: Tensor | None = None, block: int = 64,
) -> tuple[Tensor, Groups]:  # fmt: skip
    values = weight.clone()
    count = -(-weight.shape[1] // size)
    groups = Groups(torch.empty(len(weight), count), torch.empty(len(weight), count), size)
    rounds(values, grid, counts, groups, factor, block, True)
    return values, groups


def lower_factor(inputs: int) -> Tensor:
    """Of inputs that go together."""
    x = random(400, inputs) @ random(inputs, inputs, seed=1) * 0.2 + random(400, inputs, seed=2)
    return seen_inputs(x, group_size=1, most=inputs, damping=0.01)[0].factor


@pytest.mark.parametrize(
    ("rows", "inputs", "size", "block", "takes_back"),
    [
        (37, 96, 32, 64, False),
        (37, 96, 32, 64, True),
        (5, 200, 200, 64, False),  # one group for all is searched before errors are taken back
        (16, 144, 48, 48, False),
        (16, 144, 48, 48, True),
    ],
)
@each_grid
def test_the_kernel_rounds_as_plain_torch(
    grid: Grid, rows: int, inputs: int, size: int, block: int, takes_back: bool
) -> None:
    if not isinstance(load(), Library):
        pytest.skip("no C kernels")
    weight, counts = random(rows, inputs) * 0.3, random(inputs, seed=3).abs() + 0.1
    factor = lower_factor(inputs) if takes_back else None
    ours, our_groups = by_either(by_kernel, weight, grid, counts, size, factor, block)
    plain, plain_groups = by_either(by_torch, weight, grid, counts, size, factor, block)
    # A weight in the middle between two values may fall to either side, and then others follow.
    assert float((ours != plain).float().mean()) < (0.05 if takes_back else 0.01)
    errors = [
        float(((decoded(*each, grid) - weight).square() * counts).sum())
        for each in ((ours, our_groups), (plain, plain_groups))
    ]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


@each_grid
def test_a_row_has_the_same_bits_alone_and_with_any_number_of_threads(grid: Grid) -> None:
    weight, counts, factor = random(50, 128), torch.ones(128), lower_factor(128)
    together, alone = weight.clone(), weight[13:14].clone()
    groups = round_groups(together, grid, counts, 64, factor=factor)
    of_one = round_groups(alone, grid, counts, 64, factor=factor)
    assert torch.equal(together[13:14], alone)
    assert torch.equal(groups.scale[13:14], of_one.scale)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        single = weight.clone()
        round_groups(single, grid, counts, 64, factor=factor)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together, single)


def test_floats_of_8_bits_are_those_of_torch() -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= 448)].view(-1, 1)
    known = Groups(torch.ones(len(numbers), 1), torch.zeros(len(numbers), 1), 1)
    found = numbers.clone()
    round_groups(found, Grid("e4m3", 8), torch.ones(1), 1, groups=known)
    assert torch.equal(found, numbers.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("kind", ["least", "zero", "symmetric"])
def test_weights_that_lie_on_the_grid_stay_what_they_are(kind: str) -> None:
    codes = torch.randint(0, 16, (20, 128), generator=torch.Generator().manual_seed(0)).float()
    codes[:, ::32], codes[:, 1::32] = 0.0, 15.0
    scale = 2.0 ** torch.randint(-9, -2, (20, 4), generator=torch.Generator().manual_seed(1)).float()
    offset = {"least": -3.0 * scale, "zero": torch.full_like(scale, 5.0)}.get(
        kind, torch.full_like(scale, 8.0)
    )
    grid = Grid(kind, 4)
    weight = decoded(codes, Groups(scale, offset, 32), grid)
    values = weight.clone()
    groups = round_groups(values, grid, torch.ones(128), 32)
    torch.testing.assert_close(decoded(values, groups, grid), weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("kind", ["least", "zero", "symmetric"])
def test_searched_scales_beat_rounding_to_the_nearest_of_the_whole_range(kind: str, size: int) -> None:
    weight = random(200, 256)
    grid = Grid(kind, 4)
    values = weight.clone()
    error = (
        (decoded(values, round_groups(values, grid, torch.ones(256), size), grid) - weight).square().mean()
    )
    groups = weight.unflatten(1, (-1, size))
    if kind == "symmetric":
        scale = groups.abs().amax(dim=2, keepdim=True) / 7
        nearest = (groups / scale).round().clamp(-8, 7) * scale
    else:
        low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
        scale = (high - low) / 15
        least = low if kind == "least" else (low / scale).round() * scale
        nearest = ((groups - least) / scale).round().clamp(0, 15) * scale + least
    assert error < {"zero": 0.94}.get(kind, 0.88) * (nearest - groups).square().mean()


def test_a_group_of_equal_weights_and_one_of_zeros_are_kept() -> None:
    for grid in KINDS:
        weight = torch.zeros(3, 64)
        weight[1] = 0.25
        values = weight.clone()
        found = decoded(values, round_groups(values, grid, torch.ones(64), 32), grid)
        torch.testing.assert_close(found, weight, rtol=2e-3, atol=0)


@pytest.mark.parametrize("size", [32, -1])
@pytest.mark.parametrize("grid", [Grid("least", 4), Grid("e4m3", 8, torch.float32)], ids=["int4", "fp8"])
def test_errors_are_taken_back_where_inputs_go_together(grid: Grid, size: int) -> None:
    mixing = random(160, 160, seed=4) / 160**0.5
    x = random(3000, 160, seed=5) @ mixing + 0.3 * random(3000, 160, seed=6)
    weight = random(64, 160, seed=7)
    recipe = Recipe(grid, size)
    group = recipe.group_inputs(160)
    errors = []
    for seen in (
        None,
        seen_inputs(x, group_size=group, most=64, damping=0.01),
        seen_inputs(x, group_size=group, most=512, damping=0.01),
    ):
        found = recipe.rounded(weight, seen).coded().dense()
        errors.append(float((x @ (found - weight).T).square().mean()))
    assert errors[1] < 0.92 * errors[0]
    assert errors[2] < 0.95 * errors[1]


def test_the_factor_is_the_best_way_to_take_an_error_back() -> None:
    x = random(500, 24, seed=1) @ random(24, 24, seed=2)
    squares = x.double().T @ x.double() / 500
    squares += torch.diag(0.01 * squares.diagonal() + 1e-4 * squares.diagonal().mean())
    seen = seen_inputs(x, group_size=1, most=24, damping=0.01)[0]
    for k in (0, 7, 22):
        rest = slice(k + 1, 24)
        best = torch.linalg.solve(squares[rest, rest], squares[rest, k])
        torch.testing.assert_close(seen.factor[rest, k].double(), best, rtol=1e-3, atol=1e-4)
        left = squares[k, k] - squares[k, rest] @ best
        ratio = float(seen.counts[k] / seen.counts[23] * squares[23, 23])
        assert ratio == pytest.approx(float(left), rel=1e-3)
