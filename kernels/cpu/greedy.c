/* A token for each row straight from the head's matrix product: part of it lies in the cache for a moment, and no logits are
 * written to memory. Greedy rows take the largest; rows with a temperature are drawn as sampling.c draws them, from the
 * stretch in which the token lies, computed again. */
#include <math.h>

#include "kernels.h"
#include "linear_float.h"
#include "linear_int8.h"
#include "stretch.h"

/* What is multiplied at once: a whole number of panels of both products. */
#define COLUMNS 256
#define GROUP_ROWS 128

/* A row's largest value so far, the lowest column that has it, and whether any value is no number. */
typedef struct {
    float top;
    int32_t has_nan;
    int64_t column;
} Best;

typedef struct {
    int64_t width; /* columns from here on do not count */
    int64_t slots; /* chunks that the columns are cut into */
    Best *best;    /* [slots][rows] */
} Search;

typedef struct {
    LinearFloat product;
    Search search;
} GreedyFloat;

typedef struct {
    LinearInt8 product;
    Search search;
} GreedyInt8;

/* Where a thread multiplies: too large for the stack of a thread that was given little, and the products use the thread's
 * scratch. */
static _Thread_local float values[GROUP_ROWS * COLUMNS] __attribute__((aligned(64)));

/* Looks through `count` values, of columns `first` and on. */
static void look(Best *best, const float *x, int64_t count, int64_t first) {
    vi odd = vi_set1(0);
    vf most = vf_set1(-INFINITY);
    int64_t i = 0;
    for (; i + VW <= count; i += VW) {
        vf value = vf_load(x + i);
        odd |= value != value;
        most = vf_max(most, value);
    }
    int has_nan = 0;
    for (int lane = 0; lane < VW; lane++) has_nan |= odd[lane];
    float top = i ? vf_max_lane(most) : -INFINITY;
    for (int64_t rest = i; rest < count; rest++) {
        has_nan |= x[rest] != x[rest];
        top = x[rest] > top ? x[rest] : top;
    }
    best->has_nan |= has_nan;
    if (has_nan || !(top > best->top)) return;
    best->top = top;
    int64_t place = 0;
    while (x[place] != top) place++;
    best->column = first + place;
}

/* Part of a product: rows from `row` on, columns from `column` on, into out [.][COLUMNS]. Returns 0 or an error code. */
typedef int Multiply(const void *product, int64_t row, int64_t row_end, int64_t column, int64_t column_end, float *out);

static int multiply_float(const void *product, int64_t row, int64_t row_end, int64_t column, int64_t column_end,
                          float *out) {
    linear_float_panels(product, row, row_end, column / LINEAR_PANEL, (column_end + LINEAR_PANEL - 1) / LINEAR_PANEL, out,
                        COLUMNS);
    return 0;
}

static int multiply_int8(const void *product, int64_t row, int64_t row_end, int64_t column, int64_t column_end,
                         float *out) {
    return linear_int8_panels(product, row, row_end, column / PANEL, (column_end + PANEL - 1) / PANEL, out, COLUMNS);
}

/* Looks at `count` values of row `row`, of columns `column` and on. */
typedef void See(const void *state, int64_t row, const float *x, int64_t count, int64_t column);

/* Shows a chunk's columns of all rows, some at a time. */
static void walk_columns(const void *product, Multiply *multiply, int64_t rows, int64_t width, See *see, const void *state,
                         Step *step, int64_t chunk, int64_t of) {
    int64_t parts = (width + COLUMNS - 1) / COLUMNS, end = chunk_begin(parts, chunk + 1, of);
    for (int64_t part = chunk_begin(parts, chunk, of); part < end; part++) {
        int64_t column = part * COLUMNS, column_end = min_of(column + COLUMNS, width);
        for (int64_t row = 0; row < rows; row += GROUP_ROWS) {
            int64_t row_end = min_of(row + GROUP_ROWS, rows);
            int error = multiply(product, row, row_end, column, column_end, values);
            if (error) {
                step_fail(step, error);
                return;
            }
            for (int64_t r = row; r < row_end; r++)
                see(state, r, values + (r - row) * COLUMNS, column_end - column, column);
        }
    }
}

static void see_best(const void *state, int64_t row, const float *x, int64_t count, int64_t column) {
    Best *const *best = state;
    look(*best + row, x, count, column);
}

static void search(const void *product, Multiply *multiply, int64_t rows, const Search *s, Step *step, int64_t chunk,
                   int64_t of) {
    Best *best = s->best + chunk * rows;
    for (int64_t r = 0; r < rows; r++) best[r] = (Best){-INFINITY, 0, -1};
    walk_columns(product, multiply, rows, s->width, see_best, &best, step, chunk, of);
}

#define GREEDY(NAME, ARGS, MULTIPLY) \
    static int64_t NAME##_chunks(const void *args, const Step *step) { \
        const ARGS *a = args; \
        return step_size(step, a->product.rows) ? a->search.slots : 0; \
    } \
    static void NAME##_run(const void *args, Step *step, int64_t chunk, int64_t of) { \
        const ARGS *a = args; \
        search(&a->product, MULTIPLY, step_size(step, a->product.rows), &a->search, step, chunk, of); \
    } \
    const Kernel kernel_##NAME = {NAME##_chunks, NAME##_run};

GREEDY(greedy_linear, GreedyFloat, multiply_float)
GREEDY(greedy_linear_int8, GreedyInt8, multiply_int8)

