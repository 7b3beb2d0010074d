/* Scales of tokens whose keys and values are floats of 8 bits: scores and weights take them, so that the sums are those of the
 * small floats. */
#ifndef BATCHGEN_ATTENTION_SCALES_H
#define BATCHGEN_ATTENTION_SCALES_H

#include "attention_tile.h"

/* Scores of units [first, end). Of places that hold no token they become anything; they are not seen. */
static void scale_scores(const Scratch *scratch, int rows, const Units *units, int first, int end) {
    for (int u = first; u < end; u++)
        for (int v = 0; v < UNIT; v += VW) {
            vf scale = vf_load(units->scales[u] + v);
            for (int row = 0; row < rows; row++) {
                float *at = scratch->score + row * CHUNK + u * UNIT + v;
                vf_store(at, vf_load(at) * scale);
            }
        }
}

/* Weights of units [first, end). One of 0 stays 0, for the place may hold no token, and any scale. */
static void scale_weights(const Scratch *scratch, int rows, const Units *units, int64_t block_size, int first, int end) {
    for (int u = first; u < end; u++)
        for (int v = 0; v < UNIT; v += VW) {
            vf scale = vf_load(units->scales[u] + block_size + v), zero = vf_set1(0.0f);
            for (int row = 0; row < rows; row++) {
                float *at = scratch->score + row * CHUNK + u * UNIT + v;
                vf weight = vf_load(at);
                vf_store(at, vf_select(weight == zero, zero, weight * scale));
            }
        }
}

#endif
