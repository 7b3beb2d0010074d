/* Linear layer on float32 with AMX, whose tiles multiply bfloat16: every float is cut into three bfloat16 pieces that add up
 * to it, high, middle and low (8 bits each), and of their nine products the six that matter in float32 are added up. What
 * is left out is below 2^-24 of the product, the rounding of float32 itself. docs/decisions/0007 has errors and rates.
 *
 * Each element of the result is a fixed sum: K in steps of 32, within a step the six products from small to large, each the
 * tile instruction's own sum. So a row's bits do not depend on the rows around it, on threads or on how rows are grouped.
 *
 * Weights are cut on the way, once for all rows of a chunk; memory is read as float32. */
#include "linear_float.h"

#if HAS_AMX && VW == 16
#include <immintrin.h>
#include <string.h>

#include "kernels.h"

#define STEP 32 /* inputs of one tile */
#define WIDTH 16 /* columns of one tile */
#define GROUP LINEAR_GROUP
#define LEAD(WIDE) ((WIDE) == 4 ? 1 : 2) /* steps that weights are cut ahead of their use */
#define RING(WIDE) (2 * LEAD(WIDE))      /* steps of cut weights; few, so that they stay in the L1 cache */
#define MOST_RING 8                      /* tiles, of any of these */
#ifndef AHEAD
#define AHEAD 8192
#endif

enum { HIGH, MIDDLE, LOW, PIECES };

/* 16 rows of 32 inputs; or 32 inputs of 16 columns, two and two in a row. */
typedef struct {
    uint16_t piece[PIECES][16][STEP];
} __attribute__((aligned(64))) Cut;

INLINE __m512i bits_of(__m512 x) { return _mm512_castps_si512(x); }

/* A float as the nearest bfloat16 (halves away from zero), or the one towards zero. */
INLINE __m512 upper(__m512 x, const int is_nearest) {
    __m512i bits = is_nearest ? _mm512_add_epi32(bits_of(x), _mm512_set1_epi32(0x8000)) : bits_of(x);
    return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32((int)0xffff0000)));
}

typedef struct {
    __m512 piece[PIECES];
} Pieces;

/* Differences are exact: each leaves the bits that were taken away. What is left at last fits into 8 bits. */
INLINE Pieces cut(__m512 x, const int is_nearest) {
    Pieces p;
    p.piece[HIGH] = upper(x, is_nearest);
    __m512 rest = _mm512_sub_ps(x, p.piece[HIGH]);
    p.piece[MIDDLE] = upper(rest, is_nearest);
    p.piece[LOW] = _mm512_sub_ps(rest, p.piece[MIDDLE]);
    return p;
}

