"""Attention of every backend against the reference in float64, and the same bits in any batch."""

import dataclasses

import pytest
import torch

from batchgen.errors import DeviceError, KernelError, ShapeError
from batchgen.kernels.cases import (
    CASES,
    TOLERANCE,
    AttentionCase,
    make_inputs,
    poison_unseen,
    relative_rms,
    truth,
)
from batchgen.kernels.kv import AttentionMeta, KVCacheSpec


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_the_reference(case, make_kernels):
    # Slots without a token are NaN and blocks are shuffled: reading a wrong one shows.
    inputs = make_inputs(case, make_kernels(case.head_dim, case.block_size), "float32")
    assert relative_rms(inputs.attend(case), truth(case, "float32")) < TOLERANCE["float32"]


def test_attention_of_a_long_sequence(make_kernels):
    case = AttentionCase(name="long", query_lens=[2], seq_lens=[3001], num_heads=2, num_kv_heads=1)
    inputs = make_inputs(case, make_kernels(), "float32")
    assert relative_rms(inputs.attend(case), truth(case, "float32")) < TOLERANCE["float32"]


def test_attention_survives_scores_that_overflow_exp(make_kernels):
    case = AttentionCase(name="large-scores", query_lens=[3, 1], seq_lens=[70, 130])
    inputs = make_inputs(case, make_kernels(), "float32")
    inputs.scale = 40.0
    result = inputs.attend(case)
    assert torch.isfinite(result).all()
    assert result.abs().max() <= max(inputs.kv.data.nan_to_num().abs().max(), 1.0)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40, 64, 100])
def test_same_bits_however_a_prompt_is_chunked(window, make_invariant_kernels, one_thread):
    whole = AttentionCase(
        name="whole", query_lens=[150], seq_lens=[150], num_heads=6, head_dim=32, window=window, seed=3
    )
    kernels = make_invariant_kernels(32)
    inputs = make_inputs(whole, kernels, "float32")
    expected = inputs.attend(whole)
    for size in (1, 7, 16, 61, 100):
        pieces = []
        for first in range(0, 150, size):
            queries, length = min(size, 150 - first), min(first + size, 150)
            pieces.append(_attend_part(inputs, whole, first, queries, length))
        assert torch.equal(torch.cat(pieces), expected), f"chunks of {size}"


