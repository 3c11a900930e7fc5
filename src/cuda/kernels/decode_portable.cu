/* Portable decode, verify and extend over the paged latent cache, any GPU from sm_80 on:
 *   out[b, j, h] = sum_k softmax_k(scale q[b, j, h] . row_k) row_k[:R],  keys k below (b, j)'s bound.
 *
 * Rows of a request (query token x head, token-major) go in blocks of 16 (narrow) or 64 (wide); an
 * item is a block times a fixed range of keys (decode_portable.h). Items that are all of a block write
 * the output; others leave maximum, sum and unnormalised output for the merge kernel, which adds
 * them in key order. Products on mma.sync in bf16 or f16 with f32 sums, softmax in f32; the f32
 * kernel takes what these two do not (f32 operands, q and cache of different 16-bit formats).
 *
 * One tile of keys serves both products: rows as keys (Q K^T, ldmatrix), its first R columns as
 * values (P V, ldmatrix.trans). While a tile is used the next one is on its way (cp.async).
 *
 *   narrow  16 rows x 32 keys, 8 warps              wide  64 rows x 64 keys, 8 warps
 *   scores: 4 parts of D x 2 x 16 keys               scores: 2 parts of D x 2 x 32 rows x 2 x 32 keys
 *           Q in registers                                   Q in shared memory
 *           parts added through X                            parts swapped by warp pairs through X
 *   values: 8 x R / 8 columns                         values: 8 x R / 8 columns
 *
 *   shared memory:  [ tile 0 | tile 1 | X | P | scales | tail ]   narrow, Q passes through tile 1
 *                   [ Q | tile 0 | tile 1 | X = P | tail ]        wide
 *
 * Tails: plan, bounds, maxima, rescales. R <= 512, R + P <= 640, any heads, page size and strides.
 */
#include "cuda/kernels/attention_f32.cuh"
#include "cuda/kernels/decode_portable.cuh"

#define KERNEL(name, blocks)                                                                       \
    extern "C" __global__ void __launch_bounds__(MLAI_DECODE_THREADS, blocks)                      \
        name(const __grid_constant__ mlai_decode_portable_params p)

/* A running maximum takes in `tile`: returns what old sums are multiplied by; base is what scores
 * are taken against (0 while nothing is visible, so that exp2(-inf - base) is 0 and not NaN). */
MLAI_DEVICE float raise_maximum(float &maximum, float tile, float &base)
{
    const float raised = fmaxf(maximum, tile);
    base = raised == -INFINITY ? 0.0f : raised;
    const float rescale = fast_exp2(maximum - base);
    maximum = raised;
    return rescale;
}

/* ---- narrow: 16 rows ----------------------------------------------------------------------------- */

