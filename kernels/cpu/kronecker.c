/* Vectors times a Kronecker product of small matrices, float32.
 *
 * UNIT vectors stand beside each other in a panel [size][UNIT], so that each factor is applied to whole lanes. An element
 * is one chain of multiply-adds from zero for each factor: its bits do not depend on the vectors around it. */
#include "kernels.h"
#include "simd.h"

/* Columns of a factor at a time: so many sums are in registers. */
#define COLUMNS 8

typedef struct {
    const float *x;       /* element e of vector v is at e * along + v * across */
    float *out;           /* as x */
    const float *scale;   /* [size], multiplied to each vector first */
    const float *factors; /* matrices [n, n], the one along the innermost axis first */
    const int64_t *sizes; /* n of each */
    int64_t count, vectors, size, along, across;
} Kronecker;

static int64_t chunks(const void *args, const Step *step) {
    const Kronecker *a = args;
    int64_t products = 0;
    for (int64_t f = 0; f < a->count; f++) products += a->sizes[f];
    return even_chunks((a->vectors + UNIT - 1) / UNIT, a->size * products * UNIT / 32 + 1, step);
}

/* Some columns of a factor times rows of VW lanes, `apart` from each other. */
INLINE void multiply(const float *factor, int64_t n, const float *from, float *to, int64_t apart, const int columns) {
    vf sum[COLUMNS];
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) sum[c] = vf_set1(0.0f);
    for (int64_t i = 0; i < n; i++) {
        vf value = vf_load(from + i * apart);
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) sum[c] = vf_fma(vf_set1(factor[i * n + c]), value, sum[c]);
    }
#pragma GCC unroll 8
    for (int c = 0; c < columns; c++) vf_store(to + c * apart, sum[c]);
}

/* A panel as [outer, n, apart], multiplied along n. */
static void apply(const float *factor, int64_t n, const float *from, float *to, int64_t outer, int64_t apart) {
    for (int64_t o = 0; o < outer; o++)
        for (int64_t at = o * n * apart, end = at + apart; at < end; at += VW) {
            int64_t c = 0;
            for (; c + COLUMNS <= n; c += COLUMNS) multiply(factor + c, n, from + at, to + at + c * apart, apart, COLUMNS);
            for (; c < n; c++) multiply(factor + c, n, from + at, to + at + c * apart, apart, 1);
        }
}

static void run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const Kronecker *a = args;
    int64_t panels = (a->vectors + UNIT - 1) / UNIT, end = chunk_begin(panels, chunk + 1, of);
    float *scratch = thread_scratch((size_t)(2 * a->size * UNIT) * 4);
    if (!scratch) {
        step_fail(step, NO_MEMORY);
        return;
    }
    for (int64_t p = chunk_begin(panels, chunk, of); p < end; p++) {
        int64_t first = p * UNIT * a->across, lanes = a->vectors - p * UNIT < UNIT ? a->vectors - p * UNIT : UNIT;
        float *from = scratch, *to = scratch + a->size * UNIT;
        for (int64_t e = 0; e < a->size; e++) {
            const float *x = a->x + first + e * a->along;
            for (int64_t v = 0; v < UNIT; v++) from[e * UNIT + v] = v < lanes ? x[v * a->across] * a->scale[e] : 0.0f;
        }
        const float *factor = a->factors;
        for (int64_t f = 0, apart = UNIT; f < a->count; f++) {
            int64_t n = a->sizes[f];
            apply(factor, n, from, to, a->size * UNIT / (n * apart), apart);
            float *other = from;
            from = to;
            to = other;
            factor += n * n;
            apart *= n;
        }
        for (int64_t e = 0; e < a->size; e++)
            for (int64_t v = 0; v < lanes; v++) a->out[first + e * a->along + v * a->across] = from[e * UNIT + v];
    }
}

const Kernel kernel_kronecker = {chunks, run};
