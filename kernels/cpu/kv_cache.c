/* Writing of the cache. */
#include <string.h>

#include "kv_cache.h"

/* key, value [tokens, kv_heads, head_dim], dense within a token; slot -1 is skipped. */
int64_t bg_store_kv(const float *key, int64_t key_stride, const float *value, int64_t value_stride,
                    const int32_t *slots, int64_t tokens, float *data, int64_t num_blocks, int64_t block_size,
                    int64_t kv_heads, int64_t head_dim, int threads) {
    Cache cache = cache_of(data, num_blocks, block_size, kv_heads, head_dim);
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] >= num_blocks * block_size) return BAD_SLOT;
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens > 8)
    for (int64_t t = 0; t < tokens; t++) {
        if (slots[t] < 0) continue;
        int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
        for (int64_t g = 0; g < kv_heads; g++) {
            float *keys = keys_of(&cache, block, g);
            const float *from = key + t * key_stride + g * head_dim;
            for (int64_t d = 0; d < head_dim; d++) keys[d * block_size + offset] = from[d];
            memcpy(values_of(&cache, keys) + offset * cache.value_dim, value + t * value_stride + g * head_dim,
                   (size_t)head_dim * 4);
        }
    }
    return 0;
}