template <class T> struct Narrow {
    static constexpr int ROWS = MLAI_DECODE_NARROW_ROWS, KEYS = MLAI_DECODE_NARROW_KEYS;
    static constexpr int PARTS = 4;                                 /* of D */
    static constexpr int STEPS = MLAI_DECODE_MAX_D / 16 / PARTS;    /* k steps of a part, at most */
    static constexpr int PAIRS = MLAI_DECODE_MAX_R / 16 / 8;        /* 16 columns each, of a warp */
    static constexpr int X_STRIDE = 40, P_STRIDE = 40;              /* no bank twice */

    /* Scores of 16 rows and 16 keys over this warp's part of D, to x [PARTS][16][X_STRIDE]. Part i
     * has k steps i, i + 4, ..: two of each 128 columns, whose ds656 scale joins when they are done. */
    static __device__ __forceinline__ void multiply_keys(const Params &p,
                                                         const uint32_t (&q)[STEPS][4], uint32_t tile,
                                                         const float *scales, float *x)
    {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int part = warp / 2, first_key = warp % 2 * 16;
        const int steps = p.row_stride / 64;
        const uint32_t from = b_address(tile, first_key, part, 2 * p.row_stride);
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
                    const float *scale = scales + i / 2 * KEYS + first_key + 8 * half + lane % 4 * 2;
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
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, key = first_key + lane;
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
            if (key >= end || key >= tail.bounds[row] || (p.mask && is_masked(p, item, tail.tokens[row], key)))
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
                    to[j * ROWS * P_STRIDE] = T::narrow(probability * scales[j * KEYS + lane]);
            } else {
                to[0] = T::narrow(probability);
            }
        }
    }

    /* o += P V on this warp's columns: pairs first_pair .. of 16. */
    static __device__ __forceinline__ void multiply_values(const Params &p, uint32_t tile,
                                                           const uint16_t *probabilities,
                                                           const Tail &tail, int first_pair,
                                                           int n_pairs, float (&o)[PAIRS][2][4])
    {
        const int lane = threadIdx.x % 32;
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
                    ldmatrix_transposed(v, v_address(tile, step, first_pair + j, 2 * p.row_stride));
                    T::mma(o[j][0], a, v[0], v[1]);
                    T::mma(o[j][1], a, v[2], v[3]);
                }
            }
        }
    }

    static __device__ void run(const Params &p, const Item &item, char *smem, Tail &tail)
    {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int tile_bytes = KEYS * 2 * p.row_stride;
        float *x = (float *)(smem + 2 * tile_bytes);
        uint16_t *probabilities = (uint16_t *)(x + PARTS * ROWS * X_STRIDE);
        float *scales = (float *)(probabilities + 4 * ROWS * P_STRIDE);
        const int load_row = threadIdx.x / (MLAI_DECODE_THREADS / KEYS);
        load_queries<T, ROWS>(p, item, smem + tile_bytes);
        int page = page_of(p, item, item.first_key + load_row);
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
        const int all_pairs = p.latent_pad / 16, each = (all_pairs + 7) / 8;
        const int first_pair = warp * each, n_pairs = min(each, all_pairs - first_pair);
        float o[PAIRS][2][4] = {};
        float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
        int stage = 1; /* the first round only starts the first tile */
        for (int key = item.first_key - KEYS; key < item.end_key; key += KEYS, stage ^= 1) {
            copies_wait();
            __syncthreads(); /* orders this tile before its use, the last one's use before the next copy */
            if (key + KEYS < item.end_key) {
                load_tile<T, KEYS>(p, item, key + KEYS, page, smem + (stage ^ 1) * tile_bytes,
                                   scales + (stage ^ 1) * 4 * KEYS);
                page = page_of(p, item, key + 2 * KEYS + load_row);
            }
            if (key < item.first_key)
                continue;
            const uint32_t tile = shared_address(smem + stage * tile_bytes);
            const float *tile_scales = scales + stage * 4 * KEYS;
            multiply_keys(p, q, tile, tile_scales, x);
            __syncthreads(); /* orders the parts before their sum */
            softmax(p, item, tail, x, probabilities, tile_scales, key, maximum, sum);
            __syncthreads(); /* orders probabilities and rescales before their use */
            multiply_values(p, tile, probabilities, tail, first_pair, n_pairs, o);
        }
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

/* ---- wide: 64 rows ------------------------------------------------------------------------------- */

template <class T> struct Wide {
    static constexpr int ROWS = MLAI_DECODE_WIDE_ROWS, KEYS = MLAI_DECODE_WIDE_KEYS;
    static constexpr int PAIRS = MLAI_DECODE_MAX_R / 16 / 8;
    static constexpr int P_BYTES = KEYS * 2; /* of a row of P */

    /* Where a warp stands: rows 32 m, keys 32 n, part of D; after the swap it has 16 of the rows. */
    struct Place {
        int m, n, part, lane;
        __device__ __forceinline__ Place()
            : m(threadIdx.x / 32 % 2), n(threadIdx.x / 64 % 2), part(threadIdx.x / 128),
              lane(threadIdx.x % 32)
        {
        }
        __device__ __forceinline__ int first_row() const { return 32 * m + 16 * part; }
    };

    /* Scores of 32 rows and 32 keys over half of D, then of 16 rows over all of it. */
    static __device__ __forceinline__ void multiply_keys(const Params &p, const Place &at, uint32_t q,
                                                         uint32_t tile, char *x, float (&s)[4][4])
    {
        const int row_bytes = 2 * p.row_stride;
        /* Of each 8 chunks part 0 has the first 4, two k steps; the next 8 are 128 bytes on. */
        uint32_t q_at[2], k_at[2];
#pragma unroll
        for (int step = 0; step < 2; step++) {
            q_at[step] = a_address(q, 32 * at.m, 2 * at.part + step, row_bytes);
            k_at[step] = b_address(tile, 32 * at.n, 2 * at.part + step, row_bytes);
        }
        float acc[2][4][4] = {};
#pragma unroll 3
        for (int offset = 0; offset < row_bytes; offset += 128) {
#pragma unroll
            for (int step = 0; step < 2; step++) {
                uint32_t a[2][4], k[2][4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    ldmatrix(a[i], q_at[step] + 16 * i * row_bytes + offset);
                    ldmatrix(k[i], k_at[step] + 16 * i * row_bytes + offset);
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        T::mma(acc[i][j], a[i], k[j / 2][j % 2 * 2], k[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
        /* The pair of warps with the same rows and keys: part 1 gives the upper rows, then part 0
         * the lower ones, through the same 2 KB. */
        float4 *swap = (float4 *)(x + (2 * at.m + at.n) * 2048) + at.lane;
        const int pair = 3 + 2 * at.m + at.n;
        if (at.part == 1) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                swap[32 * j] = make_float4(acc[0][j][0], acc[0][j][1], acc[0][j][2], acc[0][j][3]);
        }
        barrier(pair, 64); /* orders part 1's write before part 0's read */
        if (at.part == 0) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float4 other = swap[32 * j];
                s[j][0] = acc[0][j][0] + other.x, s[j][1] = acc[0][j][1] + other.y;
                s[j][2] = acc[0][j][2] + other.z, s[j][3] = acc[0][j][3] + other.w;
                swap[32 * j] = make_float4(acc[1][j][0], acc[1][j][1], acc[1][j][2], acc[1][j][3]);
            }
        }
        barrier(pair, 64); /* orders part 0's write before part 1's read */
        if (at.part == 1) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float4 other = swap[32 * j];
                s[j][0] = acc[1][j][0] + other.x, s[j][1] = acc[1][j][1] + other.y;
                s[j][2] = acc[1][j][2] + other.z, s[j][3] = acc[1][j][3] + other.w;
            }
        }
    }

    /* Scores to probabilities: rows g and g + 8 of the warp's 16, its 32 keys. */
    static __device__ __forceinline__ void softmax(const Params &p, const Item &item, Tail &tail,
                                                   const Place &at, float (&s)[4][4], char *probabilities,
                                                   int first_key, bool masks, float (&maximum)[2],
                                                   float (&sum)[2])
    {
        const Scores how = scores_of(p);
        float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int row = at.first_row() + at.lane / 4 + r / 2 * 8;
                const int key = first_key + 32 * at.n + 8 * j + at.lane % 4 * 2 + r % 2;
                s[j][r] = score(how, s[j][r]);
                if (masks && (key >= item.end_key || key >= tail.bounds[row]))
                    s[j][r] = -INFINITY;
                if (p.mask && is_masked(p, item, tail.tokens[row], key))
                    s[j][r] = -INFINITY;
                largest[r / 2] = fmaxf(largest[r / 2], s[j][r]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 1));
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 2));
            if (at.lane % 4 == 0)
                tail.maxima[at.n][at.first_row() + at.lane / 4 + 8 * i] = largest[i];
        }
        /* Orders the maxima of both halves of the keys before their use, and the swap of all four
         * warps of these 32 rows before P takes its place. */
        barrier(1 + at.m, 128);
        float base[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = at.first_row() + at.lane / 4 + 8 * i;
            const float rescale =
                raise_maximum(maximum[i], fmaxf(tail.maxima[0][row], tail.maxima[1][row]), base[i]);
            sum[i] *= rescale;
            if (at.n == 0 && at.lane % 4 == 0)
                tail.rescale[row] = rescale;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int r = 0; r < 4; r++) {
                s[j][r] = fast_exp2(s[j][r] - base[r / 2]);
                sum[r / 2] += s[j][r];
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = at.first_row() + at.lane / 4 + 8 * i;
                *(uint32_t *)(probabilities + chunk_at(row, 4 * at.n + j, P_BYTES) +
                              at.lane % 4 * 4) = T::pack(s[j][2 * i], s[j][2 * i + 1]);
            }
        }
    }

    /* o = o * rescale + P V on this warp's columns. ALL: it has PAIRS pairs of 8 columns. */
    template <bool ALL>
    static __device__ __forceinline__ void multiply_values(const Params &p, uint32_t tile,
                                                           uint32_t probabilities, const Tail &tail,
                                                           int first_pair, int n_pairs,
                                                           float (&o)[4][PAIRS][2][4])
    {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float above = tail.rescale[16 * i + lane / 4];
            const float below = tail.rescale[16 * i + lane / 4 + 8];
            if (!__any_sync(0xffffffffu, above != 1.0f || below != 1.0f))
                continue; /* times 1 changes nothing */
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    o[i][j][half][0] *= above, o[i][j][half][1] *= above;
                    o[i][j][half][2] *= below, o[i][j][half][3] *= below;
                }
            }
        }
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            uint32_t a[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                ldmatrix(a[i], a_address(probabilities, 16 * i, step, P_BYTES));
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                if (ALL || j < n_pairs) {
                    uint32_t v[4];
                    ldmatrix_transposed(v, v_address(tile, step, first_pair + j, 2 * p.row_stride));
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        T::mma(o[i][j][0], a[i], v[0], v[1]);
                        T::mma(o[i][j][1], a[i], v[2], v[3]);
                    }
                }
            }
        }
    }

    static __device__ void run(const Params &p, const Item &item, char *smem, Tail &tail)
    {
        const Place at;
        const int warp = threadIdx.x / 32, tile_bytes = KEYS * 2 * p.row_stride;
        char *tiles = smem + ROWS * 2 * p.row_stride;
        char *x = tiles + p.stages * tile_bytes; /* P takes its place */
        const int load_row = threadIdx.x / (MLAI_DECODE_THREADS / KEYS);
        int page = page_of(p, item, item.first_key + load_row);
        load_queries<T, ROWS>(p, item, smem);
        set_bounds(p, item, tail);
        /* Bounds do not fall along the block: keys below its first row's need no mask. */
        const int clear_end = p.mask ? 0 : bound_of(p, item.request, (int)(item.first_row / p.heads));
        const int all_pairs = p.latent_pad / 16, each = (all_pairs + 7) / 8;
        const int first_pair = warp * each, n_pairs = min(each, all_pairs - first_pair);
        float o[4][PAIRS][2][4] = {};
        float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
        /* With two stages a round starts the next tile's copies, the first round nothing else; with
         * one it waits for its own. */
        const int ahead = (p.stages - 1) * KEYS;
        int stage = 0;
        for (int key = item.first_key - ahead; key < item.end_key; key += KEYS) {
            copies_wait();
            __syncthreads(); /* orders this tile before its use, the last one's use before the next copy */
            if (key + ahead < item.end_key) {
                load_tile<T, KEYS>(p, item, key + ahead, page,
                                   tiles + (key < item.first_key ? 0 : (p.stages - 1) * (stage ^ 1)) *
                                               tile_bytes,
                                   nullptr);
                page = page_of(p, item, key + ahead + KEYS + load_row);
            }
            if (key < item.first_key)
                continue;
            if (p.stages == 1) {
                copies_wait();
                __syncthreads(); /* orders this tile before its use */
            }
            const uint32_t tile = shared_address(tiles + stage * tile_bytes);
            float s[4][4];
            multiply_keys(p, at, shared_address(smem), tile, x, s);
            softmax(p, item, tail, at, s, x, key, key + KEYS > min(clear_end, item.end_key), maximum,
                    sum);
            __syncthreads(); /* orders probabilities and rescales before their use */
            if (all_pairs == 8 * PAIRS)
                multiply_values<true>(p, tile, shared_address(x), tail, first_pair, n_pairs, o);
            else
                multiply_values<false>(p, tile, shared_address(x), tail, first_pair, n_pairs, o);
            stage ^= p.stages - 1;
        }
        finish(p, item, tail, at, (float *)smem, first_pair, n_pairs, maximum, sum, o);
    }

    /* Outputs take the place of Q and tiles on their way out. */
    static __device__ __forceinline__ void finish(const Params &p, const Item &item, Tail &tail,
                                                  const Place &at, float *outputs, int first_pair,
                                                  int n_pairs, const float (&maximum)[2],
                                                  float (&sum)[2], const float (&o)[4][PAIRS][2][4])
    {
        __syncthreads(); /* orders the last use of maxima and tile before sums and outputs */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
            if (at.lane % 4 == 0)
                tail.maxima[at.n][at.first_row() + at.lane / 4 + 8 * i] = sum[i];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
#pragma unroll
                for (int part = 0; part < 4; part++) {
                    const int row = 16 * i + at.lane / 4 + part % 2 * 8, half = part / 2;
                    const int column = 16 * (first_pair + j) + 8 * half + at.lane % 4 * 2;
                    if (j < n_pairs)
                        *(float2 *)staged(outputs, row, column, p.row_stride) =
                            make_float2(o[i][j][half][part % 2 * 2], o[i][j][half][part % 2 * 2 + 1]);
                }
            }
        }
        __syncthreads(); /* orders outputs and sums before their way out */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = at.first_row() + at.lane / 4 + 8 * i;
            if (at.n == 0 && at.lane % 4 == 0)
                store_row_state(p, item, row, maximum[i], tail.maxima[0][row] + tail.maxima[1][row]);
        }
        store_rows<ROWS>(p, item, outputs, p.row_stride, tail.maxima[0], tail.maxima[1]);
    }
};

