/* Linear layer on 8-bit integers: how it is packed, cut into chunks and given to a path (linear_int8.h). */
#include "linear_int8.h"

#include "kernels.h"

/* Rows of a chunk: at most so many, for their values stay in the L2 cache while panels pass; and so many at least, or weights
 * that several threads read cost more than rows that stay with one. */
#define MOST_ROWS 256
#define LEAST_ROWS 24
#define STEP_PANELS 4 /* chunks begin at a multiple of this many panels */
/* Rows, those of both planes counted, that vectors multiply in one pass, and faster than tiles do: all wait for the weights
 * alone, and vectors have more of them on the way. */
#define FEW_ROWS 6

/* Bytes of a packed weight: its panels, and three numbers for each column. */
int64_t bg_int8_bytes(int64_t columns, int64_t depth) { return panels_of(columns) * PANEL * (depth + 12); }

/* weight [columns, width], scale [columns], bias [columns] or NULL; depth: width padded. */
void bg_int8_pack(const int8_t *weight, const float *scale, const float *bias, int8_t *packed, int64_t columns,
                  int64_t width, int64_t depth, int threads) {
    LinearInt8 p = {.packed = packed, .columns = columns, .depth = depth};
    float *scales = (float *)column_scales(&p), *biases = (float *)column_biases(&p);
    int32_t *sums = (int32_t *)column_sums(&p);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < panels_of(columns); panel++) {
        int8_t *to = packed + panel * PANEL * depth;
        memset(to, 0, (size_t)(PANEL * depth));
        for (int64_t c = 0; c < PANEL; c++) {
            int64_t n = panel * PANEL + c;
            int32_t sum = 0;
            if (n < columns) {
                const int8_t *row = weight + n * width;
                int64_t k = 0;
                for (; k + 4 <= width; k += 4) memcpy(to + k * PANEL + c * 4, row + k, 4);
                memcpy(to + k * PANEL + c * 4, row + k, (size_t)(width - k));
                for (k = 0; k < width; k++) sum += row[k];
            }
            scales[n] = n < columns ? scale[n] : 0.0f;
            biases[n] = n < columns && bias ? bias[n] : 0.0f;
            sums[n] = sum;
        }
    }
}

static int may_use_amx = 1;

static int uses_amx(void) { return may_use_amx && amx_is_usable(); }

/* For tests and benchmarks: keep to vectors although AMX is there. Returns whether AMX is used from now on. */
int64_t bg_int8_use_amx(int64_t is_wanted) {
    may_use_amx = is_wanted != 0;
    return uses_amx();
}

/* Whether a product of integers is many times as fast here as one of floats. */
int64_t bg_int8_is_fast(void) {
#if defined(__AVX512VNNI__)
    return 1;
#else
    return uses_amx();
#endif
}

static int64_t row_groups(int64_t rows, const Step *step) { return even_groups(rows, LEAST_ROWS, MOST_ROWS, step); }

static int64_t chunks(const void *args, const Step *step) {
    const LinearInt8 *p = args;
    int64_t rows = step_size(step, p->rows), groups = row_groups(rows, step);
    if (!rows || !p->columns) return 0;
    int64_t steps = (panels_of(p->columns) + STEP_PANELS - 1) / STEP_PANELS;
    /* Nanoseconds for one step of panels: weights at 8 GB/s and products at the pace of the path. */
    int64_t weights = STEP_PANELS * PANEL * p->depth, products = weights * p->planes * ((rows + groups - 1) / groups);
    int64_t cost = weights / 8 + products / (uses_amx() ? 700 : 100);
    int64_t wanted = even_chunks(groups * steps, cost, step), each = (wanted + groups - 1) / groups;
    return groups * min_of(each, steps);
}

static int region(const LinearInt8 *p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    int is_tall = (row_end - row) * p->planes > FEW_ROWS;
    return (is_tall && uses_amx() ? int8_region_amx : int8_region_vector)(p, row, row_end, panel, panel_end);
}

/* First panel of one of `parts` parts of the columns. */
static int64_t part_begin(const LinearInt8 *p, int64_t part, int64_t parts) {
    int64_t panels = panels_of(p->columns), steps = (panels + STEP_PANELS - 1) / STEP_PANELS;
    return min_of(chunk_begin(steps, part, parts) * STEP_PANELS, panels);
}

static void run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const LinearInt8 *p = args;
    int64_t rows = step_size(step, p->rows), groups = row_groups(rows, step), each = of / groups, group = chunk / each;
    int64_t panel = part_begin(p, chunk % each, each), panel_end = part_begin(p, chunk % each + 1, each);
    int error = region(p, chunk_begin(rows, group, groups), chunk_begin(rows, group + 1, groups), panel, panel_end);
    if (error) step_fail(step, error);
}

const void *reads_linear_int8(const void *args, const Step *step, int64_t chunk, int64_t of, int64_t *bytes) {
    const LinearInt8 *p = args;
    int64_t each = of / row_groups(step_size(step, p->rows), step), panel = part_begin(p, chunk % each, each);
    *bytes = (part_begin(p, chunk % each + 1, each) - panel) * PANEL * p->depth;
    return p->packed + panel * PANEL * p->depth;
}

int linear_int8_panels(const LinearInt8 *p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end, float *out,
                       int64_t out_stride) {
    LinearInt8 part = *p;
    part.out = out - row * out_stride - panel * PANEL;
    part.out_stride = out_stride;
    return region(&part, row, row_end, panel, panel_end);
}

const Kernel kernel_linear_int8 = {chunks, run};
