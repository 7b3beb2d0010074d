/* Linear layer, float32: out [M, N] = x [M, K] · weightᵀ + bias, with the weight packed once.
 *
 * Packed layout: [ceil(N / PANEL)][K][PANEL], columns past N zero. A tile of up to ROWS rows by PANEL columns lives in
 * registers while K runs. Each element of the result is a fixed sum: K is cut into equal pieces by K alone, each piece
 * is one chain of fused multiply-adds from zero, the pieces are added in order. So a row's bits do not depend on the
 * rows around it, on the number of threads, or on how rows are grouped into tiles. */
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "linear_float.h"

#define PANEL LINEAR_PANEL
#define ROWS LINEAR_ROWS
#define PIECE LINEAR_PIECE
/* Rows of a chunk: at most so many, so that its x stays in the L2 cache with the panels; and so many at least, or weights that
 * several threads read cost more than rows that stay with one. */
#define MOST_ROWS 192
#define LEAST_ROWS 32

static int64_t panels_of(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

int64_t bg_panel(void) { return PANEL; }

void bg_linear_pack(const float *weight, float *packed, int64_t columns, int64_t depth, int threads) {
    int64_t panels = (columns + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        float *to = packed + p * depth * PANEL;
        /* Some of K at a time, so that the lines written to stay in the L1 cache for all columns. */
        for (int64_t k = 0; k < depth; k += 16) {
            int64_t end = k + 16 < depth ? k + 16 : depth;
            for (int c = 0; c < PANEL; c++) {
                int64_t n = p * PANEL + c;
                for (int64_t i = k; i < end; i++) to[i * PANEL + c] = n < columns ? weight[n * depth + i] : 0.0f;
            }
        }
    }
}

/* What a tile fetches into the L2 cache while it computes: its share of what comes next. */
typedef struct {
    const char *at;
    int64_t step; /* bytes for each k */
} Ahead;

/* One tile: m rows of `x` (packed PIECE apart) times one piece of one panel, stored or added to `out`. */
INLINE void tile(const float *x, const float *panel, int64_t depth, float *out, int64_t out_stride, int64_t columns,
                 const float *bias, int is_first, Ahead ahead, const int m) {
    vf sum[ROWS][2];
#pragma GCC unroll 16
    for (int i = 0; i < m; i++) sum[i][0] = sum[i][1] = vf_set1(0.0f);
    for (int64_t k = 0; k < depth; k++) {
        vf left = vf_load(panel + k * PANEL), right = vf_load(panel + k * PANEL + VW);
        __builtin_prefetch(ahead.at + k * ahead.step, 0, 2);
#pragma GCC unroll 16
        for (int i = 0; i < m; i++) {
            vf value = vf_set1(x[i * PIECE + k]);
            sum[i][0] = vf_fma(value, left, sum[i][0]);
            sum[i][1] = vf_fma(value, right, sum[i][1]);
        }
    }
    float edge[PANEL], edge_bias[PANEL] = {0};
    if (bias && columns < PANEL) {
        memcpy(edge_bias, bias, (size_t)columns * 4);
        bias = edge_bias;
    }
#pragma GCC unroll 16
    for (int i = 0; i < m; i++) {
        float *to = out + i * out_stride;
        if (columns < PANEL) {
            memcpy(edge, to, (size_t)columns * 4);
            to = edge;
        }
        for (int v = 0; v < 2; v++) {
            vf total = sum[i][v];
            if (!is_first) total = vf_load(to + v * VW) + total;
            if (bias) total = total + vf_load(bias + v * VW);
            vf_store(to + v * VW, total);
        }
        if (columns < PANEL) memcpy(out + i * out_stride, edge, (size_t)columns * 4);
    }
}

static void tile_of(int m, const float *x, const float *panel, int64_t depth, float *out, int64_t out_stride,
                    int64_t columns, const float *bias, int is_first, Ahead ahead) {
#define CASE(M) \
    case M: \
        tile(x, panel, depth, out, out_stride, columns, bias, is_first, ahead, M); \
        break;
    switch (m) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if ROWS > 4
        CASE(5) CASE(6)
#endif
#if ROWS > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
#undef CASE
}

void linear_float_piece(const LinearFloat *p, int64_t row, int64_t row_end, const LinearPiece *piece, float *out,
                        int64_t out_stride) {
    float x[ROWS * PIECE] __attribute__((aligned(64)));
    int64_t tiles = (row_end - row + ROWS - 1) / ROWS, depth = piece->depth;
    int is_last = piece->start + depth == p->depth;
    for (int64_t t = 0; t < tiles; t++) {
        /* Tiles of even height: 13 rows are 7 + 6, not 12 + 1. */
        int64_t from = row + (row_end - row) * t / tiles, to = row + (row_end - row) * (t + 1) / tiles;
        int m = (int)(to - from);
        for (int i = 0; i < m; i++)
            memcpy(x + i * PIECE, p->x + (from + i) * p->x_stride + piece->start, (size_t)depth * 4);
        const float *panel = piece->weight;
        const char *ahead = piece->next + depth * t / tiles * piece->next_bytes;
        for (int64_t n = 0; n < piece->panels; n++, panel += piece->panel_stride, ahead += piece->next_stride) {
            int64_t column = (piece->panel + n) * PANEL;
            int64_t columns = p->columns - column < PANEL ? p->columns - column : PANEL;
            const float *bias = p->bias && is_last ? p->bias + column : 0;
            tile_of(m, x, panel, depth, out + (from - row) * out_stride + n * PANEL, out_stride, columns, bias,
                    piece->start == 0, (Ahead){ahead, piece->next_bytes / tiles});
        }
    }
}

void linear_float_panels(const LinearFloat *p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end,
                         float *out, int64_t out_stride) {
    int64_t piece = linear_piece(p->depth), resident = linear_resident(p->depth), panels = panels_of(p->columns);
    for (int64_t first = panel; first < panel_end; first += resident) {
        int64_t last = first + resident < panel_end ? first + resident : panel_end;
        for (int64_t start = 0; start < p->depth; start += piece) {
            int64_t depth = start + piece < p->depth ? piece : p->depth - start;
            int is_last = start + depth == p->depth;
            /* What comes next is read again where the weight ends. */
            int64_t next = is_last && 2 * last - first <= panels ? last : first;
            linear_float_piece(p, row, row_end, &(LinearPiece){
                .panel = first, .panels = last - first, .start = start, .depth = depth,
                .weight = p->packed + (first * p->depth + start) * PANEL, .panel_stride = p->depth * PANEL,
                .next = (const char *)(p->packed + (next * p->depth + (is_last ? 0 : start + depth)) * PANEL),
                .next_stride = p->depth * PANEL * 4, .next_bytes = PANEL * 4,
            }, out + (first - panel) * PANEL, out_stride);
        }
    }
}

/* Rows are cut further where there are too few panels for all threads. */
static int64_t row_groups(const LinearFloat *p, int64_t rows, const Step *step) {
    int64_t tiles = (rows + ROWS - 1) / ROWS, panels = panels_of(p->columns);
    int64_t groups = even_groups(rows, LEAST_ROWS, MOST_ROWS, step), wanted = (4 * step->threads + panels - 1) / panels;
    if (step->threads > 1 && groups < wanted) groups = wanted;
    return groups < tiles ? groups : tiles;
}

static int64_t linear_chunks(const void *args, const Step *step) {
    const LinearFloat *p = args;
    int64_t rows = step_size(step, p->rows), groups = row_groups(p, rows, step), panels = panels_of(p->columns);
    if (!groups) return 0;
    /* A thread does about 32 products a nanosecond when rows are many, and waits for the weight when they are few. */
    int64_t tall = rows / groups < 8 ? 8 : rows / groups;
    return groups * even_chunks(panels, PANEL * p->depth * tall / 32 + 1, step);
}

static void linear_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    LinearFloat product = *(const LinearFloat *)args;
    product.rows = step_size(step, product.rows);
    int64_t groups = row_groups(&product, product.rows, step), each = of / groups, group = chunk / each;
    int64_t panels = panels_of(product.columns), panel = chunk_begin(panels, chunk % each, each);
    int64_t row = chunk_begin(product.rows, group, groups);
    linear_float_panels(&product, row, chunk_begin(product.rows, group + 1, groups), panel,
                        chunk_begin(panels, chunk % each + 1, each), product.out + row * product.columns + panel * PANEL,
                        product.columns);
}

const Kernel kernel_linear = {linear_chunks, linear_run};

typedef struct {
    const float *packed;
    const int64_t *ids;
    float *out; /* [count, depth] */
    int64_t count, columns, depth;
} Gather;

static int64_t gather_chunks(const void *args, const Step *step) {
    const Gather *a = args;
    /* Each float is on a cache line of its own. */
    return even_chunks(step_size(step, a->count), 2 * a->depth, step);
}

/* Rows `ids` of the weight, out of the packed layout. */
static void gather_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const Gather *a = args;
    int64_t count = step_size(step, a->count), end = chunk_begin(count, chunk + 1, of);
    for (int64_t i = chunk_begin(count, chunk, of); i < end; i++) {
        if (a->ids[i] < 0 || a->ids[i] >= a->columns) {
            step_fail(step, BAD_ROW);
            return;
        }
        const float *from = a->packed + a->ids[i] / PANEL * a->depth * PANEL + a->ids[i] % PANEL;
        for (int64_t k = 0; k < a->depth; k++) a->out[i * a->depth + k] = from[k * PANEL];
    }
}

const Kernel kernel_gather_packed = {gather_chunks, gather_run};
