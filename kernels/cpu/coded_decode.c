/* Decodes weights of a few bits (coded.h): a function for each kind of code, chosen once. */
#include "coded_vector.h"

/* Inputs that codes are fetched ahead. */
#define AHEAD 128

INLINE Floats wide_at(const char *row, int64_t type) {
    if (type == KV_FLOAT16) return (Floats){kv_load(row, 0, KV_FLOAT16), kv_load(row, VW, KV_FLOAT16)};
    if (type == KV_BFLOAT16) return (Floats){kv_load(row, 0, KV_BFLOAT16), kv_load(row, VW, KV_BFLOAT16)};
    return (Floats){kv_load(row, 0, KV_FLOAT32), kv_load(row, VW, KV_FLOAT32)};
}

INLINE Floats offsets_at(const Coded *p, int64_t row, const int offset) {
    if (offset == OFFSET_LEAST) return wide_at(p->offsets + row * PANEL * kv_bytes(p->scale_type), p->scale_type);
    if (offset == OFFSET_NONE) return (Floats){vf_set1(0.0f), vf_set1(0.0f)};
    Codes zeros = codes_of_8((const uint8_t *)p->offsets + row * PANEL);
    return (Floats){__builtin_convertvector(zeros.left, vf), __builtin_convertvector(zeros.right, vf)};
}

/* Inputs [k, end) of a panel: written to `to` or, with m = 1, multiplied by x[k] and added to `to`. */
INLINE void decode(const Coded *p, int64_t panel, int64_t k, int64_t end, const float *x, float *to, const int bits,
                   const int value, const int offset, const int m) {
    static const float whole[TABLE_ENTRIES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float *entry = value == VALUE_TABLE ? p->table : whole;
    Table table = table_at(entry);
    const int64_t bytes = coded_bytes(bits);
    const uint8_t *from = p->codes + (panel * p->depth + k) * bytes;
    int64_t group = p->groups ? 0 : k / p->group_size;
    Floats sum = {vf_set1(0.0f), vf_set1(0.0f)};
    for (int64_t run; k < end; k = run, group++) {
        /* Inputs of one group. */
        if (p->groups) {
            group = p->groups[k];
            for (run = k + 1; run < end && p->groups[run] == group;) run++;
        } else {
            run = (group + 1) * p->group_size < end ? (group + 1) * p->group_size : end;
        }
        int64_t row = panel * p->group_count + group;
        Floats scale = wide_at(p->scales + row * PANEL * kv_bytes(p->scale_type), p->scale_type);
        Floats beside = offsets_at(p, row, offset);
        if (value == VALUE_E4M3) scale.left = scale.left * vf_set1(E4M3_UNIT), scale.right = scale.right * vf_set1(E4M3_UNIT);
#pragma GCC unroll 4
        for (int64_t i = k; i < run; i++, from += bytes) {
            __builtin_prefetch(from + AHEAD * bytes, 0, 3);
            Floats all = values_at(from, entry, table, bits, value);
            if (offset == OFFSET_ZERO) all.left = all.left - beside.left, all.right = all.right - beside.right;
            all.left = all.left * scale.left, all.right = all.right * scale.right;
            if (offset == OFFSET_LEAST) all.left = all.left + beside.left, all.right = all.right + beside.right;
            if (m) {
                vf each = vf_set1(x[i]);
                sum.left = vf_fma(each, all.left, sum.left), sum.right = vf_fma(each, all.right, sum.right);
            } else {
                vf_store(to, all.left);
                vf_store(to + VW, all.right);
                to += PANEL;
            }
        }
    }
    if (m) {
        vf_store(to, sum.left);
        vf_store(to + VW, sum.right);
    }
}

#define ALL_BITS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define KINDS(BITS) \
    KIND(BITS, CODE, NONE) KIND(BITS, CODE, ZERO) KIND(BITS, CODE, LEAST) \
    KIND(BITS, TABLE, NONE) KIND(BITS, TABLE, ZERO) KIND(BITS, TABLE, LEAST)

#define KIND(BITS, VALUE, OFFSET) \
    static void decode_##BITS##_##VALUE##_##OFFSET(const Coded *p, int64_t panel, int64_t k, int64_t end, float *to) { \
        decode(p, panel, k, end, 0, to, BITS, VALUE_##VALUE, OFFSET_##OFFSET, 0); \
    } \
    static void product_##BITS##_##VALUE##_##OFFSET(const Coded *p, int64_t panel, int64_t k, int64_t end, const float *x, \
                                                    float *sums) { \
        decode(p, panel, k, end, x, sums, BITS, VALUE_##VALUE, OFFSET_##OFFSET, 1); \
    }
ALL_BITS(KINDS)
KIND(8, E4M3, NONE)
#undef KIND

CodedDecode *coded_decoder(const Coded *coded) {
#define KIND(BITS, VALUE, OFFSET) [BITS][VALUE_##VALUE][OFFSET_##OFFSET] = decode_##BITS##_##VALUE##_##OFFSET,
    static CodedDecode *const decoders[MOST_BITS + 1][VALUE_E4M3 + 1][OFFSETS] = {ALL_BITS(KINDS) KIND(8, E4M3, NONE)};
#undef KIND
    return decoders[coded->bits][coded->value][coded->offset];
}

CodedProduct *coded_multiplier(const Coded *coded) {
#define KIND(BITS, VALUE, OFFSET) [BITS][VALUE_##VALUE][OFFSET_##OFFSET] = product_##BITS##_##VALUE##_##OFFSET,
    static CodedProduct *const products[MOST_BITS + 1][VALUE_E4M3 + 1][OFFSETS] = {ALL_BITS(KINDS) KIND(8, E4M3, NONE)};
#undef KIND
    return products[coded->bits][coded->value][coded->offset];
}
