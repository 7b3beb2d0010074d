/* The inner loops of attention: scores of a tile of rows, running softmax, weighted values. A row is one query head of
 * one query; all rows of a tile read the same key/value head. */
#ifndef BATCHGEN_ATTENTION_TILE_H
#define BATCHGEN_ATTENTION_TILE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"

#define CHUNK 64 /* tokens between two rescalings of the running softmax */
#define CHUNK_UNITS (CHUNK / UNIT)

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
} Scratch;

/* A unit's keys and values in this chunk, and those to fetch ahead (NULL: none). */
typedef struct {
    const float *keys[CHUNK_UNITS], *values[CHUNK_UNITS];
} Units;

/* Scores of `m` rows against `n` units of keys. */
INLINE void score_tile(const float *query, int64_t dim, const float *const *keys, const float *const *ahead,
                       int64_t key_stride, float *score, const int m, const int n) {
    vf sum[ROWS][WIDE * VU];
#pragma GCC unroll 16
    for (int r = 0; r < m; r++)
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) sum[r][v] = vf_set1(0.0f);
    for (int64_t d = 0; d < dim; d++) {
        vf key[WIDE * VU];
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) key[v] = vf_load(keys[v / VU] + d * key_stride + v % VU * VW);
        if (ahead)
#pragma GCC unroll 16
            for (int u = 0; u < n; u++) __builtin_prefetch(ahead[u] + d * key_stride, 0, 2);
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
INLINE void value_tile(const float *weight, const float *shrink, const float *const *values,
                       const float *const *ahead, int64_t value_dim, int from, int to, float *out, const int m,
                       const int n) {
    vf sum[ROWS][WIDE * VU];
#pragma GCC unroll 16
    for (int r = 0; r < m; r++)
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) sum[r][v] = vf_set1(0.0f);
    for (int t = from; t < to; t++) {
        const float *row = values[t / UNIT] + t % UNIT * value_dim;
        vf value[WIDE * VU];
#pragma GCC unroll 16
        for (int v = 0; v < n * VU; v++) value[v] = vf_load(row + v * VW);
        if (ahead)
#pragma GCC unroll 16
            for (int u = 0; u < n; u++)
                __builtin_prefetch(ahead[t / UNIT] + t % UNIT * value_dim + u * UNIT, 0, 2);
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

/* Scores of rows [0, rows) against units [first, end) of the chunk. */
static void scores(const Scratch *scratch, int rows, int64_t dim, const Units *units, const Units *ahead,
                   int64_t key_stride, int first, int end) {
    for (int row = 0; row < rows; row += ROWS) {
        int m = rows - row < ROWS ? rows - row : ROWS;
        const float *query = scratch->query + row * dim;
        float *score = scratch->score + row * CHUNK;
        const float *const *next = ahead && row == 0 ? ahead->keys : 0;
        int unit = first;
#define WIDE_CALL(M) \
    if (next) score_tile(query, dim, units->keys + unit, next + unit, key_stride, score + unit * UNIT, M, WIDE); \
    else score_tile(query, dim, units->keys + unit, 0, key_stride, score + unit * UNIT, M, WIDE)
#define UNIT_CALL(M) score_tile(query, dim, units->keys + unit, 0, key_stride, score + unit * UNIT, M, 1)
        for (; unit + WIDE <= end; unit += WIDE) BY_ROWS(WIDE_CALL)
        for (; unit < end; unit++) BY_ROWS(UNIT_CALL)
#undef WIDE_CALL
#undef UNIT_CALL
    }
}

static void values(const Scratch *scratch, int rows, int64_t value_dim, const Units *units, const Units *ahead,
                   int from, int to) {
    for (int row = 0; row < rows; row += ROWS) {
        int m = rows - row < ROWS ? rows - row : ROWS;
        const float *weight = scratch->score + row * CHUNK, *shrink = scratch->shrink + row;
        float *sum = scratch->sum + row * value_dim;
        int is_ahead = ahead && row == 0;
        int64_t d = 0;
        const float *at[CHUNK_UNITS], *next[CHUNK_UNITS];
#define AT_DIM() \
    for (int u = from / UNIT; u * UNIT < to; u++) { \
        at[u] = units->values[u] + d; \
        if (is_ahead) next[u] = ahead->values[u] + d; \
    }
#define WIDE_CALL(M) \
    if (is_ahead) value_tile(weight, shrink, at, next, value_dim, from, to, sum + d, M, WIDE); \
    else value_tile(weight, shrink, at, 0, value_dim, from, to, sum + d, M, WIDE)
#define UNIT_CALL(M) value_tile(weight, shrink, at, 0, value_dim, from, to, sum + d, M, 1)
        for (; d + WIDE * UNIT <= value_dim; d += WIDE * UNIT) {
            AT_DIM()
            BY_ROWS(WIDE_CALL)
        }
        for (; d < value_dim; d += UNIT) {
            AT_DIM()
            BY_ROWS(UNIT_CALL)
        }
#undef AT_DIM
#undef WIDE_CALL
#undef UNIT_CALL
    }
}

/* Applies the soft cap, and -infinity where the row does not see a token: it sees [low, high) of the chunk. */
static void shape(float *score, int first, int end, int64_t low, int64_t high, float soft_cap) {
    for (int at = first * UNIT; at < end * UNIT; at += VW) {
        vf s = vf_load(score + at);
        if (soft_cap > 0) s = vf_tanh(s / vf_set1(soft_cap)) * vf_set1(soft_cap);
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
        shrink = vf_exp(vf_set1(before - top))[0];
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
            vf w = vf_exp(vf_load(at) - vf_set1(top));
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
