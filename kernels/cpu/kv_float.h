/* Floats of 16 and of 8 bits: loads that widen to vectors of float32, and rounding to the nearest even. */
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

#define E4M3_UNIT 256.0f /* what vf_load_e4m3 gives is so much too small */

/* Floats of 4 bits of exponent become halves, of 5: but for the exponent's bias that is a shift, subnormal numbers included.
 * What stands for no number is read as one. */
INLINE vf vf_load_e4m3(const void *p) {
#if defined(__AVX512BW__) && defined(__AVX512VL__) && VW == 16
    __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    return (vf)_mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16((int16_t)0xbfff)));
#elif defined(__F16C__) && VW == 8
    __m128i half = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
    return (vf)_mm256_cvtph_ps(_mm_and_si128(half, _mm_set1_epi16((int16_t)0xbfff)));
#else
    typedef uint8_t Bytes __attribute__((vector_size(VW), aligned(1), may_alias));
    vi all = __builtin_convertvector(*(const Bytes *)p, vi), size = all & vi_set1(127);
    vf whole = (vf)((size << 20) + vi_set1(112 << 23)), small = __builtin_convertvector(size, vf) * vf_set1(0x1p-17f);
    return (vf)((vi)vf_select(size < vi_set1(8), small, whole) | (all & vi_set1(128)) << 24);
#endif
}

/* Rounds |x| <= 448 to such a float, ties to even. */
INLINE vi e4m3_of(vf x) {
    vi size = (vi)x & vi_set1(0x7fffffff), shift = (vi)vf_set1(12582912.0f); /* 1.5 * 2^23: adding it rounds */
    vi whole = ((size + vi_set1(0x7ffff) + ((size >> 20) & vi_set1(1))) >> 20) - vi_set1(120 << 3);
    vi small = (vi)((vf)size * vf_set1(512.0f) + (vf)shift) - shift;
    vi is_small = size < vi_set1(0x3c800000); /* 2^-6 */
    return (small & is_small) | (whole & ~is_small) | (((vi)x >> 24) & vi_set1(128));
}

/* Element `i` and the following of a row of the cache's floats. */
INLINE vf kv_load(const char *row, int64_t i, const int type) {
    if (type == KV_FLOAT16) return vf_load_float16(row + 2 * i);
    if (type == KV_BFLOAT16) return vf_load_bfloat16(row + 2 * i);
    if (type == KV_FP8) return vf_load_e4m3(row + i);
    return vf_load((const float *)row + i);
}

/* Widens `count` runs of UNIT small floats, `stride` bytes apart, to floats at `to`, and fetches what `ahead` points at. */
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
