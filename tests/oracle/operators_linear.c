/*
 * absorb and project for the suites: out[t, h] = x[t, h] W[h], in double, within the error of an
 * f32 sum of K products (a few roundings plus the square root of K of them) and the output's
 * rounding. Weights come with either dimension contiguous, at times as the two views of one
 * kv_b_proj weight [H, N + V, R]. A gate multiplies the already rounded output by 1 / (1 +
 * exp(-g)).
 */
#include "oracle/compare.h"
#include "oracle/numeric.h"
#include "oracle/operators.h"
#include "oracle/operators_cache.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct linear_problem {
    problem_base base;
    int32_t is_project;
    int32_t tokens, heads, inner, outer; /* absorb: N and R; project: R and V */
    mla_tensor x;                        /* [T, H, inner] */
    mla_tensor weight;                   /* [H, inner, outer] */
    mla_tensor gate;                     /* project: [T, H * outer] */
    mla_tensor out;                      /* [T, H, outer], project also [T, H * outer] */
    double *want; /* [T, H, outer], made by the first check; before the gate */
    double *size; /* sums of the magnitudes of the products */
} linear_problem;

/* [H, inner, outer] with outer contiguous, or inner, or a view of [H, N + V, R]. */
static void make_weight(linear_problem *p, rng *r, int32_t format)
{
    int64_t shape[3] = {p->heads, p->inner, p->outer};
    int64_t pad = rng_chance(r, 50) ? 0 : rng_range(r, 1, 9);
    int64_t straight[3] = {p->inner * (p->outer + pad), p->outer + pad, 1};
    int64_t turned[3] = {p->outer * (p->inner + pad), 1, p->inner + pad};
    bool is_turned = rng_chance(r, 50);
    if (rng_chance(r, 40)) { /* kv_b_proj: w_uk is rows [:N] of R, w_uv rows [N:] turned */
        int64_t rows = p->is_project ? p->outer : p->inner, other = rng_range(r, 1, 40);
        int64_t width = p->is_project ? p->inner : p->outer;
        int64_t all[3] = {p->heads, rows + other, width};
        mla_tensor w =
            scene_tensor(&p->base.scene, r, "kv_b_proj", SCENE_INPUT, SCENE_PACKED, format, 3, all);
        scene_fill(&w, r, 0.1);
        p->weight = w;
        if (p->is_project) {
            p->weight.data = numeric_address(&w, 0, other, 0, 0);
            p->weight.shape[1] = p->inner;
            p->weight.shape[2] = p->outer;
            p->weight.stride[1] = 1;
            p->weight.stride[2] = w.stride[1];
        } else {
            p->weight.shape[1] = p->inner;
        }
        return;
    }
    p->weight = scene_strided(&p->base.scene, "weight", SCENE_INPUT, format, 3, shape,
                              is_turned ? turned : straight, rng_range(r, 0, 5));
    scene_fill(&p->weight, r, 0.1);
}

