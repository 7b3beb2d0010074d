/* Attention over the paged cache, float32, for a mixed batch.
 *
 * Work is cut into items: a tile of rows, (query, head) pairs that share a key/value head, and a range of tokens. An
 * item walks over its tokens in chunks of CHUNK, counted from the beginning of the sequence, with a running softmax. A
 * query sees each of its tokens through the same chain of operations wherever its chunk or its tile begins and ends:
 * tokens that it must not see have weight 0 and leave every sum unchanged. So its bits depend on its own sequence alone,
 * not on batch, chunking or threads.
 *
 * Sequences that begin with the same blocks are taken through these together, once, with the rows of many in a tile; then
 * each goes on alone from where that left its rows. The chain of a row is the same as if it had walked alone. */
#include <stdlib.h>
#include <string.h>

#include "attention_tile.h"
#include "kv_cache.h"

#define TILE_ROWS 48 /* rows of an item, if a single query has fewer heads */

typedef struct {
    const float *query;
    int64_t query_stride, heads, group; /* group: query heads of a key/value head */
    const int32_t *starts, *lengths, *tables;
    int64_t sequences, table_stride;
    float scale, soft_cap; /* soft_cap 0: none */
    int64_t window;        /* 0: none */
    float *out;
} Batch;

typedef struct {
    int32_t sequence, head;
    int32_t query, count; /* queries [query, query + count) of the sequence; or count sequences of a shared beginning */
    const int32_t *members; /* those sequences, all of whose queries are rows; NULL for one sequence */
    int64_t first, end;     /* tokens [first, end) that any row sees */
    int goes_on;            /* the rows have been through the tokens before `first` */
} Item;

/* How far each row has got, [tokens * heads]: what is kept between a shared beginning and the rest. */
typedef struct {
    float *sum; /* [rows, value_dim] */
    vf *total;  /* [rows, VU] */
    float *top; /* [rows] */
} Progress;

static int64_t at_least(int64_t x, int64_t low) { return x > low ? x : low; }
static int64_t at_most(int64_t x, int64_t high) { return x < high ? x : high; }

static int64_t queries_of(const Batch *batch, int64_t sequence) {
    return batch->starts[sequence + 1] - batch->starts[sequence];
}

/* Tokens of a sequence that come before all of its queries. */
static int64_t past_of(const Batch *batch, int64_t sequence) {
    return batch->lengths[sequence] - queries_of(batch, sequence);
}

/* Points `units` at the item's tokens in the chunk that begins at `start`; units without any stay as they are. */
static void find_units(const Cache *cache, const Batch *batch, const Item *item, int64_t start, Units *units) {
    const int32_t *table = batch->tables + item->sequence * batch->table_stride;
    for (int u = 0; u < CHUNK_UNITS; u++) {
        int64_t token = start + u * UNIT;
        if (token + UNIT <= item->first || token >= item->end) continue;
        float *keys = keys_of(cache, table[token / cache->block_size], item->head);
        int64_t offset = token % cache->block_size;
        units->keys[u] = keys + offset;
        units->values[u] = values_of(cache, keys) + offset * cache->value_dim;
    }
}

/* Adds the rows of queries [query, query + count) of a sequence and returns their number with those before. */
static int add_rows(const Cache *cache, const Batch *batch, const Scratch *scratch, int rows, int64_t sequence,
                    int64_t query, int64_t count, int64_t head) {
    for (int64_t q = query; q < query + count; q++) {
        int64_t token = batch->starts[sequence] + q;
        for (int64_t h = head * batch->group; h < (head + 1) * batch->group; h++, rows++) {
            const float *from = batch->query + token * batch->query_stride + h * cache->head_dim;
            float *to = scratch->query + rows * cache->head_dim;
            for (int64_t d = 0; d < cache->head_dim; d++) to[d] = from[d] * batch->scale;
            scratch->position[rows] = past_of(batch, sequence) + q;
            scratch->place[rows] = token * batch->heads + h;
        }
    }
    return rows;
}

