/*
 * Hopper decode, tiles of 64 rows: the rows on wgmma's 64 side, two warpgroups of equal standing.
 *
 * Block n belongs to warpgroup n % 2, which computes its S [64 x 64 keys] and P; both add P V for
 * their 256 columns, the owner with P still in registers, the other from shared memory (over the
 * block's rope columns). The tensor cores get, in this order, wo is the owner of n and we the
 * other:
 *
 *   wo   S(n)        | softmax, P(n) out                        .. P(n) V(n) | P(n+1) V(n+1) S(n+2)
 *   we     softmax(n-1) .. P(n-1) V(n-1) | P(n) V(n)  S(n+1)    |  softmax, P(n+1) out  ..
 *                                           (BAR_SCORED) -------^
 *
 * The owner's product waits until the next block's scores are under way: it is what runs during
 * their softmax. So the other's columns and the rope columns are free first (part 0), those of the
 * owner later (part 1), and S takes them in that order when the next block has come.
 *
 * Both follow one sequence of reference maxima: each P comes with the reference it was taken
 * against. f32 sums, each warpgroup those of its own blocks; P rounded to the cache's format.
 * Called by: decode_sm90a.cuh.
 */
#ifndef MLAI_DECODE_ROWS64_SM90A_CUH
#define MLAI_DECODE_ROWS64_SM90A_CUH

#include "decode_merge64_sm90a.cuh"

