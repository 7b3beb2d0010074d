/* Linear layer on weights of a few bits (kernels/coded.py): x [M, K] · weightᵀ + bias.
 *
 * A thread decodes some panels of codes into its scratch, where they are panels of linear.c, and multiplies them as that
 * does: so the bits are those of the float layer on the decoded weight, for any number of rows.
 *
 * Packed layout: [panels][K][PANEL * bits / 8] bytes of codes; scales and offsets [panels][groups][PANEL]. The bits of a code
 * lie in up to three planes, one after the other: four, two and one of them, the lowest first; with eight, a byte each. In a
 * plane of four bits byte j holds column j and, above, column j + PANEL / 2; in one of two bits columns j, j + PANEL / 4 and so
 * on; in one of single bits byte j holds columns 8j to 8j + 7. */
#include <string.h>

#include "kernels.h"
#include "kv_float.h"
#include "linear_float.h"

#define PANEL LINEAR_PANEL
/* Floats of decoded weight at a time: they are read from the L2 cache for every tile of rows. */
#define DECODED (96 * 1024)

/* What stands beside the scales of groups. */
enum { OFFSET_NONE, OFFSET_ZERO, OFFSET_LEAST };

/* What codes stand for: themselves, an entry of the table, or a float of 4 bits of exponent and 3 of fraction. */
enum { VALUE_CODE, VALUE_TABLE, VALUE_E4M3 };

typedef struct {
    const float *x;
    int64_t x_stride;
    const uint8_t *codes;
    const char *scales;    /* of `scale_type`, a type of kv_cache.h */
    const char *offsets;   /* uint8 for OFFSET_ZERO, of `scale_type` for OFFSET_LEAST, else NULL */
    const float *table;    /* [2^bits], or NULL */
    const int32_t *groups; /* [K], or NULL: k / group_size */
    const float *bias;     /* [N], or NULL */
    float *out;
    int64_t out_stride;
    int64_t rows, columns, depth; /* M (may be a size of the step), N, K */
    int64_t bits, value, offset, scale_type, group_size, group_count;
} LinearCoded;

typedef struct {
    vi left, right;
} Pair;

typedef struct {
    vf left, right;
} Floats;

static int64_t panels_of(int64_t columns) { return (columns + PANEL - 1) / PANEL; }

static int64_t step_bytes(int64_t bits) { return PANEL * bits / 8; }

/* Codes of a panel for one input. */
#if VW == 16
INLINE vi widen_bytes(__m128i bytes) { return (vi)_mm512_cvtepu8_epi32(bytes); }

INLINE Pair codes_of_8(const uint8_t *from) {
    return (Pair){widen_bytes(_mm_loadu_si128((const __m128i *)from)), widen_bytes(_mm_loadu_si128((const __m128i *)(from + 16)))};
}

INLINE Pair codes_of_4(const uint8_t *from) {
    __m128i both = _mm_loadu_si128((const __m128i *)from), low = _mm_set1_epi8(15);
    return (Pair){widen_bytes(_mm_and_si128(both, low)), widen_bytes(_mm_and_si128(_mm_srli_epi16(both, 4), low))};
}

INLINE Pair codes_of_2(const uint8_t *from) {
    __m128i all = _mm_loadl_epi64((const __m128i *)from), low = _mm_set1_epi8(3);
    __m128i left = _mm_unpacklo_epi64(all, _mm_srli_epi16(all, 2)), right = _mm_srli_epi16(left, 4);
    return (Pair){widen_bytes(_mm_and_si128(left, low)), widen_bytes(_mm_and_si128(right, low))};
}

INLINE Pair codes_of_1(const uint8_t *from) {
    uint32_t mask;
    memcpy(&mask, from, 4);
    return (Pair){(vi)_mm512_maskz_set1_epi32((__mmask16)mask, 1), (vi)_mm512_maskz_set1_epi32((__mmask16)(mask >> 16), 1)};
}
#else
INLINE Pair pair_of(const int32_t *codes) { return (Pair){*(const vi_unaligned *)codes, *(const vi_unaligned *)(codes + VW)}; }

