/*
 * Absorbed MLA decode on Hopper: the body of the decode_{bf16,f16}_sm90a kernels.
 *
 *   s[r, k] = cap(scale * q[r, :576] . kv[k, :576]),  out[r, :512] = softmax_k(s) kv[k, :512]
 *
 * A row r is one head of one query token; a request's rows are cut into tiles of Rows. Up to 32 rows
 * the keys lie on wgmma's 64 side (S^T = K Q^T, O^T = V^T P^T), so that 8 heads cost 8 columns; at 64
 * the rows do (S = Q K^T, O = P V). Products in f32, P rounded to the cache's format, sums in f32.
 *
 * Plan: the row tiles of all requests stand in one line, each item_cost + ceil(len / 64) long; CTA c
 * of G' = min(grid, total) takes [c total / G', (c + 1) total / G'). Every CTA finds its stretch from the device's lengths.
 * A tile that no stretch holds whole leaves normalised f32 partials; its CTAs then wait for each
 * other (they are co-resident) and each merges a slice of the tile, in stretch order.
 *
 *   warps 0-3   producer   K blocks of 64 keys x 576 into a ring of two (bulk tensor or cp.async)
 *   warps 4-7   scores     S, softmax, P over the block's rope columns (dead once S is there)
 *   warps 8-15  values     O: columns 0-255 and 256-511, a warpgroup each; merge and store
 *
 *   producer --full[stage][3]--> scores --p_full[stage]--> values --empty[stage]--> producer
 *
 * Counters: bit 31 of a tile's counter flips when its last partial is there, and the low bits are
 * back at zero: nothing has to be reset between launches.
 * Limits: strides as decode_sm90a.h says; lengths are clamped to the table, page ids to the pool.
 */
#ifndef MLAI_DECODE_SM90A_CUH
#define MLAI_DECODE_SM90A_CUH

#include "../ptx_sm90a.cuh"
#include "decode_sm90a.h"

namespace mlai_decode {

enum { FORMAT_BF16, FORMAT_F16 };
enum { LOAD_TENSOR, LOAD_PAIR, LOAD_GATHER };

constexpr int KEYS = MLAI_DECODE_SM90A_KEYS;
constexpr int CHUNKS = 9; /* pieces of 64 columns; 0-7 hold the values, 8 the rope part */
constexpr int CHUNK_BYTES = KEYS * 128;
constexpr int STAGE_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int STAGES = MLAI_DECODE_SM90A_STAGES;
template <int Rows> constexpr int QUERY_BUFFERS = Rows < 64 ? 2 : 1;
/* A block arrives and is freed in parts: chunks 0 1 4 5 (each value warpgroup's first half), 2 3 6 7, 8. */
constexpr int PARTS = 3;
/* How many blocks ahead of the ring the tiles of 64 rows ask the L2 for. */
constexpr int PREFETCH_BLOCKS = 2;
constexpr int MAX_WARPS = MLAI_DECODE_SM90A_THREADS(8) / 32;
constexpr int BAR_SCORES = 1, BAR_VALUES = 2, BAR_VALUES_HALF = 3, BAR_PRODUCER = 5;
constexpr float NEG_INF = -__builtin_huge_valf();
/* A row's reference maximum follows its true one only when that is 2^8 above: P stays below 256. */
constexpr float LAZY_MAX = 8.0f;

/* How the line is cut: the first `longer` stretches have each + 1 positions, the others `each`. */
struct plan {
    int32_t stretches, each, longer;
    int32_t request; /* the one in which this CTA's stretch begins */
    int32_t start;   /* where that request begins */

    __device__ __forceinline__ void cut(int32_t total, int32_t count)
    {
        stretches = min(total, count);
        each = total / max(stretches, 1);
        longer = total - each * stretches;
    }
    __device__ __forceinline__ int32_t begin_of(int32_t stretch) const
    {
        return stretch * each + min(stretch, longer);
    }
    __device__ __forceinline__ int32_t stretch_of(int32_t position) const
    {
        const int32_t split = longer * (each + 1);
        return position < split ? position / (each + 1) : longer + (position - split) / each;
    }
};

struct tile_out {
    int32_t first_token; /* of the request */
    int32_t first_row;   /* of the tile, counted from the request's first */
    int32_t rows;        /* of the request */
};

/* The partials of one tile: that of piece k lies in slot 2 c + 1 for its first CTA c, 2 c for the
 * others. `cta_step` CTAs lie between neighbours (a pair's CTAs merge their own tiles). */
struct merge_job {
    tile_out out;
    int32_t first_cta, cta_step, pieces, mine;
    int32_t present; /* = pieces; 0 for a rehearsal, which reads and writes nothing */
    uint32_t ticket; /* the counter as it was before the last partial */
};

struct tail {
    uint64_t full[STAGES][PARTS];
    uint64_t p_full[STAGES];
    uint64_t empty[STAGES][2]; /* the first part; the others */
    int32_t warp_total[MAX_WARPS];
    int32_t first_request, first_start;
    plan found;
    int32_t rescale[STAGES][4]; /* a warp of scores raised a reference maximum */
    merge_job jobs[2]; /* the tile this CTA takes over from another one, the one it leaves */
    float alpha[STAGES][64];
    float inverse_sum[STAGES][64];
    float lse2[STAGES][64];
    float warp_stat[4][64];
    float reference[STAGES][64]; /* of the stage's P, tiles of 64 rows */
    float row_sum[2][2][64];     /* [piece % 2][warpgroup] */
    int32_t row_len[2][64];
};
static_assert(sizeof(tail) <= MLAI_DECODE_SM90A_TAIL_BYTES, "grow MLAI_DECODE_SM90A_TAIL_BYTES");

using params = mlai_decode_sm90a_params;

/* ---- formats --------------------------------------------------------------------------------- */

template <int Format, int N, int TransA, int TransB>
MLAI_DEV void mma(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate)
{
    if constexpr (Format == FORMAT_BF16) {
        mlai_wgmma<N>::template bf16_ss<TransA, TransB>(d, a, b, accumulate);
    } else {
        mlai_wgmma<N>::template f16_ss<TransA, TransB>(d, a, b, accumulate);
    }
}

template <int Format, int N, int TransB>
MLAI_DEV void mma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate)
{
    if constexpr (Format == FORMAT_BF16) {
        mlai_wgmma<N>::template bf16_rs<TransB>(d, a, b, accumulate);
    } else {
        mlai_wgmma<N>::template f16_rs<TransB>(d, a, b, accumulate);
    }
}

template <int Format> MLAI_DEV uint32_t pack(float lo, float hi)
{
    return Format == FORMAT_BF16 ? mlai_pack_bf16x2(lo, hi) : mlai_pack_f16x2(lo, hi);
}

/* n / divisor for 0 <= n < 2^31, by the host's multiplier and shift. */
MLAI_DEV int32_t divide(const mlai_decode_sm90a_divisor &d, int32_t n)
{
    return (int32_t)((__umulhi(d.multiplier, (uint32_t)n) + (uint32_t)n) >> d.shift);
}

/* ---- plan ------------------------------------------------------------------------------------ */

struct request {
    int32_t first_token; /* its first row of q, in tokens */
    int32_t q_len;
    int32_t first_keys; /* how many keys its first token sees, not yet clamped */
};

/* How many keys query token j sees. */
MLAI_DEV int32_t visible_keys(const params &p, const request &r, int32_t j)
{
    return max(0, min(r.first_keys + (p.causal ? j : 0), p.capacity));
}

MLAI_DEV request load_request(const params &p, int32_t b)
{
    request r = {0, 0, 0};
    if (b < p.batch) {
        r.first_keys = max(-(1 << 30), min(p.seqlens[b], 1 << 30));
        r.first_token = b * p.q_len;
        r.q_len = p.q_len;
        if (p.cu_seqlens_q) {
            r.first_token = max(0, min(p.cu_seqlens_q[b], p.tokens));
            r.q_len = max(0, min(p.cu_seqlens_q[b + 1], p.tokens) - r.first_token);
        }
        if (p.causal) {
            r.first_keys += p.explicit_offset ? p.seqlen_offset : 1 - r.q_len;
        }
    }
    return r;
}

/* Row tiles of a request, counted in groups of Share that a cluster works on together. */
template <int Rows, int Share> MLAI_DEV int32_t tile_groups(const params &p, const request &r)
{
    return (r.q_len * p.heads + Rows * Share - 1) / (Rows * Share);
}

MLAI_DEV int32_t request_blocks(const params &p, const request &r)
{
    return (visible_keys(p, r, r.q_len - 1) + KEYS - 1) / KEYS;
}

template <int Rows, int Share> MLAI_DEV int32_t request_cost(const params &p, const request &r)
{
    return tile_groups<Rows, Share>(p, r) * (p.item_cost + request_blocks(p, r));
}

/* This CTA's pieces, one after the other: a tile group and its blocks [block_begin, block_end). Each
 * role walks its own copy. */
template <int Rows, int Share> struct walk {
    int32_t tile_start, begin, end, b, tile, tiles, blocks, cost;
    int32_t block_begin, block_end;
    request now;

    __device__ __forceinline__ void enter(const params &p)
    {
        now = load_request(p, b);
        tiles = tile_groups<Rows, Share>(p, now);
        blocks = request_blocks(p, now);
        cost = p.item_cost + blocks;
        tile = 0;
    }
    __device__ __forceinline__ void clip(const params &p)
    {
        const int32_t first = tile_start + p.item_cost;
        block_begin = max(0, begin - first);
        block_end = min(max(0, end - first), blocks);
    }
    __device__ __forceinline__ void start(const params &p, const plan &from, int32_t stretch)
    {
        tile = tiles = begin = end = 0;
        tile_start = from.start;
        b = from.request;
        if (stretch < from.stretches) {
            begin = from.begin_of(stretch);
            end = from.begin_of(stretch + 1);
            enter(p);
            tile = (begin - tile_start) / cost;
            tile_start += tile * cost;
            clip(p);
        }
    }
    __device__ __forceinline__ bool live() const { return tile_start < end; }
    __device__ __forceinline__ bool has_blocks() const { return block_begin < block_end; }
    /* An item of no blocks is written by the stretch in which it begins. */
    __device__ __forceinline__ bool owns_empty() const { return blocks == 0 && tile_start >= begin; }
    __device__ __forceinline__ void advance(const params &p)
    {
        tile_start += cost;
        tile++;
        while (tile >= tiles && tile_start < end) {
            b++;
            enter(p);
        }
        clip(p);
    }
};

