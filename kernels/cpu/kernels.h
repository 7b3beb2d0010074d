/* The table of kernels. A kernel `name` is defined in one source file as `const Kernel kernel_name = {chunks, run};` and has
 * a line here; the program finds it by its row, Python finds the row by its name. */
#ifndef BATCHGEN_KERNELS_H
#define BATCHGEN_KERNELS_H

#include "op.h"

#define ALL_KERNELS(X) \
    X(store_kv) \
    X(plan_attention) \
    X(attention) \
    X(linear) \
    X(greedy_linear) \
    X(greedy_linear_int8) \
    X(greedy_pick) \
    X(rounding_distance) \
    X(greedy_screen) \
    X(greedy_screen_pick) \
    X(draw_linear_scan) \
    X(draw_linear_pick) \
    X(draw_linear_int8_scan) \
    X(draw_linear_int8_pick) \
    X(gather_packed) \
    X(gather_coded) \
    X(gather_rows) \
    X(rms_norm) \
    X(add_rms_norm) \
    X(rotary) \
    X(silu_mul) \
    X(linear_int8) \
    X(linear_coded) \
    X(lora) \
    X(lora_expand) \
    X(quantize) \
    X(rounding_loss) \
    X(kronecker) \
    X(norm_quantize) \
    X(silu_mul_quantize)

#define DECLARE(name) extern const Kernel kernel_##name;
ALL_KERNELS(DECLARE)
#undef DECLARE

/* Those whose chunks are begun in their order, by whoever is free: no thread has a share of its own. */
#define ORDERED_KERNELS(X) X(attention)

/* Those that say what memory their chunks read, in a `Reads reads_name`. */
#define READING_KERNELS(X) X(linear_int8)

#define DECLARE(name) extern Reads reads_##name;
READING_KERNELS(DECLARE)
#undef DECLARE

#endif
