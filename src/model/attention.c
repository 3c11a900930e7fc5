/*
 * The attention part of a decoder layer on libmla's public API.
 *
 * Shared: q = q_b(norm(q_a(h))) or q(h), [T, H, L]; kv_a(h) = [latent | k_pe]; the latent is
 * normed; q_pe and k_pe are rotated and the cache row written in one pass (mla_rope_write_kv).
 * Prefill, expanded: rows of the new tokens, then of each window of the cached prefix, are read
 * back from the cache, expanded by kv_b into keys [rows, H, L] and values [rows, H, V], attended
 * (causal over the new tokens, in full over a window), and merged by LSE into f32 [T, H, V].
 * Decode, absorbed: [q_nope W_UK | q_pe] attends the cache, and W_UV turns the latent output into
 * values. Then x += o(values). Each operator's parameters are filled by one function, for the plan
 * (at the largest shape) and for the run. Called by forward.c and session.c.
 */
#include "convert.h"
#include "fault.h"
#include "norm.h"
#include "session.h"

#include <stdlib.h>

/* DeepSeek's own code norms the two latents with this constant, not with rms_norm_eps. */
#define LATENT_NORM_EPS 1e-6

static mla_tensor q_tensor(const mla_model_session *session, int64_t tokens)
{
    const mlai_model_config *c = &session->model->config;
    return mla_tensor_3d(session->q, session->model->compute.format, tokens, c->num_heads,
                         c->qk_nope_head_dim + c->qk_rope_head_dim);
}

static mla_tensor values_tensor(const mla_model_session *session, float *data, int64_t tokens)
{
    const mlai_model_config *c = &session->model->config;
    return mla_tensor_3d(data, MLA_FORMAT_F32, tokens, c->num_heads, c->v_head_dim);
}

static mla_tensor lse_tensor(const mla_model_session *session, float *data, int64_t tokens)
{
    return mla_tensor_2d(data, MLA_FORMAT_F32, tokens, session->model->config.num_heads);
}

static mla_call workspace_call(const mla_model_session *session)
{
    return (mla_call){.workspace = session->workspace, .workspace_bytes = session->workspace_bytes};
}

static mla_tensor key_buffer(const mla_model_session *session, int64_t layer_index)
{
    mla_tensor cache = {0};
    (void)mla_kv_pool_get_key_buffer(session->pool, (int32_t)layer_index, &cache, NULL);
    return cache;
}

static mla_rope_write_kv_params rope_write_params(const mla_model_session *session,
                                                  int64_t layer_index, int64_t tokens)
{
    const mlai_model_config *c = &session->model->config;
    int64_t half = c->qk_rope_head_dim / 2;
    mla_rope_write_kv_params p = MLA_ROPE_WRITE_KV_PARAMS_INIT;
    mla_tensor kv =
        mla_tensor_2d(session->kv_a, MLA_FORMAT_F32, tokens, c->kv_lora_rank + c->qk_rope_head_dim);
    p.is_interleaved = c->rope.is_interleaved;
    p.q_pe =
        mla_tensor_slice(q_tensor(session, tokens), 2, c->qk_nope_head_dim, c->qk_rope_head_dim);
    p.q_pe_out = p.q_pe;
    p.latent = mla_tensor_slice(kv, 1, 0, c->kv_lora_rank);
    p.k_pe = mla_tensor_slice(kv, 1, c->kv_lora_rank, c->qk_rope_head_dim);
    p.positions = mla_tensor_1d(session->positions, MLA_FORMAT_I32, tokens);
    p.cos = mla_tensor_2d(session->cos_table, MLA_FORMAT_F32, session->options.max_length, half);
    p.sin = mla_tensor_2d(session->sin_table, MLA_FORMAT_F32, session->options.max_length, half);
    p.slots = mla_tensor_1d(session->slots, MLA_FORMAT_I64, tokens);
    p.kv_cache = key_buffer(session, layer_index);
    p.kv_lora_rank = (int32_t)c->kv_lora_rank;
    p.qk_rope_head_dim = (int32_t)c->qk_rope_head_dim;
    p.call = workspace_call(session);
    return p;
}