/* Each warp by itself, up to 32 requests: a lane a request. Requests of no rows have no length, so that
 * one with rows is found. */
template <int Rows, int Share> MLAI_DEV plan plan_few(const params &p, int32_t stretch, int32_t count)
{
    const int32_t lane = threadIdx.x % 32;
    const int32_t cost = request_cost<Rows, Share>(p, load_request(p, lane));
    int32_t sum = cost;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int32_t other = __shfl_up_sync(0xffffffffu, sum, d);
        sum += lane >= d ? other : 0;
    }
    plan r;
    r.cut(__shfl_sync(0xffffffffu, sum, 31), count);
    r.request = r.start = 0;
    if (stretch < r.stretches) {
        const int32_t begin = r.begin_of(stretch);
        r.request = __ffs(__ballot_sync(0xffffffffu, sum > begin)) - 1;
        r.start = __shfl_sync(0xffffffffu, sum - cost, r.request);
    }
    return r;
}

/* All threads together: one pass for the total, one to find the request (the same one up to a thread a request). */
template <int Rows, int Share>
MLAI_DEV plan plan_many(const params &p, tail &s, int32_t stretch, int32_t count)
{
    const int32_t threads = blockDim.x, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    plan r = {};
    for (int32_t pass = p.batch <= threads ? 1 : 0; pass < 2; pass++) {
        int32_t carry = 0;
        for (int32_t base = 0; base < p.batch; base += threads) {
            const int32_t cost = request_cost<Rows, Share>(p, load_request(p, base + tid));
            int32_t sum = cost;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int32_t other = __shfl_up_sync(0xffffffffu, sum, d);
                sum += lane >= d ? other : 0;
            }
            if (lane == 31) {
                s.warp_total[warp] = sum;
            }
            __syncthreads(); /* orders the warps' totals before their readers */
            int32_t at = carry + sum - cost;
#pragma unroll 4
            for (int w = 0; w < threads / 32; w++) {
                const int32_t t = s.warp_total[w];
                at += w < warp ? t : 0;
                carry += t;
            }
            if (p.batch <= threads || pass == 0) {
                r.cut(carry, count);
            }
            if (pass == 1 && cost > 0 && stretch < r.stretches) {
                const int32_t begin = r.begin_of(stretch);
                if (at <= begin && begin < at + cost) {
                    s.first_request = base + tid;
                    s.first_start = at;
                }
            }
            __syncthreads(); /* orders the readers before the next totals, the find before its readers */
        }
    }
    r.request = s.first_request;
    r.start = s.first_start;
    return r;
}

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

/* One warp: each block is 9 chunks of box_rows-row boxes. A pair's CTAs each load half of the boxes
 * to both; boxes past the live length are left out, so that no dead table entry is read. */
