/*
 * forward_decode: absorbed attention of the decode rows of the current metadata.
 *
 *   q [T, H, D], T = bs * q_len -> [bs, q_len, H, D], one page-table row a request
 *   verify (target):  token j sees seq_len - q_len + 1 + j rows: the last one sees them all
 *   draft:            token j sees seq_len + j rows: the caller's length is what the first one sees
 *   block:            every token sees seq_len rows (is_non_causal, with a mask inside the window)
 *
 * The window's causality is a value of seqlen_offset; nothing is repeated or copied, and the
 * lengths are read through the metadata's view at each call. With save_kv_cache the rows k are
 * written before the attention and after all checks but one: that a live page id lies in the pool
 * is found by the attention. A cast query goes to a buffer of the backend's own, so that no memory
 * is allocated here.
 *
 * Called by engines once a layer, and by mla_backend_forward.
 */
#include "backend/backend.h"

/* What the operators call the operands of a forward_decode. */
static const mlai_name attention_names[] = {
    {"page_table", "page_table[num_extends:]"}, /* of the metadata, as the lengths are */
    {"cache_seqlens", "seq_lens[num_extends:]"},
    {"max_seqlen_kv", "context_len"},
    {"max_q_len", "T / bs"},
    {"kv_cache", "pool"},
};
static const mlai_name write_names[] = {{"slots", "out_cache_loc"}, {"latent", "k"}, {"rope", "k"}};

static mla_status name_attention(mla_diag *diag, mla_status status)
{
    return mlai_rename(diag, status, attention_names,
                       (int32_t)(sizeof attention_names / sizeof attention_names[0]));
}

static mla_status name_write(mla_diag *diag, mla_status status)
{
    return mlai_rename(diag, status, write_names,
                       (int32_t)(sizeof write_names / sizeof write_names[0]));
}

/* Checks an operand [T, H, width], or [T, H * width] where min_rank is 2, and views it as
 * [bs, q_len, H, width]. */
static mla_status view_rows(const mla_backend *b, mla_tensor t, const char *name, uint32_t formats,
                            int32_t min_rank, int32_t bs, int64_t tokens, int64_t width,
                            mla_tensor *out, mla_diag *diag)
{
    int64_t heads = b->num_heads;
    MLAI_TRY(mlai_check_tensor(&t, name, formats, min_rank, 3, true, diag));
    if (t.rank == 2) {
        MLAI_TRY(mlai_check_extent(&t, name, 1, heads * width, "local heads x width", diag));
        t.rank = 3;
        t.shape[1] = heads;
        t.stride[1] = width;
        t.shape[2] = width;
        t.stride[2] = 1;
    }
    MLAI_TRY(mlai_check_extent(&t, name, 0, tokens, "the tokens of q", diag));
    MLAI_TRY(mlai_check_extent(&t, name, 1, heads, "the local heads", diag));
    MLAI_TRY(mlai_check_extent(&t, name, 2, width, "the width of this operand", diag));
    mla_tensor view = t;
    view.rank = 4;
    view.shape[0] = bs;
    view.shape[1] = tokens / bs;
    view.stride[0] = t.stride[0] * (tokens / bs);
    view.stride[1] = t.stride[0];
    for (int32_t i = 1; i < 3; i++) {
        view.shape[i + 1] = t.shape[i];
        view.stride[i + 1] = t.stride[i];
    }
    *out = view;
    return MLA_OK;
}

static mla_status check_pool(const mla_backend *b, const mla_kv_pool *pool, mla_diag *diag)
{
    const mla_kv_pool_config *p = mla_kv_pool_get_config(pool);
    const mla_config *c = &b->config;
    if (p == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "pool is NULL: give one");
    if (p->format == c->kv_format && p->page_size == c->page_size &&
        p->kv_lora_rank == c->kv_lora_rank && p->qk_rope_head_dim == c->qk_rope_head_dim)
        return MLA_OK;
    return mlai_fail(diag, MLA_ERROR_FORMAT,
                     "the pool has format %s, page_size %d, kv_lora_rank %d and qk_rope_head_dim "
                     "%d: this backend was made for %s, %d, %d and %d",
                     mla_format_name(p->format), p->page_size, p->kv_lora_rank, p->qk_rope_head_dim,
                     mla_format_name(c->kv_format), c->page_size, c->kv_lora_rank,
                     c->qk_rope_head_dim);
}

