/*
 * Scores with rows in lanes. A pair of dims of a key is four bytes of its row, which the
 * instruction takes as a broadcast operand; nothing of K is packed:
 *
 *   Q packed [pair of dims][rows]           key row: bf16 d0 d1 | d2 d3 | ...
 *     zmm: r0(d0 d1) r1(d0 d1) ...  x      broadcast (d0 d1)             -> scores [key][rows] f32
 *   tile: 4 vectors of rows x 6 keys (3 x 8, 2 x 8, 1 x 8), one chain over the pairs of dims
 *
 * The lines of the next tile's keys are asked for into the first-level cache. ds656: the scores of
 * each 128 dims are summed apart and then multiplied by the key's scale of that tile.
 */
#ifndef MLAI_DOT_SCORES_H
#define MLAI_DOT_SCORES_H

#include "cpu/kernels/dot_unit.h"
#include "cpu/kernels/row_feed.h"

enum { S_KEYS = 8 }; /* keys of a tile, at most */

typedef struct tile_of_scores {
    vec acc[S_KEYS][G_VECS];
} tile_of_scores;

/* acc += q x keys over n_pairs pairs that start `byte` bytes into the rows. */
MLAI_INLINE void score_pairs(const int32_t n_vecs, const int32_t n_keys, tile_of_scores *t,
                             const void *const *keys, int64_t byte, int64_t n_pairs,
                             const uint32_t *q, int64_t stride, feed *ahead)
{
    const char *k[S_KEYS];
    MLAI_UNROLL
    for (int32_t j = 0; j < n_keys; j++)
        k[j] = (const char *)keys[j] + byte;
    /* A cache line of each key at a time; without a feed also the line of the tile that is next. */
    for (int64_t line = 0; line < n_pairs; line += LINE_PAIRS) {
        if (ahead)
            feed_step(ahead);
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++)
            _mm_prefetch((const char *)keys[n_keys + j] + byte + 4 * line, _MM_HINT_T0);
        int64_t end = line + LINE_PAIRS < n_pairs ? line + LINE_PAIRS : n_pairs;
        for (int64_t i = line; i < end; i++) {
            __m512i row[G_VECS];
            MLAI_UNROLL
            for (int32_t v = 0; v < n_vecs; v++)
                row[v] = _mm512_loadu_si512(q + v * V_LANES);
            MLAI_UNROLL
            for (int32_t j = 0; j < n_keys; j++) {
                __m512i x = pair_at(k[j] + 4 * i);
                MLAI_UNROLL
                for (int32_t v = 0; v < n_vecs; v++)
                    t->acc[j][v] = dot(t->acc[j][v], row[v], x);
            }
            q += stride;
        }
    }
}

MLAI_INLINE void clear_tile(const int32_t n_vecs, const int32_t n_keys, tile_of_scores *t)
{
    MLAI_UNROLL
    for (int32_t j = 0; j < n_keys; j++) {
        MLAI_UNROLL
        for (int32_t v = 0; v < n_vecs; v++)
            t->acc[j][v] = v_set1(0.0f);
    }
}

MLAI_INLINE void score_tile(const int32_t n_vecs, const int32_t n_keys, const mlai_unit *u,
                            const scratch *s, const bf16_rows *rows, const uint32_t *q,
                            int64_t stride, int32_t first_vec, int32_t key, feed *ahead)
{
    tile_of_scores t;
    float *scores = s->scores + key * stride + first_vec * V_LANES;
    q += first_vec * V_LANES;
    clear_tile(n_vecs, n_keys, &t);
    if (s->tiles == 1) {
        for (int32_t piece = 0; piece < u->shape->n_pieces; piece++) {
            int64_t n = (u->shape->piece_dims[piece] + 1) / 2;
            score_pairs(n_vecs, n_keys, &t, rows->keys[piece] + key, 0, n, q, stride, ahead);
            q += n * stride;
        }
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++) {
            MLAI_UNROLL
            for (int32_t v = 0; v < n_vecs; v++)
                v_store(scores + j * stride + v * V_LANES, t.acc[j][v]);
        }
        return;
    }
    /* ds656: rope first, then each tile of 128 dims times its scale. */
    int64_t tile_pairs = MLAI_DS656_TILE / 2, step = tile_pairs * stride;
    score_pairs(n_vecs, n_keys, &t, rows->keys[1] + key, 0, u->shape->piece_dims[1] / 2,
                q + MLAI_DS656_TILES * step, stride, ahead);
    for (int32_t tile = 0; tile <= MLAI_DS656_TILES; tile++) {
        const float *scales = s->scales + (int64_t)key * MLAI_DS656_TILES + tile - 1;
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++) {
            MLAI_UNROLL
            for (int32_t v = 0; v < n_vecs; v++) {
                float *at = scores + j * stride + v * V_LANES;
                v_store(at, tile == 0 ? t.acc[j][v]
                                      : v_fma(t.acc[j][v], v_set1(scales[j * MLAI_DS656_TILES]),
                                              v_load(at)));
            }
        }
        if (tile == MLAI_DS656_TILES)
            break;
        clear_tile(n_vecs, n_keys, &t);
        score_pairs(n_vecs, n_keys, &t, rows->keys[0] + key, tile * MLAI_DS656_TILE * 2, tile_pairs,
                    q + tile * step, stride, ahead);
    }
}

