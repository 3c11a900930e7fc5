/*
 * Prefill problems; see problem.h. q [Tq, H, L], k [Tkv, Hk, L], v [Tkv, Hk, V], ragged, with
 * requests of no queries, no keys, or more queries than keys among them. Around all rows stands
 * poison.
 */
#include "oracle/numeric.h"
#include "oracle/oracle.h"
#include "oracle/problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

prefill_shape prefill_shape_make(void)
{
    prefill_shape s;
    memset(&s, 0, sizeof s);
    s.content_seed = 1;
    s.placement_seed = 2;
    s.batch = 1;
    for (int32_t b = 0; b < PROBLEM_MAX_BATCH; b++)
        s.identity[b] = b;
    s.q_len[0] = s.kv_len[0] = 1;
    s.heads = s.kv_heads = 4;
    s.qk_head_dim = 192;
    s.v_head_dim = 128;
    s.q_format = s.kv_format = s.out_format = MLA_FORMAT_F32;
    s.has_lse = 1;
    s.is_causal = 1;
    s.softmax_scale = 0.0722f;
    s.k_scale = s.v_scale = 1.0f;
    s.spread = 1.0;
    return s;
}

void prefill_shape_lengths(prefill_shape *s, int32_t batch, const int32_t *q_len,
                           const int32_t *kv_len)
{
    s->batch = batch;
    for (int32_t b = 0; b < batch; b++) {
        s->q_len[b] = q_len[b];
        s->kv_len[b] = kv_len[b];
    }
}

static void random_lengths(rng *r, prefill_shape *s)
{
    static const int32_t edges[] = {63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 1025, 2049};
    double left = (rng_chance(r, 8) ? 400e6 : 60e6) / (s->heads * (s->qk_head_dim + s->v_head_dim));
    s->batch = (int32_t)(rng_chance(r, 30) ? 1 : rng_range(r, 1, rng_chance(r, 10) ? 40 : 6));
    for (int32_t b = 0; b < s->batch; b++) {
        int32_t n = (int32_t)(rng_chance(r, 40) ? RNG_PICK(r, edges) : rng_range(r, 0, 300));
        int32_t prefix = (int32_t)(rng_chance(r, 50) ? 0 : rng_range(r, -20, 400));
        double most = sqrt(left > 0 ? left : 0);
        n = n > most ? (int32_t)most : n;
        s->q_len[b] = rng_chance(r, 5) ? 0 : n;
        s->kv_len[b] = rng_chance(r, 5) ? 0 : n + prefix;
        double keys = left / (s->q_len[b] > 0 ? s->q_len[b] : 1);
        s->kv_len[b] = s->kv_len[b] > keys ? (int32_t)keys : s->kv_len[b];
        s->kv_len[b] = s->kv_len[b] < 0 ? 0 : s->kv_len[b];
        left -= (double)s->q_len[b] * s->kv_len[b];
    }
}

