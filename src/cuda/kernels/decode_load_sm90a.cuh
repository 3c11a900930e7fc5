/*
 * Hopper decode: what fills shared memory, and what turns a product into a logit.
 *
 * A block is 64 keys x 576 columns as 9 chunks of 64 keys x 64 columns, each 128-byte-swizzled (8
 * KiB): wgmma's K-major operand for S and, read the other way, its MN-major operand for the values.
 * Two blocks make the ring. The tensor path is one warp and the bulk tensor copy; the gather path
 * four warps and cp.async, for any page size. No key past the live length is read: the tensor path
 * loads whole boxes of live pages (what is dead in them is masked and cleared), the gather path
 * writes zeros. Called by: decode_sm90a.cuh and the headers beside it.
 */
#ifndef MLAI_DECODE_LOAD_SM90A_CUH
#define MLAI_DECODE_LOAD_SM90A_CUH

#include "decode_plan_sm90a.cuh"

namespace mlai_decode
{

/* ---- producer -------------------------------------------------------------------------------- */

MLAI_DEV int32_t clamp_page(const params &p, int32_t page)
{
    return page < 0 ? 0 : page >= p.pages ? p.pages - 1 : page;
}

/* A block's chunks in the order in which they are wanted, a hex digit each. */
MLAI_DEV int32_t chunk_at(int32_t i)
{
    return i == 8 ? 8 : (int32_t)(0x76325410u >> (4 * i)) & 15;
}

/* The parts of a block (PARTS), tiles whose rows are on M: the columns of the warpgroup that does
 * not own the block, with chunk 8, then those of the owner, who is last to use them.
 *
 * One warp: each block is 9 chunks of box_rows-row boxes; lane i looks up the page of box i. Boxes
 * past the live length are left out, so that no dead table entry is read. */
template <int Rows, class Walk>
MLAI_DEV void produce_tensor(const params &p, tail &s, uint32_t ring, Walk w,
                             bool knows_page = false, int32_t known_page = 0)
{
    constexpr int ROPE = ROWS_ON_M<Rows> ? 0 : 2; /* the part with chunk 8 */
    const int32_t lane = threadIdx.x % 32;
    const CUtensorMap *map = (const CUtensorMap *)&p.kv_map;
    const int32_t box_shift = 31 - __clz(p.box_rows), boxes_shift = 6 - box_shift,
                  boxes = 1 << boxes_shift;
    const int32_t box = lane & (boxes - 1);
    uint32_t n = 0;
    for (; w.live(); w.advance(p)) {
        const int32_t len = visible_keys(p, w.now, w.now.q_len - 1);
        const int32_t *table = p.page_table + (int64_t)w.b * p.table_stride;
        const int32_t past = len < w.block_end * KEYS ? len : w.block_end * KEYS;
        int32_t token = w.block_begin * KEYS + (box << box_shift);
        int32_t page = 0; /* of this lane's box of the block */
        if (knows_page) {
            page = known_page;
        } else if (token < past) {
            page = table[divide(p.by_page_size, token)];
        }
#pragma unroll 1
        for (int32_t block = w.block_begin; block < w.block_end;
             block += w.step(), n++, token += KEYS * w.step()) {
            const uint32_t stage = n % STAGES, parity = (n / STAGES) & 1;
            /* not looked at before the waits below */
            int32_t page_after = 0;
            const int32_t after = token + KEYS * w.step();
            if (after < past) {
                page_after = table[divide(p.by_page_size, after)];
            }
            const int32_t row = token - divide(p.by_page_size, token) * p.page_size,
                          here = clamp_page(p, page);
            const int32_t live_keys = len - block * KEYS;
            const int32_t live_boxes =
                live_keys >= KEYS ? boxes : (live_keys + p.box_rows - 1) >> box_shift;
            const uint32_t chunk_bytes = (uint32_t)(live_boxes << box_shift) * 128;
#pragma unroll 1
            for (int half = 0; half < 2; half++) {
                const uint32_t empty = mlai_smem_u32(&s.empty[stage][half]);
                mlai_mbar_wait(empty, parity ^ 1);
                if (lane == 0) {
                    mlai_mbar_arrive_expect_tx(mlai_smem_u32(&s.full[stage][half]),
                                               (ROPE == 0 && half == 0 ? 5 : 4) * chunk_bytes);
                    if (ROPE == 2 && half == 1) {
                        mlai_mbar_arrive_expect_tx(mlai_smem_u32(&s.full[stage][2]), chunk_bytes);
                    }
                }
                __syncwarp(); /* orders the expected bytes before their arrival */
                /* One lane issues all, unrolled: copies of several lanes go one by one through a
                 * loop of 180 clocks. */
#pragma unroll 1
                for (int32_t i = 0; i < live_boxes; i++) {
                    const int32_t from_row = __shfl_sync(0xffffffffu, row, i),
                                  from_page = __shfl_sync(0xffffffffu, here, i);
                    const uint32_t to =
                        ring + stage * STAGE_BYTES + (uint32_t)(i << box_shift) * 128;
                    if (mlai_elect_one()) {
#pragma unroll
                        for (int32_t c = 0; c < 4; c++) {
                            const int32_t chunk = ROWS_ON_M<Rows> ? ((stage + half) * 4 ^ 4) % 8 + c
                                                                  : 4 * (c / 2) + c % 2 + 2 * half;
                            mlai_tma_load_3d_hint(to + chunk * CHUNK_BYTES, map,
                                                  mlai_smem_u32(&s.full[stage][half]), p.kv_policy,
                                                  chunk * 64, from_row, from_page);
                        }
                        if (half == ROPE / 2) {
                            mlai_tma_load_3d_hint(to + 8 * CHUNK_BYTES, map,
                                                  mlai_smem_u32(&s.full[stage][ROPE]), p.kv_policy,
                                                  8 * 64, from_row, from_page);
                        }
                    }
                    __syncwarp();
                }
            }
            page = page_after;
        }
    }
}

/* Four warps: eight threads a row, four rows a thread, 16 bytes a copy; dead rows become zero. A
 * block is handed over once the next one is under way, or before the ring would make us wait. */
template <int Rows, class Walk>
MLAI_DEV void produce_gather(const params &p, tail &s, uint32_t ring, Walk w)
{
    const int32_t tid = threadIdx.x, piece = tid % 8, row0 = tid / 8;
    uint32_t n = 0, handed = 0;
    for (; w.live(); w.advance(p)) {
        const int32_t len = visible_keys(p, w.now, w.now.q_len - 1);
        const int32_t *table = p.page_table + (int64_t)w.b * p.table_stride;
        int32_t next_page[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t token = w.block_begin * KEYS + row0 + 16 * i;
            next_page[i] = w.block_begin < w.block_end && token < len
                               ? table[divide(p.by_page_size, token)]
                               : 0;
        }
        for (int32_t block = w.block_begin; block < w.block_end; block += w.step(), n++) {
            const uint32_t stage = n % STAGES, parity = (n / STAGES) & 1;
            const char *from[4];
            bool live[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int32_t token = block * KEYS + row0 + 16 * i;
                const int64_t page = clamp_page(p, next_page[i]);
                const int64_t row = token - divide(p.by_page_size, token) * p.page_size;
                live[i] = token < len;
                from[i] = (const char *)p.kv +
                          (page * p.kv_page_stride + row * p.kv_row_stride) * 2 + piece * 16;
                const int32_t after = token + KEYS * w.step();
                next_page[i] = block + w.step() < w.block_end && after < len
                                   ? table[divide(p.by_page_size, after)]
                                   : 0;
            }
            if (handed < n && !mlai_mbar_test(mlai_smem_u32(&s.empty[stage][1]), parity ^ 1)) {
                mlai_cp_async_wait<0>();
                mlai_fence_proxy_async_shared(); /* orders the copies before wgmma's reads */
                for (int g = 0; g < PARTS; g++) {
                    mlai_mbar_arrive(mlai_smem_u32(&s.full[handed % STAGES][g]));
                }
                handed++;
            }
            mlai_mbar_wait(mlai_smem_u32(&s.empty[stage][0]), parity ^ 1);
            mlai_mbar_wait(mlai_smem_u32(&s.empty[stage][1]), parity ^ 1);
            const uint32_t base = ring + stage * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int32_t row = row0 + 16 * i;
                const uint32_t to = base + row * 128 + ((piece ^ (row & 7)) << 4);
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; chunk++) {
                    mlai_cp_async_16_zfill(to + chunk * CHUNK_BYTES, from[i] + chunk * 128,
                                           live[i]);
                }
            }
            mlai_cp_async_commit();
            if (handed < n) {
                mlai_cp_async_wait<1>();
                mlai_fence_proxy_async_shared(); /* orders the copies before wgmma's reads */
                for (int g = 0; g < PARTS; g++) {
                    mlai_mbar_arrive(mlai_smem_u32(&s.full[handed % STAGES][g]));
                }
                handed++;
            }
        }
    }
    if (handed < n) {
        mlai_cp_async_wait<0>();
        mlai_fence_proxy_async_shared(); /* orders the copies before wgmma's reads */
        for (int g = 0; g < PARTS; g++) {
            mlai_mbar_arrive(mlai_smem_u32(&s.full[handed % STAGES][g]));
        }
    }
}

