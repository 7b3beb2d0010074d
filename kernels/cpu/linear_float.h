/* The linear layer on float32, for kernels that use its results without writing them all out (linear.c). */
#ifndef BATCHGEN_LINEAR_FLOAT_H
#define BATCHGEN_LINEAR_FLOAT_H

#include <stdint.h>

#include "simd.h"

#define LINEAR_PANEL (2 * VW) /* columns of a panel */

typedef struct {
    const float *x; /* [M, K] */
    int64_t x_stride;
    const float *packed;
    const float *bias; /* [N], or NULL */
    float *out;        /* [M, N] */
    int64_t rows, columns, depth; /* M (may be a size of the step), N, K */
} LinearFloat;

/* Rows [row, row_end) times panels [panel, panel_end), the first of both at `out`: the bits of the whole product. */
void linear_float_panels(const LinearFloat *args, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end,
                         float *out, int64_t out_stride);

#endif
