/*
 * Reads config.json (see config.h). One table holds each whole number with its range and its
 * default for the two architectures; what needs more than a range has a function of its own: names,
 * rotary embedding, routing, token ids, quantisation. Defaults and meanings are those of Hugging
 * Face transformers 5, against which the model's logits are checked; where a checkpoint's own field
 * contradicts what the architecture computes (a scoring function, an activation), it is refused.
 * Called by deepseek.c and the tests.
 */
#include "config.h"

#include "fault.h"
#include "json.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define MAX_CONFIG_BYTES ((size_t)16 << 20)
#define MAX_DIM ((int64_t)1 << 24)
#define MAX_PRODUCT ((int64_t)1 << 31)

typedef struct integer_field {
    const char *key;
    size_t offset;
    int64_t low;
    int64_t high;
    int64_t default_v2;
    int64_t default_v3;
} integer_field;

#define FIELD(key, member, low, high, v2, v3)                                                      \
    {                                                                                              \
        key, offsetof(mlai_model_config, member), low, high, v2, v3                                \
    }

static const integer_field integer_fields[] = {
    FIELD("vocab_size", vocab_size, 1, MAX_DIM, 102400, 129280),
    FIELD("hidden_size", hidden_size, 1, MAX_DIM, 4096, 7168),
    FIELD("intermediate_size", intermediate_size, 1, MAX_DIM, 11008, 18432),
    FIELD("moe_intermediate_size", moe_intermediate_size, 1, MAX_DIM, 1407, 2048),
    FIELD("num_hidden_layers", num_layers, 1, 4096, 32, 61),
    FIELD("num_attention_heads", num_heads, 1, 65536, 32, 128),
    FIELD("kv_lora_rank", kv_lora_rank, 1, 65536, 512, 512),
    FIELD("qk_nope_head_dim", qk_nope_head_dim, 1, 65536, 128, 128),
    FIELD("qk_rope_head_dim", qk_rope_head_dim, 2, 65536, 64, 64),
    FIELD("v_head_dim", v_head_dim, 1, 65536, 128, 128),
    FIELD("first_k_dense_replace", first_k_dense_replace, 0, 4096, 0, 3),
    FIELD("moe_layer_freq", moe_layer_freq, 1, 4096, 1, 1),
    FIELD("max_position_embeddings", max_position_embeddings, 1, INT32_MAX, 2048, 4096),
};

/* Fields where null has a meaning of its own (0 here), unlike an absent key. */
static const integer_field nullable_fields[] = {
    FIELD("q_lora_rank", q_lora_rank, 1, 65536, 1536, 1536),
    FIELD("n_routed_experts", n_routed_experts, 0, 65536, 64, 256),
    FIELD("n_shared_experts", n_shared_experts, 0, 1024, 2, 1),
    FIELD("num_experts_per_tok", num_experts_per_tok, 0, 1024, 0, 8),
    FIELD("n_group", n_group, 0, 65536, 0, 8),
    FIELD("topk_group", topk_group, 0, 65536, 0, 4),
};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static int64_t *member(mlai_model_config *config, const integer_field *field)
{
    return (int64_t *)((char *)config + field->offset);
}

static mla_status read_family(const cJSON *root, const char *where, mlai_model_config *config,
                              mla_diag *diag)
{
    const char *type = NULL;
    mla_status status = mlai_json_string(root, where, "model_type", "", &type, diag);
    if (status != MLA_OK)
        return status;
    if (strcmp(type, "deepseek_v2") == 0)
        config->family = MLAI_FAMILY_V2;
    else if (strcmp(type, "deepseek_v3") == 0 || strcmp(type, "kimi_k2") == 0)
        config->family = MLAI_FAMILY_V3;
    else
        return mlai_model_fail(diag, MLA_ERROR_UNSUPPORTED,
                               "%s: model_type is \"%.60s\"; this runner takes deepseek_v2, "
                               "deepseek_v3 and kimi_k2",
                               where, type);
    return MLA_OK;
}

