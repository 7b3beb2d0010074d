"""The largest result of a linear layer: what a greedy draw takes from its results, without writing them."""

import pytest
import torch
from torch import Tensor

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
