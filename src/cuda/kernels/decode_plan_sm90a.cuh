/*
 * Hopper decode: sizes, the shared-memory tail, formats, and the plan.
 *
 * Plan: the row tiles of all requests stand in one line, each item_cost + ceil(len / 64) long,
 * where len is what the request's last token sees. Stretch c of the line belongs to the `share`
 * neighbouring CTAs c share ... c share + share - 1, each of which takes one of `share` row tiles
 * of the request, so that a request's keys come from memory once. Every CTA finds its stretch from
 * the device's lengths; nothing is planned on the host or by another kernel. Limits: total length
 * and rows of a request below 2^31; lengths are clamped to `capacity`. Called by: decode_sm90a.cuh
 * and the headers beside it.
 */
#ifndef MLAI_DECODE_PLAN_SM90A_CUH
#define MLAI_DECODE_PLAN_SM90A_CUH

#include "../ptx_sm90a.cuh"
#include "decode_sm90a.h"

/* 1 before this file is included: tiles of 64 rows have the keys on wgmma's 64 side as well. */
#ifndef MLAI_DECODE_KEYS_ON_M
#define MLAI_DECODE_KEYS_ON_M 0
#endif

namespace mlai_decode
{

enum { FORMAT_BF16, FORMAT_F16 };
enum { LOAD_TENSOR, LOAD_GATHER };

constexpr int KEYS = MLAI_DECODE_SM90A_KEYS;
constexpr int CHUNKS = 9; /* pieces of 64 columns; 0-7 hold the values, 8 the rope part */
constexpr int CHUNK_BYTES = KEYS * 128;
constexpr int STAGE_BYTES = CHUNKS * CHUNK_BYTES;
constexpr int STAGES = MLAI_DECODE_SM90A_STAGES;
template <int Rows> constexpr int QUERY_BUFFERS = Rows < 64 ? 2 : 1;
/* Tiles whose rows are on wgmma's 64 side. */
template <int Rows> constexpr bool ROWS_ON_M = Rows == 64 && !MLAI_DECODE_KEYS_ON_M;
/* A block arrives and is freed in parts: chunks 0 1 4 5 (each value warpgroup's first half), 2 3 6
 * 7, 8. */
constexpr int PARTS = 3;
constexpr int MAX_WARPS = MLAI_DECODE_SM90A_THREADS(8) / 32;
constexpr int BAR_SCORES = 1, BAR_VALUES = 2, BAR_VALUES_HALF = 3, BAR_SCORED = 5;
/* Up to so many pieces the CTA of the first one, whose stretch ends there, merges alone. */
constexpr int FEW_PIECES = 3;
constexpr float NEG_INF = -__builtin_huge_valf();
/* A row's reference maximum follows its true one only when that is 2^8 above: P stays below 256. */
constexpr float LAZY_MAX = 8.0f;

using params = mlai_decode_sm90a_params;

/* n / divisor for 0 <= n < 2^31, by the host's multiplier and shift. */
MLAI_DEV int32_t divide(const mlai_decode_sm90a_divisor &d, int32_t n)
{
    return (int32_t)((__umulhi(d.multiplier, (uint32_t)n) + (uint32_t)n) >> d.shift);
}

/* How the line is cut: the first `longer` stretches have each + 1 positions, the others `each`.
 * Where all tile groups cost the same and whole ones balance to within a tenth, none is cut; where
 * as many stretches for each balance to within a block, none has two. */
struct plan {
    int32_t total, stretches, each, longer;
    int32_t request;            /* the one in which this CTA's stretch begins */
    int32_t start;              /* where that request begins */
    int32_t pieces, cost, lead; /* where each tile group is cut into as many pieces (else pieces is
                                 * 0): how many, a group's length, how much of it precedes its
                                 * blocks */

