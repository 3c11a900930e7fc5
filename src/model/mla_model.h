/*
 * libmla_model: DeepSeek-V2, DeepSeek-V3 and Kimi-K2 checkpoints on top of libmla's public API.
 *
 * A model holds weights and is read-only once loaded; a session holds one sequence: its paged
 * latent cache, its backend and scratch. Prefill takes the expanded path (new tokens over
 * themselves, then each window of the cached prefix, merged by LSE), decode the absorbed path.
 * Products go through a CBLAS. Compute is f32, or bf16: weights, what feeds a product or attention,
 * and by default the cache are bf16, sums and the residual stream f32.
 *
 * New tokens attend over their cached rows, read back, so that with a narrower cache the way a
 * prompt is cut changes nothing but rounding.
 *
 * Every fallible function returns an mla_status and takes an mla_diag (may be NULL) last, as libmla
 * does. Structs that begin with struct_size are made by their INIT macro. Thread rule: a session,
 * and the model it belongs to, one thread at a time.
 */
#ifndef MLA_MODEL_H
#define MLA_MODEL_H

#include <mla/mla.h>

typedef struct mla_model mla_model;
typedef struct mla_model_session mla_model_session;

typedef struct mla_model_info {
    uint32_t struct_size;
    int32_t is_byte_level;  /* 1: ids 0..255 are bytes, so text goes in and out; 0: ids only */
    int32_t family;         /* 2 or 3: DeepSeek-V2 or V3 (and Kimi-K2) */
    int32_t compute_format; /* MLA_FORMAT_F32 or MLA_FORMAT_BF16 */
    int64_t vocab_size;
    int64_t num_layers;
    int64_t num_attention_heads;
    int64_t max_position_embeddings;
    int64_t bos_token_id;        /* -1 = none */
    int64_t num_expert_layers;   /* layers with routed experts */
    int64_t num_experts_per_tok; /* experts that a token takes in each */
} mla_model_info;

#define MLA_MODEL_INFO_INIT                                                                        \
    {                                                                                              \
        .struct_size = sizeof(mla_model_info)                                                      \
    }

typedef struct mla_model_session_options {
    uint32_t struct_size;
    int32_t kv_format;      /* of the cache: f32 bf16 f16 e4m3 e5m2 ds656; 0 = the compute format */
    int32_t page_size;      /* tokens; 0 = 64 */
    int32_t reserved0;      /* 0 */
    int64_t max_length;     /* tokens that the session can hold; required */
    int64_t chunk_tokens;   /* new tokens in one forward of a prefill; 0 = 4096 */
    int64_t chunk_capacity; /* tokens of one window of the cached prefix; 0 = 32768 */
} mla_model_session_options;

#define MLA_MODEL_SESSION_OPTIONS_INIT                                                             \
    {                                                                                              \
        .struct_size = sizeof(mla_model_session_options)                                           \
    }

/* Called after each forward of a prefill: `done` of `total` tokens. */
typedef void (*mla_model_progress)(void *user, int64_t done, int64_t total);

/*
 * Called with each new id and the text that became certain with it: `text_bytes` bytes of UTF-8, no
 * terminator, 0 for specials, for bytes that wait for the rest of a character, and for models that
 * are not byte-level. After the last id a call with id -1 gives what still waited.
 */
typedef void (*mla_model_on_token)(void *user, int32_t id, const char *text, size_t text_bytes);

/*
 * Called with the experts that a forward chose in one layer: chosen [n_tokens, num_experts_per_tok]
 * for the tokens at positions first .. first + n_tokens - 1, best first; valid during the call.
 */
typedef void (*mla_model_on_routing)(void *user, int64_t layer, int64_t first, int64_t n_tokens,
                                     const int32_t *chosen);

typedef struct mla_model_generate_params {
    uint32_t struct_size;
    int32_t reserved0; /* 0 */
    const int32_t *prompt_ids;
    int64_t n_prompt;   /* at least 1 */
    int64_t max_tokens; /* new ids at most; generation also ends after an EOS */
    double temperature; /* 0 = greedy */
    double top_p;       /* (0, 1]; 1 = all */
    uint64_t seed;
    mla_model_progress on_progress; /* or NULL */
    mla_model_on_token on_token;    /* or NULL */
    void *user;
    int32_t *ids; /* room for max_tokens; written */
} mla_model_generate_params;

#define MLA_MODEL_GENERATE_PARAMS_INIT                                                             \
    {                                                                                              \
        .struct_size = sizeof(mla_model_generate_params), .top_p = 1.0                             \
    }

