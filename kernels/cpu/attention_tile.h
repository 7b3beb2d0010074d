/* The inner loops of attention: scores of a tile of rows, running softmax, weighted values, for keys and values that are
 * floats. A row is one query head of one query; all rows of a tile read the same key/value head. Scores are in powers of
 * two: log2 e stands in the queries already. */
#ifndef BATCHGEN_ATTENTION_TILE_H
#define BATCHGEN_ATTENTION_TILE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "attention_plan.h"
#include "kv_float.h"
#include "simd.h"

#define CHUNK_UNITS (CHUNK / UNIT)
#define LOG2_E 1.44269504088896341f

/* Rows and units of a tile that is held in registers: WIDE units at a time where registers allow. */
#if VW == 16
#define ROWS 6
#define WIDE 4
#elif VW == 8
#define ROWS 6
#define WIDE 1
#else
#define ROWS 2
#define WIDE 1
#endif

/* What one thread works in: its rows, and how far they are. */
typedef struct {
    float *query, *sum, *score; /* [rows, head_dim], [rows, value_dim], [rows, CHUNK] */
    vf *total;                  /* [rows, VU]: sum of weights, by lane */
    float *top, *shrink;        /* [rows]: running maximum; factor for what came before this chunk */
    int64_t *position;          /* [rows]: of the query in its sequence */
    int64_t *place;             /* [rows]: token * heads + head, in query and result */
    float *widened;             /* [CHUNK, value_dim]: a chunk's keys or values, of halves that many rows read */
    /* With keys and values of 8 bits, in place of `query`: */
    int8_t *planes, *weights;         /* [rows, 2, padded head_dim], [rows, 2, CHUNK]: factors (int8_dot.h) */
    float *wide;                      /* [padded head_dim]: a row on its way */
    int32_t *excess;                  /* [rows]: what the keys' offset adds to a score */
    float *factor, *level;            /* [rows]: of integer scores; of integer sums of values */
    float *key_scale, *value_scale;   /* [CHUNK]: of this chunk's tokens */
    float *value_level;               /* [CHUNK]: scales of values as levels of weights, for rows that see all of it */
    int32_t *tile_sums;               /* [2, AMX_SUMS]: with AMX, sums of high and of low bytes */
    int8_t *values;                   /* [value_dim * CHUNK]: with AMX, the chunk's values as tiles */
    int use_amx;
} Scratch;

/* Takes a part of the thread's memory, in whole cache lines; with NULL it only counts them. */
static inline void *part(char *memory, size_t *used, int64_t bytes) {
    char *at = memory ? memory + *used : 0;
    *used += ((size_t)bytes + 63) / 64 * 64;
    return at;
}

/* The keys and values of a chunk's units. */
typedef struct {
    const char *keys[CHUNK_UNITS], *values[CHUNK_UNITS];
    const float *scales[CHUNK_UNITS]; /* of keys of 8 bits; those of values follow a block further */
} Units;

/* The tokens out of [from, to) of the chunk that begins at `start` which a row sees. */
INLINE void find_seen(const Scratch *scratch, int row, int64_t start, int64_t window, int from, int to, int *low, int *high) {
    int64_t at = scratch->position[row] - start;
    *low = (int)at_most(at_least(window ? at - window + 1 : 0, from), to);
    *high = (int)at_least(at_most(at + 1, to), *low);
}

/* Has a unit fetched. Memory that is in the cache already costs next to nothing. */
static void fetch_unit(const Cache *cache, const Units *units, int u) {
    /* A cache line of 8-bit keys holds four dimensions of a unit. */
    int64_t bytes = kv_bytes(cache->type), step = cache->type == KV_INT8 ? 4 : 1;
    for (int64_t d = 0; d < cache->head_dim; d += step)
        __builtin_prefetch(units->keys[u] + d * cache->block_size * bytes, 0, 2);
    for (int64_t at = 0; at < cache->value_dim * UNIT * bytes; at += 64) __builtin_prefetch(units->values[u] + at, 0, 2);
}

/* 2^x for x <= 0; exactly 0 below -127, -infinity included; exactly 1 for 0. The fit has a relative error of 2e-9 before
 * rounding, the coarse one of 3e-6. */
INLINE vf vf_exp2(vf x, const int is_coarse) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to the nearest integer */
    vf bounded = vf_max(vf_set1(-127.0f), x); /* in this order NaN stays one */
    vf shifted = bounded + vf_set1(shift);
    vf r = bounded - (shifted - vf_set1(shift)), p;
    if (is_coarse) {
        p = vf_fma(vf_set1(9.600325162e-03f), r, vf_set1(5.591663416e-02f));
        p = vf_fma(p, r, vf_set1(2.402371964e-01f));
        p = vf_fma(p, r, vf_set1(6.931220480e-01f));
    } else {
        p = vf_fma(vf_set1(1.537063270e-04f), r, vf_set1(1.339980917e-03f));
        p = vf_fma(p, r, vf_set1(9.618373398e-03f));
        p = vf_fma(p, r, vf_set1(5.550329169e-02f));
        p = vf_fma(p, r, vf_set1(2.402264846e-01f));
        p = vf_fma(p, r, vf_set1(6.931472055e-01f));
    }
    p = vf_fma(p, r, vf_set1(1.0f));
    /* The integer sits in the low bits of `shifted`; it is added to the exponent, which -127 makes that of 0. */
    return (vf)((vi)p + ((vi)shifted << 23));
}

