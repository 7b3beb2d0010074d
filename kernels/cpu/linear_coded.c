/* Linear layer on weights of a few bits (coded.h): x [M, K] · weightᵀ + bias.
 *
 * A thread decodes a piece of some panels and multiplies it as linear.c does: so the bits are those of the float layer on the
 * decoded weight, for any number of rows. A piece stays in the L2 cache while all rows pass over it. If rows are few, so little
 * is decoded at a time that it stays in the L1 cache, and sums are taken up again for each stretch; a single row is multiplied
 * as its weights are decoded. */
#include <string.h>

#include "coded.h"
#include "kernels.h"

#define ROWS LINEAR_ROWS
/* Floats that are decoded at a time for few rows. */
#define STRETCH 4096
/* Panels side by side for one row, so that enough sums are under way; half as many for two rows and for three. */
#define PANELS 4
/* Rows that are so few: beyond them sums come and go too often. */
#define FEW_ROWS (3 * ROWS)

typedef struct {
    const float *x;
    int64_t x_stride;
    const float *bias; /* [N], or NULL */
    float *out;
    int64_t out_stride;
    int64_t rows; /* M (may be a size of the step) */
    Coded weight;
} LinearCoded;

/* Sums of m rows by some panels, [panels][m][PANEL], with some more inputs; panels at `w` are `stride` floats apart. */
INLINE void add_inputs(const float *x, int64_t x_stride, const float *w, int64_t stride, int64_t count, float *sums,
                       const int m, const int panels) {
    vf sum[PANELS][ROWS][2];
#pragma GCC unroll 4
    for (int n = 0; n < panels; n++)
#pragma GCC unroll 16
        for (int i = 0; i < m; i++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) sum[n][i][v] = vf_load(sums + (n * m + i) * PANEL + v * VW);
    for (int64_t k = 0; k < count; k++, w += PANEL) {
#pragma GCC unroll 4
        for (int n = 0; n < panels; n++) {
            vf left = vf_load(w + n * stride), right = vf_load(w + n * stride + VW);
#pragma GCC unroll 16
            for (int i = 0; i < m; i++) {
                vf value = vf_set1(x[i * x_stride + k]);
                sum[n][i][0] = vf_fma(value, left, sum[n][i][0]);
                sum[n][i][1] = vf_fma(value, right, sum[n][i][1]);
            }
        }
    }
#pragma GCC unroll 4
    for (int n = 0; n < panels; n++)
#pragma GCC unroll 16
        for (int i = 0; i < m; i++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) vf_store(sums + (n * m + i) * PANEL + v * VW, sum[n][i][v]);
}

static int panels_at_once(int m) { return m == 1 ? PANELS : m <= 3 ? PANELS / 2 : 1; }

static void add_inputs_of(int m, int panels, const float *x, int64_t x_stride, const float *w, int64_t stride, int64_t count,
                          float *sums) {
#define CASE(M, P) case (M) * 8 + (P): add_inputs(x, x_stride, w, stride, count, sums, M, P); break;
    switch (m * 8 + panels) {
        CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4) CASE(2, 1) CASE(2, 2) CASE(3, 1) CASE(3, 2) CASE(4, 1)
#if ROWS > 4
        CASE(5, 1) CASE(6, 1)
#endif
#if ROWS > 6
        CASE(7, 1) CASE(8, 1) CASE(9, 1) CASE(10, 1) CASE(11, 1) CASE(12, 1)
#endif
    }
#undef CASE
}

/* Sums of a piece join those of the pieces before it. */
static void add_piece(const LinearCoded *p, const float *sums, int m, int64_t panel, int is_first, int is_last) {
    int64_t column = panel * PANEL, columns = p->weight.columns - column < PANEL ? p->weight.columns - column : PANEL;
    for (int i = 0; i < m; i++) {
        float *to = p->out + i * p->out_stride + column;
        for (int64_t c = 0; c < columns; c++) {
            float total = is_first ? sums[i * PANEL + c] : to[c] + sums[i * PANEL + c];
            to[c] = is_last && p->bias ? total + p->bias[column + c] : total;
        }
    }
}

/* One row: what is decoded is multiplied in the registers. */
static void one_row(const LinearCoded *p, int64_t panel, int64_t panel_end) {
    float sums[PANEL];
    CodedProduct *product = coded_multiplier(&p->weight);
    int64_t all = p->weight.depth, piece = linear_piece(all);
    for (int64_t n = panel; n < panel_end; n++)
        for (int64_t start = 0, end; start < all; start = end) {
            end = start + piece < all ? start + piece : all;
            product(&p->weight, n, start, end, p->x, sums);
            add_piece(p, sums, 1, n, start == 0, end == all);
        }
}

