/* Softmax of attention over 8-bit keys and values: queries, and weights of values, as integers. */
#ifndef BATCHGEN_ATTENTION_INT8_WEIGH_H
#define BATCHGEN_ATTENTION_INT8_WEIGH_H

#include <math.h>

#include "attention_int8_amx.h"
#include "attention_tile.h"
#include "int8_dot.h"

#define QUERY_LEVEL 32512 /* 127 * 256: high and low bytes are both signed */
#define WEIGHT_LEVEL 32767

INLINE vi round_to_int(vf x) {
#if VW == 16
    return (vi)_mm512_cvtps_epi32((__m512)x);
#else
    const float shift = 12582912.0f; /* as in vf_exp2; |x| is below 2^22 */
    return (vi)(x + vf_set1(shift)) - (vi)vf_set1(shift);
#endif
}

/* Writes a row's query as integers. */
static void quantize_query(const Scratch *scratch, int64_t row, const float *query, int64_t dim, float scale) {
    int64_t padded = padded_dim(dim);
    float *x = scratch->wide;
    int32_t *whole = (int32_t *)scratch->wide;
    vf most = vf_set1(0.0f), zero = vf_set1(0.0f);
    vi total = vi_set1(0);
    memset(x + dim, 0, (size_t)(padded - dim) * 4);
    memcpy(x, query, (size_t)dim * 4);
    for (int64_t d = 0; d < padded; d += VW) {
        vf at = vf_load(x + d);
        most = vf_max(most, vf_max(at, -at));
        zero = zero + at * vf_set1(0.0f); /* NaN for what is not finite */
    }
    float top = vf_max_lane(most), bad = 0;
    for (int v = 0; v < VW; v++) bad += zero[v];
    float inverse = top > 0 && bad == 0 ? QUERY_LEVEL / top : 0;
    /* Of numbers near the smallest there are the inverse is infinite. */
    if (!(inverse < INFINITY)) inverse = 0;
    for (int64_t d = 0; d < padded; d += VW) {
        vf at = vf_load(x + d) * vf_set1(inverse);
        at = vf_select(at > vf_set1(QUERY_LEVEL), vf_set1(QUERY_LEVEL), at);
        at = vf_select(at < vf_set1(-QUERY_LEVEL), vf_set1(-QUERY_LEVEL), at);
        vi rounded = round_to_int(at);
        total = total + rounded;
        *(vi_unaligned *)(whole + d) = rounded;
    }
    uint32_t excess = 0;
    for (int v = 0; v < VW; v++) excess += (uint32_t)total[v] * KEY_OFFSET;
    int8_t *planes = scratch->planes + row * 2 * padded;
    split_factors(whole, padded, 1, planes, planes + padded);
    scratch->excess[row] = (int32_t)excess;
    scratch->factor[row] = top / QUERY_LEVEL * scale + bad;
}

/* What turns a value's scale into a level of weights, if `most` is the largest. */
static float level_of(float most) {
    float inverse = most > 0 ? WEIGHT_LEVEL / most : 0;
    return inverse < INFINITY ? inverse : 0; /* beyond the largest float there is nothing left of the values */
}

/* Scales of tokens [from, to) of the chunk; values' are 0 elsewhere. Returns the largest of values. */
static float load_scales(const Cache *cache, const Scratch *scratch, const Units *units, int from, int to) {
    vf most = vf_set1(0.0f);
    for (int t = from / UNIT * UNIT; t < (to + UNIT - 1) / UNIT * UNIT; t += VW) {
        const float *scales = units->scales[t / UNIT] + t % UNIT;
        vi token = vi_lanes() + vi_set1(t);
        vi is_there = (token >= vi_set1(from)) & (token < vi_set1(to));
        vf value = vf_select(is_there, vf_load(scales + cache->block_size), vf_set1(0.0f));
        vf_store(scratch->key_scale + t, vf_load(scales));
        vf_store(scratch->value_scale + t, value);
        most = vf_max(most, value);
    }
    float found = vf_max_lane(most), inverse = level_of(found);
    for (int t = from / UNIT * UNIT; t < (to + UNIT - 1) / UNIT * UNIT; t += VW)
        vf_store(scratch->value_level + t, vf_load(scratch->value_scale + t) * vf_set1(inverse));
    return found;
}

