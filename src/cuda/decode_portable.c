/*
 * Launcher of the portable decode and extend kernels (kernels/decode_portable.cu): which kernel,
 * how much shared memory, how many launches: one, unless the capacity holds more partial results
 * than WINDOW_BYTES. Where a row may have several pieces the launch is cooperative: its blocks wait
 * for each other's zeroing of the counters.
 *
 *   wide    64 rows: more than 16 rows a request or ragged queries, where shared memory has room
 *   narrow  16 rows: all else in 16 bits, and ds656, whose scales it applies after the products
 *   f32     f32 operands; q and cache of different 16-bit formats; f16 queries on ds656
 *
 * The choice depends on the call's formats, dims and own q_len and on the device, so a request has
 * the same bits whatever its batch. Workspace: the head, of which two words are the grid's barrier
 * | counters | partial results.
 */
#include "cuda/kernels/decode_portable.h"
#include "cuda/cuda.h"
#include "cuda/portable.h"

enum { WINDOW_BYTES = 256 << 20, MAX_CAPACITY = 1 << 30 };

typedef struct decode_plan {
    const char *kernel;
    int32_t block_rows;
    int32_t stages;
    int32_t blocks_per_sm;
    int32_t latent_pad, rope_pad, row_stride;
    int32_t o_stride;
    uint32_t smem_bytes;
    int64_t slot_floats;
    int64_t window_items;
} decode_plan;

static bool is_fp8(int32_t format)
{
    return format == MLA_FORMAT_E4M3 || format == MLA_FORMAT_E5M2;
}

/* The 16-bit format that holds queries and cache exactly, or f32. fp8 codes are exact in both. */
static int32_t compute_format(const mla_problem *problem)
{
    const int32_t q = problem->q_format, kv = problem->kv_format;
    if (q == MLA_FORMAT_F32 || kv == MLA_FORMAT_F32)
        return MLA_FORMAT_F32;
    if (kv == MLA_FORMAT_DS656)
        return q == MLA_FORMAT_F16 ? MLA_FORMAT_F32 : MLA_FORMAT_BF16;
    if (is_fp8(q))
        return is_fp8(kv) ? MLA_FORMAT_BF16 : kv;
    return is_fp8(kv) || q == kv ? q : MLA_FORMAT_F32;
}

static void plan_f32(decode_plan *plan, const mla_problem *problem)
{
    plan->kernel = "mla_decode_f32";
    plan->block_rows = MLAI_DECODE_F32_ROWS;
    plan->stages = 1;
    plan->blocks_per_sm = 2;
    plan->latent_pad = (int32_t)mlai_align_up((uint64_t)problem->kv_lora_rank, 4);
    plan->rope_pad = (int32_t)mlai_align_up((uint64_t)problem->qk_rope_head_dim, 4);
    plan->row_stride = plan->latent_pad + plan->rope_pad + 4;
    plan->smem_bytes =
        (uint32_t)(MLAI_DECODE_F32_ROWS + MLAI_DECODE_F32_KEYS) * 4 * (uint32_t)plan->row_stride +
        MLAI_DECODE_F32_SCRATCH_BYTES + MLAI_DECODE_TAIL_BYTES;
}

