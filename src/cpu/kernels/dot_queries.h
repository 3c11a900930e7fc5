/*
 * Queries as the dot kernel wants them: pairs of dims of 16 rows a vector, in groups of up to 64
 * rows, or, for few heads, rows of dims.
 */
#ifndef MLAI_DOT_QUERIES_H
#define MLAI_DOT_QUERIES_H

#include "cpu/kernels/dot_unit.h"

static uint64_t q_bytes(const mlai_attention_shape *shape, int32_t n_rows)
{
    uint64_t rows = (uint64_t)(n_rows + V_LANES - 1) / V_LANES * V_LANES;
    uint64_t pairs = (uint64_t)(shape->is_narrow ? padded_dims(shape) / 2 : pairs_of(shape));
    return rows * pairs * sizeof(uint32_t);
}

/* [row][padded dims] */
static void pack_q_narrow(const mlai_attention_shape *shape, uint16_t *q,
                          const void *const *const rows[], int32_t n_rows)
{
    for (int32_t row = 0; row < n_rows; row++) {
        for (int32_t piece = 0; piece < shape->n_pieces; piece++) {
            int64_t n = shape->piece_dims[piece], width = padded(n);
            row_to_bf16(q, rows[piece][row], shape->q_format, (int32_t)n);
            memset(q + n, 0, (size_t)(width - n) * sizeof *q);
            q += width;
        }
    }
}

/* 16 rows of up to 16 pairs of dims, from dim d on, as 16 vectors of rows. */
static __attribute__((noinline)) void load_part(const mlai_attention_shape *shape,
                                                const void *const *rows, int32_t n_rows, int32_t d,
                                                int32_t m, __m512i x[V_LANES])
{
    int64_t byte = (int64_t)d * mla_format_bytes(shape->q_format);
    uint16_t part[CHUNK];
    for (int32_t lane = 0; lane < V_LANES; lane++) {
        memset(part, 0, sizeof part);
        if (lane < n_rows)
            row_to_bf16(part, (const char *)rows[lane] + byte, shape->q_format, m);
        x[lane] = _mm512_loadu_si512(part);
    }
    transpose16(x);
}

/* The same of 16 whole chunks. */
MLAI_INLINE void load_chunks(const void *const *rows, int32_t d, __m512i x[V_LANES])
{
    MLAI_UNROLL
    for (int32_t lane = 0; lane < V_LANES; lane++)
        x[lane] = _mm512_loadu_si512((const uint16_t *)rows[lane] + d);
    transpose16(x);
}

/* [group][pair of dims][rows of the group] */
static void pack_q(const mlai_attention_shape *shape, void *q, const void *const *const rows[],
                   int32_t n_rows)
{
    if (shape->is_narrow) {
        pack_q_narrow(shape, q, rows, n_rows);
        return;
    }
    int64_t pairs = pairs_of(shape);
    int32_t n_vecs = (n_rows + V_LANES - 1) / V_LANES;
    for (int32_t vec_index = 0; vec_index < n_vecs; vec_index++) {
        int32_t first = vec_index * V_LANES, group = vec_index / G_VECS * G_VECS;
        bool is_whole = first + V_LANES <= n_rows && shape->q_format == MLA_FORMAT_BF16;
        int64_t width = (int64_t)(n_vecs - group < G_VECS ? n_vecs - group : G_VECS) * V_LANES;
        uint32_t *out = (uint32_t *)q + (int64_t)group * V_LANES * pairs + (first % GROUP);
        for (int32_t piece = 0; piece < shape->n_pieces; piece++) {
            int32_t n = shape->piece_dims[piece];
            for (int32_t d = 0; d < n; d += CHUNK) {
                int32_t m = n - d < CHUNK ? n - d : CHUNK;
                __m512i x[V_LANES];
                if (m == CHUNK && is_whole) {
                    load_chunks(rows[piece] + first, d, x);
                    MLAI_UNROLL
                    for (int32_t i = 0; i < V_LANES; i++)
                        _mm512_storeu_si512(out + i * width, x[i]);
                    out += V_LANES * width;
                    continue;
                }
                load_part(shape, rows[piece] + first, n_rows - first, d, m, x);
                for (int32_t i = 0; i < (m + 1) / 2; i++, out += width)
                    _mm512_storeu_si512(out, x[i]);
            }
        }
    }
}

#endif
