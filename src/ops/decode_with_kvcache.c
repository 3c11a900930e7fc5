/*
 * mla_decode_with_kvcache and mla_extend_with_kvcache: checks and dispatch of absorbed attention
 * over the paged latent cache. Both take one parameter struct; extend is decode with more said:
 * ragged, causal, verify's offset, no mask.
 *
 * Keys read for a request (see ops.h): those below the bound of its last query token. Only pages
 * that hold such keys are looked up, so entries of the page table past them may hold anything.
 */
#include "ops/ops.h"

/* q [B, q_len, H, R or D] or ragged [T, H, R or D], and q_rope beside it. */
static mla_status check_query(mlai_args *args, mla_decode_params *own, mla_problem *problem)
{
    const bool ragged = mlai_present(&own->cu_seqlens_q);
    mla_tensor *q = &own->q;
    MLAI_TRY(mlai_arg_tensor(args, q, "q", MLAI_FLOATS | MLAI_FP8, 3, 4));
    if (q->rank != (ragged ? 3 : 4))
        return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                         "q has rank %d; give [T, H, width] with cu_seqlens_q, or [B, q_len, H, "
                         "width] without",
                         q->rank);
    const int32_t head_dim = q->rank - 2;
    MLAI_TRY(mlai_arg_dim(args, q->shape[head_dim], 1, "the head count of q", &problem->num_heads));
    if (mlai_present(&own->q_rope)) {
        mla_tensor *rope = &own->q_rope;
        MLAI_TRY(mlai_arg_tensor(args, rope, "q_rope", MLAI_FLOATS | MLAI_FP8, q->rank, q->rank));
        if (rope->format != q->format)
            return mlai_fail(args->diag, MLA_ERROR_FORMAT,
                             "q_rope is %s and q %s; both share one format",
                             mla_format_name(rope->format), mla_format_name(q->format));
        for (int32_t i = 0; i <= head_dim; i++)
            MLAI_TRY(mlai_arg_extent(args, rope, "q_rope", i, q->shape[i], "as in q"));
        MLAI_TRY(mlai_arg_extent(args, rope, "q_rope", q->rank - 1, own->qk_rope_head_dim,
                                 "qk_rope_head_dim"));
        MLAI_TRY(mlai_arg_extent(args, q, "q", q->rank - 1, own->kv_lora_rank,
                                 "kv_lora_rank (q_rope holds the rest)"));
        if (own->qk_rope_head_dim == 0)
            *rope = (mla_tensor){0};
    } else {
        MLAI_TRY(mlai_arg_extent(args, q, "q", q->rank - 1,
                                 (int64_t)own->kv_lora_rank + own->qk_rope_head_dim,
                                 "kv_lora_rank + qk_rope_head_dim"));
    }
    problem->q_format = q->format;
    problem->is_ragged = ragged;
    problem->num_kv_heads = 1;
    return MLA_OK;
}

/* B, T and max_q_len from the shapes. */
static mla_status check_batch(mlai_args *args, mla_decode_params *own, mla_problem *problem)
{
    const mla_tensor *q = &own->q;
    if (own->max_q_len < 0)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "max_q_len is %d; give the largest q_len of a request, or 0 for any",
                         own->max_q_len);
    if (problem->is_ragged) {
        mla_tensor *cu = &own->cu_seqlens_q;
        MLAI_TRY(mlai_arg_tensor(args, cu, "cu_seqlens_q", MLAI_F(I32), 1, 1));
        if (cu->shape[0] < 1)
            return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                             "cu_seqlens_q has shape [0]; it must be [B + 1]");
        if (q->shape[0] > INT32_MAX)
            return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                             "q has %lld tokens; cu_seqlens_q counts up to %d",
                             (long long)q->shape[0], INT32_MAX);
        problem->batch = cu->shape[0] - 1;
        problem->tokens = q->shape[0];
        if (own->max_q_len == 0 || own->max_q_len > problem->tokens)
            own->max_q_len = (int32_t)problem->tokens;
    } else {
        problem->batch = q->shape[0];
        if (__builtin_mul_overflow(q->shape[0], q->shape[1], &problem->tokens) ||
            q->shape[1] > INT32_MAX)
            return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                             "q has %lld requests of %lld tokens; a q_len fits 31 bits and their "
                             "product 63",
                             (long long)q->shape[0], (long long)q->shape[1]);
        own->max_q_len = (int32_t)q->shape[1];
    }
    problem->max_q_len = own->max_q_len;
    return MLA_OK;
}