namespace mlai_decode
{

/* Warps 1-3, while warp 0 fetches keys: the rows of each piece, as soon as nobody scores the last
 * ones any more, and those of the piece after it into L2. */
template <class Walk>
MLAI_DEV void produce_queries(const params &p, tail &s, uint32_t q_smem, Walk w)
{
    constexpr int ROWS = 64, THREADS = 96;
    uint32_t piece = 0;
    while (w.live() && !w.has_blocks()) {
        w.advance(p);
    }
    for (; w.live(); piece++) {
        mlai_mbar_wait(mlai_smem_u32(&s.q_empty), piece % 2 ^ 1);
        issue_queries<ROWS, THREADS>(p, s.row_len[piece % 2], q_smem, w.now, w.first_row(p));
        do {
            w.advance(p);
        } while (w.live() && !w.has_blocks());
        mlai_cp_async_wait<0>();
        mlai_fence_proxy_async_shared(); /* orders the copies before wgmma's reads */
        mlai_mbar_arrive(mlai_smem_u32(&s.q_full));
        if (w.live()) {
            prefetch_queries<ROWS, THREADS>(p, w.now, w.first_row(p));
        }
    }
}

template <int Format, int Load, class Walk>
MLAI_DEV void tiles_of_64(const params &p, tail &s, uint32_t ring, uint32_t q_smem, Walk w)
{
    constexpr int ROWS = 64;
    const int32_t tid = threadIdx.x % 128, lane = tid % 32, warp = tid / 32;
    const uint32_t half = __shfl_sync(0xffffffffu, (threadIdx.x / 128) % 2, 0);
    const int32_t thread256 = threadIdx.x % 256, row0 = warp * 16 + lane / 4;
    const logit_scale scaling = make_logit_scale(p);
    /* Where it can, the scale goes into the exponent's own multiplication. */
    const bool plain = !scaling.capped && scaling.factor > 0.0f;
    const float factor = plain ? scaling.factor : 1.0f;
    float d[KEYS / 2];
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        d[i] = 0.0f;
    }
    uint32_t n = 0, piece = 0;
    for (; w.live(); w.advance(p)) {
        const tile_out out = {w.now.first_token, w.first_row(p), w.now.q_len * p.heads};
        if (!w.has_blocks()) {
            if (w.owns_empty()) {
                store_empty<Format, ROWS>(p, out);
            }
            continue;
        }
        begin_piece<ROWS>(p, s, w, out);
        int32_t *row_len = s.row_len[piece % 2];
        if constexpr (Load == LOAD_GATHER) {
            issue_queries<ROWS, 256>(p, row_len, q_smem, w.now, out.first_row);
            mlai_cp_async_wait<0>();
            mlai_fence_proxy_async_shared(); /* orders the copies before wgmma's reads */
            mlai_bar_sync(BAR_VALUES, 256);  /* orders copies and row lengths before their use */
        } else {
            mlai_mbar_wait(mlai_smem_u32(&s.q_full), piece % 2);
        }
        const auto live_keys = [&](int32_t block) {
            return visible_keys(p, w.now, w.now.q_len - 1) - block * KEYS;
        };
        const int32_t shortest = visible_keys(p, w.now, divide(p.by_heads, out.first_row));
        float o[2][64];
#pragma unroll
        for (int i = 0; i < 64; i++) {
            o[0][i] = o[1][i] = 0.0f;
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
            for (int i = 0; i < 64; i++) {
                o[0][i] *= i % 4 < 2 ? a0 : a1;
                o[1][i] *= i % 4 < 2 ? a0 : a1;
            }
        };
        int32_t block = w.block_begin;
        const auto leave_queries = [&]() {
            __syncwarp(); /* orders the warp's reads of Q before its arrival */
            if (lane == 0) {
                mlai_mbar_arrive(mlai_smem_u32(&s.q_empty));
            }
        };
        const auto own_block = [&]() {
            const uint32_t stage = n % STAGES, parity = (n / STAGES) & 1;
            const uint32_t base = __shfl_sync(0xffffffffu, ring + stage * STAGE_BYTES, 0),
                           p_smem = base + 8 * CHUNK_BYTES;
            const uint64_t v = mlai_wgmma_descriptor(base + half * 4 * CHUNK_BYTES, CHUNK_BYTES,
                                                     1024, MLAI_SWIZZLE_128);
            const uint64_t q = mlai_wgmma_descriptor(q_smem, 0, 1024, MLAI_SWIZZLE_128),
                           k = mlai_wgmma_descriptor(base, 0, 1024, MLAI_SWIZZLE_128);
            const auto scores_of = [&](uint32_t chunk, bool is_first) {
                const uint64_t a = q + chunk * (ROWS * 128 >> 4),
                               b = k + chunk * (CHUNK_BYTES >> 4);
#pragma unroll
                for (int kk = 0; kk < 4; kk++) {
                    mma<Format, KEYS, 0, 0>(d, a + 2 * kk, b + 2 * kk, !is_first || kk > 0);
                }
            };
            mlai_mbar_wait(mlai_smem_u32(&s.full[stage][0]), parity);
            mlai_wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores_of((half ^ 1) * 4 + i, i == 0);
            }
            scores_of(8, false);
            mlai_wgmma_commit();
            if (block > w.block_begin) {
                mlai_wgmma_wait<1>();
                release(s, stage ^ 1, 0); /* the product of the block before is done */
            }
            mlai_mbar_wait(mlai_smem_u32(&s.full[stage][1]), parity);
            mlai_wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores_of(half * 4 + i, false);
            }
            mlai_wgmma_commit();
            if (block > w.block_begin) {
                mlai_bar_arrive(BAR_SCORED + n % 2, 256); /* the other's own product may follow */
            }
            mlai_wgmma_wait<0>();
            mlai_wgmma_fence_operand(d);
            mlai_wgmma_fence_operand(o[0]);
            mlai_wgmma_fence_operand(o[1]);
            if (Load != LOAD_GATHER && block + 2 * w.step() >= w.block_end) {
                leave_queries();
            }
            float x[KEYS / 2];
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) {
                x[i] = d[i];
            }
            if (!plain) {
                scale_logits(scaling, x);
            }
            if (block * KEYS + KEYS > shortest) {
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) {
                    const int32_t key = block * KEYS + i / 4 * 8 + (lane % 4) * 2 + i % 2;
                    x[i] = key < row_len[row0 + i / 2 % 2 * 8] ? x[i] : NEG_INF;
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
                top[i] *= factor;
                raise = raise || must_raise(top[i], reference[i]);
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
            /* By halves of the keys: the other's product of the first one runs during the second.
             */
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int j = 0; j < KEYS / 4; j += 2) {
                    const int i = h * (KEYS / 4) + j, r = i / 2 % 2;
                    x[i] = mlai_exp2(fmaf(x[i], factor, -shift[r]));
                    x[i + 1] = mlai_exp2(fmaf(x[i + 1], factor, -shift[r]));
                    sum[r] += x[i] + x[i + 1];
                    probs[i / 2] = pack<Format>(x[i], x[i + 1]);
                }
                if (h == 0) {
                    /* orders every warp's S before P over the rope columns */
                    mlai_bar_sync(BAR_VALUES_HALF + half, 128);
                    if (lane % 4 == 0) {
                        s.reference[stage][row0] = reference[0];
                        s.reference[stage][row0 + 8] = reference[1];
                    }
                }
