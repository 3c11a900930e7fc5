/*
 * The CUDA families in table order: "sm90a" (Hopper, fast), "cublas" (products through cuBLAS,
 * where it is installed) and "cuda" (portable, sm_80 on).
 */
#include "cuda/elementwise.h"
#include "cuda/portable.h"
#include "cuda/rows.h"
#include "cuda/sm90a.h"

static int32_t accepts_any(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    (void)problem;
    (void)why;
    (void)why_bytes;
    return 1;
}

static uint64_t no_workspace(const mla_problem *problem, const mla_exec *exec)
{
    (void)problem;
    (void)exec;
    return 0;
}

/* A launch, and each row's values read and written once at 2.5 TB/s. */
static double row_cost_us(const mla_problem *problem, const mla_exec *exec)
{
    (void)exec;
    double width = problem->qk_head_dim + problem->kv_lora_rank + problem->qk_rope_head_dim;
    double heads = problem->num_heads > 0 ? problem->num_heads : 1;
    return 3.0 + (double)problem->tokens * heads * width * 4.0 / 2.5e6;
}

#define ROW(constant, row_name, family_name, arch_min, arch_max, formats_text, features_text,      \
            accepts_fn, bytes_fn, cost_fn, run_fn)                                                 \
    {                                                                                              \
        .struct_size = sizeof(mla_solution), .version = MLA_SOLUTION_VERSION,                      \
        .op = MLA_OP_##constant, .device_type = MLA_DEVICE_CUDA, .name = row_name,                 \
        .family = family_name, .formats = formats_text, .features = features_text,                 \
        .cpu_features_text = "", .cuda_arch_min = arch_min, .cuda_arch_max = arch_max,             \
        .accepts = accepts_fn, .workspace_bytes = bytes_fn, .cost_us = cost_fn, .run = run_fn      \
    }

#define PORTABLE(constant, stem, formats_text, features_text, accepts_fn, bytes_fn, cost_fn,       \
                 run_fn)                                                                           \
    ROW(constant, #stem "_cuda", "cuda", 80, 999, formats_text, features_text, accepts_fn,         \
        bytes_fn, cost_fn, run_fn)

#define ELEMENTWISE(constant, stem, formats_text, features_text)                                   \
    PORTABLE(constant, stem, formats_text, features_text, accepts_any, no_workspace, row_cost_us,  \
             mlai_cuda_##stem),

#define DECODE(constant, stem, features_text)                                                      \
    PORTABLE(constant, stem, "q f32 bf16 f16 e4m3 e5m2; cache f32 bf16 f16 e4m3 e5m2 ds656",       \
             features_text, mlai_cuda_decode_accepts, mlai_cuda_decode_bytes,                      \
             mlai_cuda_decode_cost_us, mlai_cuda_decode)

#define PRODUCT(constant, stem, formats_text, features_text)                                       \
    PORTABLE(constant, stem, formats_text, features_text, accepts_any, no_workspace,               \
             mlai_cuda_product_cost_us, mlai_cuda_##stem)

#define DECODE_SM90A(stem, q, kv, kinds, formats_text)                                             \
    ROW(DECODE, "decode_" #stem, "sm90a", 90, 90, formats_text,                                    \
        "R 512, P 64, any heads, page size and q_len, 16-byte strides, LSE, cap",                  \
        mlai_cuda_decode_##stem##_accepts, mlai_cuda_decode_sm90a_bytes,                           \
        mlai_cuda_decode_sm90a_cost_us, mlai_cuda_decode_##stem),

#define EXTEND_SM90A(stem, q, kv, kinds, formats_text)                                             \
    ROW(EXTEND, "extend_" #stem, "sm90a", 90, 90, formats_text,                                    \
        "R 512, P 64, any heads, page size and q_len, 16-byte strides, LSE, cap",                  \
        mlai_cuda_decode_##stem##_accepts, mlai_cuda_decode_sm90a_bytes,                           \
        mlai_cuda_decode_sm90a_cost_us, mlai_cuda_decode_##stem),

#define PREFILL_SM90A(stem, format, formats_text)                                                  \
    ROW(PREFILL, "prefill_" #stem, "sm90a", 90, 90, formats_text,                                  \
        "L 192, V 128, any heads and groups, causal or not, 16-byte strides, LSE, cap",            \
        mlai_cuda_prefill_##stem##_accepts, mlai_cuda_prefill_sm90a_bytes,                         \
        mlai_cuda_prefill_sm90a_cost_us, mlai_cuda_prefill_##stem),

#define CUBLAS(constant, stem, formats_text, features_text)                                        \
    ROW(constant, #stem "_cublas", "cublas", 80, 999, formats_text, features_text,                 \
        mlai_cuda_cublas_accepts, no_workspace, mlai_cuda_cublas_cost_us,                          \
        mlai_cuda_##stem##_cublas)

/* Lists expand to rows with their commas, which the formatter cannot know. */
/* clang-format off */
const mla_solution mlai_rows_cuda[] = {
    MLAI_DECODE_SM90A_LIST(DECODE_SM90A)
    MLAI_DECODE_SM90A_LIST(EXTEND_SM90A)
    MLAI_PREFILL_SM90A_LIST(PREFILL_SM90A)
    DECODE(DECODE, decode,
           "R to 512, R + P to 640, any heads, page size, q_len and strides, split cache, LSE, "
           "cap, mask, key positions"),
    DECODE(EXTEND, extend,
           "R to 512, R + P to 640, any heads, page size, q_len and strides, split cache, LSE, "
           "cap, key positions"),
    PORTABLE(PREFILL, prefill, "q f32 bf16 f16 e4m3 e5m2; k and v f32 bf16 f16 e4m3 e5m2",
             "L and V to 512 (fast to 192 and 128), any heads and groups, causal or not, LSE, cap",
             mlai_cuda_prefill_accepts, no_workspace, mlai_cuda_prefill_cost_us, mlai_cuda_prefill),
    CUBLAS(ABSORB, absorb, "q and w f32 bf16 f16; out the same or f32",
           "any dims and strides, N or R contiguous; needs libcublas 12 or 13"),
    CUBLAS(PROJECT, project, "latent and w f32 bf16 f16; out the same or f32",
           "any dims and strides, R or V contiguous, gate (as project_cuda); needs libcublas 12 or 13"),
    PRODUCT(ABSORB, absorb, "q and w f32 bf16 f16; out f32 bf16 f16 e4m3 e5m2",
            "any dims and strides, N or R contiguous"),
    PRODUCT(PROJECT, project, "latent and w f32 bf16 f16; out f32 bf16 f16",
            "any dims and strides, R or V contiguous, gate"),
    MLAI_CUDA_ELEMENTWISE_OPS(ELEMENTWISE)
};
/* clang-format on */

const int32_t mlai_n_rows_cuda = (int32_t)(sizeof mlai_rows_cuda / sizeof mlai_rows_cuda[0]);
