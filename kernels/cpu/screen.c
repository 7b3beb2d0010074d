/* The largest result of each row of a float32 product, without multiplying all of it as float32.
 *
 * Weights and rows are rounded to integers too, whose product is many times as fast. How far a result can be from that of the
 * integers is known for each row and column: with x^ and w^ for what the integers mean, Cauchy and Schwarz give
 *
 *     |x w - x^ w^|  <=  |x - x^| |w|  +  |x^| |w - w^|
 *
 * and rounding in float32 adds at most (K + a few) 2^-24 |x| |w|. Where even the upper end lies below the lower end of
 * another column, the largest cannot be. The few columns that are left are multiplied as float32, to the bits of the whole
 * product; so the token is the same, always. A NaN or an infinity makes a bound that leaves its columns in. */
#include <math.h>

#include "kernels.h"
#include "linear_float.h"
#include "linear_int8.h"

/* What is multiplied at once: a whole number of panels of both products. */
#define COLUMNS 256
#define GROUP_ROWS 64
#define SPAN 32 /* columns that are left or out together: a whole number of panels too */
#define LANES 8 /* sums that do not wait for one another */

/* --- how far rounding moves a row ------------------------------------------------------------------------------------ */

typedef struct {
    const float *x; /* [rows, n] with `stride` between rows */
    int64_t stride;
    const int8_t *values; /* [rows][planes][depth], `values_stride` between rows */
    int64_t values_stride, planes, depth;
    const float *scale; /* [rows] */
    float *length;      /* [rows]: |x|, no less */
    float *distance;    /* [rows]: |x - x^|, no less */
    int64_t rows, n;
} Distance;

static int64_t distance_chunks(const void *args, const Step *step) {
    const Distance *a = args;
    return even_chunks(step_size(step, a->rows), a->n, step);
}

static float root_up(const double *sums) {
    double sum = 0.0;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return (float)(sqrt(sum) * (1.0 + 0x1p-20));
}

/* In double: squares of floats neither overflow nor vanish. */
static void distance_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const Distance *a = args;
    int64_t rows = step_size(step, a->rows), end = chunk_begin(rows, chunk + 1, of);
    for (int64_t r = chunk_begin(rows, chunk, of); r < end; r++) {
        const float *x = a->x + r * a->stride;
        const int8_t *high = a->values + r * a->values_stride;
        const uint8_t *low = (const uint8_t *)high + a->depth;
        double scale = a->scale[r], length[LANES] = {0}, distance[LANES] = {0};
        for (int64_t i = 0; i < a->n; i += LANES) {
            int count = (int)min_of(LANES, a->n - i);
            for (int j = 0; j < count; j++) {
                double value = a->planes == 2 ? 256.0 * high[i + j] + low[i + j] : high[i + j];
                double lost = x[i + j] - scale * value;
                length[j] += (double)x[i + j] * x[i + j];
                distance[j] += lost * lost;
            }
        }
        a->length[r] = root_up(length);
        a->distance[r] = root_up(distance);
    }
}

const Kernel kernel_rounding_distance = {distance_chunks, distance_run};

/* --- which columns are left ------------------------------------------------------------------------------------------- */

typedef struct {
    LinearInt8 product;
    const float *column_length, *column_distance; /* [columns], padded to COLUMNS with zeros */
    const float *length, *distance;               /* [rows] */
    int64_t width;                                /* columns from here on do not count */
    int64_t slots;                                /* chunks that the columns are cut into */
    float *tops;                                  /* [rows][spans]: no result of the span is larger */
    float *lows;                                  /* [slots][rows]: some result of these columns is no smaller */
} Screen;

static _Thread_local float values[GROUP_ROWS * COLUMNS] __attribute__((aligned(64)));

static int64_t spans_of(int64_t width) { return (width + SPAN - 1) / SPAN; }

