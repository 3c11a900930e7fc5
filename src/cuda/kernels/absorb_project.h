/*
 * What the host tells the absorb and project kernels: out[t, h, :] = x[t, h, :] w[h], [K] x [K, n].
 * Plain C11 and CUDA both read this file. Strides count elements of the operand's format.
 *
 *   mla_product_{bf16,f16}_rows   w with n contiguous   one 16-bit format, 16-byte aligned
 *   mla_product_{bf16,f16}_dots   w with K contiguous   likewise
 *   mla_product_f32               any formats and strides, by FMA
 */
#ifndef MLAI_ABSORB_PROJECT_H
#define MLAI_ABSORB_PROJECT_H

#include <stdint.h>

typedef struct mlai_product_rows {
    char *data;
    int64_t token_stride, head_stride;
    int32_t format;
} mlai_product_rows;

typedef struct mlai_product_params {
    mlai_product_rows x, out, gate; /* gate.data null: none */
    const char *w;
    int64_t w_head_stride, w_k_stride, w_n_stride;
    int64_t tokens;
    int64_t items; /* token tiles * column tiles * heads */
    int64_t token_tiles;
    int32_t column_tiles;
    int32_t heads, depth, columns; /* H, K, n */
    int32_t w_format;
    int32_t out_pairs; /* two outputs at once are aligned */
} mlai_product_params;

enum {
    MLAI_PRODUCT_THREADS = 256,
    MLAI_PRODUCT_ROWS = 64,
    MLAI_PRODUCT_COLUMNS = 128,
    MLAI_PRODUCT_DEPTH = 64,
    MLAI_PRODUCT_STAGES = 3,
    MLAI_PRODUCT_SMEM_BYTES =
        MLAI_PRODUCT_STAGES * MLAI_PRODUCT_DEPTH * (MLAI_PRODUCT_ROWS + MLAI_PRODUCT_COLUMNS) * 2,
    MLAI_PRODUCT_F32_TILE = 64
};

#endif
