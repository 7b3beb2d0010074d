"""The linear layer of every backend against float64, and the same bits for any number of rows."""

import pytest
import torch

from batchgen.errors import KernelError, ShapeError
from batchgen.kernels.cases import TOLERANCE, relative_rms


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13, 64, 100])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (33, 5), (576, 100), (1, 31), (1537, 33)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_the_reference(rows, inputs, outputs, has_bias, make_kernels):
    kernels = make_kernels()
    weight, bias, x = _draw(outputs, inputs), _draw(outputs, seed=1), _draw(rows, inputs, seed=2)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    packed = kernels.pack_linear(weight.clone(), bias if has_bias else None)
    assert (packed.in_features, packed.out_features) == (inputs, outputs)
    assert relative_rms(kernels.linear(x, packed), expected) < TOLERANCE["float32"]


@pytest.mark.parametrize("is_packed", [False, True])
def test_rows_of_a_table_or_a_weight(make_kernels, num_threads, is_packed):
    kernels, weight = make_kernels(), _draw(70, 40)
    source = kernels.pack_linear(weight.clone()) if is_packed else weight.clone()
    ids = torch.tensor([69, 0, 31, 32, 33, 69, 1, 2, 3, 4, 5])
    assert torch.equal(kernels.gather_rows(source, ids), weight[ids])
    assert kernels.gather_rows(source, ids[:0]).shape == (0, 40)
    out = torch.full((11, 40), float("nan"))
    assert kernels.gather_rows(source, ids, out) is out
    assert torch.equal(out, weight[ids])
    many = torch.arange(70).repeat(50)
    assert torch.equal(kernels.gather_rows(source, many), weight[many])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("wrong", [70, -1])
def test_row_outside_of_the_weight_is_an_error(make_kernels, is_packed, wrong):
    kernels, weight = make_kernels(), _draw(70, 40)
    source = kernels.pack_linear(weight) if is_packed else weight
    with pytest.raises(KernelError, match="gather_rows: an id is outside of the 70 rows"):
        kernels.gather_rows(source, torch.tensor([3, wrong, 0]))


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 96), (1600, 40), (65, 17)])
def test_same_bits_for_any_number_of_rows_and_threads(inputs, outputs, make_invariant_kernels, num_threads):
    kernels = make_invariant_kernels()
    packed, x = (
        kernels.pack_linear(_draw(outputs, inputs), _draw(outputs, seed=1)),
        _draw(131, inputs, seed=2),
    )
    torch.set_num_threads(1)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(131)])
    torch.set_num_threads(num_threads)
    for rows in (1, 2, 3, 6, 7, 12, 13, 25, 64, 131):
        assert torch.equal(kernels.linear(x[:rows], packed), alone[:rows]), f"{rows} rows"
        assert torch.equal(kernels.linear(x[131 - rows :], packed), alone[131 - rows :]), f"last {rows} rows"


def test_rows_may_be_strided_and_result_goes_to_out(make_kernels):
    kernels = make_kernels()
    packed, wide = kernels.pack_linear(_draw(48, 32)), _draw(9, 100)
    expected = kernels.linear(wide[:, 10:42].contiguous(), packed)
    out = torch.full((9, 48), float("nan"))
    assert kernels.linear(wide[:, 10:42], packed, out) is out
    assert relative_rms(out, expected) < TOLERANCE["float32"]


def test_no_rows(make_kernels):
    kernels = make_kernels()
    packed = kernels.pack_linear(_draw(48, 32))
    assert kernels.linear(torch.empty(0, 32), packed).shape == (0, 48)


def test_not_a_number_stays_in_its_row(make_kernels):
    kernels = make_kernels()
    packed, x = kernels.pack_linear(_draw(48, 32)), _draw(5, 32)
    x[2] = float("nan")
    is_nan = kernels.linear(x, packed).isnan()
    assert is_nan[2].all()
    assert not is_nan[[0, 1, 3, 4]].any()


def test_wrong_shapes_are_refused(make_kernels):
    kernels = make_kernels()
    packed = kernels.pack_linear(_draw(48, 32))
    for x in (_draw(2, 31), _draw(32), _draw(32, 2).T, _draw(2, 32).double()):
        with pytest.raises(ShapeError, match="48, 32"):
            kernels.linear(x, packed)
    with pytest.raises(ShapeError, match="out"):
        kernels.linear(_draw(2, 32), packed, torch.empty(2, 47))
    with pytest.raises(ShapeError, match="pack_linear"):
        kernels.pack_linear(_draw(48, 32), _draw(47))
