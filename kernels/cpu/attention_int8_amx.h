/* Products of attention over 8-bit keys and values with AMX: the same integers as int8_dot.h gives, for many rows at once. */
#ifndef BATCHGEN_ATTENTION_INT8_AMX_H
#define BATCHGEN_ATTENTION_INT8_AMX_H

#include "amx.h"
#include "attention_tile.h"
#include "int8_dot.h"

#define AMX_ROWS 16
#define AMX_SUMS (AMX_ROWS * CHUNK) /* sums of a tile of rows for all units; as many for dimensions of values at a time */

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

/* Multiplies the factors in tiles 6 and 7, high and low bytes, with what is loaded into the tile `B`, and adds to tiles
 * `HIGH` and `LOW`. */
#define MULTIPLY(PRODUCT, B, FROM, STRIDE, HIGH, LOW) \
    _tile_loadd(B, FROM, STRIDE); \
    PRODUCT(HIGH, 6, B); \
    PRODUCT(LOW, 7, B)

#define STORE(HIGH, LOW, HIGH_SUMS, LOW_SUMS) \
    _tile_stored(HIGH, HIGH_SUMS, CHUNK * 4); \
    _tile_stored(LOW, LOW_SUMS, CHUNK * 4)

/* Sums of high bytes and, AMX_SUMS on, of low bytes for rows [row, row + 16) and one or two units of keys, `unit` and, if it
 * is below `end`, the next. */
INLINE void amx_score_units(const Cache *cache, const Scratch *scratch, int row, const Units *units, int unit, int end,
                            int32_t *sums) {
    int64_t plane = padded_dim(cache->head_dim), stride = 2 * plane, key_stride = cache->block_size * 4;
    const int8_t *factors = scratch->planes + row * stride;
    int has_second = unit + 1 < end;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < plane; d += 64) {
        _tile_loadd(6, factors + d, stride);
        _tile_loadd(7, factors + plane + d, stride);
        MULTIPLY(_tile_dpbsud, 4, units->keys[unit] + d / 4 * key_stride, key_stride, 0, 1);
        if (has_second) {
            MULTIPLY(_tile_dpbsud, 5, units->keys[unit + 1] + d / 4 * key_stride, key_stride, 2, 3);
        }
    }
    STORE(0, 1, sums + unit * UNIT, sums + AMX_SUMS + unit * UNIT);
    if (has_second) {
        STORE(2, 3, sums + (unit + 1) * UNIT, sums + AMX_SUMS + (unit + 1) * UNIT);
    }
}

/* Lays the chunk's values out as tiles: [V / 16][16 groups of 4 tokens][16][4], the groups in the order of factors. Units
 * that are not there keep what was there: their weights are 0. */
static void copy_values(const Cache *cache, const Scratch *scratch, const Units *units, int first, int end) {
    for (int unit = first; unit < end; unit++)
        for (int quad = 0; quad < UNIT / 4; quad++)
            for (int64_t d = 0; d < cache->value_dim; d += UNIT) {
                const char *from = units->values[unit] + (quad * cache->value_dim + d) * 4;
                vf_store((float *)(scratch->values + d * 64 + factor_place(unit * 4 + quad) * 64), vf_load((const float *)from));
            }
}

/* Has the weights of rows [row, row + 16) at hand for amx_value_unit. */
INLINE void amx_load_weights(const Scratch *scratch, int row) {
    const int8_t *factors = scratch->weights + row * 2 * CHUNK;
    _tile_loadd(6, factors, 2 * CHUNK);
    _tile_loadd(7, factors + CHUNK, 2 * CHUNK);
}

/* Sums of weighted values for the 16 dimensions from d on. */
INLINE void amx_value_unit(const Scratch *scratch, int64_t d, int32_t *sums) {
    _tile_zero(0);
    _tile_zero(1);
    MULTIPLY(_tile_dpbusd, 4, scratch->values + d * 64, 64, 0, 1);
    STORE(0, 1, sums, sums + AMX_SUMS);
}

/* Adds these sums to `count` rows. */
static void add_values(const Cache *cache, const Scratch *scratch, int row, int count, int64_t first, int64_t end,
                       const int32_t *sums) {
    for (int r = 0; r < count; r++) {
        vf shrink = vf_set1(scratch->shrink[row + r]), level = vf_set1(scratch->level[row + r]);
        float *sum = scratch->sum + (row + r) * cache->value_dim;
        for (int64_t d = first; d < end; d += UNIT) {
            const int32_t *high = sums + r * CHUNK + d - first;
            vf whole = __builtin_convertvector(dot_total(load_words(high), load_words(high + AMX_SUMS)), vf);
            vf_store(sum + d, vf_fma(vf_load(sum + d), shrink, whole * level));
        }
    }
}

#else
#define HAS_AMX_ATTENTION 0
#endif

#endif