typedef struct {
    const Best *best; /* [slots][rows] */
    int64_t slots;
    int64_t *tokens; /* [rows] */
    int64_t rows;
} Pick;

static int64_t pick_chunks(const void *args, const Step *step) {
    const Pick *a = args;
    return even_chunks(step_size(step, a->rows), 10 * a->slots, step);
}

/* The best of all slots: -1 if there is no number, or only infinite ones. */
static void pick_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const Pick *a = args;
    int64_t rows = step_size(step, a->rows), end = chunk_begin(rows, chunk + 1, of);
    for (int64_t r = chunk_begin(rows, chunk, of); r < end; r++) {
        Best found = {-INFINITY, 0, -1};
        for (int64_t s = 0; s < a->slots; s++) {
            const Best *best = a->best + s * rows + r;
            found.has_nan |= best->has_nan;
            if (best->top > found.top) found = (Best){best->top, found.has_nan, best->column};
        }
        a->tokens[r] = found.has_nan || !isfinite(found.top) ? -1 : found.column;
    }
}

const Kernel kernel_greedy_pick = {pick_chunks, pick_run};

/* --- rows with a temperature --------------------------------------------------------------------------------- */

typedef struct {
    int64_t width; /* columns from here on do not count */
    int64_t chunks;
    const double *temperature, *uniform; /* [rows]; 0 takes the largest */
    float *tops;                         /* [rows][stretches] */
    double *sums;                        /* [rows][stretches] */
    int64_t *tokens;                     /* [rows] */
} Draw;

typedef struct {
    LinearFloat product;
    Draw draw;
} DrawFloat;

typedef struct {
    LinearInt8 product;
    Draw draw;
} DrawInt8;

static void see_stretches(const void *state, int64_t row, const float *x, int64_t count, int64_t column) {
    const Draw *d = state;
    float scale = d->temperature[row] > 0.0 ? scale_of(d->temperature[row]) : 0.0f;
    int64_t first = row * stretches_of(d->width) + column / STRETCH;
    for (int64_t at = 0; at < count; at += STRETCH) {
        int64_t place = first + at / STRETCH;
        d->tops[place] = scan_stretch(x + at, count - at, scale, d->sums + place);
    }
}

static int64_t draw_one(const void *product, Multiply *multiply, int64_t row, const Draw *d, Step *step) {
    int64_t stretches = stretches_of(d->width);
    const float *tops = d->tops + row * stretches;
    double *sums = d->sums + row * stretches, total = 0.0, before = 0.0, target = 0.0;
    int is_greedy = d->temperature[row] <= 0.0;
    float scale = is_greedy ? 0.0f : scale_of(d->temperature[row]);
    float top = weigh_stretches(tops, sums, stretches, scale, &total);
    if (!isfinite(top)) return -1;
    int64_t s = 0;
    if (is_greedy)
        while (tops[s] != top) s++;
    else
        s = find_stretch(sums, total, d->uniform[row], &before, &target);
    /* The whole part, so that the product begins at a panel. */
    int64_t begin = s * STRETCH, column = begin / COLUMNS * COLUMNS, column_end = min_of(column + COLUMNS, d->width);
    int error = multiply(product, row, row + 1, column, column_end, values);
    if (error) {
        step_fail(step, error);
        return -1;
    }
    const float *x = values + (begin - column);
    int64_t place = 0;
    if (is_greedy)
        while (x[place] != top) place++;
    else
        place = find_in_stretch(x, column_end - begin, tops[s], scale, sums[s], before, target);
    return begin + place;
}

static int64_t row_chunks(int64_t rows, const Step *step) { return even_chunks(rows, 10000, step); }

static void draw_rows(const void *product, Multiply *multiply, int64_t rows, const Draw *d, Step *step, int64_t chunk,
                      int64_t of) {
    for (int64_t r = chunk_begin(rows, chunk, of); r < chunk_begin(rows, chunk + 1, of); r++)
        d->tokens[r] = draw_one(product, multiply, r, d, step);
}

/* Two kernels for each product: `scan` looks at all columns, `pick` draws. */
#define KERNELS_OF(NAME, ARGS, MULTIPLY) \
    static int64_t NAME##_scan_chunks(const void *args, const Step *step) { \
        const ARGS *a = args; \
        return step_size(step, a->product.rows) ? a->draw.chunks : 0; \
    } \
    static void NAME##_scan_run(const void *args, Step *step, int64_t chunk, int64_t of) { \
        const ARGS *a = args; \
        walk_columns(&a->product, MULTIPLY, step_size(step, a->product.rows), a->draw.width, see_stretches, &a->draw, step, \
                     chunk, of); \
    } \
    const Kernel kernel_##NAME##_scan = {NAME##_scan_chunks, NAME##_scan_run}; \
    static int64_t NAME##_pick_chunks(const void *args, const Step *step) { \
        const ARGS *a = args; \
        return row_chunks(step_size(step, a->product.rows), step); \
    } \
    static void NAME##_pick_run(const void *args, Step *step, int64_t chunk, int64_t of) { \
        const ARGS *a = args; \
        draw_rows(&a->product, MULTIPLY, step_size(step, a->product.rows), &a->draw, step, chunk, of); \
    } \
    const Kernel kernel_##NAME##_pick = {NAME##_pick_chunks, NAME##_pick_run};

KERNELS_OF(draw_linear, DrawFloat, multiply_float)
KERNELS_OF(draw_linear_int8, DrawInt8, multiply_int8)
