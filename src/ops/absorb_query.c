/*
 * mla_absorb_query: checks and dispatch of out[t, h] = q_nope[t, h] x w_uk[h], [N] x [N, R]. The
 * weight has R or N contiguous.
 */
#include "ops/ops.h"

static mla_status prepare(mlai_args *args, const void *params, void *own_params,
                          mla_problem *problem)
{
    mla_absorb_query_params *own = own_params;
    MLAI_TRY(MLAI_TAKE(own, params, mla_absorb_query_params, args->diag));
    problem->op = MLA_OP_ABSORB;
    MLAI_TRY(mlai_arg_call(args, &own->call));
    MLAI_TRY(mlai_arg_reserved(args, own->reserved0, "reserved0"));
    const mla_tensor *q = &own->q_nope, *out = &own->out;
    MLAI_TRY(mlai_arg_tensor(args, q, "q_nope", MLAI_FLOATS, 3, 3));
    MLAI_TRY(mlai_arg_dim(args, q->shape[1], 1, "the head count of q_nope", &problem->num_heads));
    MLAI_TRY(mlai_arg_dim(args, q->shape[2], 1, "the width of q_nope", &problem->qk_nope_head_dim));
    MLAI_TRY(mlai_arg_weight(args, &own->w_uk, "w_uk", q, "q_nope"));
    MLAI_TRY(mlai_arg_dim(args, own->w_uk.shape[2], 1, "the last extent of w_uk",
                          &problem->kv_lora_rank));
    MLAI_TRY(mlai_arg_output(args, out, "out", MLAI_FLOATS | MLAI_FP8, 3, 3));
    MLAI_TRY(mlai_arg_extent(args, out, "out", 0, q->shape[0], "the tokens of q_nope"));
    MLAI_TRY(mlai_arg_extent(args, out, "out", 1, q->shape[1], "the heads of q_nope"));
    MLAI_TRY(mlai_arg_extent(args, out, "out", 2, own->w_uk.shape[2], "the last extent of w_uk"));
    MLAI_TRY(mlai_arg_apart(args, out, "out", q, "q_nope"));
    MLAI_TRY(mlai_arg_apart(args, out, "out", &own->w_uk, "w_uk"));
    problem->tokens = q->shape[0];
    problem->q_format = q->format;
    problem->kv_format = own->w_uk.format;
    problem->out_format = out->format;
    return MLA_OK;
}

mla_status mla_absorb_query(mla_context *ctx, const mla_absorb_query_params *params, mla_diag *diag)
{
    mla_absorb_query_params own;
    return mlai_operator_run(ctx, prepare, params, &own, &own.call, diag);
}

mla_status mla_absorb_query_problem(const mla_absorb_query_params *params, mla_problem *problem,
                                    mla_diag *diag)
{
    mla_absorb_query_params own;
    return mlai_operator_describe(prepare, params, &own, problem, diag);
}
