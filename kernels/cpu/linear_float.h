/* The linear layer on float32, for kernels that use its results without writing them all out (linear.c). */
#ifndef BATCHGEN_LINEAR_FLOAT_H
#define BATCHGEN_LINEAR_FLOAT_H

#include <stdint.h>

#include "amx.h"
#include "simd.h"

#define LINEAR_PANEL (2 * VW) /* columns of a panel */

#define LINEAR_GROUP 64          /* rows that tiles multiply at once, at most */
#define FEW_ROWS 2               /* that vectors multiply faster */

typedef struct {
    const float *x; /* [M, K] */
    int64_t x_stride;
    const void *cut; /* x in pieces (linear_float_amx.c), or NULL: multiplied by vectors as it is */
    const float *packed;
    const float *bias; /* [N], or NULL */
    float *out;        /* [M, N] */
    int64_t rows, columns, depth; /* M (may be a size of the step), N, K */
} LinearFloat;

/* Rows of a group: groups are of even size. */
static inline int64_t linear_group(int64_t rows) {
    int64_t groups = (rows + LINEAR_GROUP - 1) / LINEAR_GROUP;
    return groups ? (rows + groups - 1) / groups : 1;
}

/* Rows [row, row_end) of all `rows`, times panels [panel, panel_end), the first of both at `out`: the bits of the whole
 * product. The range is whole groups, or one row. Returns 0 or an error code. */
int linear_float_panels(const LinearFloat *args, int64_t rows, int64_t row, int64_t row_end, int64_t panel,
                        int64_t panel_end, float *out, int64_t out_stride);

/* The same by AMX for whole groups, and by vectors for few rows. */
int linear_float_amx(const LinearFloat *args, int64_t rows, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end,
                     float *out, int64_t out_stride);
int linear_float_few(const LinearFloat *args, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end, float *out,
                     int64_t out_stride);

#endif