/* Keys first..end-1 of n_vecs vectors of rows from first_vec on. */
MLAI_INLINE void score_keys(const int32_t n_vecs, const int32_t tile, const mlai_unit *u,
                            const scratch *s, const bf16_rows *rows, const uint32_t *q,
                            int64_t stride, int32_t first_vec, int32_t first, int32_t end,
                            feed *ahead)
{
    int32_t key = first;
    for (; key + tile <= end; key += tile)
        score_tile(n_vecs, tile, u, s, rows, q, stride, first_vec, key, ahead);
    if (key + 4 <= end) {
        score_tile(n_vecs, 4, u, s, rows, q, stride, first_vec, key, ahead);
        key += 4;
    }
    for (; key < end; key += 2)
        score_tile(n_vecs, 2, u, s, rows, q, stride, first_vec, key, ahead);
}

/* The same for one vector of rows; its tile is short, so the next line of each key is asked for. */
MLAI_INLINE void score_vector_pairs(const int32_t n_keys, vec acc[S_KEYS], const void *const *keys,
                                    int64_t byte, int64_t n_pairs, const uint32_t *q, feed *ahead)
{
    const char *k[S_KEYS];
    MLAI_UNROLL
    for (int32_t j = 0; j < n_keys; j++)
        k[j] = (const char *)keys[j] + byte;
    /* A cache line of each key at a time, and the line after it. */
    for (int64_t line = 0; line < n_pairs; line += LINE_PAIRS) {
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++)
            _mm_prefetch(k[j] + 4 * (line + LINE_PAIRS), _MM_HINT_T0);
        feed_step(ahead);
        int64_t end = line + LINE_PAIRS < n_pairs ? line + LINE_PAIRS : n_pairs;
        for (int64_t i = line; i < end; i++) {
            __m512i row = _mm512_loadu_si512(q + i * V_LANES);
            MLAI_UNROLL
            for (int32_t j = 0; j < n_keys; j++)
                acc[j] = dot(acc[j], row, pair_at(k[j] + 4 * i));
        }
    }
}

/* One vector of rows against n_keys keys from `key` on; not ds656. */
MLAI_INLINE void score_vector_tile(const int32_t n_keys, const mlai_unit *u, const scratch *s,
                                   const bf16_rows *rows, const uint32_t *q, int32_t key,
                                   feed *ahead)
{
    vec acc[S_KEYS];
    MLAI_UNROLL
    for (int32_t j = 0; j < n_keys; j++)
        acc[j] = v_set1(0.0f);
    for (int32_t piece = 0; piece < u->shape->n_pieces; piece++) {
        int64_t n = (u->shape->piece_dims[piece] + 1) / 2;
        score_vector_pairs(n_keys, acc, rows->keys[piece] + key, 0, n, q, ahead);
        q += n * V_LANES;
    }
    MLAI_UNROLL
    for (int32_t j = 0; j < n_keys; j++)
        v_store(s->scores + (key + j) * V_LANES, acc[j]);
}

/* A function of its own, for the sake of its registers. */
static __attribute__((noinline)) void score_vector(const mlai_unit *u, const scratch *s,
                                                   const bf16_rows *rows, const uint32_t *q,
                                                   int32_t n_keys, feed *ahead)
{
    int32_t key = 0;
    for (; key + S_KEYS <= n_keys; key += S_KEYS)
        score_vector_tile(S_KEYS, u, s, rows, q, key, ahead);
    for (; key < n_keys; key += 2)
        score_vector_tile(2, u, s, rows, q, key, ahead);
}

/*
 * A group of n_vecs vectors of rows, the first of which is block row `row`. What lies above the
 * diagonal of a causal block is left out by vectors: once the keys that a vector sees are done, the
 * vectors behind it go on alone.
 */
static void score_group(const mlai_unit *u, const scratch *s, const bf16_rows *rows,
                        const uint32_t *q, int32_t row, int32_t n_vecs, int32_t n_keys, feed *ahead)
{
    int64_t stride = n_vecs * V_LANES;
    n_keys += n_keys & 1;
    if (n_vecs == 1 && s->tiles == 1 && ahead) {
        score_vector(u, s, rows, q, n_keys, ahead);
        return;
    }
    for (int32_t v = 0, key = 0, end; v < n_vecs; v++, key = end) {
        end = keys_seen(u, row + v * V_LANES, V_LANES);
        end = mlai_max_i64(key, end + (end & 1));
        switch (n_vecs - v) {
        case 4:
            score_keys(4, 6, u, s, rows, q, stride, v, key, end, ahead);
            break;
        case 3:
            score_keys(3, 8, u, s, rows, q, stride, v, key, end, ahead);
            break;
        case 2:
            score_keys(2, 8, u, s, rows, q, stride, v, key, end, ahead);
            break;
        default:
            score_keys(1, 8, u, s, rows, q, stride, v, key, end, ahead);
        }
    }
}

#endif