/* ---- f32 ----------------------------------------------------------------------------------------- */

/* 16 rows x 16 keys, any formats, all arithmetic in f32: attention_f32.cuh. Every row of shared
 * memory is [ R, zeros to a multiple of 4 | P, zeros | 4 ] floats. */
struct Plain {
    static constexpr int ROWS = MLAI_DECODE_F32_ROWS, KEYS = MLAI_DECODE_F32_KEYS;

    /* One row of n_latent | n_rope values into shared memory, 16 threads a row. */
    static __device__ void load_row(const Params &p, float *to, const char *latent, const char *rope,
                                    int latent_format, int rope_format, const float *scales, bool live)
    {
        for (int i = threadIdx.x % 16; i < p.latent_pad; i += 16) {
            const float x = live && i < p.n_latent ? load_value(latent, i, latent_format) : 0.0f;
            to[i] = scales && live && i < p.n_latent ? x * scales[i / 128] : x;
        }
        for (int i = threadIdx.x % 16; i < p.rope_pad; i += 16)
            to[p.latent_pad + i] = live && i < p.n_rope ? load_value(rope, i, rope_format) : 0.0f;
    }

    static __device__ void load_keys(const Params &p, const Item &item, int first_key, float *tile)
    {
        const int row = threadIdx.x / 16, key = first_key + row;
        const bool live = key < item.end_key, is_ds656 = p.kv_format == DS656;
        const int64_t page = page_of(p, item, key), offset = live ? key % p.page_size : 0;
        const char *latent = p.latent + page * p.page_bytes + offset * p.row_bytes;
        const char *rope = p.rope + page * p.rope_page_bytes + offset * p.rope_row_bytes;
        load_row(p, tile + row * p.row_stride, latent, rope, is_ds656 ? E4M3 : p.kv_format,
                 is_ds656 ? BF16 : p.kv_format, is_ds656 ? (const float *)(latent + 512) : nullptr,
                 live);
    }

