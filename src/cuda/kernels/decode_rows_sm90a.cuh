/*
 * Hopper decode, tiles of 8, 16 and 32 rows: the keys on wgmma's 64 side, so that 8 heads cost 8
 * columns.
 *
 *   S^T [64 keys x Rows]    = K [64 x 576] Q^T          a warpgroup of scores
 *   O^T [512 columns x Rows] = V^T [512 x 64] P^T       two warpgroups of values, 256 columns each
 *
 * A row's scores are spread over the warps. Its sum stays spread until the tile ends; its maximum
 * is only a reference, taken anew when a score passes it by 2^8, so that most blocks need no
 * exchange. P goes over the rope columns of its own block, which are dead once S is there. f32
 * sums; P rounded to the cache's format. Called by: decode_sm90a.cuh.
 */
#ifndef MLAI_DECODE_ROWS_SM90A_CUH
#define MLAI_DECODE_ROWS_SM90A_CUH

#include "decode_merge_sm90a.cuh"

namespace mlai_decode
{

/* ---- scores ---------------------------------------------------------------------------------- */

/* A thread of these warps holds S^T of keys 16 warp + lane / 4 + {0, 8} and rows 8 i + 2 (lane % 4)
 * + {0, 1}: d[4 i + e] is key + 8 (e / 2), row + e % 2. Its rows are the ones of its column pairs.
 */
MLAI_DEV int32_t column_row(int i)
{
    return (i / 2) * 8 + (threadIdx.x % 4) * 2 + i % 2;
}

/* The four warps' sums of each row together; `row_sum` for whoever is the row's speaker. */
template <int Rows, class Tail, class Speak>
MLAI_DEV void add_warp_sums(Tail &s, float (&sum)[Rows / 4], Speak speak)
{
    const int32_t lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
#pragma unroll
    for (int i = 0; i < Rows / 4; i++) {
#pragma unroll
        for (int x = 4; x < 32; x *= 2) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], x);
        }
        if (lane < 4) {
            s.warp_sum[warp][column_row(i)] = sum[i];
        }
    }
    mlai_bar_sync(BAR_SCORES, 128); /* orders the warps' sums before their readers */
    if (warp == 0 && lane < 4) {
#pragma unroll
        for (int i = 0; i < Rows / 4; i++) {
            const int32_t row = column_row(i);
            speak(i, row,
                  s.warp_sum[0][row] + s.warp_sum[1][row] + s.warp_sum[2][row] +
                      s.warp_sum[3][row]);
        }
    }
}

