/* Four products of bytes added into a 32-bit lane, by the instructions that there are.
 *
 * Each way says: how values are prepared (`Value`, four to a group, `prepare`), how many accumulators a panel takes
 * (VECTORS), `dot` for one group of a row with one panel's weights, `sums_of` for the sums by column, and what times the
 * sum of a column's weights must be added to the sums of the high and of the low bytes.
 *
 * Nothing saturates: bytes are multiplied into 32 bits at once, or widened to 16 bits before. */
#ifndef BATCHGEN_LINEAR_INT8_DOT_H
#define BATCHGEN_LINEAR_INT8_DOT_H

#include <stdint.h>
#include <string.h>

#include "linear_int8.h"

#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || defined(__AVXVNNI__)
/* Values unsigned, weights signed: high bytes are moved up by 128, and 128 times the weights taken off again. */
typedef uint8_t Value;
#define HIGH_SHIFT -128
#define LOW_SHIFT 0
INLINE void prepare(const int8_t *values, Value *to, int64_t depth, int is_low) {
    uint8_t flip = is_low ? 0 : 0x80;
    for (int64_t k = 0; k < depth; k++) to[k] = (uint8_t)values[k] ^ flip;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define DOT_NAME "AVX-512 VNNI"
#define ROWS 6
#define PANELS 4
#define VECTORS 1
typedef __m512i Sum;
typedef __m512i Group;
INLINE Group group_of(const Value *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}
INLINE Sum dot(Sum sum, Group x, const int8_t *w, int v) {
    return _mm512_dpbusd_epi32(sum, x, _mm512_loadu_si512(w + 64 * v));
}
INLINE Sum no_sum(void) { return _mm512_setzero_si512(); }
#else
#define DOT_NAME "AVX-VNNI"
#define ROWS 5
#define PANELS 1
#define VECTORS 2
typedef __m256i Sum;
typedef __m256i Group;
INLINE Group group_of(const Value *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
INLINE Sum dot(Sum sum, Group x, const int8_t *w, int v) {
    return _mm256_dpbusd_avx_epi32(sum, x, _mm256_loadu_si256((const __m256i *)(w + 32 * v)));
}
INLINE Sum no_sum(void) { return _mm256_setzero_si256(); }
#endif
INLINE void sums_of(const Sum *sum, int32_t *to) { memcpy(to, sum, PANEL * 4); }

#elif defined(__ARM_NEON) && defined(__aarch64__)
/* Both signed: low bytes are moved down by 128, and 128 times the weights added again. */
#define PANELS 1
typedef int8_t Value;
#define HIGH_SHIFT 0
#define LOW_SHIFT 128
INLINE void prepare(const int8_t *values, Value *to, int64_t depth, int is_low) {
    uint8_t flip = is_low ? 0x80 : 0;
    for (int64_t k = 0; k < depth; k++) to[k] = (int8_t)((uint8_t)values[k] ^ flip);
}
typedef int32x4_t Sum;
typedef int8x16_t Group;
INLINE Group group_of(const Value *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
INLINE Sum no_sum(void) { return vdupq_n_s32(0); }

#if defined(__ARM_FEATURE_DOTPROD)
#define DOT_NAME "NEON dot products"
#define ROWS 6
#define VECTORS 4
INLINE Sum dot(Sum sum, Group x, const int8_t *w, int v) { return vdotq_s32(sum, vld1q_s8(w + 16 * v), x); }
INLINE void sums_of(const Sum *sum, int32_t *to) { memcpy(to, sum, PANEL * 4); }
#else
/* Products of 16 bits, added in pairs. */
#define DOT_NAME "NEON"
#define ROWS 2
#define VECTORS 8
#define SUMS_ARE_PAIRS
INLINE Sum dot(Sum sum, Group x, const int8_t *w, int v) {
    return vpadalq_s16(sum, vmull_s8(vld1_s8(w + 8 * v), vget_low_s8(x)));
}
#endif

#else
/* Widened to 16 bits; products are added in pairs. */
#define SUMS_ARE_PAIRS
typedef int16_t Value;
#define HIGH_SHIFT 0
#define LOW_SHIFT 0
#define PANELS 1
INLINE void prepare(const int8_t *values, Value *to, int64_t depth, int is_low) {
    for (int64_t k = 0; k < depth; k++) to[k] = is_low ? (int16_t)(uint8_t)values[k] : (int16_t)values[k];
}

#if defined(__AVX512BW__)
#define DOT_NAME "AVX-512, 16 bits"
#define ROWS 6
#define VECTORS 2
typedef __m512i Sum;
typedef __m512i Group;
INLINE Group group_of(const Value *x) {
    int64_t four;
    memcpy(&four, x, 8);
    return _mm512_set1_epi64(four);
}
INLINE Sum dot(Sum sum, Group x, const int8_t *w, int v) {
    __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(w + 32 * v)));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(x, wide));
}
INLINE Sum no_sum(void) { return _mm512_setzero_si512(); }
#elif defined(__AVX2__)
#define DOT_NAME "AVX2, 16 bits"
#define ROWS 2
#define VECTORS 4
typedef __m256i Sum;
typedef __m256i Group;
INLINE Group group_of(const Value *x) {
    int64_t four;
    memcpy(&four, x, 8);
    return _mm256_set1_epi64x(four);
}
INLINE Sum dot(Sum sum, Group x, const int8_t *w, int v) {
    __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + 16 * v)));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(x, wide));
}
INLINE Sum no_sum(void) { return _mm256_setzero_si256(); }
#elif defined(__SSE2__)
#include <emmintrin.h>
#define DOT_NAME "SSE2, 16 bits"
#define ROWS 1
#define VECTORS 8
typedef __m128i Sum;
typedef __m128i Group;
INLINE Group group_of(const Value *x) {
    int64_t four;
    memcpy(&four, x, 8);
    return _mm_set1_epi64x(four);
}
INLINE Sum dot(Sum sum, Group x, const int8_t *w, int v) {
    __m128i eight = _mm_loadl_epi64((const __m128i *)(w + 8 * v));
    __m128i wide = _mm_srai_epi16(_mm_unpacklo_epi8(eight, eight), 8);
    return _mm_add_epi32(sum, _mm_madd_epi16(x, wide));
}
INLINE Sum no_sum(void) { return _mm_setzero_si128(); }
#else
#define DOT_NAME "plain C"
#define ROWS 1
#define VECTORS 32
typedef int32_t Sum;
typedef const Value *Group;
INLINE Group group_of(const Value *x) { return x; }
INLINE Sum dot(Sum sum, Group x, const int8_t *w, int v) {
    const Value *pair = x + 2 * (v % 2);
    return sum + pair[0] * w[2 * v] + pair[1] * w[2 * v + 1];
}
INLINE Sum no_sum(void) { return 0; }
#endif

#endif

#ifdef SUMS_ARE_PAIRS
/* Two lanes for each column. */
INLINE void sums_of(const Sum *sum, int32_t *to) {
    int32_t pairs[2 * PANEL];
    memcpy(pairs, sum, sizeof pairs);
    for (int c = 0; c < PANEL; c++) to[c] = pairs[2 * c] + pairs[2 * c + 1];
}
#endif

#endif