/* Rows of keys and queries in shared memory are multiples of 64 values: see mma_portable.cuh. */
static void plan_16_bit(decode_plan *plan, const mla_problem *problem, bool is_bf16,
                        uint32_t device_bytes)
{
    plan->latent_pad = (int32_t)mlai_align_up((uint64_t)problem->kv_lora_rank, 16);
    plan->rope_pad = (int32_t)mlai_align_up((uint64_t)problem->qk_rope_head_dim, 16);
    plan->row_stride = (int32_t)mlai_align_up((uint64_t)(plan->latent_pad + plan->rope_pad), 64);
    const uint32_t row_bytes = 2 * (uint32_t)plan->row_stride;
    const bool many_rows =
        problem->is_ragged || problem->max_q_len * problem->num_heads > MLAI_DECODE_NARROW_ROWS;
    for (int32_t stages = 2; stages > 0 && many_rows; stages--) {
        const uint32_t bytes =
            (MLAI_DECODE_WIDE_ROWS + (uint32_t)stages * MLAI_DECODE_WIDE_KEYS) * row_bytes +
            MLAI_DECODE_WIDE_SCRATCH_BYTES + MLAI_DECODE_TAIL_BYTES;
        if (bytes > device_bytes || problem->kv_format == MLA_FORMAT_DS656)
            continue;
        plan->kernel = is_bf16 ? "mla_decode_wide_bf16" : "mla_decode_wide_f16";
        plan->block_rows = MLAI_DECODE_WIDE_ROWS;
        plan->stages = stages;
        plan->blocks_per_sm = 1;
        plan->smem_bytes = bytes;
        return;
    }
    plan->kernel = is_bf16 ? "mla_decode_narrow_bf16" : "mla_decode_narrow_f16";
    plan->block_rows = MLAI_DECODE_NARROW_ROWS;
    plan->stages = 2;
    plan->blocks_per_sm = 2;
    plan->smem_bytes = 2 * MLAI_DECODE_NARROW_KEYS * row_bytes + MLAI_DECODE_NARROW_SCRATCH_BYTES +
                       MLAI_DECODE_TAIL_BYTES;
}

static decode_plan plan_of(const mla_problem *problem, const mla_exec *exec)
{
    const mlai_cuda_device *device = exec->device;
    const int32_t format = compute_format(problem);
    decode_plan plan = {0};
    if (format == MLA_FORMAT_F32)
        plan_f32(&plan, problem);
    else
        plan_16_bit(&plan, problem, format == MLA_FORMAT_BF16,
                    device ? (uint32_t)device->smem_bytes : 0);
    /* Where blocks are large, fewer are resident: shared memory of a multiprocessor is what a block
     * may have and 1 KiB for each block. */
    const int32_t block_bytes = (int32_t)plan.smem_bytes + 1024;
    if (device && plan.blocks_per_sm * block_bytes > device->smem_bytes + 1024)
        plan.blocks_per_sm = 1;
    plan.o_stride = (int32_t)mlai_align_up((uint64_t)problem->kv_lora_rank, 4);
    plan.slot_floats = (int64_t)plan.block_rows * (plan.o_stride + 2);
    plan.window_items = WINDOW_BYTES / (plan.slot_floats * (int64_t)sizeof(float));
    return plan;
}

static int64_t capacity_of(const mla_problem *problem)
{
    return mlai_min_i64(problem->max_kv_len, MAX_CAPACITY);
}

/* Pieces that a block may have: the most of any length up to the capacity, since longer requests
 * have longer pieces. */
static int64_t max_splits_of(const mla_problem *problem, const decode_plan *plan)
{
    const int64_t capacity = capacity_of(problem);
    const int64_t lengths[] = {MLAI_SPLIT_SHORT_TO, MLAI_SPLIT_MIDDLE_TO_WIDE, MLAI_SPLIT_MIDDLE_TO,
                               capacity};
    int64_t most = 1;
    for (int32_t i = 0; i < 4; i++) {
        const int64_t length = mlai_min_i64(lengths[i], capacity);
        const int32_t keys = mlai_split_keys(plan->block_rows, length);
        most = mlai_max_i64(most, mlai_split_count(length, keys));
    }
    return most;
}

/* Blocks of rows that the call may have, times the splits each may have; saturates. */
static int64_t items_of(const mla_problem *problem, const decode_plan *plan)
{
    const int64_t most = INT64_MAX / 4;
    int64_t rows, blocks, items;
    if (__builtin_mul_overflow(mlai_max_i64(problem->max_q_len, 1), problem->num_heads, &rows) ||
        __builtin_mul_overflow(problem->batch, mlai_ceil_div(rows, plan->block_rows), &blocks))
        return most;
    int64_t all_rows;
    if (problem->is_ragged &&
        !__builtin_mul_overflow(problem->tokens, problem->num_heads, &all_rows))
        blocks = mlai_min_i64(blocks, all_rows / plan->block_rows + problem->batch);
    const int64_t splits = max_splits_of(problem, plan);
    return __builtin_mul_overflow(blocks, splits, &items) ? most : mlai_min_i64(items, most);
}