/* ---- queries and logits ---------------------------------------------------------------------- */

/* Rows [first_row, first_row + Rows) of the request into shared memory, chunk by chunk, each a
 * 128-byte-swizzled Rows x 64; rows past the request's last are zero. Also each row's keys. */
template <int Rows, int Threads>
MLAI_DEV void issue_queries(const params &p, int32_t *row_len, uint32_t q_smem, const request &r,
                            int32_t first_row)
{
    const int32_t tid = threadIdx.x % Threads, piece = tid % 8;
    const int32_t rows = r.q_len * p.heads;
#pragma unroll 1
    for (int32_t row = tid / 8; row < Rows; row += Threads / 8) {
        const int32_t at = first_row + row;
        const bool live = at < rows;
        const int32_t token = live ? divide(p.by_heads, at) : 0,
                      head = live ? at - token * p.heads : 0;
        const char *from = (const char *)p.q + piece * 16 +
                           ((int64_t)(r.first_token + token) * p.q_token_stride +
                            (int64_t)head * p.q_head_stride) *
                               2;
        const uint32_t to = q_smem + row * 128 + ((piece ^ (row & 7)) << 4);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            mlai_cp_async_16_zfill(to + chunk * Rows * 128, from + chunk * 128, live);
        }
        if (piece == 0) {
            row_len[row] = visible_keys(p, r, live ? token : r.q_len - 1);
        }
    }
    mlai_cp_async_commit();
}

