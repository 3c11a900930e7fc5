/*
 * Extends: attention of new tokens over explicit keys and values, and the seed's dispatch.
 *
 * forward_extend is the whole attention of requests without a cached prefix: causal over the new
 * tokens, lengths from the prefill metadata, no LSE. forward_extend_chunked is one pass of the
 * general case, lengths from the caller:
 *
 *   causal pass over the new tokens -> (out, lse)       the step is recorded before it
 *   each prefix window, not causal  -> (out_w, lse_w)   merged by the caller, mla_merge_state
 *
 * An e4m3 query makes k and v e4m3 too (saturating cast, no scale), in a buffer that the first
 * such call allocates at the backend's capacity. Neither writes the cache: expanded keys and
 * values cannot be turned back into rows; the engine has written them before.
 *
 * Called by engines once (or once a window) for each layer.
 */
#include "backend/backend.h"
#include <stdlib.h>

/* What mla_prefill calls the lengths of a forward_extend, which are the metadata's. */
static mla_status name_extend(mla_diag *diag, mla_status status)
{
    static const mlai_name names[] = {{"cu_seqlens_q", "cum_extend_seq_lens"},
                                      {"cu_seqlens_kv", "cum_extend_seq_lens"},
                                      {"max_seqlen_q", "max_extend_seq_len"},
                                      {"max_seqlen_kv", "max_extend_seq_len"}};
    return mlai_rename(diag, status, names, (int32_t)(sizeof names / sizeof names[0]));
}

/* The same for forward_extend_chunked, which gets them from the caller. */
static mla_status name_chunked(mla_diag *diag, mla_status status)
{
    static const mlai_name names[] = {{"cu_seqlens_q", "cum_seq_lens_q"},
                                      {"cu_seqlens_kv", "cum_seq_lens_kv"},
                                      {"max_seqlen_q", "max_q_len"},
                                      {"max_seqlen_kv", "max_kv_len"}};
    return mlai_rename(diag, status, names, (int32_t)(sizeof names / sizeof names[0]));
}

/* The pieces that both forwards share: q, k, v against the configuration and its capacities. */
static mla_status check_qkv(const mla_backend *b, const mla_tensor *q, const mla_tensor *k,
                            const mla_tensor *v, mla_diag *diag)
{
    const mla_config *c = &b->config;
    const uint32_t formats = MLAI_FLOATS | MLAI_FP8;
    int64_t width = (int64_t)c->qk_nope_head_dim + c->qk_rope_head_dim;
    MLAI_TRY(mlai_check_tensor(q, "q", formats, 3, 3, true, diag));
    MLAI_TRY(mlai_check_tensor(k, "k", formats, 3, 3, true, diag));
    MLAI_TRY(mlai_check_tensor(v, "v", formats, 3, 3, true, diag));
    MLAI_TRY(mlai_backend_check_device(b, k, "k", diag));
    MLAI_TRY(mlai_backend_check_device(b, v, "v", diag));
    MLAI_TRY(mlai_check_extent(q, "q", 1, b->num_heads, "the local heads", diag));
    MLAI_TRY(mlai_check_extent(q, "q", 2, width, "qk_nope_head_dim + qk_rope_head_dim", diag));
    MLAI_TRY(mlai_check_extent(k, "k", 2, width, "qk_nope_head_dim + qk_rope_head_dim", diag));
    MLAI_TRY(mlai_check_extent(v, "v", 0, k->shape[0], "the tokens of k", diag));
    MLAI_TRY(mlai_check_extent(v, "v", 1, k->shape[1], "the heads of k", diag));
    MLAI_TRY(mlai_check_extent(v, "v", 2, c->v_head_dim, "v_head_dim", diag));
    if (q->shape[0] > c->max_tokens)
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "q has %lld tokens: this backend was made for max_tokens %lld",
                         (long long)q->shape[0], (long long)c->max_tokens);
    if (k->shape[0] > b->max_kv_tokens)
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "k has %lld tokens: this backend was made for max_tokens %lld and "
                         "chunk_capacity %lld",
                         (long long)k->shape[0], (long long)c->max_tokens,
                         (long long)c->chunk_capacity);
    return MLA_OK;
}

/* ---- forward_extend -------------------------------------------------------------------------- */