    /* `groups` of tiles. Few divisions: a launch fetches their instructions anew. */
    __device__ __forceinline__ void cut(const params &p, int32_t line, int32_t count,
                                        int32_t groups, int32_t least_cost, int32_t most_cost,
                                        int32_t even_lead)
    {
        total = line;
        pieces = 0;
        stretches = min(line, count);
        each = line < count ? 1 : divide(p.by_stretches, line);
        longer = line - each * stretches;
        if (least_cost == most_cost) {
            const int32_t whole = groups < count ? 1 : divide(p.by_stretches, groups + count - 1);
            if (whole * most_cost - each <= each / 10) {
                each = whole * most_cost;
                longer = 0;
                stretches = whole == 1 ? groups : (groups + whole - 1) / whole;
            } else if (even_lead > 0 && 2 * groups <= count) {
                const int32_t many = count / groups, blocks = most_cost - even_lead;
                /* 2^20: products with a piece's number stay below 2^31 */
                if (blocks >= many && blocks < 1 << 20 && (blocks + many - 1) / many <= each + 1) {
                    pieces = many;
                    cost = most_cost;
                    lead = even_lead;
                    stretches = groups * many;
                }
            }
        }
    }
    __device__ __forceinline__ int32_t begin_of(int32_t stretch) const
    {
        if (pieces > 0) {
            const int32_t group = stretch / pieces, piece = stretch - group * pieces;
            return group * cost + (piece > 0 ? lead + piece * (cost - lead) / pieces : 0);
        }
        return min(stretch * each + min(stretch, longer), total);
    }
    __device__ __forceinline__ int32_t stretch_of(int32_t position) const
    {
        if (pieces > 0) {
            const int32_t group = position / cost, block = max(position - group * cost - lead, 0);
            return group * pieces + ((block + 1) * pieces - 1) / (cost - lead);
        }
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
    int32_t by_first; /* the CTA of piece 0 merges, with its own part still in registers */
    int32_t present;  /* = pieces; 0 for a rehearsal, which reads and writes nothing */
    uint32_t ticket;  /* the counter as it was before the last partial */
};

struct tail {
    uint64_t full[STAGES][PARTS];
    uint64_t p_full[STAGES];
    uint64_t empty[STAGES][2]; /* the first part; the others */
    uint64_t p_late[STAGES];   /* tiles of 64 rows: the second half of P */
    uint64_t q_full, q_empty;  /* tiles of 64 rows, filled by warps 1-3 */
    int32_t warp_total[MAX_WARPS], warp_groups[MAX_WARPS];
    int32_t warp_least[MAX_WARPS], warp_most[MAX_WARPS];
    int32_t first_request, first_start;
    plan found;
    int32_t rescale[STAGES]; /* P's maxima were raised: alpha is what O has to be multiplied by */
    merge_job jobs[2];       /* the tile this CTA takes over from another one, the one it leaves */
    float alpha[STAGES][64];
    float inverse_sum[STAGES][64];
    alignas(16) float lse2[STAGES][64];
    float warp_top[4][32]; /* per warp of scores and row; a block may write both */
    float warp_sum[4][32];
    float reference[STAGES][64];         /* of the stage's P, tiles of 64 rows */
    alignas(16) float row_sum[2][2][64]; /* [piece % 2][warpgroup] */
    float own_lse2[64];
    int32_t row_len[2][64];
};
static_assert(sizeof(tail) <= MLAI_DECODE_SM90A_TAIL_BYTES, "grow MLAI_DECODE_SM90A_TAIL_BYTES");

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

/* Row tiles of a request, counted in groups of p.share that neighbouring CTAs work on together. */
template <int Rows> MLAI_DEV int32_t tile_groups(const params &p, const request &r)
{
    return (r.q_len * p.heads + Rows * p.share - 1) / (Rows * p.share);
}

MLAI_DEV int32_t request_blocks(const params &p, const request &r)
{
    return (visible_keys(p, r, r.q_len - 1) + KEYS - 1) / KEYS;
}

/* What one tile group costs, in blocks; 0 for a request of no rows. */
template <int Rows> MLAI_DEV int32_t group_cost(const params &p, const request &r)
{
    return r.q_len > 0 ? p.item_cost + request_blocks(p, r) : 0;
}

/* This CTA's pieces, one after the other: a tile group and its blocks [block_begin, block_end).
 * Each role walks its own copy. */
template <int Rows> struct walk {
    int32_t tile_start, begin, end, b, tile, tiles, blocks, cost;
    int32_t block_begin, block_end;
    request now;

    __device__ __forceinline__ void enter(const params &p)
    {
        now = load_request(p, b);
        tiles = tile_groups<Rows>(p, now);
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
        tile = tiles = begin = end = tile_start = 0; /* no pieces */
        if (stretch < from.stretches) {
            tile_start = from.start;
            b = from.request;
            begin = from.begin_of(stretch);
            end = from.begin_of(stretch + 1);
            enter(p);
            tile = Rows < 64 && tiles == 1 ? 0 : (begin - tile_start) / cost;
            tile_start += tile * cost;
            clip(p);
        }
    }
    static constexpr bool CLUSTER = false;
    __device__ __forceinline__ int32_t step() const
    {
        return 1;
    }
    __device__ __forceinline__ int32_t rank(const params &p) const
    {
        return (int32_t)(blockIdx.x % (uint32_t)p.share);
    }
    __device__ __forceinline__ int32_t first_row(const params &p) const
    {
        return (tile * p.share + rank(p)) * Rows;
    }
    __device__ __forceinline__ bool live() const
    {
        return tile_start < end;
    }
    __device__ __forceinline__ bool has_blocks() const
    {
        return block_begin < block_end;
    }
    /* An item of no blocks is written by the stretch in which it begins. */
    __device__ __forceinline__ bool owns_empty() const
    {
        return blocks == 0 && tile_start >= begin;
    }
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

/* Each warp by itself, up to 32 requests: a lane a request. Requests of no rows have no length, so
 * that one with rows is found. */
template <int Rows> MLAI_DEV plan plan_few(const params &p, int32_t stretch, int32_t count)
{
    const int32_t lane = threadIdx.x % 32;
    const request r = load_request(p, lane);
    const int32_t groups = tile_groups<Rows>(p, r), one = group_cost<Rows>(p, r);
    const int32_t cost = groups * one;
    int32_t sum = cost;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int32_t other = __shfl_up_sync(0xffffffffu, sum, d);
        sum += lane >= d ? other : 0;
    }
    plan cuts;
    cuts.cut(p, __shfl_sync(0xffffffffu, sum, 31), count, __reduce_add_sync(0xffffffffu, groups),
             __reduce_min_sync(0xffffffffu, one ? one : INT32_MAX),
             __reduce_max_sync(0xffffffffu, one), ROWS_ON_M<Rows> ? p.item_cost : 0);
    cuts.request = cuts.start = 0;
    if (stretch < cuts.stretches) {
        const int32_t begin = cuts.begin_of(stretch);
        cuts.request = __ffs(__ballot_sync(0xffffffffu, sum > begin)) - 1;
        cuts.start = __shfl_sync(0xffffffffu, sum - cost, cuts.request);
    }
    return cuts;
}

/* All threads together: one pass for the total, one to find the request (the same one up to a
 * thread a request). */
template <int Rows>
MLAI_DEV plan plan_many(const params &p, tail &s, int32_t stretch, int32_t count)
{
    const int32_t threads = blockDim.x, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    plan r = {};
    int32_t least = INT32_MAX, most = 0, all_groups = 0;
    for (int32_t pass = p.batch <= threads ? 1 : 0; pass < 2; pass++) {
        int32_t carry = 0;
        for (int32_t base = 0; base < p.batch; base += threads) {
            const request q = load_request(p, base + tid);
            const int32_t groups = tile_groups<Rows>(p, q), one = group_cost<Rows>(p, q);
            const int32_t cost = groups * one;
            int32_t sum = cost;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int32_t other = __shfl_up_sync(0xffffffffu, sum, d);
                sum += lane >= d ? other : 0;
            }
            const int32_t warp_least = __reduce_min_sync(0xffffffffu, one ? one : INT32_MAX);
            const int32_t warp_most = __reduce_max_sync(0xffffffffu, one);
            const int32_t warp_groups = __reduce_add_sync(0xffffffffu, groups);
            if (lane == 31) {
                s.warp_total[warp] = sum;
                s.warp_least[warp] = warp_least;
                s.warp_most[warp] = warp_most;
                s.warp_groups[warp] = warp_groups;
            }
            __syncthreads(); /* orders the warps' totals before their readers */
            int32_t at = carry + sum - cost;
#pragma unroll 4
            for (int w = 0; w < threads / 32; w++) {
                const int32_t t = s.warp_total[w];
                at += w < warp ? t : 0;
                carry += t;
                least = min(least, s.warp_least[w]);
                most = max(most, s.warp_most[w]);
                all_groups += pass == 0 || p.batch <= threads ? s.warp_groups[w] : 0;
            }
            if (p.batch <= threads || pass == 0) {
                r.cut(p, carry, count, all_groups, least, most, ROWS_ON_M<Rows> ? p.item_cost : 0);
            }
            if (pass == 1 && cost > 0 && stretch < r.stretches) {
                const int32_t begin = r.begin_of(stretch);
                if (at <= begin && begin < at + cost) {
                    s.first_request = base + tid;
                    s.first_start = at;
                }
            }
            __syncthreads(); /* orders the readers before the next totals, the find before its
                                readers */
        }
    }
    r.request = s.first_request;
    r.start = s.first_start;
    return r;
}

} /* namespace mlai_decode */

#endif