template <int Rows, int Share, int Load> MLAI_DEV void produce_tensor(const params &p, tail &s, uint32_t ring,
                                                                      walk<Rows, Share> w, uint32_t rank)
{
    constexpr int AHEAD = Rows == 64 ? PREFETCH_BLOCKS : 0;
    const int32_t lane = threadIdx.x % 32;
    const CUtensorMap *map = (const CUtensorMap *)&p.kv_map;
    const int32_t box_shift = 31 - __clz(p.box_rows), boxes = KEYS >> box_shift;
    const int32_t mine = Load == LOAD_PAIR ? boxes / 2 : boxes;
    const int32_t mine_shift = 31 - __clz(mine), first_box = Load == LOAD_PAIR ? mine * (int32_t)rank : 0;
    const int32_t box = first_box + (lane & (mine - 1));
    uint32_t n = 0;
    for (; w.live(); w.advance(p)) {
        const int32_t len = visible_keys(p, w.now, w.now.q_len - 1);
        const int32_t *table = p.page_table + (int64_t)w.b * p.table_stride;
        const int32_t past = len < w.block_end * KEYS ? len : w.block_end * KEYS;
        /* A lane keeps the pages of its box: of this block, of the next, ... */
        int32_t token = w.block_begin * KEYS + (box << box_shift);
        int32_t page[AHEAD + 1];
#pragma unroll
        for (int i = 0; i <= AHEAD; i++) {
            page[i] = 0;
            if (token + i * KEYS < past) {
                page[i] = table[divide(p.by_page_size, token + i * KEYS)];
            }
        }
#pragma unroll 1
        for (int32_t block = w.block_begin; block < w.block_end; block++, n++, token += KEYS) {
            const uint32_t stage = n % STAGES, parity = (n / STAGES) & 1;
            /* read only after the waits below */
            int32_t page_after = 0;
            const int32_t after = token + (AHEAD + 1) * KEYS;
            if (after < past) {
                page_after = table[divide(p.by_page_size, after)];
            }
            const int32_t row = token - divide(p.by_page_size, token) * p.page_size, here = clamp_page(p, page[0]);
            const int32_t live_keys = len - block * KEYS;
            const int32_t live_boxes = live_keys >= KEYS ? boxes : (live_keys + p.box_rows - 1) >> box_shift;
            const uint32_t chunk_bytes = (uint32_t)(live_boxes << box_shift) * 128;
            const uint32_t to = ring + stage * STAGE_BYTES + (uint32_t)(box << box_shift) * 128;
#pragma unroll 1
            for (int half = 0; half < 2; half++) {
                const uint32_t empty = mlai_smem_u32(&s.empty[stage][half]);
                if (Load == LOAD_PAIR) {
                    mlai_mbar_wait_cluster(empty, parity ^ 1);
                } else {
                    mlai_mbar_wait(empty, parity ^ 1);
                }
                if (lane == 0) {
                    mlai_mbar_arrive_expect_tx(mlai_smem_u32(&s.full[stage][half]), 4 * chunk_bytes);
                    if (half == 1) {
                        mlai_mbar_arrive_expect_tx(mlai_smem_u32(&s.full[stage][2]), chunk_bytes);
                    }
                }
                __syncwarp(); /* orders the expected bytes before their arrival */
#pragma unroll 1
                for (int32_t i = lane; i < (4 + half) << mine_shift; i += 32) {
                    const int32_t chunk = chunk_at((i >> mine_shift) + 4 * half);
                    const uint32_t bar = mlai_smem_u32(&s.full[stage][chunk == 8 ? 2 : half]);
                    if (box >= live_boxes) {
                        continue;
                    }
                    if (Load == LOAD_PAIR) {
                        mlai_tma_load_3d_multicast_hint(to + chunk * CHUNK_BYTES, map, bar, 3, p.kv_policy,
                                                        chunk * 64, row, here);
                    } else {
                        mlai_tma_load_3d_hint(to + chunk * CHUNK_BYTES, map, bar, p.kv_policy, chunk * 64, row, here);
                    }
                }
            }
            if constexpr (AHEAD > 0) {
                /* not by the copy engine, which has no time to spare; a lane takes rows of its box */
                const int32_t then = token + AHEAD * KEYS;
                if (p.l2_ahead && then < past && p.box_rows >= 32) {
                    const int64_t page_then = clamp_page(p, page[AHEAD]);
                    const int64_t row_then = then - divide(p.by_page_size, then) * p.page_size;
                    const char *from = (const char *)p.kv + (page_then * p.kv_page_stride + row_then * p.kv_row_stride) * 2;
#pragma unroll 1
                    for (int32_t r = lane; r < p.box_rows && then + r < past; r += 32) {
#pragma unroll
                        for (int c = 0; c < CHUNKS; c++) {
                            mlai_prefetch_l2(from + r * p.kv_row_stride * 2 + c * 128);
                        }
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                page[i] = page[i + 1];
            }
            page[AHEAD] = page_after;
        }
    }
}

/* Four warps: eight threads a row, four rows a thread, 16 bytes a copy; dead rows become zero. A
 * block is handed over once the next one is under way, or before the ring would make us wait. */
template <int Rows, int Share>
MLAI_DEV void produce_gather(const params &p, tail &s, uint32_t ring, walk<Rows, Share> w)
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
            next_page[i] = w.block_begin < w.block_end && token < len ? table[divide(p.by_page_size, token)] : 0;
        }
        for (int32_t block = w.block_begin; block < w.block_end; block++, n++) {
            const uint32_t stage = n % STAGES, parity = (n / STAGES) & 1;
            const char *from[4];
            bool live[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int32_t token = block * KEYS + row0 + 16 * i;
                const int64_t page = clamp_page(p, next_page[i]);
                const int64_t row = token - divide(p.by_page_size, token) * p.page_size;
                live[i] = token < len;
                from[i] = (const char *)p.kv + (page * p.kv_page_stride + row * p.kv_row_stride) * 2 + piece * 16;
                const int32_t after = token + KEYS;
                next_page[i] = block + 1 < w.block_end && after < len ? table[divide(p.by_page_size, after)] : 0;
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
                    mlai_cp_async_16_zfill(to + chunk * CHUNK_BYTES, from[i] + chunk * 128, live[i]);
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

/* ---- scores ---------------------------------------------------------------------------------- */

/* Rows [first_row, first_row + Rows) of the request into shared memory, chunk by chunk, each a
 * 128-byte-swizzled Rows x 64; rows past the request's last are zero. Also each row's keys. */
template <int Rows, int Threads> MLAI_DEV void issue_queries(const params &p, int32_t *row_len, uint32_t q_smem, const request &r,
                                                int32_t first_row)
{
    const int32_t tid = threadIdx.x % Threads, piece = tid % 8;
    const int32_t rows = r.q_len * p.heads;
#pragma unroll 1
    for (int32_t row = tid / 8; row < Rows; row += Threads / 8) {
        const int32_t at = first_row + row;
        const bool live = at < rows;
        const int32_t token = live ? divide(p.by_heads, at) : 0, head = live ? at - token * p.heads : 0;
        const char *from =
            (const char *)p.q + piece * 16 +
            ((int64_t)(r.first_token + token) * p.q_token_stride + (int64_t)head * p.q_head_stride) * 2;
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
template <int Rows, int Threads> MLAI_DEV void prefetch_queries(const params &p, const request &r, int32_t first_row)
{
    const int32_t tid = threadIdx.x % Threads, rows = r.q_len * p.heads;
#pragma unroll 1
    for (int32_t i = tid; i < Rows * CHUNKS; i += Threads) {
        const int32_t at = first_row + i / CHUNKS, token = divide(p.by_heads, at), head = at - token * p.heads;
        if (at < rows) {
            mlai_prefetch_l2((const char *)p.q + i % CHUNKS * 128 +
                             ((int64_t)(r.first_token + token) * p.q_token_stride + (int64_t)head * p.q_head_stride) * 2);
        }
    }
}

/* cap tanh(x) = cap (1 - 2 / (1 + exp(2 x))); tanh_scale turns s into 2 x log2(e) */
MLAI_DEV float capped_logit(float s, float tanh_scale, float cap_log2)
{
    return cap_log2 * (1.0f - 2.0f * mlai_rcp(1.0f + mlai_exp2(s * tanh_scale)));
}

template <int Format, int Rows, int Share>
MLAI_DEV void scores(const params &p, tail &s, uint32_t ring, uint32_t q_ring, walk<Rows, Share> ahead, uint32_t rank)
{
    constexpr bool KEYS_ON_M = Rows < 64;
    constexpr int N = KEYS_ON_M ? Rows : KEYS;
    constexpr int STATS = KEYS_ON_M ? Rows / 4 : 2; /* rows a thread has scores of */
    const int32_t lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
    const float log2e = 1.4426950408889634f;
    const float scale_log2 = p.softmax_scale * log2e;
    const bool capped = p.logit_cap > 0.0f;
    const float tanh_scale = capped ? 2.0f * log2e * p.softmax_scale / p.logit_cap : 0.0f;
    const float cap_log2 = p.logit_cap * log2e;
    uint32_t n = 0, buffer = 0;
    while (ahead.live() && !ahead.has_blocks()) {
        ahead.advance(p);
    }
    if (QUERY_BUFFERS<Rows> == 2 && ahead.live()) {
        issue_queries<Rows, 128>(p, s.row_len[0], q_ring, ahead.now, (ahead.tile * Share + (int32_t)rank) * Rows);
    }
    while (ahead.live()) {
        const int32_t block_begin = ahead.block_begin, block_end = ahead.block_end;
        const int32_t first_row = (ahead.tile * Share + (int32_t)rank) * Rows;
        const int32_t shortest = visible_keys(p, ahead.now, divide(p.by_heads, first_row));
        const uint32_t q_smem = q_ring + buffer * Rows * 1152;
        const int32_t *row_len = s.row_len[buffer];
        if (QUERY_BUFFERS<Rows> == 1) {
            issue_queries<Rows, 128>(p, s.row_len[0], q_ring, ahead.now, first_row);
        }
        do {
            ahead.advance(p);
        } while (ahead.live() && !ahead.has_blocks());
        mlai_cp_async_wait<0>();
        mlai_fence_proxy_async_shared(); /* orders the copies before wgmma's reads */
        mlai_bar_sync(BAR_SCORES, 128);  /* orders all copies before their use, earlier reads before new copies */
        if (ahead.live()) {
            const int32_t row = (ahead.tile * Share + (int32_t)rank) * Rows;
            if (QUERY_BUFFERS<Rows> == 2) {
                buffer ^= 1;
                issue_queries<Rows, 128>(p, s.row_len[buffer], q_ring + buffer * Rows * 1152, ahead.now, row);
            } else {
                prefetch_queries<Rows, 128>(p, ahead.now, row);
            }
        }
        float reference[STATS], sum[STATS];
#pragma unroll
        for (int i = 0; i < STATS; i++) {
            reference[i] = NEG_INF;
            sum[i] = 0.0f;
        }
#pragma unroll 1
        for (int32_t block = block_begin; block < block_end; block++, n++) {
            const uint32_t stage = n % STAGES, parity = (n / STAGES) & 1;
            const uint32_t base = ring + stage * STAGE_BYTES;
            float d[N / 2];
#pragma unroll 1
            for (int32_t i = 0; i < CHUNKS; i++) {
                if (i % 4 == 0) {
                    mlai_mbar_wait(mlai_smem_u32(&s.full[stage][i / 4]), parity);
                }
                mlai_wgmma_fence();
                const int32_t c = chunk_at(i);
                const uint64_t k = mlai_wgmma_descriptor(base + c * CHUNK_BYTES, 0, 1024, MLAI_SWIZZLE_128);
                const uint64_t q = mlai_wgmma_descriptor(q_smem + c * Rows * 128, 0, 1024, MLAI_SWIZZLE_128);
#pragma unroll
                for (int kk = 0; kk < 4; kk++) {
                    mma<Format, N, 0, 0>(d, (KEYS_ON_M ? k : q) + 2 * kk, (KEYS_ON_M ? q : k) + 2 * kk,
                                         i > 0 || kk > 0);
                }
            }
            mlai_wgmma_commit();
            mlai_wgmma_wait<0>();
            mlai_wgmma_fence_operand(d);
            if (capped) {
#pragma unroll
                for (int i = 0; i < N / 2; i++) {
                    d[i] = capped_logit(d[i], tanh_scale, cap_log2);
                }
            } else {
#pragma unroll
                for (int i = 0; i < N / 2; i++) {
                    d[i] *= scale_log2;
                }
            }
            /* d[4 i + e]: key and row of element e of group i */
            if (block * KEYS + KEYS > shortest) {
#pragma unroll
                for (int i = 0; i < N / 8; i++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int32_t m = warp * 16 + lane / 4 + (e / 2) * 8, c = i * 8 + (lane % 4) * 2 + e % 2;
                        const int32_t key = block * KEYS + (KEYS_ON_M ? m : c);
                        d[4 * i + e] = key < row_len[KEYS_ON_M ? c : m] ? d[4 * i + e] : NEG_INF;
                    }
                }
            }
            /* The largest score of each of this thread's rows, over what this thread holds. */
            float top[STATS];
#pragma unroll
            for (int i = 0; i < STATS; i++) {
                if constexpr (KEYS_ON_M) {
                    top[i] = fmaxf(d[4 * (i / 2) + i % 2], d[4 * (i / 2) + 2 + i % 2]);
                } else {
                    top[i] = NEG_INF;
#pragma unroll
                    for (int k = 0; k < N / 8; k++) {
                        top[i] = fmaxf(top[i], fmaxf(d[4 * k + 2 * i], d[4 * k + 2 * i + 1]));
                    }
                }
            }
            bool raise = false;
#pragma unroll
            for (int i = 0; i < STATS; i++) {
                raise = raise || top[i] > reference[i] + LAZY_MAX || (reference[i] == NEG_INF && top[i] > NEG_INF);
            }
            /* With the keys on M a row is spread over the warps, which raise its maximum together; else it
             * is a warp's own. */
            raise = KEYS_ON_M ? mlai_bar_red_or(BAR_SCORES, 128, raise) : __any_sync(0xffffffffu, raise);
            if (raise) {
                if constexpr (KEYS_ON_M) {
#pragma unroll
                    for (int i = 0; i < STATS; i++) {
#pragma unroll
                        for (int x = 4; x < 32; x *= 2) {
                            top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], x));
                        }
                        if (lane < 4) {
                            s.warp_stat[warp][(i / 2) * 8 + lane * 2 + i % 2] = top[i];
                        }
                    }
                    mlai_bar_sync(BAR_SCORES, 128); /* orders the warps' maxima before their readers */
#pragma unroll
                    for (int i = 0; i < STATS; i++) {
                        const int32_t c = (i / 2) * 8 + (lane % 4) * 2 + i % 2;
                        top[i] = fmaxf(fmaxf(s.warp_stat[0][c], s.warp_stat[1][c]),
                                       fmaxf(s.warp_stat[2][c], s.warp_stat[3][c]));
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < STATS; i++) {
                        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 1));
                        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 2));
                    }
                }
#pragma unroll
                for (int i = 0; i < STATS; i++) {
                    const bool up = top[i] > reference[i] + LAZY_MAX || (reference[i] == NEG_INF && top[i] > NEG_INF);
                    const float to = up ? top[i] : reference[i];
                    const float alpha = up ? mlai_exp2(reference[i] - to) : 1.0f;
                    reference[i] = to;
                    sum[i] *= alpha;
                    const int32_t row = KEYS_ON_M ? (i / 2) * 8 + (lane % 4) * 2 + i % 2 : warp * 16 + lane / 4 + i * 8;
                    if (KEYS_ON_M ? warp == 0 && lane < 4 : lane % 4 == 0) {
                        s.alpha[stage][row] = alpha;
                    }
                }
            }
            if (lane == 0) {
                s.rescale[stage][warp] = raise && block > block_begin;
            }
            float shift[STATS];