/* Scores of `m` rows against `n` units of keys. What `ahead` points at is fetched; memory that is in the cache already
 * costs next to nothing. */
INLINE void score_tile(const float *query, int64_t dim, const char *const *keys, const char *const *ahead,
                       int64_t key_stride, float *score, const int m, const int n, const int type) {
    vf sum[ROWS][WIDE * VU];
#pragma GCC unroll 16
    for (int r = 0; r < m; r++)
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) sum[r][v] = vf_set1(0.0f);
    for (int64_t d = 0; d < dim; d++) {
        vf key[WIDE * VU];
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) key[v] = kv_load(keys[v / VU], d * key_stride + v % VU * VW, type);
#pragma GCC unroll 16
        for (int u = 0; u < n; u++) __builtin_prefetch(ahead[u] + d * key_stride * kv_bytes(type), 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < m; r++) {
            vf q = vf_set1(query[r * dim + d]);
#pragma GCC unroll 16
            for (int v = 0; v < n * VU; v++) sum[r][v] = vf_fma(q, key[v], sum[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < m; r++)
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) vf_store(score + r * CHUNK + v * VW, sum[r][v]);
}

/* Sums the weighted values of tokens [from, to) of the chunk, for `n` units of dimensions of `m` rows, and adds them to
 * what is there times `shrink`. */
INLINE void value_tile(const float *weight, const float *shrink, const char *const *values, const char *const *ahead,
                       int64_t value_dim, int from, int to, float *out, const int m, const int n, const int type) {
    vf sum[ROWS][WIDE * VU];
#pragma GCC unroll 16
    for (int r = 0; r < m; r++)
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) sum[r][v] = vf_set1(0.0f);
    for (int t = from; t < to; t++) {
        int64_t row = t % UNIT * value_dim * kv_bytes(type);
        vf value[WIDE * VU];
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) value[v] = kv_load(values[t / UNIT] + row, v * VW, type);
#pragma GCC unroll 16
        for (int b = 0; b < n * UNIT * (int)kv_bytes(type); b += 64)
            __builtin_prefetch(ahead[t / UNIT] + row + b, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < m; r++) {
            vf w = vf_set1(weight[r * CHUNK + t]);
#pragma GCC unroll 16
            for (int v = 0; v < n * VU; v++) sum[r][v] = vf_fma(w, value[v], sum[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < m; r++)
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) {
            float *to = out + r * value_dim + v * VW;
            vf_store(to, vf_fma(vf_load(to), vf_set1(shrink[r]), sum[r][v]));
        }
}

#if ROWS == 6
#define BY_ROWS(CALL) \
    switch (m) { \
        case 1: CALL(1); break; \
        case 2: CALL(2); break; \
        case 3: CALL(3); break; \
        case 4: CALL(4); break; \
        case 5: CALL(5); break; \
        default: CALL(6); \
    }
#else
#define BY_ROWS(CALL) \
    switch (m) { \
        case 1: CALL(1); break; \
        default: CALL(2); \
    }
#endif

/* What the tile of rows from `row` on fetches ahead: everything if it is the first of few, one unit if there are many. */
INLINE void share_ahead(const char *const *units, const char *const *ahead, int row, int rows, const char **next) {
    for (int u = 0; u < CHUNK_UNITS; u++)
        next[u] = (rows <= (CHUNK_UNITS - 1) * ROWS ? row == 0 : row == u * ROWS) ? ahead[u] : units[u];
}

/* Scores of rows [0, rows) against units [first, end) of the chunk. */
INLINE void scores(const Scratch *scratch, int rows, int64_t dim, const Units *units, const Units *ahead,
                   int64_t key_stride, int first, int end, const int type) {
    for (int row = 0; row < rows; row += ROWS) {
        int m = rows - row < ROWS ? rows - row : ROWS, unit = first;
        const float *query = scratch->query + row * dim;
        float *score = scratch->score + row * CHUNK;
        const char *next[CHUNK_UNITS];
        share_ahead(units->keys, ahead->keys, row, rows, next);
#define TILE(M, N) score_tile(query, dim, units->keys + unit, next + unit, key_stride, score + unit * UNIT, M, N, type)
#define WIDE_CALL(M) TILE(M, WIDE)
#define UNIT_CALL(M) TILE(M, 1)
        for (; unit + WIDE <= end; unit += WIDE) BY_ROWS(WIDE_CALL)
        for (; unit < end; unit++) BY_ROWS(UNIT_CALL)
#undef TILE
    }
}