/* page_table, lengths and the bound on visible keys. */
static mla_status check_lengths(mlai_args *args, mla_decode_params *own, mla_problem *problem)
{
    mla_tensor *table = &own->page_table;
    MLAI_TRY(mlai_arg_tensor(args, table, "page_table", MLAI_F(I32), 2, 2));
    MLAI_TRY(mlai_arg_extent(args, table, "page_table", 0, problem->batch, "the requests"));
    MLAI_TRY(mlai_arg_tensor(args, &own->cache_seqlens, "cache_seqlens", MLAI_F(I32), 1, 1));
    MLAI_TRY(mlai_arg_extent(args, &own->cache_seqlens, "cache_seqlens", 0, problem->batch,
                             "the requests"));
    MLAI_TRY(mlai_arg_optional(args, &own->global_seqlens, "global_seqlens", MLAI_F(I32), 1, 1));
    int64_t capacity;
    if (__builtin_mul_overflow(table->shape[1], problem->page_size, &capacity))
        return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                         "page_table has %lld columns of page_size %lld; their product must fit 63 "
                         "bits",
                         (long long)table->shape[1], (long long)problem->page_size);
    if (own->max_seqlen_kv < 0)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "max_seqlen_kv is %lld; give a bound of the visible keys, or 0 for the "
                         "page table's",
                         (long long)own->max_seqlen_kv);
    if (own->max_seqlen_kv == 0 || own->max_seqlen_kv > capacity)
        own->max_seqlen_kv = capacity;
    problem->max_kv_len = own->max_seqlen_kv;
    return MLA_OK;
}

/* Where the keys of a shard stand in the whole sequence. */
static mla_status check_positions(mlai_args *args, mla_decode_params *own, mla_problem *problem)
{
    const bool has_global = mlai_present(&own->global_seqlens);
    if (own->key_position_stride < 1 || own->key_position_first < 0)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "key_position_first is %lld and key_position_stride %lld; give at least 0 "
                         "and 1",
                         (long long)own->key_position_first, (long long)own->key_position_stride);
    if (has_global)
        MLAI_TRY(mlai_arg_extent(args, &own->global_seqlens, "global_seqlens", 0, problem->batch,
                                 "the requests"));
    const bool moved = own->key_position_first != 0 || own->key_position_stride != 1;
    if (moved && !has_global)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "global_seqlens is absent with key_position_first %lld and "
                         "key_position_stride %lld; give the lengths of the whole sequences",
                         (long long)own->key_position_first, (long long)own->key_position_stride);
    problem->has_positions = moved || has_global;
    return MLA_OK;
}

static mla_status check_mask(mlai_args *args, mla_decode_params *own, mla_problem *problem)
{
    const mla_tensor *mask = &own->mask;
    if (!mlai_present(mask))
        return MLA_OK;
    if (own->is_causal)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "mask is given with is_causal 1; set is_causal to 0, the mask alone says "
                         "what the window shows");
    MLAI_TRY(mlai_arg_tensor(args, mask, "mask", MLAI_F(U8), 2, 2));
    MLAI_TRY(mlai_arg_extent(args, mask, "mask", 0, problem->tokens, "the query tokens"));
    if (mask->shape[1] < problem->max_q_len)
        return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                         "mask has %lld columns and max_q_len is %lld; give a column for each "
                         "window key",
                         (long long)mask->shape[1], (long long)problem->max_q_len);
    problem->has_mask = 1;
    return MLA_OK;
}

