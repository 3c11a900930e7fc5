/*
 * Hopper decode, tiles of 64 rows: from accumulators to the output, and the merge of a tile's
 * pieces.
 *
 * A lane holds columns 8 g + 2 (lane % 4) + {0, 1} of each group g of 8, of two rows. A piece has
 * the pairs of four groups side by side, 16 bytes a lane; for the output the four lanes of a quad
 * transpose them, so that each has all columns of one group. Both are stored in whole sectors.
 *
 * A piece: O, normalised, in f16 [64][512], each half row times a power of two that brings its
 * largest element to [2^14, 2^15); what to multiply by, [2][64]; beside it the LSE (base 2), [64].
 *
 * out = sum_k 2^(lse_k - lse) O_k in f32, always in piece order, so that the bits do not depend on
 * timing. Who merges, and the counters: decode_merge_sm90a.cuh. Called by: decode_rows64_sm90a.cuh,
 * decode_sm90a.cuh.
 */
#ifndef MLAI_DECODE_MERGE64_SM90A_CUH
#define MLAI_DECODE_MERGE64_SM90A_CUH

#include "decode_merge_sm90a.cuh"

namespace mlai_decode
{

constexpr int PIECE_BYTES = 64 * 512 * 4;      /* a slot of partials */
constexpr int PIECE_FACTORS_AT = 64 * 512 * 2; /* float [2][64] */
constexpr int QUADS = 64 * 16;                 /* of 4 items of 8 columns, in a tile */
constexpr int LOADS = 16;                      /* in flight, a thread */

MLAI_DEV const char *piece_at(const params &p, int32_t slot)
{
    return (const char *)p.partial + (int64_t)slot * PIECE_BYTES;
}

/* Four groups of a row, a column pair a lane in each, to one group a lane; its own inverse. */
MLAI_DEV void transpose_quad(uint32_t (&x)[4])
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
        x[i] = odd ? got : x[i];
        x[i + 1] = odd ? x[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? x[i] : x[i + 2], 2);
        x[i] = high ? got : x[i];
        x[i + 2] = high ? x[i + 2] : got;
    }
}

MLAI_DEV int64_t row_place(const params &p, const tile_out &t, int32_t row)
{
    const int32_t at = t.first_row + row, token = divide(p.by_heads, at);
    return (int64_t)(t.first_token + token) * p.out_token_stride +
           (int64_t)(at - token * p.heads) * p.out_head_stride;
}

/* A value thread's share of a tile, each row times its scale. */
template <int Format>
MLAI_DEV void store_tile_64(const params &p, const tile_out &t, const float (&o)[2][64],
                            const float (&scale)[2])
{
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int32_t half = threadIdx.x / 128 % 2, row0 = warp * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bool live = t.first_row + row0 + 8 * r < t.rows;
        const int64_t at = row_place(p, t, row0 + 8 * r) + half * 256;
        if (p.out_f32) {
            float *to = (float *)p.out + at + lane % 4 * 2;
            if (live) {
#pragma unroll
                for (int g = 0; g < 32; g++) {
                    mlai_st_f32x2(to + g * 8, o[g / 16][g % 16 * 4 + 2 * r] * scale[r],
                                  o[g / 16][g % 16 * 4 + 2 * r + 1] * scale[r]);
                }
            }
        } else {
            uint16_t *to = (uint16_t *)p.out + at + lane % 4 * 8;
#pragma unroll
            for (int g = 0; g < 32; g += 4) {
                uint32_t x[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int e = (g + i) % 16 * 4 + 2 * r;
                    x[i] = pack<Format>(o[g / 16][e] * scale[r], o[g / 16][e + 1] * scale[r]);
                }
                transpose_quad(x);
                if (live) {
                    mlai_st_u32x4(to + g * 8, x[0], x[1], x[2], x[3]);
                }
            }
        }
    }
}

/* The exponent of a half row's largest finite element times its scale, all lanes together. */
MLAI_DEV uint32_t largest_exponent(const float (&o)[2][64], int r, float scale)
{
    const float infinity = __builtin_huge_valf();
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 128; i++) {
        if (i / 2 % 2 == r) {
            top = fmaxf(top, fabsf(o[i / 64][i % 64]));
        }
    }
    if (__any_sync(0xffffffffu, top == infinity)) {
        top = 0.0f;
#pragma unroll
        for (int i = 0; i < 128; i++) {
            if (i / 2 % 2 == r) {
                const float x = fabsf(o[i / 64][i % 64]);
                top = x < infinity ? fmaxf(top, x) : top;
            }
        }
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    return __float_as_uint(top * scale) >> 23;
}

