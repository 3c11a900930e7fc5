/*
 * Launcher of the Hopper decode and extend kernels (kernels/decode_sm90a.h): one launch whatever
 * the batch. The host chooses from capacities alone the rows of a tile, how cache rows are loaded,
 * and who merges what:
 *
 *   persistent   a CTA a multiprocessor, cooperative; any problem
 *   cluster      16-bit caches, few row tiles on short contexts, where latency is all: a cluster a
 *                tile or several
 *
 *   tensor       pages of 8, 16, 32 or a multiple of 64 rows: the copy engine, by a map made here
 *   gather       any page size: 16-byte copies by threads
 *
 * Tiles of a request that has more rows than one go to neighbouring CTAs. Where the work is cut
 * depends on all lengths of the call, and so do a row's last bits.
 * Workspace: the head (counters) | partial outputs | their LSE. Called by: rows_cuda.c.
 */
#include "cuda/kernels/decode_sm90a.h"
#include "cuda/cuda.h"
#include "cuda/kernels/decode_fp8_sm90a.h"
#include "cuda/sm90a.h"

enum { MAX_CAPACITY = 1 << 30, TILE_SIZES = 4 };

typedef struct decode_kernels {
    int32_t q_format, kv_format;
    const char *image;
    const char *symbols[2][TILE_SIZES]; /* [gather][8, 16, 32, 64 rows]; NULL: none */
    const char *cluster_symbols[2][2];  /* [gather][8, 16 rows]; NULL: none */
} decode_kernels;

static bool is_byte_cache(int32_t kv_format)
{
    return mla_format_bytes(kv_format) == 1;
}

/* Bytes of a cache row. */
static int64_t row_bytes(int32_t kv_format)
{
    return kv_format == MLA_FORMAT_DS656 ? MLAI_DECODE_FP8_DS656_ROW_BYTES
           : is_byte_cache(kv_format)    ? MLAI_DECODE_FP8_ROW_BYTES
                                         : 2 * MLAI_DECODE_SM90A_QK_DIM;
}

/* ---- what it takes --------------------------------------------------------------------------- */

