/*
 * What the host tells the kernel that checks live values (validate.cu): one struct, passed by
 * value. Plain C11 and CUDA both read this file. An index whose data is null is not checked.
 */
#ifndef MLAI_CUDA_VALIDATE_PARAMS_H
#define MLAI_CUDA_VALIDATE_PARAMS_H

#include "cuda/kernels/rows.h"
#include <mla/ops.h>

typedef struct mlai_validate_params {
    mla_device_error *error;
    mlai_cuda_index cu_q, cu_kv;     /* [batch + 1] */
    mlai_cuda_index seqlens, global; /* [batch]; global: null = seqlens */
    mlai_cuda_index slots, positions;
    const int32_t *page_table;
    int64_t table_stride;
    int64_t batch;
    int64_t tokens_q, tokens_kv;   /* where cumulative lengths end */
    int64_t max_q_len, max_kv_len; /* of a request; without cu_q, q_len */
    int64_t pages, page_size;      /* of kv_cache */
    int64_t capacity;              /* keys that a row of page_table holds */
    int64_t position_first, position_stride;
    int64_t n_slots, slot_end;         /* slots below slot_end; negative ones are allowed */
    int64_t n_positions, position_end; /* positions 0 to position_end - 1 */
    int32_t is_causal, has_offset, seqlen_offset, has_positions;
} mlai_validate_params;

enum { MLAI_VALIDATE_THREADS = 256 };

#endif
