/*
 * The softmax of a unit and the fold of triples, rows in lanes: shared by the attention kernels, in
 * the instruction set of the file that includes this (vec_f32.h). attention_kernel.h has the rules.
 */
#ifndef MLAI_SOFTMAX_H
#define MLAI_SOFTMAX_H

#include "cpu/attention_kernel.h"
#include "cpu/kernels/vec_f32.h"

/*
 * Raw products q . k of one vector of rows to scores in base 2, in place: scale, cap, -inf for what
 * a row does not see. Returns their maximum. `stride` floats lie between keys; `first` is the block
 * row of lane 0.
 */
static vec scores_to_base2(const mlai_unit *u, float *scores, int64_t stride, int32_t n_keys,
                           int32_t first)
{
    const float log2e = 1.4426950408889634f;
    const int32_t *visible = u->visible + first;
    int32_t all_see = n_keys;
    for (int32_t i = 0; i < V_LANES; i++)
        all_see = visible[i] < all_see ? visible[i] : all_see;
    vec to_base2 = v_set1(u->cap > 0.0f ? u->cap * log2e : u->scale * log2e);
    vec to_tanh = v_set1(u->cap > 0.0f ? u->scale / u->cap : 0.0f);
    vec none = v_set1(-INFINITY), m[4] = {none, none, none, none};
    int32_t key = 0;
    /* Nothing to hide and no cap, the usual case: four chains, since a maximum has its latency. */
    if (!u->hidden && !(u->cap > 0.0f)) {
        for (; key + 4 <= all_see; key += 4) {
            MLAI_UNROLL
            for (int32_t i = 0; i < 4; i++) {
                vec s = v_mul(v_load(scores + (key + i) * stride), to_base2);
                v_store(scores + (key + i) * stride, s);
                m[i] = v_max(m[i], s);
            }
        }
    }
    for (; key < n_keys; key++) {
        float *at = scores + key * stride;
        vec s = v_load(at);
        if (u->cap > 0.0f)
            s = v_tanh(v_mul(s, to_tanh));
        s = v_mul(s, to_base2);
        if (key >= all_see)
            s = v_select(v_not_above(visible, key), none, s);
        if (u->hidden)
            s = v_select(v_nonzero_bytes(u->hidden + (int64_t)key * MLAI_BLOCK_ROWS + first), none,
                         s);
        v_store(at, s);
        m[0] = v_max(m[0], s);
    }
    return v_max(v_max(m[0], m[1]), v_max(m[2], m[3]));
}

/* What scores are measured from: the maximum, or 0 where nothing is seen, since -inf - -inf would
 * be NaN; from 0 every -inf gives p = 0. */
MLAI_INLINE vec score_origin(vec m)
{
    return v_select(v_less(v_set1(-INFINITY), m), m, v_set1(0.0f));
}

/* The fold of (m, l) of one vector of rows, and the factors for o. */
MLAI_INLINE void fold_vec(float *m_acc, float *l_acc, vec m, vec l, float *a_out, float *b_out)
{
    vec old = v_load(m_acc), m_new = v_max(old, m), from = score_origin(m_new);
    /* Nothing seen so far: a = 0 times an o of zeros. Nothing in the unit: b = 0, a = 1. */
    vec a = v_exp2(v_sub(old, from)), b = v_exp2(v_sub(m, from));
    v_store(m_acc, m_new);
    v_store(l_acc, v_fma(l, b, v_mul(v_load(l_acc), a)));
    v_store(a_out, a);
    v_store(b_out, b);
}

/* (m, l) of a unit into the accumulator of block rows row..row + V_LANES - 1. */
MLAI_INLINE void take_max_and_sum(const mlai_unit *u, int32_t row, vec m, vec l, float *a, float *b)
{
    if (u->is_first) {
        v_store(u->acc.m + row, m);
        v_store(u->acc.l + row, l);
    } else {
        fold_vec(u->acc.m + row, u->acc.l + row, m, l, a + row, b + row);
    }
}

static void fold_triples(mlai_triple acc, mlai_triple next, int64_t stride, int32_t first,
                         int32_t end)
{
    for (int32_t row = first; row < end; row++) {
        float m[V_LANES] = {0}, l[V_LANES] = {0}, m2[V_LANES] = {0}, l2[V_LANES] = {0};
        float a[V_LANES], b[V_LANES];
        m[0] = acc.m[row];
        l[0] = acc.l[row];
        m2[0] = next.m[row];
        l2[0] = next.l[row];
        fold_vec(m, l, v_load(m2), v_load(l2), a, b);
        acc.m[row] = m[0];
        acc.l[row] = l[0];
        float *o = acc.o + row * stride;
        const float *o2 = next.o + row * stride;
        for (int64_t i = 0; i < stride; i += V_LANES) {
            vec old = v_mul(v_load(o + i), v_set1(a[0]));
            v_store(o + i, v_fma(v_load(o2 + i), v_set1(b[0]), old));
        }
    }
}

#endif
