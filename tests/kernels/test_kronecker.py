"""Vectors times a Kronecker product: what the whole matrix gives, and the same bits in any batch."""

import functools

import pytest
import torch

from batchgen.errors import ShapeError

SIZES = [(1,), (5,), (16, 36), (7, 9, 2), (64, 64)]


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _factors(sizes: tuple[int, ...]) -> list[torch.Tensor]:
    return [_draw(size, size, seed=number) / size**0.5 for number, size in enumerate(sizes)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("num_vectors", [0, 1, 16, 37])
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_the_product_with_the_whole_matrix(sizes, num_vectors, dim, make_kernels):
    factors = _factors(sizes)
    matrix = functools.reduce(torch.kron, factors).double()
    x, scale = _draw(num_vectors, len(matrix), seed=8), _draw(len(matrix), seed=9)
    given = x if dim == 1 else x.T.contiguous()
    found = make_kernels().kronecker(given, scale, factors, dim)
    assert found.shape == given.shape
    expected = (x * scale).double() @ matrix
    torch.testing.assert_close(found if dim == 1 else found.T, expected.float(), atol=1e-5, rtol=1e-5)
    out = torch.full_like(given, float("nan"))
    assert make_kernels().kronecker(given, scale, factors, dim, out) is out
    assert torch.equal(out, found)


def test_a_vector_has_the_same_bits_alone_and_in_a_column(make_invariant_kernels, num_threads):
    kernels, factors = make_invariant_kernels(), _factors((16, 36))
    x, scale = _draw(70, 576), _draw(576)
    together = kernels.kronecker(x, scale, factors, 1)
    assert torch.equal(kernels.kronecker(x.T.contiguous(), scale, factors, 0).T, together)
    for row in (0, 15, 16, 69):
        assert torch.equal(kernels.kronecker(x[row : row + 1], scale, factors, 1)[0], together[row])


def test_what_does_not_fit_is_refused(make_kernels):
    kernels, x, scale, factors = make_kernels(), _draw(3, 10), _draw(10), _factors((2, 5))
    for given, scaled, by, dim in [
        (x[:, :9], scale, factors, 1), (x, scale[:9], factors, 1), (x, scale, factors[:1], 1),
        (x, scale, factors, 0), (x.T, scale, factors, 0), (x, scale, [factors[0][:1], factors[1]], 1),
        (x.double(), scale, factors, 1), (x[0], scale, factors, 1),
    ]:  # fmt: skip
        with pytest.raises(ShapeError, match="kronecker"):
            kernels.kronecker(given, scaled, by, dim)