static int load_rows(const Cache *cache, const Batch *batch, const Item *item, const Progress *progress,
                     const Scratch *scratch) {
    int rows = 0;
    if (item->members)
        for (int m = 0; m < item->count; m++)
            rows = add_rows(cache, batch, scratch, rows, item->members[m], 0, queries_of(batch, item->members[m]),
                            item->head);
    else
        rows = add_rows(cache, batch, scratch, 0, item->sequence, item->query, item->count, item->head);
    size_t row_bytes = (size_t)cache->value_dim * 4;
    for (int row = 0; row < rows; row++) {
        float *sum = scratch->sum + row * cache->value_dim;
        if (item->goes_on) {
            int64_t place = scratch->place[row];
            memcpy(sum, progress->sum + place * cache->value_dim, row_bytes);
            memcpy(scratch->total + row * VU, progress->total + place * VU, UNIT * 4);
            scratch->top[row] = progress->top[place];
        } else {
            memset(sum, 0, row_bytes);
            memset(scratch->total + row * VU, 0, UNIT * 4);
            scratch->top[row] = -INFINITY;
        }
    }
    return rows;
}

static void keep_rows(const Cache *cache, const Progress *progress, const Scratch *scratch, int rows) {
    for (int row = 0; row < rows; row++) {
        int64_t place = scratch->place[row];
        memcpy(progress->sum + place * cache->value_dim, scratch->sum + row * cache->value_dim,
               (size_t)cache->value_dim * 4);
        memcpy(progress->total + place * VU, scratch->total + row * VU, UNIT * 4);
        progress->top[place] = scratch->top[row];
    }
}

static void finish_rows(const Cache *cache, const Batch *batch, const Scratch *scratch, int rows) {
    for (int row = 0; row < rows; row++) {
        float *to = batch->out + scratch->place[row] * cache->head_dim;
        const float *sum = scratch->sum + row * cache->value_dim;
        float total = unit_sum(scratch->total + row * VU);
        for (int64_t d = 0; d < cache->head_dim; d++) to[d] = sum[d] / total;
    }
}

static int64_t first_chunk(const Item *item) { return item->first / CHUNK * CHUNK; }

/* Takes an item's rows through its tokens, and fetches the beginning of `next` (NULL: none) meanwhile. */
static void walk(const Cache *cache, const Batch *batch, const Item *item, const Item *next, const Progress *progress,
                 const Scratch *scratch) {
    int rows = load_rows(cache, batch, item, progress, scratch);
    /* Few rows wait for memory; many wait for arithmetic, and find their tokens in the processor's cache. */
    int is_thin = rows <= 2 * ROWS;
    Units units, ahead;
    memset(&ahead, 0, sizeof ahead);
    find_units(cache, batch, item, first_chunk(item), &ahead);
    for (int64_t start = first_chunk(item); start < item->end; start += CHUNK) {
        units = ahead;
        int is_last = start + CHUNK >= item->end, is_ahead = is_thin && (!is_last || next);
        /* A unit that is not there keeps its pointer: fetching what the cache holds already costs nothing. */
        if (!is_last)
            find_units(cache, batch, item, start + CHUNK, &ahead);
        else if (next)
            find_units(cache, batch, next, first_chunk(next), &ahead);
        int from = (int)at_least(item->first - start, 0), to = (int)at_most(item->end - start, CHUNK);
        int first = from / UNIT, end = (to + UNIT - 1) / UNIT;
        scores(scratch, rows, cache->head_dim, &units, is_ahead ? &ahead : 0, cache->block_size, first, end);
        for (int row = 0; row < rows; row++) {
            int64_t at = scratch->position[row] - start;
            int64_t low = batch->window ? at - batch->window + 1 : 0;
            weigh(scratch, row, first, end, at_least(low, from), at_most(at + 1, to), batch->soft_cap);
        }
        values(scratch, rows, cache->value_dim, &units, is_ahead ? &ahead : 0, from, to);
    }
    if (item->members)
        keep_rows(cache, progress, scratch, rows);
    else
        finish_rows(cache, batch, scratch, rows);
}

/* Returns 0 if every length and block that will be read is in range. */
static int64_t check(const Cache *cache, const Batch *batch, int64_t tokens) {
    if (batch->starts[0] != 0 || batch->starts[batch->sequences] != tokens) return BAD_LENGTH;
    for (int64_t s = 0; s < batch->sequences; s++) {
        int64_t length = batch->lengths[s], past = past_of(batch, s);
        if (past < 0 || past > length || length > batch->table_stride * cache->block_size) return BAD_LENGTH;
        if (past == length) continue;
        int64_t unseen = batch->window ? at_least(past - batch->window + 1, 0) : 0;
        for (int64_t b = unseen / cache->block_size; b * cache->block_size < length; b++) {
            int32_t block = batch->tables[s * batch->table_stride + b];
            if (block < 0 || block >= cache->num_blocks) return BAD_BLOCK;
        }
    }
    return 0;
}