/* Upper halves of the floats of two vectors: one vector after the other, or in turns. */
INLINE __m512i upper_halves(__m512 a, __m512 b) {
    static const uint16_t odd[32] __attribute__((aligned(64))) = {
        1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(bits_of(a), _mm512_load_si512(odd), bits_of(b));
}

INLINE __m512i upper_pairs(__m512 a, __m512 b) {
    static const uint16_t turns[32] __attribute__((aligned(64))) = {
        1,  33, 3,  35, 5,  37, 7,  39, 9,  41, 11, 43, 13, 45, 15, 47,
        17, 49, 19, 51, 21, 53, 23, 55, 25, 57, 27, 59, 29, 61, 31, 63};
    return _mm512_permutex2var_epi16(bits_of(a), _mm512_load_si512(turns), bits_of(b));
}

INLINE __mmask16 lanes(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }

/* Tiles of rows of a group: all of the same height, so that they are configured once. Where rows do not divide evenly, the
 * last overlaps the one before and computes some rows again, to the same bits. */
typedef struct {
    int64_t count, rows, last; /* how many, rows of each, and the first row of the last */
} Tiles;

INLINE Tiles tiles_of(int64_t rows, int64_t group) {
    int64_t size = linear_group(rows), here = rows - group * size < size ? rows - group * size : size;
    int64_t count = (here + 15) / 16, height = (here + count - 1) / count;
    return (Tiles){count, height, here - height};
}

INLINE int64_t tile_row(Tiles t, int64_t tile) { return tile * t.rows < t.last ? tile * t.rows : t.last; }

INLINE int64_t steps_of(int64_t depth) { return (depth + STEP - 1) / STEP; }

typedef struct {
    const float *x; /* [rows, depth] */
    int64_t stride;
    Cut *cut; /* [groups][tiles of the first group][steps] */
    int64_t rows, depth; /* rows may be a size of the step */
} CutRows;

static int64_t cut_chunks(const void *args, const Step *step) {
    const CutRows *a = args;
    int64_t rows = step_size(step, a->rows);
    return rows <= FEW_ROWS ? 0 : even_chunks((rows + 15) / 16, 10 * a->depth, step);
}

/* Tiles of rows, cut. */
static void cut_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const CutRows *a = args;
    int64_t rows = step_size(step, a->rows), size = linear_group(rows), tall = tiles_of(rows, 0).count;
    int64_t all = (rows + size - 1) / size * tall, steps = steps_of(a->depth);
    for (int64_t i = chunk_begin(all, chunk, of); i < chunk_begin(all, chunk + 1, of); i++) {
        Tiles t = tiles_of(rows, i / tall);
        if (i % tall >= t.count) continue;
        const float *x = a->x + (i / tall * size + tile_row(t, i % tall)) * a->stride;
        Cut *to = a->cut + i * steps;
        for (int64_t k = 0; k < a->depth; k += STEP, to++) {
            __mmask16 left = lanes(a->depth - k), right = lanes(a->depth - k - 16);
            for (int64_t r = 0; r < t.rows; r++) {
                const float *from = x + r * a->stride + k;
                Pieces first = cut(_mm512_maskz_loadu_ps(left, from), 1);
                Pieces second = cut(_mm512_maskz_loadu_ps(right, from + 16), 1);
                for (int piece = 0; piece < PIECES; piece++)
                    _mm512_store_si512(to->piece[piece][r], upper_halves(first.piece[piece], second.piece[piece]));
            }
        }
    }
}

const Kernel kernel_linear_cut = {cut_chunks, cut_run};

/* Bytes of the pieces of up to `rows` rows; 0: they are not cut on this machine. */
int64_t bg_cut_bytes(int64_t rows, int64_t depth) {
    if (!amx_is_usable()) return 0;
    /* Each group may fall short of whole tiles by one. */
    return ((rows + 15) / 16 + (rows + GROUP - 1) / GROUP) * steps_of(depth) * (int64_t)sizeof(Cut);
}

/* Weights that are cut on their way to the tiles: steps of `wide` tiles of columns, one tile after the other. */
typedef struct {
    const float *from; /* of the step */
    Cut *to;           /* [wide] */
    int64_t left;      /* inputs that are left in the column, this step's included */
    int64_t panel;     /* floats from a panel to the next, 0 if there is none */
} Feed;

/* Cuts `count` pairs of inputs, the first of them `pair`, counted through all tiles of the step. */
INLINE void feed(const Feed *f, const int pair, const int count) {
#pragma GCC unroll 8
    for (int p = pair; p < pair + count; p++) {
        const int tile = p / 16, row = p % 16;
        const float *from = f->from + tile / 2 * f->panel + tile % 2 * WIDTH + row * 2 * LINEAR_PANEL;
        _mm_prefetch((const char *)from + AHEAD, _MM_HINT_T1);
        _mm_prefetch((const char *)(from + LINEAR_PANEL) + AHEAD, _MM_HINT_T1);
        Pieces even = cut(_mm512_maskz_loadu_ps(f->left > 2 * row ? 0xffff : 0, from), 0);
        Pieces odd = cut(_mm512_maskz_loadu_ps(f->left > 2 * row + 1 ? 0xffff : 0, from + LINEAR_PANEL), 0);
#pragma GCC unroll 3
        for (int i = 0; i < PIECES; i++)
            _mm512_store_si512(f->to[tile].piece[i][row], upper_pairs(even.piece[i], odd.piece[i]));
    }
}

#define LOAD(TILE, CUT, PIECE) _tile_loadd(TILE, (CUT)->piece[PIECE], 64)

/* What four tiles of sums hold. In each, the six products come in one order. */
enum { ROWS_1, ROWS_2, ROWS_4 };

