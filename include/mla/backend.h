/*
 * libmla: the attention backend. It keeps what the layers of one forward pass share (lengths, page
 * tables, prefix windows) and runs the operators of ops.h on it.
 *
 * One forward pass, for each step of an engine:
 *   1. mla_backend_init_forward_metadata once (or the graph twin in a captured step);
 *   2. for each layer, the engine projects, rotates and writes the cache (mla_rope_write_kv), then
 *      calls mla_backend_forward_decode on absorbed queries, or on expanded q, k, v
 *      mla_backend_forward_extend_chunked: once causally over the new tokens, once for each prefix
 *      window, the results merged with mla_merge_state.
 * Token order of a mixed batch: the first num_extends requests are extends, request-major, then the
 * decodes with S tokens each. seq_lens count the step's own tokens.
 *
 * Lengths are aliased: metadata points at the caller's seq_lens, never copies or writes them, in
 * eager mode and in graphs, because drafters bump them in place between steps. They must stay alive
 * and in place until the next init.
 *
 * Thread rule: one backend, one thread at a time; several backends may share a context.
 */
#ifndef MLA_BACKEND_H
#define MLA_BACKEND_H

#include <mla/cache.h>

typedef struct mla_backend mla_backend;

/* ---- configuration --------------------------------------------------------------------------- */

typedef enum mla_quant_method {
    MLA_QUANT_NONE = 0,
    MLA_QUANT_PER_TOKEN_HEAD = 1 /* refused at creation: its rows are three tensors */
} mla_quant_method;

typedef enum mla_decode_query {
    MLA_DECODE_QUERY_KEEP = 0, /* attend with the query as it is given */
    MLA_DECODE_QUERY_CAST = 1  /* e4m3 cache: saturating cast of the query to e4m3 first */
} mla_decode_query;

typedef struct mla_config {
    uint32_t struct_size;
    int32_t device_type;
    int32_t device_index;
    int32_t num_attention_heads; /* of the model */
    int32_t attn_tp_size;     /* divides them; local heads H = num_attention_heads / attn_tp_size */
    int32_t kv_lora_rank;     /* R */
    int32_t qk_nope_head_dim; /* N */
    int32_t qk_rope_head_dim; /* P */
    int32_t v_head_dim;       /* V */
    int32_t page_size;
    int64_t context_len; /* tokens; page tables have ceil(context_len / page_size) columns */
    int32_t q_format;    /* f32 bf16 f16 */
    int32_t kv_format;   /* f32 bf16 f16 e4m3 e5m2 ds656 */
    float softmax_scale; /* (N + P)^-0.5 times the model's m^2, see mla_softmax_scale */
    int32_t is_draft;
    int32_t speculative_num_draft_tokens; /* S >= 1; 1 = no speculation */
    int32_t decode_query;                 /* mla_decode_query */
    int32_t kv_cache_quant_method;        /* mla_quant_method */
    int32_t max_bs;                       /* requests in one forward */
    int64_t max_tokens;     /* tokens in one forward; 0 = max_bs * S, room for decodes only */
    int64_t chunk_capacity; /* tokens of one prefix window over the batch; 0 = 32768 */
    const char *solution;   /* forced solutions for all of the backend's calls, or NULL; copied */
    mla_device_error *device_error; /* CUDA: validate mode of all of the backend's calls, or NULL */
} mla_config;

#define MLA_CONFIG_INIT                                                                            \
    {                                                                                              \
        .struct_size = sizeof(mla_config), .device_type = MLA_DEVICE_CPU, .attn_tp_size = 1,       \
        .page_size = 64, .speculative_num_draft_tokens = 1, .max_bs = 160                          \
    }

/* ---- modes and metadata ---------------------------------------------------------------------- */

/* Values are the seed's. */
typedef enum mla_forward_mode {
    MLA_FORWARD_EXTEND = 1,
    MLA_FORWARD_DECODE = 2,
    MLA_FORWARD_MIXED = 3,
    MLA_FORWARD_IDLE = 4
} mla_forward_mode;

/* One forward's requests. Tensors on the backend's device, but for the host twins. On a device
 * their values are clamped where they are read, not checked, and what init makes of them is
 * enqueued on `stream`, as the forwards that read it have to be. */
