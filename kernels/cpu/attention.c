/* Attention over the paged cache, float32, for a mixed batch, and the writing of the cache.
 *
 * A block holds, for each key/value head, its keys transposed [D, B] and then its values [B, V], V being D rounded up
 * to a UNIT: UNIT tokens of one dimension fill a vector, and so do UNIT dimensions of one token.
 *
 * Work is cut into items: one sequence, one key/value head, a tile of consecutive queries with all query heads of that
 * head. An item walks over the sequence in chunks of CHUNK tokens counted from the sequence's start, with a running
 * softmax. A query sees each of its tokens through the same chain of operations wherever its chunk or its tile begins
 * and ends: tokens that it must not see have weight 0 and leave every sum unchanged. So its bits depend on its own
 * sequence alone, not on batch, chunking or threads. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "simd.h"

#define CHUNK 64 /* tokens between two rescalings of the running softmax */
#define CHUNK_UNITS (CHUNK / UNIT)
#define TILE_ROWS 48 /* (query, head) pairs of an item, if a single query has fewer heads */

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

enum { BAD_LENGTH = -1, BAD_BLOCK = -2, BAD_SLOT = -3, NO_MEMORY = -4 };

typedef struct {
    float *data;
    int64_t num_blocks, block_size, kv_heads, head_dim;
    int64_t value_dim, head_floats, block_floats; /* derived */
} Cache;

static Cache cache_of(float *data, int64_t num_blocks, int64_t block_size, int64_t kv_heads, int64_t head_dim) {
    int64_t value_dim = (head_dim + UNIT - 1) / UNIT * UNIT;
    int64_t head_floats = block_size * (head_dim + value_dim);
    Cache cache = {data, num_blocks, block_size, kv_heads, head_dim, value_dim, head_floats, head_floats * kv_heads};
    return cache;
}

int64_t bg_store_kv(const float *key, int64_t key_stride, const float *value, int64_t value_stride,
                    const int32_t *slots, int64_t tokens, float *data, int64_t num_blocks, int64_t block_size,
                    int64_t kv_heads, int64_t head_dim, int threads) {
    Cache cache = cache_of(data, num_blocks, block_size, kv_heads, head_dim);
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] >= num_blocks * block_size) return BAD_SLOT;
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens > 8)
    for (int64_t t = 0; t < tokens; t++) {
        if (slots[t] < 0) continue;
        int64_t offset = slots[t] % block_size;
        float *block = cache.data + slots[t] / block_size * cache.block_floats;
        for (int64_t g = 0; g < kv_heads; g++) {
            float *keys = block + g * cache.head_floats, *values = keys + head_dim * block_size;
            const float *from = key + t * key_stride + g * head_dim;
            for (int64_t d = 0; d < head_dim; d++) keys[d * block_size + offset] = from[d];
            memcpy(values + offset * cache.value_dim, value + t * value_stride + g * head_dim, (size_t)head_dim * 4);
        }
    }
    return 0;
}

typedef struct {
    const float *query;
    int64_t query_stride, heads;
    const int32_t *starts, *lengths, *tables;
    int64_t sequences, table_stride;
    float scale, soft_cap; /* soft_cap 0: none */
    int64_t window;        /* 0: none */
    float *out;
} Batch;

typedef struct {
    int32_t sequence, head, query, count; /* queries [query, query + count) of the sequence */
    int64_t first, end;                   /* tokens [first, end) that any of them sees */
} Item;