#pragma unroll
            for (int i = 0; i < STATS; i++) {
                shift[i] = reference[i] == NEG_INF ? 0.0f : reference[i];
            }
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int row = KEYS_ON_M ? 2 * i + e % 2 : e / 2;
                    d[4 * i + e] = mlai_exp2(d[4 * i + e] - shift[row]);
                    sum[row] += d[4 * i + e];
                }
            }
            if (!KEYS_ON_M) {
                mlai_bar_sync(BAR_SCORES, 128); /* orders every warp's S before P goes over the rope columns */
            }
            /* P as Rows x 64 keys, 128 bytes a row, swizzled: over chunk 8 of the block. */
            const uint32_t p_smem = base + 8 * CHUNK_BYTES;
            if constexpr (KEYS_ON_M) {
                /* transposed 8x8 matrices: rows (heads) 8 i, keys 16 warp and 16 warp + 8 */
#pragma unroll
                for (int i = 0; i < N / 8; i += 2) {
                    const int32_t row = i * 8 + lane % 8 + (lane / 16) * 8, piece = warp * 2 + (lane / 8) % 2;
                    const uint32_t to = p_smem + row * 128 + ((piece ^ (row & 7)) << 4);
                    if constexpr (N >= 16) {
                        mlai_stmatrix_x4_trans(to, pack<Format>(d[4 * i], d[4 * i + 1]),
                                               pack<Format>(d[4 * i + 2], d[4 * i + 3]),
                                               pack<Format>(d[4 * i + 4], d[4 * i + 5]),
                                               pack<Format>(d[4 * i + 6], d[4 * i + 7]));
                    } else {
                        mlai_stmatrix_x2_trans(to, pack<Format>(d[0], d[1]), pack<Format>(d[2], d[3]));
                    }
                }
            } else {
                /* 8x8 matrices: rows 16 warp + {0, 8}, keys 8 i and 8 i + 8 */
#pragma unroll
                for (int i = 0; i < N / 8; i += 2) {
                    const int32_t row = warp * 16 + lane % 16, piece = i + lane / 16;
                    const uint32_t to = p_smem + row * 128 + ((piece ^ (row & 7)) << 4);
                    mlai_stmatrix_x4(to, pack<Format>(d[4 * i], d[4 * i + 1]), pack<Format>(d[4 * i + 2], d[4 * i + 3]),
                                     pack<Format>(d[4 * i + 4], d[4 * i + 5]),
                                     pack<Format>(d[4 * i + 6], d[4 * i + 7]));
                }
            }
            if (block + 1 == block_end) {
#pragma unroll
                for (int i = 0; i < STATS; i++) {
                    if constexpr (KEYS_ON_M) {
#pragma unroll
                        for (int x = 4; x < 32; x *= 2) {
                            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], x);
                        }
                        if (lane < 4) {
                            s.warp_stat[warp][(i / 2) * 8 + lane * 2 + i % 2] = sum[i];
                        }
                    } else {
                        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
                        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
                    }
                }
                if constexpr (KEYS_ON_M) {
                    mlai_bar_sync(BAR_SCORES, 128); /* orders the warps' sums before their readers */
                }
#pragma unroll
                for (int i = 0; i < STATS; i++) {
                    const int32_t row = KEYS_ON_M ? (i / 2) * 8 + (lane % 4) * 2 + i % 2 : warp * 16 + lane / 4 + i * 8;
                    if (KEYS_ON_M ? warp == 0 && lane < 4 : lane % 4 == 0) {
                        const float all = !KEYS_ON_M ? sum[i] : s.warp_stat[0][row] + s.warp_stat[1][row] +
                                                                    s.warp_stat[2][row] + s.warp_stat[3][row];
                        s.inverse_sum[stage][row] = all > 0.0f ? 1.0f / all : 0.0f;
                        s.lse2[stage][row] = all > 0.0f ? reference[i] + mlai_log2(all) : NEG_INF;
                    }
                }
            }
            mlai_fence_proxy_async_shared(); /* orders P before wgmma's reads */
            __syncwarp();                    /* orders the warp's P and statistics before its arrival */
            if (lane == 0) {
                mlai_mbar_arrive(mlai_smem_u32(&s.p_full[stage]));
            }
        }
    }
}

/* ---- values ---------------------------------------------------------------------------------- */

/* A value thread holds GROUPS_OF_4 groups of 4 floats. For Rows < 64, group t * Rows / 8 + i is columns
 * half * 256 + t * 64 + warp * 16 + lane / 4 + {0, 0, 8, 8} of rows 8 i + 2 (lane % 4) + {0, 1, 0, 1}; for
 * 64, group i is rows 16 warp + lane / 4 + {0, 0, 8, 8}, columns half * 256 + 8 i + 2 (lane % 4) + {0, 1, 0,
 * 1}. A warp's part of a group is a line of 128 floats; partials keep lines in an order in which those of
 * the same rows (a class) are neighbours. */
template <int Rows> struct fragment {
    static constexpr bool KEYS_ON_M = Rows < 64;
    static constexpr int GROUPS_OF_4 = KEYS_ON_M ? Rows / 2 : 32;
    static constexpr int CLASSES = KEYS_ON_M ? Rows / 8 : 4;
    static constexpr int CLASS_LINES = KEYS_ON_M ? 32 : 64;
    static constexpr int LINES = CLASSES * CLASS_LINES;
    static constexpr int LINE_COLUMNS = KEYS_ON_M ? 16 : 8;

    MLAI_DEV int32_t line_of(int32_t half, int32_t group, int32_t warp)
    {
        return KEYS_ON_M ? group % CLASSES * CLASS_LINES + (half * 4 + group / CLASSES) * 4 + warp
                         : warp * CLASS_LINES + half * 32 + group;
    }
};

/* Where a thread stores its part of a group: its row or, for two rows, both. `row_class`: see fragment. */
struct row_places {
    int64_t at0, at1;
    bool live0, live1;
};

template <int Rows> MLAI_DEV row_places locate_rows(const params &p, const tile_out &t, int32_t row_class)
{
    const int32_t lane = threadIdx.x % 32;
    int32_t row0, row1;
    if constexpr (fragment<Rows>::KEYS_ON_M) {
        row0 = row_class * 8 + (p.out_f32 ? (lane % 4) * 2 : lane / 4);
        row1 = row0 + (p.out_f32 ? 1 : 0);
    } else {
        row0 = row_class * 16 + lane / 4;
        row1 = row0 + 8;
    }
    row_places r;
    const int32_t at0 = t.first_row + row0, at1 = t.first_row + row1;
    const int32_t token0 = divide(p.by_heads, at0), token1 = divide(p.by_heads, at1);
    r.live0 = at0 < t.rows;
    r.live1 = at1 < t.rows;
    r.at0 = (int64_t)(t.first_token + token0) * p.out_token_stride +
            (int64_t)(at0 - token0 * p.heads) * p.out_head_stride;
    r.at1 = (int64_t)(t.first_token + token1) * p.out_token_stride +
            (int64_t)(at1 - token1 * p.heads) * p.out_head_stride;
    return r;
}

/* Stores one line, all lanes together; `column` is that of the line's first element. */
template <int Format, int Rows, bool F32>
MLAI_DEV void store_line_as(const params &p, const row_places &r, int32_t column, float4 v)
{
    const int32_t lane = threadIdx.x % 32;
    if constexpr (fragment<Rows>::KEYS_ON_M && F32) {
        float *out = (float *)p.out + column + lane / 4;
        if (r.live0) {
            out[r.at0] = v.x;
            out[r.at0 + 8] = v.z;
        }
        if (r.live1) {
            out[r.at1] = v.y;
            out[r.at1 + 8] = v.w;
        }
    } else if constexpr (fragment<Rows>::KEYS_ON_M) {
        /* from (column, two rows) to (row, two columns) */
        const uint32_t low = mlai_movmatrix_trans(pack<Format>(v.x, v.y));
        const uint32_t high = mlai_movmatrix_trans(pack<Format>(v.z, v.w));
        if (r.live0) {
            uint16_t *out = (uint16_t *)p.out + r.at0 + (lane % 4) * 2 + column;
            *(uint32_t *)out = low;
            *(uint32_t *)(out + 8) = high;
        }
    } else if constexpr (F32) {
        if (r.live0) {
            mlai_st_f32x2((float *)p.out + r.at0 + (lane % 4) * 2 + column, v.x, v.y);
        }
        if (r.live1) {
            mlai_st_f32x2((float *)p.out + r.at1 + (lane % 4) * 2 + column, v.z, v.w);
        }
    } else {
        if (r.live0) {
            *(uint32_t *)((uint16_t *)p.out + r.at0 + (lane % 4) * 2 + column) = pack<Format>(v.x, v.y);
        }
        if (r.live1) {
            *(uint32_t *)((uint16_t *)p.out + r.at1 + (lane % 4) * 2 + column) = pack<Format>(v.z, v.w);
        }
    }
}

template <int Format, int Rows>
MLAI_DEV void store_line(const params &p, const row_places &r, int32_t column, float4 v)
{
    if (p.out_f32) {
        store_line_as<Format, Rows, true>(p, r, column, v);
    } else {
        store_line_as<Format, Rows, false>(p, r, column, v);
    }
}

/* A value thread's whole share of a tile. */
template <int Format, int Rows, bool F32, int Tiles, int Regs>
MLAI_DEV void store_tile(const params &p, const tile_out &t, int32_t half, int32_t warp, const float (&o)[Tiles][Regs])
{
    typedef fragment<Rows> F;
    /* rows differ from group to group only with the keys on M */
#pragma unroll
    for (int i = 0; i < (F::KEYS_ON_M ? F::CLASSES : 1); i++) {
        const row_places places = locate_rows<Rows>(p, t, F::KEYS_ON_M ? i : warp);
#pragma unroll
        for (int g = i; g < F::GROUPS_OF_4; g += F::KEYS_ON_M ? F::CLASSES : 1) {
            const int k = g / (Regs / 4), e = g % (Regs / 4) * 4;
            store_line_as<Format, Rows, F32>(p, places, half * 256 + (F::KEYS_ON_M ? k * 64 + warp * 16 : g * 8),
                                             make_float4(o[k][e], o[k][e + 1], o[k][e + 2], o[k][e + 3]));
        }
    }
}