typedef struct mla_forward_batch {
    uint32_t struct_size;
    int32_t forward_mode;        /* mla_forward_mode */
    int32_t bs;                  /* requests */
    int32_t num_extends;         /* E: the first E rows are extends */
    mla_tensor req_pool_indices; /* i32 or i64 [>= bs]: rows of req_to_page */
    mla_tensor seq_lens;         /* i32 [>= bs]; aliased */
    mla_tensor req_to_page;      /* i32 [rows, M] */
    /* EXTEND and MIXED only: new tokens and tokens already cached, [>= E], and their host twins. */
    mla_tensor extend_seq_lens;        /* i32 */
    mla_tensor extend_prefix_lens;     /* i32 */
    mla_tensor extend_seq_lens_cpu;    /* i32 on the host; on the CPU absent = the one above */
    mla_tensor extend_prefix_lens_cpu; /* likewise */
    void *stream;
} mla_forward_batch;

#define MLA_FORWARD_BATCH_INIT                                                                     \
    {                                                                                              \
        .struct_size = sizeof(mla_forward_batch)                                                   \
    }

/*
 * What the extends of a forward share. Borrowed: valid until the next init. Prefix window w covers
 * positions [w * win, (w + 1) * win) of each request's cached prefix, win = chunk_capacity / E.
 * Window w has row w of the [K, ..] tables; forward_extend_chunked takes it with rank 1:
 * mla_tensor_1d((int32_t *)cu_chunked_seq_len.data + w * (E + 1), MLA_FORMAT_I32, E + 1).
 */
typedef struct mla_prefill_metadata {
    uint32_t struct_size;
    int32_t num_extends;                /* E */
    mla_tensor seq_lens;                /* i32 [E], aliased */
    mla_tensor req_pool_indices;        /* [E], aliased */
    mla_tensor extend_prefix_lens;      /* i32 [E], aliased */
    mla_tensor extend_seq_lens;         /* i32 [E], aliased */
    mla_tensor cum_extend_seq_lens;     /* i32 [E + 1] */
    const int32_t *extend_seq_lens_cpu; /* [E] */
    int32_t max_extend_seq_len;
    int32_t max_extend_prefix_len;
    int32_t chunked_loop_num; /* K: number of windows; 0 without a prefix */
    int32_t reserved0;
    const mla_tensor *chunk_kv_indices_list; /* [K]: slots [tokens of the window]: i32, or i64
                                              * where i32 does not hold them and on devices */
    mla_tensor chunked_seq_len;              /* i32 [K, E] */
    mla_tensor cu_chunked_seq_len;           /* i32 [K, E + 1] */
    const int32_t *max_chunk_len_per_loop;   /* [K] */
} mla_prefill_metadata;

/* What the decodes of a forward share. Borrowed: valid until the next init. */
typedef struct mla_decode_metadata {
    uint32_t struct_size;
    int32_t num_extends;   /* decode calls use the rows from here on */
    mla_tensor page_table; /* i32 [bs, W]; block_kv_indices elsewhere */
    mla_tensor seq_lens;   /* i32 [bs], aliased; seq_lens_k elsewhere */
} mla_decode_metadata;

/* ---- forward arguments ----------------------------------------------------------------------- */

/* An attention layer as the engine sees it. */
typedef struct mla_layer {
    uint32_t struct_size;
    int32_t layer_id;    /* of the pool */
    float softmax_scale; /* 0 = the configuration's */
    float logit_cap;     /* 0 = off */
    float k_scale;       /* 0 = 1 */
} mla_layer;

#define MLA_LAYER_INIT                                                                             \
    {                                                                                              \
        .struct_size = sizeof(mla_layer)                                                           \
    }

typedef struct mla_forward_decode_args {
    uint32_t struct_size;
    int32_t bs; /* decode requests in this call: the metadata's rows from num_extends on */
    int32_t save_kv_cache; /* 1 = write k first; 0 = the engine has written it */
    int32_t is_non_causal; /* block drafts: every token sees the whole length */
    mla_tensor q;          /* absorbed [T, H, D], T = bs * q_len; or [T, H, R] with q_rope */
    mla_tensor q_rope;     /* optional [T, H, P] */
    mla_tensor k;          /* with save_kv_cache: rows [T, D] or [T, 1, D]: latent | rotated rope */
    mla_tensor out_cache_loc; /* with save_kv_cache: slots i32 or i64 [T] */
    mla_tensor mask;          /* optional, with is_non_causal: see mla_decode_params */
    mla_tensor out;           /* [T, H, R] or [T, H * R] */
    mla_tensor lse;           /* optional f32 [T, H] */
    void *stream;
} mla_forward_decode_args;

#define MLA_FORWARD_DECODE_ARGS_INIT                                                               \
    {                                                                                              \
        .struct_size = sizeof(mla_forward_decode_args), .save_kv_cache = 1                         \
    }

