/* Linear layer on 8-bit integers with vectors: a few rows by a few panels in registers while K runs. */
#include "linear_int8_dot.h"

/* Bytes of packed weight that stay in the L2 cache while all rows of a chunk pass over them. */
#define RESIDENT (256 * 1024)
/* Groups of 4 inputs, a cache line of each panel, that weights are fetched ahead. The processor's own fetching stops at the
 * end of a page. */
#define AHEAD 32
/* Rows of a tile at most; the two planes of a row are two. */
#define TILE_ROWS (ROWS > 1 ? ROWS : 2)

const char *bg_int8_vector_name(void) { return DOT_NAME; }

typedef Sum Sums[TILE_ROWS][PANELS][VECTORS];

/* Adds groups [from, to) of 4 inputs to the sums of a tile. Weights `ahead` bytes further on are fetched. */
INLINE void add_groups(Sums sum, const Value *x, int64_t depth, const int8_t *w, int64_t panel_bytes, int64_t from,
                       int64_t to, int64_t ahead, const int m, const int panels) {
    w += from * 4 * PANEL;
    for (int64_t k = from; k < to; k++, w += 4 * PANEL) {
#pragma GCC unroll 4
        for (int n = 0; n < panels; n++) __builtin_prefetch(w + n * panel_bytes + ahead, 0, 3);
#pragma GCC unroll 8
        for (int i = 0; i < m; i++) {
            Group group = group_of(x + i * depth + 4 * k);
#pragma GCC unroll 4
            for (int n = 0; n < panels; n++)
#pragma GCC unroll 32
                for (int v = 0; v < VECTORS; v++) sum[i][n][v] = dot(sum[i][n][v], group, w + n * panel_bytes, v);
        }
    }
}

/* Sums of m rows of prepared values, `depth` apart, by some panels, `panel_bytes` apart. */
INLINE void tile(const Value *x, int64_t depth, const int8_t *w, int64_t panel_bytes, int32_t (*sums)[PANELS][PANEL],
                 const int m, const int panels) {
    Sums sum;
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 4
        for (int n = 0; n < panels; n++)
#pragma GCC unroll 32
            for (int v = 0; v < VECTORS; v++) sum[i][n][v] = no_sum();
    int64_t groups = depth / 4, last = groups > AHEAD ? groups - AHEAD : 0, ahead = AHEAD * 4 * PANEL;
    add_groups(sum, x, depth, w, panel_bytes, 0, last, ahead, m, panels);
    /* Behind a panel's end lies one that is being read already; what comes next lies behind the last. */
    add_groups(sum, x, depth, w, panel_bytes, last, groups, ahead + (panels - 1) * panel_bytes, m, panels);
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
        ROW_CASES(1) ROW_CASES(2)
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
    int32_t sums[TILE_ROWS][PANELS][PANEL], (*low)[PANELS][PANEL] = sums + m;
    for (int64_t first = panel; first < panel_end; first += PANELS) {
        int panels = (int)min_of(PANELS, panel_end - first);
        const int8_t *w = p->packed + first * panel_bytes;
        tile_of(m * (int)p->planes, panels, x, p->depth, w, panel_bytes, sums);
        for (int n = 0; n < panels; n++) {
            const int32_t *weights = column_sums(p) + (first + n) * PANEL;
            for (int i = 0; i < m; i++) {
                correct(sums[i][n], weights, HIGH_SHIFT);
                if (p->planes == 2) correct(low[i][n], weights, LOW_SHIFT);
            }
            finish_rows(p, sums[0][n], p->planes == 2 ? low[0][n] : 0, PANELS * PANEL, row, m, first + n);
        }
    }
}

int int8_region_vector(const LinearInt8 *p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    Value *x = thread_scratch((size_t)(TILE_ROWS * p->depth) * sizeof *x);
    if (!x) return NO_MEMORY;
    int64_t count = row_end - row, rows = p->planes == 2 ? TILE_ROWS / 2 : ROWS, tiles = (count + rows - 1) / rows;
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
