/*
 * Scores of few heads, with dims in lanes: Q packed [row][dims], key rows loaded as vectors of 32
 * dims, one sum a lane, lanes added at the end. Tiles: 4 rows x 4 keys, 2 x 4, 1 x 8. ds656 has a
 * second sum for what is scaled (4 x 3 keys).
 */
#ifndef MLAI_DOT_NARROW_H
#define MLAI_DOT_NARROW_H

#include "cpu/kernels/dot_unit.h"
#include "cpu/kernels/row_feed.h"

enum { ROPE_CHUNKS = 2 }; /* of ds656 */

/* acc[row][key] += q x keys with dims in lanes, n_chunks vectors of them from `first` on; q points
 * at the first row's dims. */
MLAI_INLINE void narrow_chunks(const int32_t n_rows, const int32_t n_keys, const int32_t n_chunks,
                               vec acc[4][8], const void *const *keys, int64_t first,
                               const uint16_t *q, int64_t q_stride)
{
    MLAI_UNROLL
    for (int32_t c = 0; c < n_chunks; c++) {
        __m512i x[8];
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++)
            x[j] = _mm512_loadu_si512((const uint16_t *)keys[j] + first + c * CHUNK);
        MLAI_UNROLL
        for (int32_t r = 0; r < n_rows; r++) {
            __m512i row = _mm512_loadu_si512(q + r * q_stride + first + c * CHUNK);
            MLAI_UNROLL
            for (int32_t j = 0; j < n_keys; j++)
                acc[r][j] = dot(acc[r][j], row, x[j]);
        }
    }
}

MLAI_INLINE void narrow_dims(const int32_t n_rows, const int32_t n_keys, vec acc[4][8],
                             const void *const *keys, int64_t n, const uint16_t *q,
                             int64_t q_stride, feed *ahead)
{
    int64_t d = 0;
    for (; d + NARROW_STEP * CHUNK <= n; d += NARROW_STEP * CHUNK) {
        feed_step(ahead);
        narrow_chunks(n_rows, n_keys, NARROW_STEP, acc, keys, d, q, q_stride);
    }
    for (; d < n; d += CHUNK)
        narrow_chunks(n_rows, n_keys, 1, acc, keys, d, q, q_stride);
}

/* Sums of the lanes of a tile to scores[key][row]. Every sum is the same tree of additions. */
MLAI_INLINE void add_narrow(const int32_t n_rows, const int32_t n_keys, vec acc[4][8],
                            float *scores)
{
    float four[4];
    if (n_rows == 4) {
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++)
            v_add_lanes(scores + j * V_LANES, acc[0][j], acc[1][j], acc[2][j], acc[3][j]);
        return;
    }
    MLAI_UNROLL
    for (int32_t r = 0; r < n_rows; r++) {
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j += 4) {
            v_add_lanes(four, acc[r][j], acc[r][j + 1], acc[r][j + 2], acc[r][j + 3]);
            MLAI_UNROLL
            for (int32_t i = 0; i < 4; i++) {
                if (j + i < n_keys)
                    scores[(j + i) * V_LANES + r] = four[i];
            }
        }
    }
}

