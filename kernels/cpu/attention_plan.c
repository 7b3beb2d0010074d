/* Plans attention: checks what will be read, finds shared beginnings, cuts the work into items, the longest first. */
#include <stdlib.h>
#include <string.h>

#include "attention_plan.h"
#include "kernels.h"

#define ITEMS_PER_THREAD 4 /* of those that several sequences share, if there are rows enough */

typedef struct {
    AttentionPlan *plan;
    const int32_t *starts, *lengths, *tables;
    int64_t tokens, sequences, table_width;
    int64_t heads, type, num_blocks, block_size, kv_heads, head_dim;
    int64_t window;
} PlanAttention;

void *bg_attention_plan_new(void) { return calloc(1, sizeof(AttentionPlan)); }

void bg_attention_plan_free(void *plan) {
    if (plan) free(((AttentionPlan *)plan)->memory);
    free(plan);
}

/* Returns 0 if every length and block that will be read is in range. */
static int64_t check(const AttentionPlan *plan) {
    int64_t block_size = plan->cache.block_size;
    if (plan->starts[0] != 0 || plan->starts[plan->sequences] != plan->tokens) return BAD_LENGTH;
    for (int64_t s = 0; s < plan->sequences; s++) {
        int64_t length = plan->lengths[s], past = past_of(plan, s);
        if (past < 0 || past > length || length > plan->table_stride * block_size) return BAD_LENGTH;
        if (past == length) continue;
        for (int64_t b = first_seen(plan, past) / block_size; b * block_size < length; b++) {
            int32_t block = plan->tables[s * plan->table_stride + b];
            if (block < 0 || block >= plan->cache.num_blocks) return BAD_BLOCK;
        }
    }
    return 0;
}

/* Tokens, a whole number of chunks, that two sequences share and that come before all queries of both. Blocks behind a
 * window may be gone; where both lack them neither needs them. */
static int64_t shared_tokens(const AttentionPlan *plan, int64_t a, int64_t b) {
    const int32_t *x = plan->tables + a * plan->table_stride, *y = plan->tables + b * plan->table_stride;
    int64_t most = at_most(past_of(plan, a), past_of(plan, b)) / plan->cache.block_size, blocks = 0;
    while (blocks < most && x[blocks] == y[blocks]) blocks++;
    return blocks * plan->cache.block_size / CHUNK * CHUNK;
}

/* Finds runs of sequences with a shared beginning. Writes the sequences that are in one to `members`, run after run, to
 * shared[s] how many tokens sequence s shares (0: none), and to leader[s] the first of its run. Returns how many there
 * are. Sequences with many queries are left out: their rows share the reading of tokens among themselves. */