static mla_status check_outputs(mlai_args *args, mla_decode_params *own, mla_problem *problem)
{
    const mla_tensor *q = &own->q;
    const int32_t rank = q->rank;
    MLAI_TRY(mlai_arg_output(args, &own->out, "out", MLAI_FLOATS, rank, rank));
    for (int32_t i = 0; i < rank - 1; i++)
        MLAI_TRY(mlai_arg_extent(args, &own->out, "out", i, q->shape[i], "as in q"));
    MLAI_TRY(mlai_arg_extent(args, &own->out, "out", rank - 1, own->kv_lora_rank, "kv_lora_rank"));
    if (mlai_present(&own->lse)) {
        MLAI_TRY(mlai_arg_output(args, &own->lse, "lse", MLAI_F(F32), rank - 1, rank - 1));
        for (int32_t i = 0; i < rank - 1; i++)
            MLAI_TRY(mlai_arg_extent(args, &own->lse, "lse", i, q->shape[i], "as in q"));
        MLAI_TRY(mlai_arg_apart(args, &own->lse, "lse", &own->out, "out"));
        MLAI_TRY(mlai_arg_apart(args, &own->lse, "lse", q, "q"));
    }
    MLAI_TRY(mlai_arg_apart(args, &own->out, "out", q, "q"));
    MLAI_TRY(mlai_arg_apart(args, &own->out, "out", &own->q_rope, "q_rope"));
    MLAI_TRY(mlai_arg_apart(args, &own->out, "out", &own->kv_cache, "kv_cache"));
    problem->out_format = own->out.format;
    problem->has_lse = mlai_present(&own->lse);
    return MLA_OK;
}

/* Whether requests are q_len token strides apart, so that all tokens have one stride. */
static bool is_even(const mla_tensor *t)
{
    return t->shape[0] <= 1 || t->shape[1] <= 1 || t->stride[0] == t->shape[1] * t->stride[1];
}

/* Whether q_rope lies behind q in the same rows. */
static bool is_joined(const mla_tensor *q, const mla_tensor *rope)
{
    bool joined =
        q->data && rope->data &&
        (char *)rope->data - (char *)q->data == q->shape[q->rank - 1] * mla_format_bytes(q->format);
    for (int32_t i = 0; i + 1 < q->rank; i++)
        joined = joined && (q->shape[i] <= 1 || q->stride[i] == rope->stride[i]);
    return joined;
}

static int32_t layout_of(const mla_decode_params *own, const mla_problem *problem)
{
    const mla_tensor *tensors[] = {&own->q, &own->q_rope, &own->kv_cache, &own->kv_cache_rope,
                                   &own->out};
    int32_t layout = mlai_layout_aligned(tensors, sizeof tensors / sizeof tensors[0]);
    if (mlai_present(&own->q_rope) && !is_joined(&own->q, &own->q_rope))
        layout |= MLA_LAYOUT_SPLIT_QUERY;
    if (!problem->is_ragged && !(is_even(&own->q) && is_even(&own->out) &&
                                 (!mlai_present(&own->lse) || is_even(&own->lse))))
        layout |= MLA_LAYOUT_GAPPED_BATCH;
    return layout;
}

static mla_status check_extend(mlai_args *args, const mla_decode_params *own)
{
    if (!mlai_present(&own->cu_seqlens_q))
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "cu_seqlens_q is absent; extend takes ragged queries [T, H, width]");
    if (own->is_causal != 1)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "is_causal is %d; extend is causal, use mla_decode_with_kvcache otherwise",
                         own->is_causal);
    if (own->seqlen_offset != MLA_SEQLEN_OFFSET_VERIFY)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "seqlen_offset is %d; extend takes MLA_SEQLEN_OFFSET_VERIFY, use "
                         "mla_decode_with_kvcache for other offsets",
                         own->seqlen_offset);
    return MLA_OK;
}

