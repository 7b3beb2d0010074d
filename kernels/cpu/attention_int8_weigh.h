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
    int32_t *whole = (int32_t *)scratch->wide;
    const float *x = query;
    vf most = vf_set1(0.0f), zero = vf_set1(0.0f);
    vi total = vi_set1(0);
    if (padded > dim) {
        memset(scratch->wide + dim, 0, (size_t)(padded - dim) * 4);
        x = memcpy(scratch->wide, query, (size_t)dim * 4);
    }
    for (int64_t d = 0; d < padded; d += VW) {
        vf at = vf_load(x + d);
        most = vf_max(most, vf_max(at, -at));
        zero = zero + at * vf_set1(0.0f); /* NaN for what is not finite */
    }
    float top = vf_max_lane(most), bad = vf_has_nan(zero) ? NAN : 0;
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
    int8_t *planes = scratch->planes + row * 2 * padded;
    split_factors(whole, padded, 1, planes, planes + padded);
    scratch->excess[row] = (int32_t)((uint32_t)vi_sum_lanes(total) * KEY_OFFSET);
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

/* Finds what a row sees of the chunk. Returns whether that is all of it, with nothing to be done but to weigh it. */
INLINE int sees_all(const Scratch *scratch, const Stretch *stretch, int row, int *low, int *high) {
    find_seen(scratch, row, stretch->start, stretch->window, stretch->from, stretch->to, low, high);
    return *low == 0 && *high == CHUNK && !(stretch->soft_cap > 0);
}

INLINE void int8_weigh_row(const Scratch *scratch, const Stretch *stretch, int row, const int32_t *sums,
                           const int is_split) {
    int low, high;
    if (!sees_all(scratch, stretch, row, &low, &high))
        int8_weigh(scratch, row, sums, low, high, stretch->most, stretch->soft_cap, 0, is_split);
    else
        int8_weigh(scratch, row, sums, low, high, stretch->most, 0, 1, is_split);
}

#if HAS_AMX_ATTENTION
/* The largest lane of each of 16 vectors, in their order. */
INLINE __m512 max_of_each(const __m512 *x) {
    __m512 half[8], quarter[4], pair[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        half[i] = _mm512_max_ps(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        quarter[i] = _mm512_max_ps(_mm512_shuffle_f32x4(half[i], half[i + 4], 0x88),
                                   _mm512_shuffle_f32x4(half[i], half[i + 4], 0xdd));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        pair[i] = _mm512_max_ps(_mm512_unpacklo_ps(quarter[2 * i], quarter[2 * i + 1]),
                                _mm512_unpackhi_ps(quarter[2 * i], quarter[2 * i + 1]));
    __m512 all = _mm512_max_ps(_mm512_shuffle_ps(pair[0], pair[1], 0x44), _mm512_shuffle_ps(pair[0], pair[1], 0xee));
    return _mm512_shuffle_f32x4(all, all, 0xd8);
}

/* What the tile unit does meanwhile: it works by itself, and the rest of the core would wait. */
typedef struct {
    const Cache *cache;
    const Units *units;
    int32_t *sums;
    int64_t d, d_end; /* weighted values of these dimensions, if any */
    int score_row, first, end; /* scores of these units for the rows from `score_row` on, if any */
} Meanwhile;

INLINE void do_values(const Scratch *scratch, const Meanwhile *m, int quarter) {
    int64_t d = m->d + quarter * UNIT;
    if (d < m->d_end) amx_value_unit(scratch, d, m->sums + quarter * UNIT);
}

INLINE void do_scores(const Scratch *scratch, const Meanwhile *m, int half) {
    int unit = m->first + 2 * half;
    if (unit < m->end) amx_score_units(m->cache, scratch, m->score_row, m->units, unit, m->end, m->sums);
}

/* The same as int8_weigh for up to 16 rows that see all of the chunk, without a soft cap, in two steps: what is done once for
 * a row there is done once for all rows here. First scores, which take the place of the sums of high bytes, and maxima. */
static void int8_note_scores(const Scratch *scratch, int row, int count, int32_t *sums, float most,
                             const Meanwhile *meanwhile) {
    __m512 highest[AMX_ROWS];
    vf key_scale[CHUNK / VW];
#pragma GCC unroll 16
    for (int v = 0; v < CHUNK / VW; v++) key_scale[v] = vf_load(scratch->key_scale + v * VW);
#pragma GCC unroll 16
    for (int r = 0; r < AMX_ROWS; r++) {
        int32_t *high = sums + r * CHUNK;
        vi excess = vi_set1(scratch->excess[row + r]);
        vf score[CHUNK / VW];
        if (r % 4 == 1) do_values(scratch, meanwhile, r / 4);
#pragma GCC unroll 16
        for (int v = 0; v < CHUNK / VW; v++) {
            vi whole = dot_total(load_words(high + v * VW), load_words(high + AMX_SUMS + v * VW)) - excess;
            score[v] = __builtin_convertvector(whole, vf) * key_scale[v];
            vf_store((float *)high + v * VW, score[v]);
        }
        highest[r] = (__m512)vf_max(vf_max(score[0], score[1]), vf_max(score[2], score[3]));
    }
    vf top = (vf)max_of_each(highest) * vf_load(scratch->factor + row), before = vf_load(scratch->top + row);
    vi stays = (before >= top) | (vi_lanes() >= vi_set1(count));
    vf_store(scratch->shrink + row, vf_select(stays, vf_set1(1.0f), vf_exp2(before - top, 0)));
    top = vf_select(stays, before, top);
    vf_store(scratch->top + row, top);
    vf_store(scratch->level + row, vf_set1(most * (1.0f / WEIGHT_LEVEL)));
}

/* Then weights. */
static void int8_weigh_tile(const Scratch *scratch, int row, int count, const int32_t *sums, const Meanwhile *meanwhile) {
    vf value_level[CHUNK / VW];
#pragma GCC unroll 16
    for (int v = 0; v < CHUNK / VW; v++) value_level[v] = vf_load(scratch->value_level + v * VW);
    for (int half = 0; half < 2; half++) {
        do_scores(scratch, meanwhile, half);
        int end = half ? count : count < AMX_ROWS / 2 ? count : AMX_ROWS / 2;
        for (int r = half * (AMX_ROWS / 2); r < end; r++) {
            const float *score = (const float *)sums + r * CHUNK;
            vf factor = vf_set1(scratch->factor[row + r]), minus = vf_set1(-scratch->top[row + r]);
            vf *total = scratch->total + (row + r) * VU, sum = total[0] * vf_set1(scratch->shrink[row + r]);
            vi weight[CHUNK / VW];
#pragma GCC unroll 16
            for (int v = 0; v < CHUNK / VW; v++) {
                vf w = vf_exp2(vf_fma(vf_load(score + v * VW), factor, minus), 1);
                sum = sum + w;
                weight[v] = round_to_int(w * value_level[v]);
            }
            total[0] = sum;
            int8_t *weights = scratch->weights + (row + r) * 2 * CHUNK;
            split_64(weight, weights, weights + CHUNK);
        }
    }
}
#endif

#endif
