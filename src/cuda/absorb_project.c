/*
 * Launchers of the small products of the absorbed path (kernels/absorb_project.cu): absorb_query
 * and project_value are one thing, out[t, h] = x[t, h] w[h]. 16-bit operands of one format whose
 * bases, strides and contiguous dimensions are multiples of 16 bytes go to the tensor cores, others
 * to FMA.
 */
#include "cuda/kernels/absorb_project.h"
#include "cuda/cublas.h"
#include "cuda/cuda.h"
#include "cuda/portable.h"

enum { MAX_GRID = 1 << 30 };

/* A launch, then the weights at 2 TB/s and products at 100 TFLOP/s (f32: 10). */
double mlai_cuda_product_cost_us(const mla_problem *problem, const mla_exec *exec)
{
    (void)exec;
    const double depth =
        problem->op == MLA_OP_ABSORB ? problem->qk_nope_head_dim : problem->kv_lora_rank;
    const double columns =
        problem->op == MLA_OP_ABSORB ? problem->kv_lora_rank : problem->v_head_dim;
    const double values = depth * columns * problem->num_heads;
    const bool is_f32 = problem->kv_format == MLA_FORMAT_F32 || problem->q_format == MLA_FORMAT_F32;
    return 4.0 + values * mla_format_bytes(problem->kv_format) / 2e6 +
           2.0 * (double)problem->tokens * values / (is_f32 ? 1e7 : 1e8);
}

static mlai_product_rows rows_of(const mla_tensor *t)
{
    mlai_product_rows rows = {0};
    if (mlai_present(t)) {
        rows.data = t->data;
        rows.token_stride = t->stride[0];
        rows.head_stride = t->stride[1];
        rows.format = t->format;
    }
    return rows;
}

/* w is [H, K, n] with K or n contiguous: its other strides, and its length along it. */
static bool is_weight_aligned(const mla_tensor *w, bool is_dot)
{
    const int64_t other = w->stride[is_dot ? 2 : 1], along = w->shape[is_dot ? 1 : 2];
    return (uintptr_t)w->data % 16 == 0 && w->stride[0] % 8 == 0 && other % 8 == 0 &&
           along % 8 == 0;
}

static mla_status run_product(const mla_exec *exec, const mla_tensor *x, const mla_tensor *w,
                              const mla_tensor *out, const mla_tensor *gate, mla_diag *diag)
{
    const bool is_dot = w->stride[2] != 1 && w->shape[2] > 1;
    const bool is_bf16 = x->format == MLA_FORMAT_BF16;
    const bool fast = x->format == w->format && x->format != MLA_FORMAT_F32 &&
                      x->shape[2] % 8 == 0 && mlai_cuda_is_aligned(x, 16) &&
                      is_weight_aligned(w, is_dot);
    const int32_t rows = fast ? MLAI_PRODUCT_ROWS : MLAI_PRODUCT_F32_TILE;
    const int32_t columns = fast ? MLAI_PRODUCT_COLUMNS : MLAI_PRODUCT_F32_TILE;
    mlai_product_params own = {
        .x = rows_of(x),
        .out = rows_of(out),
        .gate = rows_of(gate),
        .w = w->data,
        .w_head_stride = w->stride[0],
        .w_k_stride = w->stride[1],
        .w_n_stride = w->stride[2],
        .tokens = x->shape[0],
        .token_tiles = mlai_ceil_div(x->shape[0], rows),
        .column_tiles = (int32_t)mlai_ceil_div(w->shape[2], columns),
        .heads = (int32_t)x->shape[1],
        .depth = (int32_t)x->shape[2],
        .columns = (int32_t)w->shape[2],
        .w_format = w->format,
        .out_pairs = mlai_cuda_is_aligned(out, 2 * mla_format_bytes(out->format)),
    };
    if (__builtin_mul_overflow(own.token_tiles, (int64_t)own.column_tiles, &own.items) ||
        __builtin_mul_overflow(own.items, x->shape[1], &own.items))
        return mlai_fail(
            diag, MLA_ERROR_CAPACITY,
            "%lld tokens of %lld heads are more work than a call counts; split the call",
            (long long)x->shape[0], (long long)x->shape[1]);
    if (own.items == 0)
        return MLA_OK;
    const char *name = !fast     ? "mla_product_f32"
                       : is_dot  ? is_bf16 ? "mla_product_bf16_dots" : "mla_product_f16_dots"
                       : is_bf16 ? "mla_product_bf16_rows"
                                 : "mla_product_f16_rows";
    const uint32_t smem_bytes = fast ? MLAI_PRODUCT_SMEM_BYTES : 0;
    CUkernel kernel;
    MLAI_TRY(mlai_cuda_kernel(exec->device, "absorb_project", name, smem_bytes, &kernel, diag));
    const mlai_cuda_launch launch = {.grid = {(uint32_t)mlai_min_i64(own.items, MAX_GRID), 1, 1},
                                     .block = {MLAI_PRODUCT_THREADS, 1, 1},
                                     .smem_bytes = smem_bytes};
    return mlai_cuda_run(exec, kernel, &launch, &own, diag);
}

