/* Linear layer on 8-bit integers with AMX: tiles of 16 rows by 64 bytes, multiplied by one instruction.
 *
 * All tiles of a region have the same number of rows, so that they are configured once: where rows do not divide evenly,
 * the last tiles overlap the ones before and compute some rows again, to the same bits. */
#include "linear_int8.h"

#if HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_BYTES 1024
#define AHEAD 2 /* steps of K that weights are fetched ahead, when they are read but once */
#define TALL 8 /* tiles of rows from which on output is fetched ahead */
#define NEAR_BYTES (40 << 10) /* so much of the values stays in the L1 cache */
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

/* The processor must have AMX, and the system must allow this process its registers; some virtual machines show the
 * one without giving the other. */
static int ask_for_amx(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d & (1u << 24)) || !(d & (1u << 25))) return 0; /* tiles, products of 8 bits */
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

int amx_is_usable(void) {
    static int known; /* 0 not asked yet, 1 no, 2 yes; threads that ask at the same time get the same answer */
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!found) {
        found = 1 + ask_for_amx();
        __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    }
    return found == 2;
}

/* What four tiles of sums hold: one tile of rows by 4 panels; two tiles of rows by 2 panels; four by one; or high and low
 * bytes of one tile of rows by 2 panels. */
enum { ONE_TILE, TWO_TILES, FOUR_TILES, TWO_PLANES };

/* Tiles 0 to 3 hold sums, 4 and 5 values of `rows` rows (tile 5 weights for ONE_TILE), 6 and 7 weights. */
static void configure(int64_t rows, int kind) {
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 64;
        config.rows[t] = t > 5 || (t == 5 && kind == ONE_TILE) ? 16 : (uint8_t)rows;
    }
    load_tile_config(&config);
}

/* Four tiles of sums that are not floats yet. They are finished one by one while the next block is multiplied: the tile
 * unit works by itself, and the rest of the core would wait. */
typedef struct {
    int32_t sums[4][16][PANEL];
    int64_t row[4]; /* first row of each */
    int64_t rows, panel, panels;
    int is_waiting;
} __attribute__((aligned(64))) Block;

INLINE void finish(const LinearInt8 *p, const Block *b, int tile, const int kind) {
    int64_t panel = kind == ONE_TILE ? tile : kind == FOUR_TILES ? 0 : tile % 2;
    if (!b->is_waiting || panel >= b->panels || (kind == TWO_PLANES && tile > 1)) return;
    const int32_t *low = kind == TWO_PLANES ? b->sums[2 + tile][0] : 0;
    finish_rows(p, b->sums[tile][0], low, PANEL, b->row[tile], b->rows, b->panel + panel);
}

/* Products for one step of K with weights that begin at `w`, panels `next` bytes apart. */
INLINE void one_tile(const int8_t *x, int64_t stride, const int8_t *w, int64_t next, const int panels) {
    _tile_loadd(4, x, stride);
    _tile_loadd(5, w, 64);
    _tile_dpbssd(0, 4, 5);
    if (panels > 1) {
        _tile_loadd(6, w + next, 64);
        _tile_dpbssd(1, 4, 6);
    }
    if (panels > 2) {
        _tile_loadd(7, w + 2 * next, 64);
        _tile_dpbssd(2, 4, 7);
    }
    if (panels > 3) {
        _tile_loadd(5, w + 3 * next, 64);
        _tile_dpbssd(3, 4, 5);
    }
}

INLINE void two_tiles(const int8_t *x, const int8_t *y, int64_t stride, const int8_t *w, int64_t next, const int panels,
                      const int is_low) {
    _tile_loadd(4, x, stride);
    _tile_loadd(6, w, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, y, stride);
    if (is_low) _tile_dpbusd(2, 5, 6);
    else _tile_dpbssd(2, 5, 6);
    if (panels > 1) {
        _tile_loadd(7, w + next, 64);
        _tile_dpbssd(1, 4, 7);
        if (is_low) _tile_dpbusd(3, 5, 7);
        else _tile_dpbssd(3, 5, 7);
    }
}

/* Tiles of values begin at the rows `row` of `x`. */
INLINE void four_tiles(const int8_t *x, const int64_t *row, int64_t stride, const int8_t *w) {
    _tile_loadd(6, w, 64);
    _tile_loadd(4, x + row[0] * stride, stride);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(5, x + row[1] * stride, stride);
    _tile_dpbssd(1, 5, 6);
    _tile_loadd(4, x + row[2] * stride, stride);
    _tile_dpbssd(2, 4, 6);
    _tile_loadd(5, x + row[3] * stride, stride);
    _tile_dpbssd(3, 5, 6);
}

/* Has the lines fetched that a tile of sums will go to. */
INLINE void expect(const LinearInt8 *p, int64_t row, int64_t rows, int64_t panel) {
    const float *out = p->out + row * p->out_stride + panel * PANEL;
    for (int64_t i = 0; i < rows; i++, out += p->out_stride) _mm_prefetch(out, _MM_HINT_T1);
}

/* Has the weights fetched that `one_tile` takes AHEAD steps later: first those of its own panels, then of the panels that
 * come next. */