template <int Format, int Rows, class Walk>
MLAI_DEV void scores(const params &p, tail &s, uint32_t ring, uint32_t q_ring, Walk ahead)
{
    constexpr int MINE = Rows / 4; /* rows a thread has scores of */
    const int32_t lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
    const logit_scale scale = make_logit_scale(p);
    uint32_t n = 0, buffer = 0;
    while (ahead.live() && !ahead.has_blocks()) {
        ahead.advance(p);
    }
    if (ahead.live()) {
        issue_queries<Rows, 128>(p, s.row_len[0], q_ring, ahead.now, ahead.first_row(p));
    }
    while (ahead.live()) {
        const int32_t block_begin = ahead.block_begin, block_end = ahead.block_end;
        const int32_t first_row = ahead.first_row(p), step = ahead.step();
        const int32_t shortest = visible_keys(p, ahead.now, divide(p.by_heads, first_row));
        const uint32_t q_smem = __shfl_sync(0xffffffffu, q_ring + buffer * Rows * 1152, 0);
        const int32_t *row_len = s.row_len[buffer];
        do {
            ahead.advance(p);
        } while (ahead.live() && !ahead.has_blocks());
        mlai_cp_async_wait<0>();
        mlai_fence_proxy_async_shared(); /* orders the copies before wgmma's reads */
        /* orders all copies before their use, earlier reads before new copies */
        mlai_bar_sync(BAR_SCORES, 128);
        if (ahead.live()) {
            buffer ^= 1;
            issue_queries<Rows, 128>(p, s.row_len[buffer], q_ring + buffer * Rows * 1152, ahead.now,
                                     ahead.first_row(p));
        }
        float reference[MINE], sum[MINE];
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            reference[i] = NEG_INF;
            sum[i] = 0.0f;
        }
#pragma unroll 1
        for (int32_t block = block_begin; block < block_end; block += step, n++) {
            const uint32_t stage = n % STAGES;
            /* The same in all lanes, and so that the compiler knows it: descriptors are then made
             * in uniform registers, two instructions a product instead of seven. */
            const uint32_t base = __shfl_sync(0xffffffffu, ring + stage * STAGE_BYTES, 0);
            float d[Rows / 2];
            /* Unrolled, since in a loop the compiler waits for the products of a turn before the
             * next (3000 clocks instead of 1100). */
#pragma unroll
            for (int32_t i = 0; i < CHUNKS; i++) {
                if (i % 4 == 0) {
                    mlai_mbar_wait(mlai_smem_u32(&s.full[stage][i / 4]), (n / STAGES) & 1);
                    mlai_wgmma_fence(); /* once a part: each begins a group of its own */
                }
                const int32_t c = chunk_at(i);
                const uint64_t k =
                    mlai_wgmma_descriptor(base + c * CHUNK_BYTES, 0, 1024, MLAI_SWIZZLE_128);
                const uint64_t q =
                    mlai_wgmma_descriptor(q_smem + c * Rows * 128, 0, 1024, MLAI_SWIZZLE_128);
#pragma unroll
                for (int kk = 0; kk < 4; kk++) {
                    mma<Format, Rows, 0, 0>(d, k + 2 * kk, q + 2 * kk, i > 0 || kk > 0);
                }
            }
            mlai_wgmma_commit();
            mlai_wgmma_wait<0>();
            mlai_wgmma_fence_operand(d);
            scale_logits(scale, d);
            if (block * KEYS + KEYS > shortest) {
#pragma unroll
                for (int i = 0; i < Rows / 2; i++) {
                    const int32_t key = block * KEYS + warp * 16 + lane / 4 + i / 2 % 2 * 8;
                    d[i] = key < row_len[column_row(i / 4 * 2 + i % 2)] ? d[i] : NEG_INF;
                }
            }
            float top[MINE];
            bool raise = false;
#pragma unroll
            for (int i = 0; i < MINE; i++) {
                top[i] = fmaxf(d[4 * (i / 2) + i % 2], d[4 * (i / 2) + 2 + i % 2]);
                raise = raise || must_raise(top[i], reference[i]);
            }
            /* The warps raise a row's maximum together. Also orders every warp's S before P goes
             * over the block's rope columns. */
            raise = mlai_bar_red_or(BAR_SCORES, 128, raise);
            if (raise) {
#pragma unroll
                for (int i = 0; i < MINE; i++) {
#pragma unroll
                    for (int x = 4; x < 32; x *= 2) {
                        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], x));
                    }
                    if (lane < 4) {
                        s.warp_top[warp][column_row(i)] = top[i];
                    }
                }
                mlai_bar_sync(BAR_SCORES, 128); /* orders the warps' maxima before their readers */
#pragma unroll
                for (int i = 0; i < MINE; i++) {
                    const int32_t row = column_row(i);
                    const float all = fmaxf(fmaxf(s.warp_top[0][row], s.warp_top[1][row]),
                                            fmaxf(s.warp_top[2][row], s.warp_top[3][row]));
                    const float to = must_raise(all, reference[i]) ? all : reference[i];
                    const float alpha = to == reference[i] ? 1.0f : mlai_exp2(reference[i] - to);
                    reference[i] = to;
                    sum[i] *= alpha;
                    if (warp == 0 && lane < 4) {
                        s.alpha[stage][row] = alpha;
                    }
                }
            }
            if (warp == 0 && lane == 0) {
                s.rescale[stage] = raise && block > block_begin;
            }
#pragma unroll
            for (int i = 0; i < Rows / 2; i++) {
                const int mine = i / 4 * 2 + i % 2;
                d[i] = mlai_exp2(d[i] - finite_or_0(reference[mine]));
                sum[mine] += d[i];
            }
            /* P as Rows x 64 keys, 128 bytes a row, swizzled, over chunk 8 of the block: transposed
             * 8x8 matrices of rows 8 i and keys 16 warp and 16 warp + 8. */
#pragma unroll
            for (int i = 0; i < Rows / 8; i += 2) {
                const int32_t row = i * 8 + lane % 8 + lane / 16 * 8,
                              piece = warp * 2 + lane / 8 % 2;
                const uint32_t to = base + 8 * CHUNK_BYTES + row * 128 + ((piece ^ (row & 7)) << 4);
                if constexpr (Rows > 8) {
                    mlai_stmatrix_x4_trans(to, pack<Format>(d[4 * i], d[4 * i + 1]),
                                           pack<Format>(d[4 * i + 2], d[4 * i + 3]),
                                           pack<Format>(d[4 * i + 4], d[4 * i + 5]),
                                           pack<Format>(d[4 * i + 6], d[4 * i + 7]));
                } else {
                    mlai_stmatrix_x2_trans(to, pack<Format>(d[0], d[1]), pack<Format>(d[2], d[3]));
                }
            }
            const bool last = block + step >= block_end;
            if (!Walk::CLUSTER && last) {
                add_warp_sums<Rows>(s, sum, [&](int i, int32_t row, float all) {
                    s.inverse_sum[stage][row] = all > 0.0f ? mlai_rcp(all) : 0.0f;
                    s.lse2[stage][row] = all > 0.0f ? reference[i] + mlai_log2(all) : NEG_INF;
                });
            }
            mlai_fence_proxy_async_shared(); /* orders P before wgmma's reads */
            __syncwarp(); /* orders the warp's P and statistics before its arrival */
            if (lane == 0) {
                mlai_mbar_arrive(mlai_smem_u32(&s.p_full[stage]));
            }
            if constexpr (Walk::CLUSTER) {
                if (last) {
                    tell_statistics(s, ahead, sum, reference);
                }
            }
        }
    }
}

