/* Walks over one row of logits: largest values, sums of weights, the ids at or above a bound, the k-th largest.
 *
 * A row is cut into stretches. What is known of a stretch (its largest value, the sum of its weights) spares most of
 * the later walks, and every sum is taken in one order that the row alone fixes. */
#ifndef BATCHGEN_ROW_SCAN_H
#define BATCHGEN_ROW_SCAN_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "op.h"
#include "simd.h"
#include "stretch.h"


/* Below this many logits a second thread costs more than it brings. */
#define SERIAL_LOGITS 131072

/* Memory of one thread, for rows of n values. All but `memory` are parts of it, with room for a stretch more. */
typedef struct {
    char *memory;
    double *sums;                           /* per stretch */
    float *maxima;                          /* per stretch */
    float *weights, *list, *active, *spare; /* per value */
    int32_t *ids;                           /* per value */
} Space;

static inline int take_space(Space *space, int64_t n) {
    int64_t stretches = stretches_of(n), values = (stretches + 1) * STRETCH;
    size_t bytes = (size_t)(stretches * 8 + (stretches + STRETCH) * 4 + values * 20);
    space->memory = malloc(bytes);
    if (!space->memory) return 0;
    space->sums = (double *)space->memory;
    space->maxima = (float *)(space->sums + stretches);
    space->weights = space->maxima + stretches + STRETCH;
    space->list = space->weights + values;
    space->active = space->list + values;
    space->spare = space->active + values;
    space->ids = (int32_t *)(space->spare + values);
    return 1;
}

/* Fills space->maxima; returns the largest value, or NaN if the row holds one. */
static inline float scan_maxima(const float *x, int64_t n, Space *space) {
    vi odd = vi_set1(0);
    int64_t s = 0;
    for (; (s + 1) * STRETCH <= n; s++) {
        vf most = vf_load(x + s * STRETCH);
        odd |= most != most;
        for (int i = VW; i < STRETCH; i += VW) {
            vf value = vf_load(x + s * STRETCH + i);
            odd |= value != value;
            most = vf_max(most, value);
        }
        space->maxima[s] = vf_max_lane(most);
    }
    int has_nan = 0;
    if (s * STRETCH < n) {
        float most = -INFINITY;
        for (int64_t i = s * STRETCH; i < n; i++) {
            has_nan |= x[i] != x[i];
            most = x[i] > most ? x[i] : most;
        }
        space->maxima[s++] = most;
    }
    for (int i = 0; i < VW; i++) has_nan |= odd[i];
    float top = -INFINITY;
    for (int64_t t = 0; t < s; t++) top = space->maxima[t] > top ? space->maxima[t] : top;
    return has_nan ? NAN : top;
}

/* The lowest id whose value is `top`, the row's largest. */
static inline int64_t first_of(const float *x, int64_t n, float top, const Space *space) {
    int64_t s = 0;
    while (space->maxima[s] != top) s++;
    int64_t i = s * STRETCH;
    while (i < n - 1 && x[i] != top) i++;
    return i;
}

/* Weights e^((x - top) * scale), and zeros up to a whole stretch. In place is allowed. */
static inline void weigh(const float *x, int64_t count, float top, float scale, float *weights) {
    int64_t i = 0;
    for (; i + VW <= count; i += VW)
        vf_store(weights + i, vf_exp((vf_load(x + i) - vf_set1(top)) * vf_set1(scale)));
    int64_t end = stretches_of(count) * STRETCH;
    if (i < count) {
        float edge[VW];
        for (int j = 0; j < VW; j++) edge[j] = i + j < count ? x[i + j] : -INFINITY;
        vf_store(weights + i, vf_exp((vf_load(edge) - vf_set1(top)) * vf_set1(scale)));
        i += VW;
    }
    if (i < end) memset(weights + i, 0, (size_t)(end - i) * 4);
}

/* The sum of any number of weights. */
static inline double plain_sum(const float *weights, int64_t count) {
    Sums sums = {0};
    int64_t i = 0;
    for (; i + UNIT <= count; i += UNIT) add_unit(&sums, weights + i);
    double sum = sum_of(&sums);
    for (; i < count; i++) sum += (double)weights[i];
    return sum;
}

/* Fills space->weights and space->sums for a whole row whose maxima are known; returns the total. */
static inline double weigh_row(const float *x, int64_t n, float top, float scale, Space *space) {
    double total = 0.0;
    for (int64_t s = 0; s * STRETCH < n; s++) {
        int64_t begin = s * STRETCH, count = n - begin < STRETCH ? n - begin : STRETCH;
        if ((space->maxima[s] - top) * scale < EXP_LOWEST) {
            memset(space->weights + begin, 0, STRETCH * 4);
            space->sums[s] = 0.0;
            continue;
        }
        weigh(x + begin, count, top, scale, space->weights + begin);
        space->sums[s] = stretch_sum(space->weights + begin);
        total += space->sums[s];
    }
    return total;
}

/* Fills space->sums for weights that zeros follow up to a whole stretch; returns the total. */
static inline double sum_list(const float *weights, int64_t count, Space *space) {
    double total = 0.0;
    for (int64_t s = 0; s * STRETCH < count; s++) total += space->sums[s] = stretch_sum(weights + s * STRETCH);
    return total;
}

