/* Decode, blocks of 64 rows: many heads or tokens, bound by the tensor cores, one block a
 * multiprocessor. 8 warps on tiles of 64 keys; T is the products' type.
 *
 *   scores   warp (m, n, part): rows 32 m, keys 32 n, half of D; the two halves of D swap through
 *            X so that each warp has 16 rows x 32 keys; row maxima of both n meet in the tail
 *   values   warp w: 64 rows x R / 8 columns; P takes the place of X
 *
 *   barriers of a tile: all, pair (m, n) twice, the four warps of m, all
 *
 * Reading 32 x 32 a warp over half of D costs 2/3 of what 16 x 32 over all of D would in shared
 * memory's bandwidth, which is what limits the scores. Used by decode_portable.cu.
 */
#ifndef MLAI_DECODE_WIDE_CUH
#define MLAI_DECODE_WIDE_CUH

#include "cuda/kernels/decode_portable.cuh"

template <class T> struct Wide {
    static constexpr int ROWS = MLAI_DECODE_WIDE_ROWS, KEYS = MLAI_DECODE_WIDE_KEYS;
    static constexpr int PAIRS = MLAI_DECODE_MAX_R / 16 / 8;
    static constexpr int P_BYTES = KEYS * 2; /* of a row of P */

    /* Where a warp stands: rows 32 m, keys 32 n, part of D; after the swap it has 16 of the rows.
     */
    struct Place {
        int m, n, part, lane;
        __device__ __forceinline__ Place()
            : m(threadIdx.x / 32 % 2), n(threadIdx.x / 64 % 2), part(threadIdx.x / 128),
              lane(threadIdx.x % 32)
        {
        }
        __device__ __forceinline__ int first_row() const
        {
            return 32 * m + 16 * part;
        }
    };

    /* Scores of 32 rows and 32 keys over half of D, then of 16 rows over all of it. */
    static __device__ __forceinline__ void multiply_keys(const Params &p, const Place &at,
                                                         uint32_t q, uint32_t tile, char *x,
                                                         float (&s)[4][4])
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
                                                   const Place &at, float (&s)[4][4],
                                                   char *probabilities, int first_key, bool masks,
                                                   float (&maximum)[2], float (&sum)[2])
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
            __syncthreads(); /* orders the tile before its use, the last use before the next copy */
            if (key + ahead < item.end_key) {
                load_tile<T, KEYS>(
                    p, item, key + ahead, page,
                    tiles + (key < item.first_key ? 0 : (p.stages - 1) * (stage ^ 1)) * tile_bytes,
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
            softmax(p, item, tail, at, s, x, key, key + KEYS > min(item.clear_end, item.end_key),
                    maximum, sum);
            __syncthreads(); /* orders probabilities and rescales before their use */
            if (has_hidden(item, key, KEYS)) {
                clear_hidden<T, KEYS>(p, item, key, tiles + stage * tile_bytes);
                __syncthreads(); /* orders the tile before its use as values */
            }
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
                        *(float2 *)staged(outputs, row, column, p.row_stride) = make_float2(
                            o[i][j][half][part % 2 * 2], o[i][j][half][part % 2 * 2 + 1]);
                }
            }
        }
        __syncthreads(); /* orders outputs and sums before their way out */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = at.first_row() + at.lane / 4 + 8 * i;
            if (at.n == 0 && at.lane % 4 == 0)
                store_row_state(p, item, row, maximum[i],
                                tail.maxima[0][row] + tail.maxima[1][row]);
        }
        store_rows<ROWS>(p, item, outputs, p.row_stride, tail.maxima[0], tail.maxima[1]);
    }
};

#endif
