/*
 * What the host needs for the Hopper decode kernels over 8-bit caches, beside decode_sm90a.h, whose
 * parameter struct they take. Plain C11 and CUDA both read this file.
 *
 *   decode_bf16_e4m3_sm90a_r{8,16,32}[_gather]    q bf16, cache e4m3
 *   decode_e4m3_sm90a_r{8,16,32,64}[_gather]      q and cache e4m3, out bf16
 *   decode_bf16_ds656_sm90a_r{8,16,32}[_gather]   q bf16, cache rows of 656 bytes
 *
 * Differences: no cluster kernels, tiles of 64 rows only for e4m3 queries; kv strides count bytes,
 * which are the elements; `k_scale` is 1 for ds656. The tensor map has 8-bit elements: dims (576 or
 * 656, page_size, pages), box (128, box_rows, 1), 128-byte swizzle, box_rows = min(page_size, 64).
 */
#ifndef MLAI_DECODE_FP8_SM90A_H
#define MLAI_DECODE_FP8_SM90A_H

#include "decode_sm90a.h"

enum { MLAI_DECODE_FP8_ROW_BYTES = 576, MLAI_DECODE_FP8_DS656_ROW_BYTES = 656 };

#define MLAI_DECODE_FP8_THREADS 512

/* A block of 64 keys: five swizzled chunks of 128 bytes a key; ds656 also has 1 KiB of scales and,
 * at 32 rows, room for the other copies of P. */
#define MLAI_DECODE_FP8_STAGE_BYTES(rows, is_ds656)                                                \
    (5 * 8192 + ((is_ds656) ? 1024 + ((rows) == 32 ? 8192 : 0) : 0))
#define MLAI_DECODE_FP8_STAGES(rows, is_ds656)                                                     \
    ((rows) == 64 || ((is_ds656) && (rows) == 32) ? 3 : 4)
#define MLAI_DECODE_FP8_TAIL_BYTES 14336
/* The ring, Q as f16 or as it comes, the tail, room to align the base to 1024. */
#define MLAI_DECODE_FP8_SMEM_BYTES(rows, is_ds656)                                                 \
    (MLAI_DECODE_FP8_STAGES(rows, is_ds656) * MLAI_DECODE_FP8_STAGE_BYTES(rows, is_ds656) +        \
     (rows)*1152 + MLAI_DECODE_FP8_TAIL_BYTES + 1024)

/* Rows of a tile, as mlai_decode_sm90a_rows, but 32 where there are no more or where there is too
 * little work for larger tiles, and 64 only for e4m3 queries. */
static inline int32_t mlai_decode_fp8_rows(int32_t batch, int64_t request_rows,
                                           int64_t capacity_keys, int32_t sms, int is_e4m3_query)
{
    if (request_rows <= 32) {
        return request_rows <= 8 ? 8 : request_rows <= 16 ? 16 : 32;
    }
    const int64_t blocks = (int64_t)batch * ((request_rows + 63) / 64) *
                           ((capacity_keys + MLAI_DECODE_SM90A_KEYS - 1) / MLAI_DECODE_SM90A_KEYS);
    return 2 * blocks < sms ? 16 : blocks < 4 * (int64_t)sms || !is_e4m3_query ? 32 : 64;
}

#endif