/* ---- values ---------------------------------------------------------------------------------- */

template <int Format, int Rows, class Walk>
MLAI_DEV void values(const params &p, tail &s, uint32_t ring, Walk w)
{
    const uint32_t half = __shfl_sync(0xffffffffu, (threadIdx.x / 128) % 2, 0);
    const int32_t thread256 = threadIdx.x % 256;
    uint32_t n = 0;
    for (; w.live(); w.advance(p)) {
        const tile_out out = {w.now.first_token, w.first_row(p), w.now.q_len * p.heads};
        if (!w.has_blocks()) {
            if (w.owns_empty()) {
                store_empty<Format, Rows>(p, out);
            }
            continue;
        }
        const int32_t len = visible_keys(p, w.now, w.now.q_len - 1);
        begin_piece<Rows>(p, s, w, out);
        float o[4][Rows / 2]; /* tile t: columns half * 256 + t * 64 */
#pragma unroll
        for (int t = 0; t < 4; t++) {
#pragma unroll
            for (int i = 0; i < Rows / 2; i++) {
                o[t][i] = 0.0f;
            }
        }
        float scale[Rows / 4];
        float my_lse2 = NEG_INF;
        for (int32_t block = w.block_begin; block < w.block_end; block += w.step(), n++) {
            const uint32_t stage = n % STAGES,
                           base = __shfl_sync(0xffffffffu, ring + stage * STAGE_BYTES, 0);
            mlai_mbar_wait(mlai_smem_u32(&s.p_full[stage]), (n / STAGES) & 1);
            if (s.rescale[stage]) {
#pragma unroll
                for (int i = 0; i < Rows / 2; i++) {
                    const float alpha = s.alpha[stage][column_row(i / 4 * 2 + i % 2)];
#pragma unroll
                    for (int t = 0; t < 4; t++) {
                        o[t][i] *= alpha;
                    }
                }
            }
            if (!Walk::CLUSTER && block + w.step() >= w.block_end) {
#pragma unroll
                for (int i = 0; i < Rows / 4; i++) {
                    scale[i] = s.inverse_sum[stage][column_row(i)];
                }
                if (thread256 < Rows) {
                    my_lse2 = s.lse2[stage][thread256];
                }
            }
            clear_dead_rows(base, half, len - block * KEYS);
            const uint64_t v = mlai_wgmma_descriptor(base + half * 4 * CHUNK_BYTES, CHUNK_BYTES,
                                                     1024, MLAI_SWIZZLE_128);
            const uint64_t probs =
                mlai_wgmma_descriptor(base + 8 * CHUNK_BYTES, 0, 1024, MLAI_SWIZZLE_128);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                mlai_wgmma_fence_operand(o[t]);
            }
            mlai_wgmma_fence();
#pragma unroll
            for (int part = 0; part < 2; part++) {
#pragma unroll
                for (int kk = 0; kk < 4; kk++) {
#pragma unroll
                    for (int t = 2 * part; t < 2 * part + 2; t++) {
                        mma<Format, Rows, 1, 0>(o[t], v + t * (CHUNK_BYTES >> 4) + kk * 128,
                                                probs + 2 * kk, 1);
                    }
                }
                mlai_wgmma_commit();
            }
            mlai_wgmma_wait<1>();
            release(s, stage, 0); /* the first half of this warpgroup's columns is read */
            mlai_wgmma_wait<0>();
#pragma unroll
            for (int t = 0; t < 4; t++) {
                mlai_wgmma_fence_operand(o[t]);
            }
            release(s, stage, 1); /* so are the others, and P */
        }
        if constexpr (!Walk::CLUSTER) {
#pragma unroll
            for (int i = 0; i < Rows / 2; i++) {
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    o[t][i] *= scale[i / 4 * 2 + i % 2];
                }
            }
        }
        finish_piece<Format, Rows>(p, s, w, out, o, my_lse2);
    }
}

} /* namespace mlai_decode */

#endif
