/*
 * What the host tells the Hopper prefill kernels: one parameter struct, passed by value, and the
 * figures of a launch. Plain C11 and CUDA both read this file.
 *
 *   prefill_{bf16,f16}_sm90a[_general]        prefill_bf16_sm90a.cu: 128 query rows a tile
 *       384 threads, MLAI_PREFILL_SM90A_SMEM_BYTES, min(SMs, q_heads x batch x
 *       ceil(max_seqlen_q / 128)) CTAs; draws its tiles from `counters`
 *   prefill_short_{bf16,f16}_sm90a[_general]  prefill_short_bf16_sm90a.cu: 64 query rows a cluster
 *       384 threads, MLAI_PREFILL_SHORT_SM90A_SMEM_BYTES, clusters of 1, 2, 4 or 8 CTAs,
 *       (cluster x q_heads, batch, ceil(max_seqlen_q / 64)) CTAs, the latter two under 2^16
 * `_general` takes any finite softmax scale but 0 and a logit cap; the others scale > 0 and no cap.
 * q [total_q, q_heads, 192], k [total_kv, kv_heads, 192], v [total_kv, kv_heads, 128],
 * out [total_q, q_heads, 128], lse [total_q, q_heads]; strides in elements, last dim contiguous;
 * bases and strides of q, k, v, out multiples of 16 bytes, strides of q, k, v under 2^40 bytes;
 * tiles of a launch (q_heads x batch x ceil(max_seqlen_q / 128)) under 2^31.
 *
 * A tensor map has five dims, so that the copy engine itself ends a tile at the request's last row:
 *   dim 0  64 elements (128 bytes, one swizzle line)
 *   dim 1  `window` rows, stride = row stride      dim 2  rows + 1, stride = row stride
 *   dim 3  head_dim / 64 pieces, stride 128 bytes  dim 4  heads, stride = head stride
 *   base address: `window` rows before the tensor; 128-byte swizzle; out of bounds reads as zero
 * A window of `live` rows from row `start` is the box at (0, window - live, start + live, 0, head):
 * its row r has the address of the tensor's row start + r, and the rows from `live` on lie past the
 * end of dim 1: zero in shared memory, never read.
 */
#ifndef MLAI_PREFILL_SM90A_H
#define MLAI_PREFILL_SM90A_H

#include <stdint.h>

#ifdef __cplusplus
#define MLAI_PREFILL_ALIGN64 alignas(64)
#else
#define MLAI_PREFILL_ALIGN64 _Alignas(64)
#endif

/* The driver's CUtensorMap: 128 opaque bytes at a multiple of 64. */
typedef struct mlai_prefill_sm90a_map {
    MLAI_PREFILL_ALIGN64 uint64_t opaque[16];
} mlai_prefill_sm90a_map;

typedef struct mlai_prefill_sm90a_params {
    mlai_prefill_sm90a_map q_map; /* window 64, box (64, 64, 1, 3, 1) */
    mlai_prefill_sm90a_map k_map; /* window = keys a block, box (64, keys a block, 1, 3, 1) */
    mlai_prefill_sm90a_map v_map; /* window = keys a block, box (64, keys a block, 1, 2, 1) */
    const int32_t *cu_seqlens_q;  /* [batch + 1], ascending, on the device */
    const int32_t *cu_seqlens_kv; /* [batch + 1], ascending, on the device */
    const void *q, *k, *v;        /* as the maps have them; read where a hidden key spoils a row */
    void *out;                    /* in q's format */
    float *lse;                   /* or null */
    uint32_t *counters; /* two words, zeroed once, left zero by each launch; one pair a stream */
    int64_t q_token_stride, q_head_stride;
    int64_t k_token_stride, k_head_stride;
    int64_t v_token_stride, v_head_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t lse_token_stride;
    int32_t batch;
    int32_t q_heads;
    int32_t kv_heads;
    int32_t total_q; /* rows of q, k, v: what the cumulative lengths are clamped to */
    int32_t total_kv;
    int32_t max_seqlen_q;
    int32_t max_seqlen_kv;
    int32_t causal;
    float softmax_scale;
    float logit_cap; /* 0: none */
} mlai_prefill_sm90a_params;

enum {
    MLAI_PREFILL_SM90A_QK_DIM = 192,
    MLAI_PREFILL_SM90A_V_DIM = 128,
    MLAI_PREFILL_SM90A_THREADS = 384,

    MLAI_PREFILL_SM90A_ROWS = 128,
    MLAI_PREFILL_SM90A_KEYS = 128,
    MLAI_PREFILL_SM90A_STAGES = 2,
    /* Q, the K ring, the V ring, the output on its way, barriers and tile records, room to align
     * the base to 1024 */
    MLAI_PREFILL_SM90A_SMEM_BYTES = 128 * 192 * 2 + 2 * 128 * (192 + 128) * 2 + 16384 + 448 + 1024,

    MLAI_PREFILL_SHORT_SM90A_ROWS = 64,
    MLAI_PREFILL_SHORT_SM90A_KEYS = 64,
    MLAI_PREFILL_SHORT_SM90A_STAGES = 4,
    /* Q, the K ring, the V ring (later the partials), barriers, alignment */
    MLAI_PREFILL_SHORT_SM90A_SMEM_BYTES = 64 * 192 * 2 + 4 * 64 * (192 + 128) * 2 + 256 + 1024
};

#endif