/* The same rows into L2: with one buffer the copy itself cannot start before the tile. */
template <int Rows, int Threads>
MLAI_DEV void prefetch_queries(const params &p, const request &r, int32_t first_row)
{
    const int32_t tid = threadIdx.x % Threads, rows = r.q_len * p.heads;
#pragma unroll 1
    for (int32_t i = tid; i < Rows * CHUNKS; i += Threads) {
        const int32_t at = first_row + i / CHUNKS, token = divide(p.by_heads, at),
                      head = at - token * p.heads;
        if (at < rows) {
            mlai_prefetch_l2((const char *)p.q + i % CHUNKS * 128 +
                             ((int64_t)(r.first_token + token) * p.q_token_stride +
                              (int64_t)head * p.q_head_stride) *
                                 2);
        }
    }
}

/* What turns q . k into a logit in units of log 2: a factor, or cap tanh(x / cap) by
 * cap (1 - 2 / (1 + exp(2 x / cap))). */
struct logit_scale {
    float factor, cap;
    bool capped;
};

MLAI_DEV logit_scale make_logit_scale(const params &p)
{
    const float log2e = 1.4426950408889634f;
    logit_scale s;
    s.capped = p.logit_cap > 0.0f;
    s.factor = p.softmax_scale * log2e * (s.capped ? 2.0f / p.logit_cap : 1.0f);
    s.cap = p.logit_cap * log2e;
    return s;
}

template <int Count> MLAI_DEV void scale_logits(const logit_scale &s, float (&x)[Count])
{
#pragma unroll
    for (int i = 0; i < Count; i++) {
        x[i] *= s.factor;
    }
    if (s.capped) {
#pragma unroll
        for (int i = 0; i < Count; i++) {
            x[i] = s.cap * (1.0f - 2.0f * mlai_rcp(1.0f + mlai_exp2(x[i])));
        }
    }
}

MLAI_DEV float finite_or_0(float x)
{
    return x == NEG_INF ? 0.0f : x;
}

MLAI_DEV bool must_raise(float top, float reference)
{
    return top > reference + LAZY_MAX || (reference == NEG_INF && top > NEG_INF);
}

} /* namespace mlai_decode */

#endif