def _attend_part(inputs, case, first, num_queries, length):
    meta = AttentionMeta(
        torch.tensor([0, num_queries], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        inputs.meta.block_tables,
        torch.full((num_queries,), -1, dtype=torch.int32),
        num_queries,
        length,
    )
    part = dataclasses.replace(inputs, query=inputs.query[first : first + num_queries], meta=meta)
    return part.attend(case)


def test_same_bits_alone_in_any_batch_and_on_any_threads(make_invariant_kernels, num_threads):
    kernels = make_invariant_kernels()
    alone = AttentionCase(name="alone", query_lens=[20], seq_lens=[90], num_heads=6)
    among = AttentionCase(name="among", query_lens=[20, 1, 64, 1], seq_lens=[90, 400, 64, 5], num_heads=6)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = make_inputs(alone, kernels, "float32").attend(alone)
    torch.set_num_threads(before)
    # The first sequence draws the same numbers in both cases only if it draws as much before them.
    inputs = make_inputs(among, kernels, "float32")
    first = make_inputs(alone, kernels, "float32")
    slots = torch.arange(90)
    blocks = inputs.meta.block_tables[0][slots // 16].long() * 16 + slots % 16
    own = first.meta.block_tables[0][slots // 16].long() * 16 + slots % 16
    kernels.store_kv(*kernels.read_kv(first.kv, own), inputs.kv, blocks.to(torch.int32))
    inputs.query[:20] = first.query
    assert torch.equal(inputs.attend(among)[:20], expected)


@pytest.mark.parametrize("seed", range(6))
def test_same_bits_whatever_beginnings_are_shared(seed, make_invariant_kernels, num_threads):
    """Sequences that begin with the same blocks may be computed together, in runs that the kernel finds."""
    generator = torch.Generator().manual_seed(seed)
    kernels = make_invariant_kernels(32)
    num_sequences, blocks = 14, 40
    kv = kernels.allocate_kv(KVCacheSpec(2, 32, 16, "float32"), blocks, "cpu")
    tokens = torch.randn(2, blocks * 16, 2, 32, generator=generator)
    kernels.store_kv(tokens[0], tokens[1], kv, torch.arange(blocks * 16, dtype=torch.int32))

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    tables = torch.randint(0, blocks, (num_sequences, 20), generator=generator).to(torch.int32)
    lengths, queries = [], []
    for row in range(num_sequences):
        lengths.append(draw(60, 320))
        queries.append([1, 1, 1, 2, 5, 30][draw(0, 6)])
        if row and draw(0, 5):
            same = draw(0, 20)
            tables[row, :same] = tables[draw(0, row), :same]
    query = torch.randn(sum(queries), 6, 32, generator=generator)
    starts = [0, *torch.tensor(queries).cumsum(0).tolist()]

    def attend(first: int, last: int) -> torch.Tensor:
        low, high = starts[first], starts[last]
        meta = AttentionMeta(
            torch.tensor(starts[first : last + 1], dtype=torch.int32) - low,
            torch.tensor(lengths[first:last], dtype=torch.int32),
            tables[first:last].contiguous(),
            torch.full((high - low,), -1, dtype=torch.int32),
            max(queries[first:last]),
            max(lengths[first:last]),
        )
        return kernels.attention(query[low:high].contiguous(), kv, meta, 32**-0.5)

    alone = torch.cat([attend(row, row + 1) for row in range(num_sequences)])
    assert torch.equal(attend(0, num_sequences), alone)


def test_query_may_be_a_view_of_a_wider_row(make_kernels):
    case = AttentionCase(name="view", query_lens=[3, 1], seq_lens=[30, 17])
    inputs = make_inputs(case, make_kernels(), "float32")
    expected = inputs.attend(case)
    wide = torch.full((4, 4 * 64 + 100), float("nan"))
    wide[:, 50 : 50 + 4 * 64] = inputs.query.reshape(4, -1)
    inputs.query = wide[:, 50 : 50 + 4 * 64].view(4, 4, 64)
    assert relative_rms(inputs.attend(case), expected) < TOLERANCE["float32"]


def test_result_goes_to_out(make_kernels):
    case = CASES[1]
    inputs = make_inputs(case, make_kernels(), "float32")
    out = torch.full(inputs.query.shape, float("nan"))
    given = inputs.kernels.attention(inputs.query, inputs.kv, inputs.meta, inputs.scale, out=out)
    assert given.data_ptr() == out.data_ptr()
    assert relative_rms(inputs.attend(case), out) < TOLERANCE["float32"]


def test_empty_batch(make_kernels):
    inputs = make_inputs(CASES[0], make_kernels(), "float32")
    none = torch.zeros(0, dtype=torch.int32)
    meta = AttentionMeta(torch.zeros(1, dtype=torch.int32), none, none.view(0, 4), none, 0, 0)
    assert inputs.kernels.attention(inputs.query[:0], inputs.kv, meta, 1.0).shape == (0, 4, 64)


def test_block_outside_of_the_pool_is_an_error(make_kernels):
    inputs = make_inputs(CASES[0], make_kernels(), "float32")
    for block in (-1, inputs.kv.num_blocks):
        inputs.meta.block_tables[0, 0] = block
        with pytest.raises(KernelError, match="outside"):
            inputs.attend(CASES[0])


@pytest.mark.parametrize("case", [case for case in CASES if case.window], ids=str)
def test_blocks_before_a_window_need_not_exist(case, make_kernels):
    inputs = make_inputs(case, make_kernels(case.head_dim, case.block_size), "float32")
    expected = inputs.attend(case)
    assert poison_unseen(inputs, case)
    assert relative_rms(inputs.attend(case), expected) < TOLERANCE["float32"]


def test_a_block_within_the_window_must_exist(make_kernels):
    case = AttentionCase(name="lost", query_lens=[2], seq_lens=[100], window=20)
    inputs = make_inputs(case, make_kernels(), "float32")
    # Positions from 100 - 2 - 20 + 1 = 79 on are seen, the last of block 4.
    inputs.meta.block_tables[0, :4] = -1
    inputs.attend(case)
    inputs.meta.block_tables[0, 4] = -1
    with pytest.raises(KernelError, match="outside"):
        inputs.attend(case)


def test_wrong_shapes_and_values_are_refused(make_kernels):
    inputs = make_inputs(CASES[0], make_kernels(), "float32")
    kernels, query, kv, meta = inputs.kernels, inputs.query, inputs.kv, inputs.meta
    with pytest.raises(ShapeError, match="attention"):
        kernels.attention(query[:, :, :32], kv, meta, 1.0)
    with pytest.raises(ShapeError, match="attention"):
        kernels.attention(query[:, :3], kv, meta, 1.0)
    with pytest.raises(ShapeError, match="float64"):
        kernels.attention(query.double(), kv, meta, 1.0)
    with pytest.raises(ShapeError, match="out"):
        kernels.attention(query, kv, meta, 1.0, out=torch.empty(1, 4, 32))
    with pytest.raises(DeviceError, match="on meta"):
        kernels.attention(query.to("meta"), kv, meta, 1.0)
    with pytest.raises(KernelError, match="window"):
        kernels.attention(query, kv, meta, 1.0, window=0)
    with pytest.raises(KernelError, match="soft_cap"):
        kernels.attention(query, kv, meta, 1.0, soft_cap=-1.0)
    with pytest.raises(ShapeError, match="max_seq_len"):
        kernels.attention(query, kv, dataclasses.replace(meta, max_seq_len=1000), 1.0)
    with pytest.raises(ShapeError, match="int32"):
        dataclasses.replace(meta, seq_lens=meta.seq_lens.long())
    with pytest.raises(ShapeError, match="block_tables"):
        dataclasses.replace(meta, block_tables=meta.block_tables[0])


def test_lengths_that_disagree_are_an_error_of_the_c_kernels(make_invariant_kernels):
    inputs = make_inputs(CASES[0], make_invariant_kernels(), "float32")
    inputs.meta.seq_lens[0] = 1000
    with pytest.raises(KernelError, match="disagree"):
        inputs.attend(CASES[0])
    inputs.meta.seq_lens[0] = 1
    inputs.meta.query_start_loc[1] = 5
    with pytest.raises(KernelError, match="disagree"):
        inputs.attend(CASES[0])
