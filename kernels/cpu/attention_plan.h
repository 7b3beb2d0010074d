/* AttentionPlan: the work of a step's attention, cut into items once and done for every layer of a group.
 *
 * An item is a tile of rows, (query, head) pairs that share a key/value head, and a range of tokens. Sequences that begin
 * with the same blocks are one item: their rows are taken through these blocks together, then each sequence's rows go on
 * alone from where that left them. */
#ifndef BATCHGEN_ATTENTION_PLAN_H
#define BATCHGEN_ATTENTION_PLAN_H

#include "kv_cache.h"
#include "op.h"

/* Rows of an item, if a single query has fewer heads. What floats need for many does not stay in the L1 cache. */
#define TILE_ROWS 48
#define INT8_TILE_ROWS 96
#define THIN_ROWS 12 /* so few rows wait for memory; more wait for arithmetic */
#define CHUNK 64     /* tokens between two rescalings of the running softmax */

typedef struct {
    int32_t sequence, head;
    int32_t query, count; /* queries [query, query + count) of the sequence; or count sequences that begin alike */
    const int32_t *members; /* those sequences, all of whose queries are rows; NULL for one sequence */
    int64_t first, end;     /* tokens [first, end) that any row sees; of those that all members begin with */
    int64_t rows;
    int64_t cost; /* about nanoseconds */
} Item;

typedef struct {
    const int32_t *starts, *lengths, *tables;
    int64_t tokens, sequences, table_stride, heads, group; /* group: query heads of a key/value head */
    int64_t window;                                        /* 0: none */
    Cache cache;                                           /* without data */
    Item *items;
    int64_t count, cost; /* of items, and what all cost */
    int32_t *members, *leader;
    int64_t *shared;
    char *memory; /* all of the above lies in it */
    size_t bytes;
} AttentionPlan;

static inline int64_t at_least(int64_t x, int64_t low) { return x > low ? x : low; }
static inline int64_t at_most(int64_t x, int64_t high) { return x < high ? x : high; }

static inline int64_t queries_of(const AttentionPlan *plan, int64_t sequence) {
    return plan->starts[sequence + 1] - plan->starts[sequence];
}

/* Tokens of a sequence that come before all of its queries. */
static inline int64_t past_of(const AttentionPlan *plan, int64_t sequence) {
    return plan->lengths[sequence] - queries_of(plan, sequence);
}

static inline int64_t tile_rows(const AttentionPlan *plan) {
    return at_least(plan->cache.type == KV_INT8 ? INT8_TILE_ROWS : TILE_ROWS, plan->group);
}

/* The first token that a query sees which stands after `past` tokens. */
static inline int64_t first_seen(const AttentionPlan *plan, int64_t past) {
    return plan->window ? at_least(past - plan->window + 1, 0) : 0;
}

#endif