static mla_status prepare_extend(mla_backend *b, const mla_layer *layer,
                                 const mla_forward_extend_args *args, mla_prefill_params *p,
                                 mla_diag *diag)
{
    mla_forward_extend_args own;
    mla_layer l;
    MLAI_TRY(mlai_take_struct(&own, sizeof own, sizeof own, args, "mla_forward_extend_args", diag));
    if (own.save_kv_cache != 0)
        return mlai_fail(diag, MLA_ERROR_UNSUPPORTED,
                         "save_kv_cache is %d: cache rows cannot be made from expanded k and v, "
                         "write them before (mla_rope_write_kv) and set it to 0",
                         own.save_kv_cache);
    const mla_prefill_metadata *metadata = NULL;
    MLAI_TRY(mla_backend_prefill_metadata(b, &metadata, diag));
    if (metadata->max_extend_prefix_len > 0)
        return mlai_fail(diag, MLA_ERROR_UNSUPPORTED,
                         "a request has a cached prefix of %d tokens: use "
                         "mla_backend_forward_extend_chunked for the new tokens and each window",
                         metadata->max_extend_prefix_len);
    MLAI_TRY(mlai_take_struct(&l, sizeof l, sizeof l, layer, "mla_layer", diag));
    MLAI_TRY(check_qkv(b, &own.q, &own.k, &own.v, diag));

    *p = (mla_prefill_params)MLA_PREFILL_PARAMS_INIT;
    p->max_seqlen_q = p->max_seqlen_kv = metadata->max_extend_seq_len;
    p->softmax_scale = l.softmax_scale != 0.0f ? l.softmax_scale : b->config.softmax_scale;
    p->logit_cap = l.logit_cap;
    p->q = own.q;
    p->k = own.k;
    p->v = own.v;
    p->cu_seqlens_q = p->cu_seqlens_kv = metadata->cum_extend_seq_lens;
    p->out = own.out;
    if (own.out.rank == 2) { /* [T, H * V] */
        MLAI_TRY(mlai_check_extent(&own.out, "out", 1, (int64_t)b->num_heads * b->config.v_head_dim,
                                   "local heads x v_head_dim", diag));
        p->out.rank = 3;
        p->out.shape[1] = b->num_heads;
        p->out.shape[2] = b->config.v_head_dim;
        p->out.stride[1] = b->config.v_head_dim;
        p->out.stride[2] = 1;
    }
    p->call = mlai_backend_call(b, own.stream);
    mla_problem problem = MLA_PROBLEM_INIT;
    return name_extend(diag, mla_prefill_problem(p, &problem, diag));
}

mla_status mla_backend_forward_extend(mla_backend *backend, const mla_layer *layer,
                                      const mla_forward_extend_args *args, mla_diag *diag)
{
    if (backend == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "backend is NULL: give one");
    mla_prefill_params p;
    MLAI_TRY(prepare_extend(backend, layer, args, &p, diag));
    return name_extend(diag, mla_prefill(backend->ctx, &p, diag));
}

/* ---- forward_extend_chunked ------------------------------------------------------------------ */

/* Room for k and v in e4m3 at the backend's capacity, once. */
static mla_status need_kv_cast(mla_backend *b, mla_diag *diag)
{
    const mla_config *c = &b->config;
    uint64_t width =
        (uint64_t)c->qk_nope_head_dim + (uint64_t)c->qk_rope_head_dim + (uint64_t)c->v_head_dim;
    if (b->kv_cast != NULL)
        return MLA_OK;
    b->kv_cast = mlai_backend_alloc(b, (uint64_t)b->num_heads * width, (uint64_t)b->max_kv_tokens);
    if (b->kv_cast == NULL)
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY,
                         "no memory to cast k and v of %lld tokens to e4m3: give them in e4m3, or "
                         "take a smaller chunk_capacity",
                         (long long)b->max_kv_tokens);
    return MLA_OK;
}

/* Where k and v go when the query is e4m3; operands that are e4m3 already stay where they are. */
static mla_status plan_cast(mla_backend *b, mla_prefill_params *p, mla_diag *diag)
{
    if (p->q.format != MLA_FORMAT_E4M3 ||
        (p->k.format == MLA_FORMAT_E4M3 && p->v.format == MLA_FORMAT_E4M3))
        return MLA_OK;
    MLAI_TRY(need_kv_cast(b, diag));
    int64_t n = p->k.shape[0], heads = b->num_heads;
    if (p->k.format != MLA_FORMAT_E4M3)
        p->k = mlai_backend_tensor(
            b, mla_tensor_3d(b->kv_cast, MLA_FORMAT_E4M3, n, heads, p->k.shape[2]));
    uint8_t *values =
        b->kv_cast + b->max_kv_tokens * heads *
                         ((int64_t)b->config.qk_nope_head_dim + b->config.qk_rope_head_dim);
    if (p->v.format != MLA_FORMAT_E4M3)
        p->v =
            mlai_backend_tensor(b, mla_tensor_3d(values, MLA_FORMAT_E4M3, n, heads, p->v.shape[2]));
    return MLA_OK;
}

