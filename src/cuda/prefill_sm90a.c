/*
 * Launcher of the Hopper prefill kernels (kernels/prefill_sm90a.h). From capacities alone:
 *
 *   short   no more 128-row tiles than multiprocessors: 64 rows a cluster of 1, 2 or 4 CTAs
 *   full    all else: persistent CTAs that draw 128-row tiles
 *
 * each with a twin for a logit cap or a negative scale. One launch. Workspace: the head (the two
 * counters of the full kernels). Called by: rows_cuda.c.
 */
#include "cuda/kernels/prefill_sm90a.h"
#include "cuda/cuda.h"
#include "cuda/sm90a.h"

enum { MAX_GRID_YZ = 65535, MIN_BLOCKS_OF_CTA = 16 };

typedef struct prefill_kernels {
    int32_t format;
    const char *image, *image_short;
    const char *symbols[2], *symbols_short[2]; /* [general] */
} prefill_kernels;

static int32_t accepts(const prefill_kernels *kernels, const mla_problem *problem, char *why,
                       uint64_t why_bytes)
{
    const int32_t q = problem->q_format, kv = problem->kv_format, out = problem->out_format;
    if (q != kernels->format || kv != kernels->format || out != kernels->format)
        MLAI_REFUSE("q %s, k and v %s, out %s: it takes all in %s", mla_format_name(q),
                    mla_format_name(kv), mla_format_name(out), mla_format_name(kernels->format));
    if (problem->qk_head_dim != MLAI_PREFILL_SM90A_QK_DIM ||
        problem->v_head_dim != MLAI_PREFILL_SM90A_V_DIM)
        MLAI_REFUSE("head dims %d of q and %d of v: it takes 192 and 128", problem->qk_head_dim,
                    problem->v_head_dim);
    if (problem->layout & MLA_LAYOUT_UNALIGNED)
        MLAI_REFUSE("a base or stride of q, k, v or out is no multiple of 16 bytes");
    return 1;
}

uint64_t mlai_cuda_prefill_sm90a_bytes(const mla_problem *problem, const mla_exec *exec)
{
    (void)problem;
    (void)exec;
    return MLA_CUDA_WORKSPACE_HEAD_BYTES;
}

/* Tiles of `rows` query rows that the call may have; -1 where 31 bits do not hold them. */
static int64_t tiles_of(const mla_problem *problem, int64_t rows)
{
    int64_t tiles;
    if (__builtin_mul_overflow(mlai_ceil_div(problem->max_q_len, rows), problem->batch, &tiles) ||
        __builtin_mul_overflow(tiles, (int64_t)problem->num_heads, &tiles) || tiles > INT32_MAX)
        return -1;
    return tiles;
}

/* A launch, then products at 650 TFLOP/s. */
double mlai_cuda_prefill_sm90a_cost_us(const mla_problem *problem, const mla_exec *exec)
{
    (void)exec;
    if (tiles_of(problem, MLAI_PREFILL_SM90A_ROWS) < 0)
        return MLAI_TOO_LARGE_US;
    const double flops = 2.0 * (double)problem->tokens * (double)problem->max_kv_len *
                         problem->num_heads * (problem->qk_head_dim + problem->v_head_dim) *
                         (problem->is_causal ? 0.5 : 1.0);
    return 7.0 + flops / 6.5e8;
}

/* The largest of 1, 2, 4 CTAs a tile that leaves a quarter of the multiprocessors free (clusters do
 * not fill them all) and each CTA 16 blocks of keys. */
static uint32_t cluster_of(const mla_problem *problem, const mlai_cuda_device *device)
{
    const int64_t tiles = tiles_of(problem, MLAI_PREFILL_SHORT_SM90A_ROWS);
    const int64_t blocks = mlai_ceil_div(problem->max_kv_len, MLAI_PREFILL_SHORT_SM90A_KEYS);
    uint32_t cluster = 4;
    while (cluster > 1 && (4 * cluster * tiles > 3 * (int64_t)device->sm_count ||
                           blocks < (int64_t)MIN_BLOCKS_OF_CTA * cluster))
        cluster /= 2;
    return cluster;
}

/* The map of rows [tokens, heads, width], see prefill_sm90a.h. An empty tensor gets that of `base`:
 * nothing is read through it. */
