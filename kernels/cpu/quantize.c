/* Activations to integers: as they are, or what a norm or a gate would have written. Weights are rounded as they are, and what
 * that costs is told. Each row by itself.
 *
 * Rounded to nearest, ties to even. A row whose largest |x| is below SMALLEST counts as zeros (scale 0); one that holds a
 * NaN or an infinity gets scale NaN and zeros, so that all that follows from it is NaN. */
#include "kernels.h"
#include "row_math.h"

#define GROUP 64 /* values of a row are padded with zeros to a multiple of this */
#define SMALLEST 0x1p-100f

typedef int8_t Bytes __attribute__((vector_size(VW), aligned(1), may_alias));

/* Where results go: int8 [rows][planes][depth], and a scale for each row. */
typedef struct {
    int8_t *values;
    int64_t stride, planes, depth;
    float *scale;
} Target;

INLINE vi vi_max(vi a, vi b) {
#if defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif VW == 8
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (vi)vmaxq_s32((int32x4_t)a, (int32x4_t)b);
#else
    vi is_more = a > b;
    return (a & is_more) | (b & ~is_more);
#endif
}

/* The largest |x| of a row, its bits as an integer: NaN above infinity above every number. */
INLINE int32_t largest(const float *x, int64_t depth) {
    vi top[4] = {0}, magnitude = vi_set1(0x7fffffff);
    for (int64_t i = 0; i < depth; i += 4 * VW)
        for (int v = 0; v < 4; v++) top[v] = vi_max(top[v], (vi)vf_load(x + i + v * VW) & magnitude);
    top[0] = vi_max(vi_max(top[0], top[1]), vi_max(top[2], top[3]));
    int32_t most = 0;
    for (int i = 0; i < VW; i++) most = top[0][i] > most ? top[0][i] : most;
    return most;
}

/* A row of `depth` floats, zeros past its width. */
static void quantize_row(const float *x, const Target *to, int64_t row) {
    int8_t *high = to->values + row * to->stride, *low = high + to->depth;
    int32_t bits = largest(x, to->depth);
    float most;
    memcpy(&most, &bits, 4);
    if (bits >= 0x7f800000 || most < SMALLEST) {
        memset(high, 0, (size_t)(to->planes * to->depth));
        to->scale[row] = bits >= 0x7f800000 ? NAN : 0.0f;
        return;
    }
    float levels = to->planes == 2 ? 32767.0f : 127.0f;
    to->scale[row] = most / levels;
    /* Adding 1.5 * 2^23 rounds to the nearest integer, which then stands in the low bits. */
    vf factor = vf_set1(levels / most), shift = vf_set1(12582912.0f);
    vi base = (vi)shift;
    if (to->planes == 2)
        for (int64_t i = 0; i < to->depth; i += VW) {
            vi value = (vi)(vf_load(x + i) * factor + shift) - base;
            *(Bytes *)(high + i) = __builtin_convertvector(value >> 8, Bytes);
            *(Bytes *)(low + i) = __builtin_convertvector(value, Bytes);
        }
    else
        for (int64_t i = 0; i < to->depth; i += VW)
            *(Bytes *)(high + i) = __builtin_convertvector((vi)(vf_load(x + i) * factor + shift) - base, Bytes);
}

/* A row of scratch for `depth` floats, zeros from `n` on; NULL, and the step fails, if there is no memory. */
static float *row_scratch(int64_t n, int64_t depth, Step *step) {
    float *row = thread_scratch((size_t)depth * 4);
    if (row) memset(row + n, 0, (size_t)(depth - n) * 4);
    else step_fail(step, NO_MEMORY);
    return row;
}

/* Chunks for rows of so many floats, of which a thread does about four in a nanosecond. */
static int64_t row_chunks(int64_t rows, int64_t floats, const Step *step) {
    return even_chunks(step_size(step, rows), floats / 4 + 1, step);
}

typedef struct {
    const float *x; /* [rows, n] with `stride` between rows */
    int64_t stride;
    Target to;
    int64_t rows, n;
} Quantize;

static int64_t quantize_chunks(const void *args, const Step *step) {
    const Quantize *a = args;
    return row_chunks(a->rows, a->n, step);
}

