/* Linear layer on 8-bit integers: what its paths share.
 *
 * Packed weight: [panels][padded K / 4][PANEL][4] bytes, columns past N zero; then, for each column of the panels, the
 * weight's scale, the bias and the sum of its weights. 16 groups of 4 inputs of a panel are one tile of AMX; one group is
 * a vector of 16 lanes for instructions that multiply 4 pairs of bytes into a lane. All builds share the layout.
 *
 * Sums are exact integers, so their bits depend on nothing; the float code that follows has one order. */
#ifndef BATCHGEN_LINEAR_INT8_H
#define BATCHGEN_LINEAR_INT8_H

#include <string.h>

#include "amx.h"
#include "op.h"
#include "simd.h"

#define PANEL 16 /* columns */

typedef struct {
    const int8_t *values; /* [rows][planes][depth], `stride` bytes between rows */
    int64_t stride;
    int64_t planes; /* 1; or 2: the high byte (signed) and the low byte (unsigned) */
    const float *scale; /* [rows] */
    const int8_t *packed;
    float *out; /* [rows][columns], `out_stride` floats between rows */
    int64_t out_stride;
    int64_t rows; /* may be a size of the step */
    int64_t columns, depth; /* N, K padded */
} LinearInt8;

INLINE int64_t panels_of(int64_t columns) { return (columns + PANEL - 1) / PANEL; }
INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* What stands behind the panels. */
INLINE const float *column_scales(const LinearInt8 *p) {
    return (const float *)(p->packed + panels_of(p->columns) * PANEL * p->depth);
}
INLINE const float *column_biases(const LinearInt8 *p) { return column_scales(p) + panels_of(p->columns) * PANEL; }
INLINE const int32_t *column_sums(const LinearInt8 *p) {
    return (const int32_t *)(column_biases(p) + panels_of(p->columns) * PANEL);
}

/* Integer sums of some rows over a panel, [rows][PANEL], `next` numbers from row to row, as floats into `out`; `low` may be
 * NULL. 256 times a float is exact. */
INLINE void finish_rows(const LinearInt8 *p, const int32_t *high, const int32_t *low, int64_t next, int64_t row,
                        int64_t rows, int64_t panel) {
    vf weight_scale[VU], bias[VU];
    for (int v = 0; v < VU; v++) {
        weight_scale[v] = vf_load(column_scales(p) + panel * PANEL + v * VW);
        bias[v] = vf_load(column_biases(p) + panel * PANEL + v * VW);
    }
    const float *scales = p->scale + row;
    float *out = p->out + row * p->out_stride + panel * PANEL, edge[PANEL];
    int64_t out_stride = p->out_stride, columns = p->columns - panel * PANEL;
    for (int64_t i = 0; i < rows; i++, out += out_stride, high += next) {
        float *to = columns < PANEL ? edge : out;
        vf scale = vf_set1(scales[i]);
        for (int v = 0; v < VU; v++) {
            vf sum = __builtin_convertvector(*(const vi_unaligned *)(high + v * VW), vf);
            if (low) {
                vf rest = __builtin_convertvector(*(const vi_unaligned *)(low + i * next + v * VW), vf);
                sum = vf_fma(sum, vf_set1(256.0f), rest);
            }
            vf_store(to + v * VW, sum * scale * weight_scale[v] + bias[v]);
        }
        if (columns < PANEL) memcpy(out, edge, (size_t)columns * 4);
    }
}

/* Rows [row, row_end) times panels [panel, panel_end), by each way there is to do it. Returns 0 or an error code. */
int int8_region_vector(const LinearInt8 *p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end);
int int8_region_amx(const LinearInt8 *p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end);

/* Part of a product into memory of the caller's: out[0] is row `row`, first column of `panel`. It uses the thread's
 * scratch. Returns 0 or an error code. */
int linear_int8_panels(const LinearInt8 *p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end, float *out,
                       int64_t out_stride);

#endif