/* All value threads: a piece into its slot. */
MLAI_DEV void store_piece(const params &p, int32_t slot, const float (&o)[2][64],
                          const float (&scale)[2], float my_lse2)
{
    const int32_t thread256 = threadIdx.x % 256, lane = threadIdx.x % 32,
                  warp = threadIdx.x / 32 % 4;
    const int32_t half = thread256 / 128, row0 = warp * 16 + lane / 4;
    char *piece = (char *)p.partial + (int64_t)slot * PIECE_BYTES;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t exponent = max(largest_exponent(o, r, scale[r]), 30u);
        const float up = __uint_as_float((268u - exponent) << 23) * scale[r];
        if (lane % 4 == 0) {
            ((float *)(piece + PIECE_FACTORS_AT))[half * 64 + row0 + 8 * r] =
                __uint_as_float((exponent - 14u) << 23);
        }
        char *to = piece + (row0 + 8 * r) * 1024 + half * 512 + lane % 4 * 16;
#pragma unroll
        for (int g = 0; g < 32; g += 4) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int e = (g + i) % 16 * 4 + 2 * r;
                x[i] = mlai_pack_f16x2(o[g / 16][e] * up, o[g / 16][e + 1] * up);
            }
            mlai_st_u32x4(to + g * 16, x[0], x[1], x[2], x[3]);
        }
    }
    if (thread256 < 64) {
        p.partial_lse[slot * 64 + thread256] = my_lse2;
    }
}

/* All value threads of the CTA of piece 0: the other pieces into this one, in order. */
MLAI_DEV void add_pieces(const params &p, tail &s, const merge_job &job, float (&o)[2][64],
                         const float (&own)[2], float my_lse2)
{
    const int32_t thread256 = threadIdx.x % 256, lane = threadIdx.x % 32,
                  warp = threadIdx.x / 32 % 4;
    const int32_t half = thread256 / 128, row0 = warp * 16 + lane / 4, pieces = job.pieces;
    if (thread256 < 64) {
        s.own_lse2[thread256] = my_lse2;
    }
    if (thread256 == 0) {
        while ((mlai_ld_acquire_gpu(p.counters + job.first_cta) & 0x7fffffffu) !=
               (uint32_t)(pieces - 1)) {
        }
    }
    mlai_bar_sync(BAR_VALUES, 256); /* orders the other pieces and our LSE before their readers */
    float weight[2][FEW_PIECES];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int32_t row = row0 + 8 * r;
        float top = weight[r][0] = s.own_lse2[row], all = 0.0f;
#pragma unroll
        for (int k = 1; k < FEW_PIECES; k++) {
            weight[r][k] = NEG_INF;
            if (k < pieces) {
                weight[r][k] = mlai_ld_cg_f32(p.partial_lse + merge_slot(job, k) * 64 + row);
            }
            top = fmaxf(top, weight[r][k]);
        }
#pragma unroll
        for (int k = 0; k < FEW_PIECES; k++) {
            all += weight[r][k] = mlai_exp2(weight[r][k] - finite_or_0(top));
        }
        if (half == 0 && lane % 4 == 0) {
            store_lse(p, job.out, row, top + mlai_log2(all));
        }
        const float scale = all > 0.0f ? mlai_rcp(all) : 0.0f;
#pragma unroll
        for (int k = 0; k < FEW_PIECES; k++) {
            weight[r][k] *= scale;
            if (k > 0 && k < pieces) {
                weight[r][k] *= mlai_ld_cg_f32(
                    (const float *)(piece_at(p, merge_slot(job, k)) + PIECE_FACTORS_AT) +
                    half * 64 + row);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 64; i++) {
        o[0][i] *= weight[i / 2 % 2][0] * own[i / 2 % 2];
        o[1][i] *= weight[i / 2 % 2][0] * own[i / 2 % 2];
    }
#pragma unroll
    for (int k = 1; k < FEW_PIECES; k++) {
        if (k >= pieces) {
            break;
        }
        const char *from =
            piece_at(p, merge_slot(job, k)) + row0 * 1024 + half * 512 + lane % 4 * 16;
#pragma unroll
        for (int base = 0; base < 32; base += 16) {
            uint32_t x[8][4];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                mlai_ld_cg_u32x4(x[i], from + (base + i / 2 * 4) * 16 + i % 2 * 8192);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int t = base / 16, e = (i / 2 * 4 + j) * 4 + i % 2 * 2;
                    float low, high;
                    mlai_unpack_f16x2(x[i][j], low, high);
                    o[t][e] += weight[i % 2][k] * low;
                    o[t][e + 1] += weight[i % 2][k] * high;
                }
            }
        }
    }
}