static mla_gather_kv_params gather_params(const mla_model_session *session, int64_t layer_index,
                                          mla_tensor slots)
{
    const mlai_model_config *c = &session->model->config;
    mla_gather_kv_params p = MLA_GATHER_KV_PARAMS_INIT;
    int64_t rows = slots.shape[0];
    p.kv_cache = key_buffer(session, layer_index);
    p.slots = slots;
    p.latent = mla_tensor_2d(session->row_latent, MLA_FORMAT_F32, rows, c->kv_lora_rank);
    p.rope = mla_tensor_2d(session->row_rope, MLA_FORMAT_F32, rows, c->qk_rope_head_dim);
    p.kv_lora_rank = (int32_t)c->kv_lora_rank;
    p.qk_rope_head_dim = (int32_t)c->qk_rope_head_dim;
    p.call = workspace_call(session);
    return p;
}

/* Expanded keys; bf16 also copies the values, which f32 uses where kv_b wrote them. */
static mla_pack_kv_params pack_params(const mla_model_session *session, int64_t rows)
{
    const mlai_model_config *c = &session->model->config;
    int32_t format = session->model->compute.format;
    mla_pack_kv_params p = MLA_PACK_KV_PARAMS_INIT;
    mla_tensor kv = mla_tensor_3d(session->row_kv, MLA_FORMAT_F32, rows, c->num_heads,
                                  c->qk_nope_head_dim + c->v_head_dim);
    p.k_nope = mla_tensor_slice(kv, 2, 0, c->qk_nope_head_dim);
    p.k_pe = mla_tensor_2d(session->row_rope, MLA_FORMAT_F32, rows, c->qk_rope_head_dim);
    p.k_out = mla_tensor_3d(session->row_k, format, rows, c->num_heads,
                            c->qk_nope_head_dim + c->qk_rope_head_dim);
    if (session->row_v != NULL) {
        p.v = mla_tensor_slice(kv, 2, c->qk_nope_head_dim, c->v_head_dim);
        p.v_out = mla_tensor_3d(session->row_v, format, rows, c->num_heads, c->v_head_dim);
    }
    p.call = workspace_call(session);
    return p;
}

static mla_tensor expanded_values(const mla_model_session *session, int64_t rows)
{
    const mlai_model_config *c = &session->model->config;
    if (session->row_v != NULL)
        return mla_tensor_3d(session->row_v, session->model->compute.format, rows, c->num_heads,
                             c->v_head_dim);
    mla_tensor kv = mla_tensor_3d(session->row_kv, MLA_FORMAT_F32, rows, c->num_heads,
                                  c->qk_nope_head_dim + c->v_head_dim);
    return mla_tensor_slice(kv, 2, c->qk_nope_head_dim, c->v_head_dim);
}

/* The states [accumulated, window] merge into the first; outs and lses are the caller's arrays. */
static mla_merge_state_params merge_params(const mla_model_session *session, int64_t tokens,
                                           mla_tensor outs[2], mla_tensor lses[2])
{
    mla_merge_state_params p = MLA_MERGE_STATE_PARAMS_INIT;
    outs[0] = values_tensor(session, session->attn, tokens);
    outs[1] = values_tensor(session, session->window_out, tokens);
    lses[0] = lse_tensor(session, session->attn_lse, tokens);
    lses[1] = lse_tensor(session, session->window_lse, tokens);
    p.n_states = 2;
    p.outs = outs;
    p.lses = lses;
    p.out = outs[0];
    p.lse = lses[0];
    p.call = workspace_call(session);
    return p;
}

static mla_tensor absorbed_tensor(const mla_model_session *session)
{
    const mlai_model_config *c = &session->model->config;
    return mla_tensor_3d(session->absorbed_q, session->model->compute.format, 1, c->num_heads,
                         c->kv_lora_rank + c->qk_rope_head_dim);
}

static mla_tensor latent_out_tensor(const mla_model_session *session)
{
    const mlai_model_config *c = &session->model->config;
    return mla_tensor_3d(session->latent_out, session->model->compute.format, 1, c->num_heads,
                         c->kv_lora_rank);
}

static mla_absorb_query_params absorb_params(const mla_model_session *session,
                                             const mlai_layer *layer)
{
    const mlai_model_config *c = &session->model->config;
    mla_absorb_query_params p = MLA_ABSORB_QUERY_PARAMS_INIT;
    p.q_nope = mla_tensor_slice(q_tensor(session, 1), 2, 0, c->qk_nope_head_dim);
    p.w_uk = layer->w_uk;
    p.out = mla_tensor_slice(absorbed_tensor(session), 2, 0, c->kv_lora_rank);
    p.call = workspace_call(session);
    return p;
}

static mla_project_value_params project_params(const mla_model_session *session,
                                               const mlai_layer *layer)
{
    mla_project_value_params p = MLA_PROJECT_VALUE_PARAMS_INIT;
    p.latent = latent_out_tensor(session);
    p.w_uv = layer->w_uv;
    p.out = values_tensor(session, session->attn, 1);
    p.call = workspace_call(session);
    return p;
}