static mla_status prepare(int32_t op, const mla_decode_params *params, mlai_args *args,
                          mla_decode_params *own, mla_problem *problem)
{
    MLAI_TRY(MLAI_TAKE(own, params, mla_decode_params, args->diag));
    *problem = (mla_problem)MLA_PROBLEM_INIT;
    problem->op = op;
    MLAI_TRY(mlai_arg_call(args, &own->call));
    MLAI_TRY(mlai_arg_reserved(args, own->reserved0, "reserved0"));
    MLAI_TRY(mlai_arg_flag(args, own->is_causal, "is_causal"));
    MLAI_TRY(mlai_arg_softmax(args, own->softmax_scale, own->logit_cap));
    if (op == MLA_OP_EXTEND)
        MLAI_TRY(check_extend(args, own));
    MLAI_TRY(check_query(args, own, problem));
    const mlai_cache_arg cache = {.kv_cache = &own->kv_cache,
                                  .kv_cache_rope = &own->kv_cache_rope,
                                  .kv_lora_rank = own->kv_lora_rank,
                                  .qk_rope_head_dim = own->qk_rope_head_dim,
                                  .k_scale = own->k_scale};
    MLAI_TRY(mlai_arg_cache(args, &cache, problem));
    MLAI_TRY(check_batch(args, own, problem));
    MLAI_TRY(check_lengths(args, own, problem));
    MLAI_TRY(check_mask(args, own, problem));
    MLAI_TRY(check_positions(args, own, problem));
    MLAI_TRY(check_outputs(args, own, problem));
    problem->layout = layout_of(own, problem);
    problem->is_causal = own->is_causal;
    problem->has_logit_cap = own->logit_cap > 0.0f;
    problem->device_type = args->device_type;
    problem->device_index = args->device_index;
    return MLA_OK;
}

/* Local keys that the last query token of a request sees: the most that is read for it. */
static int64_t visible_keys(const mla_decode_params *own, int64_t len, int64_t global_len,
                            int64_t q_len, bool has_positions)
{
    if (q_len == 0)
        return 0;
    int64_t bound = has_positions ? global_len : len;
    if (own->is_causal)
        bound += (own->seqlen_offset == MLA_SEQLEN_OFFSET_VERIFY ? 1 - q_len : own->seqlen_offset) +
                 q_len - 1;
    if (!has_positions)
        return mlai_max_i64(bound, 0);
    if (bound <= own->key_position_first)
        return 0;
    return mlai_min_i64(mlai_ceil_div(bound - own->key_position_first, own->key_position_stride),
                        len);
}

static mla_status check_pages(mlai_args *args, const mla_decode_params *own, int64_t request,
                              int64_t keys)
{
    const int64_t n_pages = own->kv_cache.shape[0];
    const int64_t n_live = mlai_ceil_div(keys, own->kv_cache.shape[1]);
    if (n_live == 0)
        return MLA_OK; /* page_table may be empty, its pointer NULL */
    const int32_t *ids =
        (const int32_t *)own->page_table.data + request * own->page_table.stride[0];
    uint32_t any_bad = 0; /* no early exit, so that the common case runs in vectors */
    for (int64_t i = 0; i < n_live; i++)
        any_bad |= (uint32_t)(ids[i] < 0) | (uint32_t)(ids[i] >= n_pages);
    for (int64_t i = 0; any_bad && i < n_live; i++)
        if (ids[i] < 0 || ids[i] >= n_pages)
            return mlai_fail(args->diag, MLA_ERROR_CAPACITY,
                             "page_table[%lld, %lld] is %d and kv_cache has %lld pages; live "
                             "entries must name one of them",
                             (long long)request, (long long)i, ids[i], (long long)n_pages);
    return MLA_OK;
}

