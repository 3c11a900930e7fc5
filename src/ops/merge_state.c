/*
 * mla_merge_state: checks and dispatch of merging n partial attention states, out_i [T, H, d] and
 * lse_i f32 [T, H]. The result may lie in the first state; anything else must be apart.
 */
#include "ops/ops.h"
#include <stdio.h>

static mla_status check_states(mlai_args *args, const mla_merge_state_params *own,
                               mla_problem *problem)
{
    if (own->n_states < 1 || own->n_states > MLA_MERGE_MAX_STATES)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "n_states is %d; it must be 1 to %d, merge more in several calls",
                         own->n_states, MLA_MERGE_MAX_STATES);
    if (own->outs == NULL || own->lses == NULL)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "%s is NULL; give an array of n_states tensors",
                         own->outs == NULL ? "outs" : "lses");
    const mla_tensor *first = &own->outs[0];
    for (int32_t i = 0; i < own->n_states; i++) {
        const mla_tensor *out = &own->outs[i], *lse = &own->lses[i];
        char name[24];
        snprintf(name, sizeof name, "outs[%d]", (int)i);
        MLAI_TRY(mlai_arg_tensor(args, out, name, MLAI_FLOATS, 3, 3));
        if (out->format != first->format)
            return mlai_fail(args->diag, MLA_ERROR_FORMAT,
                             "%s is %s and outs[0] %s; all states share one format", name,
                             mla_format_name(out->format), mla_format_name(first->format));
        for (int32_t dim = 0; dim < 3; dim++)
            MLAI_TRY(mlai_arg_extent(args, out, name, dim, first->shape[dim], "as in outs[0]"));
        snprintf(name, sizeof name, "lses[%d]", (int)i);
        MLAI_TRY(mlai_arg_tensor(args, lse, name, MLAI_F(F32), 2, 2));
        for (int32_t dim = 0; dim < 2; dim++)
            MLAI_TRY(mlai_arg_extent(args, lse, name, dim, first->shape[dim], "as in outs[0]"));
    }
    MLAI_TRY(
        mlai_arg_dim(args, first->shape[1], 1, "the head count of outs[0]", &problem->num_heads));
    MLAI_TRY(mlai_arg_dim(args, first->shape[2], 1, "the width of outs[0]", &problem->qk_head_dim));
    problem->q_format = first->format;
    problem->batch = own->n_states;
    problem->tokens = first->shape[0];
    return MLA_OK;
}

static mla_status check_overlap(mlai_args *args, const mla_merge_state_params *own)
{
    MLAI_TRY(mlai_arg_in_place(args, &own->out, "out", &own->outs[0], "outs[0]"));
    MLAI_TRY(mlai_arg_in_place(args, &own->lse, "lse", &own->lses[0], "lses[0]"));
    MLAI_TRY(mlai_arg_apart(args, &own->lse, "lse", &own->out, "out"));
    for (int32_t i = 0; i < own->n_states; i++) {
        char name[24];
        snprintf(name, sizeof name, "outs[%d]", (int)i);
        if (i > 0)
            MLAI_TRY(mlai_arg_apart(args, &own->out, "out", &own->outs[i], name));
        MLAI_TRY(mlai_arg_apart(args, &own->lse, "lse", &own->outs[i], name));
        snprintf(name, sizeof name, "lses[%d]", (int)i);
        if (i > 0)
            MLAI_TRY(mlai_arg_apart(args, &own->lse, "lse", &own->lses[i], name));
        MLAI_TRY(mlai_arg_apart(args, &own->out, "out", &own->lses[i], name));
    }
    return MLA_OK;
}

static mla_status prepare(mlai_args *args, const void *params, void *own_params,
                          mla_problem *problem)
{
    mla_merge_state_params *own = own_params;
    MLAI_TRY(MLAI_TAKE(own, params, mla_merge_state_params, args->diag));
    problem->op = MLA_OP_MERGE;
    MLAI_TRY(mlai_arg_call(args, &own->call));
    MLAI_TRY(check_states(args, own, problem));
    const mla_tensor *first = &own->outs[0];
    MLAI_TRY(mlai_arg_output(args, &own->out, "out", MLAI_FLOATS, 3, 3));
    for (int32_t dim = 0; dim < 3; dim++)
        MLAI_TRY(mlai_arg_extent(args, &own->out, "out", dim, first->shape[dim], "as in outs[0]"));
    if (mlai_present(&own->lse)) {
        MLAI_TRY(mlai_arg_output(args, &own->lse, "lse", MLAI_F(F32), 2, 2));
        for (int32_t dim = 0; dim < 2; dim++)
            MLAI_TRY(
                mlai_arg_extent(args, &own->lse, "lse", dim, first->shape[dim], "as in outs[0]"));
    }
    MLAI_TRY(check_overlap(args, own));
    problem->out_format = own->out.format;
    problem->has_lse = mlai_present(&own->lse);
    return MLA_OK;
}

mla_status mla_merge_state(mla_context *ctx, const mla_merge_state_params *params, mla_diag *diag)
{
    mla_merge_state_params own;
    return mlai_operator_run(ctx, prepare, params, &own, &own.call, diag);
}

mla_status mla_merge_state_problem(const mla_merge_state_params *params, mla_problem *problem,
                                   mla_diag *diag)
{
    mla_merge_state_params own;
    return mlai_operator_describe(prepare, params, &own, problem, diag);
}
