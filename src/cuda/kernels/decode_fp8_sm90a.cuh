/*
 * Absorbed MLA decode over 8-bit caches on Hopper: the body of the kernels of decode_fp8_sm90a.h.
 *
 *   s[r, k] = cap(scale * k_scale * q[r, :576] . kv[k, :576])
 *   out[r, :512] = k_scale * softmax_k(s) kv[k, :512]
 *
 *   S^T [64 keys x Rows]     = K [64 x 576] Q^T         a warpgroup of scores
 *   O^T [512 columns x Rows] = V^T [512 x 64] P^T       two warpgroups of values, 256 columns each
 *
 *   warps 0-3 producer, 4-7 scores, 8-15 values, merge, store
 *   producer --block_full--> scores --probs_full--> values --block_empty--> producer
 *
 * The plan, the walk and the merge are those of the 16-bit caches (decode_plan_sm90a.cuh,
 * decode_merge_sm90a.cuh), a persistent CTA an SM by a cooperative launch. S: f16 products from
 * widened bytes, or native e4m3 ones for e4m3 queries. P is f16 and so is V. ds656: S is summed by
 * groups of 128 dims, each times the key's scale; the values' scales go into P, of which there is
 * one a group, over a reference of the tile that is renewed when a scale passes it by 2^7. f32
 * sums; out bf16 or f32.
 */
#ifndef MLAI_DECODE_FP8_SM90A_CUH
#define MLAI_DECODE_FP8_SM90A_CUH

#include "decode_fp8_load_sm90a.cuh"
#include "decode_rows_sm90a.cuh"

namespace mlai_decode
{

/* ---- scores ---------------------------------------------------------------------------------- */

/* e4m3 x e4m3, both as they lie in shared memory. */
template <class Shape>
MLAI_DEV void multiply_native(float (&d)[Shape::ROWS / 2], uint32_t base, uint32_t q_smem)
{
    const uint64_t k = mlai_wgmma_descriptor(base, 0, 1024, MLAI_SWIZZLE_128);
    const uint64_t q = mlai_wgmma_descriptor(q_smem, 0, 1024, MLAI_SWIZZLE_128);
    mlai_wgmma_fence();
#pragma unroll
    for (int i = 0; i < 18; i++) {
        mlai_wgmma<Shape::ROWS>::e4m3_ss(d, k + i / 4 * (WIDE_CHUNK_BYTES >> 4) + i % 4 * 2,
                                         q + i / 4 * (Shape::Q_CHUNK_BYTES >> 4) + i % 4 * 2,
                                         i > 0);
    }
    mlai_wgmma_commit();
    mlai_wgmma_wait<0>();
    mlai_wgmma_fence_operand(d);
}

/* A thread's two keys, chunks of 64 dims in the order of key_order_of. */
template <class Shape> struct key_reader {
    uint32_t from; /* the first key's row; the other is 8 rows on */
    int32_t row, thread;

    MLAI_DEV key_reader at(uint32_t base)
    {
        const int32_t lane = threadIdx.x % 32, row = (threadIdx.x / 32) % 4 * 16 + lane / 4;
        return {base + row * 128, row & 7, lane % 4};
    }
    __device__ __forceinline__ void read(uint4 (&x)[2], int c) const
    {
        const int32_t piece = c < 8 ? thread * 2 + c % 2 : thread;
        const uint32_t to = from + c / 2 * WIDE_CHUNK_BYTES + ((piece ^ row) << 4);
        x[0] = load_shared_16(to);
        x[1] = load_shared_16(to + 1024);
    }
};

template <int Rows>
MLAI_DEV void multiply_widened(float (&d)[Rows / 2], const uint32_t (&a)[4][4], uint64_t q,
                               bool first)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        mlai_wgmma<Rows>::template f16_rs<0>(d, a[i], q + 2 * i, !first || i > 0);
    }
    mlai_wgmma_commit();
}

