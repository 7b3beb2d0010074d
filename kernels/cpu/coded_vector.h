/* Codes of a panel as vectors of floats. */
#ifndef BATCHGEN_CODED_VECTOR_H
#define BATCHGEN_CODED_VECTOR_H

#include <string.h>

#include "coded.h"
#include "kv_float.h"

typedef struct {
    vi left, right;
} Codes;

typedef struct {
    vf left, right;
} Floats;

/* VW bytes, an integer each. */
INLINE vi bytes_at(const uint8_t *from) {
#if VW == 16
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif VW == 8
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    typedef uint8_t Bytes __attribute__((vector_size(VW), aligned(1), may_alias));
    return __builtin_convertvector(*(const Bytes *)from, vi);
#endif
}

INLINE Codes codes_of_8(const uint8_t *from) { return (Codes){bytes_at(from), bytes_at(from + VW)}; }

INLINE Codes codes_of_4(const uint8_t *from) {
    vi both = bytes_at(from);
    return (Codes){both & vi_set1(15), both >> 4};
}

INLINE Codes codes_of_2(const uint8_t *from) {
    /* Half a vector of bytes, twice; then the second half moves to its bits. */
    uint8_t twice[VW];
    memcpy(twice, from, VW / 2);
    memcpy(twice + VW / 2, from, VW / 2);
#if VW == 16
    uint64_t half;
    memcpy(&half, from, 8);
    vi all = (vi)_mm512_cvtepu8_epi32(_mm_set1_epi64x((int64_t)half));
    all = all >> (vi){0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2};
#elif VW == 8
    int32_t half;
    memcpy(&half, from, 4);
    vi all = (vi)_mm256_cvtepu8_epi32(_mm_set1_epi32(half)) >> (vi){0, 0, 0, 0, 2, 2, 2, 2};
#else
    vi all = bytes_at(twice);
    all = (all & (vi){-1, -1, 0, 0}) | (all >> 2 & (vi){0, 0, -1, -1});
#endif
    return (Codes){all & vi_set1(3), all >> 4 & vi_set1(3)};
}

/* Adds 1 << below where the plane has a bit. */
INLINE Codes with_bits(Codes codes, const uint8_t *from, const int below) {
#if VW == 16
    uint32_t set;
    memcpy(&set, from, 4);
    __m512i bit = _mm512_set1_epi32(1 << below), left = (__m512i)codes.left, right = (__m512i)codes.right;
    return (Codes){(vi)_mm512_mask_or_epi32(left, (__mmask16)set, left, bit),
                   (vi)_mm512_mask_or_epi32(right, (__mmask16)(set >> 16), right, bit)};
#else
#if VW == 8
    const vi bits = {1, 2, 4, 8, 16, 32, 64, 128};
    vi left = vi_set1(from[0]), right = vi_set1(from[1]);
#else
    const vi bits = {1, 2, 4, 8};
    vi left = vi_set1(from[0]), right = left >> 4;
#endif
    vi bit = vi_set1(1 << below);
    return (Codes){codes.left | (((left & bits) == bits) & bit), codes.right | (((right & bits) == bits) & bit)};
#endif
}

INLINE Codes codes_at(const uint8_t *from, const int bits) {
    if (bits == 8) return codes_of_8(from);
    Codes all = {vi_set1(0), vi_set1(0)};
    int below = 0;
    if (bits & 4) {
        all = codes_of_4(from);
        from += PANEL / 2;
        below = 4;
    }
    if (bits & 2) {
        Codes two = codes_of_2(from);
        all.left |= two.left << below, all.right |= two.right << below;
        from += PANEL / 4;
        below += 2;
    }
    return bits & 1 ? with_bits(all, from, below) : all;
}

/* A table's first entries, in registers. */
typedef struct {
    vf part[TABLE_ENTRIES / VW];
} Table;

INLINE Table table_at(const float *from) {
    Table table;
    for (int i = 0; i < TABLE_ENTRIES / VW; i++) table.part[i] = vf_load(from + i * VW);
    return table;
}

