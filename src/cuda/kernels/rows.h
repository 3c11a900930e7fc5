/*
 * What the host tells the portable row kernels (rows.cu): plain structs, passed by value. Plain C11
 * and CUDA both read this file. Formats are mla_format values; strides count elements of the format
 * (bytes for ds656). `wide` says that every base and stride is a multiple of 16 bytes and every
 * width a multiple of 8 values, so that 8 values move at once.
 */
#ifndef MLAI_CUDA_ROWS_PARAMS_H
#define MLAI_CUDA_ROWS_PARAMS_H

#include <stdint.h>

/* Chunks of 8 values that a lane has under way at once: 64 bytes. */
#define MLAI_ROWS_IN_FLIGHT(is_f32) ((is_f32) ? 2 : 4)

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
    int32_t copies; /* wide, and nothing is converted */
    int32_t group;  /* tokens that a warp has at a time, 1 to 32 */
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
    int32_t wide;          /* P is 16 times a power of two, tables are aligned too */
    int32_t lanes;         /* P / 16, with `wide` */
    int32_t heads_of_part; /* heads that a warp has at a time: 1 without `wide` */
    int32_t parts;         /* of a token's heads */
} mlai_cuda_rope_params;

/* rope_write: q_pe and k_pe rotated, latent and k_pe into the cache. */
typedef struct mlai_cuda_rope_write_params {
    mlai_cuda_rope_params q;   /* parts 0 = no queries */
    mlai_cuda_write_params kv; /* rope: k_pe, not rotated */
    mlai_cuda_rows k_out;      /* data null = not wanted */
    int32_t k_wide;            /* as q.wide, of k_pe, k_out and the cache's rope part */
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
    int32_t lanes; /* of a row: a power of two */
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