#pragma unroll
                for (int j = 0; j < KEYS / 16; j += 2) {
                    /* 8x8 matrices: rows 16 warp + {0, 8}, keys 8 i and 8 i + 8 */
                    const int i = h * (KEYS / 16) + j;
                    const int32_t row = warp * 16 + lane % 16, part = i + lane / 16;
                    mlai_stmatrix_x4(p_smem + row * 128 + ((part ^ (row & 7)) << 4), probs[2 * i],
                                     probs[2 * i + 1], probs[2 * i + 2], probs[2 * i + 3]);
                }
                mlai_fence_proxy_async_shared(); /* orders P before wgmma's reads */
                __syncwarp(); /* orders the warp's P and references before its arrival */
                if (lane == 0) {
                    mlai_mbar_arrive(mlai_smem_u32(h == 0 ? &s.p_full[stage] : &s.p_late[stage]));
                }
            }
            clear_dead_rows(base, half, live_keys(block));
            if (block + w.step() < w.block_end) {
                mlai_bar_sync(BAR_SCORED + (n + 1) % 2, 256); /* after the next block's scores */
            }
            mlai_wgmma_fence_operand(o[0]);
            mlai_wgmma_fence_operand(o[1]);
            mlai_wgmma_fence();
#pragma unroll
            for (int t = 0; t < 2; t++) {
#pragma unroll
                for (int kk = 0; kk < 4; kk++) {
                    const uint32_t a[4] = {probs[4 * kk], probs[4 * kk + 1], probs[4 * kk + 2],
                                           probs[4 * kk + 3]};
                    mma_rs<Format, 128, 1>(o[t], a, v + t * (2 * CHUNK_BYTES >> 4) + kk * 128, 1);
                }
            }
            mlai_wgmma_commit();
            block += w.step();
            n++;
        };
        const auto other_block = [&]() {
            const uint32_t stage = n % STAGES, parity = (n / STAGES) & 1;
            const uint32_t base = __shfl_sync(0xffffffffu, ring + stage * STAGE_BYTES, 0),
                           p_smem = base + 8 * CHUNK_BYTES;
            const uint64_t v = mlai_wgmma_descriptor(base + half * 4 * CHUNK_BYTES, CHUNK_BYTES,
                                                     1024, MLAI_SWIZZLE_128);
            mlai_wgmma_wait<0>();
            mlai_wgmma_fence_operand(o[0]);
            mlai_wgmma_fence_operand(o[1]);
            if (block > w.block_begin) {
                release(s, stage ^ 1, 1);
            }
            mlai_mbar_wait(mlai_smem_u32(&s.p_full[stage]), parity);
            const float to0 = s.reference[stage][row0], to1 = s.reference[stage][row0 + 8];
            if (__any_sync(0xffffffffu, to0 != reference[0] || to1 != reference[1])) {
                rescale(to0, to1);
            }
            clear_dead_rows(base, half, live_keys(block));
            const uint64_t probs = mlai_wgmma_descriptor(p_smem, 0, 1024, MLAI_SWIZZLE_128);
            mlai_wgmma_fence_operand(o[0]);
            mlai_wgmma_fence_operand(o[1]);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (h == 1) {
                    mlai_mbar_wait(mlai_smem_u32(&s.p_late[stage]), parity);
                }
                mlai_wgmma_fence();
#pragma unroll
                for (int t = 0; t < 2; t++) {
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const int kk = 2 * h + j;
                        mma<Format, 128, 0, 1>(o[t], probs + 2 * kk,
                                               v + t * (2 * CHUNK_BYTES >> 4) + kk * 128, 1);
                    }
                }
                mlai_wgmma_commit();
            }
            block += w.step();
            n++;
        };
        if (n % STAGES != half) {
            if (Load != LOAD_GATHER && block + w.step() >= w.block_end) {
                leave_queries(); /* no block of its own */
            }
            other_block();
        }
        while (block < w.block_end) {
            own_block();
            if (block < w.block_end) {
                other_block();
            }
        }
        mlai_wgmma_wait<0>();
        mlai_wgmma_fence_operand(o[0]);
        mlai_wgmma_fence_operand(o[1]);
        release(s, (n + 1) % STAGES, (n + 1) % STAGES == half);
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
        /* orders both sums before their readers, all reads of Q before the next */
        mlai_bar_sync(BAR_VALUES, 256);
        float scale[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float all = sums[0][row0 + 8 * i] + sums[1][row0 + 8 * i];
            scale[i] = all > 0.0f ? mlai_rcp(all) : 0.0f;
        }
        float my_lse2 = NEG_INF;
        if (thread256 < ROWS) {
            const float all = sums[0][thread256] + sums[1][thread256];
            my_lse2 = all > 0.0f ? s.lse2[piece % 2][thread256] + mlai_log2(all) : NEG_INF;
        }
        finish_piece_64<Format>(p, s, w, out, o, scale, my_lse2);
        piece++;
    }
}

} /* namespace mlai_decode */

#endif