/* Turns one row's integer scores of a chunk into integer weights. The row sees tokens [low, high) of the chunk; `most` is
 * the largest value scale if it sees all CHUNK. With `is_split` the sums are of high bytes and, AMX_SUMS on, of low ones. */
INLINE void int8_weigh(const Scratch *scratch, int row, const int32_t *sums, int64_t low, int64_t high, float most,
                       float soft_cap, const int is_whole, const int is_split) {
    vf score[CHUNK / VW], level[CHUNK / VW], highest = vf_set1(-INFINITY), widest = vf_set1(0.0f);
    vf factor = vf_set1(scratch->factor[row]);
#pragma GCC unroll 16
    for (int v = 0; v < CHUNK / VW; v++) {
        int t = v * VW;
        vi whole = load_words(sums + t);
        if (is_split) whole = dot_total(whole, load_words(sums + AMX_SUMS + t)) - vi_set1(scratch->excess[row]);
        vf s = __builtin_convertvector(whole, vf) * vf_load(scratch->key_scale + t);
        if (!is_whole) {
            if (soft_cap > 0) s = vf_tanh(s * factor / vf_set1(soft_cap)) * vf_set1(soft_cap * LOG2_E);
            vi token = vi_lanes() + vi_set1(t);
            vi is_seen = (token >= vi_set1((int32_t)low)) & (token < vi_set1((int32_t)high));
            s = vf_select(is_seen, s, vf_set1(-INFINITY));
            level[v] = vf_select(is_seen, vf_load(scratch->value_scale + t), vf_set1(0.0f));
            widest = vf_max(widest, level[v]);
        }
        highest = vf_max(highest, s);
        score[v] = s;
    }
    if (!is_whole && soft_cap > 0) factor = vf_set1(1.0f);
    float top = vf_max_lane(highest) * factor[0], before = scratch->top[row], shrink = 1.0f;
    if (!is_whole && high <= low) top = -INFINITY;
    if (before >= top) {
        top = before;
    } else {
        shrink = vf_exp2(vf_set1(before - top), 0)[0];
        scratch->top[row] = top;
    }
    if (!is_whole) most = vf_max_lane(widest);
    scratch->shrink[row] = shrink;
    scratch->level[row] = most * (1.0f / WEIGHT_LEVEL);
    float inverse = is_whole ? 1.0f : level_of(most);
    vi weight[CHUNK / VW];
    vf *total = scratch->total + row * VU, sum[VU];
    for (int v = 0; v < VU; v++) sum[v] = total[v] * vf_set1(shrink);
#pragma GCC unroll 16
    for (int v = 0; v < CHUNK / VW; v++) {
        /* A sum that is rounded once may come out a little above 0; splitting bounds the weight. */
        vf w = vf_exp2(vf_fma(score[v], factor, vf_set1(-top)), 1);
        vf counts = vf_load(scratch->value_level + v * VW);
        if (!is_whole) {
            vi token = vi_lanes() + vi_set1(v * VW);
            vi is_seen = (token >= vi_set1((int32_t)low)) & (token < vi_set1((int32_t)high));
            w = vf_select(is_seen, w, vf_set1(0.0f));
            counts = level[v] * vf_set1(inverse);
        }
        sum[v % VU] = sum[v % VU] + w;
        weight[v] = round_to_int(w * counts);
    }
    for (int v = 0; v < VU; v++) total[v] = sum[v];
    int8_t *weights = scratch->weights + row * 2 * CHUNK;
    split_64(weight, weights, weights + CHUNK);
}

/* A chunk of an item: tokens [from, to) of it, and what its rows see. */
typedef struct {
    int64_t start, window;
    int from, to;
    float soft_cap, most;
} Stretch;

INLINE void int8_weigh_row(const Scratch *scratch, const Stretch *stretch, int row, const int32_t *sums,
                           const int is_split) {
    int64_t at = scratch->position[row] - stretch->start;
    int64_t low = at_least(stretch->window ? at - stretch->window + 1 : 0, stretch->from);
    int64_t high = at_most(at + 1, stretch->to);
    if (low > 0 || high < CHUNK || stretch->soft_cap > 0)
        int8_weigh(scratch, row, sums, low, high, stretch->most, stretch->soft_cap, 0, is_split);
    else
        int8_weigh(scratch, row, sums, low, high, stretch->most, 0, 1, is_split);
}

#endif
