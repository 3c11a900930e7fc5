/*
 * A merge of two states as the problem that solutions are chosen for, and what a context chooses.
 */
#ifndef MLA_TESTS_REGISTRY_CHOSEN_H
#define MLA_TESTS_REGISTRY_CHOSEN_H

#include "test.h"

#include <mla/mla.h>
#include <string.h>

static inline mla_problem merge_problem(void)
{
    static float out[2][4], lse[2], merged[4];
    mla_tensor outs[2], lses[2];
    for (int32_t i = 0; i < 2; i++) {
        outs[i] = mla_tensor_3d(out[i], MLA_FORMAT_F32, 1, 1, 4);
        lses[i] = mla_tensor_2d(&lse[i], MLA_FORMAT_F32, 1, 1);
    }
    mla_merge_state_params params = MLA_MERGE_STATE_PARAMS_INIT;
    params.n_states = 2;
    params.outs = outs;
    params.lses = lses;
    params.out = mla_tensor_3d(merged, MLA_FORMAT_F32, 1, 1, 4);
    mla_problem problem = MLA_PROBLEM_INIT;
    assert_int_equal(mla_merge_state_problem(&params, &problem, NULL), MLA_OK);
    return problem;
}

static inline mla_context *make_context(const mla_context_options *options)
{
    mla_context *ctx = NULL;
    mla_diag diag = {{0}};
    if (mla_context_create(options, &ctx, &diag) != MLA_OK)
        fail_msg("%s", diag.text);
    return ctx;
}

static inline const char *chosen(const mla_context *ctx, const char *solution)
{
    mla_problem problem = merge_problem();
    const char *name = NULL;
    mla_diag diag = {{0}};
    if (mla_solution_choose(ctx, &problem, solution, &name, &diag) != MLA_OK)
        fail_msg("%s", diag.text);
    return name;
}

/* The family of a row. */
static inline const char *family_of(const mla_context *ctx, const char *row)
{
    for (int32_t i = 0; i < mla_solution_count(ctx); i++) {
        mla_solution_info info = MLA_SOLUTION_INFO_INIT;
        assert_int_equal(mla_solution_describe(ctx, i, &info, NULL), MLA_OK);
        if (strcmp(info.name, row) == 0)
            return info.family;
    }
    return NULL;
}

#endif
