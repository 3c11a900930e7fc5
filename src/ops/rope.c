/*
 * mla_rope and mla_rope_write_kv: checks and dispatch of rotating queries and keys [T, H, P] by the
 * angle tables, alone or with the write of (latent, rotated k_pe) to the cache.
 */
#include "ops/ops.h"

/* x [T, H, P] or [T, P], and its rotated twin: checked and made rank 3. */
static mla_status check_rotated(mlai_args *args, mla_tensor *x, const char *name, mla_tensor *out,
                                const char *out_name)
{
    MLAI_TRY(mlai_arg_output(args, out, out_name, MLAI_FLOATS | MLAI_FP8, x->rank, x->rank));
    for (int32_t i = 0; i < x->rank; i++)
        MLAI_TRY(mlai_arg_extent(args, out, out_name, i, x->shape[i], "as in the input"));
    return mlai_arg_in_place(args, out, out_name, x, name);
}

static void make_rank_3(mla_tensor *t)
{
    if (t->rank != 2)
        return;
    t->shape[2] = t->shape[1];
    t->stride[2] = t->stride[1];
    t->shape[1] = 1;
    t->stride[1] = t->shape[2];
    t->rank = 3;
}

static mla_status check_even(mlai_args *args, int64_t rope_dim, const char *name)
{
    if (rope_dim % 2 != 0)
        return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                         "%s is %lld; rotation works on pairs, it must be even", name,
                         (long long)rope_dim);
    return MLA_OK;
}

static mla_status prepare_rope(mlai_args *args, const void *params, void *own_params,
                               mla_problem *problem)
{
    mla_rope_params *own = own_params;
    MLAI_TRY(MLAI_TAKE(own, params, mla_rope_params, args->diag));
    problem->op = MLA_OP_ROPE;
    MLAI_TRY(mlai_arg_call(args, &own->call));
    MLAI_TRY(mlai_arg_flag(args, own->is_interleaved, "is_interleaved"));
    MLAI_TRY(mlai_arg_tensor(args, &own->x, "x", MLAI_FLOATS, 2, 3));
    MLAI_TRY(check_rotated(args, &own->x, "x", &own->out, "out"));
    make_rank_3(&own->x);
    make_rank_3(&own->out);
    MLAI_TRY(mlai_arg_dim(args, own->x.shape[1], 0, "the head count of x", &problem->num_heads));
    MLAI_TRY(mlai_arg_dim(args, own->x.shape[2], 0, "the width of x", &problem->qk_rope_head_dim));
    MLAI_TRY(check_even(args, own->x.shape[2], "the width of x"));
    problem->tokens = own->x.shape[0];
    MLAI_TRY(mlai_arg_angles(args, &own->positions, &own->cos, &own->sin, problem->tokens,
                             problem->qk_rope_head_dim));
    problem->q_format = own->x.format;
    problem->out_format = own->out.format;
    args->is_empty = mlai_numel(&own->x) == 0;
    return mlai_live_positions(args, &own->positions, &own->cos);
}

mla_status mla_rope(mla_context *ctx, const mla_rope_params *params, mla_diag *diag)
{
    mla_rope_params own;
    return mlai_operator_run(ctx, prepare_rope, params, &own, &own.call, diag);
}

mla_status mla_rope_problem(const mla_rope_params *params, mla_problem *problem, mla_diag *diag)
{
    mla_rope_params own;
    return mlai_operator_describe(prepare_rope, params, &own, problem, diag);
}

/* ---- with the cache write -------------------------------------------------------------------- */

static mla_status check_query(mlai_args *args, mla_rope_write_kv_params *own, mla_problem *problem)
{
    const bool has_q = mlai_present(&own->q_pe), has_out = mlai_present(&own->q_pe_out);
    if (has_q != has_out)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "%s is absent and %s is not; give q_pe and q_pe_out, or neither",
                         has_q ? "q_pe_out" : "q_pe", has_q ? "q_pe" : "q_pe_out");
    if (!has_q)
        return MLA_OK;
    MLAI_TRY(mlai_arg_tensor(args, &own->q_pe, "q_pe", MLAI_FLOATS, 3, 3));
    MLAI_TRY(mlai_arg_extent(args, &own->q_pe, "q_pe", 0, problem->tokens, "the tokens of slots"));
    MLAI_TRY(
        mlai_arg_extent(args, &own->q_pe, "q_pe", 2, own->qk_rope_head_dim, "qk_rope_head_dim"));
    MLAI_TRY(
        mlai_arg_dim(args, own->q_pe.shape[1], 0, "the head count of q_pe", &problem->num_heads));
    MLAI_TRY(check_rotated(args, &own->q_pe, "q_pe", &own->q_pe_out, "q_pe_out"));
    problem->out_format = own->q_pe_out.format;
    return MLA_OK;
}

