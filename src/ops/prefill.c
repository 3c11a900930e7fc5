/*
 * mla_prefill: checks and dispatch of ragged attention over explicit q [Tq, H, L], k [Tkv, Hk, L]
 * and v [Tkv, Hk, V]. Tkv may be 0: every row then gets the empty state.
 */
#include "ops/ops.h"

static mla_status check_tensors(mlai_args *args, const mla_prefill_params *own,
                                mla_problem *problem)
{
    const uint32_t formats = MLAI_FLOATS | MLAI_FP8;
    const mla_tensor *q = &own->q, *k = &own->k, *v = &own->v;
    MLAI_TRY(mlai_arg_tensor(args, q, "q", formats, 3, 3));
    MLAI_TRY(mlai_arg_dim(args, q->shape[1], 1, "the head count of q", &problem->num_heads));
    MLAI_TRY(mlai_arg_dim(args, q->shape[2], 1, "the head dimension of q", &problem->qk_head_dim));
    MLAI_TRY(mlai_arg_tensor(args, k, "k", formats, 3, 3));
    MLAI_TRY(mlai_arg_dim(args, k->shape[1], 1, "the head count of k", &problem->num_kv_heads));
    MLAI_TRY(mlai_arg_extent(args, k, "k", 2, q->shape[2], "the head dimension of q"));
    if (problem->num_heads % problem->num_kv_heads != 0)
        return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                         "k has %d heads and q %d; the heads of q must be a multiple of those of k",
                         problem->num_kv_heads, problem->num_heads);
    MLAI_TRY(mlai_arg_tensor(args, v, "v", formats, 3, 3));
    MLAI_TRY(mlai_arg_extent(args, v, "v", 0, k->shape[0], "the tokens of k"));
    MLAI_TRY(mlai_arg_extent(args, v, "v", 1, k->shape[1], "the heads of k"));
    MLAI_TRY(mlai_arg_dim(args, v->shape[2], 1, "the head dimension of v", &problem->v_head_dim));
    if (v->format != k->format)
        return mlai_fail(args->diag, MLA_ERROR_FORMAT, "v is %s and k %s; both share one format",
                         mla_format_name(v->format), mla_format_name(k->format));
    MLAI_TRY(mlai_arg_scale(args, own->k_scale, "k_scale", k->format, "k"));
    MLAI_TRY(mlai_arg_scale(args, own->v_scale, "v_scale", v->format, "v"));
    problem->q_format = q->format;
    problem->kv_format = k->format;
    problem->has_k_scale = own->k_scale != 1.0f || own->v_scale != 1.0f;
    return MLA_OK;
}

/* Cumulative lengths [B + 1] and the bounds that the host knows. */
static mla_status check_lengths(mlai_args *args, mla_prefill_params *own, mla_problem *problem)
{
    const mla_tensor *cu_q = &own->cu_seqlens_q, *cu_kv = &own->cu_seqlens_kv;
    MLAI_TRY(mlai_arg_tensor(args, cu_q, "cu_seqlens_q", MLAI_F(I32), 1, 1));
    if (cu_q->shape[0] < 1)
        return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                         "cu_seqlens_q has shape [0]; it must be [B + 1]");
    MLAI_TRY(mlai_arg_tensor(args, cu_kv, "cu_seqlens_kv", MLAI_F(I32), 1, 1));
    MLAI_TRY(mlai_arg_extent(args, cu_kv, "cu_seqlens_kv", 0, cu_q->shape[0],
                             "as long as cu_seqlens_q"));
    const int64_t tokens_q = own->q.shape[0], tokens_kv = own->k.shape[0];
    if (tokens_q > INT32_MAX || tokens_kv > INT32_MAX)
        return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                         "q has %lld tokens and k %lld; cumulative lengths count up to %d",
                         (long long)tokens_q, (long long)tokens_kv, INT32_MAX);
    if (own->max_seqlen_q < 0 || own->max_seqlen_kv < 0)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "max_seqlen_q is %d and max_seqlen_kv %d; give bounds, or 0 for none",
                         own->max_seqlen_q, own->max_seqlen_kv);
    if (own->max_seqlen_q == 0 || own->max_seqlen_q > tokens_q)
        own->max_seqlen_q = (int32_t)tokens_q;
    if (own->max_seqlen_kv == 0 || own->max_seqlen_kv > tokens_kv)
        own->max_seqlen_kv = (int32_t)tokens_kv;
    problem->batch = cu_q->shape[0] - 1;
    problem->tokens = tokens_q;
    problem->max_q_len = own->max_seqlen_q;
    problem->max_kv_len = own->max_seqlen_kv;
    problem->is_ragged = 1;
    return MLA_OK;
}

