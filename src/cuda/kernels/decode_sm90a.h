/*
 * What the host tells the Hopper decode kernels: one parameter struct, passed by value, and the
 * figures of a launch. Plain C11 and CUDA both read this file.
 *
 *   decode_{bf16,f16}_sm90a_r{8,16,64}      pages of 8, 16, 32 or a multiple of 64 rows
 *   ..._gather                              any page size
 *   ..._cluster_r{8,16}[_gather]            few row tiles (decode_cluster_sm90a.cuh)
 *
 * q [tokens, heads, 576]; kv [pages, page_size, 576], values = the first 512 of the same rows;
 * out [tokens, heads, 512]; lse [tokens, heads]. Strides in elements, last dim contiguous; bases
 * and strides of q, kv and out multiples of 16 bytes. The tensor map of the kv for f16 and bf16 is
 * the same (16-bit elements).
 */
#ifndef MLAI_DECODE_SM90A_H
#define MLAI_DECODE_SM90A_H

#include <stdint.h>

#ifdef __cplusplus
#define MLAI_DECODE_ALIGN64 alignas(64)
#else
#define MLAI_DECODE_ALIGN64 _Alignas(64)
#endif

/* The driver's CUtensorMap: 128 opaque bytes at a multiple of 64. */
typedef struct mlai_decode_sm90a_map {
    MLAI_DECODE_ALIGN64 uint64_t opaque[16];
} mlai_decode_sm90a_map;

/* n / divisor = (umulhi(multiplier, n) + n) >> shift for 0 <= n < 2^31. */
typedef struct mlai_decode_sm90a_divisor {
    uint32_t multiplier;
    uint32_t shift;
} mlai_decode_sm90a_divisor;

static inline mlai_decode_sm90a_divisor mlai_decode_sm90a_divide_by(int32_t divisor)
{
    const uint64_t d = (uint64_t)divisor;
    mlai_decode_sm90a_divisor by = {0, 0};
    while ((UINT64_C(1) << by.shift) < d) {
        by.shift++;
    }
    by.multiplier = (uint32_t)((UINT64_C(1) << 32) * ((UINT64_C(1) << by.shift) - d) / d + 1);
    return by;
}

typedef struct mlai_decode_sm90a_params {
    /* dims (576, page_size, pages), strides (kv_row_stride, kv_page_stride), box (64, box_rows, 1),
     * 128-byte swizzle; box_rows = min(page_size, 64). Unused by _gather. */
    mlai_decode_sm90a_map kv_map;
    const void *q;
    const void *kv;
    void *out;
    float *lse;                  /* or null */
    const int32_t *page_table;   /* [batch, table_width] */
    const int32_t *seqlens;      /* [batch], keys in the cache, on the device */
    const int32_t *cu_seqlens_q; /* [batch + 1], ascending, on the device; null: q_len for all */
    float *partial;              /* MLAI_DECODE_SM90A_PARTIAL_FLOATS(grid, rows), 16-byte aligned */
    float *partial_lse;          /* MLAI_DECODE_SM90A_LSE_FLOATS(grid, rows) */
    uint32_t *counters; /* [grid], zeroed once, one set a stream; low 31 bits 0 between launches */
    int64_t q_token_stride;
    int64_t q_head_stride;
    int64_t kv_page_stride;
    int64_t kv_row_stride;
    int64_t table_stride;
    int64_t out_token_stride;
    int64_t out_head_stride;
    int64_t lse_token_stride;
    uint64_t kv_policy; /* the L2 eviction policy of cache rows */
    int32_t batch;
    int32_t heads;
    mlai_decode_sm90a_divisor by_heads;
    mlai_decode_sm90a_divisor by_page_size;
    int32_t q_len;  /* where cu_seqlens_q is null */
    int32_t tokens; /* rows of q: what cumulative lengths are clamped to */
    int32_t pages;
    int32_t page_size;
    int32_t capacity; /* min(table_width * page_size, 2^30): what lengths are clamped to */
    int32_t box_rows;
    int32_t causal;          /* 0: every query token sees all seqlens keys */
    int32_t explicit_offset; /* 0: token j sees seqlens + 1 - q_len + j; 1: seqlens + offset + j */
    int32_t seqlen_offset;
    /* Cluster kernels: row tiles of a request, by the longest q_len; clusters a tile where all get
     * as many, 0: dealt out by the lengths; dividers by that number of tiles and by the CTAs of a
     * cluster. Several requests get 0 or 1. */
    int32_t request_tiles;
    int32_t even_clusters;
    mlai_decode_sm90a_divisor by_request_tiles;
    mlai_decode_sm90a_divisor by_cluster;
    mlai_decode_sm90a_divisor by_stretches; /* stretches of a launch: grid / share */
    int32_t share; /* how many neighbouring CTAs work on as many row tiles of one request at a time,
                    * so that its keys come from memory once; 1 to grid */
    int32_t item_cost; /* what starting and ending a row tile costs, in blocks of 64 keys; >= 1 */
    int32_t out_f32;   /* 1: out is f32, else in q's format */
    float softmax_scale;
    float logit_cap; /* 0: none */
    float k_scale;   /* of 8-bit caches, else unused: scores and output are multiplied by it */
} mlai_decode_sm90a_params;