/* How many tokens the call has and whether its requests are the metadata's. */
static mla_status check_counts(const mla_backend *b, const mla_forward_decode_args *args,
                               const mla_decode_metadata *metadata, int64_t *tokens, mla_diag *diag)
{
    uint32_t formats = 1u << b->config.q_format | MLAI_FP8;
    if (args->bs < 0)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "bs is %d: it is not negative", args->bs);
    *tokens = 0;
    if (args->bs == 0 && !mlai_present(&args->q))
        return MLA_OK;
    MLAI_TRY(mlai_check_tensor(&args->q, "q", formats, 3, 3, true, diag));
    *tokens = args->q.shape[0];
    if (args->bs == 0) {
        if (*tokens == 0)
            return MLA_OK;
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "bs is 0 and q has %lld tokens: give none",
                         (long long)*tokens);
    }
    int64_t rows = metadata->page_table.shape[0] - metadata->num_extends;
    if (args->bs != rows)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "bs is %d: the metadata has %lld decode rows (%lld requests, num_extends "
                         "%d)",
                         args->bs, (long long)rows, (long long)metadata->page_table.shape[0],
                         metadata->num_extends);
    if (*tokens % args->bs != 0)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "q has %lld tokens for bs %d: every request has the same number here",
                         (long long)*tokens, args->bs);
    if (*tokens > b->config.max_tokens)
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "q has %lld tokens: this backend was made for max_tokens %lld",
                         (long long)*tokens, (long long)b->config.max_tokens);
    return MLA_OK;
}

static mla_status check_save(const mla_backend *b, const mla_forward_decode_args *args,
                             int64_t tokens, mla_diag *diag)
{
    if (args->save_kv_cache != 0 && args->save_kv_cache != 1)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "save_kv_cache is %d: it is 0 or 1",
                         args->save_kv_cache);
    if (args->save_kv_cache == 0)
        return MLA_OK;
    if (!mlai_present(&args->k) || !mlai_present(&args->out_cache_loc))
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "save_kv_cache is 1 and %s is absent: give k and out_cache_loc, or write "
                         "the rows before and set it to 0",
                         mlai_present(&args->k) ? "out_cache_loc" : "k");
    MLAI_TRY(
        mlai_check_tensor(&args->out_cache_loc, "out_cache_loc", MLAI_INDICES, 1, 1, true, diag));
    MLAI_TRY(mlai_check_extent(&args->out_cache_loc, "out_cache_loc", 0, tokens, "the tokens of q",
                               diag));
    MLAI_TRY(mlai_check_tensor(&args->k, "k", MLAI_FLOATS, 2, 3, true, diag));
    MLAI_TRY(mlai_check_extent(&args->k, "k", 0, tokens, "the tokens of q", diag));
    if (args->k.rank == 3)
        MLAI_TRY(mlai_check_extent(&args->k, "k", 1, 1, "one row a token", diag));
    int64_t width = (int64_t)b->config.kv_lora_rank + b->config.qk_rope_head_dim;
    return mlai_check_extent(&args->k, "k", args->k.rank - 1, width,
                             "kv_lora_rank + qk_rope_head_dim", diag);
}

static bool casts_query(const mla_backend *b, const mla_tensor *q)
{
    return b->config.decode_query == MLA_DECODE_QUERY_CAST && !(MLAI_FP8 >> q->format & 1);
}

/* The query operands: q alone, q with q_rope, or their cast. */
static mla_status set_query(const mla_backend *b, const mla_forward_decode_args *args,
                            int64_t tokens, mla_decode_params *p, mla_diag *diag)
{
    const mla_config *c = &b->config;
    uint32_t formats = 1u << args->q.format;
    bool is_split = mlai_present(&args->q_rope);
    int64_t width = (int64_t)c->kv_lora_rank + (is_split ? 0 : c->qk_rope_head_dim);
    MLAI_TRY(view_rows(b, args->q, "q", formats, 3, args->bs, tokens, width, &p->q, diag));
    if (is_split)
        MLAI_TRY(view_rows(b, args->q_rope, "q_rope", formats, 3, args->bs, tokens,
                           c->qk_rope_head_dim, &p->q_rope, diag));
    if (casts_query(b, &args->q)) {
        MLAI_TRY(mlai_backend_check_device(b, &args->q, "q", diag));
        if (is_split)
            MLAI_TRY(mlai_backend_check_device(b, &args->q_rope, "q_rope", diag));
        p->q = mlai_backend_tensor(
            b, mla_tensor_4d(b->query_cast, MLA_FORMAT_E4M3, args->bs, tokens / args->bs,
                             b->num_heads, (int64_t)c->kv_lora_rank + c->qk_rope_head_dim));
        p->q_rope = (mla_tensor){.rank = 0};
    }
    return MLA_OK;
}

