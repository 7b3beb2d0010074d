/* What is done to one row of floats: sum of squares, norm, gate. Each in one fixed order. */
#ifndef BATCHGEN_ROW_MATH_H
#define BATCHGEN_ROW_MATH_H

#include <math.h>
#include <string.h>

#include "simd.h"

INLINE float square_sum(const float *x, int64_t n) {
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

/* out [n] = x / sqrt(mean(x²) + eps) * weight */
INLINE void norm_row(const float *x, const float *weight, float *out, int64_t n, float eps) {
    float factor = 1.0f / sqrtf(square_sum(x, n) / (float)n + eps);
    int64_t i = 0;
    for (; i + VW <= n; i += VW) vf_store(out + i, vf_load(x + i) * vf_set1(factor) * vf_load(weight + i));
    for (; i < n; i++) out[i] = x[i] * factor * weight[i];
}

/* sum [n] += add */
INLINE void add_row(float *sum, const float *add, int64_t n) {
    int64_t i = 0;
    for (; i + VW <= n; i += VW) vf_store(sum + i, vf_load(sum + i) + vf_load(add + i));
    for (; i < n; i++) sum[i] += add[i];
}

INLINE vf silu(vf x) {
    vf bounded = vf_select(x < vf_set1(-EXP_HIGHEST), vf_set1(-EXP_HIGHEST), x);
    return bounded / (vf_set1(1.0f) + vf_exp(vf_set1(0.0f) - bounded));
}

#define GATE_AHEAD 512 /* floats that are fetched ahead, over the end of a row into the next: another thread wrote half of them */

/* out [n] = silu(gate) * up */
INLINE void gate_row(const float *gate, const float *up, float *out, int64_t n) {
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        __builtin_prefetch(gate + i + GATE_AHEAD);
        __builtin_prefetch(up + i + GATE_AHEAD);
        vf_store(out + i, silu(vf_load(gate + i)) * vf_load(up + i));
    }
    if (i < n) {
        float edge[VW] = {0};
        memcpy(edge, gate + i, (size_t)(n - i) * 4);
        vf_store(edge, silu(vf_load(edge)));
        for (int64_t j = i; j < n; j++) out[j] = edge[j - i] * up[j];
    }
}

#endif