prefill_shape prefill_shape_random(uint64_t seed)
{
    static const int32_t heads[][2] = {{1, 1},  {2, 1},  {3, 3},  {4, 2},    {5, 5},
                                       {6, 3},  {8, 8},  {12, 4}, {16, 2},   {16, 16},
                                       {20, 5}, {24, 1}, {64, 8}, {130, 130}};
    static const int32_t dims[][2] = {{192, 128}, {192, 128}, {192, 128}, {128, 128}, {64, 64},
                                      {96, 32},   {40, 24},   {17, 9},    {1, 1},     {256, 256}};
    static const scene_layout layouts[] = {SCENE_PACKED, SCENE_GAPS, SCENE_SHUFFLED};
    static const double targets[] = {0.1, 1.0, 1.7, 1.7, 5.0};
    static const double spreads[] = {0.05, 1.0, 1.0, 4.0};
    static const float caps[] = {1.0f, 5.0f, 50.0f};
    static const float scales[] = {0.06f, 0.5f, 1.0f, 3.0f};
    rng r = rng_stream(seed, 3);
    prefill_shape s = prefill_shape_make();
    s.content_seed = rng_next(&r);
    s.placement_seed = rng_next(&r);
    int64_t h = rng_range(&r, 0, (int64_t)(sizeof heads / sizeof heads[0]) - 1);
    int64_t d = rng_range(&r, 0, (int64_t)(sizeof dims / sizeof dims[0]) - 1);
    s.heads = heads[h][0];
    s.kv_heads = heads[h][1];
    s.qk_head_dim = dims[d][0];
    s.v_head_dim = dims[d][1];
    random_lengths(&r, &s);
    s.q_format = problem_pick_format(&r);
    s.kv_format = rng_chance(&r, 60) ? s.q_format : problem_pick_format(&r);
    bool is_fp8 = s.q_format == MLA_FORMAT_E4M3 || s.q_format == MLA_FORMAT_E5M2;
    s.out_format = is_fp8 ? MLA_FORMAT_BF16 : s.q_format;
    static const int32_t outs[] = {MLA_FORMAT_F32, MLA_FORMAT_BF16, MLA_FORMAT_F16};
    if (rng_chance(&r, 35))
        s.out_format = RNG_PICK(&r, outs);
    if (s.kv_format == MLA_FORMAT_E4M3 || s.kv_format == MLA_FORMAT_E5M2) {
        s.k_scale = RNG_PICK(&r, scales);
        s.v_scale = RNG_PICK(&r, scales);
    }
    s.has_lse = rng_chance(&r, 60);
    s.is_causal = rng_chance(&r, 65);
    s.max_mode = (int32_t)rng_range(&r, 0, 2);
    s.layout = RNG_PICK(&r, layouts);
    s.spread = RNG_PICK(&r, spreads);
    double target = RNG_PICK(&r, targets) * (rng_chance(&r, 10) ? -1.0 : 1.0);
    s.softmax_scale =
        (float)(target / (sqrt(s.qk_head_dim) * s.spread * s.spread * (double)s.k_scale));
    s.logit_cap = rng_chance(&r, 25) ? RNG_PICK(&r, caps) : 0.0f;
    return s;
}

prefill_shape prefill_shape_usual(uint64_t seed)
{
    static const int32_t heads[][2] = {{1, 1}, {4, 2}, {16, 16}, {16, 1}, {64, 64}, {128, 128}};
    prefill_shape s = prefill_shape_random(seed);
    rng r = rng_stream(seed, 6);
    const int64_t h = rng_range(&r, 0, (int64_t)(sizeof heads / sizeof heads[0]) - 1);
    s.heads = heads[h][0];
    s.kv_heads = heads[h][1];
    s.qk_head_dim = 192;
    s.v_head_dim = 128;
    random_lengths(&r, &s);
    s.q_format = s.kv_format = s.out_format = rng_chance(&r, 70) ? MLA_FORMAT_BF16 : MLA_FORMAT_F16;
    s.k_scale = s.v_scale = 1.0f;
    s.layout = rng_chance(&r, 50) ? SCENE_PACKED : SCENE_ALIGNED;
    s.spread = 1.0;
    s.softmax_scale = (float)((rng_chance(&r, 10) ? -1.0 : 1.0) / sqrt(192.0));
    return s;
}

static void fill_rows(const mla_tensor *t, const prefill_shape *s, const int32_t *lengths,
                      const int32_t *first, uint64_t kind)
{
    int64_t row = 0;
    for (int32_t b = 0; b < s->batch; b++)
        for (int32_t i = 0; i < lengths[b]; i++, row++) {
            uint64_t number = (uint64_t)s->identity[b] * 1048576 + (uint64_t)i;
            number += first ? (uint64_t)first[b] : 0;
            rng r = rng_stream(s->content_seed, number * 4 + kind);
            for (int64_t h = 0; h < t->shape[1]; h++)
                for (int64_t d = 0; d < t->shape[2]; d++)
                    numeric_set(t, row, h, d, 0, (double)(float)(rng_normal(&r) * s->spread));
        }
}

static mla_tensor cumulative(prefill_problem *p, rng *r, const char *name, const int32_t *lengths)
{
    int64_t n = p->shape.batch + 1;
    mla_tensor t =
        scene_tensor(&p->base.scene, r, name, SCENE_INPUT, p->shape.layout, MLA_FORMAT_I32, 1, &n);
    int32_t *cu = t.data;
    cu[0] = 0;
    for (int32_t b = 0; b < p->shape.batch; b++)
        cu[b + 1] = cu[b] + lengths[b];
    return t;
}