/* Sums of an item, 8 columns of a row. */
struct item_sum {
    float o[8], top, all;
};

/* Adds pieces first, first + step ... (Count of them, less those past the last) of Items items,
 * `apart` from one to the next, to their sums. */
template <int Count, int Items>
MLAI_DEV void sum_pieces(const params &p, const merge_job &job, item_sum (&sums)[Items],
                         int32_t item, int32_t apart, int32_t to, int32_t first, int32_t step)
{
    uint32_t x[Items][Count][4];
    float lse[Items][Count], factor[Items][Count];
#pragma unroll
    for (int i = 0; i < Items; i++) {
        const int32_t at = item + i * apart, row = at / 64, half = at / 32 % 2;
#pragma unroll
        for (int k = 0; k < Count; k++) {
            const int32_t piece = first + k * step;
            lse[i][k] = NEG_INF;
            factor[i][k] = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                x[i][k][j] = 0;
            }
            if (piece < job.present && at < to) {
                const int32_t slot = merge_slot(job, piece);
                const char *from = piece_at(p, slot);
                mlai_ld_cg_u32x4(x[i][k], from + at * 16);
                lse[i][k] = mlai_ld_cg_f32(p.partial_lse + slot * 64 + row);
                factor[i][k] =
                    mlai_ld_cg_f32((const float *)(from + PIECE_FACTORS_AT) + half * 64 + row);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < Items; i++) {
        item_sum &m = sums[i];
        float top = m.top;
#pragma unroll
        for (int k = 0; k < Count; k++) {
            top = fmaxf(top, lse[i][k]);
        }
        const float before = mlai_exp2(m.top - finite_or_0(top));
        m.top = top;
        m.all *= before;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            m.o[j] *= before;
        }
#pragma unroll
        for (int k = 0; k < Count; k++) {
            const float weight = mlai_exp2(lse[i][k] - finite_or_0(top));
            m.all += weight;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float low, high;
                mlai_unpack_f16x2(x[i][k][j], low, high);
                m.o[2 * j] += weight * factor[i][k] * low;
                m.o[2 * j + 1] += weight * factor[i][k] * high;
            }
        }
    }
}

/* All lanes together; those past the last item store nothing. */
template <int Format>
MLAI_DEV void store_item(const params &p, const tile_out &t, int32_t item, int32_t to,
                         const item_sum &m)
{
    const int32_t row = item / 64;
    const bool live = item < to && t.first_row + row < t.rows;
    const float scale = m.all > 0.0f ? mlai_rcp(m.all) : 0.0f;
    const int64_t at = row_place(p, t, row) + item % 64 / 4 * 32;
    if (p.out_f32) {
        if (live) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                mlai_st_f32x2((float *)p.out + at + i * 8 + item % 4 * 2, m.o[2 * i] * scale,
                              m.o[2 * i + 1] * scale);
            }
        }
    } else {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = pack<Format>(m.o[2 * i] * scale, m.o[2 * i + 1] * scale);
        }
        transpose_quad(x);
        if (live) {
            mlai_st_u32x4((uint16_t *)p.out + at + item % 4 * 8, x[0], x[1], x[2], x[3]);
        }
    }
    if (live && item % 64 == 0) {
        store_lse(p, t, row, m.top + mlai_log2(m.all));
    }
}

MLAI_DEV item_sum no_sum()
{
    return {{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}, NEG_INF, 0.0f};
}

/* Up to Count pieces: a thread an item, as many items at a time as make LOADS loads. */
template <int Format, int Count>
MLAI_DEV void merge_few(const params &p, const merge_job &job, int32_t from, int32_t to)
{
    constexpr int TURN = LOADS / Count;
#pragma unroll 1
    for (int32_t base = from; base < to; base += 256 * TURN) {
        const int32_t item = base + (int32_t)(threadIdx.x % 256);
        item_sum sums[TURN];
#pragma unroll
        for (int i = 0; i < TURN; i++) {
            sums[i] = no_sum();
        }
        sum_pieces<Count>(p, job, sums, item, 256, to, 0, 1);
#pragma unroll
        for (int i = 0; i < TURN; i++) {
            store_item<Format>(p, job.out, item + 256 * i, to, sums[i]);
        }
    }
}

