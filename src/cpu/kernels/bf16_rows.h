/*
 * What the bf16 attention kernels share: rows of keys, values and queries as bf16, probabilities as
 * pairs of bf16, and the accumulator's rows. AVX-512 with BF16.
 *
 * bf16 rows are used where they lie when their widths suit the kernel; fp8 rows (exact in bf16),
 * odd widths and the fp8 part of ds656 rows are copied to scratch, padded with zeros to CHUNK
 * columns. Columns of o: each chunk of 32 as two vectors, lo = 0-3 8-11 16-19 24-27, hi = 4-7 12-15
 * 20-23 28-31, which is how two interleaved rows come out of unpacklo and unpackhi.
 */
#ifndef MLAI_BF16_ROWS_H
#define MLAI_BF16_ROWS_H

#include "cpu/attention_kernel.h"
#include "cpu/kernels/softmax.h"
#include "cpu/kernels/vec_f32.h"
#include "cpu/kernels/widen_f32.h"

enum {
    CHUNK = 2 * V_LANES, /* columns that interleave together */
    COPY_AHEAD = 4,      /* rows that a copy prefetches ahead */
    PAIRS = MLAI_UNIT_KEYS / 2
};

static int64_t padded(int64_t n)
{
    return (n + CHUNK - 1) / CHUNK * CHUNK;
}

static int64_t o_stride(const mlai_attention_shape *shape)
{
    return padded(shape->value_dims);
}

/* Dims of a row when each piece is padded to whole vectors. */
static int64_t padded_dims(const mlai_attention_shape *shape)
{
    int64_t n = 0;
    for (int32_t i = 0; i < shape->n_pieces; i++)
        n += padded(shape->piece_dims[i]);
    return n;
}

static char *carve(char **at, uint64_t bytes)
{
    char *p = *at;
    *at += mlai_align_up(bytes, 64);
    return p;
}

/* ---- keys and values to bf16 ---------------------------------------------------------------- */

/* Room for copied rows. */
typedef struct bf16_copies {
    const void **pointers[MLAI_MAX_PIECES + 1]; /* [MLAI_TILE_POINTERS]; last: values */
    uint16_t *rows; /* [MLAI_UNIT_KEYS + 1][row_halfs] copied rows, the last one zeros */
    int64_t row_halfs;
    int64_t offset[MLAI_MAX_PIECES + 1];
    float *scales; /* [MLAI_UNIT_KEYS + 1][MLAI_DS656_TILES], ds656 only */
} bf16_copies;

static bf16_copies cut_copies(const mlai_attention_shape *shape, char **at)
{
    bf16_copies s;
    int64_t offset = 0;
    s.row_halfs = padded_dims(shape) + padded(shape->value_dims);
    for (int32_t i = 0; i <= MLAI_MAX_PIECES; i++)
        s.pointers[i] = (const void **)carve(at, MLAI_TILE_POINTERS * sizeof(void *));
    s.rows = (uint16_t *)carve(at, (uint64_t)(MLAI_UNIT_KEYS + 1) * (uint64_t)s.row_halfs *
                                       sizeof(uint16_t));
    s.scales = (float *)carve(at, (MLAI_UNIT_KEYS + 1) * MLAI_DS656_TILES * sizeof(float));
    for (int32_t i = 0; i < shape->n_pieces; i++) {
        s.offset[i] = offset;
        offset += padded(shape->piece_dims[i]);
    }
    s.offset[MLAI_MAX_PIECES] = offset;
    return s;
}

typedef struct bf16_rows {
    const void *const *keys[MLAI_MAX_PIECES];
    const void *const *values;
} bf16_rows;

/* The upper half of an fp8 table (positive values) as bf16: 128 high and 128 low bytes. */
typedef struct fp8_table {
    __m512i high[2];
    __m512i low[2];
} fp8_table;

static fp8_table load_table(const float *table)
{
    fp8_table t;
    for (int32_t half = 0; half < 2; half++) {
        __m128i high[4], low[4];
        for (int32_t i = 0; i < 4; i++) {
            __m512i x = _mm512_castps_si512(v_load(table + 64 * half + 16 * i));
            high[i] = _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 24));
            low[i] = _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 16));
        }
        memcpy(&t.high[half], high, sizeof high);
        memcpy(&t.low[half], low, sizeof low);
    }
    return t;
}

/* 64 bytes of fp8 to 64 bf16. A byte's low 7 bits look up both bytes of the value, its top bit is
 * the sign; the halves of the vector are dealt out first so that they unpack in order. */
MLAI_INLINE void fp8_to_bf16(const fp8_table *t, __m512i x, __m512i out[2])
{
    x = _mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), x);
    __m512i high = _mm512_permutex2var_epi8(t->high[0], x, t->high[1]);
    __m512i low = _mm512_permutex2var_epi8(t->low[0], x, t->low[1]);
    /* high | (x & sign) */
    high = _mm512_ternarylogic_epi32(high, x, _mm512_set1_epi8((char)0x80), 0xf8);
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
}

