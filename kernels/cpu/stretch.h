/* Drawing from a row of logits stretch by stretch: what a draw needs of a stretch is its largest value and the sum of its
 * weights relative to that. One pass over the row gives both; the token then lies in one stretch, which is looked at again.
 * All sums are taken in an order that the row fixes. */
#ifndef BATCHGEN_STRETCH_H
#define BATCHGEN_STRETCH_H

#include <math.h>
#include <string.h>

#include "simd.h"

#define STRETCH 128

static inline int64_t stretches_of(int64_t n) { return (n + STRETCH - 1) / STRETCH; }

/* What values are multiplied by at a temperature above 0. */
static inline float scale_of(double temperature) {
    float scale = (float)(1.0 / temperature);
    return scale < 1e-30f ? 1e-30f : scale;
}

typedef double vd __attribute__((vector_size(VW * 4), may_alias));
typedef float vh_unaligned __attribute__((vector_size(VW * 2), aligned(4), may_alias));

INLINE vd widen(const float *x) { return __builtin_convertvector(*(const vh_unaligned *)x, vd); }

/* 16 running sums of weights: those of a place modulo 16, whatever the width of a vector. */
typedef struct {
    vd part[2 * UNIT / VW];
} Sums;

INLINE void add_unit(Sums *sums, const float *weights) {
    for (int i = 0; i < 2 * UNIT / VW; i++) sums->part[i] += widen(weights + i * (VW / 2));
}

INLINE double sum_of(const Sums *sums) {
    double lane[UNIT];
    memcpy(lane, sums->part, sizeof lane);
    for (int width = UNIT / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

static inline double stretch_sum(const float *weights) {
    Sums sums = {0};
    for (int i = 0; i < STRETCH; i += UNIT) add_unit(&sums, weights + i);
    return sum_of(&sums);
}

/* A whole stretch: `x` itself, or `edge` with -infinity past the last. */
INLINE const float *whole_stretch(const float *x, int64_t count, float *edge) {
    if (count >= STRETCH) return x;
    for (int i = 0; i < STRETCH; i++) edge[i] = i < count ? x[i] : -INFINITY;
    return edge;
}

/* e^((x - top) * scale) of a whole stretch. */
INLINE void weigh_stretch(const float *x, float top, float scale, float *weights) {
    for (int i = 0; i < STRETCH; i += VW)
        vf_store(weights + i, vf_exp((vf_load(x + i) - vf_set1(top)) * vf_set1(scale)));
}

/* The largest of `count` values, NaN if one is; *sum is that of their weights relative to it, 0 if it is infinite. */
static inline float scan_stretch(const float *x, int64_t count, float scale, double *sum) {
    float edge[STRETCH], weights[STRETCH];
    x = whole_stretch(x, count, edge);
    vf most = vf_load(x);
    vi odd = most != most;
    for (int i = VW; i < STRETCH; i += VW) {
        vf value = vf_load(x + i);
        odd |= value != value;
        most = vf_max(most, value);
    }
    int has_nan = 0;
    for (int lane = 0; lane < VW; lane++) has_nan |= odd[lane];
    *sum = 0.0;
    if (has_nan) return NAN;
    float top = vf_max_lane(most);
    if (!isfinite(top)) return top;
    weigh_stretch(x, top, scale, weights);
    *sum = stretch_sum(weights);
    return top;
}

/* The largest of the stretches' largest values, or NaN. Their sums become weights relative to it; *total is what they add
 * up to. */
static inline float weigh_stretches(const float *tops, double *sums, int64_t count, float scale, double *total) {
    float top = -INFINITY;
    for (int64_t s = 0; s < count; s++) {
        if (tops[s] != tops[s]) return NAN;
        top = tops[s] > top ? tops[s] : top;
    }
    if (!isfinite(top)) return top;
    *total = 0.0;
    for (int64_t s = 0; s < count; s += VW) {
        float some[VW], factors[VW];
        for (int i = 0; i < VW; i++) some[i] = s + i < count ? tops[s + i] : -INFINITY;
        vf_store(factors, vf_exp((vf_load(some) - vf_set1(top)) * vf_set1(scale)));
        for (int i = 0; i < VW && s + i < count; i++) *total += sums[s + i] *= (double)factors[i];
    }
    return top;
}

/* The stretch in which u of the running sum of weights lies; *before is the sum of those ahead of it, *target what u stands
 * for. */
static inline int64_t find_stretch(const double *weights, double total, double u, double *before, double *target) {
    *target = u * total;
    if (*target >= total) *target = nextafter(total, 0.0);
    *before = 0.0;
    int64_t s = 0;
    while (*before + weights[s] <= *target) *before += weights[s++];
    return s;
}

/* The place among the `count` values of a stretch in which the target lies; its weight is above 0. `weight` is that of the
 * whole stretch, `top` its largest value. */
static inline int64_t find_in_stretch(const float *x, int64_t count, float top, float scale, double weight, double before,
                                      double target) {
    float edge[STRETCH], weights[STRETCH];
    weigh_stretch(whole_stretch(x, count, edge), top, scale, weights);
    double factor = weight / stretch_sum(weights);
    int64_t last = -1;
    for (int64_t i = 0; i < STRETCH; i++) {
        before += (double)weights[i] * factor;
        if (weights[i] > 0.0f) {
            last = i;
            if (before > target) break;
        }
    }
    /* The two ways of summing may differ in the last bits; then it is the stretch's last. */
    return last;
}

#endif
