/* absorb and project: out[t, h, :] = x[t, h, :] w[h], one small product a head, x [T, H, K], w
 * [H, K, n] with n or K contiguous, any GPU from sm_80 on. With a gate g each value is rounded to
 * out's format, times 1 / (1 + exp(-g)) in f32, and rounded again.
 *
 * 16-bit: a block makes 64 tokens x 128 columns of a head, 8 warps of 32 x 32, in steps of 64 of K
 * through three stages of shared memory (cp.async), mma.sync with f32 sums. Blocks that share a
 * weight tile are neighbours, so that it comes from memory once.
 *
 *   stage  x [64 tokens][64 k]     w, n contiguous: [64 k][128 columns]   ldmatrix.trans
 *                                  w, K contiguous: [128 columns][64 k]   ldmatrix
 *
 * f32 and mixed formats: 64 x 64 a block, 4 x 4 outputs a thread, steps of 16 of K, FMA. The order
 * of an output's sum depends on K alone. Rows and columns past the end are zeros and not stored.
 */
#include "cuda/kernels/absorb_project.h"
#include "cuda/kernels/mma_portable.cuh"

typedef mlai_product_params Params;

extern __shared__ __align__(1024) char shared_memory[];

struct Item {
    int64_t first_token;
    int first_column, head;
};

MLAI_DEVICE Item item_at(const Params &p, int64_t number, int rows, int columns)
{
    const int64_t rest = number / p.token_tiles;
    Item item;
    item.first_token = (number - rest * p.token_tiles) * rows;
    item.head = (int)(rest / p.column_tiles);
    item.first_column = (int)(rest - (int64_t)item.head * p.column_tiles) * columns;
    return item;
}

MLAI_DEVICE char *row_of(const mlai_product_rows &rows, int64_t token, int head)
{
    return rows.data +
           (token * rows.token_stride + head * rows.head_stride) * format_bytes(rows.format);
}

MLAI_DEVICE float rounded(float x, int format)
{
    return format == BF16  ? __bfloat162float(__float2bfloat16_rn(x))
           : format == F16 ? __half2float(__float2half_rn(x))
                           : x;
}

/* x / (1 + exp(-g)), by exp of -|g| so that it cannot overflow. */
MLAI_DEVICE float gated(float x, float g)
{
    const float e = expf(-fabsf(g));
    return x * ((g < 0.0f ? e : 1.0f) / (1.0f + e));
}

MLAI_DEVICE void store_two(const Params &p, const Item &item, int64_t token, int column, float x0,
                           float x1)
{
    const int n = p.columns - column;
    if (token >= p.tokens || n <= 0)
        return;
    if (p.gate.data) {
        const char *gate = row_of(p.gate, token, item.head);
        x0 = gated(rounded(x0, p.out.format), load_value(gate, column, p.gate.format));
        if (n > 1)
            x1 = gated(rounded(x1, p.out.format), load_value(gate, column + 1, p.gate.format));
    }
    store_pair(row_of(p.out, token, item.head), column, p.out.format, p.out_pairs, n, x0, x1);
}

/* ---- 16-bit ---------------------------------------------------------------------------------- */

template <class T, bool DOTS> struct Product {
    static constexpr int ROWS = MLAI_PRODUCT_ROWS, COLUMNS = MLAI_PRODUCT_COLUMNS;
    static constexpr int DEPTH = MLAI_PRODUCT_DEPTH, STAGES = MLAI_PRODUCT_STAGES;
    static constexpr int X_BYTES = ROWS * DEPTH * 2, STAGE_BYTES = X_BYTES + COLUMNS * DEPTH * 2;

    /* Step `step` of K to its stage; nothing past the end, where an empty group is committed. */
    static __device__ __forceinline__ void load(const Params &p, const Item &item, int step)
    {
        const int first = step * DEPTH;
        if (first < p.depth) {
            const uint32_t x = shared_address(shared_memory + step % STAGES * STAGE_BYTES);
            const uint32_t w = x + X_BYTES;
#pragma unroll
            for (int i = threadIdx.x; i < ROWS * DEPTH / 8; i += MLAI_PRODUCT_THREADS) {
                const int row = i / (DEPTH / 8), c = i % (DEPTH / 8), k = first + 8 * c;
                const bool live = item.first_token + row < p.tokens && k < p.depth;
                copy16(x + chunk_at(row, c, 2 * DEPTH),
                       row_of(p.x, live ? item.first_token + row : 0, item.head) +
                           (live ? 2 * k : 0),
                       live);
            }
            constexpr int chunks = (DOTS ? DEPTH : COLUMNS) / 8;
#pragma unroll
            for (int i = threadIdx.x; i < COLUMNS * DEPTH / 8; i += MLAI_PRODUCT_THREADS) {
                const int row = i / chunks, c = i % chunks;
                const int k = first + (DOTS ? 8 * c : row);
                const int column = item.first_column + (DOTS ? row : 8 * c);
                const bool live = k < p.depth && column < p.columns;
                const int64_t at = live ? k * p.w_k_stride + column * p.w_n_stride : 0;
                copy16(w + chunk_at(row, c, 16 * chunks),
                       p.w + 2 * (item.head * p.w_head_stride + at), live);
            }
        }
        copies_commit();
    }

    static __device__ __forceinline__ void multiply(int step, int first_row, int first_column,
                                                    float (&acc)[2][4][4])
    {
        const uint32_t x = shared_address(shared_memory + step % STAGES * STAGE_BYTES);
        const uint32_t w = x + X_BYTES;
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            uint32_t a[2][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                ldmatrix(a[i], a_address(x, first_row + 16 * i, k, 2 * DEPTH));
                if (DOTS)
                    ldmatrix(b[i], b_address(w, first_column + 16 * i, k, 2 * DEPTH));
                else
                    ldmatrix_transposed(b[i], v_address(w, k, first_column / 16 + i, 2 * COLUMNS));
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++)
                    T::mma(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
    }

    static __device__ void run(const Params &p, const Item &item)
    {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int first_row = warp % 2 * 32, first_column = warp / 2 * 32;
        const int steps = (p.depth + DEPTH - 1) / DEPTH;
        float acc[2][4][4] = {};
        for (int step = 0; step < STAGES - 1; step++)
            load(p, item, step);
        for (int step = 0; step < steps; step++) {
            copies_wait_all_but<STAGES - 2>();
            __syncthreads(); /* orders copies before their use, the last use before the next copy */
            load(p, item, step + STAGES - 1);
            multiply(step, first_row, first_column, acc);
        }
        copies_wait();
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int below = 0; below < 2; below++)
                    store_two(p, item, item.first_token + first_row + 16 * i + 8 * below + lane / 4,
                              item.first_column + first_column + 8 * j + lane % 4 * 2,
                              acc[i][j][2 * below], acc[i][j][2 * below + 1]);
            }
        }
    }
};