/* In a decode the rotated q_pe goes straight into the absorbed query. */
static mla_rope_write_kv_params decode_rope_write_params(const mla_model_session *session,
                                                         int64_t layer_index)
{
    const mlai_model_config *c = &session->model->config;
    mla_rope_write_kv_params p = rope_write_params(session, layer_index, 1);
    p.q_pe_out =
        mla_tensor_slice(absorbed_tensor(session), 2, c->kv_lora_rank, c->qk_rope_head_dim);
    return p;
}

/* Takes one operator's problem into the plan: its solution's name and its share of workspace. */
static mla_status plan_problem(mla_model_session *session, mla_status problem_status,
                               const mla_problem *problem, uint64_t *largest, mla_diag *diag)
{
    if (problem_status != MLA_OK)
        return problem_status;
    mla_context *ctx = session->model->ctx;
    uint64_t bytes = 0;
    mla_status status =
        mla_solution_choose(ctx, problem, NULL, &session->solutions[problem->op], diag);
    if (status == MLA_OK)
        status = mla_workspace_bytes(ctx, problem, NULL, &bytes, diag);
    if (status == MLA_OK && bytes > *largest)
        *largest = bytes;
    return status;
}

/* The two operators that run inside the backend: only their names are wanted here. */
static mla_status plan_backend_operators(mla_model_session *session, mla_diag *diag)
{
    const mlai_model_config *c = &session->model->config;
    const mla_model_session_options *options = &session->options;
    int64_t pages = (options->max_length + options->page_size - 1) / options->page_size;
    int64_t tokens = options->chunk_tokens;
    int64_t rows = session->max_rows;
    uint64_t unused = 0;
    mla_problem problem = MLA_PROBLEM_INIT;
    mla_decode_params decode = MLA_DECODE_PARAMS_INIT;
    mla_tensor q = absorbed_tensor(session);
    decode.kv_lora_rank = (int32_t)c->kv_lora_rank;
    decode.qk_rope_head_dim = (int32_t)c->qk_rope_head_dim;
    decode.softmax_scale = session->model->softmax_scale;
    decode.max_seqlen_kv = options->max_length;
    decode.q = mla_tensor_4d(q.data, q.format, 1, 1, q.shape[1], q.shape[2]);
    decode.kv_cache = key_buffer(session, 0);
    decode.page_table = mla_tensor_2d(NULL, MLA_FORMAT_I32, 1, pages);
    decode.cache_seqlens = mla_tensor_1d(NULL, MLA_FORMAT_I32, 1);
    decode.out = mla_tensor_4d(session->latent_out, q.format, 1, 1, c->num_heads, c->kv_lora_rank);
    mla_status status =
        plan_problem(session, mla_decode_problem(&decode, &problem, diag), &problem, &unused, diag);
    if (status != MLA_OK)
        return status;
    mla_prefill_params prefill = MLA_PREFILL_PARAMS_INIT;
    prefill.softmax_scale = session->model->softmax_scale;
    prefill.q = q_tensor(session, tokens);
    prefill.k = pack_params(session, rows).k_out;
    prefill.v = expanded_values(session, rows);
    prefill.cu_seqlens_q = mla_tensor_1d(NULL, MLA_FORMAT_I32, 2);
    prefill.cu_seqlens_kv = prefill.cu_seqlens_q;
    prefill.out = values_tensor(session, session->attn, tokens);
    prefill.lse = lse_tensor(session, session->attn_lse, tokens);
    problem = (mla_problem)MLA_PROBLEM_INIT;
    return plan_problem(session, mla_prefill_problem(&prefill, &problem, diag), &problem, &unused,
                        diag);
}

