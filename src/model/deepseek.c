/*
 * Loads a DeepSeek checkpoint (deepseek.h): config.json, then every tensor by its Hugging Face name
 * with the shape that the configuration gives, then the views of kv_b_proj. Tensors that the model
 * does not name (layers of the multi-token predictor, stored inverse frequencies) are ignored. The
 * router and its correction bias stay f32, because the choice of experts is a comparison of
 * close numbers. Called through mla_model_load.
 */
#include "deepseek.h"

#include "fault.h"
#include "norm.h"
#include "tokenizer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One load in progress: names are built in `name`. */
typedef struct loader {
    mla_model *model;
    mlai_weight_source source;
    mla_diag *diag;
    char name[256];
    char bias_name[256];
} loader;

static mla_status load_vector(loader *load, const char *prefix, const char *name, int64_t n,
                              float **out)
{
    snprintf(load->name, sizeof load->name, "%s%s", prefix, name);
    return mlai_vector_load(&load->source, load->name, n, out, load->diag);
}

static mla_status load_matrix(loader *load, const char *prefix, const char *name, bool has_bias,
                              int64_t rows, int64_t cols, mlai_matrix *out)
{
    snprintf(load->name, sizeof load->name, "%s%s.weight", prefix, name);
    snprintf(load->bias_name, sizeof load->bias_name, "%s%s.bias", prefix, name);
    mla_status status = mlai_matrix_load(
        &load->source, load->name, has_bias ? load->bias_name : NULL, rows, cols, out, load->diag);
    if (status == MLA_OK)
        status = mlai_compute_reserve(&load->model->compute, out, load->diag);
    return status;
}

static mla_status load_mlp(loader *load, const char *prefix, int64_t width, mlai_mlp *out)
{
    int64_t hidden = load->model->config.hidden_size;
    mla_status status = load_matrix(load, prefix, "gate_proj", false, width, hidden, &out->gate);
    if (status == MLA_OK)
        status = load_matrix(load, prefix, "up_proj", false, width, hidden, &out->up);
    if (status == MLA_OK)
        status = load_matrix(load, prefix, "down_proj", false, hidden, width, &out->down);
    return status;
}

static mla_status load_router(loader *load, const char *prefix, mlai_moe *out)
{
    const mlai_model_config *config = &load->model->config;
    int64_t n = config->n_routed_experts;
    int32_t format = load->source.format;
    load->source.format = MLA_FORMAT_F32;
    mla_status status =
        load_matrix(load, prefix, "gate", false, n, config->hidden_size, &out->router);
    load->source.format = format;
    if (status != MLA_OK || config->topk_method != MLAI_TOPK_NOAUX_TC)
        return status;
    status = load_vector(load, prefix, "gate.e_score_correction_bias", n, &out->correction_bias);
    for (int64_t e = 0; status == MLA_OK && e < n; e++) {
        if (!isfinite(out->correction_bias[e]))
            return mlai_model_fail(load->diag, MLA_ERROR_FILE, "tensor %s has a value %g at %lld",
                                   load->name, (double)out->correction_bias[e], (long long)e);
    }
    return status;
}

static mla_status load_moe(loader *load, const char *prefix, mlai_moe *out)
{
    const mlai_model_config *config = &load->model->config;
    int64_t n = config->n_routed_experts;
    out->experts = calloc((size_t)n, sizeof *out->experts);
    if (out->experts == NULL)
        return mlai_model_fail_memory(load->diag, prefix, (unsigned long long)n);
    mla_status status = load_router(load, prefix, out);
    char expert_prefix[128];
    for (int64_t e = 0; status == MLA_OK && e < n; e++) {
        snprintf(expert_prefix, sizeof expert_prefix, "%sexperts.%lld.", prefix, (long long)e);
        status = load_mlp(load, expert_prefix, config->moe_intermediate_size, &out->experts[e]);
    }
    if (status == MLA_OK && config->n_shared_experts > 0) {
        snprintf(expert_prefix, sizeof expert_prefix, "%sshared_experts.", prefix);
        status = load_mlp(load, expert_prefix,
                          config->moe_intermediate_size * config->n_shared_experts, &out->shared);
    }
    return status;
}

/* The absorbed views of kv_b_proj. */
static void make_views(const mlai_model_config *config, mlai_layer *layer)
{
    int64_t heads = config->num_heads;
    int64_t rank = config->kv_lora_rank;
    int64_t nope = config->qk_nope_head_dim;
    int64_t value = config->v_head_dim;
    int64_t head_stride = (nope + value) * rank;
    const char *data = layer->kv_b.data;
    int64_t value_offset_bytes = nope * rank * mla_format_bytes(layer->kv_b.format);
    layer->w_uk = mla_tensor_3d(data, layer->kv_b.format, heads, nope, rank);
    layer->w_uk.stride[0] = head_stride;
    layer->w_uv = mla_tensor_3d(data + value_offset_bytes, layer->kv_b.format, heads, rank, value);
    layer->w_uv.stride[0] = head_stride;
    layer->w_uv.stride[1] = 1;
    layer->w_uv.stride[2] = rank;
}