/* Adds the weighted values of tokens [from, to) of the chunk to rows [row, rows). */
INLINE void values(const Scratch *scratch, int row, int rows, int64_t value_dim, const Units *units, const Units *ahead,
                   int from, int to, const int type) {
    for (; row < rows; row += ROWS) {
        int m = rows - row < ROWS ? rows - row : ROWS;
        const float *weight = scratch->score + row * CHUNK, *shrink = scratch->shrink + row;
        float *sum = scratch->sum + row * value_dim;
        const char *then[CHUNK_UNITS], *at[CHUNK_UNITS], *next[CHUNK_UNITS];
        share_ahead(units->values, ahead->values, row, rows, then);
        int64_t d = 0;
#define AT_DIM() \
    for (int u = from / UNIT; u * UNIT < to; u++) { \
        at[u] = units->values[u] + d * kv_bytes(type); \
        next[u] = then[u] + d * kv_bytes(type); \
    }
#define TILE(M, N) value_tile(weight, shrink, at, next, value_dim, from, to, sum + d, M, N, type)
        for (; d + WIDE * UNIT <= value_dim; d += WIDE * UNIT) {
            AT_DIM()
            BY_ROWS(WIDE_CALL)
        }
        for (; d < value_dim; d += UNIT) {
            AT_DIM()
            BY_ROWS(UNIT_CALL)
        }
#undef AT_DIM
#undef TILE
#undef WIDE_CALL
#undef UNIT_CALL
    }
}

/* Keys and values of units [first, end), widened once for many rows. */
INLINE void widen_keys(const Scratch *scratch, const Cache *cache, const Units *units, const Units *ahead, int first, int end,
                       Units *wide, const int type) {
    for (int u = first; u < end; u++) {
        float *to = scratch->widened + u * cache->head_dim * UNIT;
        widen(units->keys[u], ahead->keys[u], cache->block_size * kv_bytes(type), cache->head_dim, to, type);
        wide->keys[u] = (const char *)to;
    }
}

INLINE void widen_values(const Scratch *scratch, const Cache *cache, const Units *units, const Units *ahead, int first, int end,
                         Units *wide, const int type) {
    for (int u = first; u < end; u++) {
        float *to = scratch->widened + u * cache->value_dim * UNIT;
        widen(units->values[u], ahead->values[u], UNIT * kv_bytes(type), cache->value_dim, to, type);
        wide->values[u] = (const char *)to;
    }
}

/* Whether values of tokens [from, to) of the chunk are finite, padding included. */
INLINE int are_finite(const Units *units, int64_t value_dim, int64_t from, int64_t to, const int type) {
    if (from >= to) return 1;
    vf zero = vf_set1(0.0f);
    for (int64_t t = from; t < to; t++)
        for (int64_t d = 0; d < value_dim; d += VW)
            zero = zero + kv_load(units->values[t / UNIT], t % UNIT * value_dim + d, type) * vf_set1(0.0f);
    for (int v = 1; v < VW; v++) zero[0] += zero[v];
    return zero[0] == 0.0f;
}

/* Applies the soft cap, and -infinity where the row does not see a token: it sees [low, high) of the chunk. */
static void shape(float *score, int first, int end, int64_t low, int64_t high, float soft_cap) {
    for (int at = first * UNIT; at < end * UNIT; at += VW) {
        vf s = vf_load(score + at);
        if (soft_cap > 0) s = vf_tanh(s / vf_set1(soft_cap)) * vf_set1(soft_cap * LOG2_E);
        vi token = vi_lanes() + vi_set1(at);
        s = vf_select((token >= vi_set1((int32_t)low)) & (token < vi_set1((int32_t)high)), s, vf_set1(-INFINITY));
        vf_store(score + at, s);
    }
}

/* Turns `n` units of one row's scores into weights. */
INLINE void weigh_units(const Scratch *scratch, int row, float *score, const int n) {
    vf *total = scratch->total + row * VU;
    vf highest = vf_load(score);
    for (int v = 1; v < n * VU; v++) highest = vf_max(highest, vf_load(score + v * VW));
    float top = vf_max_lane(highest), before = scratch->top[row], shrink = 1.0f;
    if (before >= top) {
        top = before;
    } else {
        shrink = vf_exp2(vf_set1(before - top), 0)[0];
        scratch->top[row] = top;
    }
    scratch->shrink[row] = shrink;
    if (top == -INFINITY) { /* nothing seen yet */
        memset(score, 0, (size_t)n * UNIT * 4);
        return;
    }
    for (int v = 0; v < VU; v++) {
        vf sum = total[v] * vf_set1(shrink);
        for (int u = 0; u < n; u++) {
            float *at = score + u * UNIT + v * VW;
            vf w = vf_exp2(vf_load(at) - vf_set1(top), 0);
            vf_store(at, w);
            sum = sum + w;
        }
        total[v] = sum;
    }
}

/* Turns one row's scores of units [first, end) into weights. The row sees tokens [low, high) of the chunk. */
static void weigh(const Scratch *scratch, int row, int first, int end, int64_t low, int64_t high, float soft_cap) {
    float *score = scratch->score + row * CHUNK;
    if (soft_cap > 0 || low > first * UNIT || high < end * UNIT) shape(score, first, end, low, high, soft_cap);
    if (end - first == CHUNK_UNITS)
        weigh_units(scratch, row, score, CHUNK_UNITS);
    else
        weigh_units(scratch, row, score + first * UNIT, end - first);
}

#endif
