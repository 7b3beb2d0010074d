/* Draws a token from each row of logits, float32. Each row is computed by one thread, in an order that the row alone
 * fixes, with sums in double: neighbours and the number of threads cannot change a draw. */
#include "row_scan.h"

/* Most nuclei lie among the tokens that weigh more than this part of what a nucleus leaves out. */
#define LIKELY_NUCLEUS 256

typedef struct {
    float *x;
    int64_t n;
    double temperature, top_p, min_p, u;
    int64_t top_k;
    int is_replaced; /* x becomes what is drawn from: logits over temperature, -infinity for what cannot be drawn */
} Draw;

/* The place in which u of the running sum lies; its weight is above 0. `sums` are those of the weights' stretches,
 * `total` their sum from the first on. */
static int64_t pick(const float *weights, const double *sums, double total, double u) {
    double target = u * total;
    if (target >= total) target = nextafter(total, 0.0);
    int64_t s = 0;
    double before = 0.0;
    while (before + sums[s] <= target) before += sums[s++];
    int64_t last = -1;
    for (int64_t i = s * STRETCH; i < (s + 1) * STRETCH; i++) {
        before += (double)weights[i];
        if (weights[i] > 0.0f) {
            last = i;
            if (before > target) break;
        }
    }
    /* The two ways of summing may differ in the last bit; then it is the stretch's last. */
    return last;
}

/* The weight at which the heaviest, summed up from the heaviest on, reach `share`; *heavier is the sum of those above
 * it. Both arrays are written over. */
static float nucleus_edge(float *active, float *spare, int64_t count, double share, double *heavier) {
    double before = 0.0;
    uint64_t state = 1;
    for (;;) {
        int64_t larger, smaller;
        float pivot = middle_of_three(active, count, &state);
        partition(active, spare, count, pivot, &larger, &smaller);
        double sum = plain_sum(active, larger), equal = (double)(count - larger - smaller) * (double)pivot;
        if (larger && before + sum >= share) {
            count = larger;
        } else if (!smaller || before + sum + equal >= share) {
            *heavier = before + sum;
            return pivot;
        } else {
            before += sum + equal;
            count = smaller;
            float *other = active;
            active = spare;
            spare = other;
        }
    }
}

/* Gathers every token that may be in the nucleus of a row that `weigh_row` has weighed; returns how many. */
static int64_t gather_nucleus(int64_t n, double top_p, double total, Space *space) {
    double left_out = (1.0 - top_p) * total;
    int64_t found = 0;
    /* All that weigh less than left_out / n can be left out together. */
    for (int attempt = 0; attempt < 2; attempt++) {
        float bound = 0.999999f * (float)(left_out / (attempt ? (double)n : LIKELY_NUCLEUS));
        found = 0;
        for (int64_t s = 0; s * STRETCH < n; s++) {
            if (space->sums[s] < (double)bound) continue;
            int64_t begin = s * STRETCH, count = n - begin < STRETCH ? n - begin : STRETCH;
            found = gather(space->weights + begin, count, begin, bound, space->list, space->ids, found);
        }
        if (plain_sum(space->list, found) >= top_p * total && found) break;
    }
    return found;
}

/* Leaves of the list the fewest heaviest that reach top_p of `total`, the lowest ids of equal ones; returns how many. */
static int64_t keep_nucleus(int64_t count, double top_p, double total, Space *space) {
    double share = top_p * total, heavier;
    memcpy(space->active, space->list, (size_t)count * 4);
    float edge = nucleus_edge(space->active, space->spare, count, share, &heavier);
    int64_t ties = edge > 0.0f ? (int64_t)ceil((share - heavier) / (double)edge) : 1, kept = 0;
    if (ties < 1) ties = 1;
    for (int64_t i = 0; i < count; i++) {
        float weight = space->list[i];
        space->list[kept] = weight;
        space->ids[kept] = space->ids[i];
        kept += weight > edge || (weight == edge && ties-- > 0);
    }
    return kept;
}