    static __device__ void run(const Params &p, const Item &item, char *smem, Tail &tail)
    {
        float *q = (float *)smem, *tile = q + ROWS * p.row_stride;
        float *probabilities = tile + KEYS * p.row_stride;
        const int row = threadIdx.x / 16, bytes = format_bytes(p.q_format);
        const bool live = row < item.n_rows;
        const int64_t at = item.first_row + (live ? row : 0);
        load_row(p, q + row * p.row_stride, row_of(p.q, item.request, at, p.heads, bytes),
                 row_of(p.q_rope, item.request, at, p.heads, bytes), p.q_format, p.q_format, nullptr,
                 live);
        set_bounds(p, item, tail);
        F32State state;
        const Scores how = scores_of(p);
        for (int key = item.first_key; key < item.end_key; key += KEYS) {
            __syncthreads(); /* orders the last tile's use before its replacement */
            load_keys(p, item, key, tile);
            __syncthreads(); /* orders the tile, at first queries and bounds, before their use */
            const int mine = key + threadIdx.x % 16;
            float s = score(how, f32_dot(q + row * p.row_stride,
                                         tile + threadIdx.x % 16 * p.row_stride,
                                         p.latent_pad + p.rope_pad));
            if (mine >= item.end_key || mine >= tail.bounds[row] ||
                (p.mask && is_masked(p, item, tail.tokens[row], mine)))
                s = -INFINITY;
            f32_softmax(state, s, probabilities, tail.rescale);
            __syncthreads(); /* orders probabilities and rescales before their use */
            f32_values(state, probabilities, tail.rescale, tile, p.row_stride, p.n_latent);
        }
        f32_close(state, tail.maxima[0]);
        __syncthreads(); /* orders the sums before the division */
        if (threadIdx.x % 16 == 0)
            store_row_state(p, item, row, state.maximum, state.sum);
        for (int i = 0; i < 2; i++) {
            const int column = threadIdx.x + i * MLAI_DECODE_THREADS;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (column >= p.n_latent || r >= item.n_rows)
                    continue;
                const float x = i ? state.o[1][r] : state.o[0][r];
                if (!item.is_only)
                    partial_slot(p, item.slot)[(int64_t)r * p.o_stride + column] = x;
                else
                    store_value(row_of(p.out, item.request, item.first_row + r, p.heads,
                                       format_bytes(p.out_format)),
                                column, p.out_format, x * inverse_of(tail.maxima[0][r]) * p.out_scale);
            }
        }
    }
};