static mla_status load_attention(loader *load, const char *prefix, mlai_layer *layer)
{
    const mlai_model_config *c = &load->model->config;
    int64_t q_rows = c->num_heads * (c->qk_nope_head_dim + c->qk_rope_head_dim);
    bool bias = c->attention_bias;
    mla_status status;
    if (c->q_lora_rank == 0) {
        status = load_matrix(load, prefix, "q_proj", false, q_rows, c->hidden_size, &layer->q);
    } else {
        status = load_matrix(load, prefix, "q_a_proj", bias, c->q_lora_rank, c->hidden_size,
                             &layer->q_a);
        if (status == MLA_OK)
            status =
                load_vector(load, prefix, "q_a_layernorm.weight", c->q_lora_rank, &layer->q_a_norm);
        if (status == MLA_OK)
            status =
                load_matrix(load, prefix, "q_b_proj", false, q_rows, c->q_lora_rank, &layer->q);
    }
    if (status == MLA_OK)
        status = load_matrix(load, prefix, "kv_a_proj_with_mqa", bias,
                             c->kv_lora_rank + c->qk_rope_head_dim, c->hidden_size, &layer->kv_a);
    if (status == MLA_OK)
        status =
            load_vector(load, prefix, "kv_a_layernorm.weight", c->kv_lora_rank, &layer->kv_a_norm);
    if (status == MLA_OK)
        status = load_matrix(load, prefix, "kv_b_proj", false,
                             c->num_heads * (c->qk_nope_head_dim + c->v_head_dim), c->kv_lora_rank,
                             &layer->kv_b);
    if (status == MLA_OK)
        status = load_matrix(load, prefix, "o_proj", bias, c->hidden_size,
                             c->num_heads * c->v_head_dim, &layer->o);
    if (status == MLA_OK)
        make_views(c, layer);
    return status;
}

static mla_status load_layer(loader *load, int64_t index)
{
    const mlai_model_config *config = &load->model->config;
    mlai_layer *layer = &load->model->layers[index];
    char base[64];
    char prefix[96];
    snprintf(base, sizeof base, "model.layers.%lld.", (long long)index);
    layer->has_experts = mlai_model_config_has_experts(config, index);
    mla_status status =
        load_vector(load, base, "input_layernorm.weight", config->hidden_size, &layer->input_norm);
    if (status == MLA_OK)
        status = load_vector(load, base, "post_attention_layernorm.weight", config->hidden_size,
                             &layer->post_norm);
    if (status == MLA_OK) {
        snprintf(prefix, sizeof prefix, "%sself_attn.", base);
        status = load_attention(load, prefix, layer);
    }
    if (status != MLA_OK)
        return status;
    snprintf(prefix, sizeof prefix, "%smlp.", base);
    if (layer->has_experts)
        return load_moe(load, prefix, &layer->moe);
    return load_mlp(load, prefix, config->intermediate_size, &layer->dense);
}

static mla_status load_weights(mla_model *model, mla_diag *diag)
{
    const mlai_model_config *config = &model->config;
    loader load = {.model = model, .diag = diag};
    load.source = (mlai_weight_source){.reader = model->reader,
                                       .format = model->compute.format,
                                       .fp8_block_rows = config->fp8_block_rows,
                                       .fp8_block_cols = config->fp8_block_cols};
    model->layers = calloc((size_t)config->num_layers, sizeof *model->layers);
    model->inv_freq = calloc((size_t)config->qk_rope_head_dim / 2, sizeof *model->inv_freq);
    if (model->layers == NULL || model->inv_freq == NULL)
        return mlai_model_fail_memory(diag, "the table of layers",
                                      (unsigned long long)config->num_layers *
                                          sizeof *model->layers);
    mla_status status = load_matrix(&load, "model.", "embed_tokens", false, config->vocab_size,
                                    config->hidden_size, &model->embedding);
    if (status == MLA_OK && config->tie_word_embeddings)
        model->head = mlai_matrix_rows(&model->embedding, 0, config->vocab_size);
    else if (status == MLA_OK)
        status = load_matrix(&load, "", "lm_head", false, config->vocab_size, config->hidden_size,
                             &model->head);
    if (status == MLA_OK)
        status =
            load_vector(&load, "model.", "norm.weight", config->hidden_size, &model->final_norm);
    for (int64_t i = 0; status == MLA_OK && i < config->num_layers; i++)
        status = load_layer(&load, i);
    return status;
}

