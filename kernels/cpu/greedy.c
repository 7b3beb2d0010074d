/* The largest logit of each row and its column, straight from the head's matrix product: part of it lies in the cache for a
 * moment, and no logits are written to memory. */
#include <math.h>

#include "kernels.h"
#include "linear_float.h"
#include "linear_int8.h"

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

/* Looks through `count` values, of columns `first` and on. */
static void look(Best *best, const float *values, int64_t count, int64_t first) {
    vi odd = vi_set1(0);
    vf most = vf_set1(-INFINITY);
    int64_t i = 0;
    for (; i + VW <= count; i += VW) {
        vf value = vf_load(values + i);
        odd |= value != value;
        most = vf_max(most, value);
    }
    int has_nan = 0;
    for (int lane = 0; lane < VW; lane++) has_nan |= odd[lane];
    float top = i ? vf_max_lane(most) : -INFINITY;
    for (int64_t rest = i; rest < count; rest++) {
        has_nan |= values[rest] != values[rest];
        top = values[rest] > top ? values[rest] : top;
    }
    best->has_nan |= has_nan;
    if (has_nan || !(top > best->top)) return;
    best->top = top;
    int64_t place = 0;
    while (values[place] != top) place++;
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

static void search(const void *product, Multiply *multiply, int64_t rows, const Search *s, Step *step, int64_t chunk,
                   int64_t of) {
    float values[GROUP_ROWS * COLUMNS] __attribute__((aligned(64)));
    Best *best = s->best + chunk * rows;
    int64_t parts = (s->width + COLUMNS - 1) / COLUMNS, end = chunk_begin(parts, chunk + 1, of);
    for (int64_t r = 0; r < rows; r++) best[r] = (Best){-INFINITY, 0, -1};
    for (int64_t part = chunk_begin(parts, chunk, of); part < end; part++) {
        int64_t column = part * COLUMNS, column_end = min_of(column + COLUMNS, s->width);
        for (int64_t row = 0; row < rows; row += GROUP_ROWS) {
            int64_t row_end = min_of(row + GROUP_ROWS, rows);
            int error = multiply(product, row, row_end, column, column_end, values);
            if (error) {
                step_fail(step, error);
                return;
            }
            for (int64_t r = row; r < row_end; r++)
                look(best + r, values + (r - row) * COLUMNS, column_end - column, column);
        }
    }
}

static int64_t float_chunks(const void *args, const Step *step) {
    const GreedyFloat *a = args;
    return step_size(step, a->product.rows) ? a->search.slots : 0;
}

static void float_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const GreedyFloat *a = args;
    search(&a->product, multiply_float, step_size(step, a->product.rows), &a->search, step, chunk, of);
}

const Kernel kernel_greedy_linear = {float_chunks, float_run};

static int64_t int8_chunks(const void *args, const Step *step) {
    const GreedyInt8 *a = args;
    return step_size(step, a->product.rows) ? a->search.slots : 0;
}

static void int8_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const GreedyInt8 *a = args;
    search(&a->product, multiply_int8, step_size(step, a->product.rows), &a->search, step, chunk, of);
}

const Kernel kernel_greedy_linear_int8 = {int8_chunks, int8_run};

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
