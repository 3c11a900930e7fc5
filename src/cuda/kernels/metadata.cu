/* What the backend needs once a forward, made on the device: page tables of a batch, slots of
 * prefix windows, the e4m3 cast of queries, keys and values, and the count of steps.
 *
 * Nothing is shared between threads and there is no barrier. Rows of the request table that do not
 * exist read as page 0, which is reserved and zero: a device cannot return a status. All offsets
 * are 64-bit. Launched by src/cuda/memory.c.
 */
#include "cuda/kernels/formats.cuh"
#include "cuda/kernels/metadata.h"

#define KERNEL extern "C" __global__ void __launch_bounds__(MLAI_METADATA_THREADS)

MLAI_DEVICE int64_t index_at(const mlai_cuda_index &index, int64_t i)
{
    if (index.is_i64) {
        return ((const int64_t *)index.data)[i * index.stride];
    }
    return ((const int32_t *)index.data)[i * index.stride];
}

/* The pages of the request at place i, or null. */
MLAI_DEVICE const int32_t *pages_of(const int32_t *table, int64_t rows, int64_t stride,
                                    const mlai_cuda_index &index, int64_t i)
{
    const int64_t row = index_at(index, i);
    return row >= 0 && row < rows ? table + row * stride : nullptr;
}

/* Row blockIdx.y, columns along x. */
KERNEL mla_gather_pages(const __grid_constant__ mlai_gather_pages_params p)
{
    for (int64_t i = blockIdx.y; i < p.rows; i += gridDim.y) {
        const int32_t *pages = pages_of(p.table, p.table_rows, p.table_stride, p.index, i);
        for (int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; c < p.columns;
             c += (int64_t)gridDim.x * blockDim.x) {
            p.out[i * p.out_stride + c] = pages && c < p.table_columns ? pages[c] : 0;
        }
    }
}

/* A block a request of a window (y), its slots along x. */
KERNEL mla_fill_windows(const __grid_constant__ mlai_fill_windows_params p)
{
    for (int64_t pair = blockIdx.y; pair < p.windows * p.requests; pair += gridDim.y) {
        const int64_t k = pair / p.requests, i = pair % p.requests;
        const int32_t *cumulative = p.cumulative + k * (p.requests + 1) + i;
        const int64_t count = (int64_t)cumulative[1] - cumulative[0];
        int64_t *slots = p.slots + p.starts[k] + cumulative[0];
        const int32_t *pages = pages_of(p.table, p.table_rows, p.table_stride, p.index, i);
        for (int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; j < count;
             j += (int64_t)gridDim.x * blockDim.x) {
            const int64_t position = k * p.window_tokens + j;
            const int64_t column = position / p.page_size;
            const int64_t page = pages && column < p.table_columns ? pages[column] : 0;
            slots[j] = page * p.page_size + position % p.page_size;
        }
    }
}

MLAI_DEVICE void store_index(const mlai_cuda_index &index, int64_t i, int64_t value)
{
    if (index.data == nullptr) {
        return;
    }
    if (index.is_i64) {
        ((int64_t *)index.data)[i * index.stride] = value;
    } else {
        ((int32_t *)index.data)[i * index.stride] = (int32_t)value;
    }
}

/* The sum of the new lengths of requests before `end`, for all threads of the block. */
MLAI_DEVICE int64_t tokens_before(const mlai_cuda_index &new_lens, int64_t end, int64_t *sums)
{
    int64_t sum = 0;
    for (int64_t i = threadIdx.x; i < end; i += blockDim.x) {
        sum += max(index_at(new_lens, i), (int64_t)0);
    }
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    __syncthreads(); /* the last call's sums have been read */
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    sum = 0;
    for (int w = 0; w < MLAI_METADATA_THREADS / 32; w++) {
        sum += sums[w];
    }
    return sum;
}

/* A block a request; the one past the last fills the tail. */
KERNEL mla_fill_tokens(const __grid_constant__ mlai_fill_tokens_params p)
{
    __shared__ int64_t sums[MLAI_METADATA_THREADS / 32];
    for (int64_t i = blockIdx.x; i <= p.requests; i += gridDim.x) {
        const int64_t first = tokens_before(p.new_lens, i, sums);
        if (threadIdx.x == 0) {
            store_index(p.cumulative, i, first);
        }
        if (i == p.requests) {
            for (int64_t t = first + threadIdx.x; t < p.tokens; t += blockDim.x) {
                store_index(p.positions, t, 0);
                store_index(p.slots, t, -1);
            }
            continue;
        }
        const int64_t cached = max(index_at(p.cached_lens, i), (int64_t)0);
        const int64_t fresh = max(index_at(p.new_lens, i), (int64_t)0);
        const int64_t count = min(fresh, p.tokens - first);
        const int64_t most = p.slots.is_i64 ? INT64_MAX : INT32_MAX;
        const int32_t *pages = pages_of(p.table, p.table_rows, p.table_stride, p.index, i);
        for (int64_t j = threadIdx.x; j < count; j += blockDim.x) {
            const int64_t position = cached + j;
            const int64_t column = position / p.page_size;
            const int64_t page = pages && column < p.table_columns ? pages[column] : -1;
            const int64_t slot = page * p.page_size + position % p.page_size;
            store_index(p.positions, first + j, position);
            store_index(p.slots, first + j, page >= 0 && slot <= most ? slot : -1);
        }
        __syncthreads(); /* cached_lens may be seq_lens */
        if (threadIdx.x == 0) {
            store_index(p.seq_lens, i, cached + fresh);
        }
    }
}

/* A warp a row. */
KERNEL mla_cast_rows(const __grid_constant__ mlai_cast_params p)
{
    const int64_t warps = (int64_t)gridDim.x * blockDim.x / 32;
    for (int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
         row < p.tokens * p.heads; row += warps) {
        const int64_t token = row / p.heads, head = row % p.heads;
        const char *in =
            p.in.data + (token * p.in.stride0 + head * p.in.stride1) * format_bytes(p.in.format);
        char *out = p.out.data +
                    (token * p.out.stride0 + head * p.out.stride1) * format_bytes(p.out.format);
        for (int64_t first = 8 * (threadIdx.x % 32); first < p.width; first += 256) {
            const int n = (int)min((int64_t)8, p.width - first);
            float x[8];
            load8(x, in, first, p.in.format, p.wide, n);
            store8(out, first, p.out.format, p.wide, n, x);
        }
    }
}

/* The cache rows that this step announces were written by earlier kernels of the stream. The mirror
 * is stored last, for a host that acts on it. */
KERNEL mla_count_step(const __grid_constant__ mlai_count_step_params p)
{
    if (threadIdx.x == 0) {
        const uint64_t count = *p.count + 1;
        *p.count = count;
        __threadfence_system();
        *(volatile uint64_t *)p.mirror = count;
    }
}