static mla_status check_key(mlai_args *args, mla_rope_write_kv_params *own, mla_problem *problem)
{
    const int64_t tokens = problem->tokens;
    MLAI_TRY(mlai_arg_rows(args, &own->latent, "latent", MLAI_FLOATS, tokens, own->kv_lora_rank,
                           "kv_lora_rank", false));
    MLAI_TRY(mlai_arg_rows(args, &own->k_pe, "k_pe", MLAI_FLOATS, tokens, own->qk_rope_head_dim,
                           "qk_rope_head_dim", false));
    if (own->k_pe.format != own->latent.format)
        return mlai_fail(args->diag, MLA_ERROR_FORMAT,
                         "k_pe is %s and latent %s; both share one format",
                         mla_format_name(own->k_pe.format), mla_format_name(own->latent.format));
    if (mlai_present(&own->k_pe_out)) {
        MLAI_TRY(mlai_arg_rows(args, &own->k_pe_out, "k_pe_out", MLAI_FLOATS | MLAI_FP8, tokens,
                               own->qk_rope_head_dim, "qk_rope_head_dim", true));
        MLAI_TRY(mlai_arg_in_place(args, &own->k_pe_out, "k_pe_out", &own->k_pe, "k_pe"));
    }
    problem->q_format = own->latent.format;
    return MLA_OK;
}

static mla_status check_apart(mlai_args *args, const mla_rope_write_kv_params *own)
{
    const struct {
        const mla_tensor *t;
        const char *name;
    } outs[] = {{&own->kv_cache, "kv_cache"},
                {&own->kv_cache_rope, "kv_cache_rope"},
                {&own->q_pe_out, "q_pe_out"},
                {&own->k_pe_out, "k_pe_out"}},
      ins[] = {{&own->latent, "latent"}, {&own->q_pe, "q_pe"}, {&own->k_pe, "k_pe"}};
    for (int32_t o = 0; o < 4; o++) {
        for (int32_t i = 0; i < 3; i++) {
            const bool may_share = (o == 2 && i == 1) || (o == 3 && i == 2);
            if (!may_share)
                MLAI_TRY(mlai_arg_apart(args, outs[o].t, outs[o].name, ins[i].t, ins[i].name));
        }
        for (int32_t i = 0; i < o; i++)
            MLAI_TRY(mlai_arg_apart(args, outs[o].t, outs[o].name, outs[i].t, outs[i].name));
    }
    return MLA_OK;
}

static mla_status prepare_write(mlai_args *args, const void *params, void *own_params,
                                mla_problem *problem)
{
    mla_rope_write_kv_params *own = own_params;
    MLAI_TRY(MLAI_TAKE(own, params, mla_rope_write_kv_params, args->diag));
    problem->op = MLA_OP_ROPE_WRITE;
    MLAI_TRY(mlai_arg_call(args, &own->call));
    MLAI_TRY(mlai_arg_flag(args, own->is_interleaved, "is_interleaved"));
    if ((own->flags & ~MLA_WRITE_SANITIZE) != 0)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "flags is %d; it must be 0 or MLA_WRITE_SANITIZE (1)", own->flags);
    const mlai_cache_arg cache = {.kv_cache = &own->kv_cache,
                                  .kv_cache_rope = &own->kv_cache_rope,
                                  .kv_lora_rank = own->kv_lora_rank,
                                  .qk_rope_head_dim = own->qk_rope_head_dim,
                                  .k_scale = own->k_scale,
                                  .written = true};
    MLAI_TRY(mlai_arg_cache(args, &cache, problem));
    MLAI_TRY(check_even(args, own->qk_rope_head_dim, "qk_rope_head_dim"));
    MLAI_TRY(mlai_arg_tensor(args, &own->slots, "slots", MLAI_INDICES, 1, 1));
    problem->tokens = own->slots.shape[0];
    problem->num_kv_heads = 1;
    MLAI_TRY(check_query(args, own, problem));
    MLAI_TRY(check_key(args, own, problem));
    MLAI_TRY(mlai_arg_angles(args, &own->positions, &own->cos, &own->sin, problem->tokens,
                             own->qk_rope_head_dim));
    MLAI_TRY(check_apart(args, own));
    MLAI_TRY(mlai_live_positions(args, &own->positions, &own->cos));
    return mlai_live_slots(args, &own->slots, &own->kv_cache);
}

mla_status mla_rope_write_kv(mla_context *ctx, const mla_rope_write_kv_params *params,
                             mla_diag *diag)
{
    mla_rope_write_kv_params own;
    return mlai_operator_run(ctx, prepare_write, params, &own, &own.call, diag);
}

mla_status mla_rope_write_kv_problem(const mla_rope_write_kv_params *params, mla_problem *problem,
                                     mla_diag *diag)
{
    mla_rope_write_kv_params own;
    return mlai_operator_describe(prepare_write, params, &own, problem, diag);
}