static int32_t accepts(const decode_kernels *kernels, const mla_problem *problem, char *why,
                       uint64_t why_bytes)
{
    const int32_t q = problem->q_format, kv = problem->kv_format, out = problem->out_format;
    if (q != kernels->q_format || kv != kernels->kv_format)
        MLAI_REFUSE("q %s and cache %s: it takes %s and %s", mla_format_name(q),
                    mla_format_name(kv), mla_format_name(kernels->q_format),
                    mla_format_name(kernels->kv_format));
    const int32_t own = q == MLA_FORMAT_E4M3 ? MLA_FORMAT_BF16 : q;
    if (out != own && out != MLA_FORMAT_F32)
        MLAI_REFUSE("out %s: it writes %s or f32", mla_format_name(out), mla_format_name(own));
    if (problem->kv_lora_rank != MLAI_DECODE_SM90A_V_DIM ||
        problem->kv_lora_rank + problem->qk_rope_head_dim != MLAI_DECODE_SM90A_QK_DIM)
        MLAI_REFUSE("kv_lora_rank %d and qk_rope_head_dim %d: it takes 512 and 64",
                    problem->kv_lora_rank, problem->qk_rope_head_dim);
    if (problem->has_mask)
        MLAI_REFUSE("a mask: it takes causal calls and calls that show all keys");
    if (problem->has_positions)
        MLAI_REFUSE("key positions other than the index: it takes whole sequences");
    if (problem->is_split_cache)
        MLAI_REFUSE("kv_cache_rope: it takes latent and rope in one row");
    if (problem->layout & MLA_LAYOUT_SPLIT_QUERY)
        MLAI_REFUSE("q_rope: it takes both parts of q in one row");
    if (problem->layout & MLA_LAYOUT_GAPPED_BATCH)
        MLAI_REFUSE("requests of q, out or lse do not follow each other at q_len token strides");
    if (problem->layout & MLA_LAYOUT_UNALIGNED)
        MLAI_REFUSE("a base or stride of q, kv_cache or out is no multiple of 16 bytes");
    return 1;
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static int64_t capacity_of(const mla_problem *problem)
{
    return mlai_min_i64(problem->max_kv_len, MAX_CAPACITY);
}

static uint32_t grid_of(const mla_exec *exec)
{
    const mlai_cuda_device *device = exec->device;
    return (uint32_t)mlai_min_i64(device->sm_count, MLAI_CUDA_MAX_COUNTERS);
}

/* No less than the tile rows of any kernel that a call at or below this problem may get. */
static int64_t most_rows(const mla_problem *problem)
{
    const int64_t rows = problem->max_q_len * problem->num_heads;
    return rows <= 8 ? 8 : rows <= 16 ? 16 : 64;
}

uint64_t mlai_cuda_decode_sm90a_bytes(const mla_problem *problem, const mla_exec *exec)
{
    const int64_t grid = grid_of(exec), rows = most_rows(problem);
    return MLA_CUDA_WORKSPACE_HEAD_BYTES +
           sizeof(float) * (uint64_t)(MLAI_DECODE_SM90A_PARTIAL_FLOATS(grid, rows) +
                                      MLAI_DECODE_SM90A_LSE_FLOATS(grid, rows));
}

typedef struct decode_plan {
    int32_t rows; /* of a tile */
    int32_t share, item_cost;
    bool fits; /* 31-bit counts hold the call */
} decode_plan;

static decode_plan plan_of(const mla_problem *problem, const mla_exec *exec)
{
    const int64_t request_rows = problem->max_q_len * problem->num_heads;
    const int64_t blocks = mlai_ceil_div(capacity_of(problem), MLAI_DECODE_SM90A_KEYS);
    decode_plan plan = {.fits = problem->batch <= INT32_MAX && problem->tokens <= INT32_MAX &&
                                request_rows <= INT32_MAX};
    if (!plan.fits)
        return plan;
    const int32_t sms = (int32_t)grid_of(exec);
    plan.rows =
        is_byte_cache(problem->kv_format)
            ? mlai_decode_fp8_rows((int32_t)problem->batch, request_rows, capacity_of(problem), sms,
                                   problem->q_format == MLA_FORMAT_E4M3)
            : mlai_decode_sm90a_rows((int32_t)problem->batch, request_rows, capacity_of(problem),
                                     sms);
    plan.share = (int32_t)mlai_min_i64(mlai_decode_sm90a_share(request_rows, plan.rows), sms);
    plan.item_cost = is_byte_cache(problem->kv_format) ? 1 : mlai_decode_sm90a_item_cost(plan.rows);
    const int64_t tiles = problem->batch + problem->tokens * problem->num_heads / plan.rows;
    int64_t line;
    plan.fits = !__builtin_mul_overflow(tiles, plan.item_cost + blocks, &line) && line <= INT32_MAX;
    return plan;
}

/* One launch, then bytes at 4 TB/s or products at 620 TFLOP/s. */
double mlai_cuda_decode_sm90a_cost_us(const mla_problem *problem, const mla_exec *exec)
{
    if (!plan_of(problem, exec).fits)
        return MLAI_TOO_LARGE_US;
    const double keys = (double)problem->max_kv_len;
    const double bytes = (double)problem->batch * keys * (double)row_bytes(problem->kv_format);
    const double flops = 2.0 * (double)problem->tokens * problem->num_heads * keys *
                         (MLAI_DECODE_SM90A_QK_DIM + MLAI_DECODE_SM90A_V_DIM);
    return 12.0 + (bytes / 4e6 > flops / 6.2e8 ? bytes / 4e6 : flops / 6.2e8);
}

/* ---- the kernel's struct --------------------------------------------------------------------- */

/* The stride from one query token to the next over all requests. */
static int64_t token_stride(const mla_tensor *t, bool is_ragged)
{
    return is_ragged || t->shape[1] == 1 ? t->stride[0] : t->stride[1];
}

static int64_t head_stride(const mla_tensor *t, bool is_ragged)
{
    return t->stride[is_ragged ? 1 : 2];
}

static void set_operands(mlai_decode_sm90a_params *own, const mla_decode_params *p, bool is_ragged)
{
    own->q = p->q.data;
    own->q_token_stride = token_stride(&p->q, is_ragged);
    own->q_head_stride = head_stride(&p->q, is_ragged);
    own->out = p->out.data;
    own->out_token_stride = token_stride(&p->out, is_ragged);
    own->out_head_stride = head_stride(&p->out, is_ragged);
    own->out_f32 = p->out.format == MLA_FORMAT_F32;
    if (mlai_present(&p->lse)) {
        own->lse = p->lse.data;
        own->lse_token_stride = token_stride(&p->lse, is_ragged);
    }
}

static void set_lengths(mlai_decode_sm90a_params *own, const mla_decode_params *p,
                        const mla_problem *problem)
{
    own->page_table = p->page_table.data;
    own->table_stride = p->page_table.stride[0];
    own->seqlens = p->cache_seqlens.data;
    own->cu_seqlens_q = problem->is_ragged ? p->cu_seqlens_q.data : NULL;
    own->batch = (int32_t)problem->batch;
    own->tokens = (int32_t)problem->tokens;
    own->q_len = p->max_q_len;
    own->causal = p->is_causal;
    own->explicit_offset = p->seqlen_offset != MLA_SEQLEN_OFFSET_VERIFY;
    own->seqlen_offset = own->explicit_offset ? p->seqlen_offset : 0;
}

/* Fills in the cache; true where it needs the gather kernels. */
static bool set_cache(mlai_decode_sm90a_params *own, const mla_decode_params *p,
                      const mla_problem *problem)
{
    const mla_tensor *kv = &p->kv_cache;
    const int64_t size = kv->shape[1];
    own->kv = kv->data;
    own->kv_row_stride = size > 1 ? kv->stride[1] : kv->shape[2];
    own->kv_page_stride = kv->shape[0] > 1 ? kv->stride[0] : size * own->kv_row_stride;
    own->pages = (int32_t)mlai_min_i64(kv->shape[0], INT32_MAX);
    own->page_size = (int32_t)mlai_min_i64(size, MAX_CAPACITY);
    own->by_page_size = mlai_decode_sm90a_divide_by(own->page_size);
    own->capacity = own->pages > 0 ? (int32_t)capacity_of(problem) : 0;
    own->box_rows = (int32_t)mlai_min_i64(size, MLAI_DECODE_SM90A_KEYS);
    const bool whole_boxes = size == 8 || size == 16 || size == 32 || size % 64 == 0;
    return !whole_boxes || own->pages == 0 || size > MAX_CAPACITY;
}

/* Boxes are 128 bytes wide, a line of the swizzle. */
static mla_status set_map(mlai_decode_sm90a_params *own, const mla_tensor *kv,
                          const mlai_cuda_device *device, mla_diag *diag)
{
    const cuuint64_t bytes = (cuuint64_t)mla_format_bytes(kv->format);
    const cuuint64_t dims[3] = {(cuuint64_t)kv->shape[2], (cuuint64_t)own->page_size,
                                (cuuint64_t)own->pages};
    const cuuint64_t strides[2] = {bytes * (cuuint64_t)own->kv_row_stride,
                                   bytes * (cuuint64_t)own->kv_page_stride};
    const cuuint32_t box[3] = {(cuuint32_t)(128 / bytes), (cuuint32_t)own->box_rows, 1},
                     steps[3] = {1, 1, 1};
    const CUresult result = device->cuda->api.cuTensorMapEncodeTiled(
        (CUtensorMap *)&own->kv_map,
        bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
        (void *)own->kv, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return mlai_fail(diag, MLA_ERROR_DEVICE,
                         "kv_cache at %p with page_size %d gave no tensor map: %s", own->kv,
                         own->page_size, mlai_cuda_error_name(device->cuda, result));
    return MLA_OK;
}

/* ---- clusters -------------------------------------------------------------------------------- */

/* CTAs of the cluster, 0 = the persistent kernel; clusters that the device holds at a time. */
typedef struct cluster_plan {
    CUkernel kernel;
    int32_t size, count, rows;
} cluster_plan;

enum { MAX_CLUSTER_REQUESTS = 32, FEW_BLOCKS = 4, MANY_BLOCKS = 12 };

/*
 * The largest cluster of which there are enough for all row tiles, where a CTA of it gets up to
 * FEW_BLOCKS blocks of keys; or up to MANY_BLOCKS, where these are requests of one tile each and
 * their clusters fill seven tenths of the device, which saturate its memory (with more blocks,
 * requests of different lengths would lose more than equal ones gain). A tile by itself has all
 * clusters, and then they are never slower (docs/kernels/decode_bf16_sm90a.md has the figures).
 */
static mla_status plan_clusters(const decode_kernels *kernels, const mla_problem *problem,
                                mlai_cuda_device *device, bool gathers, cluster_plan *plan,
                                mla_diag *diag)
{
    static const int32_t SIZES[MLAI_CUDA_CLUSTER_SIZES] = MLAI_CUDA_CLUSTER_SIZE_LIST;
    const int64_t request_rows = problem->max_q_len * problem->num_heads;
    const int64_t blocks = mlai_ceil_div(capacity_of(problem), MLAI_DECODE_SM90A_KEYS);
    *plan = (cluster_plan){0};
    if (kernels->cluster_symbols[0][0] == NULL || problem->batch > MAX_CLUSTER_REQUESTS)
        return MLA_OK;
    const bool is_single = problem->batch == 1 && request_rows <= 16;
    const int32_t rows = request_rows <= 8 || (is_single && blocks <= 64) ? 8 : 16;
    const int64_t tiles = problem->batch * mlai_ceil_div(request_rows, rows);
    for (int32_t i = 0; i < MLAI_CUDA_CLUSTER_SIZES; i++) {
        const uint32_t smem =
            MLAI_DECODE_SM90A_CLUSTER_SMEM_BYTES((uint32_t)rows, (uint32_t)SIZES[i]);
        CUkernel kernel;
        int32_t count;
        MLAI_TRY(mlai_cuda_kernel(device, kernels->image,
                                  kernels->cluster_symbols[gathers][rows == 16], smem, &kernel,
                                  diag));
        MLAI_TRY(mlai_cuda_clusters(device, kernel, i, MLAI_DECODE_SM90A_THREADS(rows), smem,
                                    &count, diag));
        if (tiles > count)
            continue;
        const int64_t ctas = SIZES[i] * (count / tiles), each = mlai_ceil_div(blocks, ctas);
        const bool fills =
            !gathers && tiles == problem->batch && 10 * ctas * tiles >= 7 * device->sm_count;
        if (is_single || each <= (fills ? MANY_BLOCKS : FEW_BLOCKS))
            *plan = (cluster_plan){kernel, SIZES[i], count, rows};
        break;
    }
    return MLA_OK;
}

static mla_status run_clusters(const mla_exec *exec, const mla_problem *problem,
                               const cluster_plan *plan, mlai_decode_sm90a_params *own,
                               mla_diag *diag)
{
    const int64_t request_rows = problem->max_q_len * problem->num_heads;
    own->request_tiles = (int32_t)mlai_ceil_div(request_rows, plan->rows);
    const int32_t tiles = own->request_tiles * own->batch;
    const int32_t spare = plan->count - tiles;
    own->even_clusters = own->batch == 1 ? plan->count / tiles : 4 * spare < tiles ? 1 : 0;
    own->by_request_tiles = mlai_decode_sm90a_divide_by(own->request_tiles);
    own->by_cluster = mlai_decode_sm90a_divide_by(plan->size);
    const int32_t clusters = own->even_clusters > 0 ? tiles * own->even_clusters : plan->count;
    const mlai_cuda_launch launch = {.grid = {(uint32_t)(clusters * plan->size), 1, 1},
                                     .block = {MLAI_DECODE_SM90A_THREADS(plan->rows), 1, 1},
                                     .cluster = (uint32_t)plan->size,
                                     .smem_bytes = MLAI_DECODE_SM90A_CLUSTER_SMEM_BYTES(
                                         (uint32_t)plan->rows, (uint32_t)plan->size)};
    return mlai_cuda_run(exec, plan->kernel, &launch, own, diag);
}

static mla_status run(const decode_kernels *kernels, const mla_exec *exec,
                      const mla_problem *problem, const void *params, mla_diag *diag)
{
    const mla_decode_params *p = params;
    mlai_cuda_device *device = exec->device;
    const decode_plan plan = plan_of(problem, exec);
    if (!plan.fits)
        return mlai_fail(
            diag, MLA_ERROR_CAPACITY,
            "%lld query tokens of %d heads on up to %lld keys are more than the Hopper "
            "kernels count; lower max_seqlen_kv, split the call or unforce the row",
            (long long)problem->tokens, problem->num_heads, (long long)problem->max_kv_len);
    if (problem->batch == 0)
        return MLA_OK;
    const uint32_t grid = grid_of(exec);
    char *scratch = (char *)exec->workspace + MLA_CUDA_WORKSPACE_HEAD_BYTES;
    mlai_cuda_workspace_head *head = exec->workspace;
    mlai_decode_sm90a_params own = {
        .partial = (float *)scratch,
        .partial_lse = (float *)scratch + MLAI_DECODE_SM90A_PARTIAL_FLOATS(grid, plan.rows),
        .counters = head->decode_counters,
        .kv_policy = MLAI_DECODE_SM90A_L2_EVICT_FIRST,
        .heads = problem->num_heads,
        .by_heads = mlai_decode_sm90a_divide_by(problem->num_heads),
        .by_stretches = mlai_decode_sm90a_divide_by((int32_t)grid / plan.share),
        .share = plan.share,
        .item_cost = plan.item_cost,
        .softmax_scale = p->softmax_scale,
        .logit_cap = p->logit_cap,
        .k_scale = p->k_scale,
    };
    set_operands(&own, p, problem->is_ragged);
    set_lengths(&own, p, problem);
    const bool gathers = set_cache(&own, p, problem);
    if (!gathers)
        MLAI_TRY(set_map(&own, &p->kv_cache, device, diag));
    cluster_plan clusters;
    MLAI_TRY(plan_clusters(kernels, problem, device, gathers, &clusters, diag));
    if (clusters.size > 0)
        return run_clusters(exec, problem, &clusters, &own, diag);
    const int32_t size = plan.rows == 8 ? 0 : plan.rows == 16 ? 1 : plan.rows == 32 ? 2 : 3;
    mlai_cuda_launch launch = {.grid = {grid, 1, 1},
                               .block = {MLAI_DECODE_SM90A_THREADS(plan.rows), 1, 1},
                               .smem_bytes = MLAI_DECODE_SM90A_SMEM_BYTES((uint32_t)plan.rows),
                               .cooperative = true};
    if (is_byte_cache(kernels->kv_format)) {
        const bool is_ds656 = kernels->kv_format == MLA_FORMAT_DS656;
        launch.block[0] = MLAI_DECODE_FP8_THREADS;
        launch.smem_bytes = MLAI_DECODE_FP8_SMEM_BYTES((uint32_t)plan.rows, is_ds656);
    }
    CUkernel kernel;
    MLAI_TRY(mlai_cuda_kernel(device, kernels->image, kernels->symbols[gathers][size],
                              launch.smem_bytes, &kernel, diag));
    return mlai_cuda_run(exec, kernel, &launch, &own, diag);
}

/* ---- a table and two functions a pair of formats --------------------------------------------- */

#define SYMBOLS_TO_32(stem, suffix)                                                                \
    "decode_" #stem "_r8" suffix, "decode_" #stem "_r16" suffix, "decode_" #stem "_r32" suffix
#define SYMBOLS_TO_64(stem, suffix) SYMBOLS_TO_32(stem, suffix), "decode_" #stem "_r64" suffix
#define SYMBOLS_16_BITS(stem, suffix)                                                              \
    "decode_" #stem "_r8" suffix, "decode_" #stem "_r16" suffix, NULL, "decode_" #stem "_r64" suffix
#define CLUSTER_SYMBOLS(stem, suffix)                                                              \
    "decode_" #stem "_cluster_r8" suffix, "decode_" #stem "_cluster_r16" suffix

/* What the kernels of a stem come in. */
#define KERNELS_CLUSTERS(stem)                                                                     \
    .symbols = {{SYMBOLS_16_BITS(stem, "")}, {SYMBOLS_16_BITS(stem, "_gather")}},                  \
    .cluster_symbols = {{CLUSTER_SYMBOLS(stem, "")}, {CLUSTER_SYMBOLS(stem, "_gather")}}
#define KERNELS_TO_64(stem) .symbols = {{SYMBOLS_TO_64(stem, "")}, {SYMBOLS_TO_64(stem, "_gather")}}
#define KERNELS_TO_32(stem) .symbols = {{SYMBOLS_TO_32(stem, "")}, {SYMBOLS_TO_32(stem, "_gather")}}

#define DEFINE(stem, q, kv, kinds, text)                                                           \
    static const decode_kernels kernels_##stem = {                                                 \
        .q_format = q, .kv_format = kv, .image = "decode_" #stem, KERNELS_##kinds(stem)};          \
    int32_t mlai_cuda_decode_##stem##_accepts(const mla_problem *problem, char *why,               \
                                              uint64_t why_bytes)                                  \
    {                                                                                              \
        return accepts(&kernels_##stem, problem, why, why_bytes);                                  \
    }                                                                                              \
    mla_status mlai_cuda_decode_##stem(const mla_exec *exec, const mla_problem *problem,           \
                                       const void *params, mla_diag *diag)                         \
    {                                                                                              \
        return run(&kernels_##stem, exec, problem, params, diag);                                  \
    }
MLAI_DECODE_SM90A_LIST(DEFINE)