INLINE void expect_weights(const int8_t *w, int64_t next, int64_t steps_left, const int panels) {
    w += AHEAD * TILE_BYTES + (steps_left > AHEAD ? 0 : (panels - 1) * next);
    for (int n = 0; n < panels; n++)
        for (int line = 0; line < TILE_BYTES; line += 64) _mm_prefetch(w + n * next + line, _MM_HINT_T0);
}

/* Multiplies a block of tiles of `rows` rows, which begin at `row`, by some panels, and finishes meanwhile what `block`
 * holds. From `ahead` on, `lines` cache lines for each step of K are fetched into the L2 cache. */
INLINE void multiply(const LinearInt8 *p, Block *block, const int64_t *row, int64_t rows, int64_t panel, const int8_t *ahead,
                     int64_t lines, int is_tall, const int kind, const int panels) {
    const int8_t *x = kind == FOUR_TILES ? p->values : p->values + row[0] * p->stride;
    const int8_t *y = kind == TWO_PLANES ? x + p->depth : p->values + row[2] * p->stride;
    const int8_t *w = p->packed + panel * PANEL * p->depth;
    int64_t next = PANEL * p->depth, stride = p->stride, steps = p->depth / 64, step = 0;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int tile = 0; tile < 4; tile++) {
        for (; step < steps * (tile + 1) / 4; step++, x += 64, y += 64, w += TILE_BYTES) {
            if (kind == ONE_TILE) {
                one_tile(x, stride, w, next, panels);
                expect_weights(w, next, steps - step, panels);
            } else if (kind == FOUR_TILES) {
                four_tiles(x, row, stride, w);
            } else {
                two_tiles(x, y, stride, w, next, panels, kind == TWO_PLANES);
            }
            for (int64_t line = 0; line < lines; line++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
        }
        finish(p, block, tile, kind);
        /* Many rows of output do not stay in the L2 cache from one step to the next. */
        if (kind == TWO_TILES && is_tall && tile % 2 < panels) expect(p, row[tile], rows, panel + tile % 2);
    }
    _tile_stored(0, block->sums[0], 64);
    _tile_stored(1, block->sums[1], 64);
    _tile_stored(2, block->sums[2], 64);
    _tile_stored(3, block->sums[3], 64);
    memcpy(block->row, row, sizeof block->row);
    block->rows = rows, block->panel = panel, block->panels = panels;
    block->is_waiting = 1;
}

/* As above, for any number of panels that fits. */
INLINE void multiply_some(const LinearInt8 *p, Block *block, const int64_t *row, int64_t rows, int64_t panel, int64_t panels,
                          const int8_t *ahead, int64_t lines, int is_tall, const int kind) {
    if (panels == 1 || kind == FOUR_TILES) multiply(p, block, row, rows, panel, ahead, lines, is_tall, kind, 1);
    else if (panels == 2) multiply(p, block, row, rows, panel, ahead, lines, is_tall, kind, 2);
    else if (panels == 3) multiply(p, block, row, rows, panel, ahead, lines, is_tall, kind, 3);
    else multiply(p, block, row, rows, panel, ahead, lines, is_tall, kind, 4);
}

INLINE void region_of(const LinearInt8 *p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end, const int kind) {
    /* Tiles of rows, and panels, of a block. */
    const int64_t together = kind == FOUR_TILES ? 4 : kind == TWO_TILES ? 2 : 1;
    const int64_t panels = kind == FOUR_TILES ? 1 : kind == ONE_TILE ? 4 : 2;
    int64_t count = row_end - row, tiles = (count + 16 * together - 1) / (16 * together) * together;
    int64_t rows = (count + tiles - 1) / tiles, panel_bytes = PANEL * p->depth;
    int64_t lines = kind == ONE_TILE ? 0 : panels * 16 / (tiles / together);
    Block block;
    block.is_waiting = 0;
    configure(rows, kind);
    for (int64_t n = panel; n < panel_end; n += panels) {
        int64_t width = min_of(panels, panel_end - n);
        for (int64_t t = 0; t < tiles; t += together) {
            int64_t first[4];
            for (int64_t i = 0; i < 4; i++) first[i] = min_of(row + (t + i * together / 4) * rows, row_end - rows);
            const int8_t *ahead = p->packed + (n + panels) * panel_bytes + t / together * lines * (p->depth / 64) * 64;
            int64_t fetched = n + 2 * panels <= panel_end ? lines : 0;
            multiply_some(p, &block, first, rows, n, width, ahead, fetched, tiles >= TALL, kind);
        }
    }
    for (int tile = 0; tile < 4; tile++) finish(p, &block, tile, kind);
    _tile_release();
}

int int8_region_amx(const LinearInt8 *p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    int64_t rows = row_end - row;
    if (p->planes == 2) region_of(p, row, row_end, panel, panel_end, TWO_PLANES);
    else if (rows > 32 && rows <= 64 && rows * p->depth <= NEAR_BYTES) region_of(p, row, row_end, panel, panel_end, FOUR_TILES);
    else if (rows > 16) region_of(p, row, row_end, panel, panel_end, TWO_TILES);
    else region_of(p, row, row_end, panel, panel_end, ONE_TILE);
    return 0;
}

#else

int amx_is_usable(void) { return 0; }

int int8_region_amx(const LinearInt8 *p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    return int8_region_vector(p, row, row_end, panel, panel_end);
}

#endif