MLAI_DEV void store_lse(const params &p, const tile_out &t, int32_t row, float lse2)
{
    if (p.lse && t.first_row + row < t.rows) {
        const int32_t at = t.first_row + row, token = divide(p.by_heads, at);
        p.lse[(int64_t)(t.first_token + token) * p.lse_token_stride + at - token * p.heads] = lse2 * 0.6931471805599453f;
    }
}

struct merge_state {
    float4 sum;
    float top0, top1, weight0, weight1;
};

/* The two rows of a lane's part of a line. */
template <int Rows> MLAI_DEV int32_t lane_row(int32_t row_class, int32_t which)
{
    const int32_t lane = threadIdx.x % 32;
    return fragment<Rows>::KEYS_ON_M ? row_class * 8 + (lane % 4) * 2 + which
                                     : row_class * 16 + lane / 4 + 8 * which;
}

/* x, z belong to row 0 and y, w to row 1 with the keys on M, else x, y and z, w. */
template <int Rows> MLAI_DEV void scale_add(float4 &to, float a0, float a1, float4 v, float b0, float b1)
{
    constexpr bool M = fragment<Rows>::KEYS_ON_M;
    to.x = to.x * a0 + v.x * b0;
    to.y = to.y * (M ? a1 : a0) + v.y * (M ? b1 : b0);
    to.z = to.z * (M ? a0 : a1) + v.z * (M ? b0 : b1);
    to.w = to.w * a1 + v.w * b1;
}

MLAI_DEV float finite_or_0(float x)
{
    return x == NEG_INF ? 0.0f : x;
}

MLAI_DEV int32_t merge_slot(const merge_job &job, int32_t piece)
{
    return 2 * (job.first_cta + piece * job.cta_step) + (piece == 0);
}

/* A lane's rows of a class: where they go, and 1 / their weight; also stores their LSE when asked to. */
template <int Rows> struct class_out {
    row_places places;
    float scale0, scale1;

    MLAI_DEV class_out make(const params &p, const merge_job &job, int32_t row_class, const merge_state &m, bool speaks)
    {
        const int32_t lane = threadIdx.x % 32;
        class_out c;
        c.places = locate_rows<Rows>(p, job.out, row_class);
        c.scale0 = m.weight0 > 0.0f ? mlai_rcp(m.weight0) : 0.0f;
        c.scale1 = m.weight1 > 0.0f ? mlai_rcp(m.weight1) : 0.0f;
        if (speaks && (fragment<Rows>::KEYS_ON_M ? lane < 4 : lane % 4 == 0)) {
            store_lse(p, job.out, lane_row<Rows>(row_class, 0), m.top0 + mlai_log2(m.weight0));
            store_lse(p, job.out, lane_row<Rows>(row_class, 1), m.top1 + mlai_log2(m.weight1));
        }
        return c;
    }
};

/* Lines [from, to) of few pieces: a warp takes AT_ONCE lines with all their pieces in flight. */
template <int Format, int Rows, int Pieces>
MLAI_DEV void merge_few(const params &p, const merge_job &job, int32_t from, int32_t to)
{
    typedef fragment<Rows> F;
    constexpr int AT_ONCE = Rows < 64 ? 4 : 2;
    const int32_t warp = (threadIdx.x / 32) % 8, lane = threadIdx.x % 32;
    int32_t known_class = -1;
    float w0[Pieces], w1[Pieces];
    row_places places;
#pragma unroll 1
    for (int32_t base = from + warp * AT_ONCE; base < to; base += 8 * AT_ONCE) {
        const float *from_here = p.partial + base * 128 + lane * 4;
        float4 v[AT_ONCE][Pieces];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
#pragma unroll
            for (int k = 0; k < Pieces; k++) {
                v[i][k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (k < job.pieces && base + i < to) {
                    v[i][k] = mlai_ld_cg_f32x4(from_here + (int64_t)merge_slot(job, k) * (Rows * 512) + i * 128);
                }
            }
        }
        const int32_t row_class = base / F::CLASS_LINES;
        if (row_class != known_class) {
            known_class = row_class;
            merge_state m = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), NEG_INF, NEG_INF, 0.0f, 0.0f};
#pragma unroll
            for (int k = 0; k < Pieces; k++) {
                w0[k] = w1[k] = NEG_INF;
                if (k < job.pieces) {
                    w0[k] = mlai_ld_cg_f32(p.partial_lse + merge_slot(job, k) * Rows + lane_row<Rows>(row_class, 0));
                    w1[k] = mlai_ld_cg_f32(p.partial_lse + merge_slot(job, k) * Rows + lane_row<Rows>(row_class, 1));
                }
                m.top0 = fmaxf(m.top0, w0[k]);
                m.top1 = fmaxf(m.top1, w1[k]);
            }
#pragma unroll
            for (int k = 0; k < Pieces; k++) {
                m.weight0 += w0[k] = mlai_exp2(w0[k] - finite_or_0(m.top0));
                m.weight1 += w1[k] = mlai_exp2(w1[k] - finite_or_0(m.top1));
            }
            const class_out<Rows> c = class_out<Rows>::make(p, job, row_class, m, base % F::CLASS_LINES == 0);
            places = c.places;
#pragma unroll
            for (int k = 0; k < Pieces; k++) {
                w0[k] *= c.scale0;
                w1[k] *= c.scale1;
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int k = 0; k < Pieces; k++) {
                scale_add<Rows>(sum, 1.0f, 1.0f, v[i][k], w0[k], w1[k]);
            }
            if (base + i < to) {
                store_line<Format, Rows>(p, places, (base + i) % F::CLASS_LINES * F::LINE_COLUMNS, sum);
            }
        }
    }
}

/* One warp: pieces [from, to) of a line, in order. */
template <int Rows>
MLAI_DEV merge_state merge_pieces(const params &p, const merge_job &job, int32_t line, int32_t from, int32_t to)
{
    constexpr int BATCH = 9;
    const int32_t lane = threadIdx.x % 32, row_class = line / fragment<Rows>::CLASS_LINES;
    const int32_t row0 = lane_row<Rows>(row_class, 0), row1 = lane_row<Rows>(row_class, 1);
    const float *values = p.partial + line * 128 + lane * 4, *lses = p.partial_lse + row0;
    merge_state m = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), NEG_INF, NEG_INF, 0.0f, 0.0f};
    int32_t base = from;
    do {
        float4 v[BATCH];
        float l0[BATCH], l1[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            l0[i] = l1[i] = NEG_INF;
            if (base + i < to) {
                const int32_t slot = merge_slot(job, base + i);
                v[i] = mlai_ld_cg_f32x4(values + (int64_t)slot * (Rows * 512));
                l0[i] = mlai_ld_cg_f32(lses + slot * Rows);
                l1[i] = mlai_ld_cg_f32(lses + slot * Rows + row1 - row0);
            }
        }
        float top0 = m.top0, top1 = m.top1;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            top0 = fmaxf(top0, l0[i]);
            top1 = fmaxf(top1, l1[i]);
        }
        float a0 = mlai_exp2(m.top0 - finite_or_0(top0)), a1 = mlai_exp2(m.top1 - finite_or_0(top1));
        m.weight0 *= a0;
        m.weight1 *= a1;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float w0 = mlai_exp2(l0[i] - finite_or_0(top0)), w1 = mlai_exp2(l1[i] - finite_or_0(top1));
            scale_add<Rows>(m.sum, a0, a1, v[i], w0, w1);
            m.weight0 += w0;
            m.weight1 += w1;
            a0 = a1 = 1.0f;
        }
        m.top0 = top0;
        m.top1 = top1;
        base += BATCH;
    } while (base < to);
    return m;
}

/* Lines [from, to) of many pieces: 1, 2, 4 or 8 warps share a line, whichever takes the fewest turns. */
template <int Format, int Rows>
MLAI_DEV void merge_many(const params &p, const merge_job &job, int32_t from, int32_t to, merge_state *scratch)
{
    typedef fragment<Rows> F;
    const int32_t warp = (threadIdx.x / 32) % 8, lane = threadIdx.x % 32, lines = to - from;
    int32_t shift = 0, best = 0x7fffffff;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int32_t turns = ((lines << i) + 7) / 8 * ((((job.pieces + (1 << i) - 1) >> i) + 8) / 9);
        shift = turns < best ? i : shift;
        best = turns < best ? turns : best;
    }
    const int32_t sharers = 1 << shift, part = warp & (sharers - 1);
#pragma unroll 1
    for (int32_t base = from; base < to; base += 8 >> shift) {
        const int32_t line = base + (warp >> shift);
        merge_state m;
        if (line < to) {
            m = merge_pieces<Rows>(p, job, line, part * job.present >> shift, (part + 1) * job.present >> shift);
            if (job.present) {
                scratch[warp * 32 + lane] = m;
            }
        }
        if (sharers > 1) {
            mlai_bar_sync(BAR_VALUES, 256); /* orders the warps' shares before their reader */
        }
        if (line < to && part == 0) {
            if (sharers > 1) {
                float t0[8], t1[8];
                float top0 = NEG_INF, top1 = NEG_INF;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    t0[i] = i < sharers ? scratch[(warp + i) % 8 * 32 + lane].top0 : NEG_INF;
                    t1[i] = i < sharers ? scratch[(warp + i) % 8 * 32 + lane].top1 : NEG_INF;
                    top0 = fmaxf(top0, t0[i]);
                    top1 = fmaxf(top1, t1[i]);
                }
                m = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), top0, top1, 0.0f, 0.0f};
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    if (i < sharers) {
                        const merge_state &o = scratch[(warp + i) % 8 * 32 + lane];
                        const float a0 = mlai_exp2(t0[i] - finite_or_0(top0)), a1 = mlai_exp2(t1[i] - finite_or_0(top1));
                        scale_add<Rows>(m.sum, 1.0f, 1.0f, o.sum, a0, a1);
                        m.weight0 += o.weight0 * a0;
                        m.weight1 += o.weight1 * a1;
                    }
                }
            }
            const int32_t row_class = line / F::CLASS_LINES, rest = line % F::CLASS_LINES;
            const class_out<Rows> c = class_out<Rows>::make(p, job, row_class, m, rest == 0);
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            scale_add<Rows>(v, 0.0f, 0.0f, m.sum, c.scale0, c.scale1);
            store_line<Format, Rows>(p, c.places, rest * F::LINE_COLUMNS, v);
        }
        if (sharers > 1) {
            mlai_bar_sync(BAR_VALUES, 256); /* orders the reader before the next shares */
        }
    }
}

