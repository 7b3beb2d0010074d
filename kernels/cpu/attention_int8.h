/* The inner loops of attention over 8-bit keys and values: all products are integers and add up exactly.
 *
 * A row's queries become integers of 16 bits with one scale; the scale of a token's key multiplies the score. The scale of
 * its value is folded into the weight, and weights of a chunk become integers of 15 bits that count fractions of the
 * largest value scale which the row sees there. So neither tiles nor the kind of instruction change a bit. */
#ifndef BATCHGEN_ATTENTION_INT8_H
#define BATCHGEN_ATTENTION_INT8_H

#include <math.h>

#include "attention_int8_amx.h"
#include "attention_tile.h"
#include "int8_dot.h"

#define QUERY_LEVEL 32512 /* 127 * 256: high and low bytes are both signed */
#define WEIGHT_LEVEL 32767

/* Rows of a tile that is held in registers, two sums each. */
#if VW == 4
#define INT_ROWS 1
#else
#define INT_ROWS 3
#endif
#if VW == 16
#define INT_WIDE 4
#else
#define INT_WIDE 1
#endif

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

/* Integer scores of `m` rows against `n` units of keys. */
INLINE void int8_score_tile(const int8_t *planes, int64_t padded, int64_t quads, const char *const *keys,
                            const char *const *ahead, int64_t key_stride, const int32_t *excess, int32_t *score,
                            const int m, const int n) {
    vi sum[2 * INT_ROWS][INT_WIDE * VU];
#pragma GCC unroll 16
    for (int r = 0; r < 2 * m; r++)
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) sum[r][v] = vi_set1(0);
    for (int64_t q = 0; q < quads; q++) {
        vi key[INT_WIDE * VU];
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) key[v] = load_words(keys[v / VU] + q * key_stride + v % VU * VW * 4);
#pragma GCC unroll 16
        for (int u = 0; u < n; u++) __builtin_prefetch(ahead[u] + q * key_stride, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < 2 * m; r++) {
            vi factors = vi_set1(*(const int32_t *)(planes + r * padded + q * 4));
#pragma GCC unroll 16
            for (int v = 0; v < n * VU; v++) sum[r][v] = dot_unsigned(sum[r][v], key[v], factors, r % 2);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < m; r++)
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++)
            *(vi_unaligned *)(score + r * CHUNK + v * VW) =
                dot_total(sum[2 * r][v], sum[2 * r + 1][v]) - vi_set1(excess[r]);
}

/* Adds the weighted values of units [first, end) of the chunk, for `n` units of dimensions of `m` rows, to what is there
 * times `shrink`. */
INLINE void int8_value_tile(const int8_t *weights, const float *shrink, const float *level, const char *const *values,
                            const char *const *ahead, int64_t value_dim, int first, int end, float *out, const int m,
                            const int n) {
    vi sum[2 * INT_ROWS][INT_WIDE * VU];
#pragma GCC unroll 16
    for (int r = 0; r < 2 * m; r++)
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) sum[r][v] = vi_set1(0);
    for (int q = first * UNIT / 4; q < end * UNIT / 4; q++) {
        int64_t at = q % (UNIT / 4) * value_dim * 4;
        vi value[INT_WIDE * VU];
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) value[v] = load_words(values[q * 4 / UNIT] + at + v * VW * 4);
#pragma GCC unroll 16
        for (int u = 0; u < n; u++) __builtin_prefetch(ahead[q * 4 / UNIT] + at + u * 64, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < 2 * m; r++) {
            vi factors = vi_set1(*(const int32_t *)(weights + r * CHUNK + factor_place(q) * 4));
#pragma GCC unroll 16
            for (int v = 0; v < n * VU; v++) sum[r][v] = dot_signed(sum[r][v], value[v], factors, r % 2);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < m; r++)
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) {
            float *to = out + r * value_dim + v * VW;
            vf whole = __builtin_convertvector(dot_total(sum[2 * r][v], sum[2 * r + 1][v]), vf);
            vf_store(to, vf_fma(vf_load(to), vf_set1(shrink[r]), whole * vf_set1(level[r])));
        }
}

#if INT_ROWS == 3
#define BY_INT_ROWS(CALL) \
    switch (m) { \
        case 1: CALL(1); break; \
        case 2: CALL(2); break; \
        default: CALL(3); \
    }
#else
#define BY_INT_ROWS(CALL) \
    { \
        (void)m; \
        CALL(1); \
    }
#endif

static void int8_scores(const Cache *cache, const Scratch *scratch, int rows, const Units *units, const Units *ahead,
                        int first, int end) {
    int64_t padded = padded_dim(cache->head_dim), quads = (cache->head_dim + 3) / 4;
    for (int row = 0; row < rows; row += INT_ROWS) {
        int m = rows - row < INT_ROWS ? rows - row : INT_ROWS, unit = first;
        const char *const *next = row == 0 ? ahead->keys : units->keys;
        int32_t *score = (int32_t *)scratch->score + row * CHUNK;
#define TILE(M, N) \
    int8_score_tile(scratch->planes + row * 2 * padded, padded, quads, units->keys + unit, next + unit, \
                    cache->block_size * 4, scratch->excess + row, score + unit * UNIT, M, N)
#define WIDE_CALL(M) TILE(M, INT_WIDE)
#define UNIT_CALL(M) TILE(M, 1)
        for (; unit + INT_WIDE <= end; unit += INT_WIDE) BY_INT_ROWS(WIDE_CALL)
        for (; unit < end; unit++) BY_INT_ROWS(UNIT_CALL)
#undef TILE
    }
}

