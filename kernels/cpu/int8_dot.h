/* Products of 16-bit factors with four bytes that lie side by side in each lane, added up exactly in int32.
 *
 * A row's factors for four bytes are two words of 32 bits, one for each of two sums. Where the machine multiplies bytes
 * (VNNI) they are the high bytes and the low bytes, and the first sum counts 256 times; elsewhere they are the factors of
 * even bytes and of odd bytes as 16 bits each, and the sums are added. */
#ifndef BATCHGEN_INT8_DOT_H
#define BATCHGEN_INT8_DOT_H

#include <stdint.h>
#include <string.h>

#include "simd.h"

#if (defined(__AVX512VNNI__) && VW == 16) || (defined(__AVXVNNI__) && VW == 8)
#define DOT_BYTES 1
#else
#define DOT_BYTES 0
#endif

#if DOT_BYTES && VW == 16
INLINE vi dot_bytes(vi sum, vi is_unsigned, vi is_signed) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)is_unsigned, (__m512i)is_signed);
}
#elif DOT_BYTES
INLINE vi dot_bytes(vi sum, vi is_unsigned, vi is_signed) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)is_unsigned, (__m256i)is_signed);
}
#endif

/* Sums of products of 16-bit halves: x and factors hold two signed ones in each lane. */
INLINE vi dot_halves(vi sum, vi x, vi factors) {
#if VW == 16 && defined(__AVX512BW__)
    return sum + (vi)_mm512_madd_epi16((__m512i)x, (__m512i)factors);
#elif VW == 8
    return sum + (vi)_mm256_madd_epi16((__m256i)x, (__m256i)factors);
#else
    return sum + ((x << 16) >> 16) * ((factors << 16) >> 16) + (x >> 16) * (factors >> 16);
#endif
}

INLINE vi load_words(const void *p) { return *(const vi_unaligned *)p; }

/* Bytes 0 to 255 times one of the two words of factors. */
INLINE vi dot_unsigned(vi sum, vi bytes, vi factors, const int word) {
#if DOT_BYTES
    (void)word;
    return dot_bytes(sum, bytes, factors);
#else
    vi low = vi_set1(0x00ff00ff);
    return dot_halves(sum, word == 0 ? bytes & low : (bytes >> 8) & low, factors);
#endif
}

/* Bytes -128 to 127; factors 0 to 32767. */
INLINE vi dot_signed(vi sum, vi bytes, vi factors, const int word) {
#if DOT_BYTES
    (void)word;
    return dot_bytes(sum, factors, bytes);
#else
    /* The wanted byte goes to the top of its half; as a number that is 256 times too high, which 8 bits of shift mend. */
    vi top = word == 0 ? (bytes << 8) & vi_set1((int32_t)0xff00ff00) : bytes & vi_set1((int32_t)0xff00ff00);
#if VW == 16 && defined(__AVX512BW__)
    vi halves = (vi)_mm512_srai_epi16((__m512i)top, 8);
#elif VW == 8
    vi halves = (vi)_mm256_srai_epi16((__m256i)top, 8);
#else
    vi halves = (((top << 16) >> 24) & vi_set1(0xffff)) | ((top >> 24) << 16);
#endif
    return dot_halves(sum, halves, factors);
#endif
}

INLINE vi dot_total(vi first, vi second) {
#if DOT_BYTES
    return (first << 8) + second;
#else
    return first + second;
#endif
}

/* Splits `n` factors, a multiple of 4, into words: n bytes go to `first` and n to `second`. As bytes the low ones are signed
 * too if `is_signed`: then factors are at most 32512 in size. */
static inline void split_factors(const int32_t *factors, int64_t n, const int is_signed, int8_t *first, int8_t *second) {
#if DOT_BYTES
    for (int64_t i = 0; i < n; i++) {
        first[i] = (int8_t)((is_signed ? factors[i] + 128 : factors[i]) >> 8);
        second[i] = (int8_t)(factors[i] & 255);
    }
#else
    (void)is_signed;
    for (int64_t i = 0; i < n; i += 2) {
        int16_t even = (int16_t)factors[i], odd = (int16_t)factors[i + 1];
        memcpy(first + i, &even, 2);
        memcpy(second + i, &odd, 2);
    }
#endif
}

/* The same for 64 factors of 0 or more, of which none comes out above 32767, but in another order of the groups of four:
 * group q goes to factor_place(q). */
#if DOT_BYTES && VW == 16
INLINE int factor_place(int q) { return q % 4 * 4 + q / 4; }

INLINE void split_64(const vi *factors, int8_t *first, int8_t *second) {
    __m512i a = _mm512_packs_epi32((__m512i)factors[0], (__m512i)factors[1]);
    __m512i b = _mm512_packs_epi32((__m512i)factors[2], (__m512i)factors[3]), low = _mm512_set1_epi16(255);
    _mm512_storeu_si512(first, _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
    _mm512_storeu_si512(second, _mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low)));
}
#else
INLINE int factor_place(int q) { return q; }

INLINE void split_64(const vi *factors, int8_t *first, int8_t *second) {
    int32_t plain[64];
    for (int v = 0; v < 64 / VW; v++) {
        vi is_high = factors[v] > vi_set1(32767);
        *(vi_unaligned *)(plain + v * VW) = (factors[v] & ~is_high) | (vi_set1(32767) & is_high);
    }
    split_factors(plain, 64, 0, first, second);
}
#endif

#endif
