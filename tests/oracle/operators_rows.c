/*
 * merge, rope and pack for the suites.
 *   merge  m = max lse_i, w_i = exp(lse_i - m), out = sum w_i out_i / sum w_i, lse = m + ln sum
 *   w_i.
 *          Empty states (lse -inf or +inf) hold poison in out. A state alone passes bit for bit.
 *   rope   rotation in double, within four f32 operations and one rounding.
 *   pack   [k_nope | k_pe] and v, expected bit for bit: round(f32(x) / scale), fp8 saturating.
 */
#include "oracle/compare.h"
#include "oracle/numeric.h"
#include "oracle/operators.h"
#include "oracle/operators_cache.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int32_t floats[] = {MLA_FORMAT_F32, MLA_FORMAT_BF16, MLA_FORMAT_F16};
static const int32_t all_floats[] = {MLA_FORMAT_F32, MLA_FORMAT_BF16, MLA_FORMAT_F16,
                                     MLA_FORMAT_E4M3, MLA_FORMAT_E5M2};
static const scene_layout layouts[] = {SCENE_PACKED, SCENE_GAPS, SCENE_SHUFFLED};

static void *make_problem(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (!p)
        exit(1);
    return p;
}

static void free_problem(problem_base *p)
{
    scene_free(&p->scene);
    free(p);
}

/* Element of a tensor as it was before the call, for operands that may be written in place. */
static double sealed_at(const problem_base *p, const mla_tensor *t, int64_t i0, int64_t i1,
                        int64_t i2)
{
    const scene_block *b = scene_find((scene *)(uintptr_t)&p->scene, t);
    const uint8_t *now = numeric_address(t, i0, i1, i2, 0);
    return numeric_get(b->sealed + (now - b->bytes), t->format, 0);
}

/* ---- merge ----------------------------------------------------------------------------------- */

typedef struct merge_problem {
    problem_base base;
    int32_t n_states;
    int32_t tokens, heads, width;
    mla_tensor outs[MLA_MERGE_MAX_STATES];
    mla_tensor lses[MLA_MERGE_MAX_STATES];
    mla_tensor out;
    mla_tensor lse;
    mla_tensor placed_outs[MLA_MERGE_MAX_STATES]; /* where the call finds outs and lses */
    mla_tensor placed_lses[MLA_MERGE_MAX_STATES];
} merge_problem;

static void fill_states(merge_problem *p, rng *r, int32_t empty_percent, double lse_spread)
{
    for (int32_t i = 0; i < p->n_states; i++)
        for (int32_t t = 0; t < p->tokens; t++)
            for (int32_t h = 0; h < p->heads; h++) {
                if (rng_chance(r, empty_percent)) {
                    numeric_set(&p->lses[i], t, h, 0, 0, rng_chance(r, 80) ? -INFINITY : INFINITY);
                    continue;
                }
                numeric_set(&p->lses[i], t, h, 0, 0, lse_spread * rng_normal(r));
                for (int32_t d = 0; d < p->width; d++)
                    numeric_set(&p->outs[i], t, h, d, 0, rng_normal(r));
            }
}