/* Slots of partial results that a launch may fill; none where every block has one piece. */
static int64_t slots_of(const mla_problem *problem, const decode_plan *plan)
{
    const int64_t splits = max_splits_of(problem, plan);
    if (splits == 1)
        return 0;
    return mlai_min_i64(items_of(problem, plan), plan->window_items + splits);
}

static uint64_t counters_bytes(int64_t slots)
{
    return slots > 0 ? mlai_align_up((uint64_t)(slots + 1) * sizeof(uint32_t), 256) : 0;
}

static uint64_t bytes_of(const mla_problem *problem, const mlai_cuda_device *device)
{
    const mla_exec exec = {.struct_size = sizeof exec, .device = (void *)(uintptr_t)device};
    const decode_plan plan = plan_of(problem, &exec);
    const int64_t slots = slots_of(problem, &plan);
    return MLA_CUDA_WORKSPACE_HEAD_BYTES + counters_bytes(slots) +
           (uint64_t)slots * (uint64_t)plan.slot_floats * sizeof(float);
}

/* Calls of fewer tokens a request may go to the narrow kernel, whose pieces are shorter. */
uint64_t mlai_cuda_decode_bytes(const mla_problem *problem, const mla_exec *exec)
{
    const uint64_t own = bytes_of(problem, exec->device);
    mla_problem fewer = *problem;
    fewer.max_q_len = MLAI_DECODE_NARROW_ROWS / mlai_max_i64(problem->num_heads, 1);
    if (problem->is_ragged || fewer.max_q_len < 1 || fewer.max_q_len >= problem->max_q_len)
        return own;
    const uint64_t narrow = bytes_of(&fewer, exec->device);
    return own > narrow ? own : narrow;
}

int32_t mlai_cuda_decode_accepts(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    const int64_t width = (int64_t)problem->kv_lora_rank + problem->qk_rope_head_dim;
    if (problem->kv_lora_rank > MLAI_DECODE_MAX_R && why)
        mlai_append(why, why_bytes, "kv_lora_rank %d: it takes up to %d", problem->kv_lora_rank,
                    MLAI_DECODE_MAX_R);
    else if (width > MLAI_DECODE_MAX_D && why)
        mlai_append(why, why_bytes, "kv_lora_rank + qk_rope_head_dim is %lld: it takes up to %d",
                    (long long)width, MLAI_DECODE_MAX_D);
    return problem->kv_lora_rank <= MLAI_DECODE_MAX_R && width <= MLAI_DECODE_MAX_D;
}

/* A launch, then bytes at 1.8 TB/s or products at 250 TFLOP/s (f32: 12). */
double mlai_cuda_decode_cost_us(const mla_problem *problem, const mla_exec *exec)
{
    (void)exec;
    const double width = problem->kv_lora_rank + problem->qk_rope_head_dim;
    const double keys = (double)problem->max_kv_len;
    const double bytes =
        (double)problem->batch * keys * width * mla_format_bytes(problem->kv_format);
    const double flops =
        2.0 * (double)problem->tokens * problem->num_heads * keys * (width + problem->kv_lora_rank);
    const double rate = compute_format(problem) == MLA_FORMAT_F32 ? 1.2e7 : 2.5e8;
    return 14.0 + (bytes / 1.8e6 > flops / rate ? bytes / 1.8e6 : flops / rate);
}

/* ---- the kernel's struct --------------------------------------------------------------------- */

