/*
 * The backend's configuration: checked once, field by field, with defaults filled in; then all
 * memory that its forwards use is sized from it.
 *
 * Workspace: the largest that any row that runs here asks for, over the kinds of calls that a
 * forward makes, at the capacities (max_bs requests, max_tokens tokens, context_len keys of a
 * request; prefill: max_tokens or chunk_capacity keys). Taking the largest over all rows rather
 * than the chosen one keeps forced scopes and smaller calls, which may choose otherwise, within
 * it.
 */
#include "backend/backend.h"
#include <math.h>
#include <stdlib.h>

#define MAX_VERDICTS 256
#define WORKSPACE_ALIGNMENT 256

/* A configuration as of version 0.1. */
#define MIN_CONFIG_BYTES offsetof(mla_config, device_error)

float mla_softmax_scale(int32_t qk_nope_head_dim, int32_t qk_rope_head_dim, float factor,
                        float mscale_all_dim)
{
    double m = 1.0;
    if (factor > 1.0f)
        m = 0.1 * (double)mscale_all_dim * log((double)factor) + 1.0;
    double head_dim = (double)qk_nope_head_dim + (double)qk_rope_head_dim;
    return (float)(m * m / sqrt(head_dim));
}

/* ---- checks ---------------------------------------------------------------------------------- */

static mla_status check_range(int64_t value, int64_t least, int64_t most, const char *name,
                              mla_diag *diag)
{
    if (value >= least && value <= most)
        return MLA_OK;
    return mlai_fail(diag, MLA_ERROR_ARGUMENT, "config.%s is %lld: %lld to %lld are possible", name,
                     (long long)value, (long long)least, (long long)most);
}

static mla_status check_formats(const mla_config *c, mla_diag *diag)
{
    if (c->q_format < 1 || c->q_format > 31 || !(MLAI_FLOATS >> c->q_format & 1))
        return mlai_fail(diag, MLA_ERROR_FORMAT, "config.q_format is %s: it takes f32, bf16 or f16",
                         mla_format_name(c->q_format));
    uint32_t caches = MLAI_FLOATS | MLAI_FP8 | MLAI_F(DS656);
    if (c->kv_format < 1 || c->kv_format > 31 || !(caches >> c->kv_format & 1))
        return mlai_fail(diag, MLA_ERROR_FORMAT,
                         "config.kv_format is %s: it takes f32, bf16, f16, e4m3, e5m2 or ds656",
                         mla_format_name(c->kv_format));
    if (c->kv_format == MLA_FORMAT_DS656 && (c->kv_lora_rank != 512 || c->qk_rope_head_dim != 64))
        return mlai_fail(diag, MLA_ERROR_FORMAT,
                         "config.kv_format ds656 holds kv_lora_rank 512 and qk_rope_head_dim 64, "
                         "not %d and %d: take another format",
                         c->kv_lora_rank, c->qk_rope_head_dim);
    if (c->kv_cache_quant_method == MLA_QUANT_PER_TOKEN_HEAD)
        return mlai_fail(
            diag, MLA_ERROR_UNSUPPORTED,
            "config.kv_cache_quant_method per_token_head keeps a row in three tensors, "
            "which decode cannot read: take none, with kv_format e4m3 or ds656");
    if (c->kv_cache_quant_method != MLA_QUANT_NONE)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "config.kv_cache_quant_method is %d: 0 (none) is what exists",
                         c->kv_cache_quant_method);
    MLAI_TRY(check_range(c->decode_query, 0, 1, "decode_query", diag));
    if (c->decode_query == MLA_DECODE_QUERY_CAST && c->kv_format != MLA_FORMAT_E4M3)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "config.decode_query is cast, to e4m3, and kv_format is %s: take keep, or "
                         "an e4m3 cache",
                         mla_format_name(c->kv_format));
    return MLA_OK;
}

