/*
 * mla_write_kv: checks and dispatch of writing rows, latent [T, R] and rope [T, P] or one [T, D],
 * into the cache at slots [T].
 */
#include "ops/ops.h"

static mla_status prepare(mlai_args *args, const void *params, void *own_params,
                          mla_problem *problem)
{
    mla_write_kv_params *own = own_params;
    MLAI_TRY(MLAI_TAKE(own, params, mla_write_kv_params, args->diag));
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
    return mlai_live_slots(args, &own->slots, &own->kv_cache);
}

mla_status mla_write_kv(mla_context *ctx, const mla_write_kv_params *params, mla_diag *diag)
{
    mla_write_kv_params own;
    return mlai_operator_run(ctx, prepare, params, &own, &own.call, diag);
}

mla_status mla_write_kv_problem(const mla_write_kv_params *params, mla_problem *problem,
                                mla_diag *diag)
{
    mla_write_kv_params own;
    return mlai_operator_describe(prepare, params, &own, problem, diag);
}