static problem_base *merge_make(uint64_t seed)
{
    static const int32_t heads[] = {1, 2, 3, 16, 65, 128};
    static const int32_t widths[] = {1, 7, 64, 128, 128, 512};
    static const int32_t empties[] = {0, 20, 60, 100};
    static const double spreads[] = {0.1, 3.0, 30.0, 200.0};
    rng r = rng_stream(seed, 200);
    merge_problem *p = make_problem(sizeof *p);
    scene *s = &p->base.scene;
    p->base.seed = seed;
    p->n_states = (int32_t)(rng_chance(&r, 70) ? 2 : rng_range(&r, 1, rng_chance(&r, 20) ? 64 : 9));
    p->heads = RNG_PICK(&r, heads);
    p->width = RNG_PICK(&r, widths);
    p->tokens = (int32_t)(rng_chance(&r, 5)
                              ? 0
                              : rng_range(&r, 1, 1 + 40000 / (p->heads * p->width * p->n_states)));
    scene_layout layout = RNG_PICK(&r, layouts);
    scene_layout flat = layout == SCENE_PACKED ? SCENE_PACKED : SCENE_GAPS;
    int32_t format = RNG_PICK(&r, floats);
    bool in_place = rng_chance(&r, 40), has_lse = in_place || rng_chance(&r, 70);
    int64_t shape[3] = {p->tokens, p->heads, p->width};
    for (int32_t i = 0; i < p->n_states; i++) {
        scene_role role = in_place && i == 0 ? SCENE_OUTPUT : SCENE_INPUT;
        p->outs[i] = scene_tensor(s, &r, "outs", role, layout, format, 3, shape);
        p->lses[i] = scene_tensor(s, &r, "lses", role, flat, MLA_FORMAT_F32, 2, shape);
    }
    int32_t out_format = rng_chance(&r, 60) ? format : RNG_PICK(&r, floats);
    p->out = in_place ? p->outs[0]
                      : scene_tensor(s, &r, "out", SCENE_OUTPUT, layout, out_format, 3, shape);
    if (has_lse)
        p->lse = in_place
                     ? p->lses[0]
                     : scene_tensor(s, &r, "lse", SCENE_OUTPUT, flat, MLA_FORMAT_F32, 2, shape);
    fill_states(p, &r, RNG_PICK(&r, empties), RNG_PICK(&r, spreads));
    scene_seal(s);
    for (int32_t i = 0; i < p->n_states; i++) {
        p->placed_outs[i] = p->outs[i];
        p->placed_lses[i] = p->lses[i];
        SCENE_PLACE(s, &p->placed_outs[i], &p->placed_lses[i]);
    }
    snprintf(p->base.text, sizeof p->base.text,
             "merge n=%d T=%d H=%d d=%d states=%s out=%s in_place=%d lse=%d layout=%d", p->n_states,
             p->tokens, p->heads, p->width, mla_format_name(format), mla_format_name(p->out.format),
             in_place, has_lse, (int)layout);
    return &p->base;
}

static mla_merge_state_params merge_params(const merge_problem *p)
{
    mla_merge_state_params q = MLA_MERGE_STATE_PARAMS_INIT;
    q.n_states = p->n_states;
    q.outs = p->placed_outs;
    q.lses = p->placed_lses;
    q.out = p->out;
    q.lse = p->lse;
    SCENE_PLACE(&p->base.scene, &q.out, &q.lse);
    return q;
}

static mla_status merge_describe(const problem_base *p, mla_problem *out, mla_diag *diag)
{
    mla_merge_state_params q = merge_params((const merge_problem *)p);
    return mla_merge_state_problem(&q, out, diag);
}

static mla_status merge_run(mla_context *ctx, problem_base *p, const mla_call *call, mla_diag *diag)
{
    mla_merge_state_params q = merge_params((const merge_problem *)p);
    q.call = *call;
    return mla_merge_state(ctx, &q, diag);
}

static bool merge_row(const merge_problem *p, int32_t t, int32_t h, double *worst, char *why,
                      size_t why_bytes)
{
    double lse[MLA_MERGE_MAX_STATES], weight[MLA_MERGE_MAX_STATES], m = -INFINITY, sum = 0.0;
    int32_t live = 0, only = 0;
    for (int32_t i = 0; i < p->n_states; i++) {
        lse[i] = sealed_at(&p->base, &p->lses[i], t, h, 0);
        if (isinf(lse[i]))
            continue;
        live++;
        only = i;
        m = fmax(m, lse[i]);
    }
    for (int32_t i = 0; i < p->n_states; i++) {
        weight[i] = isinf(lse[i]) ? 0.0 : exp(lse[i] - m);
        sum += weight[i];
    }
    bool passes_through = live == 1 && p->out.format == p->outs[only].format;
    for (int32_t d = 0; d <= p->width; d++) {
        bool is_lse = d == p->width;
        if (is_lse && !p->lse.rank)
            break;
        double want = is_lse ? (live ? m + log(sum) : -INFINITY) : 0.0, work = 0.0;
        for (int32_t i = 0; i < p->n_states && !is_lse; i++) {
            if (weight[i] == 0.0)
                continue;
            double term = weight[i] / sum * sealed_at(&p->base, &p->outs[i], t, h, d);
            want += term;
            work += 0x1p-24 * (6.0 + p->n_states + fabs(lse[i] - m)) * fabs(term);
        }
        double got = is_lse ? numeric_at(&p->lse, t, h, 0, 0) : numeric_at(&p->out, t, h, d, 0);
        if (is_lse)
            work = 0x1p-23 * (4.0 + fabs(want)) * (live > 0);
        else
            work += numeric_epsilon(p->out.format) * 1.001 * fabs(want) +
                    numeric_smallest(p->out.format);
        bool ok = live == 0 || (live == 1 && (is_lse || passes_through))
                      ? got == want
                      : compare_value(got, want, work);
        if (live > 0 && work > 0.0 && fabs(got - want) / work > *worst)
            *worst = fabs(got - want) / work;
        if (ok)
            continue;
        snprintf(why, why_bytes, "token %d head %d %s %d is %.9g, should be %.9g (%d live states)",
                 t, h, is_lse ? "lse" : "element", d, got, want, live);
        return false;
    }
    return true;
}