template <class Shape>
MLAI_DEV void multiply_keys(float (&d)[Shape::ROWS / 2], uint32_t base, uint32_t q_smem)
{
    const key_reader<Shape> keys = key_reader<Shape>::at(base);
    const uint64_t q = mlai_wgmma_descriptor(q_smem, 0, 1024, MLAI_SWIZZLE_128);
    uint4 x[2][2];
    uint32_t a[2][4][4];
    keys.read(x[0], 0);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        if (c < 8) {
            keys.read(x[(c + 1) % 2], c + 1);
        }
        if (c > 1) {
            mlai_wgmma_wait<1>(); /* the operands of two chunks ago are free */
        }
        widen_keys(a[c % 2], x[c % 2][0], x[c % 2][1]);
        mlai_wgmma_fence();
        multiply_widened<Shape::ROWS>(d, a[c % 2], q + c * (Shape::Q_CHUNK_BYTES >> 4), c == 0);
    }
    mlai_wgmma_wait<0>();
    mlai_wgmma_fence_operand(d);
}

/* The rope part in bf16 straight from shared memory, then four groups of 128 dims, each times its
 * key's scale; `scales` are those of the thread's two keys. */
template <class Shape>
MLAI_DEV void multiply_scaled(float (&d)[Shape::ROWS / 2], uint32_t base, uint32_t q_smem,
                              const float (&scales)[2][4])
{
    constexpr int REGS = Shape::ROWS / 2;
    const key_reader<Shape> keys = key_reader<Shape>::at(base);
    const uint64_t q = mlai_wgmma_descriptor(q_smem, 0, 1024, MLAI_SWIZZLE_128);
    const uint64_t k =
        mlai_wgmma_descriptor(base + 4 * WIDE_CHUNK_BYTES, 0, 1024, MLAI_SWIZZLE_128);
    float e[2][REGS];
    uint4 x[2][2];
    uint32_t a[2][4][4];
    keys.read(x[0], 0);
    mlai_wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        mlai_wgmma<Shape::ROWS>::template bf16_ss<0, 0>(
            d, k + 2 * i, q + 8 * (Shape::Q_CHUNK_BYTES >> 4) + 2 * i, i > 0);
    }
    mlai_wgmma_commit();
#pragma unroll
    for (int c = 0; c < 8; c++) {
        const int g = c / 2;
        if (c < 7) {
            keys.read(x[(c + 1) % 2], c + 1);
        }
        mlai_wgmma_wait<1>();
        if (c == 1) {
            mlai_wgmma_fence_operand(d);
        }
        if (c > 1 && c % 2 == 1) {
            mlai_wgmma_fence_operand(e[(g + 1) % 2]);
#pragma unroll
            for (int i = 0; i < REGS; i++) {
                d[i] += e[(g + 1) % 2][i] * scales[i / 2 % 2][g - 1];
            }
        }
        widen_keys(a[c % 2], x[c % 2][0], x[c % 2][1]);
        mlai_wgmma_fence();
        multiply_widened<Shape::ROWS>(e[g % 2], a[c % 2], q + c * (Shape::Q_CHUNK_BYTES >> 4),
                                      c % 2 == 0);
    }
    mlai_wgmma_wait<0>();
    mlai_wgmma_fence_operand(e[1]);
#pragma unroll
    for (int i = 0; i < REGS; i++) {
        d[i] += e[1][i] * scales[i / 2 % 2][3];
    }
}

/* P as Rows x 64 keys of f16, 128 bytes a row, swizzled: transposed 8x8 matrices of rows 8 i and
 * keys 16 warp and 16 warp + 8; `low` and `high` are the factors of the thread's two keys. */
