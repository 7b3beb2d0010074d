/* Rounding weights to codes of a few bits or to floats of 8: a scale for each group of inputs, found by search, and
 * what an input's rounding does to the outputs taken back by the inputs after it.
 *
 * VW rows are rounded at a time, one in each lane, their weights transposed to [inputs][VW]; so a row's result
 * depends neither on the rows beside it nor on threads. See kernels/rounding.py for what is computed. */
#include "simd.h"
#include <stdlib.h>

/* As Grid.kind in kernels/rounding.py. */
enum { LEAST, ZERO, SYMMETRIC, E4M3 };

/* Parts of a group's whole range that are tried, and how often codes and line improve each other. */
#define NUM_PARTS 8
#define NUM_ROUNDS 2

typedef struct {
    int kind;
    float top, half;      /* of integers: the largest code, and the one that is zero */
    int fraction_bits;    /* of scales and least values as they are kept; 23: all */
    float lowest_power;   /* of these */
} Grid;

typedef struct { vf scale, offset; } Line;

INLINE vf vf_min(vf a, vf b) { return vf_select(a < b, a, b); }
INLINE vf nearest_whole(vf x) {
    vf shift = vf_set1(12582912.0f); /* 1.5 * 2^23 */
    return (x + shift) - shift;
}

/* The nearest float with so many bits of fraction; below the lowest power of two they get fewer. */
INLINE vf fewer_bits(vf x, int bits, float lowest) {
    vf power = (vf)((vi)x & vi_set1(0x7f800000));
    power = vf_max(power, vf_set1(lowest));
    vf inverse = (vf)(vi_set1(0x7f000000) - (vi)power);
    float steps = (float)(1 << bits);
    return nearest_whole(x * inverse * vf_set1(steps)) * (power * vf_set1(1.0f / steps));
}

INLINE vf kept(vf x, const Grid *grid) {
    return grid->fraction_bits >= 23 ? x : fewer_bits(x, grid->fraction_bits, grid->lowest_power);
}

INLINE vf inverse_of(vf scale) {
    return vf_set1(1.0f) / vf_select(scale == vf_set1(0.0f), vf_set1(1.0f), scale);
}

/* The value on the grid that is nearest to a weight: a code, or a float of 8 bits. */
INLINE vf value_of(vf w, const Line *line, vf inverse, const Grid *grid) {
    if (grid->kind == E4M3) {
        vf x = vf_max(vf_min(w * inverse, vf_set1(448.0f)), vf_set1(-448.0f));
        return fewer_bits(x, 3, 0x1p-6f);
    }
    vf x = vf_fma(w, inverse, line->offset);
    if (grid->kind == LEAST) x = (w - line->offset) * inverse;
    return nearest_whole(vf_max(vf_min(x, vf_set1(grid->top)), vf_set1(0.0f)));
}

/* What a value stands for. */
INLINE vf decoded(vf value, const Line *line, const Grid *grid) {
    if (grid->kind == E4M3) return value * line->scale;
    if (grid->kind == LEAST) return value * line->scale + line->offset;
    return (value - line->offset) * line->scale;
}

/* The line to begin with, which reaches over a part of the range. */
static Line first_line(vf low, vf high, float part, const Grid *grid) {
    vf top = vf_set1(grid->top), reach = vf_max(vf_max(high, -high), vf_max(low, -low)), zero = vf_set1(0.0f);
    switch (grid->kind) {
    case LEAST: {
        vf half = (high - low) * vf_set1(0.5f * part);
        return (Line){half * vf_set1(2.0f / grid->top), (high + low) * vf_set1(0.5f) - half};
    }
    case ZERO: {
        vf from = vf_min(low, zero) * vf_set1(part), to = vf_max(high, zero) * vf_set1(part);
        vf scale = (to - from) / top;
        vf at = nearest_whole(-from * inverse_of(scale));
        return (Line){scale, vf_max(vf_min(at, top), zero)};
    }
    case SYMMETRIC:
        return (Line){reach * vf_set1(part / (grid->half - 1.0f)), vf_set1(grid->half)};
    default:
        return (Line){reach * vf_set1(part / 448.0f), zero};
    }
}

