/* Decode, blocks of 64 rows: many heads or tokens, bound by the tensor cores, one block a
 * multiprocessor. 8 warps on tiles of 64 keys; T is the products' type. FIXED: R 512, P 64, a cache
 * of T with 16-byte rows, all offsets known to the compiler.
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

template <class T, bool FIXED> struct Wide {
    static constexpr int ROWS = MLAI_DECODE_WIDE_ROWS, KEYS = MLAI_DECODE_WIDE_KEYS;
    static constexpr int PAIRS = MLAI_DECODE_MAX_R / 16 / 8;
    static constexpr int P_BYTES = KEYS * 2;                     /* of a row of P */
    static constexpr int LANES = MLAI_DECODE_THREADS / KEYS;     /* that load a row */
    static constexpr int FIXED_BYTES = 2 * (512 + 64);           /* of a row in shared memory */
    static constexpr int FIXED_STEPS = FIXED_BYTES / 16 / LANES; /* copies a lane, k steps a warp */
    static constexpr int COPIES_AT_ONCE = 6; /* each start after an ldmatrix costs some waiting */

    static constexpr int DEPTH = 8; /* of the ring that joins partial results */

    static __device__ __forceinline__ float *scratch(const Params &p, char *smem)
    {
        return (float *)(smem + (ROWS + p.stages * KEYS) * row_bytes(p));
    }

    static __device__ __forceinline__ int row_bytes(const Params &p)
    {
        return FIXED ? FIXED_BYTES : 2 * p.row_stride;
    }

    /* Where a warp stands: rows 32 m, keys 32 n, part of D; after the swap it has 16 of the rows.
     */
    struct Place {
        int m, n, part, lane;
        __device__ __forceinline__ Place()
        {
            const int thread = thread_now();
            m = thread / 32 % 2, n = thread / 64 % 2, part = thread / 128;
            lane = thread % 32;
        }
        __device__ __forceinline__ int first_row() const
        {
            return 32 * m + 16 * part;
        }
    };

    /* A lane's share of one row on its way into a tile: chunks sub, sub + 4, ..: 64 bytes apart in
     * the cache, and in shared memory two by two 128, see chunk_at. */
    struct Copies {
        const char *latent, *rope;
        uint32_t to[2];
        bool live;

        /* Row `row` of `tile` from its two parts. */
        __device__ __forceinline__ void aim(const char *from, const char *from_rope, int row,
                                            bool is_live, const char *tile)
        {
            const int sub = thread_now() % LANES;
            live = is_live;
            latent = from + 16 * sub, rope = from_rope + 16 * sub;
            to[0] = shared_address(tile) + chunk_at(row, sub, FIXED_BYTES);
            to[1] = shared_address(tile) + chunk_at(row, sub + LANES, FIXED_BYTES);
        }

        __device__ __forceinline__ void aim_key(const Params &p, const Item &item, int first_key,
                                                int page, const char *tile)
        {
            const int row = thread_now() / LANES, key = first_key + row;
            const bool is_live = key < item.end_key;
            const int64_t offset = is_live ? key % p.page_size : 0;
            aim(p.latent + page * p.page_bytes + offset * p.row_bytes,
                p.rope + page * p.rope_page_bytes + offset * p.rope_row_bytes, row, is_live, tile);
        }

        /* Copy i of FIXED_STEPS. */
        __device__ __forceinline__ void start(int i) const
        {
            constexpr int latent_steps = 512 / 8 / LANES;
            const char *from = i < latent_steps ? latent + 64 * i : rope + 64 * (i - latent_steps);
            copy16(to[i % 2] + i / 2 * 128, from, live);
        }

        __device__ __forceinline__ void start_all() const
        {
#pragma unroll
            for (int i = 0; i < FIXED_STEPS; i++)
                start(i);
        }
    };

    /* The operands of a k step: 32 rows of Q, 32 keys. */
    struct Step {
        uint32_t a[2][4], k[2][4];
        __device__ __forceinline__ void load(uint32_t q_at, uint32_t k_at, int row_bytes)
        {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                ldmatrix(a[i], q_at + 16 * i * row_bytes);
                ldmatrix(k[i], k_at + 16 * i * row_bytes);
            }
        }
        __device__ __forceinline__ void multiply(float (&acc)[2][4][4]) const
        {
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++)
                    T::mma(acc[i][j], a[i], k[j / 2][j % 2 * 2], k[j / 2][j % 2 * 2 + 1]);
            }
        }
    };

    /* Scores of 32 rows and 32 keys over half of D, then of 16 rows over all of it. `more`: copies
     * of the next tile start on the way. */
    static __device__ __forceinline__ void multiply_keys(const Params &p, uint32_t q, uint32_t tile,
                                                         char *x, const Copies &copies, bool more,
                                                         float (&s)[4][4])
    {
        /* Of each 8 chunks part 0 has the first 4, two k steps; the next 8 are 128 bytes on. */
        const Place at;
        uint32_t q_at[2], k_at[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            q_at[i] = a_address(q, 32 * at.m, 2 * at.part + i, row_bytes(p), at.lane);
            k_at[i] = b_address(tile, 32 * at.n, 2 * at.part + i, row_bytes(p), at.lane);
        }
        float acc[2][4][4] = {};
        if constexpr (FIXED) {
            Step steps[2]; /* one is loaded while the other is used */
            steps[0].load(q_at[0], k_at[0], FIXED_BYTES);
#pragma unroll
            for (int i = 0; i < FIXED_STEPS; i++) {
                const int next = i + 1;
                if (next < FIXED_STEPS)
                    steps[next % 2].load(q_at[next % 2] + next / 2 * 128,
                                         k_at[next % 2] + next / 2 * 128, FIXED_BYTES);
                if (more && i % COPIES_AT_ONCE == 0) {
#pragma unroll
                    for (int copy = i; copy < i + COPIES_AT_ONCE; copy++)
                        copies.start(copy);
                }
                steps[i % 2].multiply(acc);
            }
        } else {
#pragma unroll 3
            for (int offset = 0; offset < row_bytes(p); offset += 128) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    Step step;
                    step.load(q_at[i] + offset, k_at[i] + offset, row_bytes(p));
                    step.multiply(acc);
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

    /* Scores of keys that a row does not see become -inf. */
    static __device__ __forceinline__ void hide(const Params &p, const Item &item, const Tail &tail,
                                                const Place &at, int first_key, float (&s)[4][4])
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = at.first_row() + at.lane / 4 + 8 * i;
            const int first = first_key + 32 * at.n + at.lane % 4 * 2;
            const int seen = min(item.end_key, tail.bounds[row]) - first;
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    if (8 * j + r >= seen ||
                        (p.mask && is_masked(p, item, tail.tokens[row], first + 8 * j + r)))
                        s[j][2 * i + r] = -INFINITY;
                }
            }
        }
    }

    /* Scores to probabilities: rows g and g + 8 of the warp's 16, its 32 keys. */
    static __device__ __forceinline__ void softmax(const Params &p, const Item &item, Tail &tail,
                                                   float (&s)[4][4], char *probabilities,
                                                   int first_key, bool hides, float (&maximum)[2],
                                                   float (&sum)[2])
    {
        const Place at;
        const Scores how = scores_of(p);
#pragma unroll
        for (int i = 0; i < 16; i++)
            s[i / 4][i % 4] *= how.scale;
        if (how.cap > 0.0f) {
#pragma unroll
            for (int i = 0; i < 16; i++)
                s[i / 4][i % 4] = how.cap * tanhf(s[i / 4][i % 4]);
        }
        if (hides)
            hide(p, item, tail, at, first_key, s);
        float largest[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            largest[i] = fmaxf(s[0][2 * i], s[0][2 * i + 1]);
#pragma unroll
            for (int j = 1; j < 4; j++)
                largest[i] = fmaxf(largest[i], fmaxf(s[j][2 * i], s[j][2 * i + 1]));
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

    /* o = o * rescale + P V on this warp's columns. */
    static __device__ __forceinline__ void multiply_values(const Params &p, uint32_t tile,
                                                           uint32_t probabilities, const Tail &tail,
                                                           float (&o)[4][PAIRS][2][4])
    {
        const int thread = thread_now(), lane = thread % 32;
        const int each = FIXED ? PAIRS : (p.latent_pad / 16 + 7) / 8,
                  first_pair = thread / 32 * each;
        const int n_pairs = min(each, p.latent_pad / 16 - first_pair);
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
        const bool all = FIXED || n_pairs == PAIRS;
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            uint32_t a[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                ldmatrix(a[i], a_address(probabilities, 16 * i, step, P_BYTES, lane));
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                if (all || j < n_pairs) {
                    uint32_t v[4];
                    ldmatrix_transposed(v,
                                        v_address(tile, step, first_pair + j, row_bytes(p), lane));
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        T::mma(o[i][j][0], a[i], v[0], v[1]);
                        T::mma(o[i][j][1], a[i], v[2], v[3]);
                    }
                }
            }
        }
    }

    /* A tile of keys on its way into `tile`, all at once. */
    static __device__ __forceinline__ void load(const Params &p, const Item &item, int first_key,
                                                int page, char *tile)
    {
        if constexpr (FIXED) {
            Copies copies;
            copies.aim_key(p, item, first_key, page, tile);
            copies.start_all();
        } else {
            load_tile<T, KEYS>(p, item, first_key, page, tile, nullptr);
        }
    }

    static __device__ void run(const Params &p, const Item &item, char *smem, Tail &tail)
    {
        const int tile_bytes = KEYS * row_bytes(p);
        char *tiles = smem + ROWS * row_bytes(p);
        char *x = tiles + p.stages * tile_bytes; /* P takes its place */
        int page = page_of(p, item, item.first_key + thread_now() / LANES);
        if (FIXED && p.q_format == T::format && p.q_wide) {
            const int row = thread_now() / LANES, at = row < item.n_rows ? row : 0;
            Copies copies;
            copies.aim(row_of(p.q, item.request, item.first_row + at, p.heads, 2),
                       row_of(p.q_rope, item.request, item.first_row + at, p.heads, 2), row,
                       row < item.n_rows, smem);
            copies.start_all();
        } else {
            load_queries<T, ROWS>(p, item, smem);
        }
        load(p, item, item.first_key, page, tiles);
        page = page_of(p, item, item.first_key + KEYS + thread_now() / LANES);
        set_bounds(p, item, tail);
        float o[4][PAIRS][2][4] = {};
        float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
        int stage = 0;
        for (int key = item.first_key; key < item.end_key; key += KEYS) {
            copies_wait();
            __syncthreads(); /* orders the tile before its use, the last use before the next copy */
            if (p.stages == 1 && key > item.first_key) {
                load(p, item, key, page, tiles);
                page = page_of(p, item, key + KEYS + thread_now() / LANES);
                copies_wait();
                __syncthreads(); /* orders this tile before its use */
            }
            /* With two stages the next tile is on its way while this one is used. */
            const bool more = p.stages == 2 && key + KEYS < item.end_key;
            char *next = tiles + (stage ^ 1) * tile_bytes;
            Copies copies;
            if (more) {
                if constexpr (FIXED)
                    copies.aim_key(p, item, key + KEYS, page, next);
                else
                    load(p, item, key + KEYS, page, next);
                page = page_of(p, item, key + 2 * KEYS + thread_now() / LANES);
            }
            const uint32_t tile = shared_address(tiles + stage * tile_bytes);
            float s[4][4];
            multiply_keys(p, shared_address(smem), tile, x, copies, more, s);
            softmax(p, item, tail, s, x, key, key + KEYS > min(item.clear_end, item.end_key),
                    maximum, sum);
            __syncthreads(); /* orders probabilities and rescales before their use */
            if (has_hidden(item, key, KEYS)) {
                clear_hidden<T, KEYS>(p, item, key, tiles + stage * tile_bytes);
                __syncthreads(); /* orders the tile before its use as values */
            }
            multiply_values(p, tile, shared_address(x), tail, o);
            stage ^= p.stages - 1;
        }
        finish(p, item, tail, maximum, sum, o);
    }

    /* States and outputs on their way out, straight from the registers. */
    static __device__ __forceinline__ void finish(const Params &p, const Item &item, Tail &tail,
                                                  const float (&maximum)[2], float (&sum)[2],
                                                  const float (&o)[4][PAIRS][2][4])
    {
        const Place at;
        const int each = FIXED ? PAIRS : (p.latent_pad / 16 + 7) / 8;
        const int first_pair = thread_now() / 32 * each;
        const int n_pairs = min(each, p.latent_pad / 16 - first_pair);
        __syncthreads(); /* orders the last use of maxima before sums take their place */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
            if (at.lane % 4 == 0)
                tail.maxima[at.n][at.first_row() + at.lane / 4 + 8 * i] = sum[i];
        }
        __syncthreads(); /* orders sums before their use */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = at.first_row() + at.lane / 4 + 8 * i;
            if (at.n == 0 && at.lane % 4 == 0)
                store_row_state(p, item, row, maximum[i],
                                tail.maxima[0][row] + tail.maxima[1][row]);
        }
        const int first_column = 16 * first_pair + at.lane % 4 * 2;
        float *partial = partial_slot(p, item.slot) + first_column;
        const int o_stride = FIXED ? 512 : p.o_stride;
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int below = 0; below < 2; below++) {
                const int row = 16 * i + at.lane / 4 + 8 * below;
                if (row >= item.n_rows)
                    continue;
                if (item.n_splits > 1) {
#pragma unroll
                    for (int j = 0; j < PAIRS; j++) {
#pragma unroll
                        for (int half = 0; half < 2; half++) { /* values past R are sums of 0 */
                            if (FIXED ||
                                (j < n_pairs && first_column + 16 * j + 8 * half < o_stride))
                                *(float2 *)(partial + row * o_stride + 16 * j + 8 * half) =
                                    make_float2(o[i][j][half][2 * below],
                                                o[i][j][half][2 * below + 1]);
                        }
                    }
                    continue;
                }
                char *out = row_of(p.out, item.request, item.first_row + row, p.heads,
                                   format_bytes(p.out_format));
                const float factor = inverse_of(tail.maxima[0][row] + tail.maxima[1][row]);
#pragma unroll
                for (int j = 0; j < PAIRS; j++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int column = first_column + 16 * j + 8 * half;
                        if (j < n_pairs)
                            store_pair(out, column, p.out_format, p.out_wide, p.n_latent - column,
                                       o[i][j][half][2 * below] * factor * p.out_scale,
                                       o[i][j][half][2 * below + 1] * factor * p.out_scale);
                    }
                }
            }
        }
    }
};

#endif
