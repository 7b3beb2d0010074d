"""Norm, rotary embedding and gate of every backend against the reference in float64."""

import pytest
import torch

from batchgen.errors import KernelError, ShapeError
from batchgen.kernels.cases import TOLERANCE, relative_rms
from batchgen.kernels.ops import choose


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def truth():
    return choose("cpu", "float64", backend="reference", head_dim=64)


@pytest.mark.parametrize("width", [1, 8, 33, 576, 600])
@pytest.mark.parametrize("rows", [1, 50])
def test_rms_norm(rows, width, make_kernels, truth):
    x, weight = _draw(rows, width), _draw(width, seed=1)
    expected = truth.rms_norm(x.double(), weight.double(), 1e-5)
    assert relative_rms(make_kernels().rms_norm(x, weight, 1e-5), expected) < TOLERANCE["float32"]


def test_rms_norm_of_heads_in_a_wider_row(make_kernels, truth):
    wide, weight = _draw(7, 300), _draw(24, seed=1)
    heads = wide[:, 10 : 10 + 5 * 24].view(7, 5, 24)
    expected = truth.rms_norm(heads.double().contiguous(), weight.double(), 1e-6)
    result = make_kernels().rms_norm(heads, weight, 1e-6)
    assert result.is_contiguous()
    assert relative_rms(result, expected) < TOLERANCE["float32"]


@pytest.mark.parametrize("width", [7, 576])
def test_add_rms_norm(width, make_kernels, truth):
    x, residual, weight = _draw(40, width), _draw(40, width, seed=1), _draw(width, seed=2)
    expected, total = truth.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
    out, before = torch.full_like(x, float("nan")), x.clone()
    normed, new = make_kernels().add_rms_norm(x, residual, weight, 1e-5, out)
    assert new is residual
    assert normed is out
    assert torch.equal(x, before)
    assert relative_rms(new, total) < TOLERANCE["float32"]
    assert relative_rms(normed, expected) < TOLERANCE["float32"]


@pytest.mark.parametrize(("head_dim", "rot_dim"), [(64, 64), (80, 20), (7, 6), (128, 64)])
@pytest.mark.parametrize("is_neox", [True, False])
def test_rotary(head_dim, rot_dim, is_neox, make_kernels, truth, num_threads):
    qkv = _draw(45, 6 * head_dim)
    positions = torch.randint(0, 100, (45,), generator=torch.Generator().manual_seed(3))
    angles = _draw(100, rot_dim // 2, seed=4) * 3
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    wide = qkv.double()
    expected_query, expected_key = wide[:, : 4 * head_dim], wide[:, 4 * head_dim :]
    truth.rotary(
        expected_query.view(45, 4, head_dim),
        expected_key.view(45, 2, head_dim),
        positions,
        table.double(),
        is_neox,
    )
    query, key = qkv[:, : 4 * head_dim].view(45, 4, head_dim), qkv[:, 4 * head_dim :].view(45, 2, head_dim)
    make_kernels(head_dim).rotary(query, key, positions, table, is_neox)
    assert relative_rms(qkv, wide) < TOLERANCE["float32"]


def test_rotary_position_outside_of_the_table_is_an_error(make_kernels):
    query, table = torch.ones(1, 1, 4), torch.ones(10, 4)
    for position in (-1, 10):
        with pytest.raises(KernelError, match="position"):
            make_kernels(4).rotary(query, query.clone(), torch.tensor([position]), table)


@pytest.mark.parametrize("width", [1, 19, 1536])
def test_silu_mul(width, make_kernels, truth):
    x = _draw(33, 2 * width) * 4
    expected = truth.silu_mul(x.double())
    assert relative_rms(make_kernels().silu_mul(x), expected) < TOLERANCE["float32"]


def test_silu_mul_at_the_ends(make_kernels):
    gate = torch.tensor([[-1e30, -100.0, -88.0, 0.0, 88.0, 100.0, 1e30]])
    result = make_kernels().silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert result[0, :4].abs().max() < 1e-30 * 1e8
    assert torch.equal(result[0, 4:], gate[0, 4:])


def test_same_bits_for_any_number_of_rows(make_invariant_kernels, num_threads):
    kernels, x, weight = make_invariant_kernels(), _draw(300, 200), _draw(200, seed=1)
    normed, gated = kernels.rms_norm(x, weight, 1e-5), kernels.silu_mul(x)
    for row in (0, 17, 299):
        alone = x[row : row + 1]
        assert torch.equal(kernels.rms_norm(alone, weight, 1e-5)[0], normed[row])
        assert torch.equal(kernels.silu_mul(alone)[0], gated[row])


def test_wrong_shapes_are_refused(make_kernels):
    kernels, x = make_kernels(), _draw(4, 32)
    with pytest.raises(ShapeError):
        kernels.rms_norm(x, _draw(31), 1e-5)
    with pytest.raises(ShapeError):
        kernels.rms_norm(x.double(), _draw(32).double(), 1e-5)
    with pytest.raises(ShapeError):
        kernels.rms_norm(_draw(32, 4).T, _draw(32), 1e-5)
    with pytest.raises(ShapeError):
        kernels.add_rms_norm(x, _draw(3, 32), _draw(32), 1e-5)
    with pytest.raises(ShapeError):
        kernels.silu_mul(_draw(4, 31))
    with pytest.raises(ShapeError):
        kernels.rotary(_draw(1, 2, 4), _draw(1, 2, 4), torch.tensor([0]), _draw(3, 6))