static int64_t find_shared(const AttentionPlan *plan) {
    int32_t *members = plan->members, *leader = plan->leader;
    int64_t *shared = plan->shared, count = 0, run = 0;
    for (int64_t s = 0; s < plan->sequences; s++) {
        int64_t queries = queries_of(plan, s);
        shared[s] = 0;
        if (queries == 0 || queries * plan->group > THIN_ROWS) continue;
        members[count++] = (int32_t)s;
        leader[s] = (int32_t)s;
        int64_t size = count - 1 - run;
        if (size == 0) continue;
        /* The run takes one more unless it would then save less than before: (size - 1) times what it shares. */
        int32_t head = members[run];
        int64_t before = shared[head], now = shared_tokens(plan, head, s);
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

/* By bytes or by products, whichever takes longer, as a server's core does them. */
static int64_t cost_of(const AttentionPlan *plan, int64_t tokens, int64_t rows) {
    int64_t numbers = tokens * (plan->cache.head_dim + plan->cache.value_dim);
    return at_least(numbers * kv_bytes(plan->cache.type) / 8, numbers * rows / 32);
}

static void add_item(AttentionPlan *plan, Item item) {
    plan->items[plan->count++] = item;
    plan->cost += item.cost;
}

/* Rows of an item of members: a tile, or less if that leaves threads without an item. */
static int64_t member_rows(const AttentionPlan *plan, int64_t members, int64_t threads) {
    int64_t rows = 0;
    for (int64_t m = 0; m < members; m++) rows += queries_of(plan, plan->members[m]) * plan->group;
    int64_t share = rows * plan->cache.kv_heads / (ITEMS_PER_THREAD * threads) / UNIT * UNIT;
    return at_most(at_least(share, UNIT), tile_rows(plan));
}

/* Items for shared beginnings: members of one run, as many as fill a tile. */
static void cut_shared(AttentionPlan *plan, int64_t count, int64_t threads) {
    const int32_t *members = plan->members;
    int64_t first = 0, rows = 0, seen = 0, cost = 0, most = member_rows(plan, count, threads);
    for (int64_t m = 0; m < count; m++) {
        int64_t own = queries_of(plan, members[m]) * plan->group, shared = plan->shared[members[m]];
        int64_t low = first_seen(plan, past_of(plan, members[m]));
        rows += own;
        cost += cost_of(plan, plan->lengths[members[m]] - at_least(shared, low), own);
        seen = m == first ? low : at_most(low, seen);
        int is_end = m + 1 == count || plan->leader[members[m + 1]] != plan->leader[members[m]] ||
                     rows + queries_of(plan, members[m + 1]) * plan->group > most;
        if (!is_end) continue;
        seen = at_most(seen, shared);
        cost += cost_of(plan, shared - seen, rows);
        for (int64_t g = 0; g < plan->cache.kv_heads; g++) {
            Item item = {members[first], (int32_t)g, 0, (int32_t)(m + 1 - first), members + first, seen, shared, rows, cost};
            add_item(plan, item);
        }
        first = m + 1;
        rows = cost = 0;
    }
}

static int64_t tile_queries(const AttentionPlan *plan) { return tile_rows(plan) / plan->group; }

/* Items for everything else. */
static void cut_own(AttentionPlan *plan) {
    int64_t tile = tile_queries(plan);
    for (int64_t s = 0; s < plan->sequences; s++) {
        if (plan->shared[s]) continue;
        for (int64_t query = 0, queries = queries_of(plan, s); query < queries; query += tile)
            for (int64_t g = 0; g < plan->cache.kv_heads; g++) {
                int64_t count = at_most(queries - query, tile), position = past_of(plan, s) + query;
                int64_t first = first_seen(plan, position), end = position + count, rows = count * plan->group;
                Item item = {(int32_t)s, (int32_t)g,   (int32_t)query, (int32_t)count, 0, first, end, rows,
                             cost_of(plan, end - first, rows)};
                add_item(plan, item);
            }
    }
}

/* Longest first, so that the threads end together. */
static int by_cost(const void *a, const void *b) {
    int64_t x = ((const Item *)a)->cost, y = ((const Item *)b)->cost;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Takes `bytes` of `memory`, in whole cache lines; with NULL it only counts them. */
static void *take(char *memory, size_t *used, int64_t bytes) {
    char *at = memory ? memory + *used : 0;
    *used += ((size_t)bytes + 63) / 64 * 64;
    return at;
}

/* Lays out the plan's arrays, and returns their bytes. */
static size_t lay_out(AttentionPlan *plan, char *memory, int64_t items) {
    size_t used = 0;
    int64_t sequences = plan->sequences;
    plan->members = take(memory, &used, sequences * 4);
    plan->leader = take(memory, &used, sequences * 4);
    plan->shared = take(memory, &used, sequences * 8);
    plan->items = take(memory, &used, items * (int64_t)sizeof(Item));
    return used;
}

/* Makes room for all that the step may need. Returns 0 or an error. */
static int64_t reserve(AttentionPlan *plan) {
    int64_t items = 0, tile = tile_queries(plan);
    for (int64_t s = 0; s < plan->sequences; s++)
        items += (queries_of(plan, s) + tile - 1) / tile * plan->cache.kv_heads;
    size_t bytes = lay_out(plan, 0, items);
    if (bytes > plan->bytes) {
        free(plan->memory);
        plan->bytes = bytes + bytes / 4 / 64 * 64;
        plan->memory = aligned_alloc(64, plan->bytes);
        if (!plan->memory) plan->bytes = 0;
        if (!plan->memory) return NO_MEMORY;
    }
    lay_out(plan, plan->memory, items);
    return 0;
}

static int64_t one_chunk(const void *args, const Step *step) {
    (void)args, (void)step;
    return 1;
}

static void plan_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    (void)chunk, (void)of;
    const PlanAttention *a = args;
    AttentionPlan *plan = a->plan;
    plan->starts = a->starts, plan->lengths = a->lengths, plan->tables = a->tables;
    plan->tokens = step_size(step, a->tokens), plan->sequences = step_size(step, a->sequences);
    plan->table_stride = step_size(step, a->table_width);
    plan->heads = a->heads, plan->group = a->heads / a->kv_heads, plan->window = a->window;
    plan->cache = cache_of(0, a->type, a->num_blocks, a->block_size, a->kv_heads, a->head_dim);
    plan->count = plan->cost = 0;
    int64_t status = check(plan);
    if (!status && plan->tokens) status = reserve(plan);
    if (status) step_fail(step, status);
    if (status || plan->tokens == 0) return;
    cut_shared(plan, find_shared(plan), step->threads);
    cut_own(plan);
    qsort(plan->items, (size_t)plan->count, sizeof(Item), by_cost);
}

const Kernel kernel_plan_attention = {one_chunk, plan_run};