/* Appends those of x[0..count) that are `bound` or more to `values`, and their ids to `ids`; returns how many there
 * are now. Up to a vector past the last is written over. */
static inline int64_t gather(const float *x, int64_t count, int64_t first_id, float bound, float *values, int32_t *ids,
                      int64_t found) {
    int64_t i = 0;
#if VW == 16
    __m512i id = _mm512_add_epi32((__m512i)vi_lanes(), _mm512_set1_epi32((int32_t)first_id));
    for (; i + VW <= count; i += VW, id = _mm512_add_epi32(id, _mm512_set1_epi32(VW))) {
        __m512 value = _mm512_loadu_ps(x + i);
        __mmask16 is_in = _mm512_cmp_ps_mask(value, _mm512_set1_ps(bound), _CMP_GE_OQ);
        if (!is_in) continue;
        _mm512_storeu_ps(values + found, _mm512_maskz_compress_ps(is_in, value));
        _mm512_storeu_si512(ids + found, _mm512_maskz_compress_epi32(is_in, id));
        found += __builtin_popcount(is_in);
    }
#endif
    for (; i < count; i++) {
        values[found] = x[i];
        ids[found] = (int32_t)(first_id + i);
        found += x[i] >= bound;
    }
    return found;
}

/* As `gather`, of a whole row whose maxima are known, into space->list and space->ids. */
static inline int64_t gather_row(const float *x, int64_t n, float bound, Space *space) {
    int64_t found = 0;
    for (int64_t s = 0; s * STRETCH < n; s++) {
        if (space->maxima[s] < bound) continue;
        int64_t begin = s * STRETCH, count = n - begin < STRETCH ? n - begin : STRETCH;
        found = gather(x + begin, count, begin, bound, space->list, space->ids, found);
    }
    return found;
}

/* Three values that a fixed sequence of places picks, and the middle one of them: no order of the values makes the
 * selections below slow, but on purpose. */
static inline float middle_of_three(const float *values, int64_t count, uint64_t *state) {
    float picked[3];
    for (int i = 0; i < 3; i++) {
        *state = *state * 6364136223846793005ULL + 1442695040888963407ULL;
        picked[i] = values[(*state >> 33) % (uint64_t)count];
    }
    float a = picked[0], b = picked[1], c = picked[2];
    return a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
}

/* Moves the values above the pivot to the front of `active`, those below it to the front of `spare`. Up to a vector
 * past the last is written over. */
static inline void partition(float *active, float *spare, int64_t count, float pivot, int64_t *larger,
                             int64_t *smaller) {
    int64_t above = 0, below = 0, i = 0;
#if VW == 16
    for (; i + VW <= count; i += VW) {
        __m512 value = _mm512_loadu_ps(active + i), edge = _mm512_set1_ps(pivot);
        __mmask16 is_above = _mm512_cmp_ps_mask(value, edge, _CMP_GT_OQ);
        __mmask16 is_below = _mm512_cmp_ps_mask(value, edge, _CMP_LT_OQ);
        _mm512_storeu_ps(active + above, _mm512_maskz_compress_ps(is_above, value));
        _mm512_storeu_ps(spare + below, _mm512_maskz_compress_ps(is_below, value));
        above += __builtin_popcount(is_above);
        below += __builtin_popcount(is_below);
    }
#endif
    for (; i < count; i++) {
        float value = active[i];
        active[above] = value;
        above += value > pivot;
        spare[below] = value;
        below += value < pivot;
    }
    *larger = above;
    *smaller = below;
}

/* The k-th largest of `active`, 1 <= k <= count; both arrays are written over. */
static inline float kth_largest(float *active, float *spare, int64_t count, int64_t k) {
    uint64_t state = 1;
    for (;;) {
        int64_t larger, smaller;
        float pivot = middle_of_three(active, count, &state);
        partition(active, spare, count, pivot, &larger, &smaller);
        int64_t equal = count - larger - smaller;
        if (k <= larger) {
            count = larger;
        } else if (k <= larger + equal) {
            return pivot;
        } else {
            k -= larger + equal;
            count = smaller;
            float *other = active;
            active = spare;
            spare = other;
        }
    }
}

/* Gathers the k largest of a row whose maxima are known, and those equal to the k-th, 1 <= k <= n, ids ascending, into
 * space->list and space->ids; returns how many they are, and the k-th. */
static inline int64_t gather_largest(const float *x, int64_t n, int64_t k, Space *space, float *kth) {
    int64_t stretches = stretches_of(n);
    float bound = -INFINITY;
    if (k <= stretches) {
        /* The k-th largest of the stretches' maxima is no larger than the k-th largest of all. */
        memcpy(space->active, space->maxima, (size_t)stretches * 4);
        bound = kth_largest(space->active, space->spare, stretches, k);
    }
    int64_t found = gather_row(x, n, bound, space);
    memcpy(space->active, space->list, (size_t)found * 4);
    *kth = kth_largest(space->active, space->spare, found, k);
    int64_t kept = 0;
    for (int64_t i = 0; i < found; i++) {
        float value = space->list[i];
        space->list[kept] = value;
        space->ids[kept] = space->ids[i];
        kept += value >= *kth;
    }
    return kept;
}

#endif