static mla_status set_outputs(const mla_backend *b, const mla_forward_decode_args *args,
                              int64_t tokens, mla_decode_params *p, mla_diag *diag)
{
    MLAI_TRY(view_rows(b, args->out, "out", MLAI_FLOATS | MLAI_FP8, 2, args->bs, tokens,
                       b->config.kv_lora_rank, &p->out, diag));
    if (!mlai_present(&args->lse))
        return MLA_OK;
    const mla_tensor *lse = &args->lse;
    MLAI_TRY(mlai_check_tensor(lse, "lse", MLAI_F(F32), 2, 2, true, diag));
    MLAI_TRY(mlai_check_extent(lse, "lse", 0, tokens, "the tokens of q", diag));
    MLAI_TRY(mlai_check_extent(lse, "lse", 1, b->num_heads, "the local heads", diag));
    p->lse = mla_tensor_3d(lse->data, MLA_FORMAT_F32, args->bs, tokens / args->bs, b->num_heads);
    p->lse.device_type = lse->device_type;
    p->lse.device_index = lse->device_index;
    p->lse.stride[0] = lse->stride[0] * (tokens / args->bs);
    p->lse.stride[1] = lse->stride[0];
    return MLA_OK;
}

/* Scales of a layer: 0 stands for the configuration's, or for 1. */
static mla_status take_layer(const mla_backend *b, const mla_layer *layer, mla_layer *own,
                             mla_diag *diag)
{
    MLAI_TRY(mlai_take_struct(own, sizeof *own, sizeof *own, layer, "mla_layer", diag));
    if (own->softmax_scale == 0.0f)
        own->softmax_scale = b->config.softmax_scale;
    if (own->k_scale == 0.0f)
        own->k_scale = 1.0f;
    return MLA_OK;
}

mla_status mlai_decode_prepare(mla_backend *backend, const mla_layer *layer, mla_kv_pool *pool,
                               const mla_forward_decode_args *args, mlai_decode_step *step,
                               mla_diag *diag)
{
    const mla_decode_metadata *metadata = NULL;
    mla_forward_decode_args *own = &step->args;
    memset(step, 0, sizeof *step);
    step->pool = pool;
    MLAI_TRY(
        mlai_take_struct(own, sizeof *own, sizeof *own, args, "mla_forward_decode_args", diag));
    MLAI_TRY(mla_backend_decode_metadata(backend, &metadata, diag));
    MLAI_TRY(take_layer(backend, layer, &step->layer, diag));
    if (own->is_non_causal != 0 && own->is_non_causal != 1)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "is_non_causal is %d: it is 0 or 1",
                         own->is_non_causal);
    if (!own->is_non_causal && mlai_present(&own->mask))
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "mask is given with is_non_causal 0: set it to 1, the mask alone says "
                         "what the window shows");
    int64_t tokens = 0;
    MLAI_TRY(check_counts(backend, own, metadata, &tokens, diag));
    step->is_empty = tokens == 0;
    if (step->is_empty)
        return MLA_OK;
    MLAI_TRY(check_pool(backend, pool, diag));
    MLAI_TRY(check_save(backend, own, tokens, diag));

    mla_decode_params *p = &step->params;
    *p = (mla_decode_params)MLA_DECODE_PARAMS_INIT;
    p->kv_lora_rank = backend->config.kv_lora_rank;
    p->qk_rope_head_dim = backend->config.qk_rope_head_dim;
    p->is_causal = !own->is_non_causal;
    p->seqlen_offset = backend->config.is_draft ? 0 : MLA_SEQLEN_OFFSET_VERIFY;
    p->max_seqlen_kv = backend->config.context_len;
    p->softmax_scale = step->layer.softmax_scale;
    p->logit_cap = step->layer.logit_cap;
    p->k_scale = step->layer.k_scale;
    p->mask = own->mask;
    p->page_table = mla_tensor_slice(metadata->page_table, 0, metadata->num_extends, own->bs);
    p->cache_seqlens = mla_tensor_slice(metadata->seq_lens, 0, metadata->num_extends, own->bs);
    MLAI_TRY(mla_kv_pool_get_key_buffer(pool, step->layer.layer_id, &p->kv_cache, diag));
    MLAI_TRY(set_query(backend, own, tokens, p, diag));
    MLAI_TRY(set_outputs(backend, own, tokens, p, diag));
    p->call = mlai_backend_call(backend, own->stream);

    /* A draft's later tokens see rows past the length that the caller gave. */
    int64_t reach = p->is_causal && backend->config.is_draft ? tokens / own->bs - 1 : 0;
    MLAI_TRY(mlai_backend_check_lens(backend, &metadata->seq_lens, metadata->num_extends, own->bs,
                                     reach, metadata->page_table.shape[1], diag));
    mla_problem problem = MLA_PROBLEM_INIT;
    MLAI_TRY(name_attention(diag, mla_decode_problem(p, &problem, diag)));
    return mlai_backend_fix_solution(backend, &problem, &p->call.solution, diag);
}