static mla_status check_live(mlai_args *args, const mla_decode_params *own,
                             const mla_problem *problem)
{
    if (!mlai_args_live(args))
        return MLA_OK;
    if (problem->is_ragged)
        MLAI_TRY(mlai_live_cumulative(args, &own->cu_seqlens_q, "cu_seqlens_q", problem->tokens,
                                      "q", problem->max_q_len, "max_q_len"));
    const bool has_global = mlai_present(&own->global_seqlens);
    const int64_t capacity = own->page_table.shape[1] * problem->page_size;
    for (int64_t b = 0; b < problem->batch; b++) {
        const int64_t len = mlai_index_at(&own->cache_seqlens, b);
        const int64_t global_len = has_global ? mlai_index_at(&own->global_seqlens, b) : len;
        if (len < 0 || global_len < 0)
            return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                             "%s[%lld] is %lld; lengths are 0 or more",
                             len < 0 ? "cache_seqlens" : "global_seqlens", (long long)b,
                             (long long)(len < 0 ? len : global_len));
        int64_t q_len = problem->max_q_len;
        if (problem->is_ragged)
            q_len = mlai_index_at(&own->cu_seqlens_q, b + 1) - mlai_index_at(&own->cu_seqlens_q, b);
        const int64_t keys = visible_keys(own, len, global_len, q_len, problem->has_positions);
        const int64_t need = mlai_max_i64(len, keys);
        if (need > capacity)
            return mlai_fail(args->diag, MLA_ERROR_CAPACITY,
                             "cache_seqlens[%lld] is %lld, which needs %lld keys, and page_table "
                             "has %lld columns of %lld; make it wider",
                             (long long)b, (long long)len, (long long)need,
                             (long long)own->page_table.shape[1], (long long)problem->page_size);
        if (need > own->max_seqlen_kv)
            return mlai_fail(args->diag, MLA_ERROR_CAPACITY,
                             "cache_seqlens[%lld] is %lld, which needs %lld keys, over "
                             "max_seqlen_kv %lld; raise max_seqlen_kv",
                             (long long)b, (long long)len, (long long)need,
                             (long long)own->max_seqlen_kv);
        MLAI_TRY(check_pages(args, own, b, keys));
    }
    return MLA_OK;
}

static mla_status run(int32_t op, mla_context *ctx, const mla_decode_params *params, mla_diag *diag)
{
    mlai_args args = {.diag = diag, .pointers = true};
    mla_decode_params own;
    mla_problem problem;
    MLAI_TRY(mlai_arg_context(ctx, diag));
    MLAI_TRY(prepare(op, params, &args, &own, &problem));
    MLAI_TRY(check_live(&args, &own, &problem));
    if (problem.tokens == 0)
        return MLA_OK;
    return mlai_dispatch(ctx, &problem, &own.call, &own, diag);
}

static mla_status describe(int32_t op, const mla_decode_params *params, mla_problem *problem,
                           mla_diag *diag)
{
    mlai_args args = {.diag = diag};
    mla_decode_params own;
    mla_problem made;
    MLAI_TRY(prepare(op, params, &args, &own, &made));
    return mlai_give_problem(problem, &made, diag);
}

mla_status mla_decode_with_kvcache(mla_context *ctx, const mla_decode_params *params,
                                   mla_diag *diag)
{
    return run(MLA_OP_DECODE, ctx, params, diag);
}

mla_status mla_extend_with_kvcache(mla_context *ctx, const mla_decode_params *params,
                                   mla_diag *diag)
{
    return run(MLA_OP_EXTEND, ctx, params, diag);
}

mla_status mla_decode_problem(const mla_decode_params *params, mla_problem *problem, mla_diag *diag)
{
    return describe(MLA_OP_DECODE, params, problem, diag);
}

mla_status mla_extend_problem(const mla_decode_params *params, mla_problem *problem, mla_diag *diag)
{
    return describe(MLA_OP_EXTEND, params, problem, diag);
}