/* One tile of rows by four of columns. */
INLINE void step_1(const Cut *x, const Cut *w, const Feed *f) {
#define COLUMNS(W, LEFT, RIGHT, PAIR) \
    LOAD(4, x, LOW); \
    LOAD(6, w + W, HIGH); \
    _tile_dpbf16ps(LEFT, 4, 6); \
    LOAD(7, w + W + 1, HIGH); \
    _tile_dpbf16ps(RIGHT, 4, 7); \
    feed(f, PAIR, 4); \
    LOAD(4, x, MIDDLE); \
    _tile_dpbf16ps(LEFT, 4, 6); \
    _tile_dpbf16ps(RIGHT, 4, 7); \
    feed(f, PAIR + 4, 6); \
    LOAD(6, w + W, MIDDLE); \
    _tile_dpbf16ps(LEFT, 4, 6); \
    LOAD(7, w + W + 1, MIDDLE); \
    _tile_dpbf16ps(RIGHT, 4, 7); \
    feed(f, PAIR + 10, 6); \
    LOAD(5, x, HIGH); \
    _tile_dpbf16ps(LEFT, 5, 6); \
    _tile_dpbf16ps(RIGHT, 5, 7); \
    feed(f, PAIR + 16, 6); \
    LOAD(6, w + W, LOW); \
    _tile_dpbf16ps(LEFT, 5, 6); \
    LOAD(7, w + W + 1, LOW); \
    _tile_dpbf16ps(RIGHT, 5, 7); \
    feed(f, PAIR + 22, 6); \
    LOAD(6, w + W, HIGH); \
    _tile_dpbf16ps(LEFT, 5, 6); \
    LOAD(7, w + W + 1, HIGH); \
    _tile_dpbf16ps(RIGHT, 5, 7); \
    feed(f, PAIR + 28, 4);
    COLUMNS(0, 0, 1, 0)
    COLUMNS(2, 2, 3, 32)
#undef COLUMNS
}

/* Two by two. */
INLINE void step_2(const Cut *x, const Cut *y, const Cut *w, const Feed *f) {
#define FOUR \
    _tile_dpbf16ps(0, 4, 6); \
    _tile_dpbf16ps(1, 4, 7); \
    _tile_dpbf16ps(2, 5, 6); \
    _tile_dpbf16ps(3, 5, 7);
    LOAD(4, x, LOW);
    LOAD(6, w, HIGH);
    LOAD(7, w + 1, HIGH);
    LOAD(5, y, LOW);
    FOUR
    feed(f, 0, 4);
    LOAD(4, x, MIDDLE);
    LOAD(5, y, MIDDLE);
    FOUR
    feed(f, 4, 6);
    LOAD(6, w, MIDDLE);
    LOAD(7, w + 1, MIDDLE);
    FOUR
    feed(f, 10, 6);
    LOAD(4, x, HIGH);
    LOAD(5, y, HIGH);
    FOUR
    feed(f, 16, 6);
    LOAD(6, w, LOW);
    LOAD(7, w + 1, LOW);
    FOUR
    feed(f, 22, 6);
    LOAD(6, w, HIGH);
    LOAD(7, w + 1, HIGH);
    FOUR
    feed(f, 28, 4);
#undef FOUR
}

/* Up to four tiles of rows, `next` apart, by one of columns. */
INLINE void step_4(const Cut *x, int64_t next, const Cut *w, const Feed *f, const int tiles) {
#define LOWER(R) \
    if (tiles > R) { \
        LOAD(4, x + R * next, LOW); \
        _tile_dpbf16ps(R, 4, 5); \
    } \
    feed(f, R, 1);
#define MIDDLES(R) \
    if (tiles > R) { \
        LOAD(4, x + R * next, MIDDLE); \
        _tile_dpbf16ps(R, 4, 5); \
        _tile_dpbf16ps(R, 4, 6); \
    } \
    feed(f, 4 + R, 1);
#define UPPER(R) \
    if (tiles > R) { \
        LOAD(4, x + R * next, HIGH); \
        _tile_dpbf16ps(R, 4, 6); \
        _tile_dpbf16ps(R, 4, 7); \
        _tile_dpbf16ps(R, 4, 5); \
    } \
    feed(f, 8 + 2 * R, 2);
#define EACH(DO) DO(0) DO(1) DO(2) DO(3)
    LOAD(5, w, HIGH);
    EACH(LOWER)
    LOAD(6, w, MIDDLE);
    EACH(MIDDLES)
    LOAD(7, w, LOW);
    EACH(UPPER)
#undef EACH
#undef UPPER
#undef MIDDLES
#undef LOWER
}

