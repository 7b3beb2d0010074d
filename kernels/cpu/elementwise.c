/* Norm, rotary embedding and gate, float32. Each row is computed by itself, in one fixed order. */
#include "kernels.h"
#include "row_math.h"

/* Chunks for rows of so many floats, of which a thread does about eight in a nanosecond. */
static int64_t row_chunks(int64_t rows, int64_t floats, const Step *step) {
    return even_chunks(step_size(step, rows), floats / 8 + 1, step);
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
        add_row(sum, a->x + r * a->stride, a->n);
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