#define KERNEL(name, type, dots)                                                                   \
    extern "C" __global__ void __launch_bounds__(MLAI_PRODUCT_THREADS, 2)                          \
        name(const __grid_constant__ mlai_product_params p)                                        \
    {                                                                                              \
        for (int64_t i = blockIdx.x; i < p.items; i += gridDim.x) {                                \
            __syncthreads(); /* orders the last item's reads before this one's writes */           \
            Product<type, dots>::run(p, item_at(p, i, MLAI_PRODUCT_ROWS, MLAI_PRODUCT_COLUMNS));   \
        }                                                                                          \
    }

KERNEL(mla_product_bf16_rows, Bf16, false)
KERNEL(mla_product_f16_rows, Fp16, false)
KERNEL(mla_product_bf16_dots, Bf16, true)
KERNEL(mla_product_f16_dots, Fp16, true)

/* ---- f32 ------------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(MLAI_PRODUCT_THREADS)
    mla_product_f32(const __grid_constant__ mlai_product_params p)
{
    constexpr int tile = MLAI_PRODUCT_F32_TILE, depth = 16, stride = tile + 4;
    __shared__ __align__(16) float x[depth * stride], w[depth * stride]; /* [k][row or column] */
    const int first_row = threadIdx.x / 16 * 4, first_column = threadIdx.x % 16 * 4;
    for (int64_t number = blockIdx.x; number < p.items; number += gridDim.x) {
        const Item item = item_at(p, number, tile, tile);
        float acc[4][4] = {};
        for (int first = 0; first < p.depth; first += depth) {
            __syncthreads(); /* orders the last step's use before its replacement */
            for (int i = threadIdx.x; i < tile * depth; i += MLAI_PRODUCT_THREADS) {
                const int row = i / depth, k = i % depth;
                const int64_t token = item.first_token + row;
                x[k * stride + row] =
                    token < p.tokens && first + k < p.depth
                        ? load_value(row_of(p.x, token, item.head), first + k, p.x.format)
                        : 0.0f;
                /* Neighbouring threads along the contiguous dimension of w. */
                const int column = p.w_k_stride == 1 ? row : i % tile;
                const int w_k = p.w_k_stride == 1 ? k : i / tile;
                const bool live = item.first_column + column < p.columns && first + w_k < p.depth;
                w[w_k * stride + column] =
                    live ? load_value(p.w,
                                      item.head * p.w_head_stride + (first + w_k) * p.w_k_stride +
                                          (item.first_column + column) * p.w_n_stride,
                                      p.w_format)
                         : 0.0f;
            }
            __syncthreads(); /* orders the step's tiles before their use */
#pragma unroll
            for (int k = 0; k < depth; k++) {
                const float4 a = *(const float4 *)(x + k * stride + first_row);
                const float4 b = *(const float4 *)(w + k * stride + first_column);
                const float rows[4] = {a.x, a.y, a.z, a.w}, columns[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        acc[i][j] = fmaf(rows[i], columns[j], acc[i][j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j += 2)
                store_two(p, item, item.first_token + first_row + i,
                          item.first_column + first_column + j, acc[i][j], acc[i][j + 1]);
        }
    }
}
