/*
 * One forward pass: embed T ids, run the decoder layers, and give logits of the last tokens.
 *
 *   x = E[ids];  for each layer: x += attention(norm(x)); x += mlp_or_moe(norm(x));
 *   logits = norm(x) W_head^T
 * The residual stream x [T, hidden] is f32; norms round to the compute format. Before the layers
 * the request's pages are reserved, positions and slots computed, and the backend's metadata made:
 * EXTEND for the expanded path, DECODE for the absorbed one. The length grows at the end only, so
 * a failed forward leaves the session as it was (rows past the length are never read). Called by
 * generate.c.
 */
#include "session.h"

#include "convert.h"
#include "fault.h"
#include "norm.h"

static mla_status prepare_step(mla_model_session *session, int64_t n, bool is_decode,
                               mla_diag *diag)
{
    session->req_pool_index = 0;
    session->cached_len = (int32_t)session->length;
    session->new_len = (int32_t)n;
    session->seq_len = (int32_t)(session->length + n);
    mla_status status =
        mla_req_to_page_reserve(session->table, session->allocator, &session->pool, 1, 0,
                                session->options.page_size, session->length, n, diag);
    if (status != MLA_OK)
        return status;
    mla_tensor table = mla_req_to_page_tensor(session->table);
    mla_tensor indices = mla_tensor_1d(&session->req_pool_index, MLA_FORMAT_I32, 1);
    mla_tensor cached = mla_tensor_1d(&session->cached_len, MLA_FORMAT_I32, 1);
    mla_tensor fresh = mla_tensor_1d(&session->new_len, MLA_FORMAT_I32, 1);
    mla_tensor lengths = mla_tensor_1d(&session->seq_len, MLA_FORMAT_I32, 1);
    status =
        mla_positions_and_slots(table, indices, cached, fresh, session->options.page_size,
                                mla_tensor_1d(session->positions, MLA_FORMAT_I32, n),
                                mla_tensor_1d(session->slots, MLA_FORMAT_I64, n), lengths, diag);
    if (status != MLA_OK)
        return status;
    mla_forward_batch batch = MLA_FORWARD_BATCH_INIT;
    batch.forward_mode = is_decode ? MLA_FORWARD_DECODE : MLA_FORWARD_EXTEND;
    batch.bs = 1;
    batch.num_extends = is_decode ? 0 : 1;
    batch.req_pool_indices = indices;
    batch.seq_lens = lengths;
    batch.req_to_page = table;
    if (!is_decode) {
        batch.extend_seq_lens = fresh;
        batch.extend_prefix_lens = cached;
    }
    return mla_backend_init_forward_metadata(session->backend, &batch, diag);
}

static void embed(mla_model_session *session, const int32_t *ids, int64_t n)
{
    const mlai_matrix *table = &session->model->embedding;
    int64_t row_bytes = table->cols * mla_format_bytes(table->format);
    for (int64_t t = 0; t < n; t++)
        mlai_model_row_to_f32(session->x + t * table->cols,
                              (const char *)table->data + ids[t] * row_bytes, table->format,
                              table->cols);
}

static void norm_into_h(mla_model_session *session, const float *weight, int64_t first, int64_t n)
{
    const mlai_model_config *c = &session->model->config;
    int64_t hidden = c->hidden_size;
    mlai_rms_norm(session->x + first * hidden, hidden, n, hidden, weight, c->rms_norm_eps,
                  session->model->compute.format, session->h + first * hidden, hidden);
}

static void feed_forward(mla_model_session *session, int64_t layer_index, int64_t n)
{
    mla_model *model = session->model;
    const mlai_layer *layer = &model->layers[layer_index];
    if (!layer->has_experts) {
        mlai_mlp_add(&model->compute, &layer->dense, &session->mlp, session->h, n, session->x);
        return;
    }
    mlai_moe_add(&model->compute, &model->config, &layer->moe, &session->mlp, session->h, n,
                 session->x);
    if (session->on_routing != NULL)
        session->on_routing(session->on_routing_user, layer_index, session->length, n,
                            session->mlp.chosen);
}

mla_status mlai_forward(mla_model_session *session, const int32_t *ids, int64_t n, bool is_decode,
                        float *logits, int64_t n_logits, mla_diag *diag)
{
    mla_model *model = session->model;
    int64_t hidden = model->config.hidden_size;
    if (n > session->options.max_length - session->length)
        return mlai_model_fail(diag, MLA_ERROR_CAPACITY,
                               "%lld tokens after %lld are over the session's max_length %lld",
                               (long long)n, (long long)session->length,
                               (long long)session->options.max_length);
    for (int64_t t = 0; t < n; t++) {
        if (ids[t] < 0 || ids[t] >= model->config.vocab_size)
            return mlai_model_fail(
                diag, MLA_ERROR_ARGUMENT, "id %d at %lld is outside the vocabulary of %lld", ids[t],
                (long long)(session->length + t), (long long)model->config.vocab_size);
    }
    mla_status status = prepare_step(session, n, is_decode, diag);
    if (status != MLA_OK)
        return status;
    embed(session, ids, n);
    for (int64_t i = 0; i < model->config.num_layers; i++) {
        norm_into_h(session, model->layers[i].input_norm, 0, n);
        status = mlai_attention_add(session, i, n, is_decode, diag);
        if (status != MLA_OK)
            return status;
        norm_into_h(session, model->layers[i].post_norm, 0, n);
        feed_forward(session, i, n);
    }
    if (n_logits > 0) {
        norm_into_h(session, model->final_norm, n - n_logits, n_logits);
        mlai_linear(&model->compute, &model->head, session->h + (n - n_logits) * hidden, hidden,
                    n_logits, logits, model->config.vocab_size);
    }
    session->length += n;
    return MLA_OK;
}
