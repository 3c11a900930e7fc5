/* Portable decode, verify and extend over the paged latent cache, any GPU from sm_80 on:
 *   out[b, j, h] = sum_k softmax_k(scale q[b, j, h] . row_k) row_k[:R],  k below (b, j)'s bound.
 *
 * Rows of a request (query token x head, token-major) go in blocks of 16 (decode_narrow.cuh) or 64
 * (decode_wide.cuh); an item is a block times a range of keys (decode_portable.h). Items that are
 * all of a block write the output; others leave maximum, sum and unnormalised output, and who
 * brings the last adds them in key order (join). Products on mma.sync in bf16 or f16 with f32 sums,
 * softmax in f32; the f32 kernel here takes what those round (attention_f32.cuh). One tile of keys
 * serves both products: its rows as keys, their first R columns as values.
 *
 *   narrow  [ tile 0 | tile 1 | X | P | scales | tail ]     Q passes through tile 1 into registers
 *   wide    [ Q | tile 0 | tile 1 | X, then P | tail ]      one tile where memory is short
 *   f32     [ Q | tile | P | tail ]                         tail: plan, item, bounds, maxima
 *
 * R <= 512, R + P <= 640; any heads, page size and strides. Launched by src/cuda/decode_portable.c.
 */
#include "cuda/kernels/attention_f32.cuh"
#include "cuda/kernels/decode_narrow.cuh"
#include "cuda/kernels/decode_wide.cuh"

#define KERNEL(name, blocks)                                                                       \
    extern "C" __global__ void __launch_bounds__(MLAI_DECODE_THREADS, blocks)                      \
        name(const __grid_constant__ mlai_decode_portable_params p)

/* ---- f32 ------------------------------------------------------------------------------------- */

/* 16 rows x 16 keys, any formats, all arithmetic in f32: attention_f32.cuh. Every row of shared
 * memory is [ R, zeros to a multiple of 4 | P, zeros | 4 ] floats. */
struct Plain {
    static constexpr int ROWS = MLAI_DECODE_F32_ROWS, KEYS = MLAI_DECODE_F32_KEYS;
    static constexpr int DEPTH = 4; /* of the ring that joins partial results */

    static __device__ __forceinline__ float *scratch(const Params &p, char *smem)
    {
        return (float *)(smem + (ROWS + KEYS) * 4 * p.row_stride);
    }

    /* One row of n_latent | n_rope values into shared memory, 16 threads a row. */
    static __device__ void load_row(const Params &p, float *to, const char *latent,
                                    const char *rope, int latent_format, int rope_format,
                                    const float *scales, bool live)
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
                 row_of(p.q_rope, item.request, at, p.heads, bytes), p.q_format, p.q_format,
                 nullptr, live);
        set_bounds(p, item, tail);
        F32State state;
        const Scores how = scores_of(p);
        for (int key = item.first_key; key < item.end_key; key += KEYS) {
            __syncthreads(); /* orders the last tile's use before its replacement */
            load_keys(p, item, key, tile);
            __syncthreads(); /* orders the tile, at first queries and bounds, before their use */
            const int mine = key + threadIdx.x % 16;
            float s =
                score(how, f32_dot(q + row * p.row_stride, tile + threadIdx.x % 16 * p.row_stride,
                                   p.latent_pad + p.rope_pad));
            if (mine >= item.end_key || mine >= tail.bounds[row] ||
                (p.mask && is_masked(p, item, tail.tokens[row], mine)))
                s = -INFINITY;
            f32_softmax(state, s, probabilities, tail.rescale);
            __syncthreads(); /* orders probabilities and rescales before their use */
            if (has_hidden(item, key, KEYS)) {
                if (key + row >= item.clear_end)
                    f32_clear(tile + row * p.row_stride, p.n_latent);
                __syncthreads(); /* orders the tile before its use as values */
            }
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
                if (item.n_splits > 1)
                    partial_slot(p, item.slot)[(int64_t)r * p.o_stride + column] = x;
                else
                    store_value(row_of(p.out, item.request, item.first_row + r, p.heads,
                                       format_bytes(p.out_format)),
                                column, p.out_format,
                                x * inverse_of(tail.maxima[0][r]) * p.out_scale);
            }
        }
    }
};

extern __shared__ __align__(1024) char shared_memory[];

#define TAIL(bytes_before) (*(Tail *)(shared_memory + (bytes_before)))

template <class T> MLAI_DEVICE void run_narrow(const Params &p)
{
    run_items<Narrow<T>>(
        p, shared_memory,
        TAIL(2 * MLAI_DECODE_NARROW_KEYS * 2 * p.row_stride + MLAI_DECODE_NARROW_SCRATCH_BYTES));
}

template <class T, bool FIXED> MLAI_DEVICE void run_wide(const Params &p)
{
    run_items<Wide<T, FIXED>>(
        p, shared_memory,
        TAIL((MLAI_DECODE_WIDE_ROWS + p.stages * MLAI_DECODE_WIDE_KEYS) * 2 * p.row_stride +
             MLAI_DECODE_WIDE_SCRATCH_BYTES));
}

KERNEL(mla_decode_narrow_bf16, 2)
{
    run_narrow<Bf16>(p);
}
KERNEL(mla_decode_narrow_f16, 2)
{
    run_narrow<Fp16>(p);
}
KERNEL(mla_decode_wide_bf16, 1)
{
    run_wide<Bf16, false>(p);
}
KERNEL(mla_decode_wide_f16, 1)
{
    run_wide<Fp16, false>(p);
}
KERNEL(mla_decode_fixed_bf16, 1)
{
    run_wide<Bf16, true>(p);
}
KERNEL(mla_decode_fixed_f16, 1)
{
    run_wide<Fp16, true>(p);
}

KERNEL(mla_decode_f32, 2)
{
    run_items<Plain>(p, shared_memory,
                     TAIL((MLAI_DECODE_F32_ROWS + MLAI_DECODE_F32_KEYS) * 4 * p.row_stride +
                          MLAI_DECODE_F32_SCRATCH_BYTES));
}