static bool merge_check(problem_base *base, double *worst, char *why, size_t why_bytes)
{
    const merge_problem *p = (const merge_problem *)base;
    *worst = 0.0;
    for (int32_t t = 0; t < p->tokens; t++)
        for (int32_t h = 0; h < p->heads; h++)
            if (!merge_row(p, t, h, worst, why, why_bytes))
                return false;
    return true;
}

/* ---- rope ------------------------------------------------------------------------------------ */

typedef struct rope_problem {
    problem_base base;
    int32_t tokens, heads, width, is_interleaved;
    int64_t position[512];
    mla_tensor x, out, positions, cos, sin;
} rope_problem;

static problem_base *rope_make(uint64_t seed)
{
    static const int32_t heads[] = {0, 1, 3, 16, 128}; /* 0: no head dimension */
    static const int32_t widths[] = {2, 6, 16, 64, 64, 128};
    rng r = rng_stream(seed, 201);
    rope_problem *p = make_problem(sizeof *p);
    scene *s = &p->base.scene;
    p->base.seed = seed;
    p->heads = RNG_PICK(&r, heads);
    p->width = RNG_PICK(&r, widths);
    p->tokens = (int32_t)(rng_chance(&r, 5) ? 0 : rng_range(&r, 1, rng_chance(&r, 20) ? 300 : 20));
    p->is_interleaved = rng_chance(&r, 50);
    scene_layout layout = RNG_PICK(&r, layouts);
    int64_t deep[3] = {p->tokens, p->heads, p->width}, flat[2] = {p->tokens, p->width};
    int32_t rank = p->heads ? 3 : 2, format = RNG_PICK(&r, floats);
    bool in_place = rng_chance(&r, 40);
    p->x = scene_tensor(s, &r, "x", in_place ? SCENE_OUTPUT : SCENE_INPUT, layout, format, rank,
                        p->heads ? deep : flat);
    p->out = in_place ? p->x
                      : scene_tensor(s, &r, "out", SCENE_OUTPUT, layout, RNG_PICK(&r, all_floats),
                                     rank, p->heads ? deep : flat);
    scene_fill(&p->x, &r, rng_chance(&r, 20) ? 300.0 : 1.0);
    rope_tables_make(s, &r, layout, p->tokens, p->width, p->position, &p->positions, &p->cos,
                     &p->sin);
    scene_seal(s);
    snprintf(p->base.text, sizeof p->base.text,
             "rope T=%d H=%d P=%d x=%s out=%s interleaved=%d in_place=%d positions=%s layout=%d",
             p->tokens, p->heads, p->width, mla_format_name(format), mla_format_name(p->out.format),
             p->is_interleaved, in_place, mla_format_name(p->positions.format), (int)layout);
    return &p->base;
}

static mla_rope_params rope_params(const rope_problem *p)
{
    mla_rope_params q = MLA_ROPE_PARAMS_INIT;
    q.is_interleaved = p->is_interleaved;
    q.x = p->x;
    q.positions = p->positions;
    q.cos = p->cos;
    q.sin = p->sin;
    q.out = p->out;
    SCENE_PLACE(&p->base.scene, &q.x, &q.positions, &q.cos, &q.sin, &q.out);
    return q;
}

static mla_status rope_describe(const problem_base *p, mla_problem *out, mla_diag *diag)
{
    mla_rope_params q = rope_params((const rope_problem *)p);
    return mla_rope_problem(&q, out, diag);
}

