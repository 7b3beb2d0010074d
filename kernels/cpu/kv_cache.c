/* Writing of the cache. */
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "kv_cache.h"
#include "kv_float.h"

typedef struct {
    const float *key; /* [tokens, kv_heads, head_dim], dense within a token */
    int64_t key_stride;
    const float *value;
    int64_t value_stride;
    const int32_t *slots; /* -1 is skipped */
    int64_t tokens;
    char *data;
    int64_t type, num_blocks, block_size, kv_heads, head_dim;
} StoreKv;

#define STRETCH 64 /* dimensions at a time */

static void store_float32(const Cache *cache, char *head, int64_t offset, const float *key, const float *value) {
    float *keys = (float *)head, *values = (float *)(head + cache->values_at);
    for (int64_t d = 0; d < cache->head_dim; d++) keys[d * cache->block_size + offset] = key[d];
    memcpy(values + offset * cache->value_dim, value, (size_t)cache->head_dim * 4);
}

INLINE void store_halves(const Cache *cache, char *head, int64_t offset, const float *key, const float *value,
                         const int type) {
    uint16_t *keys = (uint16_t *)head, *values = (uint16_t *)(head + cache->values_at), half[STRETCH];
    for (int64_t first = 0; first < cache->head_dim; first += STRETCH) {
        int64_t count = cache->head_dim - first < STRETCH ? cache->head_dim - first : STRETCH;
        to_halves(key + first, half, count, type);
        for (int64_t d = 0; d < count; d++) keys[(first + d) * cache->block_size + offset] = half[d];
        to_halves(value + first, values + offset * cache->value_dim + first, count, type);
    }
}

/* The largest magnitude by `level`; NaN if anything is not finite. */
static float scale_of(const float *x, int64_t n, float level) {
    vf most = vf_set1(0.0f), zero = vf_set1(0.0f);
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        vf at = vf_load(x + i);
        most = vf_max(most, vf_max(at, -at));
        zero = zero + at * vf_set1(0.0f); /* NaN for what is not finite */
    }
    float top = vf_max_lane(most), bad = vf_has_nan(zero) ? NAN : 0;
    for (; i < n; i++) {
        top = fabsf(x[i]) > top ? fabsf(x[i]) : top;
        bad += x[i] * 0.0f;
    }
    return top / level + bad;
}

/* Scales of a token's key and value. If either is not finite the key gets NaN, and zeros stand for all numbers: whoever sees
 * the token gets NaN, nobody else. */
static void find_scales(const Cache *cache, const float *key, const float *value, float level, float *key_scale,
                        float *value_scale) {
    *key_scale = scale_of(key, cache->head_dim, level), *value_scale = scale_of(value, cache->head_dim, level);
    if (isnan(*key_scale + *value_scale)) *key_scale = NAN, *value_scale = 0;
}

/* `at` divided by the scale, at most `level` in size; zero where the scale is no number above zero. */
INLINE vf scaled(vf at, float scale, float level) {
    if (!(scale > 0)) return vf_set1(0.0f);
    at = at / vf_set1(scale);
    at = vf_select(at > vf_set1(level), vf_set1(level), at);
    return vf_select(at < vf_set1(-level), vf_set1(-level), at);
}

/* Up to STRETCH numbers divided by the scale and rounded; zeros up to a multiple of 16. */
static void to_integers(const float *x, float scale, int64_t n, int32_t *out) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to the nearest integer, ties to even */
    float padded[STRETCH] = {0};
    memcpy(padded, x, (size_t)n * 4);
    for (int64_t i = 0; i < n; i += VW) {
        vf at = scaled(vf_load(padded + i), scale, 127.0f);
        *(vi_unaligned *)(out + i) = (vi)(at + vf_set1(shift)) - (vi)vf_set1(shift);
    }
}

/* Four bytes after the other of one token's keys, groups `stride` bytes apart. */
static void store_keys(uint8_t *to, int64_t stride, const int32_t *whole, int64_t count) {
    uint8_t bytes[STRETCH];
    for (int64_t d = 0; d < STRETCH; d++) bytes[d] = (uint8_t)(whole[d] + KEY_OFFSET);
    for (int64_t d = 0; d < count; d += 4, to += stride) memcpy(to, bytes + d, 4);
}

/* Every fourth byte: those of the other tokens may be written by another thread at the same time. */
static void store_values(int8_t *to, int place, const int32_t *whole, int64_t count) {
#if VW == 16 && defined(__AVX512BW__)
    for (int64_t d = 0; d < count; d += VW)
        _mm512_mask_storeu_epi8(to + 4 * d, 0x1111111111111111ull << place,
                                _mm512_slli_epi32(_mm512_loadu_si512(whole + d), (unsigned)(8 * place)));
#else
    for (int64_t d = 0; d < count; d++) to[4 * d + place] = (int8_t)whole[d];
#endif
}

