/* What adapters add to the rows of a step: out[row] += x[row] · Aᵀ · Bᵀ + bias, each slot's adapter to the slot's rows.
 *
 * Rows of a slot are taken in tiles of up to ROWS. A tile is reduced (x · Aᵀ, [rows][units][UNIT]) and expanded by one thread,
 * which so reads a slot's A and B from end to end. Where tiles are too few for all threads, an operation reduces, cut by columns
 * of A, and the one behind it expands, cut by columns of B; else that one has nothing to do.
 *
 * Each element is a fixed sum: of K in pieces that K alone decides, each a chain of fused multiply-adds from zero, added in
 * order; then of the rank in one chain, which is added to `out`. So a row's bits depend on no other row, nor on threads. */
#include <string.h>

#include "kernels.h"
#include "kv_float.h"
#include "lora.h"

#define UNITS 2 /* that are computed side by side */
/* Inputs of a piece, a multiple of UNIT: a tile's rows of it stay in the L1 cache. */
#define PIECE 384
/* Bytes of A and B that are fetched before they are needed. */
#define AHEAD 4096

void bg_lora_put(Slot *slot, const char *a, int64_t units, int64_t type) {
    slot->a = a, slot->units = units, slot->type = type;
}

void bg_lora_put_part(Slot *slot, int64_t part, const char *b, const float *bias, int64_t rank, int64_t unit) {
    slot->part[part] = (Part){b, bias, rank, unit};
}

/* Results of some rows in n units of columns of a panel at `w`, [n][depth][UNIT] with `w_stride` bytes between units: stored,
 * or added to what is there; columns past `columns` are left out. */