static mla_status read_integers(const cJSON *root, const char *where, mlai_model_config *config,
                                mla_diag *diag)
{
    bool is_v2 = config->family == MLAI_FAMILY_V2;
    for (size_t i = 0; i < COUNT(integer_fields); i++) {
        const integer_field *f = &integer_fields[i];
        mla_status status =
            mlai_json_integer(root, where, f->key, is_v2 ? f->default_v2 : f->default_v3, f->low,
                              f->high, member(config, f), diag);
        if (status != MLA_OK)
            return status;
    }
    for (size_t i = 0; i < COUNT(nullable_fields); i++) {
        const integer_field *f = &nullable_fields[i];
        bool is_null = cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(root, f->key));
        int64_t fallback = is_null ? 0 : is_v2 ? f->default_v2 : f->default_v3;
        mla_status status = mlai_json_integer(root, where, f->key, fallback, f->low, f->high,
                                              member(config, f), diag);
        if (status != MLA_OK)
            return status;
    }
    int64_t kv_heads = 0;
    mla_status status = mlai_json_integer(root, where, "num_key_value_heads", config->num_heads,
                                          config->num_heads, config->num_heads, &kv_heads, diag);
    if (status != MLA_OK)
        return status;
    if (config->qk_rope_head_dim % 2 != 0)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: qk_rope_head_dim is %lld; it must be even", where,
                               (long long)config->qk_rope_head_dim);
    int64_t width = config->qk_nope_head_dim + config->qk_rope_head_dim + config->v_head_dim;
    if (config->num_heads * width > MAX_PRODUCT)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: num_attention_heads times the head dims is over %lld", where,
                               (long long)MAX_PRODUCT);
    return MLA_OK;
}

static mla_status read_switches(const cJSON *root, const char *where, mlai_model_config *config,
                                mla_diag *diag)
{
    bool is_v3 = config->family == MLAI_FAMILY_V3;
    bool mlp_bias = false;
    const char *activation = NULL;
    mla_status status =
        mlai_json_bool(root, where, "attention_bias", false, &config->attention_bias, diag);
    if (status == MLA_OK)
        status = mlai_json_bool(root, where, "tie_word_embeddings", false,
                                &config->tie_word_embeddings, diag);
    if (status == MLA_OK)
        status =
            mlai_json_bool(root, where, "norm_topk_prob", is_v3, &config->norm_topk_prob, diag);
    if (status == MLA_OK)
        status = mlai_json_bool(root, where, "mlp_bias", false, &mlp_bias, diag);
    if (status == MLA_OK)
        status = mlai_json_string(root, where, "hidden_act", "silu", &activation, diag);
    if (status == MLA_OK)
        status = mlai_json_double(root, where, "rms_norm_eps", 1e-6, 0.0, 1.0,
                                  &config->rms_norm_eps, diag);
    if (status == MLA_OK)
        status = mlai_json_double(root, where, "routed_scaling_factor", is_v3 ? 2.5 : 1.0, -1e6,
                                  1e6, &config->routed_scaling_factor, diag);
    if (status != MLA_OK)
        return status;
    if (mlp_bias)
        return mlai_model_fail(diag, MLA_ERROR_UNSUPPORTED,
                               "%s: mlp_bias is true; only models without it are computed", where);
    if (strcmp(activation, "silu") != 0 && strcmp(activation, "swish") != 0)
        return mlai_model_fail(diag, MLA_ERROR_UNSUPPORTED,
                               "%s: hidden_act is \"%.40s\"; only silu is computed", where,
                               activation);
    return MLA_OK;
}

