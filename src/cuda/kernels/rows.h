/*
 * What the host tells the portable row kernels (rows.cu): plain structs, passed by value. Plain C11
 * and CUDA both read this file. Formats are mla_format values; strides count elements of the format
 * (bytes for ds656). `wide` says that every base and stride is a multiple of 16 bytes and every
 * width a multiple of 8 values, so that 8 values move at once.
 */
#ifndef MLAI_CUDA_ROWS_PARAMS_H
#define MLAI_CUDA_ROWS_PARAMS_H

#include <stdint.h>

/* A cache of pages; the rope part may lie in the same rows. */
typedef struct mlai_cuda_cache {
    char *latent;
    char *rope;
    int64_t page_bytes, row_bytes;
    int64_t rope_page_bytes, rope_row_bytes;
    int64_t rows; /* slots that exist; others are skipped */
    int32_t page_size;
    int32_t n_latent, n_rope;
    int32_t format;
    float k_scale;
    int32_t sanitize;
} mlai_cuda_cache;

/* Slots or positions. */
typedef struct mlai_cuda_index {
    const void *data;
    int64_t stride;
    int32_t is_i64;
} mlai_cuda_index;

/* Rows [tokens] or [tokens, heads] of one width. */
typedef struct mlai_cuda_rows {
    char *data;
    int64_t stride0, stride1; /* token, head */
    int32_t format;
} mlai_cuda_rows;

typedef struct mlai_cuda_write_params {
    mlai_cuda_cache cache;
    mlai_cuda_index slots;
    mlai_cuda_rows latent, rope; /* sources (write) or destinations (gather) */
    int64_t tokens;
    int32_t wide;
} mlai_cuda_write_params;

typedef struct mlai_cuda_rope_params {
    mlai_cuda_rows x, out;
    mlai_cuda_index positions;
    const float *cos, *sin;
    int64_t cos_stride, sin_stride;
    int64_t max_positions; /* rows of the tables; others are clamped */
    int64_t tokens;
    int32_t heads;
    int32_t width; /* P */
    int32_t is_interleaved;
} mlai_cuda_rope_params;

/* rope_write: q_pe and k_pe rotated, latent and k_pe into the cache. */
typedef struct mlai_cuda_rope_write_params {
    mlai_cuda_rope_params q;   /* heads 0 = no queries */
    mlai_cuda_write_params kv; /* rope: k_pe, not rotated */
    mlai_cuda_rows k_out;      /* data null = not wanted */
} mlai_cuda_rope_write_params;

enum { MLAI_CUDA_MERGE_STATES = 64 };

typedef struct mlai_cuda_merge_params {
    const void *outs[MLAI_CUDA_MERGE_STATES];
    const float *lses[MLAI_CUDA_MERGE_STATES];
    int64_t out_strides[MLAI_CUDA_MERGE_STATES][2]; /* token, head */
    int64_t lse_strides[MLAI_CUDA_MERGE_STATES][2];
    mlai_cuda_rows out;
    float *lse; /* or null */
    int64_t lse_stride0, lse_stride1;
    int64_t tokens;
    int32_t n_states;
    int32_t heads;
    int32_t width;
    int32_t in_format;
    int32_t wide;
} mlai_cuda_merge_params;

typedef struct mlai_cuda_pack_params {
    mlai_cuda_rows k_nope, k_pe, v, k_out, v_out; /* v_out.data null = no v */
    int64_t tokens;
    int32_t heads;
    int32_t n_nope, n_rope, n_v;
    float k_scale, v_scale;
    int32_t wide;
} mlai_cuda_pack_params;

#endif