static mla_status check_outputs(mlai_args *args, const mla_prefill_params *own,
                                mla_problem *problem)
{
    const mla_tensor *q = &own->q, *out = &own->out, *lse = &own->lse;
    MLAI_TRY(mlai_arg_output(args, out, "out", MLAI_FLOATS, 3, 3));
    MLAI_TRY(mlai_arg_extent(args, out, "out", 0, q->shape[0], "the tokens of q"));
    MLAI_TRY(mlai_arg_extent(args, out, "out", 1, q->shape[1], "the heads of q"));
    MLAI_TRY(mlai_arg_extent(args, out, "out", 2, own->v.shape[2], "the head dimension of v"));
    if (mlai_present(lse)) {
        MLAI_TRY(mlai_arg_output(args, lse, "lse", MLAI_F(F32), 2, 2));
        MLAI_TRY(mlai_arg_extent(args, lse, "lse", 0, q->shape[0], "the tokens of q"));
        MLAI_TRY(mlai_arg_extent(args, lse, "lse", 1, q->shape[1], "the heads of q"));
        MLAI_TRY(mlai_arg_apart(args, lse, "lse", out, "out"));
        MLAI_TRY(mlai_arg_apart(args, lse, "lse", q, "q"));
    }
    MLAI_TRY(mlai_arg_apart(args, out, "out", q, "q"));
    MLAI_TRY(mlai_arg_apart(args, out, "out", &own->k, "k"));
    MLAI_TRY(mlai_arg_apart(args, out, "out", &own->v, "v"));
    problem->out_format = out->format;
    problem->has_lse = mlai_present(lse);
    return MLA_OK;
}

static mla_status prepare(const mla_prefill_params *params, mlai_args *args,
                          mla_prefill_params *own, mla_problem *problem)
{
    MLAI_TRY(MLAI_TAKE(own, params, mla_prefill_params, args->diag));
    *problem = (mla_problem)MLA_PROBLEM_INIT;
    problem->op = MLA_OP_PREFILL;
    MLAI_TRY(mlai_arg_call(args, &own->call));
    MLAI_TRY(mlai_arg_flag(args, own->is_causal, "is_causal"));
    MLAI_TRY(mlai_arg_softmax(args, own->softmax_scale, own->logit_cap));
    MLAI_TRY(check_tensors(args, own, problem));
    MLAI_TRY(check_lengths(args, own, problem));
    MLAI_TRY(check_outputs(args, own, problem));
    const mla_tensor *tensors[] = {&own->q, &own->k, &own->v, &own->out};
    problem->layout = mlai_layout_aligned(tensors, sizeof tensors / sizeof tensors[0]);
    problem->is_causal = own->is_causal;
    problem->has_logit_cap = own->logit_cap > 0.0f;
    problem->device_type = args->device_type;
    problem->device_index = args->device_index;
    return MLA_OK;
}

mla_status mla_prefill(mla_context *ctx, const mla_prefill_params *params, mla_diag *diag)
{
    mlai_args args = {.diag = diag, .pointers = true};
    mla_prefill_params own;
    mla_problem problem;
    MLAI_TRY(mlai_arg_context(ctx, diag));
    MLAI_TRY(prepare(params, &args, &own, &problem));
    MLAI_TRY(mlai_live_cumulative(&args, &own.cu_seqlens_q, "cu_seqlens_q", problem.tokens, "q",
                                  own.max_seqlen_q, "max_seqlen_q"));
    MLAI_TRY(mlai_live_cumulative(&args, &own.cu_seqlens_kv, "cu_seqlens_kv", own.k.shape[0], "k",
                                  own.max_seqlen_kv, "max_seqlen_kv"));
    if (problem.tokens == 0)
        return MLA_OK;
    return mlai_dispatch(ctx, &problem, &own.call, &own, diag);
}

mla_status mla_prefill_problem(const mla_prefill_params *params, mla_problem *problem,
                               mla_diag *diag)
{
    mlai_args args = {.diag = diag};
    mla_prefill_params own;
    mla_problem made;
    MLAI_TRY(prepare(params, &args, &own, &made));
    return mlai_give_problem(problem, &made, diag);
}