static mla_status read_routing_names(const cJSON *root, const char *where,
                                     mlai_model_config *config, mla_diag *diag)
{
    bool is_v3 = config->family == MLAI_FAMILY_V3;
    const char *method = NULL;
    const char *scoring = NULL;
    const char *own_scoring = is_v3 ? "sigmoid" : "softmax";
    mla_status status =
        mlai_json_string(root, where, "topk_method", is_v3 ? "noaux_tc" : "greedy", &method, diag);
    if (status == MLA_OK)
        status = mlai_json_string(root, where, "scoring_func", own_scoring, &scoring, diag);
    if (status != MLA_OK)
        return status;
    if (strcmp(scoring, own_scoring) != 0)
        return mlai_model_fail(diag, MLA_ERROR_UNSUPPORTED,
                               "%s: scoring_func is \"%.40s\"; this architecture takes %s", where,
                               scoring, own_scoring);
    if (is_v3 && strcmp(method, "noaux_tc") == 0)
        config->topk_method = MLAI_TOPK_NOAUX_TC;
    else if (!is_v3 && strcmp(method, "greedy") == 0)
        config->topk_method = MLAI_TOPK_GREEDY;
    else if (!is_v3 && strcmp(method, "group_limited_greedy") == 0)
        config->topk_method = MLAI_TOPK_GROUP_LIMITED_GREEDY;
    else
        return mlai_model_fail(diag, MLA_ERROR_UNSUPPORTED,
                               "%s: topk_method is \"%.40s\"; this architecture takes %s", where,
                               method, is_v3 ? "noaux_tc" : "greedy and group_limited_greedy");
    return MLA_OK;
}

static mla_status check_routing(const char *where, mlai_model_config *config, mla_diag *diag)
{
    if (config->topk_method == MLAI_TOPK_GREEDY) {
        config->n_group = 1;
        config->topk_group = 1;
    }
    bool has_experts = false;
    for (int64_t layer = 0; layer < config->num_layers; layer++)
        has_experts = has_experts || mlai_model_config_has_experts(config, layer);
    if (!has_experts)
        return MLA_OK;
    int64_t experts = config->n_routed_experts;
    int64_t groups = config->n_group;
    int64_t k = config->num_experts_per_tok;
    if (groups < 1 || experts % groups != 0)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: n_group is %lld; it must divide n_routed_experts (%lld)", where,
                               (long long)groups, (long long)experts);
    if (config->topk_group < 1 || config->topk_group > groups)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: topk_group is %lld; it must be from 1 to n_group (%lld)", where,
                               (long long)config->topk_group, (long long)groups);
    if (config->topk_method == MLAI_TOPK_NOAUX_TC && experts / groups < 2)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: n_group is %lld; noaux_tc ranks a group by its two best "
                               "experts and needs two in each",
                               where, (long long)groups);
    if (k < 1 || k > config->topk_group * (experts / groups))
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: num_experts_per_tok is %lld; it must be from 1 to the %lld "
                               "experts of topk_group groups",
                               where, (long long)k,
                               (long long)(config->topk_group * (experts / groups)));
    return MLA_OK;
}

/* Magnitude that YaRN gives to attention at a scaling factor. */
static double yarn_magnitude(double factor, double mscale)
{
    return factor <= 1.0 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}

static mla_status read_yarn(const cJSON *rope, const char *where, double max_position,
                            mlai_rope_config *out, mla_diag *diag)
{
    double mscale = 0.0;
    double attention_factor = 0.0;
    mla_status status = mlai_json_double(rope, where, "original_max_position_embeddings",
                                         max_position, 1.0, 1e9, &out->original_max_position, diag);
    double ratio = max_position / out->original_max_position;
    if (status == MLA_OK)
        status = mlai_json_double(rope, where, "factor", ratio, 1e-3, 1e6, &out->factor, diag);
    if (status == MLA_OK)
        status = mlai_json_double(rope, where, "beta_fast", 32.0, 1e-6, 1e9, &out->beta_fast, diag);
    if (status == MLA_OK)
        status = mlai_json_double(rope, where, "beta_slow", 1.0, 1e-6, 1e9, &out->beta_slow, diag);
    if (status == MLA_OK)
        status = mlai_json_double(rope, where, "mscale", 0.0, 0.0, 1e3, &mscale, diag);
    if (status == MLA_OK)
        status = mlai_json_double(rope, where, "attention_factor", -1.0, 0.0, 1e3,
                                  &attention_factor, diag);
    if (status == MLA_OK)
        status = mlai_json_bool(rope, where, "truncate", true, &out->is_truncated, diag);
    if (status != MLA_OK)
        return status;
    if (attention_factor >= 0.0)
        out->attention_factor = attention_factor;
    else if (mscale != 0.0 && out->mscale_all_dim != 0.0)
        out->attention_factor =
            yarn_magnitude(out->factor, mscale) / yarn_magnitude(out->factor, out->mscale_all_dim);
    else
        out->attention_factor = yarn_magnitude(out->factor, 1.0);
    return MLA_OK;
}

