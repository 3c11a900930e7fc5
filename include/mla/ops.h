/*
 * libmla: the operators. Each stands alone; the backend (backend.h) only arranges them.
 *
 * Letters in comments: B requests, T tokens in the call, H local query heads, Hk key heads, R
 * kv_lora_rank, P qk_rope_head_dim, D = R + P, N qk_nope_head_dim, L = N + P, V v_head_dim, PS
 * page_size, W page-table width. A slot is page * PS + offset, an absolute row of the cache.
 *
 * Shared rules.
 *  - Outputs are given by the caller and have exactly the shape stated. Inputs may be strided; the
 *    last dimension is contiguous. Outputs may not overlap inputs unless a comment allows it.
 *  - softmax_scale is required and any finite value but 0. logit_cap: 0 is off, otherwise s becomes
 *    cap * tanh(s / cap) after scaling; negative or not finite is an error.
 *  - LSE: natural logarithm of the sum of exp over the visible (scaled, capped) scores, f32. Where
 *    nothing is visible the LSE is -inf and the output exactly 0.
 *  - k_scale, for e4m3 and e5m2 caches: stored = saturate(x / k_scale); scores and output are both
 *    multiplied by it. Must be 1 for other formats. Finite and above 0.
 *  - Nothing past a live length, and no page-table entry past the live pages, is read. Lengths
 *    and tables are checked on the CPU (MLA_ERROR_CAPACITY, MLA_ERROR_ARGUMENT); CUDA clamps them.
 *  - Zero requests, zero tokens and zero lengths are legal: MLA_OK, and rows that see nothing
 *    get the empty state.
 *  - A row's result depends on its own query, keys and length only: batch mates, order, thread
 *    count, page ids and table width do not change a bit of it. Two exceptions, whose last bits
 *    follow the whole call (the same call gives the same bits): attention of the CUDA family
 *    "sm90a" is shared out among multiprocessors by the call's capacities and, in decode, by all
 *    its lengths; products of the family "cublas" are cut as cuBLAS sees fit for the number of
 *    tokens. Force the family "cuda" where batches must not matter.
 *  - Everything is read at the call, asynchronously on call.stream for CUDA tensors. No operator
 *    allocates memory, but for cuBLAS, which makes its handle at its first call in a CUDA context.
 *    Scratch comes from call.workspace, see mla_call and mla_workspace_bytes; of the built-in
 *    solutions only those of decode, extend and prefill need any.
 *  - Errors, beside those named: MLA_ERROR_VERSION (struct_size), MLA_ERROR_SHAPE, _FORMAT,
 *    _STRIDE, _DEVICE, _WORKSPACE, _UNSUPPORTED (no solution takes it; the sentence says why),
 *    _NOT_FOUND (call.solution). On an error nothing was written.
 */
#ifndef MLA_OPS_H
#define MLA_OPS_H

#include <mla/context.h>

/* name, value, spelling. */
#define MLA_OP_LIST(X)                                                                             \
    X(MLA_OP_DECODE, 1, "decode")                                                                  \
    X(MLA_OP_PREFILL, 2, "prefill")                                                                \
    X(MLA_OP_EXTEND, 3, "extend")                                                                  \
    X(MLA_OP_MERGE, 4, "merge")                                                                    \
    X(MLA_OP_WRITE, 5, "write")                                                                    \
    X(MLA_OP_GATHER, 6, "gather")                                                                  \
    X(MLA_OP_ROPE, 7, "rope")                                                                      \
    X(MLA_OP_ROPE_WRITE, 8, "rope_write")                                                          \
    X(MLA_OP_ABSORB, 9, "absorb")                                                                  \
    X(MLA_OP_PROJECT, 10, "project")                                                               \
    X(MLA_OP_PACK, 11, "pack")

typedef enum mla_op {
    MLA_OP_NONE = 0,
#define MLA_OP_ENTRY(name, value, text) name = value,
    MLA_OP_LIST(MLA_OP_ENTRY)
#undef MLA_OP_ENTRY
} mla_op;

/* What a call reads that only the device knows: name, value, the argument as a sentence calls it.
 */
