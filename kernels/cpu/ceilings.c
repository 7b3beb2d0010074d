/* What this machine can do at most: fused multiply-adds, products of 8-bit integers, reading memory. Loops that do nothing
 * else, on as many threads as the kernels use. */
#include <omp.h>
#include <stdint.h>

#include "linear_int8.h"
#include "simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#define CHAINS 8    /* that do not wait for one another */
#define ROUNDS 2000 /* of a loop between two looks at the clock */

/* Keeps the compiler from seeing that a value is never used. */
#define KEEP(value) __asm__ volatile("" : : "m"(value))

/* Operations (a multiplication and an addition are two) of one call. */
static double float_round(void) {
    vf sums[CHAINS], factor = vf_set1(0.999f), term = vf_set1(0.001f);
    for (int i = 0; i < CHAINS; i++) sums[i] = vf_set1((float)i);
    for (int round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 8
        for (int i = 0; i < CHAINS; i++) sums[i] = vf_fma(sums[i], factor, term);
        __asm__ volatile("");
    }
    KEEP(sums);
    return 2.0 * VW * CHAINS * ROUNDS;
}

#if defined(__AMX_INT8__) && defined(__linux__)
static double tile_round(void) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config __attribute__((aligned(64))) = {
        .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
    for (int round = 0; round < ROUNDS; round++) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
    return 2.0 * 4 * 16 * 16 * 64 * ROUNDS;
}
#endif

static double byte_round(void) {
#if defined(__AVX512VNNI__)
    __m512i sums[CHAINS], values = _mm512_set1_epi8(3), weights = _mm512_set1_epi8(1);
    for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_set1_epi32(i);
    for (int round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 8
        for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_dpbusd_epi32(sums[i], values, weights);
        __asm__ volatile("");
    }
    KEEP(sums);
    return 2.0 * 64 * CHAINS * ROUNDS;
#elif defined(__AVX2__)
    /* Without a product of bytes, pairs of 16-bit integers. */
    __m256i sums[CHAINS], values = _mm256_set1_epi16(3), weights = _mm256_set1_epi16(1);
    for (int i = 0; i < CHAINS; i++) sums[i] = _mm256_set1_epi32(i);
    for (int round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 8
        for (int i = 0; i < CHAINS; i++) {
            __m256i products = _mm256_madd_epi16(_mm256_xor_si256(values, sums[i]), weights);
            sums[i] = _mm256_add_epi32(sums[i], products);
        }
        __asm__ volatile("");
    }
    KEEP(sums);
    return 2.0 * 16 * CHAINS * ROUNDS;
#elif defined(__ARM_FEATURE_DOTPROD)
    int32x4_t sums[CHAINS];
    int8x16_t values = vdupq_n_s8(3), weights = vdupq_n_s8(1);
    for (int i = 0; i < CHAINS; i++) sums[i] = vdupq_n_s32(i);
    for (int round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 8
        for (int i = 0; i < CHAINS; i++) sums[i] = vdotq_s32(sums[i], values, weights);
        __asm__ volatile("");
    }
    KEEP(sums);
    return 2.0 * 16 * CHAINS * ROUNDS;
#else
    int32_t sums[64] = {0};
    int16_t values[64];
    for (int i = 0; i < 64; i++) values[i] = (int16_t)i;
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < 64; i++) sums[i] += (int32_t)values[i] * (int16_t)round;
        __asm__ volatile("" : : : "memory");
    }
    KEEP(sums);
    return 2.0 * 64 * ROUNDS;
#endif
}

static double int8_round(void) {
#if defined(__AMX_INT8__) && defined(__linux__)
    if (amx_is_usable()) return tile_round();
#endif
    return byte_round();
}

/* Operations a second of all threads together, over so many seconds. */
static double rate(double (*round)(void), int threads, double seconds) {
    double total = 0.0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        double begin = omp_get_wtime(), end = begin, done = 0.0;
        do {
            done += round();
            end = omp_get_wtime();
        } while (end - begin < seconds);
        total += done / (end - begin);
    }
    return total;
}

/* Bytes a second of reading `count` floats. */
static double reading(const float *memory, int64_t count, int threads) {
    double begin = omp_get_wtime();
#pragma omp parallel num_threads(threads)
    {
        int64_t threads_now = omp_get_num_threads(), thread = omp_get_thread_num();
        int64_t from = count * thread / threads_now, to = count * (thread + 1) / threads_now;
        vf sums[4] = {vf_set1(0.0f), vf_set1(0.0f), vf_set1(0.0f), vf_set1(0.0f)};
        for (int64_t i = from; i + 4 * VW <= to; i += 4 * VW) {
            for (int v = 0; v < 4; v++) sums[v] += vf_load(memory + i + v * VW);
        }
        KEEP(sums);
    }
    return (double)(count * 4) / (omp_get_wtime() - begin);
}

/* rates [3]: float32 operations, 8-bit operations, bytes read a second, as they are now. `memory` holds `count` floats
 * that are not in the caches. */
void bg_ceilings(const float *memory, int64_t count, double *rates, int threads) {
    rates[0] = rate(float_round, threads, 0.005);
    rates[1] = rate(int8_round, threads, 0.005);
    rates[2] = reading(memory, count, threads);
}
