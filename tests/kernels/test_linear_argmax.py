"""The largest result of a linear layer: what a greedy draw takes from its results, without writing them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from batchgen.kernels.cpu.screen import Screen
from batchgen.kernels.ops import Kernels, PackedLinear, choose
from batchgen.kernels.quantized import Quantized
from batchgen.kernels.sampling import Draws

WIDTH = 70


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found = choose("cpu", "float32", head_dim=16)
    if found.choices["linear"].backend != "cpu":
        pytest.skip("no C kernels")
    return found


@pytest.fixture
def heads(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Kernels that look for the largest result among those that integers leave, whatever that costs here."""
    monkeypatch.setattr(Screen, "pays", lambda library: True)
    return kernels


def greedy(kernels: Kernels, logits: Tensor) -> list[int]:
    rows = len(logits)
    nothing = torch.zeros(rows, dtype=torch.float64)
    draws = Draws(
        temperature=nothing, top_k=torch.zeros(rows, dtype=torch.int64), top_p=nothing + 1, min_p=nothing,
        uniform=nothing,
    )  # fmt: skip
    return kernels.sample(logits, draws).tolist()


def product(
    kernels: Kernels, rows: int, columns: int, bits: int | None
) -> tuple[Tensor | Quantized, PackedLinear]:
    draw = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, WIDTH, generator=draw)
    if bits is None:
        return x, kernels.pack_linear(torch.randn(columns, WIDTH, generator=draw))
    weight = torch.randint(-127, 128, (columns, WIDTH), generator=draw, dtype=torch.int8)
    packed = kernels.pack_int8(weight, 0.001 * torch.rand(columns, generator=draw) + 0.0001)
    return kernels.quantize(x, Quantized.empty(rows, WIDTH, bits, torch.device("cpu"))), packed


@pytest.mark.parametrize("rows", [1, 3, 65, 130])
@pytest.mark.parametrize(("columns", "vocab"), [(40, 40), (1000, 1000), (1000, 701), (3001, 2999)])
@pytest.mark.parametrize("bits", [None, 8, 16])
def test_it_is_the_greedy_draw_from_the_results(
    kernels: Kernels, rows: int, columns: int, vocab: int, bits: int | None
) -> None:
    x, packed = product(kernels, rows, columns, bits)
    logits = kernels.linear(x, packed)
    found = kernels.linear_argmax(x, packed, vocab)
    assert found is not None
    assert found.tolist() == greedy(kernels, logits[:, :vocab]) == logits[:, :vocab].argmax(1).tolist()


def test_equal_results_and_rows_without_a_largest_one(kernels: Kernels) -> None:
    weight = torch.zeros(600, 4)
    weight[:, 0] = 1.0
    weight[[300, 599], 1] = 1.0
    weight[7, 2] = float("inf")
    packed = kernels.pack_linear(weight)
    x = torch.tensor(
        [[1.0, 0, 0, 0], [0, 5.0, 0, 0], [0, -1.0, 0, 0], [0, 0, 1.0, 0], [float("nan"), 0, 0, 0]]
    )
    x[:3, 2] = 0.0
    clean = kernels.pack_linear(weight.nan_to_num(posinf=0.0))
    found = kernels.linear_argmax(x[:3], clean, 600)
    assert found is not None and found.tolist() == [0, 300, 0]
    found = kernels.linear_argmax(x[3:], packed, 600)
    assert found is not None
    assert found.tolist() == greedy(kernels, kernels.linear(x[3:], packed)) == [-1, -1]


@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize(("columns", "vocab"), [(40, 40), (1000, 701), (3001, 2999)])
@pytest.mark.parametrize("bits", [None, 8, 16])
def test_a_draw_by_temperature_is_that_from_the_results(
    kernels: Kernels, rows: int, columns: int, vocab: int, bits: int | None
) -> None:
    x, packed = product(kernels, rows, columns, bits)
    draw = torch.Generator().manual_seed(columns)
    nothing = torch.zeros(rows, dtype=torch.float64)
    temperature = torch.tensor([0.0, 0.3, 1.0, 5.0, 100.0], dtype=torch.float64).repeat(rows)[:rows]
    logits = kernels.linear(x, packed)
    for _ in range(20):
        uniform = torch.rand(rows, generator=draw, dtype=torch.float64)
        draws = Draws(
            temperature=temperature, top_k=torch.zeros(rows, dtype=torch.int64), top_p=nothing + 1,
            min_p=nothing, uniform=uniform,
        )  # fmt: skip
        found = kernels.linear_draw(x, packed, vocab, temperature, uniform)
        assert found is not None
        assert found.tolist() == kernels.sample(logits[:, :vocab].contiguous(), draws).tolist()


def outliers(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, ::37] *= 3000.0
    return x


@pytest.mark.parametrize("rows", [1, 3, 65, 130])
@pytest.mark.parametrize(("columns", "vocab"), [(40, 40), (1000, 701), (3001, 2999)])
@pytest.mark.parametrize(
    "change",
    [
        lambda x, weight: (x, weight),
        lambda x, weight: (outliers(x), outliers(weight)),
        lambda x, weight: (x * 1e-30, weight),
        lambda x, weight: (x * 1e25, weight * 1e-35),
        # All results of a row within some units in the last place.
        lambda x, weight: (x, weight[:1] + 1e-7 * weight),
        lambda x, weight: (x, weight.round() * 0.01),
        lambda x, weight: (0 * x, weight),
        lambda x, weight: (x.abs(), -weight.abs()),
    ],
    ids=["normal", "outliers", "small", "large", "close", "equal", "zeros", "negative"],
)
def test_a_head_finds_the_largest_among_what_integers_leave(
    heads: Kernels,
    rows: int,
    columns: int,
    vocab: int,
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> None:
    draw = torch.Generator().manual_seed(rows + columns)
    x, weight = change(torch.randn(rows, WIDTH, generator=draw), torch.randn(columns, WIDTH, generator=draw))
    packed = heads.pack_linear(weight.clone(), is_head=True)
    assert len(packed.tensors()) > len(heads.pack_linear(weight.clone()).tensors())
    found = heads.linear_argmax(x, packed, vocab)
    assert found is not None
    logits = heads.linear(x, packed)[:, :vocab]
    assert found.tolist() == greedy(heads, logits.contiguous())


def test_a_head_with_results_that_are_no_numbers(heads: Kernels) -> None:
    weight, x = torch.randn(600, WIDTH), torch.randn(8, WIDTH)
    weight[300, 5], weight[301, 6] = float("inf"), float("nan")
    weight[302] = 1e-42
    x[:5, 5:7] = 0.0
    x[1], x[2, 9], x[3, 9] = 1e30, float("inf"), float("nan")
    for height in (x[:5], x[5:6], x[6:]):
        packed = heads.pack_linear(weight.clone(), is_head=True)
        found = heads.linear_argmax(height, packed, 600)
        assert found is not None
        assert found.tolist() == greedy(heads, heads.linear(height, packed))
    clean = heads.pack_linear(weight.nan_to_num(0.0, 0.0, 0.0), is_head=True)
    found = heads.linear_argmax(x, clean, 600)
    assert found is not None
    assert found.tolist() == greedy(heads, heads.linear(x, clean))
    assert (found >= 0).tolist() == [True, True, False, False, True, True, True, True]