/* The eight value warps: this CTA's slice of the tile. */
template <int Format, int Rows>
MLAI_DEV void merge_slice(const params &p, const merge_job &job, merge_state *scratch)
{
    constexpr int UNITS = fragment<Rows>::LINES / 8;
    if (job.pieces > 4) {
        constexpr int LINES = fragment<Rows>::LINES;
        merge_many<Format, Rows>(p, job, job.mine * LINES / job.pieces, (job.mine + 1) * LINES / job.pieces, scratch);
    } else {
        /* whole eights of lines, which never straddle two classes */
        merge_few<Format, Rows, 4>(p, job, job.mine * UNITS / job.pieces * 8, (job.mine + 1) * UNITS / job.pieces * 8);
    }
}

/* What a piece that does not hold its whole tile leaves to do after the last piece; one thread. */
template <int Rows, int Share>
MLAI_DEV void note_job(const params &p, tail &s, const plan &cuts, const walk<Rows, Share> &w, const tile_out &out,
                       uint32_t rank)
{
    const int32_t first = cuts.stretch_of(w.tile_start + p.item_cost);
    merge_job &job = s.jobs[w.block_begin == 0];
    job.out = out;
    job.first_cta = first * Share + (int32_t)rank;
    job.cta_step = Share;
    job.pieces = cuts.stretch_of(w.tile_start + w.cost - 1) - first + 1;
    job.present = job.pieces;
    job.mine = (int32_t)blockIdx.x / Share - first;
    /* Bit 31 cannot flip before this CTA's own partial is counted. */
    job.ticket = mlai_ld_relaxed_gpu(p.counters + job.first_cta);
}

/* All value threads: normalised O to its place, or to the partials, which are then counted. */
template <int Format, int Rows, int Tiles, int Regs>
MLAI_DEV void finish_piece(const params &p, tail &s, const tile_out &out, bool whole, bool first,
                           const float (&o)[Tiles][Regs], float my_lse2)
{
    typedef fragment<Rows> F;
    const int32_t thread256 = threadIdx.x % 256, lane = threadIdx.x % 32, warp = thread256 / 32 % 4;
    const int32_t half = thread256 / 128;
    if (!whole) {
        const int64_t slot = 2 * (int64_t)blockIdx.x + first;
        float *partial = p.partial + slot * Rows * 512 + lane * 4;
#pragma unroll
        for (int g = 0; g < F::GROUPS_OF_4; g++) {
            const int t = g / (Regs / 4), e = g % (Regs / 4) * 4;
            mlai_st_f32x4(partial + F::line_of(half, g, warp) * 128, o[t][e], o[t][e + 1], o[t][e + 2], o[t][e + 3]);
        }
        if (thread256 < Rows) {
            p.partial_lse[slot * Rows + thread256] = my_lse2;
        }
        mlai_bar_sync(BAR_VALUES, 256); /* orders all threads' partials before the release that counts them */
        if (thread256 == 0) {
            const merge_job &job = s.jobs[first];
            mlai_red_add_release_gpu(p.counters + job.first_cta,
                                     job.mine == 0 ? 0x80000000u - (uint32_t)(job.pieces - 1) : 1u);
        }
    } else {
        if (p.out_f32) {
            store_tile<Format, Rows, true>(p, out, half, warp, o);
        } else {
            store_tile<Format, Rows, false>(p, out, half, warp, o);
        }
        if (thread256 < Rows) {
            store_lse(p, out, thread256, my_lse2);
        }
    }
}

/* An item of no keys. */
template <int Format, int Rows> MLAI_DEV void store_empty(const params &p, const tile_out &out)
{
    typedef fragment<Rows> F;
    for (int32_t line = threadIdx.x % 256 / 32; line < F::LINES; line += 8) {
        store_line<Format, Rows>(p, locate_rows<Rows>(p, out, line / F::CLASS_LINES),
                                 line % F::CLASS_LINES * F::LINE_COLUMNS, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    }
    if (threadIdx.x % 256 < Rows) {
        store_lse(p, out, threadIdx.x % 256, NEG_INF);
    }
}

template <int Load> MLAI_DEV void release(tail &s, uint32_t stage, int32_t part, uint32_t rank)
{
    __syncwarp(); /* orders the warp's reads of the stage before its release */
    if (threadIdx.x % 32 == 0) {
        const uint32_t empty = mlai_smem_u32(&s.empty[stage][part]);
        mlai_mbar_arrive(empty);
        if (Load == LOAD_PAIR) {
            mlai_mbar_arrive_cluster(mlai_mapa(empty, rank ^ 1));
        }
    }
}

template <int Format, int Rows, int Share, int Load>
MLAI_DEV void values(const params &p, tail &s, uint32_t ring, uint32_t rank)
{
    const plan cuts = s.found;
    walk<Rows, Share> w;
    w.start(p, cuts, (int32_t)blockIdx.x / Share);
    typedef fragment<Rows> F;
    constexpr bool KEYS_ON_M = F::KEYS_ON_M;
    /* Two products of 128 columns at 64 rows: ptxas takes none of 256 in a launch of 512 threads. */
    constexpr int TILES = KEYS_ON_M ? 4 : 2;
    constexpr int N = KEYS_ON_M ? Rows : 128;
    const int32_t tid = threadIdx.x % 128, lane = tid % 32, warp = tid / 32;
    const int32_t half = (threadIdx.x / 128) % 2, thread256 = threadIdx.x % 256;
    const uint32_t values_smem = half * 4 * CHUNK_BYTES;
    uint32_t n = 0;
    for (; w.live(); w.advance(p)) {
        tile_out out = {w.now.first_token, (w.tile * Share + (int32_t)rank) * Rows, w.now.q_len * p.heads};
        if (w.block_begin >= w.block_end) {
            if (w.owns_empty()) {
                store_empty<Format, Rows>(p, out);
            }
            continue;
        }
        const int32_t len = visible_keys(p, w.now, w.now.q_len - 1);
        const bool whole = w.block_begin == 0 && w.block_end == w.blocks;
        if (!whole && thread256 == 0) {
            note_job<Rows, Share>(p, s, cuts, w, out, rank);
        }
        float o[TILES][N / 2];
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                o[t][i] = 0.0f;
            }
        }
        float scale[KEYS_ON_M ? Rows / 4 : 2];
        float my_lse2 = NEG_INF;
        for (int32_t block = w.block_begin; block < w.block_end; block++, n++) {
            const uint32_t stage = n % STAGES, parity = (n / STAGES) & 1;
            const uint32_t base = ring + stage * STAGE_BYTES;
            mlai_mbar_wait(mlai_smem_u32(&s.p_full[stage]), parity);
            if (KEYS_ON_M ? s.rescale[stage][0] : s.rescale[stage][warp]) {
#pragma unroll
                for (int t = 0; t < TILES; t++) {
#pragma unroll
                    for (int i = 0; i < N / 8; i++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const int32_t row = KEYS_ON_M ? i * 8 + (lane % 4) * 2 + e % 2
                                                          : warp * 16 + lane / 4 + (e / 2) * 8;
                            o[t][4 * i + e] *= s.alpha[stage][row];
                        }
                    }
                }
            }
            if (block + 1 == w.block_end) {
                if constexpr (KEYS_ON_M) {
#pragma unroll
                    for (int i = 0; i < Rows / 4; i++) {
                        scale[i] = s.inverse_sum[stage][(i / 2) * 8 + (lane % 4) * 2 + i % 2];
                    }
                } else {
                    scale[0] = s.inverse_sum[stage][warp * 16 + lane / 4];
                    scale[1] = s.inverse_sum[stage][warp * 16 + lane / 4 + 8];
                }
                if (thread256 < Rows) {
                    my_lse2 = s.lse2[stage][thread256];
                }
            }
            if (block * KEYS + KEYS > len) {
                /* Rows past the live length may hold anything: 0 * NaN must not enter the product. */
                const int32_t dead = block * KEYS + KEYS - len, live = KEYS - dead;
                for (int32_t i = tid; i < dead * 32; i += 128) {
                    const int32_t row = live + i / 32, at = i % 32;
                    mlai_st_shared_zero_16(base + values_smem + (at / 8) * CHUNK_BYTES + row * 128 + (at % 8) * 16);
                }
                mlai_fence_proxy_async_shared();           /* orders the zeros before wgmma's reads */
                mlai_bar_sync(BAR_VALUES_HALF + half, 128); /* orders all threads' zeros before them */
            }
            const uint64_t v = mlai_wgmma_descriptor(base + values_smem, CHUNK_BYTES, 1024, MLAI_SWIZZLE_128);
            const uint64_t probs = mlai_wgmma_descriptor(base + 8 * CHUNK_BYTES, 0, 1024, MLAI_SWIZZLE_128);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                mlai_wgmma_fence_operand(o[t]);
            }
            mlai_wgmma_fence();