#define MLA_LIVE_LIST(X)                                                                           \
    X(MLA_LIVE_CACHE_SEQLENS, 1, "cache_seqlens")                                                  \
    X(MLA_LIVE_GLOBAL_SEQLENS, 2, "global_seqlens")                                                \
    X(MLA_LIVE_CU_SEQLENS_Q, 3, "cu_seqlens_q")                                                    \
    X(MLA_LIVE_CU_SEQLENS_KV, 4, "cu_seqlens_kv")                                                  \
    X(MLA_LIVE_PAGE_TABLE, 5, "page_table")                                                        \
    X(MLA_LIVE_SLOTS, 6, "slots")                                                                  \
    X(MLA_LIVE_POSITIONS, 7, "positions")

typedef enum mla_live {
#define MLA_LIVE_ENTRY(name, value, text) name = value,
    MLA_LIVE_LIST(MLA_LIVE_ENTRY)
#undef MLA_LIVE_ENTRY
} mla_live;

/*
 * The error word of CUDA calls, in device memory: zeroed by the caller, filled with the first
 * violation that a call with call.device_error meets and then kept until the caller zeroes it. Read
 * it when the stream has passed the call; mla_device_error_status makes a status and a sentence of
 * a copy on the host.
 */
typedef struct mla_device_error {
    int32_t status; /* what the CPU would have returned (mla_status); 0 = no violation */
    int32_t live;   /* mla_live */
    int64_t row;    /* the request; of slots and positions the token */
    int64_t column; /* of page_table */
    int64_t value;  /* what stood there */
} mla_device_error;

/*
 * The first bytes of a CUDA workspace hold counters of the library's own solutions. They are zero
 * before the first use, each call leaves them as the next one needs them, and scratch of all
 * solutions, callers' rows included, lies behind them.
 */
#define MLA_CUDA_WORKSPACE_HEAD_BYTES 8192

/*
 * How a call runs; the same in every parameter struct. All zero is a good default.
 *
 * A CUDA workspace is zeroed once by the caller before its first use (cuMemsetD8Async; the first
 * MLA_CUDA_WORKSPACE_HEAD_BYTES will do) and serves one stream at a time: calls of any operators in
 * stream order may share it, calls that may overlap need one each. It is zeroed again only after a
 * kernel was cut off by a device error.
 */
typedef struct mla_call {
    const char *solution;     /* forced solutions for this call, or NULL (context.h) */
    void *stream;             /* CUstream for CUDA tensors; ignored on the CPU */
    void *workspace;          /* scratch, aligned to 64 bytes (256 on CUDA) */
    uint64_t workspace_bytes; /* at least what mla_workspace_bytes says */
    /* CUDA, NULL = off: validate mode. Lengths, cumulative lengths, page ids, slots and positions
     * are checked as on the CPU, by a small kernel before the operator's own, which clamps them all
     * the same. Fit for graph capture. */
    mla_device_error *device_error;
    void *reserved[3]; /* NULL */
} mla_call;

/*
 * What a solution is chosen by: formats, dims and capacities, nothing live. Made from a call's
 * parameters with mla_<op>_problem, then raised to a capacity where a caller plans for one.
 */
typedef struct mla_problem {
    uint32_t struct_size;
    int32_t op; /* mla_op */
    int32_t device_type;
    int32_t device_index;
    int32_t q_format;  /* decode, extend, prefill; the source's format for the others */
    int32_t kv_format; /* cache, or k and v; the weight for absorb and project */
    int32_t out_format;
    int32_t num_heads;        /* H */
    int32_t num_kv_heads;     /* Hk; 1 for decode and extend */
    int32_t kv_lora_rank;     /* R */
    int32_t qk_rope_head_dim; /* P */
    int32_t qk_nope_head_dim; /* N, where it matters */
    int32_t qk_head_dim;      /* prefill: L; merge: the width */
    int32_t v_head_dim;       /* V */
    int64_t page_size;
    int64_t batch;      /* B; merge: n_states */
    int64_t tokens;     /* T: query rows; rows for the others */
    int64_t max_q_len;  /* of one request */
    int64_t max_kv_len; /* of one request */
    int32_t is_causal;
    int32_t is_ragged;
    int32_t has_mask;
    int32_t has_lse;
    int32_t has_logit_cap;
    int32_t has_k_scale;    /* a k_scale other than 1 */
    int32_t has_positions;  /* a key position other than its index */
    int32_t is_split_cache; /* latent and rope in two tensors */
    int32_t layout;         /* decode, extend, prefill: bits of MLA_LAYOUT_*; 0 = the plainest */
    int32_t reserved0;      /* 0 */
} mla_problem;