typedef struct mla_model_generate_result {
    uint32_t struct_size;
    int32_t is_ended_by_eos; /* 1: the last id is an EOS */
    int64_t n_ids;
    int64_t prefill_tokens;
    int64_t decode_tokens; /* forwards of one token: n_ids - 1, since the prefill gives the first */
    double prefill_seconds;
    double decode_seconds;
} mla_model_generate_result;

#define MLA_MODEL_GENERATE_RESULT_INIT                                                             \
    {                                                                                              \
        .struct_size = sizeof(mla_model_generate_result)                                           \
    }

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Loads the checkpoint in `folder` (config.json; model.safetensors, or shards with their index) to
 * compute in f32 or bf16. ctx gives the number of threads, the BLAS's too (OpenBLAS is set to one
 * thread for the process and called from the context's), and must outlive the model. bf16 weights
 * computed in bf16 stay in the mapped files; everything else is converted into memory. Errors:
 * MLA_ERROR_FILE, MLA_ERROR_UNSUPPORTED (architecture or feature), MLA_ERROR_FORMAT
 * (compute_format), MLA_ERROR_OUT_OF_MEMORY.
 */
mla_status mla_model_load(mla_context *ctx, const char *folder, int32_t compute_format,
                          mla_model **out, mla_diag *diag);

/* NULL is allowed. Sessions go first. */
void mla_model_destroy(mla_model *model);

/* Errors: MLA_ERROR_VERSION. */
mla_status mla_model_get_info(const mla_model *model, mla_model_info *info, mla_diag *diag);

/*
 * Ids of text, a BOS in front where the model has one. *n_ids: in, the room in ids; out, how many
 * there are; length + 1 always suffices. Errors: MLA_ERROR_UNSUPPORTED (not byte-level),
 * MLA_ERROR_CAPACITY.
 */
mla_status mla_model_encode(const mla_model *model, const char *text, size_t length, int32_t *ids,
                            int64_t *n_ids, mla_diag *diag);

/*
 * An empty session. The cache and all scratch are allocated here; forwards allocate nothing.
 * Errors: MLA_ERROR_ARGUMENT, MLA_ERROR_CAPACITY (max_length over the model's), MLA_ERROR_FORMAT,
 * MLA_ERROR_UNSUPPORTED (a forced solution does not fit), MLA_ERROR_OUT_OF_MEMORY.
 */
mla_status mla_model_session_create(mla_model *model, const mla_model_session_options *options,
                                    mla_model_session **out, mla_diag *diag);
void mla_model_session_destroy(mla_model_session *session);

/* Tokens in the cache. */
int64_t mla_model_session_length(const mla_model_session *session);

/* Forgets all tokens from `length` on. Error: MLA_ERROR_ARGUMENT (over the current length). */
mla_status mla_model_session_truncate(mla_model_session *session, int64_t length, mla_diag *diag);

/*
 * Appends n ids by the expanded path, chunk_tokens at a time. logits [n_logits, vocab_size] gets
 * those of the last n_logits tokens (0 <= n_logits <= n; NULL when 0). progress may be NULL.
 * Errors: MLA_ERROR_ARGUMENT (n < 1, an id outside the vocabulary), MLA_ERROR_CAPACITY (over
 * max_length). After an error the session keeps the tokens whose forwards were complete.
 */
mla_status mla_model_session_prefill(mla_model_session *session, const int32_t *ids, int64_t n,
                                     float *logits, int64_t n_logits, mla_model_progress progress,
                                     void *user, mla_diag *diag);

/* Appends one id by the absorbed path; logits [vocab_size] or NULL. Errors: as prefill. */
mla_status mla_model_session_decode(mla_model_session *session, int32_t id, float *logits,
                                    mla_diag *diag);

/* Prefills the prompt and appends ids until max_tokens or an EOS. Errors: as above. */
mla_status mla_model_generate(mla_model_session *session, const mla_model_generate_params *params,
                              mla_model_generate_result *result, mla_diag *diag);

/* Sets who is told about routing; NULL removes it. */
void mla_model_session_set_on_routing(mla_model_session *session, mla_model_on_routing on_routing,
                                      void *user);

/*
 * The solution that the session runs an operator with ("prefill" -> its row's name), or NULL for an
 * operator that it does not use. Static storage.
 */
const char *mla_model_session_solution(const mla_model_session *session, int32_t op);

#ifdef __cplusplus
}
#endif
#endif
