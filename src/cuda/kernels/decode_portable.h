/*
 * What the host tells the portable decode kernels, and the split of a row's keys that host and
 * device share. Plain C11 and CUDA both read this file. Strides count elements of the operand's
 * format (bytes for ds656 caches and for the cache's byte strides).
 *
 * A request's keys are cut into pieces by its own length, whatever the batch, so that a row has the
 * same bits in any company. Short pieces give a short request enough blocks to run on; long ones
 * keep the partial results few:
 *
 *   keys of a piece    256    512      1024
 *   64-row blocks             to 4096  above     (the longest bound of the request's rows)
 *   16-row blocks      to 2048 to 32768 above
 *
 * An item is (request, block of rows, piece). Items are numbered request by request, block by
 * block, from the lengths on the device; a launch handles the blocks whose first item falls in its
 * window of `window_items`, so that the workspace is bounded whatever the capacity. Partial results
 * of a block are joined by whoever brings the last one: eight neighbours at a time, then eight of
 * those, in key order.
 */
#ifndef MLAI_DECODE_PORTABLE_H
#define MLAI_DECODE_PORTABLE_H

#include <stdint.h>

#ifdef __CUDACC__
#define MLAI_BOTH static __host__ __device__ __forceinline__
#else
#define MLAI_BOTH static inline
#endif

enum {
    MLAI_SPLIT_SHORT_KEYS = 256,
    MLAI_SPLIT_MIDDLE_KEYS = 512,
    MLAI_SPLIT_LONG_KEYS = 1024,
    MLAI_SPLIT_SHORT_TO = 2048, /* blocks of 16 rows */
    MLAI_SPLIT_MIDDLE_TO = 32768,
    MLAI_SPLIT_MIDDLE_TO_WIDE = 4096, /* of 64 */
    MLAI_DECODE_JOIN = 8              /* partial results that are joined at once */
};

/* Keys of a piece in a request whose rows see keys below `bound`. */
MLAI_BOTH int32_t mlai_split_keys(int32_t block_rows, int64_t bound)
{
    if (block_rows > 16)
        return bound <= MLAI_SPLIT_MIDDLE_TO_WIDE ? MLAI_SPLIT_MIDDLE_KEYS : MLAI_SPLIT_LONG_KEYS;
    return bound <= MLAI_SPLIT_SHORT_TO    ? MLAI_SPLIT_SHORT_KEYS
           : bound <= MLAI_SPLIT_MIDDLE_TO ? MLAI_SPLIT_MIDDLE_KEYS
                                           : MLAI_SPLIT_LONG_KEYS;
}

/* Pieces of a block whose rows see keys below `bound`; 1 where they see none. */
MLAI_BOTH int64_t mlai_split_count(int64_t bound, int32_t keys)
{
    return bound <= keys ? 1 : (bound + keys - 1) / keys;
}

/* Rows (request, token, head) of an operand: uniform calls have a request stride and tokens of a
 * request count from 0; ragged ones have none and tokens count through the call. */
typedef struct mlai_decode_rows {
    char *data;
    int64_t request_stride, token_stride, head_stride;
} mlai_decode_rows;

typedef struct mlai_decode_portable_params {
    mlai_decode_rows q, q_rope, out, lse; /* q_rope at its first value; lse.data null: not wanted */
    const char *latent, *rope;            /* the cache; rope at its first value */
    int64_t page_bytes, row_bytes, rope_page_bytes, rope_row_bytes;
    const int32_t *page_table;
    const int32_t *seqlens, *global_seqlens, *cu_seqlens_q; /* the last two may be null */
    const uint8_t *mask;                                    /* or null */
    int64_t table_stride, seqlens_stride, global_stride, cu_stride, mask_stride;
    int64_t position_first, position_stride; /* of keys, with has_positions */
    float *partial;                          /* slots of slot_floats, 16-byte aligned */
    uint32_t *counters; /* of arrivals, one a slot, and the queue; null: no row has two */
    uint32_t *barrier;  /* of the grid: arrivals, generation; in the workspace's head */
    int64_t slot_floats, n_slots;
    int64_t batch, tokens;
    int64_t window, window_items; /* the launch's number, and items of a launch */
    int64_t max_splits;
    int32_t pages, page_size;
    int32_t capacity; /* keys of a request: lengths are clamped to it */
    int32_t heads, q_len, max_q_len;
    int32_t block_rows;
    int32_t n_latent, n_rope; /* R, P */
    int32_t q_format, kv_format, out_format;
    int32_t is_causal, has_offset, seqlen_offset, has_positions;
    int32_t o_stride;              /* floats of a partial row */
    int32_t latent_pad, rope_pad;  /* R and P in shared memory, zeros beyond */
    int32_t row_stride;            /* values of a row there, zeros past P */
    int32_t stages;                /* tiles in shared memory */
    int32_t q_wide, kv_wide;       /* 16-byte accesses are aligned */
    int32_t out_wide;              /* likewise for out */
    float scale;                   /* softmax_scale * k_scale */
    float logit_cap, scale_by_cap; /* scale / logit_cap, with a cap */
    float out_scale;               /* k_scale */
} mlai_decode_portable_params;

enum {
    MLAI_DECODE_THREADS = 256,
    MLAI_DECODE_NARROW_ROWS = 16,
    MLAI_DECODE_NARROW_KEYS = 32,
    MLAI_DECODE_WIDE_ROWS = 64,
    MLAI_DECODE_WIDE_KEYS = 64,
    MLAI_DECODE_F32_ROWS = 16,
    MLAI_DECODE_F32_KEYS = 16,
    MLAI_DECODE_MAX_R = 512,
    MLAI_DECODE_MAX_D = 640,
    MLAI_DECODE_PLAN_REQUESTS = 64,
    /* tail: plan, bounds, maxima (then sums), rescales */
    MLAI_DECODE_TAIL_BYTES = 2432,
    /* X [4][16][40] f32, P [4][16][40] 16-bit, scales [2][4][32] f32 */
    MLAI_DECODE_NARROW_SCRATCH_BYTES = 4 * 16 * 40 * 4 + 4 * 16 * 40 * 2 + 2 * 4 * 32 * 4,
    MLAI_DECODE_WIDE_SCRATCH_BYTES = 64 * 64 * 2,
    MLAI_DECODE_F32_SCRATCH_BYTES = 16 * 16 * 4
};

#endif