extern __shared__ __align__(1024) char shared_memory[];

#define TAIL(bytes_before) (*(Tail *)(shared_memory + (bytes_before)))

template <class T> MLAI_DEVICE void run_narrow(const Params &p)
{
    run_items<Narrow<T>>(p, shared_memory,
                         TAIL(2 * MLAI_DECODE_NARROW_KEYS * 2 * p.row_stride +
                              MLAI_DECODE_NARROW_SCRATCH_BYTES));
}

template <class T> MLAI_DEVICE void run_wide(const Params &p)
{
    run_items<Wide<T>>(p, shared_memory,
                       TAIL((MLAI_DECODE_WIDE_ROWS + p.stages * MLAI_DECODE_WIDE_KEYS) * 2 *
                                p.row_stride +
                            MLAI_DECODE_WIDE_SCRATCH_BYTES));
}

KERNEL(mla_decode_narrow_bf16, 2) { run_narrow<Bf16>(p); }
KERNEL(mla_decode_narrow_f16, 2) { run_narrow<Fp16>(p); }
KERNEL(mla_decode_wide_bf16, 1) { run_wide<Bf16>(p); }
KERNEL(mla_decode_wide_f16, 1) { run_wide<Fp16>(p); }

KERNEL(mla_decode_f32, 1)
{
    run_items<Plain>(p, shared_memory,
                     TAIL((MLAI_DECODE_F32_ROWS + MLAI_DECODE_F32_KEYS) * 4 * p.row_stride +
                          MLAI_DECODE_F32_SCRATCH_BYTES));
}

