"""Triton kernel for attention over the paged cache, prefill chunks and decodes in one launch."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.kv import AttentionMeta, LayerKV

# Rows of a program: (query, head) pairs that share a key/value head. 16 is the least that tl.dot takes.
MIN_ROWS, PREFILL_ROWS = 16, 64
MIN_DIM = 16


@triton.jit
def _tanh(x):
    """Tanh that keeps its relative precision near 0, where 1 - e^-2x would cancel."""
    square = x * x
    small = x + x * square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0)))
    decay = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.2, small, tl.where(x < 0, -large, large))


@triton.jit
def _attention_kernel(
    p_query,
    p_data,  # [N, 2, B, G, D]
    p_out,
    p_starts,
    p_lengths,
    p_tables,
    query_stride,
    table_stride,
    block_size,
    scale,
    soft_cap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a key/value head
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    QUERIES: tl.constexpr,  # queries of a program
    ROWS: tl.constexpr,  # at least QUERIES * GROUP
    TOKENS: tl.constexpr,  # tokens of a step of the loop
    HAS_SOFT_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: some queries of one sequence, one key/value head. Grid (S, tiles of queries, G)."""
    i_sequence = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(2)
    start = tl.load(p_starts + i_sequence)
    num_queries = tl.load(p_starts + i_sequence + 1) - start
    length = tl.load(p_lengths + i_sequence)
    first_query = tl.program_id(1) * QUERIES
    if first_query >= num_queries:
        return

    o_row = tl.arange(0, ROWS)
    o_dim = tl.arange(0, PADDED_DIM)
    o_query = first_query + o_row // GROUP
    is_row = (o_row < QUERIES * GROUP) & (o_query < num_queries)
    mask = is_row[:, None] & (o_dim < DIM)[None, :]
    row = (start + o_query).to(tl.int64)
    head = i_head * GROUP + o_row % GROUP
    b_query = tl.load(
        p_query + (row * query_stride + head * DIM)[:, None] + o_dim[None, :], mask=mask, other=0.0
    )
    o_position = length - num_queries + o_query

    end = tl.minimum(length, length - num_queries + first_query + QUERIES)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(length - num_queries + first_query - window + 1, 0) // TOKENS * TOKENS

    b_top = tl.full([ROWS], float("-inf"), tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    b_sum = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for i_token in range(begin, end, TOKENS):
        o_token = i_token + tl.arange(0, TOKENS)
        is_token = o_token < end
        if HAS_WINDOW:
            # Blocks before the window of the first query may be gone.
            is_token &= o_token > length - num_queries + first_query - window
        block = tl.load(
            p_tables + i_sequence * table_stride + o_token // block_size, mask=is_token, other=0
        ).to(tl.int64)
        slot = (block * 2 * block_size + o_token % block_size) * KV_HEADS + i_head
        kv_mask = is_token[:, None] & (o_dim < DIM)[None, :]
        p_key = p_data + slot[:, None] * DIM + o_dim[None, :]
        b_key = tl.load(p_key, mask=kv_mask, other=0.0)
        b_value = tl.load(p_key + block_size * KV_HEADS * DIM, mask=kv_mask, other=0.0)

        b_score = tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION) * scale
        if HAS_SOFT_CAP:
            b_score = soft_cap * _tanh(b_score / soft_cap)
        is_seen = is_token[None, :] & (o_token[None, :] <= o_position[:, None])
        if HAS_WINDOW:
            is_seen &= o_token[None, :] > o_position[:, None] - window
        b_score = tl.where(is_seen, b_score, float("-inf"))

        b_new_top = tl.maximum(b_top, tl.max(b_score, 1))
        # A row that has seen nothing yet keeps -inf; 0 stands in for it so that no inf - inf arises.
        b_shift = tl.where(b_new_top == float("-inf"), 0.0, b_new_top)
        b_weight = tl.exp(b_score - b_shift[:, None])
        b_shrink = tl.exp(b_top - b_shift)
        b_total = b_total * b_shrink + tl.sum(b_weight, 1)
        b_added = tl.dot(b_weight.to(b_value.dtype), b_value, input_precision=PRECISION)
        b_sum = b_sum * b_shrink[:, None] + b_added
        b_top = b_new_top

    # Padding rows have no tokens.
    b_sum = b_sum / tl.where(b_total == 0, 1.0, b_total)[:, None]
    p_row = p_out + ((row * KV_HEADS * GROUP + head) * DIM)[:, None] + o_dim[None, :]
    tl.store(p_row, b_sum.to(p_out.dtype.element_ty), mask=mask)


def attention(
    query: Tensor,
    kv: LayerKV,
    meta: AttentionMeta,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    out: Tensor | None,
) -> Tensor:
    """See `Kernels.attention`. A block outside of the pool is not noticed: that would wait for the GPU."""
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    sequences = meta.seq_lens.shape[0]
    if sequences == 0 or meta.max_query_len == 0:
        return out
    _, heads, dim = query.shape
    kv_heads = kv.spec.num_kv_heads
    group = heads // kv_heads
    queries = 1 if meta.max_query_len == 1 else max(1, PREFILL_ROWS // group)
    padded_dim = max(MIN_DIM, triton.next_power_of_2(dim))
    # Keys and values of a step must fit in shared memory beside the queries.
    tokens = 32 if padded_dim * query.element_size() > 256 else 64
    _attention_kernel[(sequences, triton.cdiv(meta.max_query_len, queries), kv_heads)](
        query,
        kv.data,
        out,
        meta.query_start_loc,
        meta.seq_lens,
        meta.block_tables,
        query.stride(0),
        meta.block_tables.stride(0),
        kv.spec.block_size,
        scale,
        soft_cap or 0.0,
        window or 0,
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        PADDED_DIM=padded_dim,
        QUERIES=queries,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(queries * group)),
        TOKENS=tokens,
        HAS_SOFT_CAP=soft_cap is not None,
        HAS_WINDOW=window is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_stages=2,
    )
    return out