static mla_status read_rope(const cJSON *root, const char *where, mlai_model_config *config,
                            mla_diag *diag)
{
    mlai_rope_config *out = &config->rope;
    const cJSON *rope = mlai_json_get(root, "rope_scaling");
    if (rope == NULL)
        rope = mlai_json_get(root, "rope_parameters");
    if (rope != NULL && !cJSON_IsObject(rope))
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: rope_scaling or rope_parameters is not an object", where);
    const char *type = NULL;
    double theta = 0.0;
    double partial = 0.0;
    *out = (mlai_rope_config){.factor = 1.0, .attention_factor = 1.0, .is_truncated = true};
    mla_status status =
        mlai_json_double(root, where, "rope_theta", 10000.0, 1.0001, 1e30, &theta, diag);
    if (status == MLA_OK)
        status =
            mlai_json_double(rope, where, "rope_theta", theta, 1.0001, 1e30, &out->theta, diag);
    if (status == MLA_OK)
        status = mlai_json_bool(root, where, "rope_interleave", true, &out->is_interleaved, diag);
    if (status == MLA_OK)
        status =
            mlai_json_double(rope, where, "partial_rotary_factor", 1.0, 1.0, 1.0, &partial, diag);
    if (status == MLA_OK)
        status = mlai_json_string(rope, where, "type", "default", &type, diag);
    if (status == MLA_OK)
        status = mlai_json_string(rope, where, "rope_type", type, &type, diag);
    if (status == MLA_OK && strcmp(type, "default") != 0)
        status = mlai_json_double(rope, where, "mscale_all_dim", 0.0, 0.0, 1e3,
                                  &out->mscale_all_dim, diag);
    if (status != MLA_OK)
        return status;
    /* DeepSeek-V2 pairs neighbours whatever the field says; only V3's code reads it. */
    if (config->family == MLAI_FAMILY_V2)
        out->is_interleaved = true;
    if (strcmp(type, "default") == 0)
        return MLA_OK;
    if (strcmp(type, "linear") == 0) {
        out->type = MLAI_ROPE_LINEAR;
        return mlai_json_double(rope, where, "factor", 1.0, 1e-3, 1e6, &out->factor, diag);
    }
    if (strcmp(type, "yarn") == 0) {
        out->type = MLAI_ROPE_YARN;
        return read_yarn(rope, where, (double)config->max_position_embeddings, out, diag);
    }
    return mlai_model_fail(diag, MLA_ERROR_UNSUPPORTED,
                           "%s: rope type is \"%.40s\"; default, linear and yarn are computed",
                           where, type);
}

static mla_status read_token_ids(const cJSON *root, const char *where, mlai_model_config *config,
                                 mla_diag *diag)
{
    mla_status status = mlai_json_integer(root, where, "bos_token_id", -1, 0,
                                          config->vocab_size - 1, &config->bos_token_id, diag);
    if (status != MLA_OK)
        return status;
    const cJSON *eos = cJSON_GetObjectItemCaseSensitive(root, "eos_token_id");
    if (eos == NULL) {
        int64_t id = config->family == MLAI_FAMILY_V3 ? 1 : 2;
        config->n_eos = id < config->vocab_size;
        config->eos_token_ids[0] = id;
        return MLA_OK;
    }
    if (cJSON_IsNull(eos))
        return MLA_OK;
    bool is_list = cJSON_IsArray(eos);
    int n = is_list ? cJSON_GetArraySize(eos) : 1;
    if (n > MLAI_MODEL_MAX_EOS)
        return mlai_model_fail(diag, MLA_ERROR_FILE, "%s: eos_token_id lists %d ids; at most %d",
                               where, n, MLAI_MODEL_MAX_EOS);
    for (int i = 0; i < n; i++) {
        const cJSON *item = is_list ? cJSON_GetArrayItem(eos, i) : eos;
        if (!mlai_json_is_integer(item, 0, config->vocab_size - 1, &config->eos_token_ids[i]))
            return mlai_model_fail(diag, MLA_ERROR_FILE,
                                   "%s: eos_token_id must be an id below vocab_size (%lld) or a "
                                   "list of such",
                                   where, (long long)config->vocab_size);
    }
    config->n_eos = n;
    return MLA_OK;
}