/* ---- merge --------------------------------------------------------------------------------------- */

/* Partial results of one row, in key order; a thread has 4 columns. Rows that see nothing get the
 * empty state. */
MLAI_DEVICE void merge_row(const Params &p, const Request &request, int64_t row, int bound,
                           const float *slots)
{
    const int in_block = (int)(row % p.block_rows), column = 4 * threadIdx.x;
    const int splits = (int)mlai_split_count(bound);
    const float *states = slots + (int64_t)p.block_rows * p.o_stride + in_block;
    float maximum = -INFINITY, sum = 0.0f;
    for (int i = 0; i < splits; i++)
        maximum = fmaxf(maximum, states[i * p.slot_floats]);
    const float base = maximum == -INFINITY ? 0.0f : maximum;
    const float *from = slots + (int64_t)in_block * p.o_stride + column;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int i = 0; i < splits; i++) {
        const float weight = fast_exp2(states[i * p.slot_floats] - base);
        sum += weight * states[i * p.slot_floats + p.block_rows];
        if (column < p.o_stride) {
            const float4 o = *(const float4 *)(from + i * p.slot_floats);
            total.x += weight * o.x, total.y += weight * o.y;
            total.z += weight * o.z, total.w += weight * o.w;
        }
    }
    if (threadIdx.x == 0 && p.lse.data)
        *(float *)row_of(p.lse, request, row, p.heads, 4) = lse_of(maximum, sum);
    const float inverse = inverse_of(sum);
    char *out = row_of(p.out, request, row, p.heads, format_bytes(p.out_format));
    const float x[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
    for (int i = 0; i < 4; i += 2)
        store_pair(out, column + i, p.out_format, p.out_wide, p.n_latent - column - i,
                   x[i] * inverse * p.out_scale, x[i + 1] * inverse * p.out_scale);
}

/* Block (x, y): every gridDim.y-th row of request x. */
extern "C" __global__ void __launch_bounds__(MLAI_DECODE_MERGE_THREADS)
    mla_decode_merge(const __grid_constant__ mlai_decode_portable_params p)
{
    for (int64_t index = blockIdx.x; index < p.batch; index += gridDim.x) {
        const Request request = request_at(p, index);
        if (request.q_len == 0)
            continue;
        const int64_t rows = (int64_t)request.q_len * p.heads;
        const int64_t splits = mlai_split_count(bound_of(p, request, request.q_len - 1));
        const int64_t first_item = p.first_items[index];
        for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
            const int64_t block = row / p.block_rows, item = first_item + block * splits;
            const int of_block = block_bound(p, request, block);
            /* A block without items belongs to the first launch; one with one split is done. */
            if ((of_block == 0 ? 0 : item / p.window_items) != p.window ||
                (of_block > 0 && of_block <= MLAI_SPLIT_SHORT_KEYS))
                continue;
            const int bound = bound_of(p, request, (int)(row / p.heads));
            merge_row(p, request, row, bound, partial_slot(p, item - p.window * p.window_items));
        }
    }
}