/* What one thread works in, for `rows` (query, head) pairs. */
typedef struct {
    float *query, *sum, *score; /* [rows, head_dim], [rows, value_dim], [rows, CHUNK] */
    vf *total;                  /* [rows, VU]: sum of weights, by lane */
    float *top, *shrink;        /* [rows]: running maximum; factor for what came before this chunk */
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

/* Turns one row's scores of units [first, end) into weights. The row sees tokens [low, high) of the chunk. */
static void weigh(const Scratch *scratch, int row, int first, int end, int64_t low, int64_t high, float soft_cap) {
    float *score = scratch->score + row * CHUNK;
    vf *total = scratch->total + row * VU;
    vi lane;
    for (int i = 0; i < VW; i++) lane[i] = i;
    vf highest = vf_set1(-INFINITY);
    for (int at = first * UNIT; at < end * UNIT; at += VW) {
        vf s = vf_load(score + at);
        if (soft_cap > 0) s = vf_tanh(s / vf_set1(soft_cap)) * vf_set1(soft_cap);
        if (at < low || at + VW > high) {
            vi token = lane + vi_set1(at);
            s = vf_select((token >= vi_set1((int32_t)low)) & (token < vi_set1((int32_t)high)), s,
                          vf_set1(-INFINITY));
        }
        vf_store(score + at, s);
        highest = vf_max(highest, s);
    }
    float top = vf_max_lane(highest), before = scratch->top[row];
    if (before > top) top = before;
    if (top == -INFINITY) { /* nothing seen yet */
        for (int at = first * UNIT; at < end * UNIT; at++) score[at] = 0.0f;
        scratch->shrink[row] = 1.0f;
        return;
    }
    float shrink = 1.0f;
    if (top != before) shrink = vf_exp(vf_set1(before - top))[0];
    scratch->top[row] = top;
    scratch->shrink[row] = shrink;
    for (int v = 0; v < VU; v++) total[v] = total[v] * vf_set1(shrink);
    for (int unit = first; unit < end; unit++)
        for (int v = 0; v < VU; v++) {
            float *at = score + unit * UNIT + v * VW;
            vf w = vf_exp(vf_load(at) - vf_set1(top));
            vf_store(at, w);
            total[v] = total[v] + w;
        }
}

/* Points `units` at the item's tokens in the chunk that begins at `start`; units without any stay as they are. */
static void find_units(const Cache *cache, const Batch *batch, const Item *item, int64_t start, Units *units) {
    const int32_t *table = batch->tables + item->sequence * batch->table_stride;
    for (int u = 0; u < CHUNK_UNITS; u++) {
        int64_t token = start + u * UNIT;
        if (token + UNIT <= item->first || token >= item->end) continue;
        const float *keys = cache->data + table[token / cache->block_size] * cache->block_floats +
                            item->head * cache->head_floats;
        int64_t offset = token % cache->block_size;
        units->keys[u] = keys + offset;
        units->values[u] = keys + cache->head_dim * cache->block_size + offset * cache->value_dim;
    }
}

static int64_t at_least(int64_t x, int64_t low) { return x > low ? x : low; }
static int64_t at_most(int64_t x, int64_t high) { return x < high ? x : high; }

static int64_t first_chunk(const Item *item) { return item->first / CHUNK * CHUNK; }

/* Computes one item, and fetches the beginning of `next` (NULL: none) meanwhile. */
static void attend(const Cache *cache, const Batch *batch, const Item *item, const Item *next,
                   const Scratch *scratch) {
    int64_t dim = cache->head_dim, value_dim = cache->value_dim, group = batch->heads / cache->kv_heads;
    int rows = (int)(item->count * group);
    int64_t begin = batch->starts[item->sequence];
    /* Position of the item's first query. */
    int64_t position = batch->lengths[item->sequence] - (batch->starts[item->sequence + 1] - begin) + item->query;
    begin += item->query;

    for (int row = 0; row < rows; row++) {
        const float *from = batch->query + (begin + row / group) * batch->query_stride +
                            (item->head * group + row % group) * dim;
        for (int64_t d = 0; d < dim; d++) scratch->query[row * dim + d] = from[d] * batch->scale;
        scratch->top[row] = -INFINITY;
        for (int v = 0; v < VU; v++) scratch->total[row * VU + v] = vf_set1(0.0f);
    }
    memset(scratch->sum, 0, (size_t)(rows * value_dim) * 4);

    /* Few rows wait for memory; many rows wait for arithmetic, and find the tokens in the cache of the processor. */
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
        scores(scratch, rows, dim, &units, is_ahead ? &ahead : 0, cache->block_size, first, end);
        for (int row = 0; row < rows; row++) {
            int64_t at = position + row / group;
            int64_t low = batch->window ? at - batch->window + 1 - start : 0;
            weigh(scratch, row, first, end, at_least(low, from), at_most(at + 1 - start, to), batch->soft_cap);
        }
        values(scratch, rows, value_dim, &units, is_ahead ? &ahead : 0, from, to);
    }

    for (int row = 0; row < rows; row++) {
        float *to = batch->out + ((begin + row / group) * batch->heads + item->head * group + row % group) * dim;
        float total = unit_sum(scratch->total + row * VU);
        const float *sum = scratch->sum + row * value_dim;
        for (int64_t d = 0; d < dim; d++) to[d] = sum[d] / total;
    }
}

