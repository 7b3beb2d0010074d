/* Half-precision floats: loads that widen to vectors of float32, and rounding to the nearest even. */
#ifndef BATCHGEN_KV_FLOAT_H
#define BATCHGEN_KV_FLOAT_H

#include <stdint.h>
#include <string.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "kv_cache.h"
#include "simd.h"

typedef uint16_t vh_unaligned __attribute__((vector_size(VW * 2), aligned(2), may_alias));
typedef uint32_t vu __attribute__((vector_size(VW * 4), may_alias));

#if defined(__AVX512F__)
INLINE vf vf_load_bfloat16(const void *p) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
}
#elif defined(__AVX2__)
INLINE vf vf_load_bfloat16(const void *p) {
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
}
#else
INLINE vf vf_load_bfloat16(const void *p) {
    return (vf)(__builtin_convertvector(*(const vh_unaligned *)p, vu) << 16);
}
#endif

#if defined(__AVX512F__)
INLINE vf vf_load_float16(const void *p) {
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
#elif defined(__F16C__) && defined(__AVX2__) && defined(__FMA__)
INLINE vf vf_load_float16(const void *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
#elif defined(__ARM_NEON) && defined(__aarch64__)
INLINE vf vf_load_float16(const void *p) { return (vf)vcvt_f32_f16(vld1_f16((const float16_t *)p)); }
#else
/* Exponent and fraction move into their places; the product corrects the exponent, of subnormal numbers too. */
INLINE vf vf_load_float16(const void *p) {
    vu half = __builtin_convertvector(*(const vh_unaligned *)p, vu);
    vi rest = (vi)((half & 0x7fffu) << 13);
    vi wide = (vi)vf_select(rest >= vi_set1(0x7c00 << 13), (vf)(rest | vi_set1(0x7f800000)), (vf)rest * vf_set1(0x1p112f));
    return (vf)(wide | (vi)((half & 0x8000u) << 16));
}
#endif

/* Element `i` and the following of a row of the cache's floats. */
INLINE vf kv_load(const char *row, int64_t i, const int type) {
    if (type == KV_FLOAT16) return vf_load_float16(row + 2 * i);
    if (type == KV_BFLOAT16) return vf_load_bfloat16(row + 2 * i);
    return vf_load((const float *)row + i);
}

/* Widens `count` runs of UNIT halves, `stride` bytes apart, to floats at `to`, and fetches what `ahead` points at. */
INLINE void widen(const char *from, const char *ahead, int64_t stride, int64_t count, float *to, const int type) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; i++, from += stride, ahead += stride, to += UNIT) {
        __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 4
        for (int v = 0; v < UNIT; v += VW) vf_store(to + v, kv_load(from, v, type));
    }
}

static inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline uint16_t to_bfloat16(float x) {
    uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); /* NaN stays one */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline uint16_t to_float16(float x) {
    uint32_t bits = float_bits(x), rest = bits & 0x7fffffff, half;
    if (rest >= 0x47800000) { /* 65536 and more, NaN */
        half = rest > 0x7f800000 ? 0x7e00 : 0x7c00;
    } else if (rest < 0x38800000) { /* below 2^-14: adding 0.5 rounds to a multiple of 2^-24 */
        float magnitude;
        memcpy(&magnitude, &rest, 4);
        half = float_bits(magnitude + 0.5f) - 0x3f000000;
    } else {
        half = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
    }
    return (uint16_t)(half | (bits >> 16 & 0x8000));
}

/* Rounds `n` floats. */
INLINE void to_halves(const float *x, uint16_t *half, int64_t n, const int type) {
    int64_t i = 0;
#if defined(__F16C__)
    if (type == KV_FLOAT16)
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128((__m128i *)(half + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    if (type == KV_FLOAT16)
        for (; i + 4 <= n; i += 4) vst1_f16((float16_t *)(half + i), vcvt_f16_f32(vld1q_f32(x + i)));
#endif
    for (; i < n; i++) half[i] = type == KV_FLOAT16 ? to_float16(x[i]) : to_bfloat16(x[i]);
}

#endif
