/*
 * Makes and ends sessions (session.h): checks the options, then the pool, the page allocator and
 * the request table, the backend, the rotary tables and every buffer, sized once for the largest
 * forward: T = chunk_tokens, expanded rows = max(T, window), window = min(chunk_capacity,
 * max_length). All sizes go through checked 64-bit products. Forwards allocate nothing. The
 * session is request 0 of a table of one. Called through mla_model_session_*.
 */
#include "session.h"

#include "fault.h"
#include "norm.h"

#include <stdlib.h>

#define ALIGNMENT ((size_t)64)
#define DEFAULT_PAGE_SIZE 64
#define DEFAULT_CHUNK_TOKENS 4096
#define DEFAULT_CHUNK_CAPACITY 32768
#define MAX_TOKENS ((int64_t)1 << 20)

/* a * b elements of `bytes` each, aligned; *ok turns false when they cannot be had. */
static void *buffer(bool *ok, int64_t a, int64_t b, int64_t bytes)
{
    size_t size = 0;
    bool overflows = __builtin_mul_overflow((size_t)a, (size_t)b, &size) ||
                     __builtin_mul_overflow(size, (size_t)bytes, &size) || size > SIZE_MAX / 2;
    void *memory = NULL;
    if (!overflows)
        memory = aligned_alloc(ALIGNMENT, (size + ALIGNMENT) / ALIGNMENT * ALIGNMENT);
    *ok = *ok && memory != NULL;
    return memory;
}

static mla_status check_options(const mla_model *model, const mla_model_session_options *given,
                                mla_model_session_options *options, mla_diag *diag)
{
    if (given->struct_size != sizeof *given)
        return mlai_model_fail(diag, MLA_ERROR_VERSION,
                               "options.struct_size is %u, not %zu: use "
                               "MLA_MODEL_SESSION_OPTIONS_INIT and compile against this version",
                               given->struct_size, sizeof *given);
    *options = *given;
    int64_t longest = model->config.max_position_embeddings;
    if (options->max_length < 1)
        return mlai_model_fail(diag, MLA_ERROR_ARGUMENT, "max_length is %lld; it must be 1 or more",
                               (long long)options->max_length);
    if (options->max_length > longest)
        return mlai_model_fail(
            diag, MLA_ERROR_CAPACITY,
            "%lld tokens (prompt and new ones) are asked for; the model has %lld "
            "positions (max_position_embeddings)",
            (long long)options->max_length, (long long)longest);
    if (options->page_size < 0)
        return mlai_model_fail(diag, MLA_ERROR_ARGUMENT, "page_size is %d; it must be 1 or more",
                               options->page_size);
    if (options->chunk_tokens < 0 || options->chunk_tokens > MAX_TOKENS)
        return mlai_model_fail(diag, MLA_ERROR_ARGUMENT,
                               "chunk_tokens is %lld; it must be from 1 to %lld",
                               (long long)options->chunk_tokens, (long long)MAX_TOKENS);
    if (options->chunk_capacity < 0 || options->chunk_capacity > INT32_MAX)
        return mlai_model_fail(diag, MLA_ERROR_ARGUMENT,
                               "chunk_capacity is %lld; it must be from 1 to %d",
                               (long long)options->chunk_capacity, INT32_MAX);
    if (options->kv_format == 0)
        options->kv_format = model->compute.format;
    if (options->page_size == 0)
        options->page_size = DEFAULT_PAGE_SIZE;
    if (options->chunk_tokens == 0)
        options->chunk_tokens = DEFAULT_CHUNK_TOKENS;
    if (options->chunk_tokens > options->max_length)
        options->chunk_tokens = options->max_length;
    if (options->chunk_capacity == 0)
        options->chunk_capacity = DEFAULT_CHUNK_CAPACITY;
    return MLA_OK;
}

