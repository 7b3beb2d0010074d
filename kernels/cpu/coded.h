/* Weights of a few bits (kernels/coded.py): how they are packed, and what decodes them.
 *
 * Packed layout: [panels][K][PANEL * bits / 8] bytes of codes; scales and offsets [panels][groups][PANEL]. The bits of a code
 * lie in up to three planes, one after the other: four, two and one of them, the lowest first; with eight, a byte each. In a
 * plane of four bits byte j holds column j and, above, column j + PANEL / 2; in one of two bits columns j, j + PANEL / 4 and so
 * on; in one of single bits byte j holds columns 8j to 8j + 7. */
#ifndef BATCHGEN_CODED_H
#define BATCHGEN_CODED_H

#include "linear_float.h"

#define PANEL LINEAR_PANEL
#define MOST_BITS 8

/* What stands beside the scales of groups. */
enum { OFFSET_NONE, OFFSET_ZERO, OFFSET_LEAST, OFFSETS };

/* What codes stand for: themselves, an entry of the table, or a float of 4 bits of exponent and 3 of fraction. */
enum { VALUE_CODE, VALUE_TABLE, VALUE_E4M3 };

/* The weight of an operation. */
typedef struct {
    const uint8_t *codes;
    const char *scales;    /* of `scale_type`, a type of kv_cache.h */
    const char *offsets;   /* uint8 for OFFSET_ZERO, of `scale_type` for OFFSET_LEAST, else NULL */
    const float *table;    /* [2^bits], at least TABLE_ENTRIES; or NULL */
    const int32_t *groups; /* [K], or NULL: k / group_size */
    int64_t columns, depth; /* N, K */
    int64_t bits, value, offset, scale_type, group_size, group_count;
} Coded;

#define TABLE_ENTRIES 32 /* that a table has at least, so that registers can be filled with them */

static inline int64_t coded_panels(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

/* Bytes of a panel's codes for one input. */
static inline int64_t coded_bytes(int64_t bits) { return PANEL * bits / 8; }

/* Writes inputs [k, end) of a panel to `to`, [end - k][PANEL]: the floats that Coded.dense gives. */
typedef void CodedDecode(const Coded *coded, int64_t panel, int64_t k, int64_t end, float *to);

CodedDecode *coded_decoder(const Coded *coded);

/* The same, multiplied by one row of x: writes the sums of inputs [k, end), a chain from zero for each column. */
typedef void CodedProduct(const Coded *coded, int64_t panel, int64_t k, int64_t end, const float *x, float *sums);

CodedProduct *coded_multiplier(const Coded *coded);

#endif