/* Bounds of a row's results in COLUMNS columns from `column` on. Returns the largest lower one. */
INLINE float bound(const Screen *s, int64_t row, float *x, int64_t column, float *tops) {
    float rounding = (float)(s->product.depth + 64) * 0x1p-24f;
    float apart = s->distance[row] + rounding * s->length[row], near = s->length[row] + s->distance[row];
    int64_t count = min_of(COLUMNS, s->width - column);
    for (int64_t i = count; i < COLUMNS; i++) x[i] = -INFINITY;
    vf low = vf_set1(-INFINITY), highest = vf_set1(INFINITY);
    for (int64_t span = 0; span * SPAN < count; span++) {
        vf top = vf_set1(-INFINITY);
        for (int v = 0; v < SPAN / VW; v++) {
            int64_t at = span * SPAN + v * VW;
            vf value = vf_load(x + at), reach = vf_set1(near) * vf_load(s->column_distance + column + at);
            reach = vf_fma(vf_set1(apart), vf_load(s->column_length + column + at), reach);
            vf upper = value + reach, lower = value - reach;
            top = vf_max(vf_select(upper != upper, highest, upper), top);
            low = vf_max(vf_select(lower != lower, -highest, lower), low);
        }
        tops[span] = vf_max_lane(top);
    }
    return vf_max_lane(low);
}

static int64_t screen_chunks(const void *args, const Step *step) {
    const Screen *s = args;
    return step_size(step, s->product.rows) ? s->slots : 0;
}

static void screen_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const Screen *s = args;
    int64_t rows = step_size(step, s->product.rows), spans = spans_of(s->width);
    int64_t parts = (s->width + COLUMNS - 1) / COLUMNS, end = chunk_begin(parts, chunk + 1, of);
    float *lows = s->lows + chunk * rows;
    for (int64_t r = 0; r < rows; r++) lows[r] = -INFINITY;
    for (int64_t part = chunk_begin(parts, chunk, of); part < end; part++) {
        int64_t column = part * COLUMNS, column_end = min_of(column + COLUMNS, s->width);
        for (int64_t row = 0; row < rows; row += GROUP_ROWS) {
            int64_t row_end = min_of(row + GROUP_ROWS, rows);
            int error = linear_int8_panels(&s->product, row, row_end, column / PANEL, (column_end + PANEL - 1) / PANEL,
                                           values, COLUMNS);
            if (error) {
                step_fail(step, error);
                return;
            }
            for (int64_t r = row; r < row_end; r++) {
                float *tops = s->tops + r * spans + column / SPAN;
                float low = bound(s, r, values + (r - row) * COLUMNS, column, tops);
                if (low > lows[r]) lows[r] = low;
            }
        }
    }
}

const Kernel kernel_greedy_screen = {screen_chunks, screen_run};

/* --- the largest of what is left ------------------------------------------------------------------------------------- */

typedef struct {
    LinearFloat product;
    int64_t width, slots;
    const float *tops, *lows; /* as above */
    int64_t *tokens;          /* [rows] */
} Pick;

static int64_t pick_chunks(const void *args, const Step *step) {
    const Pick *a = args;
    return even_chunks(step_size(step, a->product.rows), 10000, step);
}

/* The lowest column of the largest result: -1 if one is no number, or the largest is infinite. */
static int64_t pick_row(const Pick *a, int64_t rows, int64_t row) {
    float low = -INFINITY, top = -INFINITY, results[SPAN];
    for (int64_t s = 0; s < a->slots; s++) low = a->lows[s * rows + row] > low ? a->lows[s * rows + row] : low;
    int64_t spans = spans_of(a->width), column = -1;
    for (int64_t span = 0; span < spans; span++) {
        if (a->tops[row * spans + span] < low) continue;
        int64_t first = span * SPAN, count = min_of(SPAN, a->width - first), panel = first / LINEAR_PANEL;
        linear_float_panels(&a->product, row, row + 1, panel, panel + (count + LINEAR_PANEL - 1) / LINEAR_PANEL, results,
                            SPAN);
        for (int64_t i = 0; i < count; i++) {
            if (results[i] != results[i]) return -1;
            if (results[i] > top) top = results[i], column = first + i;
        }
    }
    return isfinite(top) ? column : -1;
}

static void pick_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const Pick *a = args;
    int64_t rows = step_size(step, a->product.rows), end = chunk_begin(rows, chunk + 1, of);
    for (int64_t r = chunk_begin(rows, chunk, of); r < end; r++) a->tokens[r] = pick_row(a, rows, r);
}

const Kernel kernel_greedy_screen_pick = {pick_chunks, pick_run};
