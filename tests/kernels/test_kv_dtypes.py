"""KV caches of fewer bits: what is kept, attention over it, and the same bits in any batch."""

import dataclasses

import pytest
import torch

from batchgen.errors import KernelError
from batchgen.kernels.cases import (
    CASES,
    KV_TOLERANCE,
    AttentionCase,
    make_inputs,
    poison_unseen,
    relative_rms,
    truth,
)
from batchgen.kernels.kv import AttentionMeta, KVCacheSpec
from batchgen.kernels.ops import choose

SMALL = ("float16", "bfloat16", "int8", "fp8")
# Numbers that halves round in their own way: ties, subnormal numbers, beyond the largest, zeros, infinities.
EDGES = (
    1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65504.0, 65519.0, 65520.0, 1e6, -7e4, 2**-14,
    2**-15, 3 * 2**-25, 2**-25, 2**-24, 1e-9, 0.0, -0.0, float("inf"), float("-inf"), 3.4e38, 1e-40, -2e-40,
)  # fmt: skip


def _kept(kernels, kv_dtype, key, value, block_size=16):
    """What a cache gives back for tokens in shuffled slots."""
    tokens, heads, dim = key.shape
    kv = kernels.allocate_kv(KVCacheSpec(heads, dim, block_size, kv_dtype), 5, "cpu")
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(5 * block_size, generator=generator)[:tokens].to(torch.int32)
    kernels.store_kv(key, value, kv, slots)
    return kernels.read_kv(kv, slots)


def _fp8(x):
    scale = x.abs().amax(-1, keepdim=True) / 448
    numbers = torch.where(scale > 0, x / scale, 0.0).clamp(-448, 448)
    return numbers.to(torch.float8_e4m3fn).float() * scale


def _int8(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, torch.round(x / scale).clamp(-127, 127), 0.0) * scale


@pytest.mark.parametrize("kv_dtype", SMALL)
@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(64, 16), (33, 16), (8, 32), (80, 48), (1, 16), (150, 16)]
)
def test_what_is_kept_is_what_was_stored_but_rounded(
    kv_dtype, head_dim, block_size, make_kernels, num_threads
):
    kernels = make_kernels(head_dim, block_size)
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(40, 3, head_dim, generator=generator) * 30 for _ in range(2))
    read_key, read_value = _kept(kernels, kv_dtype, key, value, block_size)
    for stored, read in ((key, read_key), (value, read_value)):
        if kv_dtype in ("int8", "fp8"):
            expected = {"int8": _int8, "fp8": _fp8}[kv_dtype](stored)
        else:
            expected = stored.to(getattr(torch, kv_dtype)).float()
        assert torch.equal(read, expected)


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_halves_round_as_torch_does(kv_dtype, make_kernels):
    key = torch.tensor(EDGES).repeat(3, 2, 1)
    read_key, read_value = _kept(make_kernels(len(EDGES)), kv_dtype, key, -key)
    assert torch.equal(read_key, key.to(getattr(torch, kv_dtype)).float())
    assert torch.equal(read_value, -key.to(getattr(torch, kv_dtype)).float())
    nan = torch.full((1, 2, 20), float("nan"))
    assert all(read.isnan().all() for read in _kept(make_kernels(20), kv_dtype, nan, nan))


def test_8_bits_of_zeros_of_tiny_numbers_and_of_ties(make_kernels):
    zeros = torch.zeros(1, 2, 8)
    tiny = torch.full((1, 2, 8), 1e-42)
    ties = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]).repeat(1, 2, 1)
    key = torch.cat([zeros, tiny, ties])
    read_key, read_value = _kept(make_kernels(8), "int8", key, -key)
    rounded = torch.tensor([127.0, 0, 2, 2, 0, -2, -2, 126])
    for read, sign in ((read_key, 1), (read_value, -1)):
        assert not read[0].any()
        assert torch.isfinite(read).all()
        assert (read[1] - sign * key[1]).abs().max() <= 1e-42
        assert torch.equal(read[2], sign * rounded.expand(2, 8))