#define CODES_OF(BITS) \
    INLINE Pair codes_of_##BITS(const uint8_t *from) { \
        int32_t codes[PANEL]; \
        const int bytes = PANEL * BITS / 8; \
        for (int j = 0; j < bytes; j++) \
            for (int i = 0; i < 8 / BITS; i++) codes[j + i * bytes] = from[j] >> i * BITS & ((1 << BITS) - 1); \
        return pair_of(codes); \
    }
CODES_OF(8)
CODES_OF(4)
CODES_OF(2)
#undef CODES_OF

INLINE Pair codes_of_1(const uint8_t *from) {
    int32_t codes[PANEL];
    for (int c = 0; c < PANEL; c++) codes[c] = from[c / 8] >> c % 8 & 1;
    return pair_of(codes);
}
#endif

INLINE Pair codes_at(const uint8_t *from, const int bits) {
    if (bits == 8) return codes_of_8(from);
    Pair all = {vi_set1(0), vi_set1(0)};
    int below = 0;
    if (bits & 4) {
        all = codes_of_4(from);
        from += PANEL / 2;
        below = 4;
    }
    if (bits & 2) {
        Pair two = codes_of_2(from);
        all.left |= two.left << below, all.right |= two.right << below;
        from += PANEL / 4;
        below += 2;
    }
    if (bits & 1) {
        Pair one = codes_of_1(from);
        all.left |= one.left << below, all.right |= one.right << below;
    }
    return all;
}

INLINE vf entries(const float *table, vi codes) {
#if VW == 16
    return (vf)_mm512_i32gather_ps((__m512i)codes, table, 4);
#elif VW == 8
    return (vf)_mm256_i32gather_ps(table, (__m256i)codes, 4);
#else
    vf found;
    for (int i = 0; i < VW; i++) found[i] = table[codes[i]];
    return found;
#endif
}

/* Sign, exponent and fraction move into their places; the product corrects the exponent, of subnormal numbers too. */
INLINE vf e4m3(vi codes) {
    vf size = (vf)((codes & vi_set1(127)) << 20) * vf_set1(0x1p120f);
    return (vf)((vi)size | (codes & vi_set1(128)) << 24);
}

INLINE vf values_of(const LinearCoded *p, vi codes, const int value) {
    if (value == VALUE_TABLE) return entries(p->table, codes);
    if (value == VALUE_E4M3) return e4m3(codes);
    return __builtin_convertvector(codes, vf);
}

INLINE Floats wide_at(const char *row, const int type) { return (Floats){kv_load(row, 0, type), kv_load(row, VW, type)}; }

INLINE Floats offsets_at(const LinearCoded *p, int64_t row, const int offset, const int type) {
    if (offset == OFFSET_LEAST) return wide_at(p->offsets + row * PANEL * kv_bytes(type), type);
    if (offset == OFFSET_NONE) return (Floats){vf_set1(0.0f), vf_set1(0.0f)};
    Pair zeros = codes_of_8((const uint8_t *)p->offsets + row * PANEL);
    return (Floats){__builtin_convertvector(zeros.left, vf), __builtin_convertvector(zeros.right, vf)};
}

INLINE void decode(const LinearCoded *p, int64_t panel, float *to, const int bits, const int value, const int offset,
                   const int type) {
    int64_t bytes = step_bytes(bits), group = -1, first = panel * p->group_count;
    const uint8_t *from = p->codes + panel * p->depth * bytes;
    Floats scale = {vf_set1(0.0f), vf_set1(0.0f)}, beside = scale;
    for (int64_t k = 0, next = 0; k < p->depth; k++, from += bytes, to += PANEL) {
        if (p->groups ? group != p->groups[k] : k == next) {
            group = p->groups ? p->groups[k] : group + 1;
            next += p->group_size;
            scale = wide_at(p->scales + (first + group) * PANEL * kv_bytes(type), type);
            beside = offsets_at(p, first + group, offset, type);
        }
        Pair codes = codes_at(from, bits);
        vf left = values_of(p, codes.left, value), right = values_of(p, codes.right, value);
        if (offset == OFFSET_ZERO) left = left - beside.left, right = right - beside.right;
        left = left * scale.left, right = right * scale.right;
        if (offset == OFFSET_LEAST) left = left + beside.left, right = right + beside.right;
        vf_store(to, left);
        vf_store(to + VW, right);
    }
}

