/* Blocks of quantized weights as GGUF files store them -> float32. Layouts and arithmetic are those of ggml's
 * dequantize_row_* (https://github.com/ggml-org/ggml, MIT), one rounding for each product and each sum. */
#include <stdint.h>
#include <string.h>

#define K_VALUES 256 /* of a block of the kinds with K */

/* Numbers of the types in a file (enum ggml_type). */
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

static inline float half_at(const uint8_t *from) {
    uint16_t bits;
    memcpy(&bits, from, 2);
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023, whole;
    float value;
    if (exponent == 0) {
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    whole = sign | (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | fraction << 13;
    memcpy(&value, &whole, 4);
    return value;
}

/* 32 values of 4 bits: the low halves of 16 bytes, then the high ones. */
static void q4_0(const uint8_t *block, float *out) {
    float scale = half_at(block);
    for (int i = 0; i < 16; i++) {
        out[i] = scale * (float)((block[2 + i] & 15) - 8);
        out[i + 16] = scale * (float)((block[2 + i] >> 4) - 8);
    }
}

static void q4_1(const uint8_t *block, float *out) {
    float scale = half_at(block), least = half_at(block + 2);
    for (int i = 0; i < 16; i++) {
        out[i] = scale * (float)(block[4 + i] & 15) + least;
        out[i + 16] = scale * (float)(block[4 + i] >> 4) + least;
    }
}

/* As those, and 32 bits in front with the fifth of each. */
static void q5_0(const uint8_t *block, float *out) {
    float scale = half_at(block);
    uint32_t fifth;
    memcpy(&fifth, block + 2, 4);
    for (int i = 0; i < 16; i++) {
        int low = (block[6 + i] & 15) | (int)(fifth >> i & 1) << 4;
        int high = block[6 + i] >> 4 | (int)(fifth >> (i + 16) & 1) << 4;
        out[i] = scale * (float)(low - 16);
        out[i + 16] = scale * (float)(high - 16);
    }
}

static void q5_1(const uint8_t *block, float *out) {
    float scale = half_at(block), least = half_at(block + 2);
    uint32_t fifth;
    memcpy(&fifth, block + 4, 4);
    for (int i = 0; i < 16; i++) {
        int low = (block[8 + i] & 15) | (int)(fifth >> i & 1) << 4;
        int high = block[8 + i] >> 4 | (int)(fifth >> (i + 16) & 1) << 4;
        out[i] = scale * (float)low + least;
        out[i + 16] = scale * (float)high + least;
    }
}

static void q8_0(const uint8_t *block, float *out) {
    float scale = half_at(block);
    for (int i = 0; i < 32; i++) out[i] = (float)(int8_t)block[2 + i] * scale;
}

/* Scale and least value of the eight stretches of 32, six bits each in 12 bytes. */
static void six_bits(const uint8_t *from, int stretch, float *scale, float *least) {
    const uint8_t *scales = from, *leasts = from + 4, *rest = from + 8;
    int i = stretch % 4;
    if (stretch < 4) {
        *scale = (float)(scales[i] & 63);
        *least = (float)(leasts[i] & 63);
    } else {
        *scale = (float)((rest[i] & 15) | (scales[i] >> 2 & 48));
        *least = (float)(rest[i] >> 4 | (leasts[i] >> 2 & 48));
    }
}

/* Q4_K, and with `fifth` bits (32 bytes, bit s of byte i belongs to value i of stretch s) Q5_K. */
static void k_stretches(const uint8_t *block, const uint8_t *fifth, const uint8_t *nibbles, float *out) {
    float whole_scale = half_at(block), whole_least = half_at(block + 2);
    for (int s = 0; s < 8; s++) {
        float scale, least;
        six_bits(block + 4, s, &scale, &least);
        scale = whole_scale * scale;
        least = whole_least * least;
        const uint8_t *from = nibbles + s / 2 * 32;
        int shift = s % 2 * 4;
        for (int i = 0; i < 32; i++) {
            int value = from[i] >> shift & 15;
            if (fifth) value |= (fifth[i] >> s & 1) << 4;
            out[s * 32 + i] = scale * (float)value - least;
        }
    }
}

static void q4_k(const uint8_t *block, float *out) { k_stretches(block, 0, block + 16, out); }

static void q5_k(const uint8_t *block, float *out) { k_stretches(block, block + 16, block + 48, out); }

/* Two halves of 128 values, each four runs of 32: low four bits, upper two bits, a scale for every 16 values. */
static void q6_k(const uint8_t *block, float *out) {
    const int8_t *scales = (const int8_t *)block + 192;
    float whole = half_at(block + 208);
    for (int half = 0; half < 2; half++)
        for (int run = 0; run < 4; run++)
            for (int i = 0; i < 32; i++) {
                int low = block[half * 64 + run % 2 * 32 + i] >> (run / 2 * 4) & 15;
                int high = block[128 + half * 32 + i] >> (run * 2) & 3;
                int at = half * 128 + run * 32 + i;
                out[at] = whole * (float)scales[at / 16] * (float)((low | high << 4) - 32);
            }
}

typedef struct {
    int64_t type, bytes, values;
    void (*run)(const uint8_t *, float *);
} Kind;

static const Kind KINDS[] = {
    {Q4_0, 18, 32, q4_0},       {Q4_1, 20, 32, q4_1},        {Q5_0, 22, 32, q5_0},        {Q5_1, 24, 32, q5_1},
    {Q8_0, 34, 32, q8_0},       {Q4_K, 144, K_VALUES, q4_k}, {Q5_K, 176, K_VALUES, q5_k}, {Q6_K, 210, K_VALUES, q6_k},
};

/* `blocks` blocks of a type into `out`. Returns 0, or 1 for a type that is not here. */
int64_t bg_dequantize(int64_t type, const uint8_t *from, float *out, int64_t blocks, int threads) {
    for (size_t k = 0; k < sizeof KINDS / sizeof *KINDS; k++) {
        if (KINDS[k].type != type) continue;
        Kind kind = KINDS[k];
#pragma omp parallel for num_threads(threads) schedule(static) if (blocks > 1024)
        for (int64_t b = 0; b < blocks; b++) kind.run(from + b * kind.bytes, out + b * kind.values);
        return 0;
    }
    return 1;
}
