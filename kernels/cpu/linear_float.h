/* The linear layer on float32, for kernels that use its results without writing them all out (linear.c). */
#ifndef BATCHGEN_LINEAR_FLOAT_H
#define BATCHGEN_LINEAR_FLOAT_H

#include <stdint.h>

#include "simd.h"

#define LINEAR_PANEL (2 * VW) /* columns of a panel */
#if VW == 16
#define LINEAR_ROWS 12 /* of a tile */
#elif VW == 8
#define LINEAR_ROWS 6
#else
#define LINEAR_ROWS 4
#endif
/* Longest piece of K. A tile's rows of it stay in the L1 cache; error grows with the square root of a piece's length. */
#define LINEAR_PIECE 384
/* Floats of weight that are kept in the L2 cache while all rows pass over them. */
#define LINEAR_RESIDENT (80 * 1024)

typedef struct {
    const float *x; /* [M, K] */
    int64_t x_stride;
    const float *packed;
    const float *bias; /* [N], or NULL */
    float *out;        /* [M, N] */
    int64_t rows, columns, depth; /* M (may be a size of the step), N, K */
} LinearFloat;

/* One piece of K of some panels. */
typedef struct {
    int64_t panel, panels; /* the first, and how many */
    int64_t start, depth;  /* the first input, and how many */
    const float *weight;   /* [panels][depth][PANEL], the panels `panel_stride` floats apart */
    int64_t panel_stride;
    /* What is fetched into the L2 cache meanwhile: for each panel, `next_stride` apart, so many bytes for each input. */
    const char *next;
    int64_t next_stride, next_bytes;
} LinearPiece;

/* Inputs of a piece: those of equal ones, the last of which may be shorter. */
static inline int64_t linear_piece(int64_t depth) {
    int64_t pieces = (depth + LINEAR_PIECE - 1) / LINEAR_PIECE;
    return pieces ? (depth + pieces - 1) / pieces : 1;
}

/* Panels whose pieces stay in the L2 cache. */
static inline int64_t linear_resident(int64_t depth) {
    int64_t resident = LINEAR_RESIDENT / (linear_piece(depth) * LINEAR_PANEL);
    return resident < 1 ? 1 : resident;
}

/* Rows [row, row_end) times a piece, the first row and panel at `out`: stored where the piece is the first, else added. */
void linear_float_piece(const LinearFloat *args, int64_t row, int64_t row_end, const LinearPiece *piece, float *out,
                        int64_t out_stride);

/* Rows [row, row_end) times panels [panel, panel_end), the first of both at `out`: the bits of the whole product. */
void linear_float_panels(const LinearFloat *args, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end,
                         float *out, int64_t out_stride);

#endif