/* Tokens, a whole number of chunks, that two sequences share and that come before all queries of both. */
static int64_t shared_tokens(const Cache *cache, const Batch *batch, int64_t a, int64_t b) {
    const int32_t *x = batch->tables + a * batch->table_stride, *y = batch->tables + b * batch->table_stride;
    int64_t most = at_most(past_of(batch, a), past_of(batch, b)) / cache->block_size, blocks = 0;
    while (blocks < most && x[blocks] == y[blocks]) blocks++;
    return blocks * cache->block_size / CHUNK * CHUNK;
}

/* Finds runs of sequences with a shared beginning. Writes the sequences that are in one to `members`, run after run, to
 * shared[s] how many tokens sequence s shares (0: none), and to leader[s] the first of its run. Returns how many there
 * are. Sequences with many queries are left out: their rows share the reading of tokens among themselves. */
static int64_t find_shared(const Cache *cache, const Batch *batch, int32_t *members, int64_t *shared,
                           int32_t *leader) {
    int64_t count = 0, run = 0;
    for (int64_t s = 0; s < batch->sequences; s++) {
        int64_t queries = queries_of(batch, s);
        shared[s] = 0;
        if (batch->window || queries == 0 || queries * batch->group > 2 * ROWS) continue;
        members[count++] = (int32_t)s;
        leader[s] = (int32_t)s;
        int64_t size = count - 1 - run;
        if (size == 0) continue;
        /* The run takes one more unless it would then save less than before: (size - 1) times what it shares. */
        int32_t head = members[run];
        int64_t before = shared[head], now = shared_tokens(cache, batch, head, s);
        if (before) now = at_most(now, before);
        if (now > 0 && size * now >= (size - 1) * before) {
            shared[s] = now;
            leader[s] = head;
            if (now != before)
                for (int64_t m = run; m < count; m++) shared[members[m]] = now;
        } else if (size > 1) {
            run = count - 1;
        } else { /* a run of one is none */
            members[run] = (int32_t)s;
            count--;
        }
    }
    return count - run == 1 ? count - 1 : count;
}

typedef struct {
    Item *items;
    int64_t count;
} Items;

static void add_item(Items *items, Item item) { items->items[items->count++] = item; }

/* Items for shared beginnings: members of one run, as many as fill a tile. */
static void cut_shared(const Cache *cache, const Batch *batch, const int32_t *members, int64_t count,
                       const int64_t *shared, const int32_t *leader, Items *items) {
    for (int64_t first = 0, m = 0, rows = 0; m < count; m++) {
        int64_t more = queries_of(batch, members[m]) * batch->group;
        rows += more;
        int is_end = m + 1 == count || leader[members[m + 1]] != leader[members[m]] ||
                     rows + queries_of(batch, members[m + 1]) * batch->group > TILE_ROWS;
        if (!is_end) continue;
        for (int64_t g = 0; g < cache->kv_heads; g++) {
            Item item = {members[first], (int32_t)g, 0, (int32_t)(m + 1 - first), members + first,
                         0, shared[members[first]], 0};
            add_item(items, item);
        }
        first = m + 1;
        rows = 0;
    }
}

/* Items for everything else. */
static void cut_own(const Cache *cache, const Batch *batch, int64_t tile, const int64_t *shared, Items *items) {
    for (int64_t s = 0; s < batch->sequences; s++)
        for (int64_t query = 0, queries = queries_of(batch, s); query < queries; query += tile)
            for (int64_t g = 0; g < cache->kv_heads; g++) {
                int64_t count = at_most(queries - query, tile), position = past_of(batch, s) + query;
                int64_t first = batch->window ? at_least(position - batch->window + 1, 0) : shared[s];
                Item item = {(int32_t)s, (int32_t)g, (int32_t)query, (int32_t)count, 0,
                             first, position + count, shared[s] > 0};
                add_item(items, item);
            }
}