/* A base or a stride (of an extent over 1) of q, k, v, cache or out is no multiple of 16 bytes, or
 * a stride is 0 or reaches 2^40 bytes. */
#define MLA_LAYOUT_UNALIGNED 1
/* q_rope is given and does not lie behind q's latent columns in the same rows. */
#define MLA_LAYOUT_SPLIT_QUERY 2
/* q, out or lse of [B, q_len, ..]: requests are not q_len token strides apart. */
#define MLA_LAYOUT_GAPPED_BATCH 4

#define MLA_PROBLEM_INIT                                                                           \
    {                                                                                              \
        .struct_size = sizeof(mla_problem)                                                         \
    }

#ifdef __cplusplus
extern "C" {
#endif

/* "decode" and so on; "unknown" otherwise. Static storage. */
MLA_API const char *mla_op_name(int32_t op);

/*
 * What an error word, copied to the host, says: its status and in diag the sentence; MLA_OK when it
 * is all zero. Error: MLA_ERROR_ARGUMENT (error is NULL).
 */
MLA_API mla_status mla_device_error_status(const mla_device_error *error, mla_diag *diag);

/* The operator spelled so, or MLA_OP_NONE. */
MLA_API int32_t mla_op_from_name(const char *name);

/*
 * Bytes of workspace that every call at or below this problem needs, whichever of the solutions
 * that this context may choose takes it. `solution` as in mla_call, or NULL. Monotonic: a call
 * whose batch, tokens, max_q_len and max_kv_len are no larger never needs more. Errors:
 * MLA_ERROR_ARGUMENT, MLA_ERROR_UNSUPPORTED, MLA_ERROR_NOT_FOUND, MLA_ERROR_CAPACITY (does not fit
 * 64 bits).
 */
MLA_API mla_status mla_workspace_bytes(mla_context *ctx, const mla_problem *problem,
                                       const char *solution, uint64_t *bytes, mla_diag *diag);

/* ---- attention over the paged latent cache ------------------------------------------------- */

/* First query token sees cache_seqlens - (its request's q_len - 1) keys: the last sees them all. */
#define MLA_SEQLEN_OFFSET_VERIFY INT32_MIN

/*
 * Parameters of mla_decode_with_kvcache and mla_extend_with_kvcache.
 *
 * Visible keys of query token j (0-based) of request b, with len = cache_seqlens[b]:
 *   causal:      the keys at positions below  len + seqlen_offset + j
 *                (MLA_SEQLEN_OFFSET_VERIFY stands for 1 - q_len of the request)
 *   not causal:  all len keys; with a mask, the len - q_len keys before the window and those window
 *                keys i (position len - q_len + i) whose mask[token, i] is not 0.
 * Bounds below 0 are 0. The caller promises that every row below a bound is live: with the verify
 * rule none lies past len; with a draft's (seqlen_offset 0) len is what the first token sees, and
 * the window's own q_len - 1 later rows were written before the call.
 *
 * A shard of a longer sequence (context parallel): local key i has the global position
 * key_position_first + i * key_position_stride. len above is taken from global_seqlens, also where
 * not causal, and bounds global positions: key i is visible when its position is below the bound
 * and i is below cache_seqlens, the live local rows. Live rows at or past the global length (a
 * rejected draft's) are seen by no token. first other than 0 or stride other than 1 need
 * global_seqlens.
 */
typedef struct mla_decode_params {
    uint32_t struct_size;
    int32_t kv_lora_rank;     /* R; also the width of the values */
    int32_t qk_rope_head_dim; /* P; 0 is allowed */
    int32_t is_causal;        /* 1 or 0 */
    int32_t seqlen_offset;    /* causal only */
    int32_t max_q_len;        /* ragged only: host-known bound of one request's q_len; 0 = T */
    int64_t max_seqlen_kv;    /* host-known bound of the visible keys; 0 = W * PS */
    float softmax_scale;
    float logit_cap;
    float k_scale;
    int32_t reserved0;         /* 0 */
    mla_tensor q;              /* [B, q_len, H, D]; ragged: [T, H, D]. f32 bf16 f16 e4m3 e5m2 */
    mla_tensor q_rope;         /* optional [.., H, P]: then q is [.., H, R] */
    mla_tensor kv_cache;       /* [pages, PS, D] or [pages, PS, 1, D]; ds656: last extent 656 */
    mla_tensor kv_cache_rope;  /* optional [pages, PS, P]: then kv_cache is [pages, PS, R] */
    mla_tensor page_table;     /* i32 [B, W]: pages of each request in order */
    mla_tensor cache_seqlens;  /* i32 [B]: live rows, this step's tokens included */
    mla_tensor cu_seqlens_q;   /* optional i32 [B + 1]: makes the call ragged */
    mla_tensor mask;           /* optional u8 [T, >= max q_len]; is_causal must be 0 */
    mla_tensor global_seqlens; /* optional i32 [B] */
    int64_t key_position_first;
    int64_t key_position_stride; /* >= 1 */
    mla_tensor out;              /* [B, q_len, H, R] or [T, H, R]: f32, bf16 or f16 */
    mla_tensor lse;              /* optional f32 [B, q_len, H] or [T, H] */
    mla_call call;
} mla_decode_params;

#define MLA_DECODE_PARAMS_INIT                                                                     \
    {                                                                                              \
        .struct_size = sizeof(mla_decode_params), .is_causal = 1,                                  \
        .seqlen_offset = MLA_SEQLEN_OFFSET_VERIFY, .k_scale = 1.0f, .key_position_stride = 1       \
    }

/*
 * Absorbed attention: out = softmax(scale * q . row) x row[:R], per head, over the paged cache; the
 * caller applies W_UV afterwards (mla_project_value). With u = W_UK^T q_nope this equals attention
 * over expanded keys and values (DeepSeek-V2, arXiv 2405.04434, section 2.1). Any H, PS, R, P; any
 * W that covers the lengths; rank-4 and rank-3 caches are the same thing. Errors:
 * MLA_ERROR_CAPACITY when a length needs more pages than W or is over max_seqlen_kv, a page id is
 * outside the pool (CPU), cu_seqlens_q does not end at T or a q_len is over max_q_len.
 */
MLA_API mla_status mla_decode_with_kvcache(mla_context *ctx, const mla_decode_params *params,
                                           mla_diag *diag);

/*
 * Absorbed multi-token attention with a causal suffix: as above with cu_seqlens_q required,
 * is_causal 1 and seqlen_offset MLA_SEQLEN_OFFSET_VERIFY: query i of a request sees prefix + i + 1
 * rows. Meant for many tokens a request (short prompts over a long cached prefix).
 */
MLA_API mla_status mla_extend_with_kvcache(mla_context *ctx, const mla_decode_params *params,
                                           mla_diag *diag);

/* ---- attention over explicit q, k, v --------------------------------------------------------- */

typedef struct mla_prefill_params {
    uint32_t struct_size;
    int32_t is_causal;    /* bottom-right: query i sees keys j <= i + max(kv_len - q_len, 0) */
    int32_t max_seqlen_q; /* host-known bounds; 0 = Tq / Tkv */
    int32_t max_seqlen_kv;
    float softmax_scale;
    float logit_cap;
    float k_scale;            /* fp8 k: scores are multiplied by it */
    float v_scale;            /* fp8 v: the output is multiplied by it */
    mla_tensor q;             /* [Tq, H, L]: f32 bf16 f16 e4m3 e5m2 */
    mla_tensor k;             /* [Tkv, Hk, L]; H is a multiple of Hk, head h reads h / (H / Hk) */
    mla_tensor v;             /* [Tkv, Hk, V], the format of k */
    mla_tensor cu_seqlens_q;  /* i32 [B + 1] */
    mla_tensor cu_seqlens_kv; /* i32 [B + 1] */
    mla_tensor out;           /* [Tq, H, V]: f32, bf16 or f16 */
    mla_tensor lse;           /* optional f32 [Tq, H] */
    mla_call call;
} mla_prefill_params;

#define MLA_PREFILL_PARAMS_INIT                                                                    \
    {                                                                                              \
        .struct_size = sizeof(mla_prefill_params), .is_causal = 1, .k_scale = 1.0f,                \
        .v_scale = 1.0f                                                                            \
    }

/*
 * Ragged attention over explicit q, k, v. Error, beside the shared ones: MLA_ERROR_CAPACITY when
 * the cumulative lengths do not start at 0, fall, or end at another value than Tq / Tkv (CPU).
 */
MLA_API mla_status mla_prefill(mla_context *ctx, const mla_prefill_params *params, mla_diag *diag);

/* ---- merging partial attention --------------------------------------------------------------- */

#define MLA_MERGE_MAX_STATES 64

/*
 * n states (out_i [T, H, d], lse_i f32 [T, H]) -> one: m = max lse_i, w_i = exp(lse_i - m),
 * out = sum w_i out_i / sum w_i, lse = m + ln sum w_i, in f32, in index order. A state with lse
 * -inf (or +inf, as some kernels write it) is empty: its out is not used. All empty: out 0, lse
 * -inf. One non-empty state passes unchanged bit for bit. A NaN lse is not empty: beside another
 * non-empty state it makes out and lse of that row NaN. out may be outs[0] and lse lses[0], or
 * overlap nothing. Strides of each operand are its own.
 */
typedef struct mla_merge_state_params {
    uint32_t struct_size;
    int32_t n_states;       /* 1..MLA_MERGE_MAX_STATES */
    const mla_tensor *outs; /* n_states of [T, H, d], f32 bf16 f16, all the same format */
    const mla_tensor *lses; /* n_states of f32 [T, H] */
    mla_tensor out;         /* [T, H, d]: f32 bf16 f16 */
    mla_tensor lse;         /* optional f32 [T, H] */
    mla_call call;
} mla_merge_state_params;

#define MLA_MERGE_STATE_PARAMS_INIT                                                                \
    {                                                                                              \
        .struct_size = sizeof(mla_merge_state_params)                                              \
    }

MLA_API mla_status mla_merge_state(mla_context *ctx, const mla_merge_state_params *params,
                                   mla_diag *diag);

/* ---- rows in and out of the cache ------------------------------------------------------------ */

/*
 * NaN becomes 0, and what would be infinite in the cache's format (ds656: in bf16) its largest
 * finite value, so that a bad row cannot spread.
 */
#define MLA_WRITE_SANITIZE 1

/*
 * Row i of latent (R) and rope (P) goes to slot slots[i], converted to the cache's format (fp8
 * saturates, after division by k_scale; ds656: R 512, P 64, scale = max|x| / 448 of each 128
 * values, 1 for a zero tile, rope part as bf16). Negative slots are skipped. Equal slots: one of
 * the rows.
 */
typedef struct mla_write_kv_params {
    uint32_t struct_size;
    int32_t flags; /* 0 or MLA_WRITE_SANITIZE */
    float k_scale;
    int32_t reserved0;
    mla_tensor latent;        /* [T, R] or [T, 1, R]; without rope: [T, D] or [T, 1, D] */
    mla_tensor rope;          /* optional [T, P] or [T, 1, P], the format of latent: f32 bf16 f16 */
    mla_tensor slots;         /* i32 or i64 [T]; over the pool's rows: MLA_ERROR_CAPACITY (CPU) */
    mla_tensor kv_cache;      /* as in mla_decode_params; written */
    mla_tensor kv_cache_rope; /* as in mla_decode_params; written */
    int32_t kv_lora_rank;     /* R */
    int32_t qk_rope_head_dim; /* P */
    mla_call call;
} mla_write_kv_params;

#define MLA_WRITE_KV_PARAMS_INIT                                                                   \
    {                                                                                              \
        .struct_size = sizeof(mla_write_kv_params), .k_scale = 1.0f                                \
    }

MLA_API mla_status mla_write_kv(mla_context *ctx, const mla_write_kv_params *params,
                                mla_diag *diag);

/* Row i of the outputs is slot slots[i] times k_scale, in their format; a negative slot gives 0. */
typedef struct mla_gather_kv_params {
    uint32_t struct_size;
    float k_scale;
    mla_tensor kv_cache;
    mla_tensor kv_cache_rope;
    mla_tensor slots;     /* i32 or i64 [T] */
    mla_tensor latent;    /* [T, R] or [T, 1, R]; without rope: [T, D]: f32 bf16 f16 e4m3 e5m2 */
    mla_tensor rope;      /* optional [T, P] or [T, 1, P], the format of latent */
    int32_t kv_lora_rank; /* R */
    int32_t qk_rope_head_dim; /* P */
    mla_call call;
} mla_gather_kv_params;

#define MLA_GATHER_KV_PARAMS_INIT                                                                  \
    {                                                                                              \
        .struct_size = sizeof(mla_gather_kv_params), .k_scale = 1.0f                               \
    }

MLA_API mla_status mla_gather_kv(mla_context *ctx, const mla_gather_kv_params *params,
                                 mla_diag *diag);

/* ---- rotary position embedding --------------------------------------------------------------- */

/*
 * Rotates x [T, H, P] (or [T, P]) at positions[t] with the angle tables cos and sin [max_pos, P /
 * 2] of f32, into which a caller folds whatever scaling it uses (YaRN). Math in f32, rounded once.
 *   interleaved (GPT-J): y[2i] = x[2i] c_i - x[2i+1] s_i ;  y[2i+1] = x[2i+1] c_i + x[2i] s_i
 *   half-split (NeoX):   y[i] = x[i] c_i - x[i+P/2] s_i ;   y[i+P/2] = x[i+P/2] c_i + x[i] s_i
 * The attention does not care which is used as long as queries and keys agree.
 */
typedef struct mla_rope_params {
    uint32_t struct_size;
    int32_t is_interleaved; /* 1 or 0 */
    mla_tensor x;           /* [T, H, P] or [T, P]: f32 bf16 f16; P even */
    mla_tensor positions;   /* i32 or i64 [T]; outside the tables: MLA_ERROR_CAPACITY (CPU) */
    mla_tensor cos; /* f32 [max_pos, P / 2]; any row stride, so halves of one table will do */
    mla_tensor sin;
    mla_tensor out; /* the shape of x; may be x itself; f32 bf16 f16 e4m3 e5m2 (saturating) */
    mla_call call;
} mla_rope_params;

#define MLA_ROPE_PARAMS_INIT                                                                       \
    {                                                                                              \
        .struct_size = sizeof(mla_rope_params), .is_interleaved = 1                                \
    }

MLA_API mla_status mla_rope(mla_context *ctx, const mla_rope_params *params, mla_diag *diag);

/*
 * One pass over a step's new tokens: rotates q_pe, rotates k_pe, writes (latent, rotated k_pe) to
 * the cache. Equals mla_rope on q_pe, mla_rope on k_pe in f32, mla_write_kv of both, but rounds
 * k_pe once, to the cache's format.
 */
typedef struct mla_rope_write_kv_params {
    uint32_t struct_size;
    int32_t is_interleaved;
    int32_t flags; /* 0 or MLA_WRITE_SANITIZE */
    float k_scale;
    mla_tensor q_pe;     /* optional [T, H, P] */
    mla_tensor q_pe_out; /* with q_pe: the same shape; may be q_pe itself */
    mla_tensor latent;   /* [T, R] or [T, 1, R] */
    mla_tensor k_pe;     /* [T, P] or [T, 1, P], not yet rotated, the format of latent */
    mla_tensor k_pe_out; /* optional: rotated k_pe, the shape of k_pe; may be k_pe itself */
    mla_tensor positions;
    mla_tensor cos;
    mla_tensor sin;
    mla_tensor slots;
    mla_tensor kv_cache;
    mla_tensor kv_cache_rope;
    int32_t kv_lora_rank;
    int32_t qk_rope_head_dim;
    mla_call call;
} mla_rope_write_kv_params;

#define MLA_ROPE_WRITE_KV_PARAMS_INIT                                                              \
    {                                                                                              \
        .struct_size = sizeof(mla_rope_write_kv_params), .is_interleaved = 1, .k_scale = 1.0f      \
    }

MLA_API mla_status mla_rope_write_kv(mla_context *ctx, const mla_rope_write_kv_params *params,
                                     mla_diag *diag);

/* ---- the small projections of the absorbed path ---------------------------------------------- */

/*
 * out[t, h, :] = q_nope[t, h, :] x w_uk[h]: [N] x [N, R]. out is usually the first R columns of the
 * absorbed query [T, H, D]; mla_rope writes its last P columns.
 */
typedef struct mla_absorb_query_params {
    uint32_t struct_size;
    int32_t reserved0;
    mla_tensor q_nope; /* [T, H, N]: f32 bf16 f16 */
    mla_tensor w_uk;   /* [H, N, R], R or N contiguous; the format of q_nope, or f32 */
    mla_tensor out;    /* [T, H, R]: f32 bf16 f16 e4m3 e5m2 (saturating) */
    mla_call call;
} mla_absorb_query_params;

#define MLA_ABSORB_QUERY_PARAMS_INIT                                                               \
    {                                                                                              \
        .struct_size = sizeof(mla_absorb_query_params)                                             \
    }

MLA_API mla_status mla_absorb_query(mla_context *ctx, const mla_absorb_query_params *params,
                                    mla_diag *diag);

/*
 * out[t, h, :] = latent[t, h, :] x w_uv[h]: [R] x [R, V]; with a gate g, each value is rounded to
 * out's format and then multiplied by 1 / (1 + exp(-g)) in f32. Both weights can be views of
 * kv_b_proj.weight [H, N + V, R]: w_uk its rows [:N], w_uv its rows [N:] with strides (.., 1, R).
 */
typedef struct mla_project_value_params {
    uint32_t struct_size;
    int32_t reserved0;
    mla_tensor latent; /* [T, H, R]: f32 bf16 f16 */
    mla_tensor w_uv;   /* [H, R, V], V or R contiguous; the format of latent, or f32 */
    mla_tensor gate;   /* optional [T, H * V]: f32 bf16 f16 */
    mla_tensor out;    /* [T, H, V] or [T, H * V]: f32 bf16 f16 */
    mla_call call;
} mla_project_value_params;

#define MLA_PROJECT_VALUE_PARAMS_INIT                                                              \
    {                                                                                              \
        .struct_size = sizeof(mla_project_value_params)                                            \
    }

MLA_API mla_status mla_project_value(mla_context *ctx, const mla_project_value_params *params,
                                     mla_diag *diag);

/*
 * k[t, h] = [k_nope[t, h] | k_pe[t]], the one rope key broadcast to all heads; with v also a copy
 * of v. fp8 outputs: saturate(x / k_scale), saturate(x / v_scale).
 */
typedef struct mla_pack_kv_params {
    uint32_t struct_size;
    float k_scale;
    float v_scale;
    int32_t reserved0;
    mla_tensor k_nope; /* [T, H, N]: f32 bf16 f16 */
    mla_tensor k_pe;   /* [T, P] or [T, 1, P]: f32 bf16 f16 */
    mla_tensor v;      /* optional [T, H, V] */
    mla_tensor k_out;  /* [T, H, N + P]: f32 bf16 f16 e4m3 e5m2 */
    mla_tensor v_out;  /* with v: [T, H, V], the format of k_out */
    mla_call call;
} mla_pack_kv_params;

#define MLA_PACK_KV_PARAMS_INIT                                                                    \
    {                                                                                              \
        .struct_size = sizeof(mla_pack_kv_params), .k_scale = 1.0f, .v_scale = 1.0f                \
    }

MLA_API mla_status mla_pack_kv(mla_context *ctx, const mla_pack_kv_params *params, mla_diag *diag);

/* ---- from a call to its problem -------------------------------------------------------------- */

/*
 * Fills *problem from parameters whose shapes and formats are set (pointers may be NULL). The same
 * checks as the call's own, less those of live values. Errors: as the call's.
 */
MLA_API mla_status mla_decode_problem(const mla_decode_params *params, mla_problem *problem,
                                      mla_diag *diag);
MLA_API mla_status mla_extend_problem(const mla_decode_params *params, mla_problem *problem,
                                      mla_diag *diag);
MLA_API mla_status mla_prefill_problem(const mla_prefill_params *params, mla_problem *problem,
                                       mla_diag *diag);
MLA_API mla_status mla_merge_state_problem(const mla_merge_state_params *params,
                                           mla_problem *problem, mla_diag *diag);
MLA_API mla_status mla_write_kv_problem(const mla_write_kv_params *params, mla_problem *problem,
                                        mla_diag *diag);
MLA_API mla_status mla_gather_kv_problem(const mla_gather_kv_params *params, mla_problem *problem,
                                         mla_diag *diag);
MLA_API mla_status mla_rope_problem(const mla_rope_params *params, mla_problem *problem,
                                    mla_diag *diag);
MLA_API mla_status mla_rope_write_kv_problem(const mla_rope_write_kv_params *params,
                                             mla_problem *problem, mla_diag *diag);
MLA_API mla_status mla_absorb_query_problem(const mla_absorb_query_params *params,
                                            mla_problem *problem, mla_diag *diag);
MLA_API mla_status mla_project_value_problem(const mla_project_value_params *params,
                                             mla_problem *problem, mla_diag *diag);
MLA_API mla_status mla_pack_kv_problem(const mla_pack_kv_params *params, mla_problem *problem,
                                       mla_diag *diag);

#ifdef __cplusplus
}
#endif
#endif
