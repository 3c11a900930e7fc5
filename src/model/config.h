/*
 * config.json of DeepSeek-V2, DeepSeek-V3 and Kimi-K2 checkpoints.
 *
 * Both spellings are read: the hub's (rope_scaling beside rope_theta) and that of transformers 5
 * (rope_parameters). Absent fields take the defaults that Hugging Face transformers gives the
 * architecture. Every field is checked: a model that this runner would compute differently from its
 * training code is refused with a sentence that names the field. Letters as in mla/ops.h.
 * Called by deepseek.c and the tests.
 */
#ifndef MLAI_MODEL_CONFIG_H
#define MLAI_MODEL_CONFIG_H

#include <mla/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MLAI_MODEL_MAX_EOS 16

typedef enum mlai_model_family { MLAI_FAMILY_V2 = 2, MLAI_FAMILY_V3 = 3 } mlai_model_family;

typedef enum mlai_rope_type {
    MLAI_ROPE_DEFAULT,
    MLAI_ROPE_LINEAR, /* positions divided by factor */
    MLAI_ROPE_YARN
} mlai_rope_type;

/* How experts are chosen; see mlp.h for the formulas. */
typedef enum mlai_topk_method {
    MLAI_TOPK_GREEDY,
    MLAI_TOPK_GROUP_LIMITED_GREEDY,
    MLAI_TOPK_NOAUX_TC
} mlai_topk_method;

typedef struct mlai_rope_config {
    mlai_rope_type type;
    double theta;
    double factor;
    double original_max_position; /* YaRN: the length that the model was trained with */
    double beta_fast;
    double beta_slow;
    double mscale_all_dim;   /* 0 = absent; scales the softmax */
    double attention_factor; /* what cos and sin are multiplied by */
    bool is_truncated;       /* YaRN: the ramp's ends are rounded outwards */
    bool is_interleaved;
} mlai_rope_config;

typedef struct mlai_model_config {
    mlai_model_family family;
    int64_t vocab_size;
    int64_t hidden_size;
    int64_t intermediate_size;
    int64_t moe_intermediate_size;
    int64_t num_layers;
    int64_t num_heads;        /* H */
    int64_t q_lora_rank;      /* 0 = one q_proj */
    int64_t kv_lora_rank;     /* R */
    int64_t qk_nope_head_dim; /* N */
    int64_t qk_rope_head_dim; /* P */
    int64_t v_head_dim;       /* V */
    int64_t n_routed_experts; /* 0 = dense layers only */
    int64_t n_shared_experts; /* 0 = none */
    int64_t num_experts_per_tok;
    int64_t n_group; /* 1 = no groups */
    int64_t topk_group;
    int64_t first_k_dense_replace; /* layers below this one are dense */
    int64_t moe_layer_freq;        /* of the others every n-th has experts */
    int64_t max_position_embeddings;
    int64_t bos_token_id; /* -1 = config.json has none */
    int64_t n_eos;
    int64_t eos_token_ids[MLAI_MODEL_MAX_EOS];
    int64_t fp8_block_rows; /* of weight_scale_inv; 128 unless config.json says otherwise */
    int64_t fp8_block_cols;
    double rms_norm_eps;
    double routed_scaling_factor;
    mlai_topk_method topk_method;
    bool norm_topk_prob;
    bool attention_bias;
    bool tie_word_embeddings;
    mlai_rope_config rope;
} mlai_model_config;

/*
 * Reads folder/config.json. Errors: MLA_ERROR_FILE (missing, malformed or contradictory),
 * MLA_ERROR_UNSUPPORTED (another architecture or a feature that is not computed here),
 * MLA_ERROR_OUT_OF_MEMORY.
 */
mla_status mlai_model_config_read(const char *folder, mlai_model_config *out, mla_diag *diag);

/* The same from text; `where` names the source in sentences. */
mla_status mlai_model_config_parse(const char *text, size_t length, const char *where,
                                   mlai_model_config *out, mla_diag *diag);

/* Whether a layer has routed experts. */
bool mlai_model_config_has_experts(const mlai_model_config *config, int64_t layer);

#endif
