/*
 * Softmax of a unit: scores [key][rows] -> P packed [vector][pair of keys][16]: r0(k0 k1) r1(k0 k1)
 * ... Probabilities are rounded to bf16, their sum is not. ds656: the scale of the values' tile
 * goes into P, one P a tile, so that only P is rounded.
 */
#ifndef MLAI_DOT_SOFTMAX_H
#define MLAI_DOT_SOFTMAX_H

#include "cpu/kernels/dot_unit.h"
#include <float.h>

/*
 * What turns products q . k of block rows first..first + 15 into scores in base 2: factor and
 * maximum; score = product * factor. With a cap, or a factor that turns the order round, the
 * products are made scores first and the factor is 1. Products of keys that a row does not see
 * become -inf.
 */
static vec find_maximum(const mlai_unit *u, float *scores, int64_t stride, int32_t n_keys,
                        int32_t first, float *factor)
{
    const int32_t *visible = u->visible + first;
    *factor = u->scale * 1.4426950408889634f;
    if (u->cap > 0.0f || !(*factor >= FLT_MIN)) {
        *factor = 1.0f;
        return scores_to_base2(u, scores, stride, n_keys, first);
    }
    int32_t key = 0, all_see = u->hidden ? 0 : n_keys;
    for (int32_t i = 0; i < V_LANES; i++)
        all_see = visible[i] < all_see ? visible[i] : all_see;
    vec none = v_set1(-INFINITY), m[4] = {none, none, none, none};
    for (; key + 4 <= all_see; key += 4) {
        MLAI_UNROLL
        for (int32_t i = 0; i < 4; i++)
            m[i] = v_max(m[i], v_load(scores + (key + i) * stride));
    }
    for (; key < n_keys; key++) {
        float *at = scores + key * stride;
        vec s = v_select(v_not_above(visible, key), none, v_load(at));
        if (u->hidden)
            s = v_select(v_nonzero_bytes(u->hidden + (int64_t)key * MLAI_BLOCK_ROWS + first), none,
                         s);
        v_store(at, s);
        m[0] = v_max(m[0], s);
    }
    return v_mul(v_max(v_max(m[0], m[1]), v_max(m[2], m[3])), v_set1(*factor));
}

/* ds656 of up to 4 rows: one P does, with the rows of tile t in lanes 4 t .. 4 t + 3. */
static bool is_dealt(const mlai_unit *u, const scratch *s)
{
    return s->tiles > 1 && u->n_rows <= V_LANES / MLAI_DS656_TILES;
}

MLAI_INLINE vec deal(vec p, const float *scales)
{
    const __m512i tile_of_lane = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    vec scale = _mm512_permutexvar_ps(tile_of_lane, _mm512_castps128_ps512(_mm_loadu_ps(scales)));
    return v_mul(_mm512_broadcast_f32x4(_mm512_castps512_ps128(p)), scale);
}

static void softmax_rows(const mlai_unit *u, const scratch *s, float *scores, int64_t stride,
                         uint32_t *p, int32_t first, int32_t n_keys)
{
    float factor;
    vec m = find_maximum(u, scores, stride, n_keys, first, &factor);
    vec from = v_sub(v_set1(0.0f), score_origin(m)), times = v_set1(factor);
    vec l = v_set1(0.0f), l_odd = l;
    for (int32_t key = 0; key < n_keys; key += 2, p += V_LANES) {
        const float *at = scores + key * stride;
        vec even = exp2_for_bf16(v_fma(v_load(at), times, from)), odd = v_set1(0.0f);
        l = v_add(l, even);
        if (key + 1 < n_keys) {
            odd = exp2_for_bf16(v_fma(v_load(at + stride), times, from));
            l_odd = v_add(l_odd, odd);
        }
        if (s->tiles == 1) {
            _mm512_storeu_si512(p, join_pairs(even, odd));
            continue;
        }
        const float *scales = s->scales + (int64_t)key * MLAI_DS656_TILES;
        if (is_dealt(u, s)) {
            _mm512_storeu_si512(
                p, join_pairs(deal(even, scales), deal(odd, scales + MLAI_DS656_TILES)));
            continue;
        }
        for (int32_t tile = 0; tile < MLAI_DS656_TILES; tile++)
            _mm512_storeu_si512(p + (int64_t)tile * s->p_rows * PAIRS,
                                join_pairs(v_mul(even, v_set1(scales[tile])),
                                           v_mul(odd, v_set1(scales[MLAI_DS656_TILES + tile]))));
    }
    take_max_and_sum(u, first, m, v_add(l, l_odd), s->a, s->b);
}

#endif