static mla_status read_quantization(const cJSON *root, const char *where, mlai_model_config *config,
                                    mla_diag *diag)
{
    config->fp8_block_rows = 128;
    config->fp8_block_cols = 128;
    const cJSON *quant = mlai_json_get(root, "quantization_config");
    if (quant == NULL)
        return MLA_OK;
    const char *method = NULL;
    mla_status status = mlai_json_string(quant, where, "quant_method", "", &method, diag);
    if (status != MLA_OK)
        return status;
    if (strcmp(method, "fp8") != 0)
        return mlai_model_fail(diag, MLA_ERROR_UNSUPPORTED,
                               "%s: quant_method is \"%.40s\"; only block-scaled fp8 is read",
                               where, method);
    const cJSON *block = mlai_json_get(quant, "weight_block_size");
    if (block == NULL)
        return MLA_OK;
    if (cJSON_GetArraySize(block) != 2 ||
        !mlai_json_is_integer(cJSON_GetArrayItem(block, 0), 1, 65536, &config->fp8_block_rows) ||
        !mlai_json_is_integer(cJSON_GetArrayItem(block, 1), 1, 65536, &config->fp8_block_cols))
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: weight_block_size must be two whole numbers from 1 to 65536",
                               where);
    return MLA_OK;
}

bool mlai_model_config_has_experts(const mlai_model_config *config, int64_t layer)
{
    return config->n_routed_experts > 0 && layer >= config->first_k_dense_replace &&
           layer % config->moe_layer_freq == 0;
}

static mla_status parse_tree(const cJSON *root, const char *where, mlai_model_config *config,
                             mla_diag *diag)
{
    if (!cJSON_IsObject(root))
        return mlai_model_fail(diag, MLA_ERROR_FILE, "%s is not a JSON object", where);
    mla_status status = read_family(root, where, config, diag);
    if (status == MLA_OK)
        status = read_integers(root, where, config, diag);
    if (status == MLA_OK)
        status = read_switches(root, where, config, diag);
    if (status == MLA_OK)
        status = read_routing_names(root, where, config, diag);
    if (status == MLA_OK)
        status = check_routing(where, config, diag);
    if (status == MLA_OK)
        status = read_rope(root, where, config, diag);
    if (status == MLA_OK)
        status = read_token_ids(root, where, config, diag);
    if (status == MLA_OK)
        status = read_quantization(root, where, config, diag);
    return status;
}

mla_status mlai_model_config_parse(const char *text, size_t length, const char *where,
                                   mlai_model_config *out, mla_diag *diag)
{
    cJSON *root = NULL;
    mla_status status = mlai_json_parse(text, length, where, &root, diag);
    if (status != MLA_OK)
        return status;
    mlai_model_config config = {0};
    status = parse_tree(root, where, &config, diag);
    cJSON_Delete(root);
    if (status == MLA_OK)
        *out = config;
    return status;
}

mla_status mlai_model_config_read(const char *folder, mlai_model_config *out, mla_diag *diag)
{
    size_t bytes = strlen(folder) + sizeof "/config.json";
    char *path = malloc(bytes);
    if (path == NULL)
        return mlai_model_fail_memory(diag, folder, bytes);
    memcpy(path, folder, bytes - sizeof "/config.json");
    memcpy(path + bytes - sizeof "/config.json", "/config.json", sizeof "/config.json");
    char *text = NULL;
    size_t size = 0;
    mla_status status = mlai_file_read(path, MAX_CONFIG_BYTES, &text, &size, diag);
    if (status == MLA_OK)
        status = mlai_model_config_parse(text, size, path, out, diag);
    free(text);
    free(path);
    return status;
}
