/*
 * One sequence in progress: its cache and bookkeeping through libmla's public API, and all scratch.
 *
 * A forward takes T new tokens at positions C .. C + T - 1. T is at most chunk_tokens; expanded
 * rows (new tokens, or one window of the prefix) are at most `max_rows`. Activations are f32; those
 * that feed a product or attention hold values of the compute format. In bf16, operands of
 * attention are stored as bf16 in buffers of their own; in f32 the projections' outputs are used
 * where they lie. Letters as in mla/ops.h. Called by session.c, attention.c, forward.c, generate.c.
 */
#ifndef MLAI_MODEL_SESSION_H
#define MLAI_MODEL_SESSION_H

#include "deepseek.h"

struct mla_model_session {
    mla_model *model;
    mla_model_session_options options;
    int64_t length; /* C */
    int64_t max_rows;

    mla_kv_pool *pool;
    mla_page_allocator *allocator;
    mla_req_to_page *table;
    mla_backend *backend;
    float *cos_table; /* [max_length, P / 2] */
    float *sin_table;

    /* One request's row of each per-request array. */
    int32_t req_pool_index;
    int32_t cached_len;
    int32_t new_len;
    int32_t seq_len;

    int32_t *positions; /* [chunk_tokens] */
    int64_t *slots;     /* [chunk_tokens] */

    float *x;        /* [T, hidden]: the residual stream */
    float *h;        /* [T, hidden]: normed input of a part */
    float *q_a;      /* [T, q_lora_rank] */
    float *kv_a;     /* [T, R + P] */
    float *q_f32;    /* [T, H * L] */
    void *q;         /* [T, H, L] in the compute format; q_f32 itself in f32 */
    float *attn;     /* [T, H * V] */
    float *attn_lse; /* [T, H] */

    /* Expanded path: rows read back from the cache and what they expand to. */
    float *row_latent; /* [max_rows, R] */
    float *row_rope;   /* [max_rows, P] */
    float *row_kv;     /* [max_rows, H * (N + V)] */
    void *row_k;       /* [max_rows, H, L] in the compute format */
    void *row_v;       /* bf16: [max_rows, H, V]; f32: NULL, a view of row_kv is used */
    float *window_out; /* [T, H * V] */
    float *window_lse; /* [T, H] */

    /* Absorbed path, one token. */
    void *absorbed_q; /* [1, H, D] in the compute format */
    void *latent_out; /* [1, H, R] in the compute format */

    mlai_mlp_scratch mlp;
    void *workspace; /* of the operators that do not go through the backend */
    uint64_t workspace_bytes;
    const char *solutions[MLA_OP_PACK + 1]; /* by operator; NULL = not used */

    mla_model_on_routing on_routing;
    void *on_routing_user;
};

/* attention.c: sizes the operators' workspace and names their solutions, at the largest shapes. */
mla_status mlai_attention_plan(mla_model_session *session, mla_diag *diag);

/*
 * attention.c: x += o_proj(attention(h)) of one layer for T tokens whose slots and positions are
 * set; is_decode takes the absorbed path (T = 1).
 */
mla_status mlai_attention_add(mla_model_session *session, int64_t layer_index, int64_t n_tokens,
                              bool is_decode, mla_diag *diag);

/*
 * forward.c: one forward of n ids (at most chunk_tokens) after the session's length; logits
 * [n_logits, vocab] of its last tokens, or NULL. The length grows when all of it is done.
 */
mla_status mlai_forward(mla_model_session *session, const int32_t *ids, int64_t n, bool is_decode,
                        float *logits, int64_t n_logits, mla_diag *diag);

#endif