/* Tiles that hold weights have 16 rows, all others `rows`. */
static void configure(int64_t rows, int kind) {
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 64;
        config.rows[t] = t > 5 || (t == 5 && kind == ROWS_4) ? 16 : (uint8_t)rows;
    }
    load_tile_config(&config);
}

/* A tile of sums, with the bias, into `out`. */
INLINE void finish(const LinearFloat *p, const float *sums, int64_t rows, int64_t column, float *out, int64_t out_stride) {
    __mmask16 some = lanes(p->columns - column);
    __m512 bias = p->bias ? _mm512_maskz_loadu_ps(some, p->bias + column) : _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; r++)
        _mm512_mask_storeu_ps(out + r * out_stride, some, _mm512_add_ps(_mm512_load_ps(sums + r * WIDTH), bias));
}

/* A group of rows times some tiles of columns. x [tiles][steps], ring [RING][wide]; `tall` tiles of rows by `wide` of
 * columns at once. */
INLINE void multiply(const LinearFloat *p, const Cut *x, Cut *ring, int64_t first, int64_t last, Tiles t, int64_t steps,
                     float *out, int64_t out_stride, const int tall, const int wide) {
    float sums[4][16 * WIDTH] __attribute__((aligned(64)));
    int64_t all = (last - first + wide - 1) / wide * steps, depth = p->depth;
    for (int64_t i = -LEAD(wide), step = 0, column = first; i < all; i++) {
        /* What is to be cut for a step to come; past the end, the last once more. */
        int64_t next = i + LEAD(wide), at = next < all ? next : all - 1, tile = first + at / steps * wide, k = at % steps * STEP;
        Feed f = {p->packed + (tile / 2 * depth + k) * LINEAR_PANEL + tile % 2 * WIDTH, ring + next % RING(wide) * wide,
                  depth - k, tile + 2 < last ? depth * LINEAR_PANEL : 0};
        if (i < 0) {
            feed(&f, 0, 16 * wide);
            continue;
        }
        __asm__ volatile("" : : : "memory"); /* GCC does not know that loading a tile reads memory */
        if (step == 0) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        const Cut *w = ring + i % RING(wide) * wide;
        if (wide == 4) step_1(x + step, w, &f);
        else if (wide == 2) step_2(x + step, x + steps + step, w, &f);
        else step_4(x + step, steps, w, &f, tall);
        if (++step < steps) continue;
        step = 0;
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        for (int r = 0; r < tall; r++) {
            for (int c = 0; c < wide && column + c < last; c++)
                finish(p, sums[r * wide + c], t.rows, (column + c) * WIDTH,
                       out + tile_row(t, r) * out_stride + (column + c - first) * WIDTH, out_stride);
        }
        column += wide;
    }
}

int linear_float_amx(const LinearFloat *p, int64_t rows, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end,
                     float *out, int64_t out_stride) {
    int64_t size = linear_group(rows), steps = steps_of(p->depth), first = 2 * panel, last = 2 * panel_end;
    Cut *ring = thread_scratch(MOST_RING * sizeof(Cut));
    if (!ring) return NO_MEMORY;
    for (int64_t from = row; from < row_end; from += size) {
        Tiles t = tiles_of(rows, from / size);
        const Cut *x = (const Cut *)p->cut + from / size * tiles_of(rows, 0).count * steps;
        float *to = out + (from - row) * out_stride;
        configure(t.rows, t.count == 1 ? ROWS_1 : t.count == 2 ? ROWS_2 : ROWS_4);
        if (t.count == 1) multiply(p, x, ring, first, last, t, steps, to, out_stride, 1, 4);
        else if (t.count == 2) multiply(p, x, ring, first, last, t, steps, to, out_stride, 2, 2);
        else if (t.count == 3) multiply(p, x, ring, first, last, t, steps, to, out_stride, 3, 1);
        else multiply(p, x, ring, first, last, t, steps, to, out_stride, 4, 1);
    }
    _tile_release();
    return 0;
}

/* --- few rows: the same sums by vectors ------------------------------------------------------------------------------ */