INLINE void multiply(const float *x, int64_t x_stride, const char *w, int64_t w_stride, int64_t depth, float *const *to,
                     int64_t columns, int is_first, const float *bias, const int m, const int n, const int type) {
    vf sum[ROWS][UNITS][VU];
    const int64_t bytes = UNIT * kv_bytes(type);
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 2
        for (int u = 0; u < n; u++)
#pragma GCC unroll 4
            for (int v = 0; v < VU; v++) sum[i][u][v] = vf_set1(0.0f);
    for (int64_t k = 0; k < depth; k++, w += bytes) {
        vf weight[UNITS][VU];
#pragma GCC unroll 2
        for (int u = 0; u < n; u++) {
            __builtin_prefetch(w + u * w_stride + AHEAD, 0, 2);
#pragma GCC unroll 4
            for (int v = 0; v < VU; v++) weight[u][v] = kv_load(w + u * w_stride, v * VW, type);
        }
#pragma GCC unroll 8
        for (int i = 0; i < m; i++) {
            vf value = vf_set1(x[i * x_stride + k]);
#pragma GCC unroll 2
            for (int u = 0; u < n; u++)
#pragma GCC unroll 4
                for (int v = 0; v < VU; v++) sum[i][u][v] = vf_fma(value, weight[u][v], sum[i][u][v]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 2
        for (int u = 0; u < n; u++) {
            float edge[UNIT], edge_bias[UNIT], *at = to[i] + u * UNIT, *result = at;
            const float *add = bias ? bias + u * UNIT : NULL;
            int64_t left = columns - u * UNIT;
            if (left < UNIT) {
                memcpy(edge, at, (size_t)left * 4);
                if (add) memcpy(edge_bias, add, (size_t)left * 4), add = edge_bias;
                result = edge;
            }
#pragma GCC unroll 4
            for (int v = 0; v < VU; v++) {
                vf total = sum[i][u][v];
                if (!is_first) total = vf_load(result + v * VW) + total;
                if (add) total = total + vf_load(add + v * VW);
                vf_store(result + v * VW, total);
            }
            if (left < UNIT) memcpy(at, edge, (size_t)left * 4);
        }
}

static int units_at_once(int64_t m, int64_t left) {
    int most = VW == 16 || m <= 2 ? UNITS : 1;
    return left < most ? (int)left : most;
}

static void multiply_of(int64_t m, int n, int64_t type, const float *x, int64_t x_stride, const char *w, int64_t w_stride,
                        int64_t depth, float *const *to, int64_t columns, int is_first, const float *bias) {
#define CASE(M, N, TYPE) \
    case ((M) * 4 + (N)) * 4 + TYPE: \
        multiply(x, x_stride, w, w_stride, depth, to, columns, is_first, bias, M, N, TYPE); \
        break;
#define TYPES(M, N) CASE(M, N, KV_FLOAT32) CASE(M, N, KV_FLOAT16) CASE(M, N, KV_BFLOAT16)
    switch ((m * 4 + n) * 4 + type) {
        TYPES(1, 1) TYPES(1, 2) TYPES(2, 1) TYPES(2, 2) TYPES(3, 1) TYPES(4, 1)
#if ROWS > 4
        TYPES(3, 2) TYPES(4, 2) TYPES(5, 1) TYPES(5, 2) TYPES(6, 1) TYPES(6, 2) TYPES(7, 1) TYPES(7, 2) TYPES(8, 1) TYPES(8, 2)
#endif
    }
#undef TYPES
#undef CASE
}

/* VW bytes, an integer each. Compilers widen a vector of bytes one by one. */
INLINE vi integers_at(const char *from, const int is_signed) {
#if VW == 16
    __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return (vi)(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif VW == 8
    __m128i bytes = _mm_loadl_epi64((const __m128i *)from);
    return (vi)(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    typedef uint8_t Bytes __attribute__((vector_size(VW), aligned(1), may_alias));
    vi value = __builtin_convertvector(*(const Bytes *)from, vi);
    return is_signed ? (value << 24) >> 24 : value;
#endif
}

/* Inputs [start, start + count) of a tile's rows as floats, PIECE apart. `start` is a multiple of UNIT, and so many values of
 * integers at least stand behind the last. */
static void load_rows(const Lora *a, const Tile *t, int64_t start, int64_t count, float *x) {
    for (int64_t i = 0; i < t->rows; i++, x += PIECE) {
        const char *row = a->x + t->row[i] * a->x_stride;
        if (a->kind == X_FLOATS) {
            memcpy(x, row + 4 * start, (size_t)count * 4);
            continue;
        }
        vf scale = vf_set1(a->scale[t->row[i]]);
        const char *high = row + start, *low = high + a->plane_stride;
        for (int64_t k = 0; k < count; k += VW) {
            vi value = integers_at(high + k, 1);
            if (a->kind == X_BITS_16) value = (value << 8) + integers_at(low + k, 0);
            vf_store(x + k, __builtin_convertvector(value, vf) * scale);
        }
    }
}

/* Units [unit, end) of x · Aᵀ of a tile; `to` is [rows][units][UNIT]. */
static void reduce(const Lora *a, const Tile *t, int64_t unit, int64_t end, float *to) {
    const Slot *slot = t->slot;
    int64_t apart = slot->units * UNIT, bytes = UNIT * kv_bytes(slot->type);
    if (a->kind == X_IDS) {
        for (int64_t i = 0; i < t->rows; i++) {
            const char *row = slot->a + ((const int64_t *)a->x)[t->row[i]] * slot->units * bytes;
            for (int64_t k = unit * UNIT; k < end * UNIT; k += VW)
                vf_store(to + i * apart + k, kv_load(row, k, (int)slot->type));
        }
        return;
    }
    if (slot->type == INTEGERS) {
        lora_amx_reduce(a, t, unit, end, to);
        return;
    }
    float x[ROWS * PIECE] __attribute__((aligned(64))), *rows[ROWS];
    int64_t pieces = (a->depth + PIECE - 1) / PIECE, piece = units_of((a->depth + pieces - 1) / pieces) * UNIT;
    for (int64_t start = 0; start < a->depth; start += piece) {
        int64_t count = start + piece < a->depth ? piece : a->depth - start;
        load_rows(a, t, start, count, x);
        for (int64_t u = unit, n; u < end; u += n) {
            n = units_at_once(t->rows, end - u);
            for (int64_t i = 0; i < t->rows; i++) rows[i] = to + i * apart + u * UNIT;
            const char *w = slot->a + (u * a->depth + start) * bytes;
            multiply_of(t->rows, (int)n, slot->type, x, PIECE, w, a->depth * bytes, count, rows, n * UNIT, start == 0, NULL);
        }
    }
}

/* Units [unit, end) of the columns of `out`, of a tile whose x · Aᵀ is `from`. */
static void expand(const Lora *a, const Tile *t, int64_t unit, int64_t end, const float *from) {
    const Slot *slot = t->slot;
    int64_t before = 0, type = slot->type == INTEGERS ? KV_FLOAT16 : slot->type, bytes = UNIT * kv_bytes(type);
    float *rows[ROWS];
    for (int64_t p = 0; p < a->parts; p++) {
        const Part *part = slot->part + p;
        int64_t columns = a->columns[p + 1] - a->columns[p], units = units_of(columns);
        int64_t first = unit > before ? unit - before : 0, last = end - before < units ? end - before : units;
        before += units;
        if (!part->b) continue;
        for (int64_t u = first, n; u < last; u += n) {
            n = units_at_once(t->rows, last - u);
            int64_t column = a->columns[p] + u * UNIT;
            for (int64_t i = 0; i < t->rows; i++) rows[i] = a->out + t->row[i] * a->out_stride + column;
            multiply_of(t->rows, (int)n, type, from + part->unit * UNIT, slot->units * UNIT,
                        part->b + u * part->rank * bytes, part->rank * bytes, part->rank, rows, columns - u * UNIT, 0,
                        part->bias ? part->bias + u * UNIT : NULL);
        }
    }
}

/* What is wrong with a tile's rows and ids: an error code, or 0. */
static int64_t fault(const Lora *a, const Tile *t, int64_t rows) {
    for (int64_t i = 0; i < t->rows; i++) {
        if (t->row[i] < 0 || t->row[i] >= rows) return BAD_ROW;
        if (a->kind != X_IDS) continue;
        int64_t id = ((const int64_t *)a->x)[t->row[i]];
        if (id < 0 || id >= a->depth) return BAD_POSITION;
    }
    return 0;
}

static int64_t lora_chunks(const void *args, const Step *step) {
    const Lora *a = args;
    Plan plan = plan_of(a, step);
    if (plan.is_wrong) return 1;
    int64_t items = plan.is_split ? plan.units : plan.tiles;
    return items ? even_chunks(items, plan.cost / COST_UNIT / items + 1, step) : 0;
}

static void lora_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const Lora *a = args;
    Plan plan = plan_of(a, step);
    int64_t rows = step_size(step, a->rows), before = 0, error = plan.is_wrong ? BAD_ROW : 0;
    int64_t begin = chunk_begin(plan.units, chunk, of), end = chunk_begin(plan.units, chunk + 1, of);
    Tile t = {0};
    while (!error && next_tile(a, &t)) {
        int64_t units = t.slot->units;
        if (plan.is_split) {
            int64_t first = begin > before ? begin - before : 0, last = end - before < units ? end - before : units;
            if (first < last && !(error = fault(a, &t, rows))) reduce(a, &t, first, last, a->reduced + t.reduced);
            before += units;
            continue;
        }
        /* A tile belongs to the chunk in whose share of the cost its middle lies. */
        int64_t place = (before + t.cost / 2) * of / plan.cost;
        before += t.cost;
        if (place != chunk || (error = fault(a, &t, rows))) continue;
        float *reduced = thread_scratch((size_t)(t.rows * units * UNIT) * 4);
        if (!reduced) {
            error = NO_MEMORY;
            continue;
        }
        reduce(a, &t, 0, units, reduced);
        expand(a, &t, 0, column_units(a), reduced);
    }
    if (error) step_fail(step, error);
}

const Kernel kernel_lora = {lora_chunks, lora_run};

static int64_t lora_expand_chunks(const void *args, const Step *step) {
    const Lora *a = args;
    Plan plan = plan_of(a, step);
    if (!plan.is_split) return 0;
    int64_t items = plan.tiles * column_units(a);
    return even_chunks(items, plan.cost / COST_UNIT / items + 1, step);
}

static void lora_expand_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const Lora *a = args;
    int64_t units = column_units(a), all = plan_of(a, step).tiles * units, before = 0;
    int64_t begin = chunk_begin(all, chunk, of), end = chunk_begin(all, chunk + 1, of);
    for (Tile t = {0}; next_tile(a, &t); before += units) {
        int64_t first = begin > before ? begin - before : 0, last = end - before < units ? end - before : units;
        if (first < last) expand(a, &t, first, last, a->reduced + t.reduced);
    }
}

const Kernel kernel_lora_expand = {lora_expand_chunks, lora_expand_run};
