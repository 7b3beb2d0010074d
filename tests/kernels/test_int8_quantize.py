"""Activations rounded to integers: values and scales are the reference's, alone and behind norm and gate."""

import math

import pytest
import torch

from batchgen.errors import ShapeError
from batchgen.kernels.ops import Quantized, choose

NAN, INF = float("nan"), float("inf")


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _quantize(kernels, x: torch.Tensor, bits: int) -> Quantized:
    out = Quantized.empty(x.shape[0], x.shape[1], bits)
    out.values.fill_(99)
    assert kernels.quantize(x, out) is out
    return out


def _same(a: Quantized, b: Quantized) -> bool:
    return a.values.numpy().tobytes() == b.values.numpy().tobytes() and torch.equal(
        a.scale.nan_to_num(-1.0), b.scale.nan_to_num(-1.0)
    )


def test_reference_by_hand():
    kernels = choose("cpu", "float32", backend="reference", head_dim=64)
    x = torch.tensor([[127.0, -127.0, 2.5, 3.5, -0.5, 1.4], [0.0] * 6, [1.0, NAN, 2.0, 3.0, 4.0, 5.0]])
    got = _quantize(kernels, x, 8)
    assert got.integers().tolist() == [[127, -127, 2, 4, 0, 1], [0] * 6, [0] * 6]
    assert got.scale[:2].tolist() == [1.0, 0.0]
    assert math.isnan(got.scale[2])
    wide = _quantize(kernels, torch.tensor([[32767.0, -32767.0, -1.0, 255.0, 256.0, -257.0]]), 16)
    assert wide.integers().tolist() == [[32767, -32767, -1, 255, 256, -257]]
    assert wide.values[0, 0, :6].tolist() == [127, -128, -1, 0, 1, -2]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("width", [1, 63, 64, 65, 576, 1000])
def test_is_the_reference_to_the_bit(width, bits, int8_kernels, num_threads):
    x = _draw(70, width) * torch.logspace(-45, 37, 70)[:, None]
    x[3], x[4] = 0.0, 1e-40
    x[5, 0], x[6, -1], x[7, width // 2] = NAN, INF, -INF
    got = _quantize(int8_kernels, x, bits)
    expected = _quantize(choose("cpu", "float32", backend="reference", head_dim=64), x, bits)
    assert _same(got, expected)
    assert (got.values[:, :, width:] == 0).all()
    assert got.scale.isnan().nonzero().flatten().tolist() == [5, 6, 7]
    fine = (x.abs().amax(dim=1) > 1e-30) & x.isfinite().all(dim=1)
    error = (got.dense() - x).abs()[fine] / got.scale[fine, None]
    assert error.max() < {8: 0.5001, 16: 0.51}[bits]


@pytest.mark.parametrize("bits", [8, 16])
def test_ties_go_to_the_even_number(bits, int8_kernels):
    top = {8: 127.0, 16: 32767.0}[bits]
    x = torch.tensor([[top, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 99.5]])
    assert _quantize(int8_kernels, x, bits).integers()[0, 1:].tolist() == [0, 2, 2, 0, -2, -2, 100]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("width", [33, 64, 576])
def test_norm_and_gate_quantize_what_they_would_have_written(width, bits, int8_kernels, num_threads):
    kernels, weight = int8_kernels, _draw(width, seed=1)
    x, residual = _draw(50, 2 * width, seed=2), _draw(50, width, seed=3)
    x[7, 2] = NAN
    half = x[:, :width]
    out = Quantized.empty(50, width, bits)
    assert kernels.rms_norm(half, weight, 1e-5, out) is out
    assert _same(out, _quantize(kernels, kernels.rms_norm(half, weight, 1e-5), bits))
    other = residual.clone()
    normed, summed = kernels.add_rms_norm(half, residual, weight, 1e-5, Quantized.empty(50, width, bits))
    expected, expected_sum = kernels.add_rms_norm(half, other, weight, 1e-5)
    assert summed is residual
    assert torch.equal(summed.nan_to_num(9.0), expected_sum.nan_to_num(9.0))
    assert _same(normed, _quantize(kernels, expected, bits))
    gated = kernels.silu_mul(x, Quantized.empty(50, width, bits))
    assert _same(gated, _quantize(kernels, kernels.silu_mul(x), bits))
    assert gated.scale.isnan().nonzero().flatten().tolist() == [7]


def test_rows_do_not_depend_on_each_other(int8_kernels):
    x, weight = _draw(40, 100), _draw(50)
    whole = int8_kernels.silu_mul(x, Quantized.empty(40, 50, 8))
    normed = int8_kernels.rms_norm(x[:, :50], weight, 1e-6, Quantized.empty(40, 50, 8))
    for row in range(40):
        one = slice(row, row + 1)
        assert _same(int8_kernels.silu_mul(x[one], Quantized.empty(1, 50, 8)), whole[one])
        alone = int8_kernels.rms_norm(x[one, :50], weight, 1e-6, Quantized.empty(1, 50, 8))
        assert _same(alone, normed[one])


@pytest.mark.parametrize("width", [1, 33, 64, 576])
def test_what_rounding_loses_of_a_product(width, int8_kernels, num_threads):
    weight, mean = _draw(70, width) * torch.logspace(-6, 6, 70)[:, None], _draw(width, seed=1)
    weight[3] = 0.0
    rounded = _quantize(int8_kernels, weight, 8)
    lost = int8_kernels.rounding_loss(weight, rounded, mean)
    expected = (weight - rounded.dense()).double() @ mean.double()
    scale = (weight - rounded.dense()).double().abs() @ mean.double().abs()
    assert ((lost - expected).abs() <= 1e-6 * scale).all()
    assert torch.equal(int8_kernels.rounding_loss(weight[7:8], rounded[7:8], mean), lost[7:8])


def test_no_rows(int8_kernels):
    assert int8_kernels.quantize(torch.empty(0, 64), Quantized.empty(0, 64, 8)).shape == (0, 64)


def test_what_does_not_fit_is_refused(int8_kernels):
    x, weight = _draw(4, 64), torch.ones(64)
    short, narrow = Quantized.empty(3, 64, 8), Quantized.empty(4, 63, 8)
    for out in (short, narrow, Quantized(narrow.values.int(), narrow.scale, 64)):
        with pytest.raises(ShapeError, match="quantize"):
            int8_kernels.quantize(x, out)
        with pytest.raises(ShapeError, match="rms_norm"):
            int8_kernels.rms_norm(x, weight, 1e-5, out)
        with pytest.raises(ShapeError, match="silu_mul"):
            int8_kernels.silu_mul(torch.ones(4, 128), out)
    with pytest.raises(ShapeError, match="quantize"):
        int8_kernels.quantize(x.T, Quantized.empty(64, 4, 8))
    whole = _quantize(int8_kernels, x, 8)
    for given, rounded, mean in (
        (x, whole[:3], weight), (x, whole, weight[:63]), (x.T.contiguous().T, whole, weight),
        (x, _quantize(int8_kernels, x, 16), weight),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match="rounding_loss"):
            int8_kernels.rounding_loss(given, rounded, mean)
    with pytest.raises(ShapeError, match="rms_norm"):
        int8_kernels.rms_norm(x.view(4, 2, 32), weight[:32], 1e-5, Quantized.empty(4, 64, 8))
