/*
 * Validate mode: the checks of live values that the CPU makes before a call (src/ops), made on the
 * device before the operator's own kernels. The first violation found goes to the error word, which
 * keeps it. A warp takes a request and its lanes the request's live pages; slots and positions are
 * taken a thread each. Nothing is shared between warps but the error word.
 * Launched by src/cuda/validate.c on the operator's stream.
 */
#include "cuda/kernels/validate.h"

static __device__ int64_t index_at(const mlai_cuda_index &index, int64_t i)
{
    if (index.is_i64) {
        return ((const int64_t *)index.data)[i * index.stride];
    }
    return ((const int32_t *)index.data)[i * index.stride];
}

static __device__ int64_t ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static __device__ void report(const mlai_validate_params &p, int32_t status, int32_t live,
                              int64_t row, int64_t column, int64_t value)
{
    if (atomicCAS(&p.error->status, 0, status) == 0) {
        p.error->live = live;
        p.error->row = row;
        p.error->column = column;
        p.error->value = value;
    }
}

/* Request b's step of a cumulative array, and its ends. */
static __device__ void check_cumulative(const mlai_validate_params &p, const mlai_cuda_index &cu,
                                        int32_t live, int64_t b, int64_t total, int64_t max_step)
{
    const int64_t first = index_at(cu, b), end = index_at(cu, b + 1);
    if (b == 0 && first != 0) {
        report(p, MLA_ERROR_CAPACITY, live, 0, 0, first);
    }
    if (end < first || end - first > max_step || (b == p.batch - 1 && end != total)) {
        report(p, MLA_ERROR_CAPACITY, live, b + 1, 0, end);
    }
}

/* Local keys that the last query token of a request sees. */
static __device__ int64_t visible_keys(const mlai_validate_params &p, int64_t len,
                                       int64_t global_len, int64_t q_len)
{
    if (q_len <= 0) {
        return 0;
    }
    int64_t bound = p.has_positions ? global_len : len;
    if (p.is_causal) {
        bound += (p.has_offset ? p.seqlen_offset : 1 - q_len) + q_len - 1;
    }
    if (!p.has_positions) {
        return bound > 0 ? bound : 0;
    }
    if (bound <= p.position_first) {
        return 0;
    }
    const int64_t keys = ceil_div(bound - p.position_first, p.position_stride);
    return keys < len ? keys : len;
}

/* Called by a warp. */
static __device__ void check_cache(const mlai_validate_params &p, int64_t b, int32_t lane)
{
    const int64_t len = index_at(p.seqlens, b);
    const int64_t global_len = p.global.data ? index_at(p.global, b) : len;
    const int64_t q_len = p.cu_q.data ? index_at(p.cu_q, b + 1) - index_at(p.cu_q, b) : p.max_q_len;
    const int64_t keys = visible_keys(p, len, global_len, q_len);
    const int64_t need = keys > len ? keys : len;
    if (lane == 0) {
        if (len < 0) {
            report(p, MLA_ERROR_ARGUMENT, MLA_LIVE_CACHE_SEQLENS, b, 0, len);
        } else if (global_len < 0) {
            report(p, MLA_ERROR_ARGUMENT, MLA_LIVE_GLOBAL_SEQLENS, b, 0, global_len);
        } else if (need > p.capacity || need > p.max_kv_len) {
            report(p, MLA_ERROR_CAPACITY, MLA_LIVE_CACHE_SEQLENS, b, 0, len);
        }
    }
    const int64_t live = keys < p.capacity ? keys : p.capacity;
    const int64_t columns = ceil_div(live, p.page_size);
    for (int64_t i = lane; i < columns; i += 32) {
        const int32_t page = p.page_table[b * p.table_stride + i];
        if (page < 0 || page >= p.pages) {
            report(p, MLA_ERROR_CAPACITY, MLA_LIVE_PAGE_TABLE, b, i, page);
        }
    }
}

extern "C" __global__ void __launch_bounds__(MLAI_VALIDATE_THREADS)
    mla_validate(const __grid_constant__ mlai_validate_params p)
{
    const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t threads = (int64_t)gridDim.x * blockDim.x;
    const int32_t lane = (int32_t)(threadIdx.x % 32);
    for (int64_t b = thread / 32; b < p.batch; b += threads / 32) {
        if (lane == 0 && p.cu_q.data) {
            check_cumulative(p, p.cu_q, MLA_LIVE_CU_SEQLENS_Q, b, p.tokens_q, p.max_q_len);
        }
        if (lane == 0 && p.cu_kv.data) {
            check_cumulative(p, p.cu_kv, MLA_LIVE_CU_SEQLENS_KV, b, p.tokens_kv, p.max_kv_len);
        }
        if (p.seqlens.data) {
            check_cache(p, b, lane);
        }
    }
    for (int64_t i = thread; i < p.n_slots; i += threads) {
        const int64_t slot = index_at(p.slots, i);
        if (slot >= p.slot_end) {
            report(p, MLA_ERROR_CAPACITY, MLA_LIVE_SLOTS, i, 0, slot);
        }
    }
    for (int64_t i = thread; i < p.n_positions; i += threads) {
        const int64_t position = index_at(p.positions, i);
        if (position < 0 || position >= p.position_end) {
            report(p, MLA_ERROR_CAPACITY, MLA_LIVE_POSITIONS, i, 0, position);
        }
    }
}