template <int Rows>
MLAI_DEV void store_probs(uint32_t at, const float (&d)[Rows / 2], float low, float high)
{
    const int32_t lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
#pragma unroll
    for (int i = 0; i < Rows / 8; i += 2) {
        const int32_t row = i * 8 + lane % 8 + lane / 16 * 8, piece = warp * 2 + lane / 8 % 2;
        const uint32_t to = at + row * 128 + ((piece ^ (row & 7)) << 4);
        uint32_t r[4];
#pragma unroll
        for (int j = 0; j < (Rows > 8 ? 4 : 2); j++) {
            const float f = j % 2 ? high : low;
            r[j] = mlai_pack_f16x2(d[4 * i + 2 * j] * f, d[4 * i + 2 * j + 1] * f);
        }
        if constexpr (Rows > 8) {
            mlai_stmatrix_x4_trans(to, r[0], r[1], r[2], r[3]);
        } else {
            mlai_stmatrix_x2_trans(to, r[0], r[1]);
        }
    }
}

/* What turns a row's q . k into a logit (one factor for all, or one a row), and the cap. */
template <int Rows, int Factors>
MLAI_DEV void scale_rows(const logit_scale &s, const float (&factor)[Factors], float (&d)[Rows / 2])
{
#pragma unroll
    for (int i = 0; i < Rows / 2; i++) {
        d[i] *= factor[Factors == 1 ? 0 : i / 4 * 2 + i % 2];
    }
    if (s.capped) {
#pragma unroll
        for (int i = 0; i < Rows / 2; i++) {
            d[i] = s.cap * (1.0f - 2.0f * mlai_rcp(1.0f + mlai_exp2(d[i])));
        }
    }
}

/* The reference of a row that has seen no score: finite, so that none minus it is a number. */
constexpr float NO_SCORE = -1.5e38f;