static mla_status check_config(mla_config *c, mla_diag *diag)
{
    const int64_t i32 = INT32_MAX;
    MLAI_TRY(check_range(c->device_type, MLA_DEVICE_CPU, MLA_DEVICE_CUDA, "device_type", diag));
    MLAI_TRY(check_range(c->num_attention_heads, 1, i32, "num_attention_heads", diag));
    MLAI_TRY(check_range(c->attn_tp_size, 1, i32, "attn_tp_size", diag));
    if (c->num_attention_heads % c->attn_tp_size != 0)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "config.attn_tp_size is %d, which does not divide num_attention_heads %d",
                         c->attn_tp_size, c->num_attention_heads);
    /* The widths' sums must fit i32 too: D = R + P and L = N + P. */
    MLAI_TRY(check_range(c->kv_lora_rank, 1, i32 / 2, "kv_lora_rank", diag));
    MLAI_TRY(check_range(c->qk_nope_head_dim, 1, i32 / 2, "qk_nope_head_dim", diag));
    MLAI_TRY(check_range(c->qk_rope_head_dim, 0, i32 / 2, "qk_rope_head_dim", diag));
    MLAI_TRY(check_range(c->v_head_dim, 1, i32 / 2, "v_head_dim", diag));
    MLAI_TRY(check_range(c->page_size, 1, i32, "page_size", diag));
    MLAI_TRY(check_range(c->context_len, 1, i32, "context_len", diag));
    MLAI_TRY(check_formats(c, diag));
    if (!isfinite(c->softmax_scale) || c->softmax_scale == 0.0f)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "config.softmax_scale is %g: give a finite value other than 0 "
                         "(mla_softmax_scale computes DeepSeek's)",
                         (double)c->softmax_scale);
    MLAI_TRY(check_range(c->is_draft, 0, 1, "is_draft", diag));
    MLAI_TRY(
        check_range(c->speculative_num_draft_tokens, 1, i32, "speculative_num_draft_tokens", diag));
    MLAI_TRY(check_range(c->max_bs, 1, i32 - 1, "max_bs", diag));
    if (c->max_tokens == 0)
        c->max_tokens = (int64_t)c->max_bs * c->speculative_num_draft_tokens;
    MLAI_TRY(check_range(c->max_tokens, 1, i32, "max_tokens", diag));
    if (c->chunk_capacity == 0)
        c->chunk_capacity = MLAI_DEFAULT_CHUNK_CAPACITY;
    return check_range(c->chunk_capacity, 1, i32, "chunk_capacity", diag);
}

/* ---- workspace ------------------------------------------------------------------------------- */

typedef struct workspace_need {
    const mla_backend *backend;
    mla_verdict *verdicts; /* [MAX_VERDICTS] */
    uint64_t bytes;
    bool is_required; /* what every forward needs: the backend's solution must take it */
} workspace_need;

/* Raises need->bytes to the largest workspace that a row which takes this problem, on the backend's
 * device, asks for. */
static mla_status add_problem(workspace_need *need, mla_problem *problem, mla_diag *diag)
{
    const mla_backend *b = need->backend;
    problem->device_type = b->config.device_type;
    problem->device_index = b->config.device_index;
    int32_t n = MAX_VERDICTS;
    mla_status status = mla_explain(b->ctx, problem, b->solution, need->verdicts, &n, diag);
    if (status == MLA_ERROR_CAPACITY)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "config.max_bs %d times max_tokens %lld and %d heads is over 2^48 rows: "
                         "take smaller ones",
                         b->config.max_bs, (long long)b->config.max_tokens, b->num_heads);
    MLAI_TRY(status);
    if (need->is_required) {
        const char *name;
        MLAI_TRY(mla_solution_choose(b->ctx, problem, b->solution, &name, diag));
    }
    for (int32_t i = 0; i < n; i++) {
        if (need->verdicts[i].kind == MLA_VERDICT_REJECTED)
            continue;
        if (need->verdicts[i].workspace_bytes >> 62)
            return mlai_fail(
                diag, MLA_ERROR_ARGUMENT,
                "config.max_tokens %lld and context_len %lld make %s ask for more than "
                "2^62 bytes of workspace: take smaller ones",
                (long long)b->config.max_tokens, (long long)b->config.context_len,
                need->verdicts[i].name);
        if (need->verdicts[i].workspace_bytes > need->bytes)
            need->bytes = need->verdicts[i].workspace_bytes;
    }
    return MLA_OK;
}

/* A contiguous operand without memory, to make problems from. */
static mla_tensor shape_of(int32_t format, int32_t rank, int64_t n0, int64_t n1, int64_t n2,
                           int64_t n3)
{
    int64_t shape[4] = {n0, n1, n2, n3};
    return mla_tensor_make(NULL, format, rank, shape);
}