/* `head_dim` is the dimension of heads: 2 of [B, q_len, H, ..], 1 of [T, H, ..]. */
static mlai_decode_rows rows_of(const mla_tensor *t, bool is_ragged)
{
    mlai_decode_rows rows = {0};
    if (!mlai_present(t))
        return rows;
    rows.data = t->data;
    rows.request_stride = is_ragged ? 0 : t->stride[0];
    rows.token_stride = t->stride[is_ragged ? 0 : 1];
    rows.head_stride = t->stride[is_ragged ? 1 : 2];
    return rows;
}

static void set_operands(mlai_decode_portable_params *own, const mla_decode_params *p,
                         bool is_ragged)
{
    const int64_t q_bytes = mla_format_bytes(p->q.format), r = p->kv_lora_rank;
    own->q = rows_of(&p->q, is_ragged);
    own->q_rope = rows_of(mlai_present(&p->q_rope) ? &p->q_rope : &p->q, is_ragged);
    if (!mlai_present(&p->q_rope))
        own->q_rope.data += r * q_bytes;
    own->out = rows_of(&p->out, is_ragged);
    own->lse = rows_of(&p->lse, is_ragged);
    const bool is_even = p->kv_lora_rank % 8 == 0 && p->qk_rope_head_dim % 8 == 0;
    own->q_wide = is_even && mlai_cuda_is_aligned(&p->q, 16) &&
                  mlai_cuda_is_aligned(&p->q_rope, 16) &&
                  (mlai_present(&p->q_rope) || r * q_bytes % 16 == 0);
    own->out_wide = mlai_cuda_is_aligned(&p->out, 16);
}

static void set_cache(mlai_decode_portable_params *own, const mla_decode_params *p)
{
    const mla_tensor *kv = &p->kv_cache, *rope = &p->kv_cache_rope;
    const int64_t bytes = mla_format_bytes(kv->format);
    const int64_t rope_at = kv->format == MLA_FORMAT_DS656 ? 528 : p->kv_lora_rank * bytes;
    own->latent = kv->data;
    own->page_bytes = own->rope_page_bytes = kv->stride[0] * bytes;
    own->row_bytes = own->rope_row_bytes = kv->stride[1] * bytes;
    own->rope = own->latent + rope_at;
    if (mlai_present(rope)) {
        own->rope = rope->data;
        own->rope_page_bytes = rope->stride[0] * bytes;
        own->rope_row_bytes = rope->stride[1] * bytes;
    }
    own->kv_wide = p->kv_lora_rank % 8 == 0 && p->qk_rope_head_dim % 8 == 0 &&
                   mlai_cuda_is_aligned(kv, 16) && mlai_cuda_is_aligned(rope, 16) &&
                   (mlai_present(rope) || rope_at % 16 == 0);
    own->pages = (int32_t)mlai_min_i64(kv->shape[0], INT32_MAX);
    own->page_size = (int32_t)mlai_min_i64(kv->shape[1], INT32_MAX);
}

static void set_lengths(mlai_decode_portable_params *own, const mla_decode_params *p,
                        const mla_problem *problem)
{
    own->page_table = p->page_table.data;
    own->table_stride = p->page_table.stride[0];
    own->seqlens = p->cache_seqlens.data;
    own->seqlens_stride = p->cache_seqlens.stride[0];
    own->has_positions = problem->has_positions;
    own->position_first = p->key_position_first;
    own->position_stride = p->key_position_stride;
    if (mlai_present(&p->global_seqlens)) {
        own->global_seqlens = p->global_seqlens.data;
        own->global_stride = p->global_seqlens.stride[0];
    }
    if (problem->is_ragged) {
        own->cu_seqlens_q = p->cu_seqlens_q.data;
        own->cu_stride = p->cu_seqlens_q.stride[0];
    }
    if (mlai_present(&p->mask)) {
        own->mask = p->mask.data;
        own->mask_stride = p->mask.stride[0];
    }
    own->batch = problem->batch;
    own->tokens = problem->tokens;
    own->capacity = own->pages > 0 ? (int32_t)capacity_of(problem) : 0;
    own->q_len = own->max_q_len = p->max_q_len;
    own->is_causal = p->is_causal;
    own->has_offset = p->seqlen_offset != MLA_SEQLEN_OFFSET_VERIFY;
    own->seqlen_offset = own->has_offset ? p->seqlen_offset : 0;
}