static int64_t keep_heavier(int64_t count, double lightest, Space *space) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        float weight = space->list[i];
        space->list[kept] = weight;
        space->ids[kept] = space->ids[i];
        kept += (double)weight >= lightest;
    }
    return kept;
}

/* What top_k, top_p and min_p leave, as space->ids and weights in space->list; returns how many. */
static int64_t filter(const Draw *draw, float top, float scale, Space *space) {
    int64_t n = draw->n, count;
    double total = 0.0;
    if (0 < draw->top_k && draw->top_k < n) {
        float kth;
        count = gather_largest(draw->x, n, draw->top_k, space, &kth);
        weigh(space->list, count, top, scale, space->list);
        total = sum_list(space->list, count, space);
    } else if (draw->top_p < 1.0) {
        total = weigh_row(draw->x, n, top, scale, space);
        count = gather_nucleus(n, draw->top_p, total, space);
    } else {
        /* A little below the bound, so that rounding leaves nothing out. */
        double bound = (double)top + (log(draw->min_p) - 1e-4) / (double)scale;
        count = gather_row(draw->x, n, (float)(bound - 1e-6 * fabs(bound)), space);
        weigh(space->list, count, top, scale, space->list);
    }
    if (draw->top_p < 1.0) count = keep_nucleus(count, draw->top_p, total, space);
    if (draw->min_p > 0.0) count = keep_heavier(count, draw->min_p, space);
    memset(space->list + count, 0, STRETCH * 4);
    return count;
}

static void replace(const Draw *draw, int64_t count, Space *space) {
    if (count < 0) {
        for (int64_t i = 0; i < draw->n; i++) draw->x[i] = (float)((double)draw->x[i] / draw->temperature);
        return;
    }
    for (int64_t i = 0; i < count; i++)
        space->active[i] = (float)((double)draw->x[space->ids[i]] / draw->temperature);
    for (int64_t i = 0; i < draw->n; i++) draw->x[i] = -INFINITY;
    for (int64_t i = 0; i < count; i++) draw->x[space->ids[i]] = space->active[i];
}

/* The token, or -1 if there is nothing to draw from. */
static int64_t draw_row(const Draw *draw, Space *space) {
    float top = scan_maxima(draw->x, draw->n, space);
    if (!isfinite(top)) return -1;
    if (draw->temperature <= 0.0) return first_of(draw->x, draw->n, top, space);
    float scale = (float)(1.0 / draw->temperature);
    if (scale < 1e-30f) scale = 1e-30f;
    int64_t count = -1, place;
    if ((0 < draw->top_k && draw->top_k < draw->n) || draw->top_p < 1.0 || draw->min_p > 0.0) {
        count = filter(draw, top, scale, space);
        double total = sum_list(space->list, count, space);
        place = space->ids[pick(space->list, space->sums, total, draw->u)];
    } else {
        double total = weigh_row(draw->x, draw->n, top, scale, space);
        place = pick(space->weights, space->sums, total, draw->u);
    }
    if (draw->is_replaced) replace(draw, count, space);
    return place;
}

/* A token for each row of x [rows, n]: tokens [rows], -1 for a row that holds a NaN or whose largest value is infinite.
 * `replaced` [rows] may be NULL. Returns 0 or an error. */
int64_t bg_sample(float *x, int64_t stride, int64_t rows, int64_t n, const double *temperature, const int64_t *top_k,
                  const double *top_p, const double *min_p, const double *u, const uint8_t *replaced, int64_t *tokens,
                  int threads) {
    int64_t status = 0;
#pragma omp parallel num_threads(threads) if (rows > 1 && rows * n > SERIAL_LOGITS)
    {
        Space space = {0};
        int has_space = take_space(&space, n);
#pragma omp for schedule(dynamic)
        for (int64_t r = 0; r < rows; r++) {
            Draw draw = {x + r * stride, n, temperature[r], top_p[r], min_p[r], u[r], top_k[r],
                         replaced && replaced[r]};
            if (has_space) tokens[r] = draw_row(&draw, &space);
        }
        free(space.memory);
        if (!has_space)
#pragma omp atomic write
            status = NO_MEMORY;
    }
    return status;
}
