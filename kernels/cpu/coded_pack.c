/* Packs codes, a byte each, into panels of a few bits, and what belongs to their groups beside them (coded.h). */
#include <string.h>

#include "coded.h"

#define INPUTS 64 /* at a time: their bytes stay in the L1 cache */

/* Lowest bits of PANEL codes into one plane of so many bits; returns the plane's end. */
INLINE uint8_t *pack_plane(const uint8_t *codes, uint8_t *to, const int below, const int bits) {
    const int bytes = PANEL * bits / 8, mask = (1 << bits) - 1;
    for (int j = 0; j < bytes; j++) {
        int byte = 0;
        for (int i = 0; i < 8 / bits; i++) byte |= (codes[bits == 1 ? 8 * j + i : j + i * bytes] >> below & mask) << i * bits;
        to[j] = (uint8_t)byte;
    }
    return to + bytes;
}

INLINE void pack_inputs(const uint8_t (*codes)[PANEL], int64_t count, uint8_t *to, const int bits) {
    for (int64_t k = 0; k < count; k++) {
        if (bits == 8) to = pack_plane(codes[k], to, 0, 8);
        if (bits & 4) to = pack_plane(codes[k], to, 0, 4);
        if (bits & 2) to = pack_plane(codes[k], to, bits & 4, 2);
        if (bits & 1) to = pack_plane(codes[k], to, bits & 6, 1);
    }
}

/* codes [columns, depth], a byte each -> packed, zeros past the last column. */
void bg_coded_pack(const uint8_t *codes, uint8_t *packed, int64_t columns, int64_t depth, int64_t bits, int threads) {
    int64_t bytes = coded_bytes(bits);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < coded_panels(columns); panel++) {
        uint8_t block[INPUTS][PANEL] = {{0}}, *to = packed + panel * depth * bytes;
        int64_t width = columns - panel * PANEL < PANEL ? columns - panel * PANEL : PANEL;
        for (int64_t k = 0; k < depth; k += INPUTS, to += INPUTS * bytes) {
            int64_t count = k + INPUTS < depth ? INPUTS : depth - k;
            for (int64_t c = 0; c < width; c++) {
                const uint8_t *row = codes + (panel * PANEL + c) * depth + k;
                for (int64_t i = 0; i < count; i++) block[i][c] = row[i];
            }
            switch (bits) {
#define CASE(BITS) case BITS: pack_inputs(block, count, to, BITS); break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
            }
        }
    }
}

INLINE void pack_group(const char *from, char *to, int64_t width, int64_t groups, const int bytes) {
    for (int64_t c = 0; c < width; c++) memcpy(to + c * bytes, from + c * groups * bytes, (size_t)bytes);
}

/* values [columns, groups] of 1, 2 or 4 bytes -> packed [panels][groups][PANEL], zeros past the last column. */
void bg_coded_pack_groups(const char *values, char *packed, int64_t columns, int64_t groups, int64_t bytes, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < coded_panels(columns); panel++) {
        int64_t width = columns - panel * PANEL < PANEL ? columns - panel * PANEL : PANEL;
        char *to = packed + panel * groups * PANEL * bytes;
        memset(to, 0, (size_t)(groups * PANEL * bytes));
        for (int64_t g = 0; g < groups; g++, to += PANEL * bytes) {
            const char *from = values + (panel * PANEL * groups + g) * bytes;
            if (bytes == 1) pack_group(from, to, width, groups, 1);
            else if (bytes == 2) pack_group(from, to, width, groups, 2);
            else pack_group(from, to, width, groups, 4);
        }
    }
}
