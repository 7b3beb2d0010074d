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
    if (stretch->from > 0 || stretch->to < CHUNK || stretch->soft_cap > 0) return 0;
    for (int r = row; r < row + count; r++) {
        int64_t at = scratch->position[r] - stretch->start;
        if (at < CHUNK - 1 || (stretch->window && at >= stretch->window)) return 0;
    }
    return 1;
}

static void amx_chunk(const Cache *cache, const Scratch *scratch, int rows, const Units *units, const Stretch *stretch) {
    int first = stretch->from / UNIT, end = (stretch->to + UNIT - 1) / UNIT;
    copy_values(cache, scratch, units, first, end);
    /* One tile of rows after the other, so that all of it stays in the nearest cache. */
    for (int row = 0; row < rows; row += AMX_ROWS) {
        int count = rows - row < AMX_ROWS ? rows - row : AMX_ROWS;
        amx_score_tile(cache, scratch, row, units, first, end, scratch->tile_sums);
        if (sees_whole_chunk(scratch, stretch, row, count))
            int8_weigh_tile(scratch, row, count, scratch->tile_sums, stretch->most);
        else
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
    scratch->tile_sums = part(memory, used, 2 * AMX_SUMS * 4);
    scratch->values = part(memory, used, cache->value_dim * CHUNK);
#endif
}

#endif
