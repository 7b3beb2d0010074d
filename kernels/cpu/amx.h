/* AMX: tiles of up to 16 rows of 64 bytes, multiplied by one instruction. */
#ifndef BATCHGEN_AMX_H
#define BATCHGEN_AMX_H

#include <stdint.h>

/* Whether this process may use AMX: built for it, and the system lets it. */
int amx_is_usable(void);

#if defined(__AMX_INT8__) && defined(__linux__)
#define HAS_AMX 1
#include <immintrin.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) TileConfig;

static inline void load_tile_config(const TileConfig *config) {
    __asm__ volatile("" : : "r"(config) : "memory"); /* GCC 12 takes only the first 8 bytes for read */
    _tile_loadconfig(config);
}
#else
#define HAS_AMX 0
#endif

#endif
