/* Linear layer on 8-bit integers with AMX: tiles of 16 rows by 64 bytes, multiplied by one instruction.
 *
 * All tiles of a region have the same number of rows, so that they are configured once: where rows do not divide evenly,
 * the last tiles overlap the ones before and compute some rows again, to the same bits. */
#include "linear_int8.h"

#if defined(__AMX_INT8__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_BYTES 1024
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

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) TileConfig;

/* Tiles 0 to 3 hold sums, 4 and 5 values of `rows` rows (tile 5 weights where `is_single`), 6 and 7 weights. */
static void configure(int64_t rows, int is_single) {
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 64;
        config.rows[t] = t > 5 || (t == 5 && is_single) ? 16 : (uint8_t)rows;
    }
    __asm__ volatile("" : : "r"(&config) : "memory"); /* GCC 12 takes only the first 8 bytes for read */
    _tile_loadconfig(&config);
}

/* Sums of tile `T` go to memory, and from there as floats to the rows from `row` on. */
typedef int32_t Sums[16][PANEL] __attribute__((aligned(64)));

INLINE void finish_tile(const LinearInt8 *p, const Sums high, const Sums low, int64_t row, int64_t rows, int64_t panel) {
    for (int64_t i = 0; i < rows; i++) finish_panel(p, high[i], low ? low[i] : 0, row + i, panel);
}

/* One tile of rows by up to 4 panels. */
INLINE void single(const LinearInt8 *p, int64_t row, int64_t rows, int64_t panel, const int panels) {
    const int8_t *x = p->values + row * p->stride, *w = p->packed + panel * PANEL * p->depth;
    int64_t next = PANEL * p->depth;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < p->depth; k += 64, w += TILE_BYTES) {
        _tile_loadd(4, x + k, p->stride);
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
    Sums sums[4];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int i = 0; i < panels; i++) finish_tile(p, sums[i], 0, row, rows, panel + i);
}

/* Two tiles of values, `x` and `y`, by up to 2 panels: those of other rows, or the low bytes of the same. */
INLINE void pair(const LinearInt8 *p, const int8_t *x, const int8_t *y, int64_t panel, const int panels,
                 const int is_low, Sums sums[4]) {
    const int8_t *w = p->packed + panel * PANEL * p->depth;
    int64_t next = PANEL * p->depth;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < p->depth; k += 64, w += TILE_BYTES) {
        _tile_loadd(4, x + k, p->stride);
        _tile_loadd(6, w, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(5, y + k, p->stride);
        if (is_low) _tile_dpbusd(2, 5, 6);
        else _tile_dpbssd(2, 5, 6);
        if (panels > 1) {
            _tile_loadd(7, w + next, 64);
            _tile_dpbssd(1, 4, 7);
            if (is_low) _tile_dpbusd(3, 5, 7);
            else _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
}

static void single_of(const LinearInt8 *p, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
    if (panels > 3) single(p, row, rows, panel, 4);
    else if (panels == 3) single(p, row, rows, panel, 3);
    else if (panels == 2) single(p, row, rows, panel, 2);
    else single(p, row, rows, panel, 1);
}

/* `row` and `second`: where the tiles of rows begin that are done together; the same for high and low bytes of one. */
static void pair_of(const LinearInt8 *p, int64_t row, int64_t second, int64_t rows, int64_t panel, int64_t panels) {
    const int8_t *x = p->values + row * p->stride, *y = p->values + second * p->stride;
    Sums sums[4];
    if (p->planes == 2) {
        if (panels > 1) pair(p, x, x + p->depth, panel, 2, 1, sums);
        else pair(p, x, x + p->depth, panel, 1, 1, sums);
        for (int i = 0; i < panels; i++) finish_tile(p, sums[i], sums[2 + i], row, rows, panel + i);
        return;
    }
    if (panels > 1) pair(p, x, y, panel, 2, 0, sums);
    else pair(p, x, y, panel, 1, 0, sums);
    for (int i = 0; i < panels; i++) {
        finish_tile(p, sums[i], 0, row, rows, panel + i);
        finish_tile(p, sums[2 + i], 0, second, rows, panel + i);
    }
}

int int8_region_amx(const LinearInt8 *p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    int64_t count = row_end - row, together = p->planes == 1 && count > 16 ? 2 : 1;
    int is_single = p->planes == 1 && together == 1;
    int64_t tiles = (count + 16 * together - 1) / (16 * together) * together, rows = (count + tiles - 1) / tiles;
    int64_t panels = is_single ? 4 : 2;
    configure(rows, is_single);
    for (int64_t n = panel; n < panel_end; n += panels) {
        int64_t width = min_of(panels, panel_end - n);
        for (int64_t t = 0; t < tiles; t += together) {
            int64_t from = min_of(row + t * rows, row_end - rows);
            if (is_single) single_of(p, from, rows, n, width);
            else pair_of(p, from, min_of(row + (t + 1) * rows, row_end - rows), rows, n, width);
        }
    }
    _tile_release();
    return 0;
}

#else

int amx_is_usable(void) { return 0; }

int int8_region_amx(const LinearInt8 *p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    return int8_region_vector(p, row, row_end, panel, panel_end);
}

#endif
