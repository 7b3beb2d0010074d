/* Linear layer on 8-bit integers with vectors: a few rows by a few panels in registers while K runs. */
#include "linear_int8_dot.h"

/* Bytes of packed weight that stay in the L2 cache while all rows of a chunk pass over them. */
#define RESIDENT (256 * 1024)

const char *bg_int8_vector_name(void) { return DOT_NAME; }

/* Sums of m rows of prepared values, `depth` apart, by some panels, `panel_bytes` apart. */
INLINE void tile(const Value *x, int64_t depth, const int8_t *w, int64_t panel_bytes, int32_t (*sums)[PANELS][PANEL],
                 const int m, const int panels) {
    Sum sum[ROWS][PANELS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int n = 0; n < panels; n++)
#pragma GCC unroll 32
            for (int v = 0; v < VECTORS; v++) sum[i][n][v] = no_sum();
    for (int64_t k = 0; k < depth; k += 4, x += 4, w += 4 * PANEL) {
#pragma GCC unroll 8
        for (int i = 0; i < m; i++) {
            Group group = group_of(x + i * depth);
#pragma GCC unroll 4
            for (int n = 0; n < panels; n++)
#pragma GCC unroll 32
                for (int v = 0; v < VECTORS; v++) sum[i][n][v] = dot(sum[i][n][v], group, w + n * panel_bytes, v);
        }
    }
    /* Unrolled like the rest, or the sums live in memory. */
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int n = 0; n < panels; n++) sums_of(sum[i][n], sums[i][n]);
}

static void tile_of(int m, int panels, const Value *x, int64_t depth, const int8_t *w, int64_t panel_bytes,
                    int32_t (*sums)[PANELS][PANEL]) {
#define CASE(M, P) \
    case (M) * 8 + (P): tile(x, depth, w, panel_bytes, sums, M, P); break;
#if PANELS == 4
#define ROW_CASES(M) CASE(M, 1) CASE(M, 2) CASE(M, 3) CASE(M, 4)
#else
#define ROW_CASES(M) CASE(M, 1)
#endif
    switch (m * 8 + panels) {
        ROW_CASES(1)
#if ROWS > 1
        ROW_CASES(2)
#endif
#if ROWS > 2
        ROW_CASES(3) ROW_CASES(4) ROW_CASES(5)
#endif
#if ROWS > 5
        ROW_CASES(6)
#endif
    }
#undef CASE
#undef ROW_CASES
}

/* What the moved bytes have added to the sums is taken off again. */
static void correct(int32_t *sums, const int32_t *weights, int32_t shift) {
    if (shift)
        for (int c = 0; c < PANEL; c++) sums[c] += shift * weights[c];
}

/* m rows from `row` on times panels [panel, panel_end). */
static void rows_times_panels(const LinearInt8 *p, int64_t row, int m, Value *x, int64_t panel, int64_t panel_end) {
    int64_t panel_bytes = PANEL * p->depth;
    for (int i = 0; i < m; i++)
        for (int64_t plane = 0; plane < p->planes; plane++)
            prepare(p->values + (row + i) * p->stride + plane * p->depth, x + (plane * m + i) * p->depth, p->depth,
                    (int)plane);
    int32_t high[ROWS][PANELS][PANEL], low[ROWS][PANELS][PANEL];
    for (int64_t first = panel; first < panel_end; first += PANELS) {
        int panels = (int)min_of(PANELS, panel_end - first);
        const int8_t *w = p->packed + first * panel_bytes;
        tile_of(m, panels, x, p->depth, w, panel_bytes, high);
        if (p->planes == 2) tile_of(m, panels, x + m * p->depth, p->depth, w, panel_bytes, low);
        for (int n = 0; n < panels; n++) {
            const int32_t *weights = column_sums(p) + (first + n) * PANEL;
            for (int i = 0; i < m; i++) {
                correct(high[i][n], weights, HIGH_SHIFT);
                if (p->planes == 2) correct(low[i][n], weights, LOW_SHIFT);
            }
            finish_rows(p, high[0][n], p->planes == 2 ? low[0][n] : 0, PANELS * PANEL, row, m, first + n);
        }
    }
}

int int8_region_vector(const LinearInt8 *p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    Value *x = thread_scratch((size_t)(ROWS * p->planes * p->depth) * sizeof *x);
    if (!x) return NO_MEMORY;
    int64_t count = row_end - row, tiles = (count + ROWS - 1) / ROWS;
    int64_t resident = RESIDENT / (PANEL * p->depth) / PANELS * PANELS;
    if (resident < PANELS) resident = PANELS;
    for (int64_t first = panel; first < panel_end; first += resident)
        for (int64_t t = 0; t < tiles; t++) {
            /* Tiles of even height: 7 rows are 4 + 3, not 6 + 1. */
            int64_t from = row + chunk_begin(count, t, tiles), to = row + chunk_begin(count, t + 1, tiles);
            rows_times_panels(p, from, (int)(to - from), x, first, min_of(first + resident, panel_end));
        }
    return 0;
}