/* Entries of the table; what is too large for the registers comes from memory. */
INLINE vf entries(const float *from, Table table, vi codes, const int bits) {
#if VW == 16
    if (bits <= 4) return (vf)_mm512_permutexvar_ps((__m512i)codes, (__m512)table.part[0]);
    if (bits == 5) return (vf)_mm512_permutex2var_ps((__m512)table.part[0], (__m512i)codes, (__m512)table.part[1]);
    return (vf)_mm512_i32gather_ps((__m512i)codes, from, 4);
#elif VW == 8
    if (bits > 4) return (vf)_mm256_i32gather_ps(from, (__m256i)codes, 4);
    __m256 low = _mm256_permutevar8x32_ps((__m256)table.part[0], (__m256i)codes);
    if (bits < 4) return (vf)low;
    /* The fourth bit, as a sign, chooses. */
    __m256 high = _mm256_permutevar8x32_ps((__m256)table.part[1], (__m256i)codes);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(codes << 28));
#else
#if defined(__ARM_NEON) && defined(__aarch64__)
    if (bits <= 4) {
        /* The four bytes of an entry. */
        vi bytes = codes * vi_set1(0x04040404) + vi_set1(0x03020100);
        uint8x16x4_t all = {{(uint8x16_t)table.part[0], (uint8x16_t)table.part[1], (uint8x16_t)table.part[2],
                             (uint8x16_t)table.part[3]}};
        return (vf)vqtbl4q_u8(all, (uint8x16_t)bytes);
    }
#endif
    (void)table, (void)bits;
    vf found;
    for (int i = 0; i < VW; i++) found[i] = from[codes[i]];
    return found;
#endif
}

/* As vf_load_e4m3, two vectors: in one go where that is faster. */
INLINE Floats e4m3_at(const uint8_t *from) {
#if defined(__AVX512BW__) && VW == 16
    __m512i half = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from)), 7);
    half = _mm512_and_si512(half, _mm512_set1_epi16((int16_t)0xbfff));
    return (Floats){(vf)_mm512_cvtph_ps(_mm512_castsi512_si256(half)),
                    (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1))};
#elif defined(__F16C__) && VW == 8
    __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)), 7);
    half = _mm256_and_si256(half, _mm256_set1_epi16((int16_t)0xbfff));
    return (Floats){(vf)_mm256_cvtph_ps(_mm256_castsi256_si128(half)),
                    (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))};
#elif defined(__ARM_NEON) && defined(__aarch64__)
    int16x8_t half = vshlq_n_s16(vmovl_s8(vld1_s8((const int8_t *)from)), 7);
    float16x8_t halves = vreinterpretq_f16_s16(vandq_s16(half, vdupq_n_s16((int16_t)0xbfff)));
    return (Floats){(vf)vcvt_f32_f16(vget_low_f16(halves)), (vf)vcvt_f32_f16(vget_high_f16(halves))};
#else
    Codes codes = codes_of_8(from);
    vf found[2];
    for (int i = 0; i < 2; i++) {
        vi all = i ? codes.right : codes.left, size = all & vi_set1(127);
        vf whole = (vf)((size << 20) + vi_set1(112 << 23)), small = __builtin_convertvector(size, vf) * vf_set1(0x1p-17f);
        found[i] = (vf)((vi)vf_select(size < vi_set1(8), small, whole) | (all & vi_set1(128)) << 24);
    }
    return (Floats){found[0], found[1]};
#endif
}

/* What codes of a panel stand for, for one input. */
INLINE Floats values_at(const uint8_t *from, const float *entry, Table table, const int bits, const int value) {
    if (value == VALUE_E4M3) return e4m3_at(from);
#if VW == 16
    if (bits == 4) {
        /* Only the lowest four bits of an index count. */
        vi both = bytes_at(from);
        return (Floats){entries(entry, table, both, 4), entries(entry, table, both >> 4, 4)};
    }
#endif
    Codes codes = codes_at(from, bits);
    if (value == VALUE_TABLE) return (Floats){entries(entry, table, codes.left, bits), entries(entry, table, codes.right, bits)};
    return (Floats){__builtin_convertvector(codes.left, vf), __builtin_convertvector(codes.right, vf)};
}

#endif
