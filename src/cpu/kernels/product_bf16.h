/*
 * absorb and project for x and w of bf16 by VDPBF16PS: a sum takes two products at a time, k = 0 1,
 * then 2 3, and so on, whatever the number of rows and the layout of w. Included by
 * absorb_project.c where the family has the instruction.
 *
 * Many rows: a panel of w is packed once, as pairs, and stays in the second-level cache.
 *
 *   w, n contiguous          packed                                tile of sums in registers
 *   k     a0 a1 a2 ..        pair 0  a0 b0 | a1 b1 | .. 64 columns   6 rows x 4 vectors
 *   k + 1 b0 b1 b2 ..   ->   pair 1  ..                        ->    += x[row][pair] in all lanes
 *   (K contiguous: 16 x 16 pairs are transposed)                        x 4 vectors of packed
 *
 * One or two rows and n contiguous: w is read once and paired in registers, 256 columns wide.
 */
#ifndef MLAI_PRODUCT_BF16_H
#define MLAI_PRODUCT_BF16_H

#include "cpu/kernels/vec_f32.h"
#include <immintrin.h>

enum {
    PAIR_ROWS = 6,
    PAIR_VECTORS = 4,
    PAIR_COLUMNS = PAIR_VECTORS * 16,
    PAIR_DEPTH = 512,      /* of one packed panel */
    PAIR_GROUP_ROWS = 240, /* rows that share a packed panel */
    PAIR_DEEP_ROWS = 24,   /* the same where K is over PAIR_DEPTH and sums wait in memory */
    PAIR_FEW_ROWS = 2,
    PAIR_FEW_VECTORS = 16, /* of one row; two rows share them */
    PAIR_FEW_COLUMNS = PAIR_FEW_VECTORS * 16
};

/* w of one head from the panel's first column on. One stride is 1. */
typedef struct pair_weights {
    const uint16_t *data;
    int64_t k_stride, c_stride;
} pair_weights;

/* bf16 rows of x, and of out where the sums go straight there. */
typedef struct pair_rows {
    const char *x;
    int64_t x_bytes;
    char *out; /* NULL: the sums stay in `sums` */
    int64_t out_bytes;
    float *sums; /* [rows][PAIR_COLUMNS], or of pair_few [rows][PAIR_FEW_COLUMNS] */
} pair_rows;

static const uint16_t pair_low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};

/* The first n of 32 lanes. */
MLAI_INLINE __mmask32 first_lanes(int64_t n)
{
    return n >= 32 ? 0xffffffffu : n <= 0 ? 0u : (1u << n) - 1u;
}

/* 32 columns of rows k and k + 1 as two vectors of pairs. */
MLAI_INLINE void pair_columns(__m512i pairs[2], const uint16_t *w, int64_t k_stride, bool has_odd,
                              __mmask32 lanes)
{
    const __m512i low = _mm512_loadu_si512(pair_low);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i even = _mm512_maskz_loadu_epi16(lanes, w);
    const __m512i odd = _mm512_maskz_loadu_epi16(has_odd ? lanes : 0, w + (has_odd ? k_stride : 0));
    pairs[0] = _mm512_permutex2var_epi16(even, low, odd);
    pairs[1] = _mm512_permutex2var_epi16(even, high, odd);
}

/* Packs `padded` columns, zeros past `columns`. */
static void pack_columns(uint32_t *packed, const pair_weights *w, int64_t depth, int64_t columns,
                         int64_t padded)
{
    for (int64_t k = 0; k < depth; k += 2)
        for (int64_t c = 0; c < padded; c += 32) {
            __m512i pairs[2];
            uint32_t *at = packed + k / 2 * PAIR_COLUMNS + c;
            pair_columns(pairs, w->data + k * w->k_stride + c, w->k_stride, k + 1 < depth,
                         first_lanes(columns - c));
            _mm512_store_si512(at, pairs[0]);
            _mm512_store_si512(at + 16, pairs[1]);
        }
}

