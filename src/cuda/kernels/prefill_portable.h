/*
 * What the host tells the portable prefill kernels: one struct, passed by value. Plain C11 and CUDA
 * both read this file. Strides count elements of the operand's format.
 *
 *   mla_prefill_{bf16,f16}_128   L <= 128, V <= 128    128 rows a block, two tiles of 64 keys
 *   mla_prefill_{bf16,f16}_192   L <= 192, V <= 128    likewise
 *   mla_prefill_{bf16,f16}_256   L <= 256, V <= 256    64 rows a block, one tile of 64 keys
 *   mla_prefill_f32              L <= 512, V <= 512    16 rows a block, 16 keys, any formats
 */
#ifndef MLAI_PREFILL_PORTABLE_H
#define MLAI_PREFILL_PORTABLE_H

#include <stdint.h>

/* Rows (token, head). */
typedef struct mlai_prefill_rows {
    char *data;
    int64_t token_stride, head_stride;
} mlai_prefill_rows;

typedef struct mlai_prefill_portable_params {
    mlai_prefill_rows q, k, v, out, lse; /* lse.data null: not wanted */
    const int32_t *cu_q, *cu_kv;
    int64_t cu_q_stride, cu_kv_stride;
    int64_t batch, tokens_q, tokens_kv;
    int64_t items;                 /* blocks_of_request * key_heads * batch */
    int32_t blocks_of_request;     /* at most, of one key head */
    int32_t max_q_len, max_kv_len; /* cumulative lengths are clamped to them */
    int32_t key_heads, group;      /* query heads of a key head */
    int32_t n_qk, n_v;             /* L, V */
    int32_t q_format, kv_format, out_format;
    int32_t q_wide, kv_wide, out_pairs; /* 16-byte accesses, two outputs at once are aligned */
    int32_t is_causal;
    float scale; /* softmax_scale * k_scale */
    float logit_cap;
    float out_scale; /* v_scale */
} mlai_prefill_portable_params;

enum {
    MLAI_PREFILL_KEYS = 64,
    MLAI_PREFILL_MAX_DIM = 256,
    MLAI_PREFILL_F32_MAX_DIM = 512,
    MLAI_PREFILL_F32_ROWS = 16,
    MLAI_PREFILL_F32_KEYS = 16
};

/* Shared memory of the kernel for L and V as in the kernel's name; rows of 64 values' multiples. */
static inline uint32_t mlai_prefill_smem_bytes(uint32_t qk, uint32_t v)
{
    const uint32_t tile = MLAI_PREFILL_KEYS * (qk + v) * 2;
    const uint32_t queries = (qk > 192 ? 64 : 128) * qk * 2;
    if (qk > 192)
        return queries + tile;
    return tile + (queries > tile ? queries : tile);
}

/* q and k rows of L + 4, v rows of V, both rounded to 4; P, rescales and sums. */
static inline uint32_t mlai_prefill_f32_smem_bytes(uint32_t qk, uint32_t v)
{
    const uint32_t qk4 = (qk + 3) / 4 * 4 + 4, v4 = (v + 3) / 4 * 4;
    return (32 * qk4 + 16 * v4 + 16 * 16 + 32) * 4;
}

#endif