static void store_integers(const Cache *cache, char *head, int64_t offset, const float *key, const float *value) {
    float key_scale, value_scale;
    find_scales(cache, key, value, 127.0f, &key_scale, &value_scale);
    uint8_t *keys = (uint8_t *)head;
    int8_t *values = (int8_t *)(head + cache->values_at);
    int64_t block_size = cache->block_size, value_dim = cache->value_dim;
    int32_t whole[STRETCH] = {0};
    for (int64_t first = 0; first < cache->head_dim; first += STRETCH) {
        int64_t count = cache->head_dim - first < STRETCH ? cache->head_dim - first : STRETCH;
        to_integers(key + first, key_scale, count, whole);
        store_keys(keys + (first / 4 * block_size + offset) * 4, block_size * 4, whole, count);
        to_integers(value + first, value_scale, count, whole);
        store_values(values + (offset / 4 * value_dim + first) * 4, (int)(offset % 4), whole, count);
    }
    float *scales = (float *)(head + cache->scales_at);
    scales[offset] = key_scale;
    scales[block_size + offset] = value_scale;
}

#define E4M3_MOST 448.0f

/* Up to STRETCH numbers divided by the scale and rounded to 8 bits. */
static void to_e4m3(const float *x, float scale, int64_t n, uint8_t *out) {
    float padded[STRETCH] = {0};
    int32_t codes[STRETCH];
    memcpy(padded, x, (size_t)n * 4);
    for (int64_t i = 0; i < n; i += VW) *(vi_unaligned *)(codes + i) = e4m3_of(scaled(vf_load(padded + i), scale, E4M3_MOST));
    for (int64_t i = 0; i < n; i++) out[i] = (uint8_t)codes[i];
}

static void store_fp8(const Cache *cache, char *head, int64_t offset, const float *key, const float *value) {
    float key_scale, value_scale, *scales = (float *)(head + cache->scales_at);
    find_scales(cache, key, value, E4M3_MOST, &key_scale, &value_scale);
    uint8_t *keys = (uint8_t *)head, *values = (uint8_t *)(head + cache->values_at), code[STRETCH];
    for (int64_t first = 0; first < cache->head_dim; first += STRETCH) {
        int64_t count = cache->head_dim - first < STRETCH ? cache->head_dim - first : STRETCH;
        to_e4m3(key + first, key_scale, count, code);
        for (int64_t d = 0; d < count; d++) keys[(first + d) * cache->block_size + offset] = code[d];
        to_e4m3(value + first, value_scale, count, values + offset * cache->value_dim + first);
    }
    scales[offset] = key_scale * E4M3_UNIT;
    scales[cache->block_size + offset] = value_scale * E4M3_UNIT;
}

static void store_token(const Cache *cache, char *head, int64_t offset, const float *key, const float *value) {
    switch (cache->type) {
        case KV_FLOAT32: store_float32(cache, head, offset, key, value); break;
        case KV_FLOAT16: store_halves(cache, head, offset, key, value, KV_FLOAT16); break;
        case KV_BFLOAT16: store_halves(cache, head, offset, key, value, KV_BFLOAT16); break;
        case KV_FP8: store_fp8(cache, head, offset, key, value); break;
        default: store_integers(cache, head, offset, key, value);
    }
}

/* Has the lines fetched that a token is written to: one for every dimension of its key, or four dimensions of 8 bits. At a
 * step of a token for each sequence none of them is in a cache. */
static void expect_token(const Cache *cache, const char *head, int64_t offset) {
    int64_t bytes = kv_bytes(cache->type), step = cache->type == KV_INT8 ? 4 : 1, width = cache->value_dim * bytes * step;
    const char *key = head + offset * bytes * step, *value = head + cache->values_at + offset / step * width;
    for (int64_t d = 0; d < cache->head_dim; d += step) __builtin_prefetch(key + d * cache->block_size * bytes, 1, 3);
    for (int64_t at = 0; at < width; at += 64) __builtin_prefetch(value + at, 1, 3);
    if (!kv_has_scales(cache->type)) return;
    __builtin_prefetch(head + cache->scales_at + offset * 4, 1, 3);
    __builtin_prefetch(head + cache->scales_at + (cache->block_size + offset) * 4, 1, 3);
}

static int64_t store_kv_chunks(const void *args, const Step *step) {
    const StoreKv *a = args;
    /* Nanoseconds of a token: a cache line or two for each of its numbers' places, and some arithmetic. */
    return even_chunks(step_size(step, a->tokens), 4 * a->kv_heads * a->head_dim, step);
}

static void store_kv_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const StoreKv *a = args;
    Cache cache = cache_of(a->data, a->type, a->num_blocks, a->block_size, a->kv_heads, a->head_dim);
    int64_t tokens = step_size(step, a->tokens), end = chunk_begin(tokens, chunk + 1, of);
    for (int64_t t = chunk_begin(tokens, chunk, of); t < end; t++) {
        int64_t slot = a->slots[t], next = t + 1 < end ? a->slots[t + 1] : -1;
        if (slot >= a->num_blocks * a->block_size) {
            step_fail(step, BAD_SLOT);
            return;
        }
        int is_next = next >= 0 && next < a->num_blocks * a->block_size;
        for (int64_t g = 0; g < a->kv_heads; g++) {
            if (is_next) expect_token(&cache, head_of(&cache, next / a->block_size, g), next % a->block_size);
            if (slot < 0) continue;
            store_token(&cache, head_of(&cache, slot / a->block_size, g), slot % a->block_size,
                        a->key + t * a->key_stride + g * a->head_dim, a->value + t * a->value_stride + g * a->head_dim);
        }
    }
}

const Kernel kernel_store_kv = {store_kv_chunks, store_kv_run};