static void int8_values(const Cache *cache, const Scratch *scratch, int rows, const Units *units, const Units *ahead,
                        int first, int end) {
    for (int row = 0; row < rows; row += INT_ROWS) {
        int m = rows - row < INT_ROWS ? rows - row : INT_ROWS;
        const char *const *then = row == 0 ? ahead->values : units->values, *at[CHUNK_UNITS], *next[CHUNK_UNITS];
        float *sum = scratch->sum + row * cache->value_dim;
        int64_t d = 0;
#define AT_DIM() \
    for (int u = first; u < end; u++) { \
        at[u] = units->values[u] + d * 4; \
        next[u] = then[u] + d * 4; \
    }
#define TILE(M, N) \
    int8_value_tile(scratch->weights + row * 2 * CHUNK, scratch->shrink + row, scratch->level + row, at, next, \
                    cache->value_dim, first, end, sum + d, M, N)
        for (; d + INT_WIDE * UNIT <= cache->value_dim; d += INT_WIDE * UNIT) {
            AT_DIM()
            BY_INT_ROWS(WIDE_CALL)
        }
        for (; d < cache->value_dim; d += UNIT) {
            AT_DIM()
            BY_INT_ROWS(UNIT_CALL)
        }
#undef AT_DIM
#undef TILE
#undef WIDE_CALL
#undef UNIT_CALL
    }
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

#if HAS_AMX_ATTENTION
static void amx_chunk(const Cache *cache, const Scratch *scratch, int rows, const Units *units, const Units *ahead,
                      const Stretch *stretch) {
    int first = stretch->from / UNIT, end = (stretch->to + UNIT - 1) / UNIT;
    for (int unit = first; unit < end; unit++)
        for (int64_t at = 0; at < cache->value_dim * UNIT; at += 64) {
            if (at < cache->head_dim * UNIT) __builtin_prefetch(ahead->keys[unit] + at / 64 * cache->block_size * 4, 0, 2);
            __builtin_prefetch(ahead->values[unit] + at, 0, 2);
        }
    copy_values(cache, scratch, units, first, end);
    /* One tile of rows after the other, so that all of it stays in the nearest cache. */
    for (int row = 0; row < rows; row += AMX_ROWS) {
        int count = rows - row < AMX_ROWS ? rows - row : AMX_ROWS;
        amx_score_tile(cache, scratch, row, units, first, end, scratch->tile_sums);
        for (int r = 0; r < count; r++) int8_weigh_row(scratch, stretch, row + r, scratch->tile_sums + r * CHUNK, 1);
        for (int64_t d = 0; d < cache->value_dim; d += CHUNK) {
            int64_t d_end = at_most(d + CHUNK, cache->value_dim);
            amx_value_tile(scratch, row, d, d_end, scratch->tile_sums);
            add_values(cache, scratch, row, count, d, d_end, scratch->tile_sums);
        }
    }
}
#endif

static void int8_chunk(const Cache *cache, const Scratch *scratch, int rows, const Units *units, const Units *ahead,
                       int64_t start, int from, int to, int64_t window, float soft_cap) {
    int first = from / UNIT, end = (to + UNIT - 1) / UNIT;
    Stretch stretch = {start, window, from, to, soft_cap, load_scales(cache, scratch, units, from, to)};
    for (int u = first; u < end; u++) {
        __builtin_prefetch(ahead->scales[u], 0, 2);
        __builtin_prefetch(ahead->scales[u] + cache->block_size, 0, 2);
    }
#if HAS_AMX_ATTENTION
    if (scratch->use_amx && rows > INT_ROWS) {
        amx_chunk(cache, scratch, rows, units, ahead, &stretch);
        return;
    }
#endif
    int8_scores(cache, scratch, rows, units, ahead, first, end);
    for (int row = 0; row < rows; row++)
        int8_weigh_row(scratch, &stretch, row, (const int32_t *)scratch->score + row * CHUNK, 0);
    int8_values(cache, scratch, rows, units, ahead, first, end);
}

static void lay_out_int8(const Cache *cache, Scratch *scratch, int64_t rows, char *memory, size_t *used) {
    int64_t padded = padded_dim(cache->head_dim);
    scratch->planes = part(memory, used, rows * 2 * padded);
    scratch->weights = part(memory, used, rows * 2 * CHUNK);
    scratch->wide = part(memory, used, padded * 4);
    scratch->excess = part(memory, used, rows * 4);
    scratch->factor = part(memory, used, rows * 4);
    scratch->level = part(memory, used, rows * 4);
    scratch->key_scale = part(memory, used, CHUNK * 4);
    scratch->value_scale = part(memory, used, CHUNK * 4);
    scratch->value_level = part(memory, used, CHUNK * 4);
#if HAS_AMX_ATTENTION
    scratch->use_amx = amx_is_usable() && keys_fill_tiles(cache);
    scratch->tile_sums = part(memory, used, 2 * AMX_SUMS * 4);
    scratch->values = part(memory, used, cache->value_dim * CHUNK);
#endif
}

#endif