template <class Shape, int Load, class Walk>
MLAI_DEV void wide_scores(const params &p, fp8_tail &s, uint32_t ring, uint32_t q_smem, Walk w)
{
    constexpr int ROWS = Shape::ROWS, MINE = ROWS / 4;
    constexpr int FACTORS = Shape::QUERY == QUERY_E4M3 ? 1 : MINE;
    const int32_t lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
    const int32_t key0 = warp * 16 + lane / 4;
    uint32_t n = 0, piece = 0;
    for (; w.live(); w.advance(p)) {
        if (!w.has_blocks()) {
            continue;
        }
        const int32_t first_row = w.first_row(p);
        const int32_t len = visible_keys(p, w.now, w.now.q_len - 1);
        const int32_t shortest = visible_keys(p, w.now, divide(p.by_heads, first_row));
        mlai_bar_sync(BAR_SCORES, 128); /* orders the last reads of Q before the next */
        load_queries<Shape>(p, s, q_smem, w.now, first_row);
        mlai_bar_sync(BAR_SCORES, 128); /* orders all threads' rows before their use */
        const logit_scale scale = make_logit_scale(p);
        float reference[MINE], sum[MINE], factor[FACTORS];
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            reference[i] = NO_SCORE;
            sum[i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < FACTORS; i++) {
            factor[i] = scale.factor * p.k_scale * s.query_scale[column_row(i)];
        }
        float scale_reference = 0.0f, per_reference = 0.0f;
#pragma unroll 1
        for (int32_t block = w.block_begin; block < w.block_end; block++, n++) {
            const uint32_t stage = n % Shape::STAGES, parity = (n / Shape::STAGES) & 1;
            /* from lane 0, for uniform registers */
            const uint32_t base = __shfl_sync(0xffffffffu, ring + stage * Shape::STAGE_BYTES, 0);
            float d[ROWS / 2], scales[2][4], top_scale = 0.0f;
            mlai_mbar_wait(mlai_smem_u32(&s.block_full[stage]), parity);
            if constexpr (Load == LOAD_GATHER) {
                mlai_fence_proxy_async_shared(); /* orders copies by threads before wgmma's reads */
            }
            if constexpr (Shape::QUERY == QUERY_E4M3) {
                multiply_native<Shape>(d, base, q_smem);
            } else if constexpr (Shape::SCALED) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const uint4 x = load_shared_16(base + Shape::SCALES_AT + (key0 + 8 * i) * 16);
                    const bool live = block * KEYS + key0 + 8 * i < len;
                    scales[i][0] = live ? __uint_as_float(x.x) : 0.0f;
                    scales[i][1] = live ? __uint_as_float(x.y) : 0.0f;
                    scales[i][2] = live ? __uint_as_float(x.z) : 0.0f;
                    scales[i][3] = live ? __uint_as_float(x.w) : 0.0f;
#pragma unroll
                    for (int g = 0; g < 4; g++) {
                        top_scale = fmaxf(top_scale, scales[i][g]);
                    }
                }
                multiply_scaled<Shape>(d, base, q_smem, scales);
            } else {
                multiply_keys<Shape>(d, base, q_smem);
            }
            scale_rows<ROWS, FACTORS>(scale, factor, d);
            if (block * KEYS + KEYS > shortest) {
#pragma unroll
                for (int i = 0; i < ROWS / 2; i++) {
                    const int32_t key = block * KEYS + key0 + i / 2 % 2 * 8;
                    d[i] = key < s.keys[column_row(i / 4 * 2 + i % 2)] ? d[i] : NEG_INF;
                }
                if constexpr (Shape::SCALED) {
#pragma unroll
                    for (int i = 0; i < 8; i++) { /* a hidden key's P is 0: keep it so */
                        float &x = scales[i / 4][i % 4];
                        x = x < -NEG_INF ? x : 0.0f;
                    }
                }
            }
            float top[MINE];
            bool raise = Shape::SCALED && top_scale > 128.0f * scale_reference;
#pragma unroll
            for (int i = 0; i < MINE; i++) {
                top[i] = fmaxf(d[4 * (i / 2) + i % 2], d[4 * (i / 2) + 2 + i % 2]);
                raise = raise || top[i] > reference[i] + LAZY_MAX;
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
                if constexpr (Shape::SCALED) {
                    top_scale = drop_empty_groups(scales, base, 128.0f * scale_reference);
#pragma unroll
                    for (int x = 4; x < 32; x *= 2) {
                        top_scale = fmaxf(top_scale, __shfl_xor_sync(0xffffffffu, top_scale, x));
                    }
                    if (lane == 0) {
                        s.warp_scale[warp] = top_scale;
                    }
                }
                mlai_bar_sync(BAR_SCORES, 128); /* orders the warps' maxima before their readers */
                float shrink = 1.0f;
                if (Shape::SCALED) {
                    const float all = fmaxf(fmaxf(s.warp_scale[0], s.warp_scale[1]),
                                            fmaxf(s.warp_scale[2], s.warp_scale[3]));
                    if (all > 128.0f * scale_reference) {
                        /* A power of two, so that both ways of using it are exact. */
                        const float to =
                            __uint_as_float(min(__float_as_uint(all) & 0x7f800000u, 0x7e000000u));
                        per_reference = to > 0.0f ? mlai_rcp(to) : 0.0f;
                        shrink = scale_reference * per_reference;
                        scale_reference = to;
                    }
                }
#pragma unroll
                for (int i = 0; i < MINE; i++) {
                    const int32_t row = column_row(i);
                    const float all = fmaxf(fmaxf(s.warp_top[0][row], s.warp_top[1][row]),
                                            fmaxf(s.warp_top[2][row], s.warp_top[3][row]));
                    const float to = all > reference[i] + LAZY_MAX ? all : reference[i];
                    const float alpha = to == reference[i] ? 1.0f : mlai_exp2(reference[i] - to);
                    reference[i] = to;
                    sum[i] *= alpha;
                    if (warp == 0 && lane < 4) {
                        s.factor[stage][row] = alpha * shrink;
                    }
                }
            }
            if (warp == 0 && lane == 0) {
                s.raised[stage] = raise && block > w.block_begin;
            }
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) {
                const int mine = i / 4 * 2 + i % 2;
                d[i] = mlai_exp2(d[i] - reference[mine]);
                sum[mine] += d[i];
            }
            if constexpr (Shape::SCALED) {
#pragma unroll
                for (int g = 0; g < 4; g++) {
                    store_probs<ROWS>(base + Shape::P_AT + g * ROWS * 128, d,
                                      scales[0][g] * per_reference, scales[1][g] * per_reference);
                }
            } else {
                store_probs<ROWS>(base + Shape::P_AT, d, 1.0f, 1.0f);
            }
            if (block + 1 == w.block_end) {
                const float out_scale = Shape::SCALED ? scale_reference : p.k_scale;
                add_warp_sums<ROWS>(s, sum, [&](int i, int32_t row, float all) {
                    s.inverse[piece % PIECES][row] = all > 0.0f ? out_scale * mlai_rcp(all) : 0.0f;
                    s.tile_lse2[piece % PIECES][row] =
                        all > 0.0f ? reference[i] + mlai_log2(all) : NEG_INF;
                });
                piece++;
            }
            mlai_fence_proxy_async_shared(); /* orders P before wgmma's reads */
            __syncwarp(); /* orders the warp's P and statistics before its arrival */
            if (lane == 0) {
                mlai_mbar_arrive(mlai_smem_u32(&s.probs_full[stage]));
            }
        }
    }
}

