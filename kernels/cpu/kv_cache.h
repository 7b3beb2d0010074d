/* Layout of the cache, float32. A block holds, for each key/value head, its keys transposed [D, B] and then its values
 * [B, V], V being D rounded up to a UNIT: UNIT tokens of one dimension fill a vector, and so do UNIT dimensions of one
 * token. */
#ifndef BATCHGEN_KV_CACHE_H
#define BATCHGEN_KV_CACHE_H

#include <stdint.h>

#include "op.h"
#include "simd.h"

typedef struct {
    float *data;
    int64_t num_blocks, block_size, kv_heads, head_dim;
    int64_t value_dim, head_floats, block_floats; /* derived */
} Cache;

static inline Cache cache_of(float *data, int64_t num_blocks, int64_t block_size, int64_t kv_heads,
                             int64_t head_dim) {
    int64_t value_dim = (head_dim + UNIT - 1) / UNIT * UNIT;
    int64_t head_floats = block_size * (head_dim + value_dim);
    Cache cache = {data, num_blocks, block_size, kv_heads, head_dim, value_dim, head_floats, head_floats * kv_heads};
    return cache;
}

/* Keys of one head of a block, [D, B]. */
static inline float *keys_of(const Cache *cache, int64_t block, int64_t head) {
    return cache->data + block * cache->block_floats + head * cache->head_floats;
}

/* Values of the same head, given its keys: [B, V]. */
static inline float *values_of(const Cache *cache, float *keys) { return keys + cache->head_dim * cache->block_size; }

#endif