static mla_status rope_run(mla_context *ctx, problem_base *p, const mla_call *call, mla_diag *diag)
{
    mla_rope_params q = rope_params((const rope_problem *)p);
    q.call = *call;
    return mla_rope(ctx, &q, diag);
}

static bool rope_check(problem_base *base, double *worst, char *why, size_t why_bytes)
{
    const rope_problem *p = (const rope_problem *)base;
    double x[128];
    *worst = 0.0;
    for (int32_t t = 0; t < p->tokens; t++)
        for (int32_t h = 0; h < (p->heads ? p->heads : 1); h++) {
            for (int32_t d = 0; d < p->width; d++)
                x[d] = p->heads ? sealed_at(base, &p->x, t, h, d) : sealed_at(base, &p->x, t, d, 0);
            for (int32_t d = 0; d < p->width; d++) {
                double size;
                double want = rope_reference(x, d, p->width, &p->cos, &p->sin, p->position[t],
                                             p->is_interleaved, &size);
                double got =
                    p->heads ? numeric_at(&p->out, t, h, d, 0) : numeric_at(&p->out, t, d, 0, 0);
                double error = rounded_error(got, want, p->out.format, 0x1p-23 * size);
                *worst = fmax(*worst, error);
                if (error <= 1.0)
                    continue;
                snprintf(why, why_bytes, "token %d head %d element %d is %.9g, should be %.9g", t,
                         h, d, got, want);
                return false;
            }
        }
    return true;
}

/* ---- pack ------------------------------------------------------------------------------------ */

typedef struct pack_problem {
    problem_base base;
    int32_t tokens, heads, nope, rope, v_width;
    float k_scale, v_scale;
    mla_tensor k_nope, k_pe, v, k_out, v_out;
} pack_problem;

static problem_base *pack_make(uint64_t seed)
{
    static const int32_t heads[] = {1, 2, 5, 16, 65, 128};
    static const int32_t dims[][3] = {
        {128, 64, 128}, {128, 64, 128}, {64, 32, 96}, {7, 2, 5}, {1, 4, 3}};
    static const float scales[] = {0.06f, 0.5f, 1.0f, 3.0f};
    rng r = rng_stream(seed, 202);
    pack_problem *p = make_problem(sizeof *p);
    scene *s = &p->base.scene;
    p->base.seed = seed;
    int64_t d = rng_range(&r, 0, (int64_t)(sizeof dims / sizeof dims[0]) - 1);
    p->heads = RNG_PICK(&r, heads);
    p->nope = dims[d][0];
    p->rope = dims[d][1];
    p->v_width = dims[d][2];
    p->tokens = (int32_t)(rng_chance(&r, 5) ? 0 : rng_range(&r, 1, 1 + 400 / p->heads));
    scene_layout layout = RNG_PICK(&r, layouts);
    scene_layout flat = layout == SCENE_PACKED ? SCENE_PACKED : SCENE_GAPS;
    int32_t in = RNG_PICK(&r, floats), out = RNG_PICK(&r, all_floats);
    p->k_scale = p->v_scale = 1.0f;
    if (out == MLA_FORMAT_E4M3 || out == MLA_FORMAT_E5M2) {
        p->k_scale = RNG_PICK(&r, scales);
        p->v_scale = RNG_PICK(&r, scales);
    }
    int64_t nope[3] = {p->tokens, p->heads, p->nope}, rope2[2] = {p->tokens, p->rope};
    int64_t rope3[3] = {p->tokens, 1, p->rope}, v[3] = {p->tokens, p->heads, p->v_width};
    int64_t k[3] = {p->tokens, p->heads, p->nope + p->rope};
    bool is_deep = rng_chance(&r, 40);
    double spread = rng_chance(&r, 20) ? 500.0 : 1.0;
    p->k_nope = scene_tensor(s, &r, "k_nope", SCENE_INPUT, layout, in, 3, nope);
    p->k_pe = scene_tensor(s, &r, "k_pe", SCENE_INPUT, flat,
                           rng_chance(&r, 70) ? in : RNG_PICK(&r, floats), is_deep ? 3 : 2,
                           is_deep ? rope3 : rope2);
    p->k_out = scene_tensor(s, &r, "k_out", SCENE_OUTPUT, layout, out, 3, k);
    scene_fill(&p->k_nope, &r, spread);
    scene_fill(&p->k_pe, &r, spread);
    if (rng_chance(&r, 60)) {
        p->v = scene_tensor(s, &r, "v", SCENE_INPUT, layout, in, 3, v);
        p->v_out = scene_tensor(s, &r, "v_out", SCENE_OUTPUT, layout, out, 3, v);
        scene_fill(&p->v, &r, spread);
    }
    scene_seal(s);
    snprintf(
        p->base.text, sizeof p->base.text,
        "pack T=%d H=%d N=%d P=%d V=%d in=%s k_pe=%s out=%s v=%d k_scale=%g v_scale=%g layout=%d",
        p->tokens, p->heads, p->nope, p->rope, p->v_width, mla_format_name(in),
        mla_format_name(p->k_pe.format), mla_format_name(out), p->v.rank > 0, (double)p->k_scale,
        (double)p->v_scale, (int)layout);
    return &p->base;
}

