/*
 * Launcher of the portable prefill kernels (kernels/prefill_portable.cu): the kernel of the
 * smallest dims that hold L and V; f32 operands, q and k of different 16-bit formats and dims over
 * 256 go to the f32 kernel. One launch, a block an item where the grid allows it. No workspace.
 */
#include "cuda/kernels/prefill_portable.h"
#include "cuda/cuda.h"
#include "cuda/portable.h"

enum { MAX_GRID = 1 << 30 };

typedef struct prefill_plan {
    const char *kernel;
    int32_t rows, threads;
    uint32_t smem_bytes;
} prefill_plan;

static bool is_fp8(int32_t format)
{
    return format == MLA_FORMAT_E4M3 || format == MLA_FORMAT_E5M2;
}

/* The 16-bit format that holds q, k and v exactly, or f32. fp8 codes are exact in both. */
static int32_t compute_format(const mla_problem *problem)
{
    const int32_t q = problem->q_format, kv = problem->kv_format;
    if (q == MLA_FORMAT_F32 || kv == MLA_FORMAT_F32 ||
        problem->qk_head_dim > MLAI_PREFILL_MAX_DIM || problem->v_head_dim > MLAI_PREFILL_MAX_DIM)
        return MLA_FORMAT_F32;
    if (is_fp8(q))
        return is_fp8(kv) ? MLA_FORMAT_BF16 : kv;
    return is_fp8(kv) || q == kv ? q : MLA_FORMAT_F32;
}

static prefill_plan plan_of(const mla_problem *problem)
{
    const int32_t format = compute_format(problem), qk = problem->qk_head_dim,
                  v = problem->v_head_dim;
    const bool is_bf16 = format == MLA_FORMAT_BF16;
    if (format == MLA_FORMAT_F32)
        return (prefill_plan){"mla_prefill_f32", MLAI_PREFILL_F32_ROWS, 256,
                              mlai_prefill_f32_smem_bytes((uint32_t)qk, (uint32_t)v)};
    if (qk <= 128 && v <= 128)
        return (prefill_plan){is_bf16 ? "mla_prefill_bf16_128" : "mla_prefill_f16_128", 128, 256,
                              mlai_prefill_smem_bytes(128, 128)};
    if (qk <= 192 && v <= 128)
        return (prefill_plan){is_bf16 ? "mla_prefill_bf16_192" : "mla_prefill_f16_192", 128, 256,
                              mlai_prefill_smem_bytes(192, 128)};
    return (prefill_plan){is_bf16 ? "mla_prefill_bf16_256" : "mla_prefill_f16_256", 64, 128,
                          mlai_prefill_smem_bytes(256, 256)};
}

int32_t mlai_cuda_prefill_accepts(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    const bool fits = problem->qk_head_dim <= MLAI_PREFILL_F32_MAX_DIM &&
                      problem->v_head_dim <= MLAI_PREFILL_F32_MAX_DIM;
    if (!fits && why)
        mlai_append(why, why_bytes, "head dims %d of q and %d of v: it takes up to %d",
                    problem->qk_head_dim, problem->v_head_dim, MLAI_PREFILL_F32_MAX_DIM);
    return fits;
}

/* A launch, then products at 280 TFLOP/s (f32: 12). */
double mlai_cuda_prefill_cost_us(const mla_problem *problem, const mla_exec *exec)
{
    (void)exec;
    const double flops = 2.0 * (double)problem->tokens * (double)problem->max_kv_len *
                         problem->num_heads * (problem->qk_head_dim + problem->v_head_dim) *
                         (problem->is_causal ? 0.5 : 1.0);
    return 8.0 + flops / (compute_format(problem) == MLA_FORMAT_F32 ? 1.2e7 : 2.8e8);
}

static mlai_prefill_rows rows_of(const mla_tensor *t)
{
    mlai_prefill_rows rows = {0};
    if (mlai_present(t)) {
        rows.data = t->data;
        rows.token_stride = t->stride[0];
        rows.head_stride = t->stride[1];
    }
    return rows;
}

mla_status mlai_cuda_prefill(const mla_exec *exec, const mla_problem *problem, const void *params,
                             mla_diag *diag)
{
    const mla_prefill_params *p = params;
    const prefill_plan plan = plan_of(problem);
    const int32_t group = problem->num_heads / problem->num_kv_heads;
    mlai_prefill_portable_params own = {
        .q = rows_of(&p->q),
        .k = rows_of(&p->k),
        .v = rows_of(&p->v),
        .out = rows_of(&p->out),
        .lse = rows_of(&p->lse),
        .cu_q = p->cu_seqlens_q.data,
        .cu_kv = p->cu_seqlens_kv.data,
        .cu_q_stride = p->cu_seqlens_q.stride[0],
        .cu_kv_stride = p->cu_seqlens_kv.stride[0],
        .batch = problem->batch,
        .tokens_q = problem->tokens,
        .tokens_kv = p->k.shape[0],
        .max_q_len = p->max_seqlen_q,
        .max_kv_len = p->max_seqlen_kv,
        .key_heads = problem->num_kv_heads,
        .group = group,
        .n_qk = problem->qk_head_dim,
        .n_v = problem->v_head_dim,
        .q_format = problem->q_format,
        .kv_format = problem->kv_format,
        .out_format = problem->out_format,
        .q_wide = problem->qk_head_dim % 8 == 0 && mlai_cuda_is_aligned(&p->q, 16),
        .kv_wide = problem->qk_head_dim % 8 == 0 && problem->v_head_dim % 8 == 0 &&
                   mlai_cuda_is_aligned(&p->k, 16) && mlai_cuda_is_aligned(&p->v, 16),
        .out_pairs = mlai_cuda_is_aligned(&p->out, 2 * mla_format_bytes(p->out.format)),
        .is_causal = p->is_causal,
        .scale = p->softmax_scale * p->k_scale,
        .logit_cap = p->logit_cap,
        .out_scale = p->v_scale,
    };
    const int64_t blocks = mlai_ceil_div((int64_t)p->max_seqlen_q * group, plan.rows);
    if (blocks > INT32_MAX || __builtin_mul_overflow(blocks, problem->batch, &own.items) ||
        __builtin_mul_overflow(own.items, (int64_t)problem->num_kv_heads, &own.items))
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "max_seqlen_q %d with %lld requests and %d heads is more work than a call "
                         "counts; give the bound of one request's q_len or split the call",
                         p->max_seqlen_q, (long long)problem->batch, problem->num_heads);
    if (own.items == 0)
        return MLA_OK;
    own.blocks_of_request = (int32_t)blocks;
    CUkernel kernel;
    MLAI_TRY(mlai_cuda_kernel(exec->device, "prefill_portable", plan.kernel, plan.smem_bytes,
                              &kernel, diag));
    const mlai_cuda_launch launch = {.grid = {(uint32_t)mlai_min_i64(own.items, MAX_GRID), 1, 1},
                                     .block = {(uint32_t)plan.threads, 1, 1},
                                     .smem_bytes = plan.smem_bytes};
    return mlai_cuda_run(exec, kernel, &launch, &own, diag);
}
