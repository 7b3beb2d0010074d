/* Layout of the cache. A block holds, for each key/value head, its keys and then its values, D being the head's size and V
 * that rounded up to a UNIT:
 *
 *   floats    keys transposed [D, B], values [B, V]: UNIT tokens of one dimension fill a vector, and so do UNIT dimensions of
 *             one token.
 *   integers  keys [K / 4, B, 4] as bytes that are 128 too high, K being D rounded up to 4; values [B / 4, V, 4]; then the
 *             scales of keys [B] and of values [B] in float32. Four factors that are added up lie side by side, as products
 *             of bytes want them.
 *   fp8       laid out as floats: a byte each, 4 bits of exponent and 3 of fraction; then scales as those of integers are, but
 *             E4M3_UNIT times as large. */
#ifndef BATCHGEN_KV_CACHE_H
#define BATCHGEN_KV_CACHE_H

#include <stdint.h>

#include "op.h"
#include "simd.h"

/* What the cache holds; the numbers are the binding's too. */
enum { KV_FLOAT32, KV_FLOAT16, KV_BFLOAT16, KV_INT8, KV_FP8 };

#define KEY_OFFSET 128 /* bytes of keys are so much too high */

typedef struct {
    char *data;
    int64_t type, num_blocks, block_size, kv_heads, head_dim;
    int64_t value_dim, values_at, scales_at, head_bytes, block_bytes; /* derived; where in a head's bytes */
} Cache;

INLINE int64_t kv_bytes(const int64_t type) { return type == KV_FLOAT32 ? 4 : type >= KV_INT8 ? 1 : 2; }

/* Whether each token has a scale for its keys and one for its values. */
INLINE int kv_has_scales(const int64_t type) { return type >= KV_INT8; }

static inline Cache cache_of(char *data, int64_t type, int64_t num_blocks, int64_t block_size, int64_t kv_heads,
                             int64_t head_dim) {
    Cache cache = {data, type, num_blocks, block_size, kv_heads, head_dim, 0, 0, 0, 0, 0};
    int64_t key_dim = type == KV_INT8 ? (head_dim + 3) / 4 * 4 : head_dim;
    cache.value_dim = (head_dim + UNIT - 1) / UNIT * UNIT;
    cache.values_at = block_size * key_dim * kv_bytes(type);
    cache.scales_at = cache.values_at + block_size * cache.value_dim * kv_bytes(type);
    cache.head_bytes = cache.scales_at + (kv_has_scales(type) ? 2 * block_size * 4 : 0);
    cache.block_bytes = cache.head_bytes * kv_heads;
    return cache;
}

/* One head of a block: where its keys begin. */
static inline char *head_of(const Cache *cache, int64_t block, int64_t head) {
    return cache->data + block * cache->block_bytes + head * cache->head_bytes;
}

#endif