static void describe(prefill_problem *p)
{
    const prefill_shape *s = &p->shape;
    int used = snprintf(
        p->base.text, sizeof p->base.text,
        "prefill H=%d Hk=%d L=%d V=%d q=%s kv=%s out=%s B=%d causal=%d lse=%d scale=%g cap=%g "
        "k_scale=%g v_scale=%g layout=%d max=%d q_len:kv_len=",
        s->heads, s->kv_heads, s->qk_head_dim, s->v_head_dim, mla_format_name(s->q_format),
        mla_format_name(s->kv_format), mla_format_name(s->out_format), s->batch, s->is_causal,
        s->has_lse, (double)s->softmax_scale, (double)s->logit_cap, (double)s->k_scale,
        (double)s->v_scale, (int)s->layout, s->max_mode);
    for (int32_t b = 0; b < s->batch && b < 12; b++)
        used += snprintf(p->base.text + used, sizeof p->base.text - (size_t)used, "%d:%d ",
                         s->q_len[b], s->kv_len[b]);
}

prefill_problem *prefill_problem_make(const prefill_shape *shape, uint64_t seed)
{
    prefill_problem *p = calloc(1, sizeof *p);
    if (!p)
        exit(1);
    p->base.seed = seed;
    p->shape = *shape;
    const prefill_shape *s = &p->shape;
    scene *sc = &p->base.scene;
    mla_prefill_params *q = &p->params;
    *q = (mla_prefill_params)MLA_PREFILL_PARAMS_INIT;
    rng r = rng_stream(s->placement_seed, 7);
    int64_t tq = 0, tkv = 0;
    int32_t most_q = 0, most_kv = 0;
    for (int32_t b = 0; b < s->batch; b++) {
        tq += s->q_len[b];
        tkv += s->kv_len[b];
        most_q = s->q_len[b] > most_q ? s->q_len[b] : most_q;
        most_kv = s->kv_len[b] > most_kv ? s->kv_len[b] : most_kv;
        p->work +=
            (int64_t)s->q_len[b] * s->kv_len[b] * s->heads * (s->qk_head_dim + s->v_head_dim);
    }
    q->is_causal = s->is_causal;
    q->softmax_scale = s->softmax_scale;
    q->logit_cap = s->logit_cap;
    q->k_scale = s->k_scale;
    q->v_scale = s->v_scale;
    q->max_seqlen_q = s->max_mode == 0 ? 0 : most_q + 100 * (s->max_mode - 1);
    q->max_seqlen_kv = s->max_mode == 0 ? 0 : most_kv + 100 * (s->max_mode - 1);
    int64_t q_shape[3] = {tq, s->heads, s->qk_head_dim};
    int64_t k_shape[3] = {tkv, s->kv_heads, s->qk_head_dim};
    int64_t v_shape[3] = {tkv, s->kv_heads, s->v_head_dim};
    int64_t o_shape[3] = {tq, s->heads, s->v_head_dim};
    q->q = scene_tensor(sc, &r, "q", SCENE_INPUT, s->layout, s->q_format, 3, q_shape);
    q->k = scene_tensor(sc, &r, "k", SCENE_INPUT, s->layout, s->kv_format, 3, k_shape);
    q->v = scene_tensor(sc, &r, "v", SCENE_INPUT, s->layout, s->kv_format, 3, v_shape);
    q->out = scene_tensor(sc, &r, "out", SCENE_OUTPUT, s->layout, s->out_format, 3, o_shape);
    scene_layout flat = s->layout == SCENE_PACKED ? SCENE_PACKED : SCENE_GAPS;
    if (s->has_lse)
        q->lse = scene_tensor(sc, &r, "lse", SCENE_OUTPUT, flat, MLA_FORMAT_F32, 2, o_shape);
    q->cu_seqlens_q = cumulative(p, &r, "cu_seqlens_q", s->q_len);
    q->cu_seqlens_kv = cumulative(p, &r, "cu_seqlens_kv", s->kv_len);
    fill_rows(&q->q, s, s->q_len, s->query_first, 1);
    fill_rows(&q->k, s, s->kv_len, NULL, 2);
    fill_rows(&q->v, s, s->kv_len, NULL, 3);
    scene_seal(sc);
    describe(p);
    return p;
}

void prefill_problem_free(prefill_problem *p)
{
    if (!p)
        return;
    scene_free(&p->base.scene);
    oracle_free(p->want);
    free(p);
}