static mla_status create_cache(mla_model_session *session, mla_diag *diag)
{
    const mla_model_session_options *options = &session->options;
    const mlai_model_config *config = &session->model->config;
    int64_t pages = (options->max_length + options->page_size - 1) / options->page_size;
    mla_kv_pool_config pool = MLA_KV_POOL_CONFIG_INIT;
    pool.num_layers = (int32_t)config->num_layers;
    pool.num_pages = pages;
    pool.page_size = options->page_size;
    pool.format = options->kv_format;
    pool.kv_lora_rank = (int32_t)config->kv_lora_rank;
    pool.qk_rope_head_dim = (int32_t)config->qk_rope_head_dim;
    mla_status status = mla_kv_pool_create(session->model->ctx, &pool, &session->pool, diag);
    if (status == MLA_OK)
        status = mla_page_allocator_create(pages, &session->allocator, diag);
    if (status == MLA_OK)
        status = mla_req_to_page_create(1, (int32_t)pages, &session->table, diag);
    return status;
}

static mla_status create_backend(mla_model_session *session, mla_diag *diag)
{
    const mla_model_session_options *options = &session->options;
    const mlai_model_config *config = &session->model->config;
    mla_config backend = MLA_CONFIG_INIT;
    backend.num_attention_heads = (int32_t)config->num_heads;
    backend.kv_lora_rank = (int32_t)config->kv_lora_rank;
    backend.qk_nope_head_dim = (int32_t)config->qk_nope_head_dim;
    backend.qk_rope_head_dim = (int32_t)config->qk_rope_head_dim;
    backend.v_head_dim = (int32_t)config->v_head_dim;
    backend.page_size = options->page_size;
    backend.context_len = options->max_length;
    backend.q_format = session->model->compute.format;
    backend.kv_format = options->kv_format;
    backend.softmax_scale = session->model->softmax_scale;
    backend.max_bs = 1;
    backend.max_tokens = options->chunk_tokens;
    backend.chunk_capacity = options->chunk_capacity;
    return mla_backend_create(session->model->ctx, &backend, &session->backend, diag);
}

static mla_status create_buffers(mla_model_session *session, mla_diag *diag)
{
    const mlai_model_config *c = &session->model->config;
    const mla_model_session_options *options = &session->options;
    int64_t tokens = options->chunk_tokens;
    int64_t window = options->chunk_capacity < options->max_length ? options->chunk_capacity
                                                                   : options->max_length;
    int64_t rows = tokens > window ? tokens : window;
    int64_t heads = c->num_heads;
    int64_t qk_dim = c->qk_nope_head_dim + c->qk_rope_head_dim;
    int64_t row_dim = c->kv_lora_rank + c->qk_rope_head_dim;
    int64_t half = c->qk_rope_head_dim / 2;
    int64_t element = mla_format_bytes(session->model->compute.format);
    bool is_f32 = session->model->compute.format == MLA_FORMAT_F32;
    bool ok = true;
    session->max_rows = rows;
    session->cos_table = buffer(&ok, options->max_length, half, sizeof(float));
    session->sin_table = buffer(&ok, options->max_length, half, sizeof(float));
    session->positions = buffer(&ok, tokens, 1, sizeof(int32_t));
    session->slots = buffer(&ok, tokens, 1, sizeof(int64_t));
    session->x = buffer(&ok, tokens, c->hidden_size, sizeof(float));
    session->h = buffer(&ok, tokens, c->hidden_size, sizeof(float));
    session->q_a = buffer(&ok, tokens, c->q_lora_rank, sizeof(float));
    session->kv_a = buffer(&ok, tokens, row_dim, sizeof(float));
    session->q_f32 = buffer(&ok, tokens, heads * qk_dim, sizeof(float));
    session->q = is_f32 ? session->q_f32 : buffer(&ok, tokens, heads * qk_dim, element);
    session->attn = buffer(&ok, tokens, heads * c->v_head_dim, sizeof(float));
    session->attn_lse = buffer(&ok, tokens, heads, sizeof(float));
    session->row_latent = buffer(&ok, rows, c->kv_lora_rank, sizeof(float));
    session->row_rope = buffer(&ok, rows, c->qk_rope_head_dim, sizeof(float));
    session->row_kv =
        buffer(&ok, rows, heads * (c->qk_nope_head_dim + c->v_head_dim), sizeof(float));
    session->row_k = buffer(&ok, rows, heads * qk_dim, element);
    session->row_v = is_f32 ? NULL : buffer(&ok, rows, heads * c->v_head_dim, element);
    session->window_out = buffer(&ok, tokens, heads * c->v_head_dim, sizeof(float));
    session->window_lse = buffer(&ok, tokens, heads, sizeof(float));
    session->absorbed_q = buffer(&ok, 1, heads * row_dim, element);
    session->latent_out = buffer(&ok, 1, heads * c->kv_lora_rank, element);
    if (!ok)
        return mlai_model_fail(
            diag, MLA_ERROR_OUT_OF_MEMORY,
            "the scratch of a session with chunk_tokens %lld and windows of %lld "
            "tokens could not be allocated: take a smaller chunk_tokens or "
            "chunk_capacity",
            (long long)tokens, (long long)window);
    return mlai_mlp_scratch_init(c, tokens, &session->mlp, diag);
}

