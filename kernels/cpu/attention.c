/* Attention over the paged cache for a mixed batch: takes the items of a plan (attention_plan.h) through their tokens.
 *
 * An item walks over its tokens in chunks of CHUNK, counted from the beginning of the sequence, with a running softmax. A
 * query sees each of its tokens through the same chain of operations wherever its chunk or its tile begins and ends:
 * tokens that it must not see have weight 0 and leave every sum unchanged, or are left out if a value is not finite. So its
 * bits depend on its own sequence alone, not on batch, chunking or threads. After a shared beginning the chain goes on where
 * that left it. */
#include <stdlib.h>
#include <string.h>

#include "attention_int8.h"
#include "attention_plan.h"
#include "attention_scales.h"
#include "attention_tile.h"
#include "kernels.h"

typedef struct {
    AttentionPlan *plan;
    const float *query;
    int64_t query_stride;
    char *data;
    double scale, soft_cap; /* soft_cap 0: none */
    float *out;             /* [tokens, heads, head_dim] */
} Attention;

/* A stretch of tokens that rows of an item are taken through together: all rows through the item's own tokens; after a shared
 * beginning those of each member through the rest of its tokens. */
typedef struct {
    int64_t sequence, head;
    int64_t first, end;
    int row, rows; /* of the item's */
} Leg;

/* Where an item is: in which leg, and at the beginning of which chunk. */
typedef struct {
    const Item *item;
    Leg leg;
    int member; /* whose leg it is; -1: all rows' */
    int64_t start;
} Place;

static Leg member_leg(const AttentionPlan *plan, const Item *item, int member, int row) {
    int64_t sequence = item->members[member], first = at_least(first_seen(plan, past_of(plan, sequence)), item->end);
    return (Leg){sequence, item->head, first, plan->lengths[sequence], row, (int)(queries_of(plan, sequence) * plan->group)};
}

/* Goes to the next chunk, of the next leg if this one ends. Returns 0 behind the last. */
static int advance(const AttentionPlan *plan, Place *at, int64_t start) {
    at->start = start;
    while (at->start >= at->leg.end) {
        if (!at->item->members || ++at->member == at->item->count) return 0;
        at->leg = member_leg(plan, at->item, at->member, at->member ? at->leg.row + at->leg.rows : 0);
        at->start = at->leg.first / CHUNK * CHUNK;
    }
    return 1;
}

static Place begin(const AttentionPlan *plan, const Item *item) {
    Place at = {item, {item->sequence, item->head, item->first, item->end, 0, (int)item->rows}, -1, 0};
    advance(plan, &at, item->first / CHUNK * CHUNK);
    return at;
}

/* Points `units` at the leg's tokens in the chunk that begins at `start`; units without any stay as they are. */
static void find_units(const AttentionPlan *plan, const Cache *cache, const Leg *leg, int64_t start, Units *units) {
    const int32_t *table = plan->tables + leg->sequence * plan->table_stride;
    for (int u = 0; u < CHUNK_UNITS; u++) {
        int64_t token = start + u * UNIT;
        if (token + UNIT <= leg->first || token >= leg->end) continue;
        const char *head = head_of(cache, table[token / cache->block_size], leg->head);
        int64_t offset = token % cache->block_size;
        if (cache->type == KV_INT8) {
            units->keys[u] = head + offset * 4;
            units->values[u] = head + cache->values_at + offset * cache->value_dim;
        } else {
            units->keys[u] = head + offset * kv_bytes(cache->type);
            units->values[u] = head + cache->values_at + offset * cache->value_dim * kv_bytes(cache->type);
        }
        units->scales[u] = kv_has_scales(cache->type) ? (const float *)(head + cache->scales_at) + offset : NULL;
    }
}

/* Adds the rows of queries [query, query + count) of a sequence and returns their number with those before. */
static int add_rows(const Attention *a, const Cache *cache, const Scratch *scratch, int rows, int64_t sequence,
                    int64_t query, int64_t count, int64_t head) {
    const AttentionPlan *plan = a->plan;
    /* The soft cap wants the scores as they are. */
    float scale = (float)(a->soft_cap > 0 ? a->scale : a->scale * LOG2_E);
    for (int64_t q = query; q < query + count; q++) {
        int64_t token = plan->starts[sequence] + q;
        for (int64_t h = head * plan->group; h < (head + 1) * plan->group; h++, rows++) {
            const float *from = a->query + token * a->query_stride + h * cache->head_dim;
            if (cache->type == KV_INT8) {
                quantize_query(scratch, rows, from, cache->head_dim, scale);
            } else {
                float *to = scratch->query + rows * cache->head_dim;
                for (int64_t d = 0; d < cache->head_dim; d++) to[d] = from[d] * scale;
            }
            scratch->position[rows] = past_of(plan, sequence) + q;
            scratch->place[rows] = token * plan->heads + h;
        }
    }
    return rows;
}