enum {
    MLAI_DECODE_SM90A_QK_DIM = 576,
    MLAI_DECODE_SM90A_V_DIM = 512,
    MLAI_DECODE_SM90A_KEYS = 64, /* a block */
    MLAI_DECODE_SM90A_STAGES = 2
};

/* The bulk copies' 64-bit cache hint: faster than none where the cache set is larger than the L2,
 * and no slower where it is not. */
#define MLAI_DECODE_SM90A_L2_EVICT_FIRST UINT64_C(0x12f0000000000000)

/* Which kernel: its rows a tile, from what the host knows (capacities, not live lengths), for
 * `request_rows` = heads x the longest q_len. Small problems take smaller tiles for more CTAs. */
static inline int32_t mlai_decode_sm90a_rows(int32_t batch, int64_t request_rows,
                                             int64_t capacity_keys, int32_t sms)
{
    if (request_rows <= 16) {
        return request_rows <= 8 ? 8 : 16;
    }
    const int64_t blocks = (int64_t)batch * ((request_rows + 63) / 64) *
                           ((capacity_keys + MLAI_DECODE_SM90A_KEYS - 1) / MLAI_DECODE_SM90A_KEYS);
    return 2 * blocks < sms ? 16 : 64;
}

static inline int32_t mlai_decode_sm90a_share(int64_t request_rows, int32_t rows)
{
    const int64_t tiles = (request_rows + rows - 1) / rows;
    return (int32_t)(tiles < 1 ? 1 : tiles > 8 ? 8 : tiles);
}

static inline int32_t mlai_decode_sm90a_item_cost(int32_t rows)
{
    return rows < 64 ? 1 : 2;
}

/* Cluster kernels, tiles of 8 and 16 rows: two K blocks, Q, the tail, and from each CTA up to
 * ceil(16 / cluster) units of 32 columns of O in f16. */
#define MLAI_DECODE_SM90A_MAX_CLUSTER 16
#define MLAI_DECODE_SM90A_CLUSTER_TAIL_BYTES 12288
#define MLAI_DECODE_SM90A_CLUSTER_SMEM_BYTES(rows, cluster)                                        \
    (2 * 64 * 576 * 2 + (rows)*576 * 2 + MLAI_DECODE_SM90A_CLUSTER_TAIL_BYTES +                    \
     (cluster) * ((15 + (cluster)) / (cluster)) * (rows)*64 + 1024)

#define MLAI_DECODE_SM90A_THREADS(rows) ((rows) < 64 ? 512 : 384)

/* grid: one CTA an SM, at least `share`, by a cooperative launch: CTAs that share a row tile wait
 * for each other before they merge, so all must be resident together. Dynamic shared memory:
 * MLAI_DECODE_SM90A_SMEM_BYTES(rows). Rows of a request, and the sum over all row tiles of
 * item_cost + ceil(capacity / 64), stay below 2^31. */
#define MLAI_DECODE_SM90A_PARTIAL_FLOATS(grid, rows) ((int64_t)(grid)*2 * (rows)*512)
#define MLAI_DECODE_SM90A_LSE_FLOATS(grid, rows) ((int64_t)(grid)*2 * (rows))
/* Two K blocks, Q (two buffers up to 32 rows), the tail (barriers, softmax statistics, plan), room
 * to align the base to 1024. */
#define MLAI_DECODE_SM90A_TAIL_BYTES 6144
#define MLAI_DECODE_SM90A_SMEM_BYTES(rows)                                                         \
    (2 * 64 * 576 * 2 + ((rows) < 64 ? 2 : 1) * (rows)*576 * 2 + MLAI_DECODE_SM90A_TAIL_BYTES +    \
     1024)

#endif
