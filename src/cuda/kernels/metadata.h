/*
 * What the host tells the metadata kernels (metadata.cu): plain structs, passed by value. Plain C11
 * and CUDA both read this file.
 */
#ifndef MLAI_CUDA_METADATA_PARAMS_H
#define MLAI_CUDA_METADATA_PARAMS_H

#include "cuda/kernels/rows.h"

enum { MLAI_METADATA_THREADS = 256 };

/* out[i, :] = table[index[i], :columns], the columns past the table's 0 */
typedef struct mlai_gather_pages_params {
    const int32_t *table;
    int64_t table_rows, table_columns, table_stride;
    mlai_cuda_index index;
    int32_t *out;
    int64_t rows, columns, out_stride;
} mlai_gather_pages_params;

/* slots of window k of request i: starts[k] + cumulative[k, i] + 0, 1, ... */
typedef struct mlai_fill_windows_params {
    const int32_t *table;
    int64_t table_rows, table_columns, table_stride;
    mlai_cuda_index index;
    const int32_t *cumulative; /* [windows, requests + 1] */
    const int64_t *starts;     /* [windows] */
    int64_t *slots;
    int64_t windows, requests;
    int64_t window_tokens;
    int64_t page_size;
} mlai_fill_windows_params;

/* Positions, slots, lengths and their running sum; outputs that are not wanted have no data. */
typedef struct mlai_fill_tokens_params {
    const int32_t *table;
    int64_t table_rows, table_columns, table_stride;
    mlai_cuda_index index, cached_lens, new_lens;
    mlai_cuda_index positions, slots; /* [tokens] */
    mlai_cuda_index seq_lens;         /* [requests] */
    mlai_cuda_index cumulative;       /* [requests + 1] */
    int64_t requests, tokens;
    int64_t page_size;
} mlai_fill_tokens_params;

/* out[t, h, :] = in[t, h, :] in out's format, saturating */
typedef struct mlai_cast_params {
    mlai_cuda_rows in, out;
    int64_t tokens, heads;
    int64_t width;
    int32_t wide;
} mlai_cast_params;

typedef struct mlai_count_step_params {
    uint64_t *count;
    uint64_t *mirror; /* on the host */
} mlai_count_step_params;

#endif