static void load_rows(const Attention *a, const Cache *cache, const Item *item, const Scratch *scratch) {
    const AttentionPlan *plan = a->plan;
    int rows = 0;
    if (item->members)
        for (int m = 0; m < item->count; m++)
            rows = add_rows(a, cache, scratch, rows, item->members[m], 0, queries_of(plan, item->members[m]), item->head);
    else
        rows = add_rows(a, cache, scratch, 0, item->sequence, item->query, item->count, item->head);
    memset(scratch->sum, 0, (size_t)(rows * cache->value_dim) * 4);
    memset(scratch->total, 0, (size_t)rows * UNIT * 4);
    for (int row = 0; row < rows; row++) scratch->top[row] = -INFINITY;
}

static void finish_rows(const Attention *a, const Cache *cache, const Scratch *scratch, int rows) {
    for (int row = 0; row < rows; row++) {
        float *to = a->out + scratch->place[row] * cache->head_dim;
        const float *sum = scratch->sum + row * cache->value_dim;
        float share = 1.0f / unit_sum(scratch->total + row * VU);
        for (int64_t d = 0; d < cache->head_dim; d++) to[d] = sum[d] * share;
    }
}

/* Turns the scores of tokens [from, to) of the chunk into weights; every row sees [*all_from, *all_to) of them. */
static void weigh_rows(const Attention *a, const Scratch *scratch, int rows, int64_t start, int from, int to, int *all_from,
                       int *all_to) {
    int first = from / UNIT, end = (to + UNIT - 1) / UNIT, low, high;
    *all_from = from, *all_to = to;
    for (int row = 0; row < rows; row++) {
        find_seen(scratch, row, start, a->plan->window, from, to, &low, &high);
        weigh(scratch, row, first, end, low, high, (float)a->soft_cap);
        if (low > *all_from) *all_from = low;
        if (high < *all_to) *all_to = high;
    }
}

/* One chunk of an item: tokens [from, to) of it. */
INLINE void float_chunk(const Attention *a, const Cache *cache, const Scratch *scratch, int rows, const Units *units,
                        const Units *ahead, int64_t start, int from, int to, const int type) {
    int first = from / UNIT, end = (to + UNIT - 1) / UNIT, is_wide = type != KV_FLOAT32 && rows > THIN_ROWS;
    int64_t dim = cache->value_dim;
    Units wide = *units;
    if (is_wide) {
        widen_keys(scratch, cache, units, ahead, first, end, &wide, type);
        scores(scratch, rows, cache->head_dim, &wide, &wide, UNIT, first, end, KV_FLOAT32);
    } else {
        scores(scratch, rows, cache->head_dim, units, ahead, cache->block_size, first, end, type);
    }
    if (type == KV_FP8) scale_scores(scratch, rows, units, first, end);
    int low, high;
    weigh_rows(a, scratch, rows, start, from, to, &low, &high);
    if (type == KV_FP8) scale_weights(scratch, rows, units, cache->block_size, first, end);
    /* A weight of 0 leaves a sum as it is only if the value is finite: if one is not that some row does not see, each row goes
     * over its own tokens alone. */
    int is_apart = type != KV_FP8 && (!are_finite(units, dim, from, low, type) || !are_finite(units, dim, high, to, type));
    if (is_wide) widen_values(scratch, cache, units, ahead, first, end, &wide, type);
    for (int row = 0, count = is_apart ? 1 : rows; row < rows; row += count) {
        low = from, high = to;
        if (is_apart) find_seen(scratch, row, start, a->plan->window, from, to, &low, &high);
        if (is_wide)
            values(scratch, row, row + count, dim, &wide, &wide, low, high, KV_FLOAT32);
        else
            values(scratch, row, row + count, dim, units, ahead, low, high, type);
    }
}

static void walk_chunk(const Attention *a, const Cache *cache, const Scratch *scratch, int rows, const Units *units,
                       const Units *ahead, int64_t start, int from, int to) {
    switch (cache->type) {
        case KV_FLOAT32:
            float_chunk(a, cache, scratch, rows, units, ahead, start, from, to, KV_FLOAT32);
            break;
        case KV_FLOAT16:
            float_chunk(a, cache, scratch, rows, units, ahead, start, from, to, KV_FLOAT16);
            break;
        case KV_BFLOAT16:
            float_chunk(a, cache, scratch, rows, units, ahead, start, from, to, KV_BFLOAT16);
            break;
        case KV_FP8:
            float_chunk(a, cache, scratch, rows, units, ahead, start, from, to, KV_FP8);
            break;
        default:
            int8_chunk(cache, scratch, rows, units, ahead, start, from, to, a->plan->window, (float)a->soft_cap);
    }
}

/* The rows from `row` on. */
static Scratch rows_from(const Scratch *scratch, const Cache *cache, int row) {
    Scratch rows = *scratch;
    rows.sum += row * cache->value_dim;
    rows.score += row * CHUNK;
    rows.total += row * VU;
    rows.top += row, rows.shrink += row, rows.position += row, rows.place += row;
    if (cache->type == KV_INT8) {
        rows.planes += row * 2 * padded_dim(cache->head_dim);
        rows.weights += row * 2 * CHUNK;
        rows.excess += row, rows.factor += row, rows.level += row;
    } else {
        rows.query += row * cache->head_dim;
    }
    return rows;
}