/* Longest first, so that the threads end together. */
static int by_cost(const void *a, const void *b) {
    const Item *left = a, *right = b;
    int64_t x = (left->end - left->first) * left->count, y = (right->end - right->first) * right->count;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* One thread's part of some items. `taken` counts those that any thread has begun. */
static void work(const Cache *cache, const Batch *batch, const Items *items, const Progress *progress,
                 const Scratch *scratch, int64_t *taken) {
    /* A thread takes its next item before it computes this one. */
    int64_t mine, after;
#pragma omp atomic capture
    mine = (*taken)++;
    for (; mine < items->count; mine = after) {
#pragma omp atomic capture
        after = (*taken)++;
        walk(cache, batch, items->items + mine, after < items->count ? items->items + after : 0, progress, scratch);
    }
}

/* Takes `bytes` of `memory`, in whole cache lines; with NULL it only counts them. */
static void *take(char *memory, size_t *used, int64_t bytes) {
    char *at = memory ? memory + *used : 0;
    *used += ((size_t)bytes + 63) / 64 * 64;
    return at;
}

/* All that a call works in. */
typedef struct {
    Items begun, own;
    Scratch *scratch; /* [threads] */
    Progress progress;
} Space;

/* Lays the space out in `memory`, or with NULL only counts, and returns its bytes. */
static size_t lay_out(char *memory, Space *space, const Cache *cache, int64_t begun, int64_t own, int64_t rows,
                      int64_t places, int threads) {
    size_t used = 0;
    space->begun.items = take(memory, &used, begun * (int64_t)sizeof(Item));
    space->own.items = take(memory, &used, own * (int64_t)sizeof(Item));
    space->progress.sum = take(memory, &used, places * cache->value_dim * 4);
    space->progress.total = take(memory, &used, places * UNIT * 4);
    space->progress.top = take(memory, &used, places * 4);
    space->scratch = take(memory, &used, threads * (int64_t)sizeof(Scratch));
    for (int thread = 0; thread < threads; thread++) {
        Scratch scratch;
        scratch.query = take(memory, &used, rows * cache->head_dim * 4);
        scratch.sum = take(memory, &used, rows * cache->value_dim * 4);
        scratch.score = take(memory, &used, rows * CHUNK * 4);
        scratch.total = take(memory, &used, rows * UNIT * 4);
        scratch.top = take(memory, &used, rows * 4);
        scratch.shrink = take(memory, &used, rows * 4);
        scratch.position = take(memory, &used, rows * 8);
        scratch.place = take(memory, &used, rows * 8);
        if (memory) space->scratch[thread] = scratch;
    }
    return used;
}

/* Writes out [T, heads, head_dim]. Returns 0 or an error. */
int64_t bg_attention(const float *query, int64_t query_stride, int64_t heads, float *data, int64_t num_blocks,
                     int64_t block_size, int64_t kv_heads, int64_t head_dim, int64_t tokens, const int32_t *starts,
                     const int32_t *lengths, const int32_t *tables, int64_t sequences, int64_t table_stride,
                     float scale, float soft_cap, int64_t window, float *out, int threads) {
    Cache cache = cache_of(data, num_blocks, block_size, kv_heads, head_dim);
    Batch batch = {query,  query_stride, heads, heads / kv_heads, starts, lengths, tables, sequences, table_stride,
                   scale, soft_cap,     window, out};
    int64_t status = check(&cache, &batch, tokens);
    if (status || tokens == 0) return status;

    int32_t members[sequences], leader[sequences];
    int64_t shared[sequences];
    int64_t count = find_shared(&cache, &batch, members, shared, leader);
    int64_t tile = at_least(TILE_ROWS / batch.group, 1), rows = at_least(TILE_ROWS, batch.group), own = 0;
    for (int64_t s = 0; s < sequences; s++) own += (queries_of(&batch, s) + tile - 1) / tile * kv_heads;
    Space space = {0};
    int64_t begun = count * kv_heads, places = count ? tokens * heads : 0;
    char *memory = aligned_alloc(64, lay_out(0, &space, &cache, begun, own, rows, places, threads));
    if (!memory) return NO_MEMORY;
    lay_out(memory, &space, &cache, begun, own, rows, places, threads);
    cut_shared(&cache, &batch, members, count, shared, leader, &space.begun);
    cut_own(&cache, &batch, tile, shared, &space.own);
    qsort(space.begun.items, (size_t)space.begun.count, sizeof(Item), by_cost);
    qsort(space.own.items, (size_t)space.own.count, sizeof(Item), by_cost);

    int64_t taken_begun = 0, taken_own = 0;
#pragma omp parallel num_threads(threads) if (own > 1)
    {
#pragma omp for schedule(static)
        for (int thread = 0; thread < threads; thread++)
            work(&cache, &batch, &space.begun, &space.progress, space.scratch + thread, &taken_begun);
        /* Here every thread waits: what goes on must have begun. */
#pragma omp for schedule(static)
        for (int thread = 0; thread < threads; thread++)
            work(&cache, &batch, &space.own, &space.progress, space.scratch + thread, &taken_own);
    }
    free(memory);
    return 0;
}
