/*
 * mla_project_value: checks and dispatch of out[t, h] = latent[t, h] x w_uv[h], [R] x [R, V], with
 * an optional sigmoid gate. The weight has V or R contiguous. out and gate become [T, H, V].
 */
#include "ops/ops.h"

/* [T, H * V] seen as [T, H, V]. */
static mla_status split_heads(mlai_args *args, mla_tensor *t, const char *name, int64_t heads,
                              int64_t width)
{
    int64_t both;
    if (__builtin_mul_overflow(heads, width, &both))
        return mlai_fail(args->diag, MLA_ERROR_SHAPE, "%s would be over 63 bits wide", name);
    MLAI_TRY(mlai_arg_extent(args, t, name, 1, both, "heads times the last extent of w_uv"));
    t->rank = 3;
    t->shape[1] = heads;
    t->stride[1] = width;
    t->shape[2] = width;
    t->stride[2] = 1;
    return MLA_OK;
}

static mla_status check_outputs(mlai_args *args, mla_project_value_params *own)
{
    const int64_t tokens = own->latent.shape[0], heads = own->latent.shape[1];
    const int64_t width = own->w_uv.shape[2];
    mla_tensor *out = &own->out, *gate = &own->gate;
    MLAI_TRY(mlai_arg_output(args, out, "out", MLAI_FLOATS, 2, 3));
    MLAI_TRY(mlai_arg_extent(args, out, "out", 0, tokens, "the tokens of latent"));
    if (out->rank == 2) {
        MLAI_TRY(split_heads(args, out, "out", heads, width));
    } else {
        MLAI_TRY(mlai_arg_extent(args, out, "out", 1, heads, "the heads of latent"));
        MLAI_TRY(mlai_arg_extent(args, out, "out", 2, width, "the last extent of w_uv"));
    }
    MLAI_TRY(mlai_arg_apart(args, out, "out", &own->latent, "latent"));
    MLAI_TRY(mlai_arg_apart(args, out, "out", &own->w_uv, "w_uv"));
    if (!mlai_present(gate))
        return MLA_OK;
    MLAI_TRY(mlai_arg_tensor(args, gate, "gate", MLAI_FLOATS, 2, 2));
    MLAI_TRY(mlai_arg_apart(args, out, "out", gate, "gate"));
    MLAI_TRY(mlai_arg_extent(args, gate, "gate", 0, tokens, "the tokens of latent"));
    return split_heads(args, gate, "gate", heads, width);
}

static mla_status prepare(mlai_args *args, const void *params, void *own_params,
                          mla_problem *problem)
{
    mla_project_value_params *own = own_params;
    MLAI_TRY(MLAI_TAKE(own, params, mla_project_value_params, args->diag));
    problem->op = MLA_OP_PROJECT;
    MLAI_TRY(mlai_arg_call(args, &own->call));
    MLAI_TRY(mlai_arg_reserved(args, own->reserved0, "reserved0"));
    const mla_tensor *latent = &own->latent;
    MLAI_TRY(mlai_arg_tensor(args, latent, "latent", MLAI_FLOATS, 3, 3));
    MLAI_TRY(
        mlai_arg_dim(args, latent->shape[1], 1, "the head count of latent", &problem->num_heads));
    MLAI_TRY(
        mlai_arg_dim(args, latent->shape[2], 1, "the width of latent", &problem->kv_lora_rank));
    MLAI_TRY(mlai_arg_weight(args, &own->w_uv, "w_uv", latent, "latent"));
    MLAI_TRY(
        mlai_arg_dim(args, own->w_uv.shape[2], 1, "the last extent of w_uv", &problem->v_head_dim));
    MLAI_TRY(check_outputs(args, own));
    problem->tokens = latent->shape[0];
    problem->q_format = latent->format;
    problem->kv_format = own->w_uv.format;
    problem->out_format = own->out.format;
    return MLA_OK;
}

mla_status mla_project_value(mla_context *ctx, const mla_project_value_params *params,
                             mla_diag *diag)
{
    mla_project_value_params own;
    return mlai_operator_run(ctx, prepare, params, &own, &own.call, diag);
}

mla_status mla_project_value_problem(const mla_project_value_params *params, mla_problem *problem,
                                     mla_diag *diag)
{
    mla_project_value_params own;
    return mlai_operator_describe(prepare, params, &own, problem, diag);
}
