"""Linear layers on integers: every path of the C kernels is the reference to the bit, in any batch."""

import pytest
import torch

from batchgen.errors import KernelError, ShapeError
from batchgen.kernels.ops import Quantized, choose
from batchgen.kernels.program import StepSizes


def _integers(*shape: int, seed: int = 0, lowest: int = -127) -> torch.Tensor:
    draws = torch.randint(lowest, 128, shape, generator=torch.Generator().manual_seed(seed))
    return draws.to(torch.int8)


def _floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _activations(rows: int, width: int, bits: int, seed: int = 1) -> Quantized:
    """Any integers at all, the low bytes included."""
    x = Quantized.empty(rows, width, bits)
    x.values.zero_()
    x.values[:, :, :width] = _integers(rows, bits // 8, width, seed=seed, lowest=-128)
    x.scale.copy_(_floats(rows, seed=seed).abs())
    return x


def _reference():
    return choose("cpu", "float32", backend="reference", head_dim=64)


def _expected(x: Quantized, weight, scale, bias=None) -> torch.Tensor:
    kernels = _reference()
    return kernels.linear(x, kernels.pack_int8(weight, scale, bias))


@pytest.mark.parametrize("bits", [8, 16])
def test_reference_by_hand(bits):
    """Values (3, -4), or high bytes (-3, -4) and low bytes (0, 1), times weights (1, 2)."""
    x = Quantized.empty(1, 2, bits)
    x.values.zero_()
    x.values[0, :, :2] = torch.tensor([[3, -4]] if bits == 8 else [[-3, -4], [0, 1]])
    x.scale[0] = 0.5
    weight, scale = torch.tensor([[1, 2], [0, 0]], dtype=torch.int8), torch.tensor([2.0, 3.0])
    total = {8: -5.0, 16: -11 * 256 + 2.0}[bits]
    result = _expected(x, weight, scale, torch.tensor([-0.5, 0.25]))
    assert result.tolist() == [[total * 0.5 * 2.0 - 0.5, 0.25]]
    assert x.dense().tolist() == [{8: [1.5, -2.0], 16: [-384.0, 0.5 * -1023]}[bits]]


SHAPES = [(1, 1), (64, 16), (65, 17), (576, 33), (128, 100), (100, 64), (1536, 50)]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_paths_are_the_reference(inputs, outputs, bits, int8_kernels, one_thread):
    weight, scale, bias = _integers(outputs, inputs), _floats(outputs).abs(), _floats(outputs, seed=2)
    bare, biased = int8_kernels.pack_int8(weight, scale), int8_kernels.pack_int8(weight, scale, bias)
    for rows in (1, 3, 7, 16, 17, 33, 50, 270):
        x = _activations(rows, inputs, bits)
        assert torch.equal(int8_kernels.linear(x, bare), _expected(x, weight, scale)), rows
        assert torch.equal(int8_kernels.linear(x, biased), _expected(x, weight, scale, bias)), rows


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_values_do_not_saturate(sign, bits, int8_kernels):
    inputs, outputs = 1536, 40
    x = Quantized.empty(20, inputs, bits)
    largest = sign * {8: 127, 16: 32767}[bits]
    x.values[:, 0] = largest if bits == 8 else largest >> 8
    if bits == 16:
        x.values[:, 1] = -1 if sign > 0 else 1
    x.scale.fill_(1.0)
    assert (x.integers() == largest).all()
    weight = torch.full((outputs, inputs), 127, dtype=torch.int8)
    weight[::2] = -128
    ones = torch.ones(outputs)
    result = int8_kernels.linear(x, int8_kernels.pack_int8(weight.clone(), ones))
    assert torch.equal(result, _expected(x, weight, ones))
    exact = (largest * weight[:, 0].double() * inputs).expand(20, -1)
    torch.testing.assert_close(result.double(), exact, rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("bits", [8, 16])
def test_same_bytes_in_any_batch_on_any_threads(bits, int8_kernels):
    weight, scale = _integers(200, 576), _floats(200).abs()
    packed, x = int8_kernels.pack_int8(weight, scale, _floats(200, seed=3)), _activations(600, 576, bits)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([int8_kernels.linear(x[i : i + 1], packed) for i in range(600)])
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            for rows in (1, 2, 5, 6, 15, 16, 17, 31, 32, 33, 100, 257, 600):
                for part in (slice(rows), slice(600 - rows, 600)):
                    result = int8_kernels.linear(x[part], packed)
                    assert result.numpy().tobytes() == alone[part].numpy().tobytes(), (threads, part)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", [8, 16])
def test_rows_may_be_strided_and_result_goes_to_out(bits, int8_kernels):
    weight, scale = _integers(48, 70), _floats(48).abs()
    packed, every = int8_kernels.pack_int8(weight.clone(), scale), _activations(18, 70, bits)
    x = Quantized(every.values[::2], every.scale[::2].contiguous(), 70)
    out = torch.full((9, 48), float("nan"))
    assert int8_kernels.linear(x, packed, out) is out
    assert torch.equal(out, _expected(x, weight, scale))


def test_no_rows(int8_kernels):
    packed = int8_kernels.pack_int8(_integers(48, 64), torch.ones(48))
    assert int8_kernels.linear(Quantized.empty(0, 64, 8), packed).shape == (0, 48)


def test_not_a_number_stays_in_its_row(int8_kernels):
    packed = int8_kernels.pack_int8(_integers(48, 64), torch.ones(48))
    x = _floats(5, 64)
    x[1, 3], x[2, 63], x[3, 0] = float("nan"), float("inf"), -float("inf")
    for bits in (8, 16):
        result = int8_kernels.linear(int8_kernels.quantize(x, Quantized.empty(5, 64, bits)), packed)
        assert result.isnan().all(dim=1).tolist() == [False, True, True, True, False]
        assert result[[0, 4]].isfinite().all()


def test_a_program_takes_fewer_rows(int8_kernels):
    weight, scale = _integers(48, 70), _floats(48).abs()
    packed, x, norm = int8_kernels.pack_int8(weight, scale), _floats(10, 70), _floats(70).abs()
    quantized, out = Quantized.empty(10, 70, 8), torch.full((10, 48), -1.0)

    def build() -> None:
        int8_kernels.linear(int8_kernels.rms_norm(x, norm, 1e-5, quantized), packed, out)

    program = int8_kernels.record(build, StepSizes(10, 7, 3, 5))
    expected = int8_kernels.linear(int8_kernels.rms_norm(x, norm, 1e-5, Quantized.empty(10, 70, 8)), packed)
    out.fill_(-1.0)
    program.run(StepSizes(4, 7, 3, 5))
    assert torch.equal(out[:4], expected[:4])
    assert (out[4:] == -1.0).all()


def test_what_does_not_fit_is_refused(int8_kernels):
    weight, scale = _integers(48, 64), torch.ones(48)
    packed, x = int8_kernels.pack_int8(weight.clone(), scale), Quantized.empty(2, 64, 8)
    for wrong in (
        Quantized.empty(2, 63, 8),
        Quantized(x.values, x.scale[:1], 64),
        Quantized(x.values, x.scale, 65),
    ):
        with pytest.raises(ShapeError, match="48, 64"):
            int8_kernels.linear(wrong, packed)
    with pytest.raises(ShapeError, match="out"):
        int8_kernels.linear(x, packed, torch.empty(2, 47))
    with pytest.raises(KernelError, match="pack_int8"):
        int8_kernels.linear(x, int8_kernels.pack_linear(_floats(48, 64)))
    for case in ((weight.float(), scale), (weight, scale[:1]), (weight, scale.double()), (weight[0], scale)):
        with pytest.raises(ShapeError, match="pack_int8"):
            int8_kernels.pack_int8(*case)
    with pytest.raises(ShapeError, match="overflow"):
        int8_kernels.pack_int8(_integers(1, 70000), scale[:1])