mla_status mlai_cuda_absorb(const mla_exec *exec, const mla_problem *problem, const void *params,
                            mla_diag *diag)
{
    (void)problem;
    const mla_absorb_query_params *p = params;
    const mla_tensor none = {0};
    return run_product(exec, &p->q_nope, &p->w_uk, &p->out, &none, diag);
}

mla_status mlai_cuda_project(const mla_exec *exec, const mla_problem *problem, const void *params,
                             mla_diag *diag)
{
    (void)problem;
    const mla_project_value_params *p = params;
    return run_product(exec, &p->latent, &p->w_uv, &p->out, &p->gate, diag);
}

/* ---- through cuBLAS -------------------------------------------------------------------------- */

int32_t mlai_cuda_cublas_accepts(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    const char *reason = NULL;
    if (problem->q_format != problem->kv_format)
        reason = "takes rows and weight of one format";
    else if (problem->out_format != problem->q_format && problem->out_format != MLA_FORMAT_F32)
        reason = "gives the format of its rows or f32";
    else
        reason = mlai_cublas_reason();
    if (reason && why && why_bytes > 0) {
        why[0] = 0;
        mlai_append(why, (size_t)why_bytes, "%s", reason);
    }
    return reason == NULL;
}

/* A launch, then weights and rows at 2.8 TB/s or products at 600 TFLOP/s (f32: 40). */
double mlai_cuda_cublas_cost_us(const mla_problem *problem, const mla_exec *exec)
{
    (void)exec;
    const double depth =
        problem->op == MLA_OP_ABSORB ? problem->qk_nope_head_dim : problem->kv_lora_rank;
    const double columns =
        problem->op == MLA_OP_ABSORB ? problem->kv_lora_rank : problem->v_head_dim;
    const double tokens = (double)problem->tokens, heads = problem->num_heads;
    const double memory_us = mla_format_bytes(problem->kv_format) * heads *
                             (depth * columns + tokens * (depth + columns)) / 2.8e6;
    const double product_us =
        2.0 * tokens * heads * depth * columns / (problem->kv_format == MLA_FORMAT_F32 ? 4e7 : 6e8);
    return 3.0 + (memory_us > product_us ? memory_us : product_us);
}

static mla_status run_cublas(const mla_exec *exec, const mla_tensor *x, const mla_tensor *w,
                             const mla_tensor *out, const mla_tensor *gate, mla_diag *diag)
{
    const mlai_cublas_product product = {
        .x = x->data,
        .w = w->data,
        .out = out->data,
        .x_token_stride = x->stride[0],
        .x_head_stride = x->stride[1],
        .w_head_stride = w->stride[0],
        .w_k_stride = w->stride[1],
        .w_n_stride = w->stride[2],
        .out_token_stride = out->stride[0],
        .out_head_stride = out->stride[1],
        .tokens = x->shape[0],
        .heads = x->shape[1],
        .depth = x->shape[2],
        .columns = w->shape[2],
        .format = x->format,
        .out_format = out->format,
    };
    bool done = x->shape[0] == 0;
    if (!done && !mlai_present(gate))
        MLAI_TRY(mlai_cublas_run(exec, &product, &done, diag));
    return done ? MLA_OK : run_product(exec, x, w, out, gate, diag);
}

mla_status mlai_cuda_absorb_cublas(const mla_exec *exec, const mla_problem *problem,
                                   const void *params, mla_diag *diag)
{
    (void)problem;
    const mla_absorb_query_params *p = params;
    const mla_tensor none = {0};
    return run_cublas(exec, &p->q_nope, &p->w_uk, &p->out, &none, diag);
}

mla_status mlai_cuda_project_cublas(const mla_exec *exec, const mla_problem *problem,
                                    const void *params, mla_diag *diag)
{
    (void)problem;
    const mla_project_value_params *p = params;
    return run_cublas(exec, &p->latent, &p->w_uv, &p->out, &p->gate, diag);
}