mla_status mlai_attention_plan(mla_model_session *session, mla_diag *diag)
{
    const mlai_layer *layer = &session->model->layers[0];
    int64_t tokens = session->options.chunk_tokens;
    int64_t rows = session->max_rows;
    uint64_t bytes = 0;
    mla_tensor outs[2];
    mla_tensor lses[2];
    mla_rope_write_kv_params rope_write = rope_write_params(session, 0, tokens);
    mla_rope_write_kv_params decode_rope_write = decode_rope_write_params(session, 0);
    mla_gather_kv_params gather =
        gather_params(session, 0, mla_tensor_1d(session->slots, MLA_FORMAT_I64, rows));
    mla_pack_kv_params pack = pack_params(session, rows);
    mla_merge_state_params merge = merge_params(session, tokens, outs, lses);
    mla_absorb_query_params absorb = absorb_params(session, layer);
    mla_project_value_params project = project_params(session, layer);
    mla_problem problem = MLA_PROBLEM_INIT;
    mla_status status = plan_backend_operators(session, diag);
#define PLAN(op, params)                                                                           \
    if (status == MLA_OK) {                                                                        \
        problem = (mla_problem)MLA_PROBLEM_INIT;                                                   \
        status = plan_problem(session, mla_##op##_problem(&(params), &problem, diag), &problem,    \
                              &bytes, diag);                                                       \
    }
    PLAN(rope_write_kv, decode_rope_write)
    PLAN(rope_write_kv, rope_write)
    PLAN(gather_kv, gather)
    PLAN(pack_kv, pack)
    PLAN(merge_state, merge)
    PLAN(absorb_query, absorb)
    PLAN(project_value, project)
#undef PLAN
    if (status != MLA_OK || bytes == 0)
        return status;
    session->workspace = aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64));
    if (session->workspace == NULL)
        return mlai_model_fail_memory(diag, "the operators' workspace", bytes);
    session->workspace_bytes = bytes;
    return MLA_OK;
}

/* q, latent and k_pe of T tokens from h, before rotation; the latent is normed. */
static void project_inputs(mla_model_session *session, const mlai_layer *layer, int64_t tokens)
{
    mlai_compute *compute = &session->model->compute;
    const mlai_model_config *c = &session->model->config;
    int32_t format = compute->format;
    int64_t row_dim = c->kv_lora_rank + c->qk_rope_head_dim;
    int64_t q_dim = c->num_heads * (c->qk_nope_head_dim + c->qk_rope_head_dim);
    const float *input = session->h;
    int64_t input_dim = c->hidden_size;
    if (c->q_lora_rank > 0) {
        mlai_linear(compute, &layer->q_a, session->h, c->hidden_size, tokens, session->q_a,
                    c->q_lora_rank);
        mlai_rms_norm(session->q_a, c->q_lora_rank, tokens, c->q_lora_rank, layer->q_a_norm,
                      LATENT_NORM_EPS, format, session->q_a, c->q_lora_rank);
        input = session->q_a;
        input_dim = c->q_lora_rank;
    }
    mlai_linear(compute, &layer->q, input, input_dim, tokens, session->q_f32, q_dim);
    if (session->q != session->q_f32)
        mlai_model_row_from_f32(session->q, format, session->q_f32, tokens * q_dim);
    mlai_linear(compute, &layer->kv_a, session->h, c->hidden_size, tokens, session->kv_a, row_dim);
    mlai_rms_norm(session->kv_a, row_dim, tokens, c->kv_lora_rank, layer->kv_a_norm,
                  LATENT_NORM_EPS, format, session->kv_a, row_dim);
}

/* Reads cache rows back and expands them to keys and values of all heads. */
static mla_status expand_rows(mla_model_session *session, int64_t layer_index, mla_tensor slots,
                              mla_diag *diag)
{
    mla_context *ctx = session->model->ctx;
    mlai_compute *compute = &session->model->compute;
    const mlai_model_config *c = &session->model->config;
    int64_t rows = slots.shape[0];
    int64_t kv_dim = c->num_heads * (c->qk_nope_head_dim + c->v_head_dim);
    mla_gather_kv_params gather = gather_params(session, layer_index, slots);
    mla_status status = mla_gather_kv(ctx, &gather, diag);
    if (status != MLA_OK)
        return status;
    mlai_model_row_round(session->row_latent, compute->format, rows * c->kv_lora_rank);
    mlai_linear(compute, &session->model->layers[layer_index].kv_b, session->row_latent,
                c->kv_lora_rank, rows, session->row_kv, kv_dim);
    mla_pack_kv_params pack = pack_params(session, rows);
    return mla_pack_kv(ctx, &pack, diag);
}