/* Scores of n_rows rows (lanes lane.. of a group) and n_keys keys. */
MLAI_INLINE void narrow_tile(const int32_t n_rows, const int32_t n_keys, const bool is_scaled,
                             const mlai_unit *u, const scratch *s, const bf16_rows *rows,
                             const uint16_t *q, int32_t key, float *scores, feed *ahead)
{
    vec acc[4][8], sum[4][8];
    int64_t q_stride = padded_dims(u->shape);
    MLAI_UNROLL
    for (int32_t r = 0; r < 4; r++) {
        MLAI_UNROLL
        for (int32_t j = 0; j < 8; j++)
            acc[r][j] = sum[r][j] = v_set1(0.0f);
    }
    if (!is_scaled) {
        int64_t at = 0;
        for (int32_t piece = 0; piece < u->shape->n_pieces; piece++) {
            int64_t n = padded(u->shape->piece_dims[piece]);
            narrow_dims(n_rows, n_keys, acc, rows->keys[piece] + key, n, q + at, q_stride, ahead);
            at += n;
        }
        add_narrow(n_rows, n_keys, acc, scores);
        return;
    }
    narrow_chunks(n_rows, n_keys, ROPE_CHUNKS, sum, rows->keys[1] + key, 0,
                  q + MLAI_DS656_TILES * MLAI_DS656_TILE, q_stride);
    for (int32_t tile = 0; tile < MLAI_DS656_TILES; tile++) {
        const float *scales = s->scales + (int64_t)key * MLAI_DS656_TILES + tile;
        MLAI_UNROLL
        for (int32_t r = 0; r < n_rows; r++) {
            MLAI_UNROLL
            for (int32_t j = 0; j < n_keys; j++)
                acc[r][j] = v_set1(0.0f);
        }
        feed_step(ahead);
        narrow_chunks(n_rows, n_keys, MLAI_DS656_TILE / CHUNK, acc, rows->keys[0] + key,
                      tile * MLAI_DS656_TILE, q, q_stride);
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++) {
            vec scale = v_set1(scales[j * MLAI_DS656_TILES]);
            MLAI_UNROLL
            for (int32_t r = 0; r < n_rows; r++)
                sum[r][j] = v_fma(acc[r][j], scale, sum[r][j]);
        }
    }
    add_narrow(n_rows, n_keys, sum, scores);
}

/* n_keys is even; tiles of 3 leave 2 or 4 keys to tiles of 2. */
MLAI_INLINE void narrow_rows(const int32_t n_rows, const int32_t tile, const bool is_scaled,
                             const mlai_unit *u, const scratch *s, const bf16_rows *rows,
                             const uint16_t *q, int32_t n_keys, float *scores, feed *ahead)
{
    int32_t key = 0;
    for (; key + tile <= n_keys && !(tile == 3 && key + 4 == n_keys); key += tile)
        narrow_tile(n_rows, tile, is_scaled, u, s, rows, q, key, scores + key * V_LANES, ahead);
    for (; key < n_keys; key += 2)
        narrow_tile(n_rows, 2, is_scaled, u, s, rows, q, key, scores + key * V_LANES, ahead);
}

static void score_narrow(const mlai_unit *u, const scratch *s, const bf16_rows *rows, int32_t first,
                         int32_t n_keys, feed *ahead)
{
    int64_t dims = padded_dims(u->shape);
    int32_t end = first + V_LANES < u->n_rows ? first + V_LANES : u->n_rows;
    n_keys += n_keys & 1;
    if (end - first < V_LANES) /* lanes that hold no row */
        memset(s->scores, 0, (size_t)n_keys * V_LANES * sizeof(float));
    for (int32_t row = first; row < end;) {
        const uint16_t *q = (const uint16_t *)u->q + row * dims;
        float *scores = s->scores + (row - first);
        int32_t left = end - row;
        int32_t n_rows = left >= 4 ? 4 : left >= 2 ? 2 : 1;
#define NARROW_CASE(rows_of_tile, keys_of_tile, keys_of_scaled)                                    \
    case rows_of_tile:                                                                             \
        if (s->tiles == 1)                                                                         \
            narrow_rows(rows_of_tile, keys_of_tile, false, u, s, rows, q, n_keys, scores, ahead);  \
        else                                                                                       \
            narrow_rows(rows_of_tile, keys_of_scaled, true, u, s, rows, q, n_keys, scores, ahead); \
        break;
        switch (n_rows) {
            NARROW_CASE(4, 4, 3)
            NARROW_CASE(2, 4, 4)
            NARROW_CASE(1, 8, 8)
        default:
            break;
        }
#undef NARROW_CASE
        row += n_rows;
    }
}

#endif