static mla_status write_rows(mla_backend *b, mlai_decode_step *step, mla_diag *diag)
{
    const mla_config *c = &b->config;
    const mla_tensor *k = &step->args.k;
    mla_tensor rope = {.rank = 0};
    if (c->qk_rope_head_dim > 0)
        rope = mla_tensor_slice(*k, k->rank - 1, c->kv_lora_rank, c->qk_rope_head_dim);
    mla_call call = mlai_backend_call(b, step->args.stream);
    return name_write(diag, mla_kv_pool_set_mla_kv_buffer(
                                step->pool, step->layer.layer_id, step->args.out_cache_loc,
                                mla_tensor_slice(*k, k->rank - 1, 0, c->kv_lora_rank), rope,
                                step->layer.k_scale, 0, &call, diag));
}

/* q, and q_rope beside it, into the buffer that params.q views. */
static mla_status cast_query(const mla_backend *b, const mla_forward_decode_args *args,
                             mla_diag *diag)
{
    int64_t rank = b->config.kv_lora_rank, rope = b->config.qk_rope_head_dim;
    mla_tensor whole =
        mlai_backend_tensor(b, mla_tensor_3d(b->query_cast, MLA_FORMAT_E4M3, args->q.shape[0],
                                             b->num_heads, rank + rope));
    if (!mlai_present(&args->q_rope))
        return mlai_cast_to_e4m3(b, args->stream, &args->q, &whole, diag);
    mla_tensor left = mla_tensor_slice(whole, 2, 0, rank);
    mla_tensor right = mla_tensor_slice(whole, 2, rank, rope);
    MLAI_TRY(mlai_cast_to_e4m3(b, args->stream, &args->q, &left, diag));
    return mlai_cast_to_e4m3(b, args->stream, &args->q_rope, &right, diag);
}

mla_status mlai_decode_run(mla_backend *backend, mlai_decode_step *step, mla_diag *diag)
{
    if (step->is_empty)
        return MLA_OK;
    if (step->args.save_kv_cache)
        MLAI_TRY(write_rows(backend, step, diag));
    if (casts_query(backend, &step->args.q))
        MLAI_TRY(cast_query(backend, &step->args, diag));
    return name_attention(diag, mla_decode_with_kvcache(backend->ctx, &step->params, diag));
}

mla_status mla_backend_forward_decode(mla_backend *backend, const mla_layer *layer,
                                      mla_kv_pool *pool, const mla_forward_decode_args *args,
                                      mla_diag *diag)
{
    if (backend == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "backend is NULL: give one");
    mlai_decode_step step;
    MLAI_TRY(mlai_decode_prepare(backend, layer, pool, args, &step, diag));
    return mlai_decode_run(backend, &step, diag);
}