/* One pass of all T queries over the expanded rows. */
static mla_status attend_rows(mla_model_session *session, int64_t tokens, int64_t rows,
                              bool is_causal, mla_tensor cum_kv, float *out, float *lse,
                              mla_diag *diag)
{
    const mla_prefill_metadata *metadata = NULL;
    mla_status status = mla_backend_prefill_metadata(session->backend, &metadata, diag);
    if (status != MLA_OK)
        return status;
    mla_forward_extend_chunked_args args = MLA_FORWARD_EXTEND_CHUNKED_ARGS_INIT;
    args.is_causal = is_causal;
    args.max_q_len = (int32_t)tokens;
    args.max_kv_len = (int32_t)rows;
    args.q = q_tensor(session, tokens);
    args.k = pack_params(session, rows).k_out;
    args.v = expanded_values(session, rows);
    args.cum_seq_lens_q = metadata->cum_extend_seq_lens;
    args.cum_seq_lens_kv = cum_kv;
    args.out = values_tensor(session, out, tokens);
    args.lse = lse_tensor(session, lse, tokens);
    return mla_backend_forward_extend_chunked(session->backend, &args, diag);
}

static mla_status attend_expanded(mla_model_session *session, int64_t layer_index, int64_t tokens,
                                  mla_diag *diag)
{
    mla_context *ctx = session->model->ctx;
    const mla_prefill_metadata *metadata = NULL;
    mla_rope_write_kv_params write = rope_write_params(session, layer_index, tokens);
    mla_status status = mla_rope_write_kv(ctx, &write, diag);
    if (status == MLA_OK)
        status = mla_backend_prefill_metadata(session->backend, &metadata, diag);
    if (status == MLA_OK)
        status = expand_rows(session, layer_index, write.slots, diag);
    if (status == MLA_OK)
        status = attend_rows(session, tokens, tokens, true, metadata->cum_extend_seq_lens,
                             session->attn, session->attn_lse, diag);
    for (int32_t w = 0; status == MLA_OK && w < metadata->chunked_loop_num; w++) {
        mla_tensor slots = metadata->chunk_kv_indices_list[w];
        mla_tensor cum_row = mla_tensor_slice(metadata->cu_chunked_seq_len, 0, w, 1);
        mla_tensor cum_kv = mla_tensor_1d(cum_row.data, MLA_FORMAT_I32, cum_row.shape[1]);
        mla_tensor outs[2];
        mla_tensor lses[2];
        status = expand_rows(session, layer_index, slots, diag);
        if (status == MLA_OK)
            status = attend_rows(session, tokens, slots.shape[0], false, cum_kv,
                                 session->window_out, session->window_lse, diag);
        mla_merge_state_params merge = merge_params(session, tokens, outs, lses);
        if (status == MLA_OK)
            status = mla_merge_state(ctx, &merge, diag);
    }
    return status;
}

static mla_status attend_absorbed(mla_model_session *session, int64_t layer_index, mla_diag *diag)
{
    mla_context *ctx = session->model->ctx;
    const mlai_layer *layer = &session->model->layers[layer_index];
    mla_rope_write_kv_params write = decode_rope_write_params(session, layer_index);
    mla_absorb_query_params absorb = absorb_params(session, layer);
    mla_project_value_params project = project_params(session, layer);
    mla_layer attention = MLA_LAYER_INIT;
    mla_forward_decode_args args = MLA_FORWARD_DECODE_ARGS_INIT;
    attention.layer_id = (int32_t)layer_index;
    args.bs = 1;
    args.save_kv_cache = 0;
    args.q = absorbed_tensor(session);
    args.out = latent_out_tensor(session);
    mla_status status = mla_rope_write_kv(ctx, &write, diag);
    if (status == MLA_OK)
        status = mla_absorb_query(ctx, &absorb, diag);
    if (status == MLA_OK)
        status =
            mla_backend_forward_decode(session->backend, &attention, session->pool, &args, diag);
    if (status == MLA_OK)
        status = mla_project_value(ctx, &project, diag);
    return status;
}

mla_status mlai_attention_add(mla_model_session *session, int64_t layer_index, int64_t n_tokens,
                              bool is_decode, mla_diag *diag)
{
    mlai_compute *compute = &session->model->compute;
    const mlai_model_config *c = &session->model->config;
    const mlai_layer *layer = &session->model->layers[layer_index];
    int64_t values_dim = c->num_heads * c->v_head_dim;
    project_inputs(session, layer, n_tokens);
    mla_status status = is_decode ? attend_absorbed(session, layer_index, diag)
                                  : attend_expanded(session, layer_index, n_tokens, diag);
    if (status != MLA_OK)
        return status;
    mlai_model_row_round(session->attn, compute->format, n_tokens * values_dim);
    /* h was consumed by project_inputs and takes the output. */
    mlai_linear(compute, &layer->o, session->attn, values_dim, n_tokens, session->h,
                c->hidden_size);
    for (int64_t i = 0; i < n_tokens * c->hidden_size; i++)
        session->x[i] += session->h[i];
    return MLA_OK;
}
