/* AttentionPlan: the work of a step's attention, cut into items once and done for every layer of a group.
 *
 * An item is a tile of rows, (query, head) pairs that share a key/value head, and a range of tokens. Sequences that begin
 * with the same blocks are taken through these together, once, with the rows of many in a tile; then each goes on alone
 * from where that left its rows. */
#ifndef BATCHGEN_ATTENTION_PLAN_H
#define BATCHGEN_ATTENTION_PLAN_H

#include "kv_cache.h"
#include "op.h"

#define TILE_ROWS 48 /* rows of an item, if a single query has fewer heads */
#define THIN_ROWS 12 /* so few rows wait for memory; more wait for arithmetic */
#define CHUNK 64     /* tokens between two rescalings of the running softmax */

typedef struct {
    int32_t sequence, head;
    int32_t query, count; /* queries [query, query + count) of the sequence; or count sequences of a shared beginning */
    const int32_t *members; /* those sequences, all of whose queries are rows; NULL for one sequence */
    int64_t first, end;     /* tokens [first, end) that any row sees */
    int64_t rows;
    int goes_on; /* the rows have been through the tokens before `first` */
} Item;

typedef struct {
    Item *items;
    int64_t count, cost; /* cost: of all, about nanoseconds */
} Items;

typedef struct {
    const int32_t *starts, *lengths, *tables;
    int64_t tokens, sequences, table_stride, heads, group; /* group: query heads of a key/value head */
    int64_t window;                                        /* 0: none */
    Cache cache;                                           /* without data */
    Items begun, own;
    int32_t *members, *leader;
    int64_t *shared;
    /* How far each row has got, by place: what is kept between a shared beginning and the rest. */
    float *sum;   /* [places, value_dim] */
    float *total; /* [places, UNIT] */
    float *top;   /* [places] */
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

#endif