static mla_pack_kv_params pack_params(const pack_problem *p)
{
    mla_pack_kv_params q = MLA_PACK_KV_PARAMS_INIT;
    q.k_scale = p->k_scale;
    q.v_scale = p->v_scale;
    q.k_nope = p->k_nope;
    q.k_pe = p->k_pe;
    q.v = p->v;
    q.k_out = p->k_out;
    q.v_out = p->v_out;
    SCENE_PLACE(&p->base.scene, &q.k_nope, &q.k_pe, &q.v, &q.k_out, &q.v_out);
    return q;
}

static mla_status pack_describe(const problem_base *p, mla_problem *out, mla_diag *diag)
{
    mla_pack_kv_params q = pack_params((const pack_problem *)p);
    return mla_pack_kv_problem(&q, out, diag);
}

static mla_status pack_run(mla_context *ctx, problem_base *p, const mla_call *call, mla_diag *diag)
{
    mla_pack_kv_params q = pack_params((const pack_problem *)p);
    q.call = *call;
    return mla_pack_kv(ctx, &q, diag);
}

static bool pack_check(problem_base *base, double *worst, char *why, size_t why_bytes)
{
    const pack_problem *p = (const pack_problem *)base;
    int32_t k_width = p->nope + p->rope, width = k_width + (p->v.rank ? p->v_width : 0);
    *worst = 0.0;
    for (int32_t t = 0; t < p->tokens; t++)
        for (int32_t h = 0; h < p->heads; h++)
            for (int32_t d = 0; d < width; d++) {
                bool is_v = d >= k_width;
                int32_t rope_at = d - p->nope;
                double x = is_v                ? numeric_at(&p->v, t, h, d - k_width, 0)
                           : rope_at < 0       ? numeric_at(&p->k_nope, t, h, d, 0)
                           : p->k_pe.rank == 3 ? numeric_at(&p->k_pe, t, 0, rope_at, 0)
                                               : numeric_at(&p->k_pe, t, rope_at, 0, 0);
                float scale = is_v ? p->v_scale : p->k_scale;
                const mla_tensor *out = is_v ? &p->v_out : &p->k_out;
                double want = numeric_round(out->format, (double)((float)x / scale));
                double got = numeric_at(out, t, h, is_v ? d - k_width : d, 0);
                if (got == want && signbit(got) == signbit(want))
                    continue;
                snprintf(why, why_bytes, "token %d head %d %s element %d is %.9g, should be %.9g",
                         t, h, is_v ? "v" : "k", is_v ? d - k_width : d, got, want);
                return false;
            }
    return true;
}

/* ---- the table ------------------------------------------------------------------------------- */

#define ROW_OPERATOR(name, OP)                                                                     \
    const operator_table name##_operator = {.op = OP,                                              \
                                            .usual_count = 200,                                    \
                                            .make = name##_make,                                   \
                                            .problem = name##_describe,                            \
                                            .run = name##_run,                                     \
                                            .check = name##_check,                                 \
                                            .free = free_problem};

ROW_OPERATOR(merge, MLA_OP_MERGE)
ROW_OPERATOR(rope, MLA_OP_ROPE)
ROW_OPERATOR(pack, MLA_OP_PACK)