mla_status mla_model_load(mla_context *ctx, const char *folder, int32_t compute_format,
                          mla_model **out, mla_diag *diag)
{
    if (ctx == NULL || folder == NULL || out == NULL)
        return mlai_model_fail(diag, MLA_ERROR_ARGUMENT, "ctx, folder and out must not be NULL");
    if (compute_format != MLA_FORMAT_F32 && compute_format != MLA_FORMAT_BF16)
        return mlai_model_fail(diag, MLA_ERROR_FORMAT,
                               "compute_format is %s; models are computed in f32 or bf16",
                               mla_format_name(compute_format));
    mla_model *model = calloc(1, sizeof *model);
    if (model == NULL)
        return mlai_model_fail_memory(diag, "the model", sizeof *model);
    model->ctx = ctx;
    mla_status status = mlai_model_config_read(folder, &model->config, diag);
    if (status == MLA_OK)
        status = mlai_st_open(folder, &model->reader, diag);
    if (status == MLA_OK)
        status = mlai_compute_init(ctx, compute_format, &model->compute, diag);
    if (status == MLA_OK)
        status = load_weights(model, diag);
    if (status != MLA_OK) {
        mla_model_destroy(model);
        return status;
    }
    const mlai_model_config *config = &model->config;
    mlai_rope_frequencies(&config->rope, config->qk_rope_head_dim, model->inv_freq);
    model->softmax_scale =
        mla_softmax_scale((int32_t)config->qk_nope_head_dim, (int32_t)config->qk_rope_head_dim,
                          (float)config->rope.factor, (float)config->rope.mscale_all_dim);
    model->is_byte_level = mlai_tokenizer_is_byte_level(config, folder);
    *out = model;
    return MLA_OK;
}

static void free_layer(mlai_layer *layer, int64_t n_experts)
{
    free(layer->input_norm);
    free(layer->post_norm);
    free(layer->q_a_norm);
    free(layer->kv_a_norm);
    mlai_matrix_free(&layer->q);
    mlai_matrix_free(&layer->q_a);
    mlai_matrix_free(&layer->kv_a);
    mlai_matrix_free(&layer->kv_b);
    mlai_matrix_free(&layer->o);
    mlai_mlp_free(&layer->dense);
    mlai_moe_free(&layer->moe, n_experts);
}

void mla_model_destroy(mla_model *model)
{
    if (model == NULL)
        return;
    for (int64_t i = 0; model->layers != NULL && i < model->config.num_layers; i++)
        free_layer(&model->layers[i], model->config.n_routed_experts);
    free(model->layers);
    free(model->final_norm);
    free(model->inv_freq);
    mlai_matrix_free(&model->head);
    mlai_matrix_free(&model->embedding);
    mlai_compute_free(&model->compute);
    mlai_st_close(model->reader);
    free(model);
}

mla_status mla_model_get_info(const mla_model *model, mla_model_info *info, mla_diag *diag)
{
    if (info->struct_size != sizeof *info)
        return mlai_model_fail(diag, MLA_ERROR_VERSION,
                               "info.struct_size is %u, not %zu: use MLA_MODEL_INFO_INIT and "
                               "compile against this version's header",
                               info->struct_size, sizeof *info);
    *info = (mla_model_info){.struct_size = sizeof *info,
                             .is_byte_level = model->is_byte_level,
                             .family = (int32_t)model->config.family,
                             .compute_format = model->compute.format,
                             .vocab_size = model->config.vocab_size,
                             .num_layers = model->config.num_layers,
                             .num_attention_heads = model->config.num_heads,
                             .max_position_embeddings = model->config.max_position_embeddings,
                             .bos_token_id = model->config.bos_token_id,
                             .num_experts_per_tok = model->config.num_experts_per_tok};
    for (int64_t i = 0; i < model->config.num_layers; i++)
        info->num_expert_layers += model->layers[i].has_experts;
    return MLA_OK;
}

mla_status mla_model_encode(const mla_model *model, const char *text, size_t length, int32_t *ids,
                            int64_t *n_ids, mla_diag *diag)
{
    if (!model->is_byte_level)
        return mlai_model_fail(
            diag, MLA_ERROR_UNSUPPORTED,
            "this model's vocabulary (%lld ids) is not byte-level, so text cannot "
            "be turned into ids here: give ids instead",
            (long long)model->config.vocab_size);
    int64_t need = (int64_t)length + (model->config.bos_token_id >= 0);
    if (*n_ids < need)
        return mlai_model_fail(diag, MLA_ERROR_CAPACITY, "ids has room for %lld; %lld are needed",
                               (long long)*n_ids, (long long)need);
    *n_ids = mlai_tokenizer_encode(&model->config, text, length, ids);
    return MLA_OK;
}