static mlai_decode_portable_params params_of(const mla_decode_params *p, const mla_problem *problem,
                                             const decode_plan *plan, void *workspace)
{
    char *scratch = (char *)workspace + MLA_CUDA_WORKSPACE_HEAD_BYTES;
    const int64_t slots = slots_of(problem, plan);
    mlai_decode_portable_params own = {
        .partial = (float *)(scratch + counters_bytes(slots)),
        .counters = slots > 0 ? (uint32_t *)scratch : NULL,
        .barrier = ((mlai_cuda_workspace_head *)workspace)->portable_barrier,
        .slot_floats = plan->slot_floats,
        .n_slots = slots,
        .max_splits = max_splits_of(problem, plan),
        .window_items = plan->window_items,
        .heads = problem->num_heads,
        .block_rows = plan->block_rows,
        .n_latent = p->kv_lora_rank,
        .n_rope = p->qk_rope_head_dim,
        .q_format = problem->q_format,
        .kv_format = problem->kv_format,
        .out_format = problem->out_format,
        .o_stride = plan->o_stride,
        .latent_pad = plan->latent_pad,
        .rope_pad = plan->rope_pad,
        .row_stride = plan->row_stride,
        .stages = plan->stages,
        .scale = p->softmax_scale * p->k_scale,
        .logit_cap = p->logit_cap,
        .scale_by_cap = p->logit_cap > 0.0f ? p->softmax_scale * p->k_scale / p->logit_cap : 0.0f,
        .out_scale = p->k_scale,
    };
    set_operands(&own, p, problem->is_ragged);
    set_cache(&own, p);
    set_lengths(&own, p, problem);
    return own;
}

/* The usual dims over a cache of the products' own format have kernels that know all offsets. */
static const char *kernel_of(const decode_plan *plan, const mlai_decode_portable_params *own)
{
    const bool is_fixed = own->n_latent == 512 && own->n_rope == 64 && own->kv_wide;
    if (is_fixed && plan->block_rows == MLAI_DECODE_WIDE_ROWS && own->kv_format == MLA_FORMAT_BF16)
        return "mla_decode_fixed_bf16";
    if (is_fixed && plan->block_rows == MLAI_DECODE_WIDE_ROWS && own->kv_format == MLA_FORMAT_F16)
        return "mla_decode_fixed_f16";
    return plan->kernel;
}

mla_status mlai_cuda_decode(const mla_exec *exec, const mla_problem *problem, const void *params,
                            mla_diag *diag)
{
    mlai_cuda_device *device = exec->device;
    const decode_plan plan = plan_of(problem, exec);
    CUkernel kernel;
    if (problem->batch == 0)
        return MLA_OK;
    mlai_decode_portable_params own = params_of(params, problem, &plan, exec->workspace);
    MLAI_TRY(mlai_cuda_kernel(device, "decode_portable", kernel_of(&plan, &own), plan.smem_bytes,
                              &kernel, diag));
    const int64_t items = items_of(problem, &plan),
                  windows = mlai_ceil_div(items, plan.window_items);
    const int64_t resident = (int64_t)device->sm_count * plan.blocks_per_sm;
    const mlai_cuda_launch launch = {.grid = {(uint32_t)mlai_min_i64(items, resident), 1, 1},
                                     .block = {MLAI_DECODE_THREADS, 1, 1},
                                     .smem_bytes = plan.smem_bytes,
                                     .cooperative = own.counters != NULL};
    for (own.window = 0; own.window < windows; own.window++)
        MLAI_TRY(mlai_cuda_run(exec, kernel, &launch, &own, diag));
    return MLA_OK;
}