/* Transposes 16 x 16 values of 32 bits: pairs, then fours, then the 128-bit quarters. */
MLAI_INLINE void transpose_pairs(__m512i a[16])
{
    __m512i b[16];
    MLAI_UNROLL
    for (int32_t i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    /* a[4 g + i]: of rows 4 g .. 4 g + 3, columns i, i + 4, i + 8, i + 12 in the quarters. */
    MLAI_UNROLL
    for (int32_t i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    MLAI_UNROLL
    for (int32_t i = 0; i < 4; i++) {
        const __m512i even01 = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        const __m512i odd01 = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        const __m512i even23 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        const __m512i odd23 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
        b[i] = _mm512_shuffle_i32x4(even01, even23, 0x88);
        b[i + 8] = _mm512_shuffle_i32x4(even01, even23, 0xdd);
        b[i + 4] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
    }
    MLAI_UNROLL
    for (int32_t i = 0; i < 16; i++)
        a[i] = b[i];
}

static void pack_depth(uint32_t *packed, const pair_weights *w, int64_t depth, int64_t columns,
                       int64_t padded)
{
    for (int64_t c = 0; c < padded; c += 16)
        for (int64_t k = 0; k < depth; k += 32) {
            const __mmask32 lanes = first_lanes(depth - k);
            const uint16_t *from = w->data + c * w->c_stride + k;
            __m512i pairs[16];
            MLAI_UNROLL
            for (int32_t i = 0; i < 16; i++) {
                const bool is_there = c + i < columns;
                pairs[i] = _mm512_maskz_loadu_epi16(is_there ? lanes : 0,
                                                    from + (is_there ? i * w->c_stride : 0));
                if (c + 16 + i < columns)
                    _mm_prefetch((const char *)(from + (16 + i) * w->c_stride), _MM_HINT_T0);
            }
            transpose_pairs(pairs);
            MLAI_UNROLL
            for (int32_t i = 0; i < 16; i++)
                _mm512_store_si512(packed + (k / 2 + i) * PAIR_COLUMNS + c, pairs[i]);
        }
}

MLAI_INLINE __m512bh as_pairs(__m512i x)
{
    return (__m512bh)x;
}

/* The pair of x at k in all lanes; past the last k a zero. */
MLAI_INLINE __m512bh pair_of(const char *x, int64_t k, const bool has_odd)
{
    uint32_t pair = 0;
    memcpy(&pair, x + 2 * k, has_odd ? 4 : 2);
    return as_pairs(_mm512_set1_epi32((int32_t)pair));
}

/* `vectors` of sums, the last with `columns` in all, to bf16. */
MLAI_INLINE void store_pairs(char *out, const __m512 *s, int64_t columns, const int32_t vectors)
{
    if (vectors == 1) {
        const __m256i half = (__m256i)_mm512_cvtneps_pbh(s[0]);
        _mm256_mask_storeu_epi16(out, (__mmask16)first_lanes(columns), half);
        return;
    }
    MLAI_UNROLL
    for (int32_t v = 0; v < vectors; v += 2) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(s[v + 1], s[v]);
        _mm512_mask_storeu_epi16(out + v * 32, first_lanes(columns - v * 16), both);
    }
}

/* One step of a tile: the pair at k of every row times the packed pairs of every vector. */
MLAI_INLINE void pair_step(__m512 s[PAIR_ROWS][PAIR_VECTORS], const pair_rows *p,
                           const uint32_t *packed, int64_t k, const bool has_odd,
                           const int32_t rows, const int32_t vectors)
{
    __m512bh column[PAIR_VECTORS];
    MLAI_UNROLL
    for (int32_t v = 0; v < vectors; v++)
        column[v] = as_pairs(_mm512_load_si512(packed + k / 2 * PAIR_COLUMNS + v * 16));
    MLAI_UNROLL
    for (int32_t r = 0; r < rows; r++) {
        const __m512bh factor = pair_of(p->x + r * p->x_bytes, k, has_odd);
        MLAI_UNROLL
        for (int32_t v = 0; v < vectors; v++)
            s[r][v] = _mm512_dpbf16_ps(s[r][v], factor, column[v]);
    }
}

/* A tile over one packed panel: the first starts the sums, the last gives them out. */
MLAI_INLINE void pair_tile(const pair_rows *p, const uint32_t *packed, int64_t depth,
                           int64_t columns, bool is_first, bool is_last, const int32_t rows,
                           const int32_t vectors)
{
    __m512 s[PAIR_ROWS][PAIR_VECTORS];
    MLAI_UNROLL
    for (int32_t r = 0; r < rows; r++)
        MLAI_UNROLL
    for (int32_t v = 0; v < vectors; v++)
        s[r][v] =
            is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(p->sums + r * PAIR_COLUMNS + v * 16);
    int64_t k = 0;
    for (; k + 2 <= depth; k += 2)
        pair_step(s, p, packed, k, true, rows, vectors);
    if (k < depth)
        pair_step(s, p, packed, k, false, rows, vectors);
    MLAI_UNROLL
    for (int32_t r = 0; r < rows; r++) {
        if (is_last && p->out != NULL) {
            store_pairs(p->out + r * p->out_bytes, s[r], columns, vectors);
            continue;
        }
        MLAI_UNROLL
        for (int32_t v = 0; v < vectors; v++)
            _mm512_storeu_ps(p->sums + r * PAIR_COLUMNS + v * 16, s[r][v]);
    }
}

/* 1 to PAIR_ROWS rows; a narrow panel is one vector. */
static void pair_tile_rows(const pair_rows *p, const uint32_t *packed, int64_t depth,
                           int64_t columns, bool is_first, bool is_last, int64_t rows)
{
#define PAIR_CASE(n)                                                                               \
    case n:                                                                                        \
        if (columns > 16)                                                                          \
            pair_tile(p, packed, depth, columns, is_first, is_last, n, PAIR_VECTORS);              \
        else                                                                                       \
            pair_tile(p, packed, depth, columns, is_first, is_last, n, 1);                         \
        break;
    switch (rows) {
        PAIR_CASE(1)
        PAIR_CASE(2)
        PAIR_CASE(3)
        PAIR_CASE(4)
        PAIR_CASE(5)
        PAIR_CASE(6)
    default:
        break;
    }
#undef PAIR_CASE
}

/* `rows` x up to 32 `halves` columns straight from w, all of K. */
MLAI_INLINE void pair_few(const pair_rows *p, const pair_weights *w, int64_t depth, int64_t columns,
                          const int32_t rows, const int32_t halves)
{
    __m512 s[PAIR_FEW_ROWS][PAIR_FEW_VECTORS];
    MLAI_UNROLL
    for (int32_t r = 0; r < rows; r++)
        MLAI_UNROLL
    for (int32_t v = 0; v < 2 * halves; v++)
        s[r][v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k += 2) {
        const bool has_odd = k + 1 < depth;
        __m512bh factor[PAIR_FEW_ROWS];
        MLAI_UNROLL
        for (int32_t r = 0; r < rows; r++)
            factor[r] = pair_of(p->x + r * p->x_bytes, k, has_odd);
        MLAI_UNROLL
        for (int32_t h = 0; h < halves; h++) {
            __m512i pairs[2];
            pair_columns(pairs, w->data + k * w->k_stride + h * 32, w->k_stride, has_odd,
                         first_lanes(columns - h * 32));
            MLAI_UNROLL
            for (int32_t r = 0; r < rows; r++) {
                s[r][2 * h] = _mm512_dpbf16_ps(s[r][2 * h], factor[r], as_pairs(pairs[0]));
                s[r][2 * h + 1] = _mm512_dpbf16_ps(s[r][2 * h + 1], factor[r], as_pairs(pairs[1]));
            }
        }
    }
    MLAI_UNROLL
    for (int32_t r = 0; r < rows; r++) {
        if (p->out != NULL) {
            store_pairs(p->out + r * p->out_bytes, s[r], columns, 2 * halves);
            continue;
        }
        MLAI_UNROLL
        for (int32_t v = 0; v < 2 * halves; v++)
            _mm512_storeu_ps(p->sums + r * PAIR_FEW_COLUMNS + v * 16, s[r][v]);
    }
}

#endif