/* Decode: `kind` is 0 for causal, 1 for a block without mask, 2 for a block with one. */
static mla_status add_decode(workspace_need *need, int32_t q_format, int32_t out_format,
                             int32_t kind, bool with_extras, mla_diag *diag)
{
    const mla_config *c = &need->backend->config;
    int64_t rank = c->kv_lora_rank, width = rank + c->qk_rope_head_dim;
    int64_t row = c->kv_format == MLA_FORMAT_DS656 ? MLA_DS656_ROW_BYTES : width;
    int64_t heads = need->backend->num_heads, table_width = need->backend->table_width;
    mla_decode_params p = MLA_DECODE_PARAMS_INIT;
    p.kv_lora_rank = c->kv_lora_rank;
    p.qk_rope_head_dim = c->qk_rope_head_dim;
    p.is_causal = kind == 0;
    p.max_seqlen_kv = c->context_len;
    p.softmax_scale = c->softmax_scale;
    p.q = shape_of(q_format, 4, 1, 1, heads, width);
    p.kv_cache = shape_of(c->kv_format, 3, table_width + 1, c->page_size, row, 0);
    p.page_table = shape_of(MLA_FORMAT_I32, 2, 1, table_width, 0, 0);
    p.cache_seqlens = shape_of(MLA_FORMAT_I32, 1, 1, 0, 0, 0);
    p.out = shape_of(out_format, 4, 1, 1, heads, rank);
    if (kind == 2)
        p.mask = shape_of(MLA_FORMAT_U8, 2, 1, 1, 0, 0);
    if (with_extras) {
        p.lse = shape_of(MLA_FORMAT_F32, 3, 1, 1, heads, 0);
        p.logit_cap = 1.0f;
        if (MLAI_FP8 >> c->kv_format & 1)
            p.k_scale = 2.0f;
    }
    mla_problem problem = MLA_PROBLEM_INIT;
    MLAI_TRY(mla_decode_problem(&p, &problem, diag));
    problem.batch = c->max_bs;
    problem.tokens = c->max_tokens;
    problem.max_q_len = c->max_tokens;
    return add_problem(need, &problem, diag);
}

static mla_status add_prefill(workspace_need *need, int32_t format, int32_t out_format,
                              bool is_causal, bool with_extras, mla_diag *diag)
{
    const mla_config *c = &need->backend->config;
    int64_t heads = need->backend->num_heads;
    int64_t width = (int64_t)c->qk_nope_head_dim + c->qk_rope_head_dim;
    int64_t keys = need->backend->max_kv_tokens;
    mla_prefill_params p = MLA_PREFILL_PARAMS_INIT;
    p.is_causal = is_causal;
    p.softmax_scale = c->softmax_scale;
    p.q = shape_of(format, 3, c->max_tokens, heads, width, 0);
    p.k = shape_of(format, 3, keys, heads, width, 0);
    p.v = shape_of(format, 3, keys, heads, c->v_head_dim, 0);
    p.cu_seqlens_q = shape_of(MLA_FORMAT_I32, 1, (int64_t)c->max_bs + 1, 0, 0, 0);
    p.cu_seqlens_kv = p.cu_seqlens_q;
    p.out = shape_of(out_format, 3, c->max_tokens, heads, c->v_head_dim, 0);
    if (with_extras) {
        p.lse = shape_of(MLA_FORMAT_F32, 2, c->max_tokens, heads, 0, 0);
        p.logit_cap = 1.0f;
    }
    mla_problem problem = MLA_PROBLEM_INIT;
    MLAI_TRY(mla_prefill_problem(&p, &problem, diag));
    return add_problem(need, &problem, diag);
}

static mla_status add_write(workspace_need *need, mla_diag *diag)
{
    const mla_config *c = &need->backend->config;
    int64_t width = (int64_t)c->kv_lora_rank + c->qk_rope_head_dim;
    int64_t row = c->kv_format == MLA_FORMAT_DS656 ? MLA_DS656_ROW_BYTES : width;
    mla_write_kv_params p = MLA_WRITE_KV_PARAMS_INIT;
    p.latent = shape_of(c->q_format, 2, c->max_tokens, width, 0, 0);
    p.slots = shape_of(MLA_FORMAT_I64, 1, c->max_tokens, 0, 0, 0);
    p.kv_cache = shape_of(c->kv_format, 3, need->backend->table_width + 1, c->page_size, row, 0);
    p.kv_lora_rank = c->kv_lora_rank;
    p.qk_rope_head_dim = c->qk_rope_head_dim;
    mla_problem problem = MLA_PROBLEM_INIT;
    MLAI_TRY(mla_write_kv_problem(&p, &problem, diag));
    return add_problem(need, &problem, diag);
}

/*
 * Every kind of call that a forward may make, for one query format. Causal calls in the formats
 * that the configuration implies are what the backend is for, so a solution must take them; others
 * may come, and are sized where something takes them.
 */
