/* Attention in f32 by FMA: 16 rows x 16 keys a step, 256 threads, for operands that the tensor
 * cores would round. Thread t scores row t / 16 against key t % 16, then sums the values of columns
 * t and t + 256 for all 16 rows. Rows of shared memory are 4 floats longer than a multiple of 32
 * banks, so that 8 keys' 16-byte reads touch all banks once.
 *
 *   scores  thread t: q[t / 16] . k[t % 16]          P [key][row], rescale [row]
 *   values  thread t: o[row][t, t + 256] += P[key][row] v[key][t, t + 256]
 *
 * The caller orders the phases with barriers. Used by decode_portable.cu and prefill_portable.cu.
 */
#ifndef MLAI_ATTENTION_F32_CUH
#define MLAI_ATTENTION_F32_CUH

#include "cuda/kernels/formats.cuh"

struct F32State {
    float maximum = -INFINITY; /* of the row that this thread scores, in units of log2 */
    float sum = 0.0f;          /* of this thread's keys */
    float o[2][16] = {};
};

/* n is a multiple of 4; four sums, added pairwise. */
MLAI_DEVICE float f32_dot(const float *a, const float *b, int n)
{
    float x = 0.0f, y = 0.0f, z = 0.0f, w = 0.0f;
#pragma unroll 4
    for (int i = 0; i < n; i += 4) {
        const float4 p = *(const float4 *)(a + i), q = *(const float4 *)(b + i);
        x = fmaf(p.x, q.x, x), y = fmaf(p.y, q.y, y);
        z = fmaf(p.z, q.z, z), w = fmaf(p.w, q.w, w);
    }
    return (x + y) + (z + w);
}

MLAI_DEVICE void f32_softmax(F32State &state, float score, float *probabilities, float *rescale)
{
    float largest = fmaxf(state.maximum, score);
#pragma unroll
    for (int step = 8; step > 0; step /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    const float base = largest == -INFINITY ? 0.0f : largest;
    const float factor = exp2f(state.maximum - base), probability = exp2f(score - base);
    state.maximum = largest;
    state.sum = state.sum * factor + probability;
    probabilities[threadIdx.x % 16 * 16 + threadIdx.x / 16] = probability;
    if (threadIdx.x % 16 == 0)
        rescale[threadIdx.x / 16] = factor;
}

MLAI_DEVICE void f32_values(F32State &state, const float *probabilities, const float *rescale,
                            const float *values, int row_stride, int n_columns)
{
    const int first = threadIdx.x, second = threadIdx.x + 256;
#pragma unroll
    for (int r = 0; r < 16; r++) {
        const float factor = rescale[r];
        state.o[0][r] *= factor, state.o[1][r] *= factor;
    }
    if (first >= n_columns)
        return;
#pragma unroll 2
    for (int key = 0; key < 16; key++) {
        const float v0 = values[key * row_stride + first];
        const float v1 = second < n_columns ? values[key * row_stride + second] : 0.0f;
#pragma unroll
        for (int r = 0; r < 16; r += 4) {
            const float4 p = *(const float4 *)(probabilities + key * 16 + r);
            const float each[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                state.o[0][r + i] = fmaf(each[i], v0, state.o[0][r + i]);
                state.o[1][r + i] = fmaf(each[i], v1, state.o[1][r + i]);
            }
        }
    }
}

/* Values that are not finite become 0, by the 16 threads of a row; true for one that found some. */
MLAI_DEVICE bool f32_clear(float *values, int n)
{
    bool is_bad = false;
    for (int i = threadIdx.x % 16; i < n; i += 16) {
        if (!isfinite(values[i])) {
            values[i] = 0.0f;
            is_bad = true;
        }
    }
    return is_bad;
}

/* The row's whole sum, to all of its threads and to sums[row]. */
MLAI_DEVICE void f32_close(F32State &state, float *sums)
{
#pragma unroll
    for (int step = 8; step > 0; step /= 2)
        state.sum += __shfl_xor_sync(0xffffffffu, state.sum, step);
    if (threadIdx.x % 16 == 0)
        sums[threadIdx.x / 16] = state.sum;
}

#endif