#pragma unroll
            for (int part = 0; part < 2; part++) {
#pragma unroll
                for (int kk = 0; kk < 4; kk++) {
#pragma unroll
                    for (int t = part * TILES / 2; t < (part + 1) * TILES / 2; t++) {
                        if constexpr (KEYS_ON_M) {
                            mma<Format, N, 1, 0>(o[t], v + t * (CHUNK_BYTES >> 4) + kk * 128, probs + 2 * kk,
                                                 1);
                        } else {
                            mma<Format, N, 0, 1>(o[t], probs + 2 * kk, v + t * (2 * CHUNK_BYTES >> 4) + kk * 128,
                                                 1);
                        }
                    }
                }
                mlai_wgmma_commit();
            }
            mlai_wgmma_wait<1>();
            release<Load>(s, stage, 0, rank); /* the first half of this warpgroup's columns is read */
            mlai_wgmma_wait<0>();
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                mlai_wgmma_fence_operand(o[t]);
            }
            release<Load>(s, stage, 1, rank); /* so are the others, and P */
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
                float4 x = make_float4(o[t][4 * i], o[t][4 * i + 1], o[t][4 * i + 2], o[t][4 * i + 3]);
                float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                scale_add<Rows>(y, 0.0f, 0.0f, x, scale[KEYS_ON_M ? 2 * i : 0], scale[KEYS_ON_M ? 2 * i + 1 : 1]);
                o[t][4 * i] = y.x;
                o[t][4 * i + 1] = y.y;
                o[t][4 * i + 2] = y.z;
                o[t][4 * i + 3] = y.w;
            }
        }
        finish_piece<Format, Rows>(p, s, out, whole, w.block_begin == 0, o, my_lse2);
    }
}

/* ---- tiles of 64 rows ------------------------------------------------------------------------ */

/* Two warpgroups of equal standing: block n belongs to warpgroup n % 2, which computes its S and P; both
 * add P V for their 256 columns, the owner with P still in registers. While one is in its softmax the
 * other keeps the tensor cores busy.
 *
 *   owner      S(n) = Q K(n) | softmax, P(n) out ---p_full--> | O += P(n) V(n)
 *   the other     O += P(n-1) V(n-1), its own                 | O += P(n) V(n) | S(n+1) ...
 *
 * Both follow one sequence of reference maxima: each P comes with the reference it was taken against. */
template <int Format, int Share, int Load>
MLAI_DEV void tiles_of_64(const params &p, tail &s, uint32_t ring, uint32_t q_smem, uint32_t rank)
{
    constexpr int ROWS = 64;
    const plan cuts = s.found;
    walk<ROWS, Share> w;
    w.start(p, cuts, (int32_t)blockIdx.x / Share);
    const int32_t tid = threadIdx.x % 128, lane = tid % 32, warp = tid / 32;
    const uint32_t half = (threadIdx.x / 128) % 2;
    const int32_t thread256 = threadIdx.x % 256, row0 = warp * 16 + lane / 4;
    const float log2e = 1.4426950408889634f;
    const bool capped = p.logit_cap > 0.0f;
    const float scale_log2 = p.softmax_scale * log2e, cap_log2 = p.logit_cap * log2e;
    const float tanh_scale = capped ? 2.0f * log2e * p.softmax_scale / p.logit_cap : 0.0f;
    float d[KEYS / 2];
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        d[i] = 0.0f;
    }
    uint32_t n = 0, piece = 0;
    for (; w.live(); w.advance(p)) {
        const tile_out out = {w.now.first_token, (w.tile * Share + (int32_t)rank) * ROWS, w.now.q_len * p.heads};
        if (!w.has_blocks()) {
            if (w.owns_empty()) {
                store_empty<Format, ROWS>(p, out);
            }
            continue;
        }
        const bool whole = w.block_begin == 0 && w.block_end == w.blocks;
        if (!whole && thread256 == 0) {
            note_job<ROWS, Share>(p, s, cuts, w, out, rank);
        }
        issue_queries<ROWS, 256>(p, s.row_len[0], q_smem, w.now, out.first_row);
        mlai_cp_async_wait<0>();
        mlai_fence_proxy_async_shared(); /* orders the copies before wgmma's reads */
        mlai_bar_sync(BAR_VALUES, 256);  /* orders all copies and row lengths before their use */
        const int32_t len = visible_keys(p, w.now, w.now.q_len - 1);
        const int32_t shortest = visible_keys(p, w.now, divide(p.by_heads, out.first_row));
        float o[1][128];
#pragma unroll
        for (int i = 0; i < 128; i++) {
            o[0][i] = 0.0f;
        }
        float reference[2] = {NEG_INF, NEG_INF}, sum[2] = {0.0f, 0.0f};
        const auto rescale = [&](float to0, float to1) {
            const float a0 = to0 == reference[0] ? 1.0f : mlai_exp2(reference[0] - to0);
            const float a1 = to1 == reference[1] ? 1.0f : mlai_exp2(reference[1] - to1);
            reference[0] = to0;
            reference[1] = to1;
            sum[0] *= a0;
            sum[1] *= a1;
#pragma unroll
            for (int i = 0; i < 128; i++) {
                o[0][i] *= i % 4 < 2 ? a0 : a1;
            }
        };
        const auto free_stage = [&](uint32_t stage) {
            release<Load>(s, stage, 0, rank);
            release<Load>(s, stage, 1, rank);
        };
        /* Rows past the live length may hold anything: 0 * NaN must not enter the product. */
        const auto clear_dead_rows = [&](int32_t block, uint32_t base) {
            if (block * KEYS + KEYS > len) {
                const int32_t dead = block * KEYS + KEYS - len, live = KEYS - dead;
                for (int32_t i = tid; i < dead * 32; i += 128) {
                    const int32_t row = live + i / 32, at = i % 32;
                    mlai_st_shared_zero_16(base + (half * 4 + at / 8) * CHUNK_BYTES + row * 128 + (at % 8) * 16);
                }
                mlai_fence_proxy_async_shared();            /* orders the zeros before wgmma's reads */
                mlai_bar_sync(BAR_VALUES_HALF + half, 128); /* orders all threads' zeros before them */
            }
        };
#pragma unroll 1
        for (int32_t block = w.block_begin; block < w.block_end; block++, n++) {
            const uint32_t stage = n % STAGES, parity = (n / STAGES) & 1;
            const uint32_t base = ring + stage * STAGE_BYTES, p_smem = base + 8 * CHUNK_BYTES;
            const uint64_t v =
                mlai_wgmma_descriptor(base + half * 4 * CHUNK_BYTES, CHUNK_BYTES, 1024, MLAI_SWIZZLE_128);
            if (stage == half) {
#pragma unroll
                for (int i = 0; i < CHUNKS; i++) {
                    constexpr int ORDER[CHUNKS] = {0, 1, 4, 5, 2, 3, 6, 7, 8};
                    if (i % 4 == 0) {
                        mlai_mbar_wait(mlai_smem_u32(&s.full[stage][i / 4]), parity);
                    }
                    mlai_wgmma_fence();
                    const int c = ORDER[i];
                    const uint64_t q = mlai_wgmma_descriptor(q_smem, 0, 1024, MLAI_SWIZZLE_128) +
                                       c * (ROWS * 128 >> 4);
                    const uint64_t k = mlai_wgmma_descriptor(base, 0, 1024, MLAI_SWIZZLE_128) + c * (CHUNK_BYTES >> 4);
#pragma unroll
                    for (int kk = 0; kk < 4; kk++) {
                        mma<Format, KEYS, 0, 0>(d, q + 2 * kk, k + 2 * kk, i > 0 || kk > 0);
                    }
                }
                mlai_wgmma_commit();
                mlai_wgmma_wait<1>();
                if (block > w.block_begin) {
                    free_stage(stage ^ 1); /* the product of the block before is done */
                }
                mlai_wgmma_wait<0>();
                mlai_wgmma_fence_operand(d);
                mlai_wgmma_fence_operand(o[0]);
                float x[KEYS / 2];
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) {
                    x[i] = d[i] * scale_log2;
                }
                if (capped) {
#pragma unroll
                    for (int i = 0; i < KEYS / 2; i++) {
                        x[i] = capped_logit(d[i], tanh_scale, cap_log2);
                    }
                }
                if (block * KEYS + KEYS > shortest) {
#pragma unroll
                    for (int i = 0; i < KEYS / 2; i++) {
                        const int32_t key = block * KEYS + i / 4 * 8 + (lane % 4) * 2 + i % 2;
                        x[i] = key < s.row_len[0][row0 + i / 2 % 2 * 8] ? x[i] : NEG_INF;
                    }
                }
                float top[2] = {NEG_INF, NEG_INF};
#pragma unroll
                for (int i = 0; i < KEYS / 2; i += 2) {
                    top[i / 2 % 2] = fmaxf(top[i / 2 % 2], fmaxf(x[i], x[i + 1]));
                }
                bool raise = false;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    raise = raise || top[i] > reference[i] + LAZY_MAX || (reference[i] == NEG_INF && top[i] > NEG_INF);
                }
                if (__any_sync(0xffffffffu, raise)) {
                    float to[2];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 1));
                        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 2));
                        to[i] = fmaxf(top[i], reference[i]);
                    }
                    rescale(to[0], to[1]);
                }
                const float shift[2] = {finite_or_0(reference[0]), finite_or_0(reference[1])};
                uint32_t probs[KEYS / 4];
#pragma unroll
                for (int i = 0; i < KEYS / 2; i += 2) {
                    const int r = i / 2 % 2;
                    x[i] = mlai_exp2(x[i] - shift[r]);
                    x[i + 1] = mlai_exp2(x[i + 1] - shift[r]);
                    sum[r] += x[i] + x[i + 1];
                    probs[i / 2] = pack<Format>(x[i], x[i + 1]);
                }
                mlai_bar_sync(BAR_VALUES_HALF + half, 128); /* orders every warp's S before P over the rope columns */