mla_status mla_model_session_create(mla_model *model, const mla_model_session_options *options,
                                    mla_model_session **out, mla_diag *diag)
{
    if (model == NULL || options == NULL || out == NULL)
        return mlai_model_fail(diag, MLA_ERROR_ARGUMENT, "model, options and out must not be NULL");
    mla_model_session_options checked;
    mla_status status = check_options(model, options, &checked, diag);
    if (status != MLA_OK)
        return status;
    mla_model_session *session = calloc(1, sizeof *session);
    if (session == NULL)
        return mlai_model_fail_memory(diag, "the session", sizeof *session);
    session->model = model;
    session->options = checked;
    status = create_cache(session, diag);
    if (status == MLA_OK)
        status = create_backend(session, diag);
    if (status == MLA_OK)
        status = create_buffers(session, diag);
    if (status == MLA_OK) {
        mlai_rope_tables(&model->config.rope, model->inv_freq, model->config.qk_rope_head_dim,
                         checked.max_length, session->cos_table, session->sin_table);
        status = mlai_attention_plan(session, diag);
    }
    if (status != MLA_OK) {
        mla_model_session_destroy(session);
        return status;
    }
    *out = session;
    return MLA_OK;
}

void mla_model_session_destroy(mla_model_session *session)
{
    if (session == NULL)
        return;
    mla_backend_destroy(session->backend);
    mla_req_to_page_destroy(session->table);
    mla_page_allocator_destroy(session->allocator);
    mla_kv_pool_destroy(session->pool);
    if (session->q != session->q_f32)
        free(session->q);
    void *buffers[] = {session->cos_table,  session->sin_table,  session->positions,
                       session->slots,      session->x,          session->h,
                       session->q_a,        session->kv_a,       session->q_f32,
                       session->attn,       session->attn_lse,   session->row_latent,
                       session->row_rope,   session->row_kv,     session->row_k,
                       session->row_v,      session->window_out, session->window_lse,
                       session->absorbed_q, session->latent_out, session->workspace};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++)
        free(buffers[i]);
    mlai_mlp_scratch_free(&session->mlp);
    free(session);
}

int64_t mla_model_session_length(const mla_model_session *session)
{
    return session->length;
}

mla_status mla_model_session_truncate(mla_model_session *session, int64_t length, mla_diag *diag)
{
    if (length < 0 || length > session->length)
        return mlai_model_fail(diag, MLA_ERROR_ARGUMENT,
                               "length is %lld; the session holds %lld tokens", (long long)length,
                               (long long)session->length);
    mla_status status = mla_req_to_page_truncate(session->table, session->allocator, 0,
                                                 session->options.page_size, length, diag);
    if (status == MLA_OK)
        session->length = length;
    return status;
}

const char *mla_model_session_solution(const mla_model_session *session, int32_t op)
{
    return op > MLA_OP_NONE && op <= MLA_OP_PACK ? session->solutions[op] : NULL;
}

void mla_model_session_set_on_routing(mla_model_session *session, mla_model_on_routing on_routing,
                                      void *user)
{
    session->on_routing = on_routing;
    session->on_routing_user = user;
}
