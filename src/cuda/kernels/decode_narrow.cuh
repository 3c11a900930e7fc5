/* Decode, blocks of 16 rows: what a request of few heads and one token needs, memory-bound, two
 * blocks a multiprocessor. 8 warps on tiles of 32 keys; T is the products' type.
 *
 *   scores   warp (part, n): 16 rows x 16 keys over a quarter of D, Q in registers; the four
 *            parts of D meet in X, which the softmax adds up, a warp two rows, a lane one key
 *   values   warp w: 16 rows x R / 8 columns, P from shared memory
 *
 *   X [part][16][40] f32    P [version][16][40]    scales [stage][4][32]    (40: no bank twice)
 *
 * ds656: codes are exact in bf16, so scores are scaled by the row's scale of each 128 columns after
 * the products, and P, one version for each 128 columns, before them. Used by decode_portable.cu.
 */
#ifndef MLAI_DECODE_NARROW_CUH
#define MLAI_DECODE_NARROW_CUH

#include "cuda/kernels/decode_portable.cuh"

template <class T> struct Narrow {
    static constexpr int ROWS = MLAI_DECODE_NARROW_ROWS, KEYS = MLAI_DECODE_NARROW_KEYS;
    static constexpr int PARTS = 4;                              /* of D */
    static constexpr int STEPS = MLAI_DECODE_MAX_D / 16 / PARTS; /* k steps of a part, at most */
    static constexpr int PAIRS = MLAI_DECODE_MAX_R / 16 / 8;     /* 16 columns each, of a warp */
    static constexpr int X_STRIDE = 40, P_STRIDE = 40;           /* no bank twice */
    static constexpr int DEPTH = 4; /* of the ring that joins partial results */

    static __device__ __forceinline__ float *scratch(const Params &p, char *smem)
    {
        return (float *)(smem + 2 * KEYS * 2 * p.row_stride);
    }

    /* Scores of 16 rows and 16 keys over this warp's part of D, to x [PARTS][16][X_STRIDE]. Part i
     * has k steps i, i + 4, ..: two of each 128 columns, whose ds656 scale joins when they are
     * done. */
    static __device__ __forceinline__ void multiply_keys(const Params &p,
                                                         const uint32_t (&q)[STEPS][4],
                                                         uint32_t tile, const float *scales,
                                                         float *x)
    {
        const int thread = thread_now(), warp = thread / 32, lane = thread % 32;
        const int part = warp / 2, first_key = warp % 2 * 16;
        const int steps = p.row_stride / 64;
        const uint32_t from = b_address(tile, first_key, part, 2 * p.row_stride, lane);
        float acc[2][4] = {}, scaled[2][4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (i < steps) {
                uint32_t k[4];
                ldmatrix(k, from + 128 * i); /* 4 k steps on: 8 chunks */
                T::mma(acc[0], q[i], k[0], k[1]);
                T::mma(acc[1], q[i], k[2], k[3]);
            }
            if (i % 2 == 1 && i < 8 && p.kv_format == DS656) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float *scale =
                        scales + i / 2 * KEYS + first_key + 8 * half + lane % 4 * 2;
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        scaled[half][r] += acc[half][r] * scale[r % 2];
                        acc[half][r] = 0.0f;
                    }
                }
            }
        }
        float *to = x + (part * ROWS + lane / 4) * X_STRIDE + first_key + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int below = 0; below < 2; below++)
                *(float2 *)(to + below * 8 * X_STRIDE + 8 * half) =
                    make_float2(acc[half][2 * below] + scaled[half][2 * below],
                                acc[half][2 * below + 1] + scaled[half][2 * below + 1]);
        }
    }

    /* Rows 2 warp and 2 warp + 1, a key a lane: scores to probabilities. With ds656 one P for each
     * 128 columns, times their scale. */
    static __device__ __forceinline__ void softmax(const Params &p, const Item &item, Tail &tail,
                                                   const float *x, uint16_t *probabilities,
                                                   const float *scales, int first_key,
                                                   float (&maximum)[2], float (&sum)[2])
    {
        const int thread = thread_now(), warp = thread / 32, lane = thread % 32;
        const int key = first_key + lane;
        const Scores how = scores_of(p);
        const int end = item.end_key; /* of this split: bounds may lie past it */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = 2 * warp + i;
            float s = 0.0f;
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                s += x[(part * ROWS + row) * X_STRIDE + lane];
            s = score(how, s);
            if (key >= end || key >= tail.bounds[row] ||
                (p.mask && is_masked(p, item, tail.tokens[row], key)))
                s = -INFINITY;
            float largest = s;
#pragma unroll
            for (int step = 16; step > 0; step /= 2)
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
            float base;
            const float rescale = raise_maximum(maximum[i], largest, base);
            const float probability = fast_exp2(s - base);
            sum[i] = sum[i] * rescale + probability;
            if (lane == 0)
                tail.rescale[row] = rescale;
            uint16_t *to = probabilities + row * P_STRIDE + lane;
            if (p.kv_format == DS656) {
#pragma unroll
                for (int j = 0; j < 4; j++)
                    to[j * ROWS * P_STRIDE] =
                        T::narrow(probability == 0.0f ? 0.0f /* whatever a hidden key's scale is */
                                                      : probability * scales[j * KEYS + lane]);
            } else {
                to[0] = T::narrow(probability);
            }
        }
    }

    /* o += P V on this warp's columns: pairs first_pair .. of 16. */
    static __device__ __forceinline__ void multiply_values(const Params &p, uint32_t tile,
                                                           const uint16_t *probabilities,
                                                           const Tail &tail,
                                                           float (&o)[PAIRS][2][4])
    {
        const int thread = thread_now(), lane = thread % 32, all_pairs = p.latent_pad / 16;
        const int each = (all_pairs + 7) / 8, first_pair = thread / 32 * each;
        const int n_pairs = min(each, all_pairs - first_pair);
        const float above = tail.rescale[lane / 4], below = tail.rescale[lane / 4 + 8];
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                o[j][half][0] *= above, o[j][half][1] *= above;
                o[j][half][2] *= below, o[j][half][3] *= below;
            }
        }
        const int version = p.kv_format == DS656 ? first_pair / 8 : 0;
        const uint32_t from = shared_address(probabilities + version * ROWS * P_STRIDE +
                                             lane % 16 * P_STRIDE + lane / 16 * 8);
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            uint32_t a[4];
            ldmatrix(a, from + step * 32);
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                if (j < n_pairs) {
                    uint32_t v[4];
                    ldmatrix_transposed(
                        v, v_address(tile, step, first_pair + j, 2 * p.row_stride, lane));
                    T::mma(o[j][0], a, v[0], v[1]);
                    T::mma(o[j][1], a, v[2], v[3]);
                }
            }
        }
    }

    static __device__ void run(const Params &p, const Item &item, char *smem, Tail &tail)
    {
        const int warp = thread_now() / 32;
        const int tile_bytes = KEYS * 2 * p.row_stride;
        float *x = (float *)(smem + 2 * tile_bytes);
        uint16_t *probabilities = (uint16_t *)(x + PARTS * ROWS * X_STRIDE);
        float *scales = (float *)(probabilities + 4 * ROWS * P_STRIDE);
        load_queries<T, ROWS>(p, item, smem + tile_bytes);
        int page = page_of(p, item, item.first_key + thread_now() / (MLAI_DECODE_THREADS / KEYS));
        set_bounds(p, item, tail);
        copies_wait();
        __syncthreads(); /* orders queries and bounds before their readers */
        uint32_t q[STEPS][4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (i < p.row_stride / 64)
                ldmatrix(q[i], a_address(shared_address(smem + tile_bytes), 0, warp / 2 + PARTS * i,
                                         2 * p.row_stride));
        }
        float o[PAIRS][2][4] = {};
        float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
        int stage = 1; /* the first round only starts the first tile */
        for (int key = item.first_key - KEYS; key < item.end_key; key += KEYS, stage ^= 1) {
            copies_wait();
            __syncthreads(); /* orders the tile before its use, the last use before the next copy */
            if (key + KEYS < item.end_key) {
                load_tile<T, KEYS>(p, item, key + KEYS, page, smem + (stage ^ 1) * tile_bytes,
                                   scales + (stage ^ 1) * 4 * KEYS);
                page =
                    page_of(p, item, key + 2 * KEYS + thread_now() / (MLAI_DECODE_THREADS / KEYS));
            }
            if (key < item.first_key)
                continue;
            const uint32_t tile = shared_address(smem + stage * tile_bytes);
            const float *tile_scales = scales + stage * 4 * KEYS;
            multiply_keys(p, q, tile, tile_scales, x);
            __syncthreads(); /* orders the parts before their sum */
            softmax(p, item, tail, x, probabilities, tile_scales, key, maximum, sum);
            if (has_hidden(item, key, KEYS))
                clear_hidden<T, KEYS>(p, item, key, smem + stage * tile_bytes);
            __syncthreads(); /* orders probabilities, rescales and the tile before their use */
            multiply_values(p, tile, probabilities, tail, o);
        }
        finish(p, item, smem, tail, maximum, sum, o);
    }

    /* States and outputs on their way out; outputs take the place of the tiles. */
    static __device__ __forceinline__ void finish(const Params &p, const Item &item, char *smem,
                                                  Tail &tail, const float (&maximum)[2],
                                                  float (&sum)[2], const float (&o)[PAIRS][2][4])
    {
        const int thread = thread_now(), warp = thread / 32, lane = thread % 32;
        const int all_pairs = p.latent_pad / 16, each = (all_pairs + 7) / 8;
        const int first_pair = warp * each, n_pairs = min(each, all_pairs - first_pair);
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int step = 16; step > 0; step /= 2)
                sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], step);
            if (lane == 0) {
                tail.maxima[0][2 * warp + i] = sum[i];
                store_row_state(p, item, 2 * warp + i, maximum[i], sum[i]);
            }
        }
        __syncthreads(); /* orders the last tile's use before outputs take its place */
        float *outputs = (float *)smem;
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const int row = lane / 4 + part % 2 * 8, half = part / 2;
                const int column = 16 * (first_pair + j) + 8 * half + lane % 4 * 2;
                if (j < n_pairs)
                    *(float2 *)staged(outputs, row, column, p.row_stride) =
                        make_float2(o[j][half][part % 2 * 2], o[j][half][part % 2 * 2 + 1]);
            }
        }
        __syncthreads(); /* orders outputs and sums before their way out */
        store_rows<ROWS>(p, item, outputs, p.row_stride, tail.maxima[0], nullptr);
    }
};

#endif