typedef struct mla_forward_extend_args {
    uint32_t struct_size;
    int32_t save_kv_cache; /* must be 0: rows cannot be made from expanded k and v */
    mla_tensor q;          /* [T, H, L] */
    mla_tensor k;          /* [T, Hk, L] */
    mla_tensor v;          /* [T, Hk, V] */
    mla_tensor out;        /* [T, H, V] or [T, H * V] */
    void *stream;
} mla_forward_extend_args;

#define MLA_FORWARD_EXTEND_ARGS_INIT                                                               \
    {                                                                                              \
        .struct_size = sizeof(mla_forward_extend_args)                                             \
    }

/* Explicit lengths, since one call serves the causal pass and every prefix window. */
typedef struct mla_forward_extend_chunked_args {
    uint32_t struct_size;
    int32_t is_causal;   /* 1: the pass over the new tokens, which is recorded; 0: a window */
    float softmax_scale; /* 0 = the configuration's */
    float logit_cap;     /* 0 = off */
    int32_t max_q_len;   /* host maxima */
    int32_t max_kv_len;
    mla_tensor q;               /* [Tq, H, L]; e4m3 q: k and v are cast to e4m3 (saturating) */
    mla_tensor k;               /* [Tkv, H, L] */
    mla_tensor v;               /* [Tkv, H, V] */
    mla_tensor cum_seq_lens_q;  /* i32 [E + 1] */
    mla_tensor cum_seq_lens_kv; /* i32 [E + 1] */
    mla_tensor out;             /* [Tq, H, V] */
    mla_tensor lse;             /* f32 [Tq, H] */
    void *stream;
} mla_forward_extend_chunked_args;

#define MLA_FORWARD_EXTEND_CHUNKED_ARGS_INIT                                                       \
    {                                                                                              \
        .struct_size = sizeof(mla_forward_extend_chunked_args), .is_causal = 1                     \
    }

/* Called when a layer's cache rows have been enqueued for writing: transfer engines wait for it. On
 * a device, what the recorder enqueues on `stream` (a count, an event) comes behind the rows, in a
 * captured graph too. */
typedef void (*mla_record_step)(void *user, void *stream);

/*
 * A recorder's user for devices: steps are counted in device memory and mirrored where the host
 * reads them while the device runs. Both words belong to the caller and start at what he likes.
 */
typedef struct mla_step_counter {
    uint32_t struct_size;
    int32_t device_type;
    int32_t device_index;
    int32_t status; /* mla_status of the first step that could not be enqueued; 0 = all were */
    mla_context *ctx;
    uint64_t *count;  /* on the device */
    uint64_t *mirror; /* host memory that the device can write: pinned and mapped */
} mla_step_counter;

#define MLA_STEP_COUNTER_INIT                                                                      \
    {                                                                                              \
        .struct_size = sizeof(mla_step_counter), .device_type = MLA_DEVICE_CUDA                    \
    }