/* ---- values ---------------------------------------------------------------------------------- */

template <class Shape, class Walk>
MLAI_DEV void wide_values(const params &p, fp8_tail &s, uint32_t ring, Walk w)
{
    constexpr int ROWS = Shape::ROWS;
    constexpr int BUFFERS = ROWS < 64 ? 2 : 1; /* registers */
    const uint32_t half = __shfl_sync(0xffffffffu, (threadIdx.x / 128) % 2, 0);
    const int32_t warp = (threadIdx.x / 32) % 4, thread256 = threadIdx.x % 256;
    uint32_t n = 0, piece = 0;
    for (; w.live(); w.advance(p)) {
        const tile_out out = {w.now.first_token, w.first_row(p), w.now.q_len * p.heads};
        if (!w.has_blocks()) {
            if (w.owns_empty()) {
                store_empty<FORMAT_BF16, ROWS>(p, out);
            }
            continue;
        }
        const int32_t shortest = visible_keys(p, w.now, divide(p.by_heads, out.first_row));
        begin_piece<ROWS>(p, s, w, out);
        float o[4][ROWS / 2]; /* tile t: columns half * 256 + t * 64 */
#pragma unroll
        for (int t = 0; t < 4; t++) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) {
                o[t][i] = 0.0f;
            }
        }
#pragma unroll 1
        for (int32_t block = w.block_begin; block < w.block_end; block++, n++) {
            const uint32_t stage = n % Shape::STAGES, parity = (n / Shape::STAGES) & 1;
            const uint32_t base = __shfl_sync(0xffffffffu, ring + stage * Shape::STAGE_BYTES, 0);
            mlai_mbar_wait(mlai_smem_u32(&s.probs_full[stage]), parity);
            if (s.raised[stage]) {
#pragma unroll
                for (int i = 0; i < ROWS / 2; i++) {
                    const float factor = s.factor[stage][column_row(i / 4 * 2 + i % 2)];
#pragma unroll
                    for (int t = 0; t < 4; t++) {
                        o[t][i] *= factor;
                    }
                }
            }
            if (block * KEYS + KEYS > shortest) {
                clear_hidden_keys(base, half, shortest - block * KEYS,
                                  visible_keys(p, w.now, w.now.q_len - 1) - block * KEYS);
            }
            const uint64_t probs =
                mlai_wgmma_descriptor(base + Shape::P_AT, 0, 1024, MLAI_SWIZZLE_128);
            /* The next tile is read while this one is multiplied. */
            uint32_t a[BUFFERS][4][4], raw[2][4];
            const int32_t column = half * 256 + warp * 16;
            read_values(raw, base, column);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                if (t >= BUFFERS) {
                    mlai_wgmma_wait<BUFFERS - 1>(); /* these operands are free */
                }
                widen_values(a[t % BUFFERS], raw);
                if (t < 3) {
                    read_values(raw, base, column + (t + 1) * 64);
                }
                const uint64_t of_group =
                    probs + (Shape::SCALED ? (half * 2 + t / 2) * (ROWS * 128 >> 4) : 0);
                mlai_wgmma_fence_operand(o[t]);
                mlai_wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < 4; kk++) {
                    mlai_wgmma<ROWS>::template f16_rs<0>(o[t], a[t % BUFFERS][kk],
                                                         of_group + 2 * kk, 1);
                }
                mlai_wgmma_commit();
            }
            mlai_wgmma_wait<0>();