static mla_status add_format(workspace_need *need, int32_t q_format, mla_diag *diag)
{
    const mla_config *c = &need->backend->config;
    bool is_cast = c->decode_query == MLA_DECODE_QUERY_CAST;
    bool is_decode_format = q_format == (is_cast ? (int32_t)MLA_FORMAT_E4M3 : c->q_format);
    bool is_prefill_format = q_format == c->q_format;
    bool is_fp8 = MLAI_FP8 >> q_format & 1;
    int32_t outs[3] = {is_fp8 ? MLA_FORMAT_BF16 : q_format, MLA_FORMAT_F32, MLA_FORMAT_F16};
    for (int32_t i = 0; i < 3; i++)
        for (int32_t extras = 0; extras < 2; extras++) {
            bool is_plain = i == 0 && extras == 0;
            need->is_required = is_plain && is_decode_format;
            MLAI_TRY(add_decode(need, q_format, outs[i], 0, extras, diag));
            need->is_required = is_plain && is_prefill_format;
            MLAI_TRY(add_prefill(need, q_format, outs[i], true, extras, diag));
            need->is_required = false;
            MLAI_TRY(add_decode(need, q_format, outs[i], 1, extras, diag));
            MLAI_TRY(add_decode(need, q_format, outs[i], 2, extras, diag));
            MLAI_TRY(add_prefill(need, q_format, outs[i], false, extras, diag));
        }
    return MLA_OK;
}

mla_status mlai_backend_size_workspace(mla_backend *backend, mla_diag *diag)
{
    workspace_need need = {.backend = backend};
    need.verdicts = calloc(MAX_VERDICTS, sizeof *need.verdicts);
    if (need.verdicts == NULL)
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY, "no memory to size a backend's workspace");
    for (int32_t i = 0; i < MAX_VERDICTS; i++)
        need.verdicts[i].struct_size = sizeof *need.verdicts;
    mla_status status = add_format(&need, backend->config.q_format, diag);
    if (status == MLA_OK)
        status = add_format(&need, MLA_FORMAT_E4M3, diag);
    if (status == MLA_OK)
        status = add_format(&need, MLA_FORMAT_E5M2, diag);
    if (status == MLA_OK)
        status = add_write(&need, diag);
    free(need.verdicts);
    if (status != MLA_OK || need.bytes <= backend->workspace_bytes)
        return status;
    /* A captured graph holds the workspace's address. */
    for (int32_t bs = 1; bs <= backend->graph.max_bs; bs++)
        if (backend->graph.batches[bs] != NULL)
            return mlai_fail(diag, MLA_ERROR_STATE,
                             "the workspace would have to grow to %llu bytes while batches are "
                             "captured: call mla_backend_init_graph_state first",
                             (unsigned long long)need.bytes);
    uint64_t bytes = mlai_align_up(need.bytes, WORKSPACE_ALIGNMENT);
    void *memory = mlai_backend_alloc(backend, 1, bytes + WORKSPACE_ALIGNMENT);
    if (memory == NULL)
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY,
                         "no memory for a workspace of %llu bytes: take a smaller max_tokens, "
                         "max_bs or context_len",
                         (unsigned long long)bytes);
    mlai_backend_free(backend, backend->workspace_memory);
    backend->workspace_memory = memory;
    backend->workspace =
        (void *)(uintptr_t)mlai_align_up((uint64_t)(uintptr_t)memory, WORKSPACE_ALIGNMENT);
    backend->workspace_bytes = bytes;
    return MLA_OK;
}

/* ---- creation -------------------------------------------------------------------------------- */

static void *allocate(uint64_t n, uint64_t bytes)
{
    uint64_t total;
    if (!mlai_mul_u64(n, bytes, &total) || total > SIZE_MAX)
        return NULL;
    return calloc(1, total > 0 ? (size_t)total : 1);
}

void *mlai_backend_alloc(const mla_backend *backend, uint64_t n, uint64_t bytes)
{
    uint64_t total;
    const mlai_device *device = &backend->device;
    if (device->runtime == NULL)
        return allocate(n, bytes);
    return mlai_mul_u64(n, bytes, &total) ? device->runtime->alloc(device->handle, total) : NULL;
}

void mlai_backend_free(const mla_backend *backend, void *memory)
{
    const mlai_device *device = &backend->device;
    if (device->runtime != NULL)
        device->runtime->release(device->handle, memory);
    else
        free(memory);
}

static mla_status copy_solution(const char *solution, char **copy, mla_diag *diag)
{
    *copy = NULL;
    if (solution == NULL)
        return MLA_OK;
    size_t bytes = strlen(solution) + 1;
    *copy = malloc(bytes);
    if (*copy == NULL)
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY, "no memory for the name of a solution");
    memcpy(*copy, solution, bytes);
    return MLA_OK;
}

