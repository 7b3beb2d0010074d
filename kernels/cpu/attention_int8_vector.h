/* Products of attention over 8-bit keys and values in vectors: tiles of rows and units that are held in registers. */
#ifndef BATCHGEN_ATTENTION_INT8_VECTOR_H
#define BATCHGEN_ATTENTION_INT8_VECTOR_H

#include "attention_int8_amx.h"
#include "attention_tile.h"
#include "int8_dot.h"

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

#endif