static problem_base *make(uint64_t seed, int32_t is_project)
{
    static const int32_t formats[] = {MLA_FORMAT_F32, MLA_FORMAT_F32, MLA_FORMAT_BF16,
                                      MLA_FORMAT_BF16, MLA_FORMAT_F16};
    static const int32_t all_floats[] = {MLA_FORMAT_F32, MLA_FORMAT_BF16, MLA_FORMAT_F16,
                                         MLA_FORMAT_E4M3, MLA_FORMAT_E5M2};
    static const scene_layout layouts[] = {SCENE_PACKED, SCENE_GAPS, SCENE_SHUFFLED};
    static const int32_t dims[][2] = {{128, 512}, {128, 512}, {64, 128}, {96, 33}, {5, 7}, {1, 1}};
    static const int32_t heads[] = {1, 2, 3, 8, 16, 17};
    rng r = rng_stream(seed, is_project ? 204 : 203);
    linear_problem *p = calloc(1, sizeof *p);
    if (!p)
        exit(1);
    scene *s = &p->base.scene;
    p->base.seed = seed;
    p->is_project = is_project;
    int64_t d = rng_range(&r, 0, (int64_t)(sizeof dims / sizeof dims[0]) - 1);
    p->inner = dims[d][is_project ? 1 : 0];
    p->outer = dims[d][is_project ? 0 : 1];
    p->heads = RNG_PICK(&r, heads);
    p->tokens = (int32_t)(rng_chance(&r, 5) ? 0 : rng_range(&r, 1, rng_chance(&r, 20) ? 33 : 6));
    scene_layout layout = RNG_PICK(&r, layouts);
    int32_t format = RNG_PICK(&r, formats);
    int32_t out_format =
        rng_chance(&r, 50) ? format : all_floats[rng_range(&r, 0, is_project ? 2 : 4)];
    int64_t x[3] = {p->tokens, p->heads, p->inner}, out[3] = {p->tokens, p->heads, p->outer};
    int64_t joined[2] = {p->tokens, (int64_t)p->heads * p->outer};
    bool is_joined = is_project && rng_chance(&r, 50);
    p->x = scene_tensor(s, &r, is_project ? "latent" : "q_nope", SCENE_INPUT, layout, format, 3, x);
    scene_fill(&p->x, &r, 1.0);
    make_weight(p, &r, rng_chance(&r, 60) ? format : MLA_FORMAT_F32);
    p->out = scene_tensor(s, &r, "out", SCENE_OUTPUT, layout, out_format, is_joined ? 2 : 3,
                          is_joined ? joined : out);
    if (is_project && rng_chance(&r, 40)) {
        p->gate =
            scene_tensor(s, &r, "gate", SCENE_INPUT, layout, RNG_PICK(&r, formats), 2, joined);
        scene_fill(&p->gate, &r, 3.0);
    }
    scene_seal(s);
    snprintf(p->base.text, sizeof p->base.text,
             "%s T=%d H=%d K=%d M=%d x=%s weight=%s (strides %lld %lld) out=%s gate=%d joined=%d "
             "layout=%d",
             is_project ? "project" : "absorb", p->tokens, p->heads, p->inner, p->outer,
             mla_format_name(format), mla_format_name(p->weight.format),
             (long long)p->weight.stride[1], (long long)p->weight.stride[2],
             mla_format_name(out_format), p->gate.rank > 0, is_joined, (int)layout);
    return &p->base;
}

static problem_base *absorb_make(uint64_t seed)
{
    return make(seed, 0);
}

static problem_base *project_make(uint64_t seed)
{
    return make(seed, 1);
}

static void linear_free(problem_base *base)
{
    linear_problem *p = (linear_problem *)base;
    scene_free(&base->scene);
    free(p->want);
    free(p->size);
    free(p);
}

static mla_absorb_query_params absorb_params(const linear_problem *p)
{
    mla_absorb_query_params q = MLA_ABSORB_QUERY_PARAMS_INIT;
    q.q_nope = p->x;
    q.w_uk = p->weight;
    q.out = p->out;
    SCENE_PLACE(&p->base.scene, &q.q_nope, &q.w_uk, &q.out);
    return q;
}

static mla_project_value_params project_params(const linear_problem *p)
{
    mla_project_value_params q = MLA_PROJECT_VALUE_PARAMS_INIT;
    q.latent = p->x;
    q.w_uv = p->weight;
    q.gate = p->gate;
    q.out = p->out;
    SCENE_PLACE(&p->base.scene, &q.latent, &q.w_uv, &q.gate, &q.out);
    return q;
}

static mla_status absorb_describe(const problem_base *p, mla_problem *out, mla_diag *diag)
{
    mla_absorb_query_params q = absorb_params((const linear_problem *)p);
    return mla_absorb_query_problem(&q, out, diag);
}

static mla_status project_describe(const problem_base *p, mla_problem *out, mla_diag *diag)
{
    mla_project_value_params q = project_params((const linear_problem *)p);
    return mla_project_value_problem(&q, out, diag);
}