#pragma unroll
            for (int t = 0; t < 4; t++) {
                mlai_wgmma_fence_operand(o[t]);
            }
            __syncwarp(); /* orders the warp's reads of the stage before its release */
            if (threadIdx.x % 32 == 0) {
                mlai_mbar_arrive(mlai_smem_u32(&s.block_empty[stage]));
            }
        }
        const uint32_t ended = piece % PIECES;
        piece++;
        const volatile float *inverse = s.inverse[ended];
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
            const float by = inverse[column_row(i)];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                o[t][i / 2 * 4 + i % 2] *= by;
                o[t][i / 2 * 4 + i % 2 + 2] *= by;
            }
        }
        const float my_lse2 = thread256 < ROWS ? s.tile_lse2[ended][thread256] : NEG_INF;
        finish_piece<FORMAT_BF16, ROWS>(p, s, w, out, o, my_lse2);
    }
}

/* Value warps: their tiles, then their share of the merges. */
template <class Shape>
MLAI_DEV void wide_values_and_merges(const params &p, fp8_tail &s, uint32_t ring,
                                     char *ring_generic)
{
    constexpr int LINES = fragment<Shape::ROWS>::LINES;
    walk<Shape::ROWS> w;
    w.start(p, s.found, (int32_t)blockIdx.x / p.share);
    wide_values<Shape>(p, s, ring, w);
    mlai_bar_sync(BAR_VALUES, 256); /* orders the jobs before their readers */
#pragma unroll 1
    for (int32_t i = 0; i < 2; i++) {
        const merge_job job = s.jobs[i];
        if (job.pieces == 0) {
            continue;
        }
        if (threadIdx.x % 256 == 0) {
            while (((mlai_ld_acquire_gpu(p.counters + job.first_cta) ^ job.ticket) & 0x80000000u) ==
                   0) {
            }
        }
        mlai_bar_sync(BAR_VALUES, 256); /* orders the last partial before its readers */
        merge_many<FORMAT_BF16, Shape::ROWS>(p, job, job.mine * LINES / job.pieces,
                                             (job.mine + 1) * LINES / job.pieces,
                                             (merge_state *)ring_generic);
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

template <class Shape, int Load> MLAI_DEV void decode_wide(const params &p)
{
    constexpr int ROWS = Shape::ROWS;
    constexpr bool SCALES_APART = Shape::SCALED && Load == LOAD_TENSOR;
    extern __shared__ char raw[];
    char *aligned = raw + ((1024 - (mlai_smem_u32(raw) & 1023)) & 1023);
    const uint32_t ring = mlai_smem_u32(aligned),
                   q_smem = ring + Shape::STAGES * Shape::STAGE_BYTES;
    fp8_tail &s = *(fp8_tail *)(aligned + Shape::STAGES * Shape::STAGE_BYTES + ROWS * 1152);
    const int32_t warp = threadIdx.x / 32;
    const int32_t stretch = blockIdx.x / p.share, stretches = gridDim.x / p.share;

    if (threadIdx.x == 0) {
        for (int i = 0; i < Shape::STAGES; i++) {
            mlai_mbar_init(mlai_smem_u32(&s.block_full[i]), Load == LOAD_GATHER ? 128
                                                            : SCALES_APART      ? 65
                                                                                : 1);
            mlai_mbar_init(mlai_smem_u32(&s.probs_full[i]), 4);
            mlai_mbar_init(mlai_smem_u32(&s.block_empty[i]), 8);
        }
        s.jobs[0].pieces = s.jobs[1].pieces = 0;
        mlai_fence_mbar_init();
        if (Load != LOAD_GATHER) {
            mlai_tma_prefetch_descriptor((const CUtensorMap *)&p.kv_map);
        }
    }
    const plan where = p.batch <= 32 ? plan_few<ROWS>(p, stretch, stretches)
                                     : plan_many<ROWS>(p, s, stretch, stretches);
    if (threadIdx.x == 0) {
        s.found = where;
    }
    __syncthreads(); /* orders the inits and the plan before their use */
    walk<ROWS> w;    /* each role begins its own: less to carry, nothing spilled */
    if (warp < 4) {
        mlai_setmaxnreg_dec<(ROWS < 32 ? 56 : ROWS < 64 ? 40 : 32)>();
        w.start(p, s.found, stretch);
        if constexpr (Load == LOAD_GATHER) {
            produce_wide_gather<Shape>(p, s, ring, w);
        } else if (warp == 0) {
            produce_wide_tensor<Shape>(p, s, ring, w);
        } else if (SCALES_APART && warp < 3) {
            if constexpr (SCALES_APART) {
                produce_scales<Shape>(p, s, ring, w);
            }
        }
    } else if (warp < 8) {
        if constexpr (ROWS < 64) {
            mlai_setmaxnreg_inc<(ROWS < 32 ? 168 : 152)>();
        } else {
            mlai_setmaxnreg_dec<112>();
        }
        w.start(p, s.found, stretch);
        wide_scores<Shape, Load>(p, s, ring, q_smem, w);
    } else {
        mlai_setmaxnreg_inc<(ROWS < 32 ? 144 : ROWS < 64 ? 160 : 184)>();
        wide_values_and_merges<Shape>(p, s, ring, aligned);
    }
}

} /* namespace mlai_decode */

#define MLAI_DECODE_WIDE_KERNEL(name, query, cache, rows, load)                                    \
    extern "C" __global__ void __launch_bounds__(MLAI_DECODE_FP8_THREADS, 1)                       \
        name(const __grid_constant__ mlai_decode_sm90a_params p)                                   \
    {                                                                                              \
        mlai_decode::decode_wide<mlai_decode::shape<query, cache, rows>, load>(p);                 \
    }

#define MLAI_DECODE_WIDE_KERNELS(stem, query, cache)                                               \
    MLAI_DECODE_WIDE_KERNEL(stem##_r8, query, cache, 8, mlai_decode::LOAD_TENSOR)                  \
    MLAI_DECODE_WIDE_KERNEL(stem##_r16, query, cache, 16, mlai_decode::LOAD_TENSOR)                \
    MLAI_DECODE_WIDE_KERNEL(stem##_r32, query, cache, 32, mlai_decode::LOAD_TENSOR)                \
    MLAI_DECODE_WIDE_KERNEL(stem##_r8_gather, query, cache, 8, mlai_decode::LOAD_GATHER)           \
    MLAI_DECODE_WIDE_KERNEL(stem##_r16_gather, query, cache, 16, mlai_decode::LOAD_GATHER)         \
    MLAI_DECODE_WIDE_KERNEL(stem##_r32_gather, query, cache, 32, mlai_decode::LOAD_GATHER)

/* Tiles of 64 rows, where scores are native products. */
#define MLAI_DECODE_WIDE_KERNELS_64(stem, query, cache)                                            \
    MLAI_DECODE_WIDE_KERNEL(stem##_r64, query, cache, 64, mlai_decode::LOAD_TENSOR)                \
    MLAI_DECODE_WIDE_KERNEL(stem##_r64_gather, query, cache, 64, mlai_decode::LOAD_GATHER)

#endif
