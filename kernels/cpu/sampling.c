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

/* The logit of a weight, a little lowered so that rounding leaves nothing out. */
static float bound_of(double weight, float top, float scale) {
    double bound = (double)top + (log(weight) - 1e-4) / (double)scale;
    return (float)(bound - 1e-6 * fabs(bound));
}

/* Gathers every token that may be in the nucleus of a row whose stretches are weighed, with its weight; returns how many. */
static int64_t gather_nucleus(const Draw *draw, float top, float scale, double total, Space *space) {
    double left_out = (1.0 - draw->top_p) * total;
    int64_t found = 0;
    /* All that weigh less than left_out / n can be left out together. */
    for (int attempt = 0; attempt < 2; attempt++) {
        double lightest = left_out / (attempt ? (double)draw->n : LIKELY_NUCLEUS);
        found = gather_row(draw->x, draw->n, bound_of(lightest, top, scale), space);
        weigh(space->list, found, top, scale, space->list);
        if (plain_sum(space->list, found) >= draw->top_p * total && found) break;
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

/* What top_k, top_p and min_p leave, as space->ids and weights in space->list; returns how many. `total` is the weight of
 * the whole row where only top_p cuts. */
static int64_t filter(const Draw *draw, float top, float scale, double total, Space *space) {
    int64_t n = draw->n, count;
    if (0 < draw->top_k && draw->top_k < n) {
        float kth;
        count = gather_largest(draw->x, n, draw->top_k, space, &kth);
        weigh(space->list, count, top, scale, space->list);
        total = sum_list(space->list, count, space);
    } else if (draw->top_p < 1.0) {
        count = gather_nucleus(draw, top, scale, total, space);
    } else {
        count = gather_row(draw->x, n, bound_of(draw->min_p, top, scale), space);
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

/* Fills space->maxima and space->sums, the weights of the stretches; the largest value of the row, or NaN. */
static float weigh_whole(const Draw *draw, float scale, double *total, Space *space) {
    int64_t stretches = stretches_of(draw->n);
    for (int64_t s = 0; s < stretches; s++)
        space->maxima[s] = scan_stretch(draw->x + s * STRETCH, draw->n - s * STRETCH, scale, space->sums + s);
    return weigh_stretches(space->maxima, space->sums, stretches, scale, total);
}

/* A token by temperature alone, of a row that is weighed. */
static int64_t draw_plainly(const Draw *draw, float scale, double total, const Space *space) {
    double before, target;
    int64_t s = find_stretch(space->sums, total, draw->u, &before, &target), begin = s * STRETCH;
    return begin + find_in_stretch(draw->x + begin, draw->n - begin, space->maxima[s], scale, space->sums[s], before,
                                   target);
}

/* The token, or -1 if there is nothing to draw from. */
static int64_t draw_row(const Draw *draw, Space *space) {
    int is_greedy = draw->temperature <= 0.0, has_k = 0 < draw->top_k && draw->top_k < draw->n;
    int is_plain = !has_k && draw->top_p >= 1.0 && draw->min_p <= 0.0;
    float scale = is_greedy ? 1.0f : scale_of(draw->temperature);
    double total = 0.0;
    int wants_weights = !is_greedy && (is_plain || (!has_k && draw->top_p < 1.0));
    float top = wants_weights ? weigh_whole(draw, scale, &total, space) : scan_maxima(draw->x, draw->n, space);
    if (!isfinite(top)) return -1;
    if (is_greedy) return first_of(draw->x, draw->n, top, space);
    int64_t count = -1, place;
    if (is_plain) {
        place = draw_plainly(draw, scale, total, space);
    } else {
        count = filter(draw, top, scale, total, space);
        total = sum_list(space->list, count, space);
        place = space->ids[pick(space->list, space->sums, total, draw->u)];
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