/* Some rows times panels [panel, panel_end). */
static void few_rows(const LinearCoded *p, int rows, int64_t panel, int64_t panel_end) {
    float decoded[STRETCH] __attribute__((aligned(64))), sums[FEW_ROWS * PANEL];
    int tiles = (rows + ROWS - 1) / ROWS, side_by_side = panels_at_once(rows);
    CodedDecode *decode = coded_decoder(&p->weight);
    int64_t all = p->weight.depth, piece = linear_piece(all);
    for (int64_t first = panel, last; first < panel_end; first = last) {
        last = first + side_by_side < panel_end ? first + side_by_side : panel_end;
        int panels = (int)(last - first);
        int64_t stretch = STRETCH / PANEL / panels;
        for (int64_t start = 0; start < all; start += piece) {
            int64_t end = start + piece < all ? start + piece : all;
            memset(sums, 0, (size_t)(panels * rows * PANEL) * 4);
            for (int64_t k = start, next; k < end; k = next) {
                next = k + stretch < end ? k + stretch : end;
                for (int n = 0; n < panels; n++) decode(&p->weight, first + n, k, next, decoded + n * stretch * PANEL);
                for (int t = 0; t < tiles; t++) {
                    int from = rows * t / tiles, to = rows * (t + 1) / tiles;
                    add_inputs_of(to - from, panels, p->x + from * p->x_stride + k, p->x_stride, decoded, stretch * PANEL,
                                  next - k, sums + from * PANEL);
                }
            }
            for (int n = 0; n < panels; n++) add_piece(p, sums + n * rows * PANEL, rows, first + n, start == 0, end == all);
        }
    }
}

static int many_rows(const LinearCoded *p, int64_t rows, int64_t panel, int64_t panel_end) {
    const Coded *weight = &p->weight;
    int64_t piece = linear_piece(weight->depth), together = linear_resident(weight->depth);
    if (together > panel_end - panel) together = panel_end - panel;
    float *decoded = thread_scratch((size_t)(together * piece * PANEL) * 4);
    if (!decoded) return NO_MEMORY;
    CodedDecode *decode = coded_decoder(weight);
    LinearFloat product = {.x = p->x, .x_stride = p->x_stride, .bias = p->bias, .rows = rows, .columns = weight->columns,
                           .depth = weight->depth};
    int64_t bytes = coded_bytes(weight->bits);
    for (int64_t first = panel, last; first < panel_end; first = last) {
        last = first + together < panel_end ? first + together : panel_end;
        for (int64_t start = 0; start < weight->depth; start += piece) {
            int64_t depth = start + piece < weight->depth ? piece : weight->depth - start, end = start + depth;
            for (int64_t n = first; n < last; n++) decode(weight, n, start, end, decoded + (n - first) * depth * PANEL);
            int is_last = end == weight->depth;
            int64_t next = is_last && 2 * last - first <= panel_end ? last : first;
            linear_float_piece(&product, 0, rows, &(LinearPiece){
                .panel = first, .panels = last - first, .start = start, .depth = depth,
                .weight = decoded, .panel_stride = depth * PANEL,
                .next = (const char *)weight->codes + (next * weight->depth + (is_last ? 0 : end)) * bytes,
                .next_stride = weight->depth * bytes, .next_bytes = bytes,
            }, p->out + first * PANEL, p->out_stride);
        }
    }
    return 0;
}

static int64_t linear_coded_chunks(const void *args, const Step *step) {
    const LinearCoded *p = args;
    int64_t rows = step_size(step, p->rows);
    if (!rows) return 0;
    /* Decoding a weight takes about as long as four products. */
    return even_chunks(coded_panels(p->weight.columns), PANEL * p->weight.depth * (rows + 4) / 32 + 1, step);
}

static void linear_coded_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const LinearCoded *p = args;
    int64_t rows = step_size(step, p->rows), panels = coded_panels(p->weight.columns);
    int64_t first = chunk_begin(panels, chunk, of), end = chunk_begin(panels, chunk + 1, of);
    if (rows == 1) one_row(p, first, end);
    else if (rows <= FEW_ROWS) few_rows(p, (int)rows, first, end);
    else if (many_rows(p, rows, first, end)) step_fail(step, NO_MEMORY);
}

const Kernel kernel_linear_coded = {linear_coded_chunks, linear_coded_run};

typedef struct {
    const int64_t *ids;
    float *out; /* [count, depth] */
    int64_t count;
    Coded weight;
} GatherCoded;

static int64_t gather_coded_chunks(const void *args, const Step *step) {
    const GatherCoded *a = args;
    return even_chunks(step_size(step, a->count), PANEL * a->weight.depth / 8 + 1, step);
}

/* Rows `ids` of the weight: a panel is decoded a stretch at a time, for the one column of it. */
static void gather_coded_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const GatherCoded *a = args;
    float decoded[STRETCH] __attribute__((aligned(64)));
    CodedDecode *decode = coded_decoder(&a->weight);
    int64_t count = step_size(step, a->count), end = chunk_begin(count, chunk + 1, of), depth = a->weight.depth;
    for (int64_t i = chunk_begin(count, chunk, of); i < end; i++) {
        if (a->ids[i] < 0 || a->ids[i] >= a->weight.columns) {
            step_fail(step, BAD_ROW);
            return;
        }
        int64_t panel = a->ids[i] / PANEL, column = a->ids[i] % PANEL;
        for (int64_t k = 0, next; k < depth; k = next) {
            next = k + STRETCH / PANEL < depth ? k + STRETCH / PANEL : depth;
            decode(&a->weight, panel, k, next, decoded);
            for (int64_t d = k; d < next; d++) a->out[i * depth + d] = decoded[(d - k) * PANEL + column];
        }
    }
}

const Kernel kernel_gather_coded = {gather_coded_chunks, gather_coded_run};
