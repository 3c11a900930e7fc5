/*
 * mla_write_kv: checks and dispatch of writing rows, latent [T, R] and rope [T, P] or one [T, D],
 * into the cache at slots [T].
 */
#include "ops/ops.h"

static mla_status prepare(const mla_write_kv_params *params, mlai_args *args,
                          mla_write_kv_params *own, mla_problem *problem)
{
    MLAI_TRY(MLAI_TAKE(own, params, mla_write_kv_params, args->diag));
    *problem = (mla_problem)MLA_PROBLEM_INIT;
    problem->op = MLA_OP_WRITE;
    MLAI_TRY(mlai_arg_call(args, &own->call));
    MLAI_TRY(mlai_arg_reserved(args, own->reserved0, "reserved0"));
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
    MLAI_TRY(mlai_arg_tensor(args, &own->slots, "slots", MLAI_INDICES, 1, 1));
    problem->tokens = own->slots.shape[0];
    MLAI_TRY(mlai_arg_latent(args, &own->latent, &own->rope, MLAI_FLOATS, problem->tokens,
                             own->kv_lora_rank, own->qk_rope_head_dim, false));
    MLAI_TRY(mlai_arg_apart(args, &own->kv_cache, "kv_cache", &own->latent, "latent"));
    MLAI_TRY(mlai_arg_apart(args, &own->kv_cache, "kv_cache", &own->rope, "rope"));
    MLAI_TRY(mlai_arg_apart(args, &own->kv_cache_rope, "kv_cache_rope", &own->latent, "latent"));
    MLAI_TRY(mlai_arg_apart(args, &own->kv_cache_rope, "kv_cache_rope", &own->rope, "rope"));
    problem->q_format = own->latent.format;
    problem->out_format = own->kv_cache.format;
    problem->num_heads = problem->num_kv_heads = 1;
    problem->device_type = args->device_type;
    problem->device_index = args->device_index;
    return MLA_OK;
}

mla_status mla_write_kv(mla_context *ctx, const mla_write_kv_params *params, mla_diag *diag)
{
    mlai_args args = {.diag = diag, .pointers = true};
    mla_write_kv_params own;
    mla_problem problem;
    MLAI_TRY(mlai_arg_context(ctx, diag));
    MLAI_TRY(prepare(params, &args, &own, &problem));
    MLAI_TRY(mlai_live_slots(&args, &own.slots, &own.kv_cache));
    if (problem.tokens == 0)
        return MLA_OK;
    return mlai_dispatch(ctx, &problem, &own.call, &own, diag);
}

mla_status mla_write_kv_problem(const mla_write_kv_params *params, mla_problem *problem,
                                mla_diag *diag)
{
    mlai_args args = {.diag = diag};
    mla_write_kv_params own;
    mla_problem made;
    MLAI_TRY(prepare(params, &args, &own, &made));
    return mlai_give_problem(problem, &made, diag);
}