/* The line of least squared error for the codes that a line gives; as it was where that is not known. */
static Line better_line(const float *w, const float *counts, int64_t size, Line line, const Grid *grid) {
    vf inverse = inverse_of(line.scale), nothing = vf_set1(0.0f);
    int has_offset = grid->kind == LEAST || grid->kind == ZERO;
    vf whole = nothing, sum_v = nothing, sum_w = nothing, sum_vv = nothing, sum_vw = nothing;
    for (int64_t k = 0; k < size; k++) {
        vf x = vf_load(w + k * VW), count = vf_set1(counts[k]);
        vf v = value_of(x, &line, inverse, grid);
        if (grid->kind == SYMMETRIC) v = v - line.offset;
        vf cv = count * v;
        sum_vv = vf_fma(cv, v, sum_vv);
        sum_vw = vf_fma(cv, x, sum_vw);
        if (!has_offset) continue;
        whole = whole + count;
        sum_v = sum_v + cv;
        sum_w = vf_fma(count, x, sum_w);
    }
    if (!has_offset) {
        vi is_known = sum_vv > nothing;
        line.scale = vf_select(is_known, sum_vw / vf_select(is_known, sum_vv, vf_set1(1.0f)), line.scale);
        return line;
    }
    vf spread = sum_vv * whole - sum_v * sum_v;
    vi is_known = spread > vf_set1(1e-6f) * sum_vv * whole;
    vf scale = (sum_vw * whole - sum_v * sum_w) / vf_select(is_known, spread, vf_set1(1.0f));
    vf offset = (sum_w - scale * sum_v) / whole;
    if (grid->kind == ZERO) {
        /* The nearest whole zero, and the best scale beside it. */
        offset = nearest_whole(vf_max(vf_min(-offset * inverse_of(scale), vf_set1(grid->top)), nothing));
        vf squares = sum_vv - vf_set1(2.0f) * offset * sum_v + offset * offset * whole;
        is_known = is_known & (squares > nothing);
        scale = (sum_vw - offset * sum_w) / vf_select(is_known, squares, vf_set1(1.0f));
    }
    line.scale = vf_select(is_known, scale, line.scale);
    line.offset = vf_select(is_known, offset, line.offset);
    return line;
}

static vf squared_error(const float *w, const float *counts, int64_t size, Line line, const Grid *grid) {
    vf inverse = inverse_of(line.scale), sum = vf_set1(0.0f);
    for (int64_t k = 0; k < size; k++) {
        vf x = vf_load(w + k * VW);
        vf error = x - decoded(value_of(x, &line, inverse, grid), &line, grid);
        sum = vf_fma(error * vf_set1(counts[k]), error, sum);
    }
    return sum;
}

static Line search(const float *w, const float *counts, int64_t size, const Grid *grid) {
    static const float parts[2][NUM_PARTS] = {
        {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f, 0.6f},
        /* Floats are as fine at any scale: where the powers of two fall is what is tried. */
        {1.0f, 0.9375f, 0.875f, 0.8125f, 0.75f, 0.6875f, 0.625f, 0.5625f},
    };
    vf low = vf_load(w), high = low, least = vf_set1(0.0f);
    for (int64_t k = 1; k < size; k++) {
        low = vf_min(low, vf_load(w + k * VW));
        high = vf_max(high, vf_load(w + k * VW));
    }
    Line best = {least, least};
    for (int number = 0; number < NUM_PARTS; number++) {
        Line line = first_line(low, high, parts[grid->kind == E4M3][number], grid);
        for (int round = 0; round < NUM_ROUNDS; round++) line = better_line(w, counts, size, line, grid);
        line.scale = kept(line.scale, grid);
        if (grid->kind == LEAST) line.offset = kept(line.offset, grid);
        vf error = squared_error(w, counts, size, line, grid);
        vi is_better = error < least;
        if (!number) is_better = vi_set1(-1);
        least = vf_select(is_better, error, least);
        best.scale = vf_select(is_better, line.scale, best.scale);
        best.offset = vf_select(is_better, line.offset, best.offset);
    }
    return best;
}

typedef struct {
    int64_t inputs, num_groups, group_size, block;
    const float *factor, *counts;
    const int32_t *groups;
    int searches;
    Grid grid;
} Task;