static mla_status allocate_tables(mla_backend *b, mla_diag *diag)
{
    const mla_config *c = &b->config;
    uint64_t max_bs = (uint64_t)c->max_bs;
    b->page_table = mlai_backend_alloc(b, max_bs * sizeof(int32_t), (uint64_t)b->table_width);
    b->cum_extend = allocate(max_bs + 1, sizeof(int32_t));
    b->extend_lens = allocate(max_bs, sizeof(int32_t));
    b->extend_prefixes = allocate(max_bs, sizeof(int32_t));
    bool is_complete = b->page_table != NULL && b->cum_extend != NULL && b->extend_lens != NULL &&
                       b->extend_prefixes != NULL;
    if (!mlai_backend_is_on_host(b)) {
        b->device_cum_extend = mlai_backend_alloc(b, max_bs + 1, sizeof(int32_t));
        is_complete = is_complete && b->device_cum_extend != NULL;
    }
    if (c->decode_query == MLA_DECODE_QUERY_CAST) {
        uint64_t width = (uint64_t)c->kv_lora_rank + (uint64_t)c->qk_rope_head_dim;
        uint64_t row = (uint64_t)b->num_heads * width; /* both are below 2^31 */
        b->query_cast = mlai_backend_alloc(b, (uint64_t)c->max_tokens, row);
        is_complete = is_complete && b->query_cast != NULL;
    }
    if (!is_complete)
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY,
                         "no memory for the tables of %d requests with %lld pages each: take a "
                         "smaller max_bs, max_tokens or context_len",
                         c->max_bs, (long long)b->table_width);
    return MLA_OK;
}

mla_status mla_backend_create(mla_context *ctx, const mla_config *config, mla_backend **out,
                              mla_diag *diag)
{
    if (ctx == NULL || out == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "%s is NULL: give one",
                         ctx == NULL ? "ctx" : "out");
    mla_config own;
    MLAI_TRY(mlai_take_struct(&own, sizeof own, MIN_CONFIG_BYTES, config, "mla_config", diag));
    MLAI_TRY(check_config(&own, diag));
    mlai_device device;
    MLAI_TRY(mlai_context_device(ctx, own.device_type, own.device_index, &device, diag));
    mla_backend *b = calloc(1, sizeof *b);
    if (b == NULL)
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY, "no memory for a backend");
    b->ctx = ctx;
    b->device = device;
    b->config = own;
    b->num_heads = own.num_attention_heads / own.attn_tp_size;
    b->table_width = mlai_ceil_div(own.context_len, own.page_size);
    b->max_kv_tokens = mlai_max_i64(own.max_tokens, own.chunk_capacity);
    mla_status status = copy_solution(own.solution, &b->solution, diag);
    b->config.solution = b->solution;
    if (status == MLA_OK)
        status = mlai_backend_size_workspace(b, diag);
    if (status == MLA_OK)
        status = allocate_tables(b, diag);
    if (status != MLA_OK) {
        mla_backend_destroy(b);
        return status;
    }
    *out = b;
    return MLA_OK;
}

void mla_backend_destroy(mla_backend *backend)
{
    if (backend == NULL)
        return;
    mlai_backend_free_graph(backend);
    free(backend->solution);
    mlai_backend_free(backend, backend->workspace_memory);
    mlai_backend_free(backend, backend->query_cast);
    mlai_backend_free(backend, backend->kv_cast);
    mlai_backend_free(backend, backend->page_table);
    mlai_backend_free(backend, backend->device_cum_extend);
    mlai_backend_free(backend, backend->device_windows);
    free(backend->cum_extend);
    free(backend->extend_lens);
    free(backend->extend_prefixes);
    free(backend->windows);
    free(backend);
}

const mla_config *mla_backend_get_config(const mla_backend *backend)
{
    return backend == NULL ? NULL : &backend->config;
}

mla_status mla_backend_set_solution(mla_backend *backend, const char *solution, mla_diag *diag)
{
    if (backend == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "backend is NULL: give one");
    char *before = backend->solution, *copy;
    MLAI_TRY(copy_solution(solution, &copy, diag));
    backend->solution = copy;
    mla_status status = mlai_backend_size_workspace(backend, diag);
    if (status != MLA_OK) {
        backend->solution = before;
        free(copy);
        return status;
    }
    backend->config.solution = copy;
    free(before);
    return MLA_OK;
}