#ifdef __cplusplus
extern "C" {
#endif

/* B <= 0: IDLE; 0 < E < B: MIXED; E >= B: EXTEND; else DECODE. */
MLA_API int32_t mla_forward_mode_from_num_extends(int32_t num_extends, int32_t bs);

/* "extend", "decode", "mixed", "idle"; "unknown" otherwise. */
MLA_API const char *mla_forward_mode_name(int32_t mode);

/*
 * (N + P)^-0.5, times m^2 with m = 0.1 * mscale_all_dim * ln(factor) + 1 where factor > 1 (YaRN as
 * DeepSeek uses it). factor <= 1 or mscale_all_dim 0: m = 1.
 */
MLA_API float mla_softmax_scale(int32_t qk_nope_head_dim, int32_t qk_rope_head_dim, float factor,
                                float mscale_all_dim);

/*
 * Makes a backend; every field is checked, the sentence names it. ctx must outlive it. All memory
 * for decode metadata and workspace is allocated here, from max_bs, max_tokens, context_len.
 * Errors: MLA_ERROR_ARGUMENT, MLA_ERROR_FORMAT, MLA_ERROR_UNSUPPORTED (per_token_head, no
 * solution), MLA_ERROR_NOT_FOUND (solution), MLA_ERROR_OUT_OF_MEMORY, MLA_ERROR_VERSION.
 */
MLA_API mla_status mla_backend_create(mla_context *ctx, const mla_config *config, mla_backend **out,
                                      mla_diag *diag);
MLA_API void mla_backend_destroy(mla_backend *backend);

/* The configuration with defaults filled in; local heads = num_attention_heads / attn_tp_size. */
MLA_API const mla_config *mla_backend_get_config(const mla_backend *backend);

/* The seed's kernel_solution: forces solutions for the backend's calls from now on; NULL = none. */
MLA_API mla_status mla_backend_set_solution(mla_backend *backend, const char *solution,
                                            mla_diag *diag);

/*
 * Prepares a forward:
 *   mode            prefill metadata        decode metadata
 *   EXTEND, target  rows [:E]               not defined
 *   EXTEND, draft   rows [:E]               all bs rows, num_extends = E
 *   MIXED           rows [:E]               all bs rows, num_extends = E
 *   DECODE          not defined             all bs rows, num_extends as given
 *   IDLE            not defined             not defined
 * Reading metadata that the last mode did not define is MLA_ERROR_STATE. May allocate host memory
 * when the prefix windows are larger than any before. bs = 0 with mode DECODE is legal and empty.
 * Errors: MLA_ERROR_ARGUMENT (mode and counts that contradict each other, E = 0 in EXTEND or MIXED,
 * negative lengths, seq_lens != prefix + new), MLA_ERROR_CAPACITY (bs over max_bs, lengths over
 * context_len or the table, E over chunk_capacity while a prefix exists, index outside the table).
 * After an error no metadata is defined.
 */
MLA_API mla_status mla_backend_init_forward_metadata(mla_backend *backend,
                                                     const mla_forward_batch *batch,
                                                     mla_diag *diag);

/* The current metadata. Error: MLA_ERROR_STATE. */
MLA_API mla_status mla_backend_prefill_metadata(const mla_backend *backend,
                                                const mla_prefill_metadata **metadata,
                                                mla_diag *diag);
MLA_API mla_status mla_backend_decode_metadata(const mla_backend *backend,
                                               const mla_decode_metadata **metadata,
                                               mla_diag *diag);

/*
 * override_num_extends as a scope: decode metadata reads num_extends until the pop. Nests up to 16
 * deep; init and replay end all scopes. Errors: MLA_ERROR_STATE (no decode metadata, nothing to
 * pop), MLA_ERROR_ARGUMENT (outside 0..bs), MLA_ERROR_CAPACITY (too deep).
 */
MLA_API mla_status mla_backend_push_num_extends(mla_backend *backend, int32_t num_extends,
                                                mla_diag *diag);
MLA_API mla_status mla_backend_pop_num_extends(mla_backend *backend, mla_diag *diag);

/*
 * Absorbed attention of the decode rows: writes k at out_cache_loc if save_kv_cache, then attends.
 * q_len = T / bs must be whole. q_len > 1: verify (target: token j sees seq_len - q_len + 1 + j) or
 * draft (is_draft: token j sees seq_len + j, so the caller's length is what the first token sees).
 * The caller projects the latent output (mla_project_value). bs = 0: MLA_OK, nothing is written. Of
 * the errors only two are found after k was written: a live page id outside the pool, and out or
 * lse that starts where another operand does.
 * Errors: MLA_ERROR_STATE (no decode metadata), MLA_ERROR_ARGUMENT (bs other than the metadata's
 * rows from num_extends on; T not a multiple), MLA_ERROR_CAPACITY (T over max_tokens, lengths over
 * context_len), MLA_ERROR_FORMAT (the pool's format or dims differ from the configuration's), and
 * those of mla_write_kv and mla_decode_with_kvcache.
 */
MLA_API mla_status mla_backend_forward_decode(mla_backend *backend, const mla_layer *layer,
                                              mla_kv_pool *pool,
                                              const mla_forward_decode_args *args, mla_diag *diag);

/*
 * Causal attention of the extends' new tokens over themselves. Errors: MLA_ERROR_UNSUPPORTED
 * (save_kv_cache, or a cached prefix: use forward_extend_chunked), MLA_ERROR_STATE, and those of
 * mla_prefill.
 */
MLA_API mla_status mla_backend_forward_extend(mla_backend *backend, const mla_layer *layer,
                                              const mla_forward_extend_args *args, mla_diag *diag);

/*
 * One pass with LSE over explicit lengths; the causal pass calls the step recorder first. The first
 * call with an e4m3 q and other k or v allocates the buffer they are cast into. Errors:
 * MLA_ERROR_CAPACITY (over max_bs or max_tokens; k over max_tokens and chunk_capacity), those of
 * mla_prefill.
 */
MLA_API mla_status mla_backend_forward_extend_chunked(mla_backend *backend,
                                                      const mla_forward_extend_chunked_args *args,
                                                      mla_diag *diag);

/*
 * The seed's dispatch: DECODE goes to forward_decode (with `decode`), every other mode to
 * forward_extend (with `extend`); the unused one may be NULL. The step is recorded for modes other
 * than DECODE and IDLE, or as record_kv_cache says (-1 = by mode, 0, 1): before the attention where
 * the cache was already written, after it where save_kv_cache writes it.
 */
MLA_API mla_status mla_backend_forward(mla_backend *backend, int32_t forward_mode,
                                       int32_t record_kv_cache, const mla_layer *layer,
                                       mla_kv_pool *pool, const mla_forward_decode_args *decode,
                                       const mla_forward_extend_args *extend, mla_diag *diag);

/* Sets the step recorder; NULL removes it. */
MLA_API void mla_backend_set_step_recorder(mla_backend *backend, mla_record_step record,
                                           void *user);

/*
 * A mla_record_step whose user is an mla_step_counter: adds 1 to *count and stores the sum in
 * *mirror, on `stream` (a CUDA device) or at once (the CPU). Fit for graph capture: each replay
 * counts.
 */
MLA_API void mla_count_step(void *user, void *stream);

/* ---- graphs ---------------------------------------------------------------------------------- */

/*
 * Captured steps: buffers with fixed addresses that a recorded sequence of calls (a CUDA graph, or
 * an engine's own list) reads again and again. libmla never captures by itself.
 *
 * init_graph_state allocates the page table i32 [max_bs, W] (zeroed) and aliases seq_lens_buf (i32,
 * contiguous, at least max_bs entries), which must outlive the backend or the next
 * init_graph_state. Captured batches are forgotten. Errors: MLA_ERROR_FORMAT, MLA_ERROR_SHAPE,
 * MLA_ERROR_CAPACITY.
 */
MLA_API mla_status mla_backend_init_graph_state(mla_backend *backend, int32_t max_bs,
                                                mla_tensor seq_lens_buf, mla_diag *diag);

/*
 * Makes views [:bs] of the buffers the current decode metadata (num_extends 0) and remembers them.
 * forward_decode calls until the next init fix their solution and capacity for this bs. bs >= 1.
 * Errors: MLA_ERROR_UNSUPPORTED (EXTEND, MIXED), MLA_ERROR_STATE (no graph state),
 * MLA_ERROR_CAPACITY.
 */
MLA_API mla_status mla_backend_init_forward_metadata_capture_graph(mla_backend *backend, int32_t bs,
                                                                   int32_t forward_mode,
                                                                   mla_diag *diag);

/*
 * Copies the pages of this step's requests into the captured buffers and makes them current: only
 * contents change. req_pool_indices i32 or i64 [>= bs]; req_to_page needs W columns at least.
 * Lengths are read through the aliased buffer; on the CPU they are checked here. forward_mode
 * DECODE, IDLE or 0. Errors: MLA_ERROR_NOT_FOUND (bs never captured), MLA_ERROR_UNSUPPORTED
 * (EXTEND, MIXED), MLA_ERROR_SHAPE (table too narrow), MLA_ERROR_CAPACITY (a length over
 * context_len).
 */
MLA_API mla_status mla_backend_init_forward_metadata_replay_graph(mla_backend *backend, int32_t bs,
                                                                  mla_tensor req_pool_indices,
                                                                  mla_tensor req_to_page,
                                                                  int32_t forward_mode,
                                                                  void *stream, mla_diag *diag);

/* What padded rows of a captured batch should hold as their length: 1. */
MLA_API int32_t mla_backend_graph_seq_len_fill_value(void);

/* ---- registry -------------------------------------------------------------------------------- */

/* The seed's attention architectures, as bits. */
#define MLA_ARCH_MLA 1
#define MLA_ARCH_MHA 2
#define MLA_ARCH_DSA 4

/* A backend by name. `create` makes whatever the engine's own loader expects; "mla" makes an
 * mla_backend from an mla_config. */
typedef struct mla_backend_row {
    const char *name;
    uint32_t architectures; /* bits */
    mla_status (*create)(mla_context *ctx, const mla_config *config, void **backend,
                         mla_diag *diag);
    void (*destroy)(void *backend);
} mla_backend_row;

/*
 * Finds a row among the caller's (searched from the last to the first, so later ones win) and then
 * the built-in one ("mla"). name NULL = the architecture's default: "mla" for MLA, "dsa" for DSA,
 * "mha" for MHA. Errors: MLA_ERROR_NOT_FOUND (the sentence lists the names that exist),
 * MLA_ERROR_UNSUPPORTED (the row exists but not for this architecture).
 */
MLA_API mla_status mla_backend_find(const mla_backend_row *rows, int32_t n_rows, const char *name,
                                    uint32_t architecture, const mla_backend_row **out,
                                    mla_diag *diag);

#ifdef __cplusplus
}
#endif
#endif
