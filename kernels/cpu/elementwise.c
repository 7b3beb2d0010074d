/* Norm, rotary embedding and gate, float32. Each row is computed by itself, in one fixed order. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"

/* Below this many floats a second thread costs more than it brings. */
#define SERIAL_FLOATS 16384

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

/* x [tokens, heads, n] with `stride` between tokens -> out, contiguous. */
void bg_rms_norm(const float *x, int64_t stride, const float *weight, float *out, int64_t tokens, int64_t heads,
                 int64_t n, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens * heads * n > SERIAL_FLOATS)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++)
            norm_row(x + t * stride + h * n, weight, out + (t * heads + h) * n, n, eps);
}

/* residual += x, then out = norm(residual). */
void bg_add_rms_norm(const float *x, int64_t stride, float *residual, const float *weight, float *out, int64_t rows,
                     int64_t n, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * n > SERIAL_FLOATS)
    for (int64_t r = 0; r < rows; r++) {
        float *sum = residual + r * n;
        const float *add = x + r * stride;
        int64_t i = 0;
        for (; i + VW <= n; i += VW) vf_store(sum + i, vf_load(sum + i) + vf_load(add + i));
        for (; i < n; i++) sum[i] += add[i];
        norm_row(sum, weight, out + r * n, n, eps);
    }
}

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

/* Rotates query and key in place. Returns 0, or -1 if a position has no row in cos_sin [positions, 2 * half]. */
int64_t bg_rotary(float *query, int64_t query_stride, int64_t heads, float *key, int64_t key_stride, int64_t kv_heads,
                  int64_t head_dim, const int64_t *positions, int64_t tokens, const float *cos_sin,
                  int64_t table_rows, int64_t half, int is_neox, int threads) {
    for (int64_t t = 0; t < tokens; t++)
        if (positions[t] < 0 || positions[t] >= table_rows) return -1;
    int64_t work = tokens * (heads + kv_heads) * head_dim;
#pragma omp parallel for num_threads(threads) schedule(static) if (work > SERIAL_FLOATS)
    for (int64_t t = 0; t < tokens; t++) {
        const float *cosine = cos_sin + positions[t] * 2 * half;
        for (int64_t h = 0; h < heads; h++)
            rotate(query + t * query_stride + h * head_dim, cosine, cosine + half, half, is_neox);
        for (int64_t g = 0; g < kv_heads; g++)
            rotate(key + t * key_stride + g * head_dim, cosine, cosine + half, half, is_neox);
    }
    return 0;
}

INLINE vf silu(vf x) {
    vf bounded = vf_select(x < vf_set1(-EXP_HIGHEST), vf_set1(-EXP_HIGHEST), x);
    return bounded / (vf_set1(1.0f) + vf_exp(vf_set1(0.0f) - bounded));
}

/* out [rows, n] = silu(gate) * up, gate and up side by side in a row of 2 * n. */
void bg_silu_mul(const float *gate_up, int64_t stride, float *out, int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * n > SERIAL_FLOATS)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = gate_up + r * stride, *up = gate + n;
        int64_t i = 0;
        for (; i + VW <= n; i += VW) vf_store(out + r * n + i, silu(vf_load(gate + i)) * vf_load(up + i));
        if (i < n) {
            float edge[VW] = {0};
            memcpy(edge, gate + i, (size_t)(n - i) * 4);
            vf_store(edge, silu(vf_load(edge)));
            for (int64_t j = i; j < n; j++) out[r * n + j] = edge[j - i] * up[j];
        }
    }
}