/* n values, padded with zeros to CHUNK. */
static void copy_fp8_row(const fp8_table *table, uint16_t *out, const uint8_t *in, int32_t n)
{
    __m512i x[2];
    int32_t i = 0;
    for (; i + 2 * CHUNK <= n; i += 2 * CHUNK) {
        fp8_to_bf16(table, _mm512_loadu_si512(in + i), x);
        _mm512_storeu_si512(out + i, x[0]);
        _mm512_storeu_si512(out + i + CHUNK, x[1]);
    }
    if (i == n)
        return;
    fp8_to_bf16(table, _mm512_maskz_loadu_epi8(((__mmask64)1 << (n - i)) - 1, in + i), x);
    _mm512_storeu_si512(out + i, x[0]);
    if (n - i > CHUNK)
        _mm512_storeu_si512(out + i + CHUNK, x[1]);
}

static void copy_bf16_row(uint16_t *out, const uint16_t *in, int32_t n)
{
    int32_t i = 0;
    for (; i + CHUNK <= n; i += CHUNK)
        _mm512_storeu_si512(out + i, _mm512_loadu_si512(in + i));
    if (i < n)
        _mm512_storeu_si512(out + i,
                            _mm512_maskz_loadu_epi16((__mmask32)((1u << (n - i)) - 1), in + i));
}

/* One kind of rows (a piece, or values) to scratch; pads columns and the odd row with zeros. */
static const void *const *copy_rows(const mlai_unit *u, const bf16_copies *s, int32_t slot,
                                    const void *const *in, int32_t n, const fp8_table *table)
{
    int32_t format = u->shape->kv_format;
    int32_t bytes = format == MLA_FORMAT_DS656 ? MLA_DS656_ROW_BYTES : n * mla_format_bytes(format);
    for (int32_t key = 0; key < u->n_keys; key++) {
        uint16_t *out = s->rows + key * s->row_halfs + s->offset[slot];
        for (int32_t at = 0; at < bytes; at += 64)
            _mm_prefetch((const char *)in[key + COPY_AHEAD] + at, _MM_HINT_T0);
        if (table)
            copy_fp8_row(table, out, in[key], n);
        else
            copy_bf16_row(out, in[key], n);
        s->pointers[slot][key] = out;
    }
    uint16_t *zeros = s->rows + MLAI_UNIT_KEYS * s->row_halfs + s->offset[slot];
    memset(zeros, 0, (size_t)padded(n) * sizeof *zeros);
    for (int32_t key = u->n_keys; key < MLAI_TILE_POINTERS; key++)
        s->pointers[slot][key] = zeros;
    return s->pointers[slot];
}

/* A unit's rows as bf16; widths must be multiples of dims_multiple (scores) and CHUNK (values). */
static bf16_rows take_rows(const mlai_unit *u, const bf16_copies *s, int32_t dims_multiple)
{
    const mlai_attention_shape *shape = u->shape;
    bool is_ds656 = shape->kv_format == MLA_FORMAT_DS656;
    bool is_bf16 = shape->kv_format == MLA_FORMAT_BF16;
    bool values_fit = is_bf16 && shape->value_dims % CHUNK == 0;
    bool one_row = u->values == u->keys[0];
    bf16_rows rows = {{NULL, NULL}, NULL};
    fp8_table fp8;
    const fp8_table *table = NULL;
    if (!is_bf16) {
        fp8 = load_table(shape->kv_format == MLA_FORMAT_E5M2 ? mlai_e5m2_table : mlai_e4m3_table);
        table = &fp8;
    }
    for (int32_t i = 0; i < shape->n_pieces; i++) {
        bool fits = is_bf16 && shape->piece_dims[i] % dims_multiple == 0;
        if ((fits && !(one_row && i == 0 && !values_fit)) || (is_ds656 && i == 1))
            rows.keys[i] = u->keys[i];
        else
            rows.keys[i] = copy_rows(u, s, i, u->keys[i], shape->piece_dims[i], table);
    }
    if (one_row)
        rows.values = rows.keys[0];
    else if (values_fit)
        rows.values = u->values;
    else
        rows.values = copy_rows(u, s, MLAI_MAX_PIECES, u->values, shape->value_dims, table);
    for (int32_t key = 0; is_ds656 && key < u->n_keys; key++)
        memcpy(s->scales + key * MLAI_DS656_TILES, (const char *)u->keys[0][key] + 512,
               MLAI_DS656_TILES * sizeof(float));
    if (is_ds656)
        memset(s->scales + u->n_keys * MLAI_DS656_TILES, 0, MLAI_DS656_TILES * sizeof(float));
    return rows;
}

/* ---- queries -------------------------------------------------------------------------------- */

/* One row of q to bf16; f is exact for the formats that are taken. */
static void row_to_bf16(uint16_t *out, const void *in, int32_t format, int32_t n)
{
    if (format == MLA_FORMAT_BF16) {
        memcpy(out, in, (size_t)n * sizeof(uint16_t));
        return;
    }
    for (int32_t i = 0; i < n; i++) {
        float x = format == MLA_FORMAT_E4M3 ? mlai_e4m3_table[((const uint8_t *)in)[i]]
                                            : mlai_e5m2_table[((const uint8_t *)in)[i]];
        out[i] = mlai_bf16_from_f32(x);
    }
}