/* The products in their order: piece of x, piece of the weight. */
#define PRODUCTS 6
static const int OF_X[PRODUCTS] = {LOW, MIDDLE, MIDDLE, HIGH, HIGH, HIGH};
static const int OF_WEIGHT[PRODUCTS] = {HIGH, HIGH, MIDDLE, MIDDLE, LOW, HIGH};

/* `count` rows of x, in pieces [count][PIECES][depth], times one tile of columns. The tile instruction adds up even and odd
 * inputs of a step apart, each from zero, and then adds both to the sum: as here. */
INLINE void few_rows(const float *x, const float *packed, int64_t depth, float *sums, const int count) {
    vf total[2];
    for (int r = 0; r < count; r++) total[r] = vf_set1(0.0f);
    for (int64_t start = 0; start < depth; start += STEP) {
        vf part[2][2][PRODUCTS];
        for (int r = 0; r < count; r++)
            for (int side = 0; side < 2; side++)
                for (int i = 0; i < PRODUCTS; i++) part[r][side][i] = vf_set1(0.0f);
        int64_t end = start + STEP < depth ? start + STEP : depth;
        for (int64_t k = start; k < end; k += 2) {
#pragma GCC unroll 2
            for (int side = 0; side < 2; side++) {
                if (k + side == end) break;
                const float *from = packed + (k + side) * LINEAR_PANEL;
                _mm_prefetch((const char *)from + AHEAD, _MM_HINT_T1);
                Pieces w = cut(_mm512_loadu_ps(from), 0);
#pragma GCC unroll 2
                for (int r = 0; r < count; r++) {
#pragma GCC unroll 6
                    for (int i = 0; i < PRODUCTS; i++) {
                        vf value = vf_set1(x[(r * PIECES + OF_X[i]) * depth + k + side]);
                        part[r][side][i] = vf_fma(value, (vf)w.piece[OF_WEIGHT[i]], part[r][side][i]);
                    }
                }
            }
        }
#pragma GCC unroll 2
        for (int r = 0; r < count; r++) {
#pragma GCC unroll 6
            for (int i = 0; i < PRODUCTS; i++) total[r] = total[r] + (part[r][0][i] + part[r][1][i]);
        }
    }
    for (int r = 0; r < count; r++) vf_store(sums + r * WIDTH, total[r]);
}

int linear_float_few(const LinearFloat *p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end, float *out,
                     int64_t out_stride) {
    float *x = thread_scratch((size_t)(2 * PIECES * (p->depth + WIDTH)) * 4), sums[2 * WIDTH] __attribute__((aligned(64)));
    if (!x) return NO_MEMORY;
    for (int64_t r = row; r < row_end; r += 2) {
        int count = r + 1 < row_end ? 2 : 1;
        for (int i = 0; i < count; i++) {
            for (int64_t k = 0; k < p->depth; k += WIDTH) {
                Pieces a = cut(_mm512_maskz_loadu_ps(lanes(p->depth - k), p->x + (r + i) * p->x_stride + k), 1);
                for (int piece = 0; piece < PIECES; piece++)
                    _mm512_mask_storeu_ps(x + (i * PIECES + piece) * p->depth + k, lanes(p->depth - k), a.piece[piece]);
            }
        }
        /* Tiles take numbers below the normal ones for zero, and give zero for them. */
        unsigned mode = _mm_getcsr();
        _mm_setcsr(mode | 0x8040);
        for (int64_t tile = 2 * panel; tile < 2 * panel_end; tile++) {
            const float *packed = p->packed + tile / 2 * p->depth * LINEAR_PANEL + tile % 2 * WIDTH;
            if (count == 2) few_rows(x, packed, p->depth, sums, 2);
            else few_rows(x, packed, p->depth, sums, 1);
            for (int i = 0; i < count; i++)
                finish(p, sums + i * WIDTH, 1, tile * WIDTH, out + (r + i - row) * out_stride + (tile - 2 * panel) * WIDTH, out_stride);
        }
        _mm_setcsr(mode);
    }
    return 0;
}

#else

static int64_t no_chunks(const void *args, const Step *step) {
    (void)args, (void)step;
    return 0;
}

const Kernel kernel_linear_cut = {no_chunks, 0};

int64_t bg_cut_bytes(int64_t rows, int64_t depth) {
    (void)rows, (void)depth;
    return 0;
}

#endif
