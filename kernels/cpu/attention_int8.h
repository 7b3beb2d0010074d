/* The inner loops of attention over 8-bit keys and values: all products are integers and add up exactly.
 *
 * A row's queries become integers of 16 bits with one scale; the scale of a token's key multiplies the score. The scale of
 * its value is folded into the weight, and weights of a chunk become integers of 15 bits that count fractions of the
 * largest value scale which the row sees there. So neither tiles nor the kind of instruction change a bit. */
#ifndef BATCHGEN_ATTENTION_INT8_H
#define BATCHGEN_ATTENTION_INT8_H

#include "attention_int8_amx.h"
#include "attention_int8_vector.h"
#include "attention_int8_weigh.h"
#include "attention_tile.h"

#if HAS_AMX_ATTENTION
/* Whether rows [row, row + count) see all of the chunk, and nothing but that has to be looked at. */
static int sees_whole_chunk(const Scratch *scratch, const Stretch *stretch, int row, int count) {
    int low, high;
    for (int r = row; r < row + count; r++)
        if (!sees_all(scratch, stretch, r, &low, &high)) return 0;
    return 1;
}

/* Adds weighted values to `count` rows, but those of the last dimensions, at most CHUNK, and returns where these begin. */
static int64_t first_values(const Cache *cache, const Scratch *scratch, int row, int count, int32_t *sums) {
    int64_t last = (cache->value_dim - 1) / CHUNK * CHUNK;
    amx_load_weights(scratch, row);
    for (int64_t d = 0; d < last; d += CHUNK) {
        for (int64_t at = 0; at < CHUNK; at += UNIT) amx_value_unit(scratch, d + at, sums + at);
        add_values(cache, scratch, row, count, d, d + CHUNK, sums);
    }
    return last;
}

static void amx_chunk(const Cache *cache, const Scratch *scratch, int rows, const Units *units, const Stretch *stretch) {
    int first = stretch->from / UNIT, end = (stretch->to + UNIT - 1) / UNIT;
    copy_values(cache, scratch, units, first, end);
    /* One tile of rows after the other, so that all of it stays in the nearest cache. While one is weighed, the tile unit
     * does the values of the one before and the scores of the one after; their sums take turns in two places. */
    int32_t *sums = scratch->tile_sums, *others = sums + 2 * AMX_SUMS;
    for (int unit = first; unit < end; unit += 2) amx_score_units(cache, scratch, 0, units, unit, end, sums);
    for (int row = 0, done = 0; row < rows + AMX_ROWS; row += AMX_ROWS) {
        int before = row - AMX_ROWS, after = row + AMX_ROWS, count = rows - row < AMX_ROWS ? rows - row : AMX_ROWS;
        Meanwhile meanwhile = {cache, units, others, 0, 0, after, first, after < rows ? end : 0};
        if (before >= 0) {
            meanwhile.d = first_values(cache, scratch, before, done, others);
            meanwhile.d_end = cache->value_dim;
        }
        int is_whole = count > 0 && sees_whole_chunk(scratch, stretch, row, count);
        if (is_whole)
            int8_note_scores(scratch, row, count, sums, stretch->most, &meanwhile);
        else
            for (int quarter = 0; quarter < CHUNK / UNIT; quarter++) do_values(scratch, &meanwhile, quarter);
        add_values(cache, scratch, before, done, meanwhile.d, meanwhile.d_end, others);
        if (is_whole) {
            int8_weigh_tile(scratch, row, count, sums, &meanwhile);
        } else {
            for (int half = 0; half < 2; half++) do_scores(scratch, &meanwhile, half);
            for (int r = 0; r < count; r++) int8_weigh_row(scratch, stretch, row + r, sums + r * CHUNK, 1);
        }
        done = count;
        int32_t *swapped = sums;
        sums = others, others = swapped;
    }
}
#endif

static void int8_chunk(const Cache *cache, const Scratch *scratch, int rows, const Units *units, const Units *ahead,
                       int64_t start, int from, int to, int64_t window, float soft_cap) {
    int first = from / UNIT, end = (to + UNIT - 1) / UNIT;
    Stretch stretch = {start, window, from, to, soft_cap, load_scales(cache, scratch, units, from, to)};
    int is_amx = 0;
#if HAS_AMX_ATTENTION
    is_amx = scratch->use_amx && rows > INT_ROWS;
#endif
    for (int u = 0; u < CHUNK_UNITS; u++) {
        __builtin_prefetch(ahead->scales[u], 0, 2);
        __builtin_prefetch(ahead->scales[u] + cache->block_size, 0, 2);
        /* Products in vectors fetch one unit for each that they read. */
        if (is_amx || u < first || u >= end) fetch_unit(cache, ahead, u);
    }
#if HAS_AMX_ATTENTION
    if (is_amx) {
        amx_chunk(cache, scratch, rows, units, &stretch);
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
    scratch->tile_sums = part(memory, used, 4 * AMX_SUMS * 4);
    scratch->values = part(memory, used, cache->value_dim * CHUNK);
#endif
}

#endif
