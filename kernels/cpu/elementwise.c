/* Norm, rotary embedding and gate, float32. Each row is computed by itself, in one fixed order. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "simd.h"

/* Chunks for rows of so many floats, of which a thread does about eight in a nanosecond. */
static int64_t row_chunks(int64_t rows, int64_t floats, const Step *step) {
    return even_chunks(step_size(step, rows), floats / 8 + 1, step);
}

static float square_sum(const float *x, int64_t n) {
    vf sum[2 * VU];
    for (int v = 0; v < 2 * VU; v++) sum[v] = vf_set1(0.0f);
    int64_t i = 0;
    for (; i + 2 * UNIT <= n; i += 2 * UNIT)
        for (int v = 0; v < 2 * VU; v++) {
            vf value = vf_load(x + i + v * VW);
            sum[v] = vf_fma(value, value, sum[v]);
        }
    for (int v = 0; v < VU; v++) sum[v] = sum[v] + sum[v + VU];
    float rest = 0.0f;
    for (; i < n; i++) rest += x[i] * x[i];
    return unit_sum(sum) + rest;
}

static void norm_row(const float *x, const float *weight, float *out, int64_t n, float eps) {
    float factor = 1.0f / sqrtf(square_sum(x, n) / (float)n + eps);
    int64_t i = 0;
    for (; i + VW <= n; i += VW)
        vf_store(out + i, vf_load(x + i) * vf_set1(factor) * vf_load(weight + i));
    for (; i < n; i++) out[i] = x[i] * factor * weight[i];
}

typedef struct {
    const float *x; /* [tokens, heads, n] with `stride` between tokens */
    int64_t stride;
    const float *weight;
    float *out; /* contiguous */
    int64_t tokens, heads, n;
    double eps;
} Norm;

static int64_t norm_chunks(const void *args, const Step *step) {
    const Norm *a = args;
    return row_chunks(a->tokens, a->heads * a->n, step);
}

static void norm_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const Norm *a = args;
    int64_t tokens = step_size(step, a->tokens), end = chunk_begin(tokens, chunk + 1, of);
    for (int64_t t = chunk_begin(tokens, chunk, of); t < end; t++)
        for (int64_t h = 0; h < a->heads; h++)
            norm_row(a->x + t * a->stride + h * a->n, a->weight, a->out + (t * a->heads + h) * a->n, a->n,
                     (float)a->eps);
}

const Kernel kernel_rms_norm = {norm_chunks, norm_run};

typedef struct {
    const float *x;
    int64_t stride;
    float *residual; /* += x; contiguous */
    const float *weight;
    float *out; /* norm of the residual; contiguous */
    int64_t rows, n;
    double eps;
} AddNorm;

static int64_t add_norm_chunks(const void *args, const Step *step) {
    const AddNorm *a = args;
    return row_chunks(a->rows, 2 * a->n, step);
}

static void add_norm_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const AddNorm *a = args;
    int64_t rows = step_size(step, a->rows), end = chunk_begin(rows, chunk + 1, of);
    for (int64_t r = chunk_begin(rows, chunk, of); r < end; r++) {
        float *sum = a->residual + r * a->n;
        const float *add = a->x + r * a->stride;
        int64_t i = 0;
        for (; i + VW <= a->n; i += VW) vf_store(sum + i, vf_load(sum + i) + vf_load(add + i));
        for (; i < a->n; i++) sum[i] += add[i];
        norm_row(sum, a->weight, a->out + r * a->n, a->n, (float)a->eps);
    }
}

const Kernel kernel_add_rms_norm = {add_norm_chunks, add_norm_run};

static void rotate(float *x, const float *cosine, const float *sine, int64_t half, int is_neox) {
    int64_t i = 0;
    if (is_neox)
        for (; i + VW <= half; i += VW) {
            vf a = vf_load(x + i), b = vf_load(x + half + i), c = vf_load(cosine + i), s = vf_load(sine + i);
            vf_store(x + i, a * c - b * s);
            vf_store(x + half + i, b * c + a * s);
        }
    for (; i < half; i++) {
        float *first = is_neox ? x + i : x + 2 * i, *second = is_neox ? x + half + i : first + 1;
        float a = *first, b = *second;
        *first = a * cosine[i] - b * sine[i];
        *second = b * cosine[i] + a * sine[i];
    }
}

typedef struct {
    float *query; /* [tokens, heads, head_dim], rotated in place */
    int64_t query_stride, heads;
    float *key; /* [tokens, kv_heads, head_dim], too */
    int64_t key_stride, kv_heads;
    int64_t head_dim;
    const int64_t *positions;
    int64_t tokens;
    const float *cos_sin; /* [table_rows, 2 * half] */
    int64_t table_rows, half, is_neox;
} Rotary;

static int64_t rotary_chunks(const void *args, const Step *step) {
    const Rotary *a = args;
    return row_chunks(a->tokens, (a->heads + a->kv_heads) * a->head_dim, step);
}

static void rotary_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const Rotary *a = args;
    int64_t tokens = step_size(step, a->tokens), end = chunk_begin(tokens, chunk + 1, of);
    for (int64_t t = chunk_begin(tokens, chunk, of); t < end; t++) {
        if (a->positions[t] < 0 || a->positions[t] >= a->table_rows) {
            step_fail(step, BAD_POSITION);
            return;
        }
        const float *cosine = a->cos_sin + a->positions[t] * 2 * a->half, *sine = cosine + a->half;
        for (int64_t h = 0; h < a->heads; h++)
            rotate(a->query + t * a->query_stride + h * a->head_dim, cosine, sine, a->half, a->is_neox != 0);
        for (int64_t g = 0; g < a->kv_heads; g++)
            rotate(a->key + t * a->key_stride + g * a->head_dim, cosine, sine, a->half, a->is_neox != 0);
    }
}

const Kernel kernel_rotary = {rotary_chunks, rotary_run};

INLINE vf silu(vf x) {
    vf bounded = vf_select(x < vf_set1(-EXP_HIGHEST), vf_set1(-EXP_HIGHEST), x);
    return bounded / (vf_set1(1.0f) + vf_exp(vf_set1(0.0f) - bounded));
}

/* out [n] = silu(gate) * up. */
static void gate_row(const float *gate, const float *up, float *out, int64_t n) {
    int64_t i = 0;
    for (; i + VW <= n; i += VW) vf_store(out + i, silu(vf_load(gate + i)) * vf_load(up + i));
    if (i < n) {
        float edge[VW] = {0};
        memcpy(edge, gate + i, (size_t)(n - i) * 4);
        vf_store(edge, silu(vf_load(edge)));
        for (int64_t j = i; j < n; j++) out[j] = edge[j - i] * up[j];
    }
}

typedef struct {
    const float *gate_up; /* [rows, 2 * n] */
    int64_t stride;
    float *out; /* [rows, n] */
    int64_t rows, n;
} Gate;

static int64_t gate_chunks(const void *args, const Step *step) {
    const Gate *a = args;
    return row_chunks(a->rows, 4 * a->n, step);
}

static void gate_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const Gate *a = args;
    int64_t rows = step_size(step, a->rows), end = chunk_begin(rows, chunk + 1, of);
    for (int64_t r = chunk_begin(rows, chunk, of); r < end; r++)
        gate_row(a->gate_up + r * a->stride, a->gate_up + r * a->stride + a->n, a->out + r * a->n, a->n);
}

const Kernel kernel_silu_mul = {gate_chunks, gate_run};