def test_fp8_rounds_as_torch_does_and_holds_every_number(make_kernels):
    """All numbers of the type, and what lies between and beside; the largest sets the scale to 1."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (codes[1:] + codes[:-1]) / 2
    beside = torch.cat([torch.nextafter(between, codes[1:]), torch.nextafter(between, codes[:-1])])
    key = torch.cat([codes, between, beside, torch.tensor([448.0, 2.0**-10, 2.0**-11, 1e-30])])
    key = torch.stack([key, -key]).expand(2, 2, -1).contiguous()
    read_key, read_value = _kept(make_kernels(key.shape[2]), "fp8", key, -key)
    assert torch.equal(read_key, key.to(torch.float8_e4m3fn).float())
    assert torch.equal(read_value, -read_key)


def test_fp8_of_zeros_of_tiny_and_of_huge_numbers(make_kernels):
    key = torch.cat([torch.zeros(1, 2, 8), torch.full((1, 2, 8), 1e-42), torch.full((1, 2, 8), 3.3e38)])
    key[2, :, 1] = 1e38
    read_key, read_value = _kept(make_kernels(8), "fp8", key, -key)
    for read, sign in ((read_key, 1), (read_value, -1)):
        assert not read[0].any()
        assert torch.isfinite(read).all()
        assert (read[1] - sign * key[1]).abs().max() <= 1e-42
        torch.testing.assert_close(read[2], sign * key[2], rtol=1 / 16, atol=0)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("queries", [6, 40])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_token_that_is_not_finite_spoils_only_who_sees_it(bad, part, queries, kv_dtype, make_kernels):
    case = AttentionCase(name="bad", query_lens=[queries], seq_lens=[64], num_heads=2, num_kv_heads=1)
    inputs = make_inputs(case, make_kernels(), "float32", kv_dtype=kv_dtype)
    expected = inputs.attend(case)
    key, value = torch.randn(2, 1, 1, 64)
    (key if part == "key" else value)[0, 0, 3] = bad
    table = inputs.meta.block_tables[0]
    slot = table[61 // 16] * 16 + 61 % 16
    inputs.kernels.store_kv(key, value, inputs.kv, slot[None])
    # Queries stand at positions up to 63.
    result = inputs.attend(case)
    assert torch.equal(result[:-3], expected[:-3])
    assert result[-3:].isnan().all()


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("queries", "window"), [(3, None), (40, None), (40, 10)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_float_that_is_not_finite_spoils_only_who_sees_it(
    bad, part, queries, window, kv_dtype, make_kernels, backend
):
    case = AttentionCase(
        name="bad", query_lens=[queries], seq_lens=[60], num_heads=2, num_kv_heads=1, window=window
    )
    inputs = make_inputs(case, make_kernels(), "float32", kv_dtype=kv_dtype)
    expected = inputs.attend(case)
    key, value = torch.randn(2, 1, 1, 64)
    (key if part == "key" else value)[0, 0, 3] = bad
    position = 60 - queries + queries // 2
    table = inputs.meta.block_tables[0]
    slot = table[position // 16] * 16 + position % 16
    inputs.kernels.store_kv(key, value, inputs.kv, slot[None])
    result = inputs.attend(case)
    sees = torch.zeros(queries, dtype=torch.bool)
    sees[queries // 2 : None if window is None else queries // 2 + window] = True
    # The reference promises no bits.
    slack = 1e-5 if backend == "reference" else 0
    torch.testing.assert_close(result[~sees], expected[~sees], rtol=slack, atol=slack)
    if part == "value":
        assert not result[sees][:, :, 3].isfinite().any()


@pytest.mark.parametrize("kv_dtype", SMALL)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_the_reference_over_that_cache(case, kv_dtype, make_kernels):
    inputs = make_inputs(case, make_kernels(case.head_dim, case.block_size), "float32", kv_dtype=kv_dtype)
    assert relative_rms(inputs.attend(case), truth(case, "float32", kv_dtype)) < KV_TOLERANCE[kv_dtype]


@pytest.mark.parametrize("kv_dtype", SMALL)
def test_attention_of_a_long_sequence(kv_dtype, make_kernels):
    case = AttentionCase(name="long", query_lens=[2, 40], seq_lens=[3001, 2000], num_heads=2, num_kv_heads=1)
    inputs = make_inputs(case, make_kernels(), "float32", kv_dtype=kv_dtype)
    assert relative_rms(inputs.attend(case), truth(case, "float32", kv_dtype)) < KV_TOLERANCE[kv_dtype]


@pytest.mark.parametrize("kv_dtype", SMALL)
def test_attention_survives_scores_that_overflow_exp(kv_dtype, make_kernels):
    case = AttentionCase(name="large-scores", query_lens=[3, 1, 60], seq_lens=[70, 130, 200])
    inputs = make_inputs(case, make_kernels(), "float32", kv_dtype=kv_dtype)
    inputs.scale = 40.0
    result = inputs.attend(case)
    assert torch.isfinite(result).all()
    assert result.abs().max() < 10


def test_queries_and_values_of_any_size(make_kernels):
    case = AttentionCase(name="sizes", query_lens=[3], seq_lens=[70], num_heads=2, num_kv_heads=1)
    inputs = make_inputs(case, make_kernels(), "float32", kv_dtype="int8")
    inputs.query[0] = 0.0
    inputs.query[1] *= 1e-30
    flat = inputs.attend(case)
    reference = choose("cpu", "float32", backend="reference", head_dim=64)
    expected = make_inputs(case, reference, "float32", kv_dtype="int8")
    expected.query.copy_(inputs.query)
    assert relative_rms(flat, expected.attend(case)) < KV_TOLERANCE["int8"]
    inputs.query[1] = float("inf")
    spoiled = inputs.attend(case)
    assert spoiled[1].isnan().all()
    assert torch.equal(spoiled[2], flat[2])


@pytest.mark.parametrize("kv_dtype", SMALL)
@pytest.mark.parametrize("window", [None, 1, 40, 64])
def test_same_bits_however_a_prompt_is_chunked(kv_dtype, window, make_invariant_kernels, one_thread):
    case = AttentionCase(
        name="whole", query_lens=[150], seq_lens=[150], num_heads=6, head_dim=32, window=window, seed=3
    )
    inputs = make_inputs(case, make_invariant_kernels(32), "float32", kv_dtype=kv_dtype)
    expected = inputs.attend(case)
    for size in (1, 7, 16, 61, 100):
        pieces = []
        for first in range(0, 150, size):
            queries, length = min(size, 150 - first), min(first + size, 150)
            meta = _meta([queries], [length], inputs.meta.block_tables)
            part = dataclasses.replace(inputs, query=inputs.query[first : first + queries], meta=meta)
            pieces.append(part.attend(case))
        assert torch.equal(torch.cat(pieces), expected), f"chunks of {size}"


@pytest.mark.parametrize("kv_dtype", ("float32", *SMALL))
@pytest.mark.parametrize(("seed", "window"), [(0, None), (1, None), (2, 70), (3, 200)])
def test_same_bits_in_any_batch_and_whatever_is_shared(
    seed, window, kv_dtype, make_invariant_kernels, num_threads
):
    generator = torch.Generator().manual_seed(seed)
    kernels = make_invariant_kernels(32)
    kv = kernels.allocate_kv(KVCacheSpec(2, 32, 16, kv_dtype), 40, "cpu")
    tokens = torch.randn(2, 640, 2, 32, generator=generator)
    kernels.store_kv(tokens[0], tokens[1], kv, torch.arange(640, dtype=torch.int32))

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    tables = torch.randint(0, 40, (14, 20), generator=generator).to(torch.int32)
    lengths, queries = [], []
    for row in range(14):
        lengths.append(draw(60, 320))
        queries.append([1, 1, 1, 2, 4, 30][draw(0, 6)])
        if row and draw(0, 5):
            same = draw(0, 20)
            tables[row, :same] = tables[draw(0, row), :same]
    starts = [0, *torch.tensor(queries).cumsum(0).tolist()]
    query = torch.randn(starts[-1], 6, 32, generator=generator)

    def attend(first: int, last: int) -> torch.Tensor:
        meta = _meta(queries[first:last], lengths[first:last], tables[first:last].contiguous())
        part = query[starts[first] : starts[last]].contiguous()
        return kernels.attention(part, kv, meta, 32**-0.5, window)

    alone = torch.cat([attend(row, row + 1) for row in range(14)])
    assert torch.equal(attend(0, 14), alone)


def _meta(queries, lengths, tables):
    starts = [0, *torch.tensor(queries).cumsum(0).tolist()]
    return AttentionMeta(
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        tables,
        torch.full((starts[-1],), -1, dtype=torch.int32),
        max(queries),
        max(lengths),
    )


@pytest.mark.parametrize("kv_dtype", SMALL)
@pytest.mark.parametrize("case", [case for case in CASES if case.window], ids=str)
def test_blocks_before_a_window_need_not_exist(case, kv_dtype, make_kernels):
    inputs = make_inputs(case, make_kernels(case.head_dim, case.block_size), "float32", kv_dtype=kv_dtype)
    expected = inputs.attend(case)
    assert poison_unseen(inputs, case)
    assert relative_rms(inputs.attend(case), expected) < KV_TOLERANCE[kv_dtype]


@pytest.mark.parametrize("kv_dtype", SMALL)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (33, 32)])
def test_blocks_are_copied_and_swapped_whole(kv_dtype, head_dim, block_size, make_kernels):
    kernels, spec = make_kernels(head_dim, block_size), KVCacheSpec(2, head_dim, block_size, kv_dtype)
    kv = kernels.allocate_kv(spec, 4, "cpu")
    assert kv.data.is_contiguous()
    assert kv.data[0].nbytes == kernels.kv_block_bytes(spec) >= spec.block_bytes
    (host,) = kernels.allocate_host_kv([kv], 2)
    generator = torch.Generator().manual_seed(2)
    slots = torch.arange(4 * block_size, dtype=torch.int32)
    kernels.store_kv(*torch.randn(2, 4 * block_size, 2, head_dim, generator=generator), kv, slots)
    before = [tokens.clone() for tokens in kernels.read_kv(kv, slots)]
    kernels.copy_blocks(kv, torch.tensor([[0, 3]]))
    kernels.swap_blocks(kv, host, [(1, 0)])
    kv.data[1] = -1
    kernels.swap_blocks(host, kv, [(0, 2)])
    for old, new in zip(before, kernels.read_kv(kv, slots), strict=True):
        blocks, now = old.split(block_size), new.split(block_size)
        assert torch.equal(now[0], blocks[0])
        assert torch.equal(now[3], blocks[0])
        assert torch.equal(now[2], blocks[1])


def test_bytes_of_a_block():
    assert KVCacheSpec(3, 64, 16, "float32").block_bytes == 2 * 3 * 64 * 16 * 4
    assert KVCacheSpec(3, 64, 16, "float16").block_bytes == 2 * 3 * 64 * 16 * 2
    assert KVCacheSpec(3, 64, 16, "int8").block_bytes == 2 * 3 * 16 * (64 + 4)
    assert KVCacheSpec(3, 64, 16, "fp8").block_bytes == 2 * 3 * 16 * (64 + 4)


def test_a_dtype_that_no_kernel_has_is_refused_with_the_reason(make_kernels):
    with pytest.raises(KernelError, match="KV cache of float64"):
        choose("cpu", "float32", backend="cpu", head_dim=64, kv_dtype="float64")
    assert (
        choose("cpu", "float32", head_dim=64, kv_dtype="float64").choices["store_kv"].backend == "reference"
    )