/* More: 2, 4 or 8 warps have a share of an item's pieces each, with LOADS in flight. */
template <int Format>
MLAI_DEV void merge_shares(const params &p, const merge_job &job, int32_t from, int32_t to,
                           item_sum *scratch)
{
    const int32_t warp = threadIdx.x / 32 % 8, lane = threadIdx.x % 32;
    const int32_t shift = job.pieces <= 2 * LOADS ? 1 : job.pieces <= 4 * LOADS ? 2 : 3;
    const int32_t sharers = 1 << shift, share = warp & (sharers - 1);
#pragma unroll 1
    for (int32_t base = from; base < to; base += 256 >> shift) {
        const int32_t item = base + (warp >> shift) * 32 + lane;
        item_sum sums[1] = {no_sum()};
#pragma unroll 1
        for (int32_t first = share; first < job.pieces; first += sharers * LOADS) {
            sum_pieces<LOADS>(p, job, sums, item, 0, to, first, sharers);
        }
        scratch[warp * 32 + lane] = sums[0];
        mlai_bar_sync(BAR_VALUES, 256); /* orders the shares before their reader */
        if (share == 0) {
            item_sum m = no_sum();
            for (int32_t i = 0; i < sharers; i++) {
                m.top = fmaxf(m.top, scratch[(warp + i) * 32 + lane].top);
            }
            for (int32_t i = 0; i < sharers; i++) {
                const item_sum &x = scratch[(warp + i) * 32 + lane];
                const float weight = mlai_exp2(x.top - finite_or_0(m.top));
                m.all += x.all * weight;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    m.o[j] += x.o[j] * weight;
                }
            }
            store_item<Format>(p, job.out, item, to, m);
        }
        mlai_bar_sync(BAR_VALUES, 256); /* orders the reader before the next shares */
    }
}

/* All value threads: this CTA's items of a tile. */
template <int Format>
MLAI_DEV void merge_tile_64(const params &p, const merge_job &job, char *scratch)
{
    const int32_t from = job.mine * QUADS / job.pieces * 4,
                  to = (job.mine + 1) * QUADS / job.pieces * 4;
    if (job.pieces <= 2) {
        merge_few<Format, 2>(p, job, from, to);
    } else if (job.pieces <= 4) {
        merge_few<Format, 4>(p, job, from, to);
    } else if (job.pieces <= 8) {
        merge_few<Format, 8>(p, job, from, to);
    } else if (job.pieces <= 16) {
        merge_few<Format, 16>(p, job, from, to);
    } else {
        merge_shares<Format>(p, job, from, to, (item_sum *)scratch);
    }
}

/* All value threads: O times scale to its place, or to the partials, which are then counted. */
template <int Format>
MLAI_DEV void finish_piece_64(const params &p, tail &s, const walk<64> &w, const tile_out &out,
                              float (&o)[2][64], const float (&scale)[2], float my_lse2)
{
    const bool whole = is_whole(w), first = w.block_begin == 0;
    const int32_t thread256 = threadIdx.x % 256;
    bool merged = false;
    if (!whole) {
        mlai_bar_sync(BAR_VALUES, 256); /* orders the job before its readers */
        merge_job &job = s.jobs[first];
        merged = first && job.by_first;
        if (merged) {
            add_pieces(p, s, job, o, scale, my_lse2);
        } else {
            store_piece(p, 2 * (int32_t)blockIdx.x + first, o, scale, my_lse2);
        }
        /* orders all threads' pieces, or reads of pieces, before the count */
        mlai_bar_sync(BAR_VALUES, 256);
        if (thread256 == 0) {
            mlai_red_add_release_gpu(p.counters + job.first_cta,
                                     job.mine == 0 ? 0x80000000u - (uint32_t)(job.pieces - 1) : 1u);
            job.pieces = job.by_first ? 0 : job.pieces; /* nothing is left to do */
        }
    }
    if (whole || merged) {
        const float last[2] = {merged ? 1.0f : scale[0], merged ? 1.0f : scale[1]};
        store_tile_64<Format>(p, out, o, last);
        if (whole && thread256 < 64) {
            store_lse(p, out, thread256, my_lse2);
        }
    }
}

} /* namespace mlai_decode */

#endif