/* 16 vectors of u32, x[i][j] -> x[j][i]. */
MLAI_INLINE void transpose16(__m512i x[V_LANES])
{
    __m512i t[V_LANES];
    MLAI_UNROLL
    for (int32_t i = 0; i < V_LANES; i += 2) {
        t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    MLAI_UNROLL
    for (int32_t i = 0; i < V_LANES; i += 4) {
        x[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    /* x[4 g + c] holds columns c, c+4, c+8, c+12 of rows 4 g .. 4 g + 3, one a lane of 128 bits. */
    MLAI_UNROLL
    for (int32_t c = 0; c < 4; c++) {
        t[c] = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88);
        t[4 + c] = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xdd);
        t[8 + c] = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88);
        t[12 + c] = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xdd);
    }
    MLAI_UNROLL
    for (int32_t c = 0; c < 4; c++) {
        x[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
        x[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
        x[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
        x[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd);
    }
}

/* ---- probabilities and the accumulator ------------------------------------------------------ */

/* 2^x for x <= 0: degree 4, relative error 3e-6, an eighth of the rounding of P. */
MLAI_INLINE vec exp2_for_bf16(vec x)
{
    V_SPLIT_EXP2(x, n, f);
    vec p = v_set1(0x1.3a02c8p-7f);
    p = v_fma(p, f, v_set1(0x1.c9fc46p-5f));
    p = v_fma(p, f, v_set1(0x1.ec0378p-3f));
    p = v_fma(p, f, v_set1(0x1.62e12cp-1f));
    p = v_fma(p, f, v_set1(1.0f));
    return V_JOIN_EXP2(x, n, p);
}

/* bf16 pairs (even, odd) of 16 rows. */
MLAI_INLINE __m512i join_pairs(vec even, vec odd)
{
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

/* One row of a tile of o: n_vecs vectors from `column` on. */
MLAI_INLINE void fold_row(const int32_t n_vecs, const mlai_unit *u, const float *a_rows,
                          const float *b_rows, int32_t row, int64_t column, const vec *acc)
{
    float *o = u->acc.o + row * o_stride(u->shape) + column;
    if (u->is_first) {
        MLAI_UNROLL
        for (int32_t i = 0; i < n_vecs; i++)
            v_store(o + i * V_LANES, acc[i]);
        return;
    }
    vec a = v_set1(a_rows[row]), b = v_set1(b_rows[row]);
    MLAI_UNROLL
    for (int32_t i = 0; i < n_vecs; i++)
        v_store(o + i * V_LANES, v_fma(acc[i], b, v_mul(v_load(o + i * V_LANES), a)));
}

/* 32 values to bf16, as mlai_bf16_from_f32 rounds; the instruction would flush subnormals. */
MLAI_INLINE __m512i round_to_bf16(vec low, vec high)
{
    __m512i x[2] = {_mm512_castps_si512(low), _mm512_castps_si512(high)};
    const __m512i upper =
        _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    MLAI_UNROLL
    for (int32_t i = 0; i < 2; i++) {
        __mmask16 is_nan =
            _mm512_cmp_ps_mask(_mm512_castsi512_ps(x[i]), _mm512_castsi512_ps(x[i]), _CMP_UNORD_Q);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x[i], 16), _mm512_set1_epi32(1));
        __m512i quiet = _mm512_or_si512(x[i], _mm512_set1_epi32(0x400000));
        x[i] = _mm512_mask_mov_epi32(
            _mm512_add_epi32(_mm512_add_epi32(x[i], odd), _mm512_set1_epi32(0x7fff)), is_nan,
            quiet);
    }
    return _mm512_permutex2var_epi16(x[0], upper, x[1]);
}

static void finish(const mlai_attention_shape *shape, void *out, const float *o, float l,
                   float out_scale)
{
    float chunk[CHUNK];
    const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i high =
        _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    int32_t bytes = mla_format_bytes(shape->out_format);
    bool is_bf16 = shape->out_format == MLA_FORMAT_BF16;
    vec factor = v_set1(l != 0.0f ? out_scale / l : 0.0f);
    for (int32_t at = 0; at < shape->value_dims; at += CHUNK) {
        int32_t n = shape->value_dims - at < CHUNK ? shape->value_dims - at : CHUNK;
        char *to = (char *)out + (int64_t)at * bytes;
        vec first = v_set1(0.0f), second = first;
        if (l != 0.0f) {
            vec lo = v_mul(v_load(o + at), factor), hi = v_mul(v_load(o + at + V_LANES), factor);
            first = _mm512_permutex2var_ps(lo, low, hi);
            second = _mm512_permutex2var_ps(lo, high, hi);
        }
        if (is_bf16 && n == CHUNK) {
            _mm512_storeu_si512(to, round_to_bf16(first, second));
            continue;
        }
        v_store(chunk, first);
        v_store(chunk + V_LANES, second);
        narrow_row(to, shape->out_format, chunk, n);
    }
}

#endif
