/* x · Aᵀ of adapters whose A is kept as integers of 8 bits, multiplied with AMX, for rows of integers.
 *
 * Each row of A has a scale, as each row of x has. Sums of integers are exact in any order; those of pieces of K are added as
 * floats, in theirs. So a row's bits depend on no other row. */
#include <string.h>

#include "amx.h"
#include "lora.h"

#if HAS_AMX && VW == 16
#include "simd.h"

#define STEP 64                 /* inputs that an instruction sums */
#define PIECE 1024              /* of K, in which `x` stays in the L1 cache */
#define X_STRIDE (PIECE + STEP) /* rows of a multiple of 1024 bytes would share few sets of the cache */
#define TILE 1024               /* bytes of weights for STEP inputs and UNIT columns */
#define AHEAD 2048              /* of them, that are fetched before they are needed */

int bg_lora_has_integers(void) { return amx_is_usable(); }

/* Tiles 0 to 3 hold sums, 4 and 5 bytes of rows, 6 and 7 weights. */
static void configure(int64_t rows) {
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.row_bytes[t] = 64, config.rows[t] = t > 5 ? 16 : (uint8_t)rows;
    load_tile_config(&config);
}

INLINE void fetch(const char *w) {
    for (int line = 0; line < TILE; line += 64) _mm_prefetch(w + AHEAD + line, _MM_HINT_T0);
}

/* One or two units of columns of A, from `w` on and `next` bytes behind it: of integers of 8 bits the sums of even and of odd
 * steps, of 16 bits those of high and of low bytes. */
INLINE void multiply(const int8_t *x, const int8_t *low, const char *w, int64_t next, int64_t count, const int is_wide,
                     const int units) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < count; k += STEP, w += TILE) {
        fetch(w);
        _tile_loadd(4, x + k, X_STRIDE);
        _tile_loadd(6, w, 64);
        if (units > 1) {
            fetch(w + next);
            _tile_loadd(7, w + next, 64);
        }
        if (!is_wide && k / STEP % 2) {
            _tile_dpbssd(1, 4, 6);
            if (units > 1) _tile_dpbssd(3, 4, 7);
        } else {
            _tile_dpbssd(0, 4, 6);
            if (units > 1) _tile_dpbssd(2, 4, 7);
        }
        if (is_wide) {
            _tile_loadd(5, low + k, X_STRIDE);
            _tile_dpbusd(1, 5, 6);
            if (units > 1) _tile_dpbusd(3, 5, 7);
        }
    }
}

/* Units [unit, end) of x · Aᵀ of a tile; `to` is [rows][units][UNIT]. */
void lora_amx_reduce(const Lora *a, const Tile *t, int64_t unit, int64_t end, float *to) {
    int8_t x[2][ROWS][X_STRIDE] __attribute__((aligned(64)));
    int32_t sums[4][ROWS][UNIT] __attribute__((aligned(64)));
    const Slot *slot = t->slot;
    const int is_wide = a->kind == X_BITS_16;
    int64_t depth = (a->depth + STEP - 1) / STEP * STEP, of_unit = depth * UNIT, apart = slot->units * UNIT;
    const float *scale = (const float *)(slot->a + slot->units * of_unit);
    configure(t->rows);
    for (int64_t start = 0; start < depth; start += PIECE) {
        int64_t count = start + PIECE < depth ? PIECE : depth - start;
        int is_first = start == 0, is_last = start + count == depth;
        for (int64_t i = 0; i < t->rows; i++) {
            const char *row = a->x + t->row[i] * a->x_stride + start;
            memcpy(x[0][i], row, (size_t)count);
            if (is_wide) memcpy(x[1][i], row + a->plane_stride, (size_t)count);
        }
        for (int64_t u = unit; u < end; u += 2) {
            int64_t n = end - u < 2 ? 1 : 2;
            const char *w = slot->a + u * of_unit + start * UNIT;
            if (is_wide && n > 1) multiply(x[0][0], x[1][0], w, of_unit, count, 1, 2);
            else if (is_wide) multiply(x[0][0], x[1][0], w, 0, count, 1, 1);
            else if (n > 1) multiply(x[0][0], NULL, w, of_unit, count, 0, 2);
            else multiply(x[0][0], NULL, w, 0, count, 0, 1);
            _tile_stored(0, sums[0], 64);
            _tile_stored(1, sums[1], 64);
            _tile_stored(2, sums[2], 64);
            _tile_stored(3, sums[3], 64);
            for (int64_t each = 0; each < n; each++) {
                __m512 of_a = _mm512_loadu_ps(scale + (u + each) * UNIT), high_counts = _mm512_set1_ps(is_wide ? 256.0f : 1.0f);
                for (int64_t i = 0; i < t->rows; i++) {
                    float *result = to + i * apart + (u + each) * UNIT;
                    __m512 high = _mm512_cvtepi32_ps(_mm512_load_si512(sums[2 * each][i]));
                    __m512 sum = _mm512_fmadd_ps(high, high_counts, _mm512_cvtepi32_ps(_mm512_load_si512(sums[2 * each + 1][i])));
                    if (!is_first) sum = _mm512_add_ps(_mm512_loadu_ps(result), sum);
                    if (is_last) sum = _mm512_mul_ps(sum, _mm512_mul_ps(of_a, _mm512_set1_ps(a->scale[t->row[i]])));
                    _mm512_storeu_ps(result, sum);
                }
            }
        }
    }
}
#else
int bg_lora_has_integers(void) { return 0; }

void lora_amx_reduce(const Lora *a, const Tile *t, int64_t unit, int64_t end, float *to) {
    (void)a, (void)t, (void)unit, (void)end, (void)to;
}
#endif