static mla_status set_map(mlai_prefill_sm90a_map *map, const mla_tensor *t, const void *base,
                          int64_t window, const mlai_cuda_device *device, const char *name,
                          mla_diag *diag)
{
    const int64_t width_bytes = 2 * t->shape[2];
    const int64_t row = t->shape[0] > 1 ? 2 * t->stride[0] : t->shape[1] * width_bytes;
    const int64_t head = t->shape[1] > 1 ? 2 * t->stride[1] : width_bytes;
    const cuuint64_t dims[5] = {64, (cuuint64_t)window, (cuuint64_t)t->shape[0] + 1,
                                (cuuint64_t)t->shape[2] / 64, (cuuint64_t)t->shape[1]};
    const cuuint64_t strides[4] = {(cuuint64_t)row, (cuuint64_t)row, 128, (cuuint64_t)head};
    const cuuint32_t box[5] = {64, (cuuint32_t)window, 1, (cuuint32_t)dims[3], 1};
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    const uintptr_t at = (uintptr_t)(t->shape[0] > 0 ? t->data : base) - (uintptr_t)(window * row);
    const CUresult result = device->cuda->api.cuTensorMapEncodeTiled(
        (CUtensorMap *)map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, (void *)at, dims, strides, box,
        steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return mlai_fail(diag, MLA_ERROR_DEVICE, "%s at %p gave no tensor map: %s", name, t->data,
                         mlai_cuda_error_name(device->cuda, result));
    return MLA_OK;
}

static mla_status set_maps(mlai_prefill_sm90a_params *own, const mla_prefill_params *p,
                           bool is_short, const mlai_cuda_device *device, mla_diag *diag)
{
    const int64_t keys = is_short ? MLAI_PREFILL_SHORT_SM90A_KEYS : MLAI_PREFILL_SM90A_KEYS;
    const void *base = p->q.data;
    MLAI_TRY(set_map(&own->q_map, &p->q, base, 64, device, "q", diag));
    MLAI_TRY(set_map(&own->k_map, &p->k, base, keys, device, "k", diag));
    return set_map(&own->v_map, &p->v, base, keys, device, "v", diag);
}

static mla_status run(const prefill_kernels *kernels, const mla_exec *exec,
                      const mla_problem *problem, const void *params, mla_diag *diag)
{
    const mla_prefill_params *p = params;
    mlai_cuda_device *device = exec->device;
    mlai_cuda_workspace_head *head = exec->workspace;
    const int64_t tiles = tiles_of(problem, MLAI_PREFILL_SM90A_ROWS),
                  short_tiles = mlai_ceil_div(problem->max_q_len, MLAI_PREFILL_SHORT_SM90A_ROWS);
    if (tiles < 0)
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "max_seqlen_q %d with %lld requests of %d heads is more than the Hopper "
                         "kernels count; give the bound of one request's q_len, split the call or "
                         "unforce the row",
                         p->max_seqlen_q, (long long)problem->batch, problem->num_heads);
    if (tiles == 0)
        return MLA_OK;
    const bool is_short =
        tiles <= device->sm_count && problem->batch <= MAX_GRID_YZ && short_tiles <= MAX_GRID_YZ;
    const bool is_general = p->softmax_scale < 0.0f || p->logit_cap > 0.0f;
    mlai_prefill_sm90a_params own = {
        .cu_seqlens_q = p->cu_seqlens_q.data,
        .cu_seqlens_kv = p->cu_seqlens_kv.data,
        .q = p->q.data,
        .k = p->k.data,
        .v = p->v.data,
        .out = p->out.data,
        .counters = head->prefill_counters,
        .q_token_stride = p->q.stride[0],
        .q_head_stride = p->q.stride[1],
        .k_token_stride = p->k.stride[0],
        .k_head_stride = p->k.stride[1],
        .v_token_stride = p->v.stride[0],
        .v_head_stride = p->v.stride[1],
        .out_token_stride = p->out.stride[0],
        .out_head_stride = p->out.stride[1],
        .batch = (int32_t)problem->batch,
        .q_heads = problem->num_heads,
        .kv_heads = problem->num_kv_heads,
        .total_q = (int32_t)p->q.shape[0],
        .total_kv = (int32_t)p->k.shape[0],
        .max_seqlen_q = p->max_seqlen_q,
        .max_seqlen_kv = p->max_seqlen_kv,
        .causal = p->is_causal,
        .softmax_scale = p->softmax_scale,
        .logit_cap = p->logit_cap,
    };
    if (mlai_present(&p->lse)) {
        own.lse = p->lse.data;
        own.lse_token_stride = p->lse.stride[0];
    }
    MLAI_TRY(set_maps(&own, p, is_short, device, diag));
    mlai_cuda_launch launch = {.grid = {(uint32_t)mlai_min_i64(device->sm_count, tiles), 1, 1},
                               .block = {MLAI_PREFILL_SM90A_THREADS, 1, 1},
                               .smem_bytes = MLAI_PREFILL_SM90A_SMEM_BYTES};
    if (is_short) {
        launch.cluster = cluster_of(problem, device);
        launch.grid[0] = launch.cluster * (uint32_t)problem->num_heads;
        launch.grid[1] = (uint32_t)problem->batch;
        launch.grid[2] = (uint32_t)short_tiles;
        launch.smem_bytes = MLAI_PREFILL_SHORT_SM90A_SMEM_BYTES;
    }
    CUkernel kernel;
    MLAI_TRY(mlai_cuda_kernel(device, is_short ? kernels->image_short : kernels->image,
                              is_short ? kernels->symbols_short[is_general]
                                       : kernels->symbols[is_general],
                              launch.smem_bytes, &kernel, diag));
    return mlai_cuda_run(exec, kernel, &launch, &own, diag);
}

/* ---- a table and two functions a format ------------------------------------------------------ */

#define DEFINE(stem, format, text)                                                                 \
    static const prefill_kernels kernels_##stem = {                                                \
        format,                                                                                    \
        "prefill_bf16_sm90a",                                                                      \
        "prefill_short_bf16_sm90a",                                                                \
        {"prefill_" #stem, "prefill_" #stem "_general"},                                           \
        {"prefill_short_" #stem, "prefill_short_" #stem "_general"}};                              \
    int32_t mlai_cuda_prefill_##stem##_accepts(const mla_problem *problem, char *why,              \
                                               uint64_t why_bytes)                                 \
    {                                                                                              \
        return accepts(&kernels_##stem, problem, why, why_bytes);                                  \
    }                                                                                              \
    mla_status mlai_cuda_prefill_##stem(const mla_exec *exec, const mla_problem *problem,          \
                                        const void *params, mla_diag *diag)                        \
    {                                                                                              \
        return run(&kernels_##stem, exec, problem, params, diag);                                  \
    }
MLAI_PREFILL_SM90A_LIST(DEFINE)
