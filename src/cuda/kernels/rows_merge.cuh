/* Merging partial attention by rows: out = sum w_i out_i / sum w_i with w_i = exp(lse_i), in f32,
 * in index order. A row goes over up to 32 lanes, each with its chunks of every state; lanes of a
 * row work out the weights together, each for itself. Used by rows.cu.
 */
#ifndef MLAI_ROWS_MERGE_CUH
#define MLAI_ROWS_MERGE_CUH

#include "cuda/kernels/rows.cuh"

/*
 * m = max lse_i; w_i = exp(lse_i - m) / sum; states with an infinite lse are empty. Two states are
 * in registers, of more the lse is loaded again. An empty state's values become 0 and its weight
 * -0, and sums start at -0, so that nothing is added and a lone state passes with all its bits.
 */
struct Merge {
    int64_t token;
    int head;
    float first[2]; /* lse of the first two states */
    float largest, sum, last, inverse;
    int n_live;

    __device__ __forceinline__ Merge(const mlai_cuda_merge_params &p, int64_t index)
        : token(index / p.heads)
    {
        head = (int)(index - token * p.heads);
    }

    __device__ __forceinline__ float load_lse(const mlai_cuda_merge_params &p, int i) const
    {
        return p.lses[i][token * p.lse_strides[i][0] + head * p.lse_strides[i][1]];
    }

    __device__ __forceinline__ const char *out_of(const mlai_cuda_merge_params &p, int i,
                                                  int bytes) const
    {
        return (const char *)p.outs[i] +
               (token * p.out_strides[i][0] + head * p.out_strides[i][1]) * bytes;
    }

    __device__ __forceinline__ void load_first(const mlai_cuda_merge_params &p)
    {
        first[0] = load_lse(p, 0);
        first[1] = p.n_states > 1 ? load_lse(p, 1) : -INFINITY;
    }

    __device__ __forceinline__ void count(float lse)
    {
        const bool live = !isinf(lse);
        largest = live ? fmaxf(largest, lse) : largest;
        last = live ? lse : last;
        n_live += live;
    }

    __device__ __forceinline__ float weight_of(float lse) const
    {
        return isinf(lse) ? -0.0f : exp2f((lse - largest) * 1.4426950408889634f);
    }

    __device__ __forceinline__ void add_up(const mlai_cuda_merge_params &p)
    {
        largest = last = -INFINITY;
        n_live = 0;
        count(first[0]);
        count(first[1]);
        for (int i = 2; i < p.n_states; i++)
            count(load_lse(p, i));
        sum = weight_of(first[0]) + weight_of(first[1]);
        for (int i = 2; i < p.n_states; i++)
            sum += weight_of(load_lse(p, i));
        inverse = __fdiv_rn(1.0f, sum);
    }

    __device__ __forceinline__ float lse(void) const
    {
        return n_live > 1 ? largest + logf(sum) : last;
    }

    __device__ __forceinline__ float start(void) const
    {
        return n_live == 0 ? 0.0f : -0.0f;
    }

    /* total takes in x, of a state. */
    __device__ __forceinline__ void add(float (&total)[8], const float (&x)[8], float own) const
    {
        const bool live = !isinf(own);
        const float weight = !live ? -0.0f : n_live == 1 ? 1.0f : weight_of(own) * inverse;
#pragma unroll
        for (int j = 0; j < 8; j++)
            total[j] += weight * (live ? x[j] : 0.0f);
    }
};

/* Values of a row, lane `at` of p.lanes: one or two chunks of two states at a time. The weights are
 * made while the first are on their way. */
template <int IN> MLAI_DEVICE void merge_values(const mlai_cuda_merge_params &p, Merge &row, int at)
{
    constexpr int n_chunks = IN_FLIGHT<IN> / 2;
    row.load_first(p);
    for (int first = 8 * at; first < p.width; first += 8 * n_chunks * p.lanes) {
        float total[n_chunks][8];
        for (int i = 0; i < p.n_states; i += 2) {
            Chunk<IN> chunks[2][n_chunks] = {};
#pragma unroll
            for (int state = 0; state < 2; state++) {
                const char *from = row.out_of(p, min(i + state, p.n_states - 1), IN == F32 ? 4 : 2);
#pragma unroll
                for (int k = 0; k < n_chunks; k++) {
                    if (first + 8 * k * p.lanes < p.width)
                        chunks[state][k] = load_chunk<IN>(from, first + 8 * k * p.lanes);
                }
            }
            if (first == 8 * at && i == 0)
                row.add_up(p);
#pragma unroll
            for (int k = 0; k < n_chunks && i == 0; k++) {
#pragma unroll
                for (int j = 0; j < 8; j++)
                    total[k][j] = row.start();
            }
#pragma unroll
            for (int state = 0; state < 2; state++) {
                const float own = i == 0                   ? row.first[state]
                                  : i + state < p.n_states ? row.load_lse(p, i + state)
                                                           : -INFINITY;
#pragma unroll
                for (int k = 0; k < n_chunks; k++) {
                    float x[8];
                    widen_chunk<IN>(x, chunks[state][k]);
                    row.add(total[k], x, own);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < n_chunks; k++) {
            if (first + 8 * k * p.lanes < p.width)
                store8(row_at(p.out, row.token, row.head), first + 8 * k * p.lanes, p.out.format,
                       true, 8, total[k]);
        }
    }
}

/* The LSE may be the first state's own: every lane has read it before one writes. */
MLAI_DEVICE void store_lse(const mlai_cuda_merge_params &p, const Merge &row, bool mine)
{
    __syncwarp();
    if (mine && p.lse)
        p.lse[row.token * p.lse_stride0 + row.head * p.lse_stride1] = row.lse();
}

/* p.lanes lanes a row. */
template <int IN> MLAI_DEVICE void merge_wide(const mlai_cuda_merge_params &p)
{
    const int lane = threadIdx.x % 32;
    const int64_t index = warp_index() * (32 / p.lanes) + lane / p.lanes;
    Merge row(p, index);
    const bool live = row.token < p.tokens;
    if (live)
        merge_values<IN>(p, row, lane % p.lanes);
    store_lse(p, row, live && lane % p.lanes == 0);
}

/* A warp a row, value by value. */
MLAI_DEVICE void merge_plain(const mlai_cuda_merge_params &p)
{
    const int lane = threadIdx.x % 32;
    Merge row(p, warp_index());
    if (row.token >= p.tokens)
        return;
    row.load_first(p);
    row.add_up(p);
    for (int first = 8 * lane; first < p.width; first += 256) {
        const int n = min(8, p.width - first);
        float total[8], x[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            total[j] = row.start();
        for (int i = 0; i < p.n_states; i++) {
            load8(x, row.out_of(p, i, format_bytes(p.in_format)), first, p.in_format, false, n);
            row.add(total, x, row.load_lse(p, i));
        }
        store8(row_at(p.out, row.token, row.head), first, p.out.format, false, n, total);
    }
    store_lse(p, row, lane == 0);
}

#endif