/* While rows of all members go through a shared beginning they wait for arithmetic, and memory is idle: meanwhile the
 * beginnings of what each goes on with are fetched. Fetches those of members [from, to). */
static void fetch_members(const Attention *a, const Cache *cache, const Item *item, int from, int to) {
    for (int m = from; m < to; m++) {
        Leg leg = member_leg(a->plan, item, m, 0);
        int64_t start = leg.first / CHUNK * CHUNK;
        Units units = {0};
        find_units(a->plan, cache, &leg, start, &units);
        for (int u = 0; u < CHUNK_UNITS; u++)
            if (units.keys[u]) fetch_unit(cache, &units, u);
    }
}

/* Takes an item's rows through its tokens, and fetches the beginning of `next` (NULL: none) meanwhile. */
static void walk(const Attention *a, const Cache *cache, const Item *item, const Item *next, const Scratch *scratch) {
    const AttentionPlan *plan = a->plan;
    load_rows(a, cache, item, scratch);
    /* This chunk and the next take turns in two places: copies of what was just written would wait for it. */
    Place places[2] = {begin(plan, item)};
    Units units[2];
    memset(units, 0, sizeof units);
    find_units(plan, cache, &places[0].leg, places[0].start, units);
    units[1] = units[0];
    Scratch rows = *scratch;
    for (int now = 0, is_more = 1, row = 0; is_more; now = !now) {
        Place *at = places + now, *then = places + !now;
        Units *ahead = units + !now;
        *then = *at;
        /* A unit that is not there keeps some pointer: fetching what the cache holds already costs little. */
        if ((is_more = advance(plan, then, at->start + CHUNK))) {
            find_units(plan, cache, &then->leg, then->start, ahead);
        } else if (next) {
            Place after = begin(plan, next);
            find_units(plan, cache, &after.leg, after.start, ahead);
        }
        if (at->leg.row != row) rows = rows_from(scratch, cache, row = at->leg.row);
        int from = (int)at_least(at->leg.first - at->start, 0), to = (int)at_most(at->leg.end - at->start, CHUNK);
        if (item->members && at->member < 0) {
            int64_t first = item->first / CHUNK, chunks = (item->end - 1) / CHUNK + 1 - first, done = at->start / CHUNK - first;
            fetch_members(a, cache, item, (int)(done * item->count / chunks), (int)((done + 1) * item->count / chunks));
        }
        walk_chunk(a, cache, &rows, at->leg.rows, units + now, ahead, at->start, from, to);
    }
    finish_rows(a, cache, scratch, (int)item->rows);
}

static size_t lay_out(const AttentionPlan *plan, char *memory, Scratch *scratch) {
    const Cache *cache = &plan->cache;
    /* Tiles of 16 rows may begin at any row. */
    int64_t rows = tile_rows(plan) + 15;
    size_t used = 0;
    scratch->sum = part(memory, &used, rows * cache->value_dim * 4);
    scratch->score = part(memory, &used, rows * CHUNK * 4);
    scratch->total = part(memory, &used, rows * UNIT * 4);
    scratch->top = part(memory, &used, rows * 4);
    scratch->shrink = part(memory, &used, rows * 4);
    scratch->position = part(memory, &used, rows * 8);
    scratch->place = part(memory, &used, rows * 8);
    if (cache->type == KV_INT8)
        lay_out_int8(cache, scratch, rows, memory, &used);
    else
        scratch->query = part(memory, &used, rows * cache->head_dim * 4);
    if (cache->type != KV_FLOAT32 && cache->type != KV_INT8)
        scratch->widened = part(memory, &used, CHUNK * cache->value_dim * 4);
    return used;
}

static int64_t attention_chunks(const void *args, const Step *step) {
    const AttentionPlan *plan = ((const Attention *)args)->plan;
    if (step->threads == 1) return plan->count > 0;
    /* Chunks of at least some microseconds, and many of them, for items differ. */
    return at_most(at_most(plan->count, 16 * step->threads), plan->cost / 5000 + 1);
}

static void attention_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const Attention *a = args;
    const AttentionPlan *plan = a->plan;
    Scratch scratch = {0};
    char *memory = thread_scratch(lay_out(plan, 0, &scratch));
    if (!memory) {
        step_fail(step, NO_MEMORY);
        return;
    }
    lay_out(plan, memory, &scratch);
    Cache cache = plan->cache;
    cache.data = a->data;
#if HAS_AMX_ATTENTION
    if (scratch.use_amx) configure_tiles();
#endif
    int64_t end = chunk_begin(plan->count, chunk + 1, of);
    /* The chunk that this thread will probably take next. */
    int64_t after = chunk + step->threads < of ? chunk_begin(plan->count, chunk + step->threads, of) : plan->count;
    for (int64_t i = chunk_begin(plan->count, chunk, of); i < end; i++) {
        int64_t next = i + 1 < end ? i + 1 : after;
        walk(a, &cache, plan->items + i, next < plan->count ? plan->items + next : 0, &scratch);
    }
#if HAS_AMX_ATTENTION
    if (scratch.use_amx) _tile_release();
#endif
}

const Kernel kernel_attention = {attention_chunks, attention_run};
