"""The reference kernels against numbers worked out by hand."""

import math

import pytest
import torch

from batchgen.errors import KernelError
from batchgen.kernels.kv import AttentionMeta, KVCacheSpec
from batchgen.kernels.ops import Kernels, choose


@pytest.fixture
def kernels() -> Kernels:
    return choose("cpu", "float64", backend="reference", head_dim=1, block_size=2)


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _cache(kernels: Kernels, keys: list[float], values: list[float], slots: list[int]):
    kv = kernels.allocate_kv(KVCacheSpec(1, 1, 2, "float64"), 4, "cpu")
    kv.data.fill_(float("nan"))
    key, value = (torch.tensor(x, dtype=torch.float64).view(-1, 1, 1) for x in (keys, values))
    kernels.store_kv(key, value, kv, _int32(*slots))
    return kv


def _meta(num_queries: int, length: int, blocks: list[int]) -> AttentionMeta:
    none = torch.full((num_queries,), -1, dtype=torch.int32)
    tables = torch.tensor([blocks], dtype=torch.int32)
    return AttentionMeta(_int32(0, num_queries), _int32(length), tables, none, num_queries, length)


def _one(value: float) -> torch.Tensor:
    return torch.tensor([[[value]]], dtype=torch.float64)


def test_attention_weighs_a_quarter_and_three_quarters(kernels):
    # Scores 0 and ln 3: weights 1/4 and 3/4 of the values 1 and 9.
    kv = _cache(kernels, [0.0, math.log(3)], [1.0, 9.0], [0, 1])
    assert kernels.attention(_one(1.0), kv, _meta(1, 2, [0, -1]), 1.0).item() == pytest.approx(7.0)


def test_attention_multiplies_scores_by_the_scale(kernels):
    kv = _cache(kernels, [0.0, 2 * math.log(3)], [1.0, 9.0], [0, 1])
    assert kernels.attention(_one(1.0), kv, _meta(1, 2, [0]), 0.5).item() == pytest.approx(7.0)


def test_attention_is_causal_within_a_chunk(kernels):
    kv = _cache(kernels, [0.0, math.log(3)], [1.0, 9.0], [0, 1])
    queries = torch.ones(2, 1, 1, dtype=torch.float64)
    assert kernels.attention(queries, kv, _meta(2, 2, [0]), 1.0).flatten().tolist() == pytest.approx(
        [1.0, 7.0]
    )


def test_attention_follows_the_block_table(kernels):
    # Positions 0, 1, 2 in slots 6, 7, 2: block 3, then block 1.
    kv = _cache(kernels, [0.0, 0.0, 0.0], [1.0, 2.0, 6.0], [6, 7, 2])
    assert kernels.attention(_one(1.0), kv, _meta(1, 3, [3, 1]), 1.0).item() == pytest.approx(3.0)


def test_attention_window_forgets_the_first_token(kernels):
    kv = _cache(kernels, [50.0, 0.0, math.log(3)], [100.0, 1.0, 9.0], [0, 1, 2])
    result = kernels.attention(_one(1.0), kv, _meta(1, 3, [0, 1]), 1.0, window=2)
    assert result.item() == pytest.approx(7.0)


def test_attention_soft_cap_bounds_scores(kernels):
    # Scores 0 and 1000 capped at ln 3: weights 1/4 and 3/4.
    kv = _cache(kernels, [0.0, 1000.0], [1.0, 9.0], [0, 1])
    result = kernels.attention(_one(1.0), kv, _meta(1, 2, [0]), 1.0, soft_cap=math.log(3))
    assert result.item() == pytest.approx(7.0)


def test_attention_shares_a_key_value_head_among_query_heads():
    kernels = choose("cpu", "float64", backend="reference", head_dim=1, block_size=2)
    kv = kernels.allocate_kv(KVCacheSpec(2, 1, 2, "float64"), 1, "cpu")
    key, value = torch.zeros(1, 2, 1).double(), torch.tensor([[[5.0], [6.0]]]).double()
    kernels.store_kv(key, value, kv, _int32(0))
    result = kernels.attention(torch.ones(1, 4, 1).double(), kv, _meta(1, 1, [0]), 1.0)
    assert result.flatten().tolist() == [5.0, 5.0, 6.0, 6.0]


def test_attention_outside_of_the_pool_is_an_error(kernels):
    kv = _cache(kernels, [0.0], [1.0], [0])
    with pytest.raises(KernelError, match="outside"):
        kernels.attention(_one(1.0), kv, _meta(1, 1, [4]), 1.0)


def test_linear_with_bias(kernels):
    packed = kernels.pack_linear(
        torch.tensor([[1.0, 2.0], [0.0, -1.0]]).double(), torch.tensor([10.0, 20.0]).double()
    )
    assert kernels.linear(torch.tensor([[3.0, 4.0]]).double(), packed).tolist() == [[21.0, 16.0]]
    assert kernels.gather_rows(packed, torch.tensor([1, 0])).tolist() == [[0.0, -1.0], [1.0, 2.0]]


def test_rms_norm(kernels):
    # Mean of squares of (3, 4) is 12.5; eps 0.0 leaves sqrt(12.5).
    result = kernels.rms_norm(torch.tensor([[3.0, 4.0]]).double(), torch.tensor([1.0, 2.0]).double(), 0.0)
    assert result.flatten().tolist() == pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)])


def test_rms_norm_eps_is_inside_the_root(kernels):
    result = kernels.rms_norm(torch.zeros(1, 2).double() + 3.0, torch.ones(2).double(), 16.0)
    assert result.flatten().tolist() == pytest.approx([0.6, 0.6])


def test_add_rms_norm_updates_the_residual(kernels):
    residual = torch.tensor([[1.0, 1.0]]).double()
    normed, total = kernels.add_rms_norm(
        torch.tensor([[2.0, 3.0]]).double(), residual, torch.ones(2).double(), 0.0
    )
    assert total is residual
    assert residual.tolist() == [[3.0, 4.0]]
    assert normed.flatten().tolist() == pytest.approx([3 / math.sqrt(12.5), 4 / math.sqrt(12.5)])


@pytest.mark.parametrize(
    ("is_neox", "expected"),
    [(True, [-3.0, 2.0, 1.0, 4.0, 5.0]), (False, [-2.0, 1.0, 3.0, 4.0, 5.0])],
)
def test_rotary_turns_the_first_pair_by_a_quarter(is_neox, expected):
    # rot_dim 4 of 5: two pairs, the first turned by 90 degrees, the second not at all.
    kernels = choose("cpu", "float64", backend="reference", head_dim=5)
    table = torch.tensor([[9.0, 9.0, 9.0, 9.0], [0.0, 1.0, 1.0, 0.0]]).double()
    query = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]]).double()
    key = query.clone()
    kernels.rotary(query, key, torch.tensor([1]), table, is_neox)
    assert query.flatten().tolist() == expected
    assert torch.equal(query, key)


def test_silu_mul(kernels):
    # silu(ln 3) = ln 3 · 3/4.
    result = kernels.silu_mul(torch.tensor([[math.log(3), 0.0, 4.0, 7.0]]).double())
    assert result.flatten().tolist() == pytest.approx([3 * math.log(3), 0.0])
