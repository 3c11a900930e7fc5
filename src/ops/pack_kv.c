/*
 * mla_pack_kv: checks and dispatch of k_out[t, h] = [k_nope[t, h] | k_pe[t]] and, with v, a copy of
 * v in the same format.
 */
#include "ops/ops.h"

static mla_status check_key(mlai_args *args, mla_pack_kv_params *own, mla_problem *problem)
{
    const mla_tensor *nope = &own->k_nope, *out = &own->k_out;
    MLAI_TRY(mlai_arg_tensor(args, nope, "k_nope", MLAI_FLOATS, 3, 3));
    MLAI_TRY(
        mlai_arg_dim(args, nope->shape[1], 1, "the head count of k_nope", &problem->num_heads));
    MLAI_TRY(
        mlai_arg_dim(args, nope->shape[2], 0, "the width of k_nope", &problem->qk_nope_head_dim));
    const int32_t pe_rank = own->k_pe.rank;
    if (pe_rank != 2 && pe_rank != 3)
        MLAI_TRY(mlai_arg_tensor(args, &own->k_pe, "k_pe", MLAI_FLOATS, 2, 3));
    const int64_t pe_width = own->k_pe.shape[pe_rank - 1];
    MLAI_TRY(mlai_arg_rows(args, &own->k_pe, "k_pe", MLAI_FLOATS, nope->shape[0], pe_width,
                           "the rope head dimension", false));
    MLAI_TRY(mlai_arg_dim(args, pe_width, 0, "the width of k_pe", &problem->qk_rope_head_dim));
    MLAI_TRY(mlai_arg_output(args, out, "k_out", MLAI_FLOATS | MLAI_FP8, 3, 3));
    MLAI_TRY(mlai_arg_extent(args, out, "k_out", 0, nope->shape[0], "the tokens of k_nope"));
    MLAI_TRY(mlai_arg_extent(args, out, "k_out", 1, nope->shape[1], "the heads of k_nope"));
    MLAI_TRY(mlai_arg_extent(args, out, "k_out", 2, nope->shape[2] + pe_width,
                             "the widths of k_nope and k_pe together"));
    MLAI_TRY(mlai_arg_scale(args, own->k_scale, "k_scale", out->format, "k_out"));
    MLAI_TRY(mlai_arg_apart(args, out, "k_out", nope, "k_nope"));
    MLAI_TRY(mlai_arg_apart(args, out, "k_out", &own->k_pe, "k_pe"));
    problem->tokens = nope->shape[0];
    problem->q_format = nope->format;
    problem->kv_format = out->format;
    problem->out_format = out->format;
    return MLA_OK;
}

static mla_status check_value(mlai_args *args, const mla_pack_kv_params *own, mla_problem *problem)
{
    const mla_tensor *v = &own->v, *out = &own->v_out, *nope = &own->k_nope;
    if (mlai_present(v) != mlai_present(out))
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "%s is absent and %s is not; give v and v_out, or neither",
                         mlai_present(v) ? "v_out" : "v", mlai_present(v) ? "v" : "v_out");
    if (!mlai_present(v)) {
        MLAI_TRY(mlai_arg_scale(args, own->v_scale, "v_scale", own->k_out.format, "k_out"));
        return MLA_OK;
    }
    MLAI_TRY(mlai_arg_tensor(args, v, "v", MLAI_FLOATS, 3, 3));
    MLAI_TRY(mlai_arg_extent(args, v, "v", 0, nope->shape[0], "the tokens of k_nope"));
    MLAI_TRY(mlai_arg_extent(args, v, "v", 1, nope->shape[1], "the heads of k_nope"));
    MLAI_TRY(mlai_arg_dim(args, v->shape[2], 0, "the width of v", &problem->v_head_dim));
    MLAI_TRY(mlai_arg_output(args, out, "v_out", MLAI_FLOATS | MLAI_FP8, 3, 3));
    for (int32_t dim = 0; dim < 3; dim++)
        MLAI_TRY(mlai_arg_extent(args, out, "v_out", dim, v->shape[dim], "as in v"));
    if (out->format != own->k_out.format)
        return mlai_fail(args->diag, MLA_ERROR_FORMAT,
                         "v_out is %s and k_out %s; both share one format",
                         mla_format_name(out->format), mla_format_name(own->k_out.format));
    MLAI_TRY(mlai_arg_scale(args, own->v_scale, "v_scale", out->format, "v_out"));
    MLAI_TRY(mlai_arg_apart(args, out, "v_out", v, "v"));
    MLAI_TRY(mlai_arg_apart(args, out, "v_out", &own->k_out, "k_out"));
    MLAI_TRY(mlai_arg_apart(args, out, "v_out", nope, "k_nope"));
    MLAI_TRY(mlai_arg_apart(args, &own->k_out, "k_out", v, "v"));
    return mlai_arg_apart(args, out, "v_out", &own->k_pe, "k_pe");
}

static mla_status prepare(mlai_args *args, const void *params, void *own_params,
                          mla_problem *problem)
{
    mla_pack_kv_params *own = own_params;
    MLAI_TRY(MLAI_TAKE(own, params, mla_pack_kv_params, args->diag));
    problem->op = MLA_OP_PACK;
    MLAI_TRY(mlai_arg_call(args, &own->call));
    MLAI_TRY(mlai_arg_reserved(args, own->reserved0, "reserved0"));
    MLAI_TRY(check_key(args, own, problem));
    MLAI_TRY(check_value(args, own, problem));
    problem->has_k_scale = own->k_scale != 1.0f || own->v_scale != 1.0f;
    args->is_empty = mlai_numel(&own->k_out) == 0 &&
                     (!mlai_present(&own->v_out) || mlai_numel(&own->v_out) == 0);
    return MLA_OK;
}

mla_status mla_pack_kv(mla_context *ctx, const mla_pack_kv_params *params, mla_diag *diag)
{
    mla_pack_kv_params own;
    return mlai_operator_run(ctx, prepare, params, &own, &own.call, diag);
}

mla_status mla_pack_kv_problem(const mla_pack_kv_params *params, mla_problem *problem,
                               mla_diag *diag)
{
    mla_pack_kv_params own;
    return mlai_operator_describe(prepare, params, &own, problem, diag);
}
