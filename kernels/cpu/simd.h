/* Vectors of floats: one width per machine, chosen by the compiler's own macros.
 *
 * Every product that is added to something goes through vf_fma, and the build forbids the compiler to fuse any
 * other: so an expression gives the same bits wherever it is inlined. */
#ifndef BATCHGEN_SIMD_H
#define BATCHGEN_SIMD_H

#include <stdint.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VW 16 /* floats in a vector */
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define VW 8
#else
#if defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif
#define VW 4
#endif

/* Vectors in the block of 16 tokens or dimensions that the kernels count in. */
#define UNIT 16
#define VU (UNIT / VW)

typedef float vf __attribute__((vector_size(VW * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(VW * 4), may_alias));
typedef float vf_unaligned __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef int32_t vi_unaligned __attribute__((vector_size(VW * 4), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE vf vf_load(const float *p) { return *(const vf_unaligned *)p; }
INLINE void vf_store(float *p, vf x) { *(vf_unaligned *)p = x; }
INLINE vf vf_set1(float x) { return x - (vf){0}; }
INLINE vi vi_set1(int32_t x) { return x - (vi){0}; }
INLINE vf vf_select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

#if defined(__AVX512F__)
INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vf vf_max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__) && defined(__FMA__)
INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf vf_max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
#elif defined(__ARM_NEON) && defined(__aarch64__)
INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vf vf_max(vf a, vf b) { return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
#else
INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf vf_max(vf a, vf b) { return vf_select(a > b, a, b); }
#endif

/* Sum and maximum over the lanes of a unit of VU vectors, in one fixed order. */
INLINE float unit_sum(const vf *x) {
    float lane[UNIT];
    for (int i = 0; i < VU; i++) vf_store(lane + i * VW, x[i]);
    for (int width = UNIT / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

INLINE float vf_max_lane(vf x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lane[VW];
    vf_store(lane, x);
    float top = lane[0];
    for (int i = 1; i < VW; i++) top = lane[i] > top ? lane[i] : top;
    return top;
#endif
}

/* Sum over the lanes, modulo 2^32. */
INLINE int32_t vi_sum_lanes(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    uint32_t sum = 0;
    for (int i = 0; i < VW; i++) sum += (uint32_t)x[i];
    return (int32_t)sum;
#endif
}

/* Whether any lane is no number. */
INLINE int vf_has_nan(vf x) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q) != 0;
#else
    return vi_sum_lanes(x != x) != 0;
#endif
}

/* The numbers of the lanes: 0, 1, 2, ... */
INLINE vi vi_lanes(void) {
    static const int32_t lanes[UNIT] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return *(const vi_unaligned *)lanes;
}

/* e^x = 2^n (1 + r + r² q(r)) with n = round(x / ln 2), |r| <= ln 2 / 2; q is the Chebyshev fit of degree 5 of
 * (e^r - 1 - r) / r², relative error 2.4e-10 before rounding. vf_expm1_parts returns 2^n and e^r - 1. */
INLINE void vf_expm1_parts(vf x, vf *power, vf *rest) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to the nearest integer */
    vf shifted = vf_fma(x, vf_set1(1.44269504088896341f), vf_set1(shift));
    vf n = shifted - vf_set1(shift);
    vf r = vf_fma(n, vf_set1(-0.693145751953125f), x);
    r = vf_fma(n, vf_set1(-1.42860682030941723e-6f), r);
    vf q = vf_set1(1.990044402e-04f);
    q = vf_fma(q, r, vf_set1(1.393454499e-03f));
    q = vf_fma(q, r, vf_set1(8.333297446e-03f));
    q = vf_fma(q, r, vf_set1(4.166645557e-02f));
    q = vf_fma(q, r, vf_set1(1.666666716e-01f));
    q = vf_fma(q, r, vf_set1(0.5f));
    *rest = vf_fma(q * r, r, r);
    /* The integer sits in the low bits of `shifted`; move it into the exponent of 1.0. */
    *power = (vf)(((vi)shifted << 23) + vi_set1(0x3f800000));
}

#define EXP_LOWEST -87.0f
#define EXP_HIGHEST 88.0f

/* e^x for x <= EXP_HIGHEST; 0 below EXP_LOWEST, -infinity included; exactly 1 for 0. */
INLINE vf vf_exp(vf x) {
    vf power, rest;
    vi is_tiny = x < vf_set1(EXP_LOWEST);
    vf_expm1_parts(vf_select(is_tiny, vf_set1(EXP_LOWEST), x), &power, &rest);
    return vf_select(is_tiny, vf_set1(0.0f), vf_fma(power, rest, power));
}

/* tanh x = m / (m + 2) with m = e^2x - 1, which keeps its relative precision near 0. */
INLINE vf vf_tanh(vf x) {
    vf power, rest;
    vf bounded = vf_select(x > vf_set1(20.0f), vf_set1(20.0f), x);
    bounded = vf_select(bounded < vf_set1(-20.0f), vf_set1(-20.0f), bounded);
    vf_expm1_parts(bounded + bounded, &power, &rest);
    vf m = vf_fma(power, rest, power - vf_set1(1.0f));
    return m / (m + vf_set1(2.0f));
}

#endif