static void quantize_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const Quantize *a = args;
    int64_t rows = step_size(step, a->rows), end = chunk_begin(rows, chunk + 1, of);
    float *row = row_scratch(a->n, a->to.depth, step);
    if (!row) return;
    for (int64_t r = chunk_begin(rows, chunk, of); r < end; r++) {
        const float *x = a->x + r * a->stride;
        if (a->n < a->to.depth) x = memcpy(row, x, (size_t)a->n * 4);
        quantize_row(x, &a->to, r);
    }
}

const Kernel kernel_quantize = {quantize_chunks, quantize_run};

typedef struct {
    const float *x; /* [rows, n] with `stride` between rows */
    int64_t stride;
    float *residual; /* NULL; or += x, contiguous, and what is normed is the residual */
    const float *weight;
    Target to;
    int64_t rows, n;
    double eps;
} NormQuantize;

static int64_t norm_chunks(const void *args, const Step *step) {
    const NormQuantize *a = args;
    return row_chunks(a->rows, 2 * a->n, step);
}

static void norm_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const NormQuantize *a = args;
    int64_t rows = step_size(step, a->rows), end = chunk_begin(rows, chunk + 1, of);
    float *row = row_scratch(a->n, a->to.depth, step);
    if (!row) return;
    for (int64_t r = chunk_begin(rows, chunk, of); r < end; r++) {
        const float *x = a->x + r * a->stride;
        if (a->residual) {
            add_row(a->residual + r * a->n, x, a->n);
            x = a->residual + r * a->n;
        }
        norm_row(x, a->weight, row, a->n, (float)a->eps);
        quantize_row(row, &a->to, r);
    }
}

const Kernel kernel_norm_quantize = {norm_chunks, norm_run};

typedef struct {
    const float *gate_up; /* [rows, 2 * n] with `stride` between rows */
    int64_t stride;
    Target to;
    int64_t rows, n;
} GateQuantize;

static int64_t gate_chunks(const void *args, const Step *step) {
    const GateQuantize *a = args;
    return row_chunks(a->rows, 4 * a->n, step);
}

static void gate_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const GateQuantize *a = args;
    int64_t rows = step_size(step, a->rows), end = chunk_begin(rows, chunk + 1, of);
    float *row = row_scratch(a->n, a->to.depth, step);
    if (!row) return;
    for (int64_t r = chunk_begin(rows, chunk, of); r < end; r++) {
        const float *gate = a->gate_up + r * a->stride;
        gate_row(gate, gate + a->n, row, a->n);
        quantize_row(row, &a->to, r);
    }
}

const Kernel kernel_silu_mul_quantize = {gate_chunks, gate_run};

typedef struct {
    const float *weight; /* [rows, n] */
    const int8_t *values; /* what it was rounded to, [rows, depth] with `stride` between rows */
    int64_t stride;
    const float *scale, *mean; /* [rows], [n] */
    float *loss;
    int64_t rows, n;
} RoundingLoss;

static int64_t loss_chunks(const void *args, const Step *step) {
    const RoundingLoss *a = args;
    return row_chunks(a->rows, a->n, step);
}

/* (weight - rounded) · mean of each row, a sum in one fixed order. */
static void loss_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const RoundingLoss *a = args;
    int64_t end = chunk_begin(a->rows, chunk + 1, of);
    (void)step;
    for (int64_t r = chunk_begin(a->rows, chunk, of); r < end; r++) {
        const float *weight = a->weight + r * a->n;
        const int8_t *values = a->values + r * a->stride;
        vf sum[VU];
        for (int v = 0; v < VU; v++) sum[v] = vf_set1(0.0f);
        int64_t i = 0;
        for (; i + UNIT <= a->n; i += UNIT)
            for (int v = 0; v < VU; v++) {
                int64_t at = i + v * VW;
                vf value = __builtin_convertvector(*(const Bytes *)(values + at), vf) * vf_set1(a->scale[r]);
                sum[v] = vf_fma(vf_load(weight + at) - value, vf_load(a->mean + at), sum[v]);
            }
        float rest = 0.0f;
        for (; i < a->n; i++) rest += (weight[i] - (float)values[i] * a->scale[r]) * a->mean[i];
        a->loss[r] = unit_sum(sum) + rest;
    }
}

const Kernel kernel_rounding_loss = {loss_chunks, loss_run};
