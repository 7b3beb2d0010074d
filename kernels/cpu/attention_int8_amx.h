/* Products of attention over 8-bit keys and values with AMX: the same integers as int8_dot.h gives, for many rows at once. */
#ifndef BATCHGEN_ATTENTION_INT8_AMX_H
#define BATCHGEN_ATTENTION_INT8_AMX_H

#include "amx.h"
#include "attention_tile.h"
#include "int8_dot.h"

#define AMX_ROWS 16
#define AMX_TILES 3 /* of rows at a time, with two sums each: tiles 0 to 5; 6 holds keys or values, 7 factors */

INLINE int64_t padded_dim(int64_t dim) { return (dim + 63) / 64 * 64; }

/* Whether keys can be read in tiles: the last tile's rows beyond them must still be the head's own. */
static inline int keys_fill_tiles(const Cache *cache) {
    return padded_dim(cache->head_dim) - (cache->head_dim + 3) / 4 * 4 <= cache->value_dim;
}

#if HAS_AMX && DOT_BYTES && VW == 16
#define HAS_AMX_ATTENTION 1

static void configure_tiles(void) {
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 64;
        config.rows[t] = AMX_ROWS;
    }
    load_tile_config(&config);
}

/* Adds the products of tiles of rows, whose two planes of factors begin at `factors` and `plane` bytes on, with tile 6. */
#define MULTIPLY(T, HIGH, LOW, PRODUCT) \
    if (tiles > T) { \
        _tile_loadd(7, factors + T * AMX_ROWS * stride, stride); \
        PRODUCT(HIGH, 7, 6); \
        _tile_loadd(7, factors + T * AMX_ROWS * stride + plane, stride); \
        PRODUCT(LOW, 7, 6); \
    }

#define ZERO_SUMS() \
    _tile_zero(0); \
    _tile_zero(1); \
    _tile_zero(2); \
    _tile_zero(3); \
    _tile_zero(4); \
    _tile_zero(5)

#define STORE_SUMS(T, HIGH, LOW, HIGH_SUMS, LOW_SUMS, STRIDE) \
    if (tiles > T) { \
        _tile_stored(HIGH, HIGH_SUMS, STRIDE); \
        _tile_stored(LOW, LOW_SUMS, STRIDE); \
    }

/* Sums of high and of low bytes, for rows [row, row + 16 tiles) and units [first, end) of keys. */
INLINE void amx_score_tiles(const Cache *cache, const Scratch *scratch, int row, const Units *units, int first, int end,
                            const int tiles) {
    int64_t plane = padded_dim(cache->head_dim), stride = 2 * plane, key_stride = cache->block_size * 4;
    for (int unit = first; unit < end; unit++) {
        ZERO_SUMS();
        for (int64_t d = 0; d < plane; d += 64) {
            const int8_t *factors = scratch->planes + row * stride + d;
            _tile_loadd(6, units->keys[unit] + d / 4 * key_stride, key_stride);
            MULTIPLY(0, 0, 1, _tile_dpbsud)
            MULTIPLY(1, 2, 3, _tile_dpbsud)
            MULTIPLY(2, 4, 5, _tile_dpbsud)
        }
        int32_t *high = scratch->high + row * CHUNK + unit * UNIT, *low = (int32_t *)scratch->score + row * CHUNK + unit * UNIT;
        STORE_SUMS(0, 0, 1, high, low, CHUNK * 4)
        STORE_SUMS(1, 2, 3, high + AMX_ROWS * CHUNK, low + AMX_ROWS * CHUNK, CHUNK * 4)
        STORE_SUMS(2, 4, 5, high + 2 * AMX_ROWS * CHUNK, low + 2 * AMX_ROWS * CHUNK, CHUNK * 4)
    }
}

/* Lays the chunk's values out as tiles: [V / 16][16 groups of 4 tokens][16][4], the groups in the order of factors. */
static void copy_values(const Cache *cache, const Scratch *scratch, const Units *units, const Units *ahead, int first,
                        int end) {
    for (int unit = first; unit < end; unit++)
        for (int quad = 0; quad < UNIT / 4; quad++)
            for (int64_t d = 0; d < cache->value_dim; d += UNIT) {
                int64_t at = (quad * cache->value_dim + d) * 4;
                __builtin_prefetch(ahead->values[unit] + at, 0, 2);
                vf_store((float *)(scratch->values + d * 64 + factor_place(unit * 4 + quad) * 64),
                         vf_load((const float *)(units->values[unit] + at)));
            }
}

/* Adds the weighted values of the chunk for rows [row, row + 16 tiles). */
INLINE void amx_value_tiles(const Cache *cache, const Scratch *scratch, int row, const int tiles) {
    int64_t plane = CHUNK, stride = 2 * CHUNK, value_dim = cache->value_dim;
    const int8_t *factors = scratch->weights + row * stride;
    int32_t high[AMX_TILES * AMX_ROWS][UNIT] __attribute__((aligned(64)));
    int32_t low[AMX_TILES * AMX_ROWS][UNIT] __attribute__((aligned(64)));
    for (int64_t d = 0; d < value_dim; d += UNIT) {
        ZERO_SUMS();
        _tile_loadd(6, scratch->values + d * 64, 64);
        MULTIPLY(0, 0, 1, _tile_dpbusd)
        MULTIPLY(1, 2, 3, _tile_dpbusd)
        MULTIPLY(2, 4, 5, _tile_dpbusd)
        STORE_SUMS(0, 0, 1, high, low, UNIT * 4)
        STORE_SUMS(1, 2, 3, high + AMX_ROWS, low + AMX_ROWS, UNIT * 4)
        STORE_SUMS(2, 4, 5, high + 2 * AMX_ROWS, low + 2 * AMX_ROWS, UNIT * 4)
        for (int r = 0; r < tiles * AMX_ROWS; r++) {
            float *to = scratch->sum + (row + r) * value_dim + d;
            vf whole = __builtin_convertvector(dot_total(load_words(high[r]), load_words(low[r])), vf);
            vf_store(to, vf_fma(vf_load(to), vf_set1(scratch->shrink[row + r]), whole * vf_set1(scratch->level[row + r])));
        }
    }
}

#define BY_TILES(CALL) \
    for (int row = 0; row < rows; row += AMX_TILES * AMX_ROWS) { \
        int left = (rows - row + AMX_ROWS - 1) / AMX_ROWS; \
        if (left == 1) { \
            CALL(1); \
        } else if (left == 2) { \
            CALL(2); \
        } else { \
            CALL(3); \
        } \
    }

static void amx_scores(const Cache *cache, const Scratch *scratch, int rows, const Units *units, const Units *ahead,
                       int first, int end) {
    for (int unit = first; unit < end; unit++)
        for (int64_t q = 0; q < cache->head_dim / 4; q++)
            __builtin_prefetch(ahead->keys[unit] + q * cache->block_size * 4, 0, 2);
#define CALL(N) amx_score_tiles(cache, scratch, row, units, first, end, N)
    BY_TILES(CALL)
#undef CALL
}

static void amx_values(const Cache *cache, const Scratch *scratch, int rows, const Units *units, const Units *ahead,
                       int first, int end) {
    copy_values(cache, scratch, units, ahead, first, end);
#define CALL(N) amx_value_tiles(cache, scratch, row, N)
    BY_TILES(CALL)
#undef CALL
}

#else
#define HAS_AMX_ATTENTION 0
#endif

#endif
