/* Adapters in slots, and how the rows of a step are cut into tiles (lora.c). */
#ifndef BATCHGEN_LORA_H
#define BATCHGEN_LORA_H

#include "kv_cache.h"

/* Rows of a tile. */
#if VW == 16
#define ROWS 8
#else
#define ROWS 4
#endif
/* Rows that take as long to multiply as their weights to come from memory. */
#define FETCH_ROWS 6
/* Nanoseconds of work that are worth a second operation, and tiles for each thread that are enough without one. */
#define SPLIT_COST 15000
#define ENOUGH_TILES 3

/* A of integers of 8 bits, [units][K / 4][UNIT][4] with K filled up to a multiple of 64, and behind it the scale of each column, a
 * float; B of float16. Only rows of integers are multiplied by it (lora_amx.c). */
enum { INTEGERS = 16 };

enum { X_FLOATS, X_BITS_8, X_BITS_16, X_IDS };

typedef struct {
    const char *b;      /* [columns / UNIT][rank][UNIT], or NULL: nothing for this part */
    const float *bias;  /* [columns], or NULL */
    int64_t rank, unit; /* the part's results of A begin at this unit */
} Part;

typedef struct {
    const char *a;       /* [units][K][UNIT], those of all parts; of a table [V][units][UNIT]; NULL: the slot is empty */
    int64_t units, type; /* of kv_cache.h, of A and of B; or INTEGERS */
    Part part[];
} Slot;

typedef struct {
    const char *x; /* rows as `kind` says, or ids, int64 */
    int64_t x_stride, plane_stride; /* bytes */
    int64_t kind;
    const float *scale; /* [T], of integers */
    int64_t depth;      /* K, or V */
    int64_t rows;       /* T (may be a size of the step) */
    const int32_t *row, *starts;
    int64_t slots, parts;
    const char *bank;       /* [slots] Slot with its parts */
    const int64_t *columns; /* [parts + 1], where each part's begin */
    float *out;
    int64_t out_stride;
    float *reduced; /* room for `room` floats, if the work is split */
    int64_t room;
} Lora;

/* Some rows of one slot. */
typedef struct {
    const Slot *slot;
    const int32_t *row;
    int64_t first, rows; /* of the list of rows */
    int64_t reduced;     /* where their results of A begin */
    int64_t cost;        /* about nanoseconds, times COST_UNIT */
    int64_t number, next, tile, tiles; /* of the slot, and of the tile in it */
} Tile;

#define COST_UNIT 32

static inline int64_t units_of(int64_t columns) { return (columns + UNIT - 1) / UNIT; }

static inline const Slot *slot_at(const Lora *a, int64_t slot) {
    return (const Slot *)(a->bank + slot * (int64_t)(sizeof(Slot) + (size_t)a->parts * sizeof(Part)));
}

/* Columns that a slot's adapter is asked for, in whole units. */
static inline int64_t column_units(const Lora *a) {
    int64_t units = 0;
    for (int64_t p = 0; p < a->parts; p++) units += units_of(a->columns[p + 1] - a->columns[p]);
    return units;
}

/* Products of a row with the slot's adapter. */
static inline int64_t products(const Lora *a, const Slot *slot) {
    int64_t all = slot->units * UNIT * (a->kind == X_IDS ? 1 : a->depth);
    for (int64_t p = 0; p < a->parts; p++)
        if (slot->part[p].b) all += slot->part[p].rank * (a->columns[p + 1] - a->columns[p]);
    return all;
}

/* Goes to the next tile; 0: there is none. A tile of zeros is before the first. */
static inline int next_tile(const Lora *a, Tile *t) {
    t->reduced += t->slot ? t->rows * t->slot->units * UNIT : 0;
    while (t->tile == t->tiles) {
        if (t->next == a->slots) return 0;
        int64_t slot = t->number = t->next++, rows = a->starts[slot + 1] - a->starts[slot];
        t->slot = slot_at(a, slot);
        t->tile = 0, t->tiles = t->slot->a ? (rows + ROWS - 1) / ROWS : 0;
    }
    /* Of even height: 9 rows are 5 + 4, not 8 + 1. */
    int64_t begin = a->starts[t->number], rows = a->starts[t->number + 1] - begin;
    t->first = begin + rows * t->tile / t->tiles;
    t->rows = begin + rows * (t->tile + 1) / t->tiles - t->first;
    t->row = a->row + t->first;
    t->cost = products(a, t->slot) * (t->rows + FETCH_ROWS);
    t->tile++;
    return 1;
}

/* What there is to do. */
typedef struct {
    int64_t tiles, cost, units; /* units of A, of all tiles */
    int is_split, is_wrong;
} Plan;

static inline Plan plan_of(const Lora *a, const Step *step) {
    Plan plan = {0};
    int64_t rows = step_size(step, a->rows);
    plan.is_wrong = a->starts[0] != 0 || a->starts[a->slots] > rows;
    for (int64_t s = 0; s < a->slots; s++) plan.is_wrong |= a->starts[s + 1] < a->starts[s];
    if (plan.is_wrong || !a->starts[a->slots]) return plan;
    Tile t = {0};
    int64_t floats = 0;
    for (; next_tile(a, &t); plan.tiles++) {
        plan.cost += t.cost, plan.units += t.slot->units;
        floats = t.reduced + t.rows * t.slot->units * UNIT;
    }
    plan.is_split = plan.tiles < ENOUGH_TILES * step->threads && plan.cost / COST_UNIT > SPLIT_COST && floats <= a->room;
    return plan;
}

/* Units [unit, end) of x · Aᵀ of a tile of an adapter of INTEGERS; `to` is [rows][units][UNIT]. */
void lora_amx_reduce(const Lora *a, const Tile *t, int64_t unit, int64_t end, float *to);

#endif