static mla_status absorb_run(mla_context *ctx, problem_base *p, const mla_call *call,
                             mla_diag *diag)
{
    mla_absorb_query_params q = absorb_params((const linear_problem *)p);
    q.call = *call;
    return mla_absorb_query(ctx, &q, diag);
}

static mla_status project_run(mla_context *ctx, problem_base *p, const mla_call *call,
                              mla_diag *diag)
{
    mla_project_value_params q = project_params((const linear_problem *)p);
    q.call = *call;
    return mla_project_value(ctx, &q, diag);
}

static double *doubles(int64_t count)
{
    double *x = calloc((size_t)(count > 0 ? count : 1), sizeof *x);
    if (!x)
        exit(1);
    return x;
}

static void expect(linear_problem *p)
{
    double *weight = doubles((int64_t)p->inner * p->outer), *x = doubles(p->inner);
    p->want = doubles((int64_t)p->tokens * p->heads * p->outer);
    p->size = doubles((int64_t)p->tokens * p->heads * p->outer);
    for (int32_t h = 0; h < p->heads; h++) {
        for (int32_t k = 0; k < p->inner; k++)
            for (int32_t m = 0; m < p->outer; m++)
                weight[k * p->outer + m] = numeric_at(&p->weight, h, k, m, 0);
        for (int32_t t = 0; t < p->tokens; t++) {
            double *want = p->want + ((int64_t)t * p->heads + h) * p->outer;
            double *size = p->size + ((int64_t)t * p->heads + h) * p->outer;
            for (int32_t k = 0; k < p->inner; k++)
                x[k] = numeric_at(&p->x, t, h, k, 0);
            for (int32_t k = 0; k < p->inner; k++)
                for (int32_t m = 0; m < p->outer; m++) {
                    double term = x[k] * weight[k * p->outer + m];
                    want[m] += term;
                    size[m] += fabs(term);
                }
        }
    }
    free(weight);
    free(x);
}

static bool linear_check(problem_base *base, double *worst, char *why, size_t why_bytes)
{
    linear_problem *p = (linear_problem *)base;
    *worst = 0.0;
    if (!p->want)
        expect(p);
    for (int32_t t = 0; t < p->tokens; t++)
        for (int32_t h = 0; h < p->heads; h++)
            for (int32_t m = 0; m < p->outer; m++) {
                int64_t column = (int64_t)h * p->outer + m;
                int64_t at = (int64_t)t * p->heads * p->outer + column;
                double want = p->want[at];
                double got = p->out.rank == 2 ? numeric_at(&p->out, t, column, 0, 0)
                                              : numeric_at(&p->out, t, h, m, 0);
                double work = 0x1p-24 * (4.0 + sqrt(p->inner)) * p->size[at];
                if (p->gate.rank) {
                    double gate = 1.0 / (1.0 + exp(-numeric_at(&p->gate, t, column, 0, 0)));
                    work = gate * (work + numeric_epsilon(p->out.format) * (fabs(want) + work) +
                                   numeric_smallest(p->out.format) + 0x1p-21 * fabs(want));
                    want *= gate;
                }
                double error = rounded_error(got, want, p->out.format, work);
                *worst = fmax(*worst, error);
                if (error <= 1.0)
                    continue;
                snprintf(why, why_bytes, "token %d head %d element %d is %.9g, should be %.9g", t,
                         h, m, got, want);
                return false;
            }
    return true;
}

const operator_table absorb_operator = {
    .op = MLA_OP_ABSORB,
    .usual_count = 120,
    .make = absorb_make,
    .problem = absorb_describe,
    .run = absorb_run,
    .check = linear_check,
    .free = linear_free,
};

const operator_table project_operator = {
    .op = MLA_OP_PROJECT,
    .usual_count = 120,
    .make = project_make,
    .problem = project_describe,
    .run = project_run,
    .check = linear_check,
    .free = linear_free,
};
