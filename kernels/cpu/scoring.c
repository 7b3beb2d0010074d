/* Log probabilities, ranks and the likeliest tokens of rows of logits; penalties. Each row by one thread, in an order
 * that the row alone fixes. */
#include "row_scan.h"

/* Below this many tokens of history a second thread costs more than it brings. */
#define SERIAL_TOKENS 32768

typedef struct {
    float value;
    int32_t id;
} Entry;

static int by_value(const void *left, const void *right) {
    const Entry *a = left, *b = right;
    if (a->value != b->value) return a->value < b->value ? 1 : -1;
    return a->id < b->id ? -1 : a->id > b->id;
}

/* The k largest, the lowest ids of equal ones, largest first: ids [k], values [k]. Returns 0 or an error. */
static int64_t likeliest(const float *x, int64_t n, int64_t k, Space *space, int64_t *ids, float *values) {
    float kth;
    int64_t count = gather_largest(x, n, k, space, &kth), ties = k;
    for (int64_t i = 0; i < count; i++) ties -= space->list[i] > kth;
    Entry *entries = malloc((size_t)k * sizeof(Entry));
    if (!entries) return NO_MEMORY;
    int64_t kept = 0;
    for (int64_t i = 0; i < count && kept < k; i++)
        if (space->list[i] > kth || ties-- > 0) entries[kept++] = (Entry){space->list[i], space->ids[i]};
    qsort(entries, (size_t)kept, sizeof(Entry), by_value);
    for (int64_t i = 0; i < kept; i++) {
        ids[i] = entries[i].id;
        values[i] = entries[i].value;
    }
    free(entries);
    return 0;
}

/* How many values of the row are larger. */
static int64_t count_larger(const float *x, int64_t n, float value, const Space *space) {
    int64_t larger = 0;
    for (int64_t s = 0; s * STRETCH < n; s++) {
        if (!(space->maxima[s] > value)) continue;
        int64_t begin = s * STRETCH;
        if (begin + STRETCH > n) {
            for (int64_t i = begin; i < n; i++) larger += x[i] > value;
            continue;
        }
        vi found = vi_set1(0);
        for (int i = 0; i < STRETCH; i += VW) found -= vf_load(x + begin + i) > vf_set1(value);
        for (int i = 0; i < VW; i++) larger += found[i];
    }
    return larger;
}

/* For each row of x [rows, n]: log_total [rows], the logarithm of the sum of e^x; ranks [rows, m], 1 + how many are
 * larger, of the ids in tokens [rows, m] (-1 for none); ids and values [rows, most] of the num_top[row] largest.
 * Returns 0 or an error. */
int64_t bg_score_tokens(const float *x, int64_t stride, int64_t rows, int64_t n, const int64_t *tokens, int64_t m,
                        const int64_t *num_top, int64_t most, double *log_total, int64_t *ranks, int64_t *ids,
                        float *values, int threads) {
    int64_t status = 0;
#pragma omp parallel num_threads(threads) if (rows > 1 && rows * n > SERIAL_LOGITS)
    {
        Space space = {0};
        int64_t own = take_space(&space, n) ? 0 : NO_MEMORY;
#pragma omp for schedule(dynamic)
        for (int64_t r = 0; r < rows; r++) {
            if (own) continue;
            const float *row = x + r * stride;
            float top = scan_maxima(row, n, &space);
            log_total[r] = isfinite(top) ? (double)top + log(weigh_row(row, n, top, 1.0f, &space)) : (double)top;
            for (int64_t j = 0; j < m; j++) {
                int64_t token = tokens[r * m + j];
                ranks[r * m + j] = token < 0 ? 0 : 1 + count_larger(row, n, row[token], &space);
            }
            if (num_top[r] && top == top)
                own = likeliest(row, n, num_top[r], &space, ids + r * most, values + r * most);
        }
        free(space.memory);
        if (own)
#pragma omp atomic write
            status = own;
    }
    return status;
}

typedef struct {
    double repetition, frequency, presence;
} Penalty;

/* `counts` [n] is all zero, before and after; in between 2 for each time that an id was drawn, 1 for being in the prompt. */
static void penalise_row(float *x, int64_t n, const int32_t *tokens, int64_t count, int64_t num_prompt,
                         Penalty penalty, int32_t *counts) {
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] >= 0 && tokens[i] < n) {
            int32_t *seen = counts + tokens[i];
            *seen = i < num_prompt ? *seen | 1 : *seen + 2;
        }
    for (int64_t i = 0; i < count; i++) {
        int32_t id = tokens[i];
        if (id < 0 || id >= n || !counts[id]) continue;
        double value = x[id];
        int32_t drawn = counts[id] >> 1;
        value = value > 0.0 ? value / penalty.repetition : value * penalty.repetition;
        if (drawn) value -= penalty.frequency * (double)drawn + penalty.presence;
        x[id] = (float)value;
        counts[id] = 0;
    }
}

/* Row rows[s] of x [.., n] is penalised for tokens[starts[s]] up to tokens[starts[s + 1]], of which the first
 * num_prompt[s] were not drawn. No row twice. Returns 0 or an error. */
int64_t bg_penalise(float *x, int64_t stride, int64_t n, const int64_t *rows, int64_t count, const int32_t *tokens,
                    const int64_t *starts, const int64_t *num_prompt, const double *repetition,
                    const double *frequency, const double *presence, int threads) {
    int64_t status = 0;
#pragma omp parallel num_threads(threads) if (count > 1 && starts[count] > SERIAL_TOKENS)
    {
        int32_t *counts = calloc((size_t)n, 4);
#pragma omp for schedule(static)
        for (int64_t s = 0; s < count; s++) {
            Penalty penalty = {repetition[s], frequency[s], presence[s]};
            if (counts)
                penalise_row(x + rows[s] * stride, n, tokens + starts[s], starts[s + 1] - starts[s], num_prompt[s],
                             penalty, counts);
        }
        if (!counts)
#pragma omp atomic write
            status = NO_MEMORY;
        free(counts);
    }
    return status;
}