/* The same with what is known of the codes in place. */
INLINE void decode_bits(const LinearCoded *p, int64_t panel, float *to, const int value, const int offset, const int type) {
    switch (p->bits) {
        case 4: decode(p, panel, to, 4, value, offset, type); break;
        case 8: decode(p, panel, to, 8, value, offset, type); break;
        default: decode(p, panel, to, (int)p->bits, value, offset, type);
    }
}

INLINE void decode_typed(const LinearCoded *p, int64_t panel, float *to, const int type) {
    if (p->value == VALUE_E4M3) decode(p, panel, to, 8, VALUE_E4M3, OFFSET_NONE, type);
    else if (p->value == VALUE_TABLE) decode_bits(p, panel, to, VALUE_TABLE, (int)p->offset, type);
    else if (p->offset == OFFSET_ZERO) decode_bits(p, panel, to, VALUE_CODE, OFFSET_ZERO, type);
    else if (p->offset == OFFSET_LEAST) decode_bits(p, panel, to, VALUE_CODE, OFFSET_LEAST, type);
    else decode_bits(p, panel, to, VALUE_CODE, OFFSET_NONE, type);
}

static void decode_panel(const LinearCoded *p, int64_t panel, float *to) {
    if (p->scale_type == KV_FLOAT16) decode_typed(p, panel, to, KV_FLOAT16);
    else if (p->scale_type == KV_BFLOAT16) decode_typed(p, panel, to, KV_BFLOAT16);
    else decode_typed(p, panel, to, KV_FLOAT32);
}

/* codes [columns, depth], a byte each -> packed, zeros past the last column. */
void bg_coded_pack(const uint8_t *codes, uint8_t *packed, int64_t columns, int64_t depth, int64_t bits, int threads) {
    int64_t bytes = step_bytes(bits);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < panels_of(columns); panel++) {
        uint8_t *to = packed + panel * depth * bytes;
        memset(to, 0, (size_t)(depth * bytes));
        for (int64_t c = 0; c < PANEL && panel * PANEL + c < columns; c++) {
            const uint8_t *row = codes + (panel * PANEL + c) * depth;
            for (int64_t k = 0; k < depth; k++) {
                uint8_t *at = to + k * bytes, code = row[k];
                if (bits == 8) {
                    at[c] = code;
                    continue;
                }
                if (bits & 4) {
                    at[c % (PANEL / 2)] |= (uint8_t)((code & 15) << c / (PANEL / 2) * 4);
                    at += PANEL / 2;
                    code >>= 4;
                }
                if (bits & 2) {
                    at[c % (PANEL / 4)] |= (uint8_t)((code & 3) << c / (PANEL / 4) * 2);
                    at += PANEL / 4;
                    code >>= 2;
                }
                if (bits & 1) at[c / 8] |= (uint8_t)((code & 1) << c % 8);
            }
        }
    }
}

static int64_t linear_coded_chunks(const void *args, const Step *step) {
    const LinearCoded *p = args;
    int64_t rows = step_size(step, p->rows);
    if (!rows) return 0;
    /* Decoding a weight takes about as long as four products. */
    return even_chunks(panels_of(p->columns), PANEL * p->depth * (rows + 4) / 32 + 1, step);
}

static void linear_coded_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const LinearCoded *p = args;
    int64_t panels = panels_of(p->columns), size = PANEL * p->depth, together = DECODED / size;
    int64_t first = chunk_begin(panels, chunk, of), end = chunk_begin(panels, chunk + 1, of);
    if (together < 1) together = 1;
    if (together > end - first) together = end - first;
    float *decoded = thread_scratch((size_t)(together * size) * 4);
    if (!decoded) {
        step_fail(step, NO_MEMORY);
        return;
    }
    for (int64_t panel = first; panel < end; panel += together) {
        int64_t last = panel + together < end ? panel + together : end, column = panel * PANEL;
        for (int64_t n = panel; n < last; n++) decode_panel(p, n, decoded + (n - panel) * size);
        int64_t columns = last * PANEL < p->columns ? last * PANEL - column : p->columns - column;
        LinearFloat product = {p->x,    p->x_stride, decoded, p->bias ? p->bias + column : 0,
                               p->out, step_size(step, p->rows), columns, p->depth};
        linear_float_panels(&product, 0, product.rows, 0, last - panel, p->out + column, p->out_stride);
    }
}

const Kernel kernel_linear_coded = {linear_coded_chunks, linear_coded_run};