mla_status mla_backend_forward_extend_chunked(mla_backend *backend,
                                              const mla_forward_extend_chunked_args *args,
                                              mla_diag *diag)
{
    if (backend == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "backend is NULL: give one");
    mla_forward_extend_chunked_args own;
    MLAI_TRY(mlai_take_struct(&own, sizeof own, sizeof own, args, "mla_forward_extend_chunked_args",
                              diag));
    MLAI_TRY(check_qkv(backend, &own.q, &own.k, &own.v, diag));
    MLAI_TRY(mlai_check_extent(&own.k, "k", 1, backend->num_heads, "the local heads", diag));
    if (!mlai_present(&own.lse))
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "lse is absent: passes are merged by it, give f32 [%lld, %d]",
                         (long long)own.q.shape[0], backend->num_heads);
    MLAI_TRY(
        mlai_check_tensor(&own.cum_seq_lens_q, "cum_seq_lens_q", MLAI_F(I32), 1, 1, true, diag));
    MLAI_TRY(
        mlai_check_tensor(&own.cum_seq_lens_kv, "cum_seq_lens_kv", MLAI_F(I32), 1, 1, true, diag));
    if (own.cum_seq_lens_q.shape[0] > (int64_t)backend->config.max_bs + 1)
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "cum_seq_lens_q has %lld entries: this backend was made for max_bs %d",
                         (long long)own.cum_seq_lens_q.shape[0], backend->config.max_bs);

    mla_prefill_params p = MLA_PREFILL_PARAMS_INIT;
    p.is_causal = own.is_causal;
    p.max_seqlen_q = own.max_q_len;
    p.max_seqlen_kv = own.max_kv_len;
    p.softmax_scale = own.softmax_scale != 0.0f ? own.softmax_scale : backend->config.softmax_scale;
    p.logit_cap = own.logit_cap;
    p.q = own.q;
    p.k = own.k;
    p.v = own.v;
    p.cu_seqlens_q = own.cum_seq_lens_q;
    p.cu_seqlens_kv = own.cum_seq_lens_kv;
    p.out = own.out;
    p.lse = own.lse;
    p.call = mlai_backend_call(backend, own.stream);
    MLAI_TRY(plan_cast(backend, &p, diag));
    mla_problem problem = MLA_PROBLEM_INIT;
    MLAI_TRY(name_chunked(diag, mla_prefill_problem(&p, &problem, diag)));

    if (own.is_causal && backend->record != NULL)
        backend->record(backend->record_user, own.stream);
    if (p.k.data != own.k.data)
        MLAI_TRY(mlai_cast_to_e4m3(backend, own.stream, &own.k, &p.k, diag));
    if (p.v.data != own.v.data)
        MLAI_TRY(mlai_cast_to_e4m3(backend, own.stream, &own.v, &p.v, diag));
    return name_chunked(diag, mla_prefill(backend->ctx, &p, diag));
}

/* ---- dispatch -------------------------------------------------------------------------------- */

void mla_backend_set_step_recorder(mla_backend *backend, mla_record_step record, void *user)
{
    if (backend == NULL)
        return;
    backend->record = record;
    backend->record_user = user;
}

static mla_status forward_decode(mla_backend *b, bool records, const mla_layer *layer,
                                 mla_kv_pool *pool, const mla_forward_decode_args *args,
                                 mla_diag *diag)
{
    mlai_decode_step step;
    MLAI_TRY(mlai_decode_prepare(b, layer, pool, args, &step, diag));
    if (records && !step.args.save_kv_cache)
        b->record(b->record_user, step.args.stream);
    MLAI_TRY(mlai_decode_run(b, &step, diag));
    if (records && step.args.save_kv_cache)
        b->record(b->record_user, step.args.stream);
    return MLA_OK;
}

mla_status mla_backend_forward(mla_backend *backend, int32_t forward_mode, int32_t record_kv_cache,
                               const mla_layer *layer, mla_kv_pool *pool,
                               const mla_forward_decode_args *decode,
                               const mla_forward_extend_args *extend, mla_diag *diag)
{
    if (backend == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "backend is NULL: give one");
    if (forward_mode < MLA_FORWARD_EXTEND || forward_mode > MLA_FORWARD_IDLE)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "forward_mode is %d: 1 (extend) to 4 (idle) exist", forward_mode);
    if (record_kv_cache < -1 || record_kv_cache > 1)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "record_kv_cache is %d: -1 (by mode), 0 and 1 exist", record_kv_cache);
    bool by_mode = forward_mode != MLA_FORWARD_DECODE && forward_mode != MLA_FORWARD_IDLE;
    bool records =
        backend->record != NULL && (record_kv_cache < 0 ? by_mode : record_kv_cache == 1);
    if (forward_mode == MLA_FORWARD_DECODE)
        return forward_decode(backend, records, layer, pool, decode, diag);

    mla_prefill_params p;
    MLAI_TRY(prepare_extend(backend, layer, extend, &p, diag));
    if (records) /* save_kv_cache is 0 here: the rows are in the cache already */
        backend->record(backend->record_user, p.call.stream);
    return name_extend(diag, mla_prefill(backend->ctx, &p, diag));
}