#pragma unroll
                for (int i = 0; i < KEYS / 8; i += 2) {
                    /* 8x8 matrices: rows 16 warp + {0, 8}, keys 8 i and 8 i + 8 */
                    const int32_t row = warp * 16 + lane % 16, part = i + lane / 16;
                    mlai_stmatrix_x4(p_smem + row * 128 + ((part ^ (row & 7)) << 4), probs[2 * i], probs[2 * i + 1],
                                     probs[2 * i + 2], probs[2 * i + 3]);
                }
                if (lane % 4 == 0) {
                    s.reference[stage][row0] = reference[0];
                    s.reference[stage][row0 + 8] = reference[1];
                }
                mlai_fence_proxy_async_shared(); /* orders P before wgmma's reads */
                __syncwarp();                    /* orders the warp's P and references before its arrival */
                if (lane == 0) {
                    mlai_mbar_arrive(mlai_smem_u32(&s.p_full[stage]));
                }
                clear_dead_rows(block, base);
                mlai_wgmma_fence_operand(o[0]);
                mlai_wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < 4; kk++) {
                    const uint32_t a[4] = {probs[4 * kk], probs[4 * kk + 1], probs[4 * kk + 2], probs[4 * kk + 3]};
                    mma_rs<Format, 256, 1>(o[0], a, v + kk * 128, 1);
                }
                mlai_wgmma_commit();
            } else {
                mlai_wgmma_wait<0>();
                mlai_wgmma_fence_operand(o[0]);
                if (block > w.block_begin) {
                    free_stage(stage ^ 1);
                }
                mlai_mbar_wait(mlai_smem_u32(&s.p_full[stage]), parity);
                const float to0 = s.reference[stage][row0], to1 = s.reference[stage][row0 + 8];
                if (__any_sync(0xffffffffu, to0 != reference[0] || to1 != reference[1])) {
                    rescale(to0, to1);
                }
                clear_dead_rows(block, base);
                const uint64_t probs = mlai_wgmma_descriptor(p_smem, 0, 1024, MLAI_SWIZZLE_128);
                mlai_wgmma_fence_operand(o[0]);
                mlai_wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < 4; kk++) {
                    mma<Format, 256, 0, 1>(o[0], probs + 2 * kk, v + kk * 128, 1);
                }
                mlai_wgmma_commit();
            }
        }
        mlai_wgmma_wait<0>();
        mlai_wgmma_fence_operand(o[0]);
        free_stage((n + 1) % STAGES);
        /* Each warpgroup summed its own blocks. */
        float(&sums)[2][64] = s.row_sum[piece % 2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
            if (lane % 4 == 0) {
                sums[half][row0 + 8 * i] = sum[i];
                if (half == 0) {
                    s.lse2[piece % 2][row0 + 8 * i] = reference[i];
                }
            }
        }
        mlai_bar_sync(BAR_VALUES, 256); /* orders both sums before their readers, all reads of Q before the next */
        float scale[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float all = sums[0][row0 + 8 * i] + sums[1][row0 + 8 * i];
            scale[i] = all > 0.0f ? mlai_rcp(all) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 128; i++) {
            o[0][i] *= scale[i / 2 % 2];
        }
        float my_lse2 = NEG_INF;
        if (thread256 < ROWS) {
            const float all = sums[0][thread256] + sums[1][thread256];
            my_lse2 = all > 0.0f ? s.lse2[piece % 2][thread256] + mlai_log2(all) : NEG_INF;
        }
        finish_piece<Format, ROWS>(p, s, out, whole, w.block_begin == 0, o, my_lse2);
        piece++;
    }
}

/* Value warps: their tiles, then their share of the merges. Before the first P arrives they have nothing
 * to do and rehearse a merge of nothing, which brings its instructions in: they run once a launch, and
 * fetching them then costs more than the merge. */
template <int Format, int Rows, int Share, int Load>
MLAI_DEV void values_and_merges(const params &p, tail &s, uint32_t ring, char *ring_generic, uint32_t q_smem,
                                uint32_t rank)
{
#pragma unroll 1
    for (int32_t step = 0; step < 3; step++) {
        merge_job job = {};
        if (step == 0) {
            job.pieces = p.batch <= 32 ? 8 * fragment<Rows>::LINES : 0;
        } else {
            if (step == 1) {
                if constexpr (Rows == 64) {
                    tiles_of_64<Format, Share, Load>(p, s, ring, q_smem, rank);
                } else {
                    values<Format, Rows, Share, Load>(p, s, ring, rank);
                }
                mlai_bar_sync(BAR_VALUES, 256); /* orders the jobs before their readers */
            }
            job = s.jobs[step - 1];
        }
        if (job.pieces == 0) {
            continue;
        }
        if (job.present) {
            if (threadIdx.x % 256 == 0) {
                while (((mlai_ld_acquire_gpu(p.counters + job.first_cta) ^ job.ticket) & 0x80000000u) == 0) {
                }
            }
            mlai_bar_sync(BAR_VALUES, 256); /* orders the last partial before its readers */
        } else {
            job.mine = 7; /* of 8 slices a line: the one that gets it */
        }
        merge_slice<Format, Rows>(p, job, (merge_state *)ring_generic);
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

template <int Format, int Rows, int Load> MLAI_DEV void decode(const params &p)
{
    constexpr int SHARE = Load == LOAD_PAIR ? 2 : 1;
    extern __shared__ char raw[];
    char *aligned = raw + ((1024 - (mlai_smem_u32(raw) & 1023)) & 1023);
    const uint32_t ring = mlai_smem_u32(aligned), q_smem = ring + STAGES * STAGE_BYTES;
    tail &s = *(tail *)(aligned + STAGES * STAGE_BYTES + QUERY_BUFFERS<Rows> * Rows * 1152);
    const int32_t warp = threadIdx.x / 32;
    const uint32_t rank = SHARE == 2 ? mlai_cluster_ctarank() : 0;
    const int32_t stretch = blockIdx.x / SHARE, stretches = gridDim.x / SHARE;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            for (int g = 0; g < PARTS; g++) {
                mlai_mbar_init(mlai_smem_u32(&s.full[i][g]), Load == LOAD_GATHER ? 128 : 1);
            }
            mlai_mbar_init(mlai_smem_u32(&s.p_full[i]), 4);
            mlai_mbar_init(mlai_smem_u32(&s.empty[i][0]), 8 * SHARE);
            mlai_mbar_init(mlai_smem_u32(&s.empty[i][1]), 8 * SHARE);
        }
        s.jobs[0].pieces = s.jobs[1].pieces = 0;
        mlai_fence_mbar_init();
        if (Load != LOAD_GATHER) {
            mlai_tma_prefetch_descriptor((const CUtensorMap *)&p.kv_map);
        }
    }
    const plan where = p.batch <= 32 ? plan_few<Rows, SHARE>(p, stretch, stretches)
                                     : plan_many<Rows, SHARE>(p, s, stretch, stretches);
    walk<Rows, SHARE> w;
    w.start(p, where, stretch);
    if (threadIdx.x == 0) {
        s.found = where;
    }
    __syncthreads(); /* orders the inits and the plan before their use */
    if (SHARE == 2) {
        mlai_cluster_arrive(); /* orders the inits before the other CTA's loads and arrivals */
        mlai_cluster_wait();
    }
    if (warp < 4) {
        mlai_setmaxnreg_dec<(Rows < 64 ? 88 : 56)>();
        if constexpr (Load == LOAD_GATHER) {
            produce_gather<Rows, SHARE>(p, s, ring, w);
        } else if (warp == 0) {
            produce_tensor<Rows, SHARE, Load>(p, s, ring, w, rank);
        }
    } else if (Rows < 64 && warp < 8) {
        mlai_setmaxnreg_inc<136>();
        if constexpr (Rows < 64) {
            scores<Format, Rows, SHARE>(p, s, ring, q_smem, w, rank);
        }
    } else {
        mlai_setmaxnreg_inc<(Rows < 64 ? 144 : 224)>();
        values_and_merges<Format, Rows, SHARE, Load>(p, s, ring, aligned, q_smem, rank);
    }
    if (SHARE == 2) {
        __syncwarp();
        mlai_cluster_arrive(); /* neither CTA leaves while the other may still arrive on its barriers */
        mlai_cluster_wait();
    }
}

} /* namespace mlai_decode */

#define MLAI_DECODE_KERNEL(name, format, rows, load)                                           \
    extern "C" __global__ void __launch_bounds__(MLAI_DECODE_SM90A_THREADS(rows), 1)           \
        name(const __grid_constant__ mlai_decode_sm90a_params p)                               \
    {                                                                                          \
        mlai_decode::decode<format, rows, load>(p);                                            \
    }

#define MLAI_DECODE_KERNELS(stem, format)                                     \
    MLAI_DECODE_KERNEL(stem##_r8, format, 8, mlai_decode::LOAD_TENSOR)         \
    MLAI_DECODE_KERNEL(stem##_r16, format, 16, mlai_decode::LOAD_TENSOR)       \
    MLAI_DECODE_KERNEL(stem##_r32, format, 32, mlai_decode::LOAD_TENSOR)       \
    MLAI_DECODE_KERNEL(stem##_r64, format, 64, mlai_decode::LOAD_TENSOR)       \
    MLAI_DECODE_KERNEL(stem##_r64_pair, format, 64, mlai_decode::LOAD_PAIR)    \
    MLAI_DECODE_KERNEL(stem##_r8_gather, format, 8, mlai_decode::LOAD_GATHER)  \
    MLAI_DECODE_KERNEL(stem##_r16_gather, format, 16, mlai_decode::LOAD_GATHER)\
    MLAI_DECODE_KERNEL(stem##_r32_gather, format, 32, mlai_decode::LOAD_GATHER)\
    MLAI_DECODE_KERNEL(stem##_r64_gather, format, 64, mlai_decode::LOAD_GATHER)

#endif