/* Longest first, so that the threads end together. */
static int by_cost(const void *a, const void *b) {
    const Item *left = a, *right = b;
    int64_t x = (left->end - left->first) * left->count, y = (right->end - right->first) * right->count;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Fills `items` (if any) and returns their number, or an error. */
static int64_t cut(const Cache *cache, const Batch *batch, int64_t tile, Item *items) {
    int64_t n = 0;
    for (int64_t s = 0; s < batch->sequences; s++) {
        int64_t queries = batch->starts[s + 1] - batch->starts[s], length = batch->lengths[s];
        if (queries < 0 || length < queries || length > batch->table_stride * cache->block_size) return BAD_LENGTH;
        if (!items) {
            int64_t unseen = batch->window && queries ? at_least(length - queries - batch->window + 1, 0) : 0;
            for (int64_t b = unseen / cache->block_size; queries && b * cache->block_size < length; b++) {
                int32_t block = batch->tables[s * batch->table_stride + b];
                if (block < 0 || block >= cache->num_blocks) return BAD_BLOCK;
            }
            n += (queries + tile - 1) / tile * cache->kv_heads;
            continue;
        }
        for (int64_t query = 0; query < queries; query += tile)
            for (int64_t g = 0; g < cache->kv_heads; g++) {
                int64_t count = at_most(queries - query, tile), position = length - queries + query;
                Item item = {(int32_t)s, (int32_t)g, (int32_t)query, (int32_t)count,
                             batch->window ? at_least(position - batch->window + 1, 0) : 0, position + count};
                items[n++] = item;
            }
    }
    return n;
}

/* Writes out [T, heads, head_dim]. Returns 0 or an error. */
int64_t bg_attention(const float *query, int64_t query_stride, int64_t heads, float *data, int64_t num_blocks,
                     int64_t block_size, int64_t kv_heads, int64_t head_dim, int64_t tokens,
                     const int32_t *starts, const int32_t *lengths, const int32_t *tables, int64_t sequences, int64_t table_stride,
                     float scale, float soft_cap, int64_t window, float *out, int threads) {
    Cache cache = cache_of(data, num_blocks, block_size, kv_heads, head_dim);
    Batch batch = {query, query_stride, heads, starts, lengths, tables, sequences, table_stride,
                   scale, soft_cap, window, out};
    int64_t group = heads / kv_heads, tile = at_least(TILE_ROWS / group, 1), rows = tile * group;
    if (starts[0] != 0 || starts[sequences] != tokens) return BAD_LENGTH;
    int64_t count = cut(&cache, &batch, tile, 0);
    if (count <= 0) return count;

    /* Every part of a thread's scratch is a whole number of UNITs, so vectors stay aligned. */
    int64_t dim = (head_dim + UNIT - 1) / UNIT * UNIT, lines = (rows + UNIT - 1) / UNIT * UNIT;
    int64_t floats = rows * (dim + cache.value_dim + CHUNK + UNIT) + 2 * lines;
    size_t item_bytes = ((size_t)count * sizeof(Item) + 63) / 64 * 64;
    char *memory = aligned_alloc(64, item_bytes + (size_t)(floats * threads) * 4);
    if (!memory) return NO_MEMORY;
    Item *items = (Item *)memory;
    cut(&cache, &batch, tile, items);
    qsort(items, (size_t)count, sizeof(Item), by_cost);

    int64_t taken = 0;
#pragma omp parallel for num_threads(threads) schedule(static) if (count > 1)
    for (int thread = 0; thread < threads; thread++) {
        float *at = (float *)(memory + item_bytes) + thread * floats;
        Scratch scratch;
        scratch.query = at;
        scratch.sum = at += rows * dim;
        scratch.score = at += rows * cache.value_dim;
        scratch.total = (vf *)(at += rows * CHUNK);
        scratch.top = at += rows * UNIT;
        scratch.shrink = at + lines;
        /* A thread takes its next item before it computes this one. */
        int64_t mine, after;
#pragma omp atomic capture
        mine = taken++;
        for (; mine < count; mine = after) {
#pragma omp atomic capture
            after = taken++;
            attend(&cache, &batch, items + mine, after < count ? items + after : 0, &scratch);
        }
    }
    free(memory);
    return 0;
}