/* Rounds the tile w [inputs][VW] in place. lines [num_groups], errors [block][VW]. */
static void round_tile(const Task *task, float *w, Line *lines, float *errors) {
    int64_t inputs = task->inputs, size = task->group_size;
    for (int64_t begin = 0; begin < inputs; begin += task->block) {
        int64_t end = begin + task->block < inputs ? begin + task->block : inputs;
        for (int64_t k = begin; k < end; k++) {
            int64_t group = task->groups ? task->groups[k] : k / size;
            if (task->searches && k % size == 0)
                lines[group] = search(w + k * VW, task->counts + k, inputs - k < size ? inputs - k : size, &task->grid);
            Line line = lines[group];
            vf x = vf_load(w + k * VW), value = value_of(x, &line, inverse_of(line.scale), &task->grid);
            vf error = x - decoded(value, &line, &task->grid);
            vf_store(w + k * VW, value);
            if (!task->factor) continue;
            vf_store(errors + (k - begin) * VW, error);
            for (int64_t j = k + 1; j < end; j++) {
                float *to = w + j * VW;
                vf_store(to, vf_fma(error, vf_set1(task->factor[j * inputs + k]), vf_load(to)));
            }
        }
        if (!task->factor) continue;
        for (int64_t j = end; j < inputs; j += 4) {
            int64_t count = inputs - j < 4 ? inputs - j : 4;
            vf sum[4];
            const float *factor[4];
            for (int64_t i = 0; i < 4; i++) {
                int64_t row = i < count ? j + i : j;
                sum[i] = vf_load(w + row * VW);
                factor[i] = task->factor + row * inputs;
            }
            for (int64_t k = begin; k < end; k++) {
                vf error = vf_load(errors + (k - begin) * VW);
                for (int i = 0; i < 4; i++) sum[i] = vf_fma(error, vf_set1(factor[i][k]), sum[i]);
            }
            for (int64_t i = 0; i < count; i++) vf_store(w + (j + i) * VW, sum[i]);
        }
    }
}

/* weight [rows][inputs] -> its values on the grid, in place. scale, offset [rows][num_groups] are read, or written
 * if `searches`. factor [inputs][inputs] or none, its part below the diagonal is read; counts [inputs]; groups
 * [inputs] or none. Returns whether there was memory. */
int64_t bg_round_groups(float *weight, int64_t rows, int64_t inputs, const float *factor, const float *counts,
                        float *scale, float *offset, const int32_t *groups, int64_t num_groups, int64_t group_size,
                        int64_t kind, int64_t bits, int64_t fraction_bits, int64_t block, int64_t searches,
                        int threads) {
    Task task = {inputs, num_groups, group_size, block, factor, counts, groups, (int)searches,
                 {(int)kind, (float)((1 << bits) - 1), (float)(1 << (bits - 1)), (int)fraction_bits,
                  fraction_bits == 10 ? 0x1p-14f : 0x1p-126f}};
    int64_t tiles = (rows + VW - 1) / VW, is_good = 1;
#pragma omp parallel num_threads(threads) reduction(&& : is_good)
    {
        float *w = aligned_alloc(sizeof(vf), (size_t)(inputs + block) * sizeof(vf));
        Line *lines = aligned_alloc(sizeof(Line), (size_t)num_groups * sizeof(Line));
        is_good = w && lines;
#pragma omp for schedule(dynamic, 1)
        for (int64_t tile = 0; tile < tiles; tile++) {
            if (!w || !lines) continue;
            int64_t first = tile * VW;
            for (int lane = 0; lane < VW; lane++) {
                /* Lanes without a row repeat the last one. */
                int64_t row = first + lane < rows ? first + lane : rows - 1;
                for (int64_t k = 0; k < inputs; k++) w[k * VW + lane] = weight[row * inputs + k];
                if (searches) continue;
                for (int64_t g = 0; g < num_groups; g++) {
                    ((float *)&lines[g].scale)[lane] = scale[row * num_groups + g];
                    ((float *)&lines[g].offset)[lane] = offset[row * num_groups + g];
                }
            }
            round_tile(&task, w, lines, w + inputs * VW);
            for (int lane = 0; lane < VW && first + lane < rows; lane++) {
                int64_t row = first + lane;
                for (int64_t k = 0; k < inputs; k++) weight[row * inputs + k] = w[k * VW + lane];
                for (int64_t g = 0; g < num_groups; g++) {
                    scale[row * num_groups + g] = ((float *)&lines[g].scale)[lane];
                    offset[row * num_groups + g] = ((float *)&lines[g].offset)[lane];
                }
            }
        }
        free(w);
        free(lines);
    }
    return is_good;
}
