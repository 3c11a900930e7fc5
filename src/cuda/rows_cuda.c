/*
 * The CUDA families in table order: "sm90a" (Hopper, fast) and "cuda" (portable, sm_80 on).
 */
#include "cuda/elementwise.h"
#include "cuda/rows.h"

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

#define ROW(constant, stem, formats_text, features_text)                                           \
    {.struct_size = sizeof(mla_solution),                                                          \
     .version = MLA_SOLUTION_VERSION,                                                              \
     .op = MLA_OP_##constant,                                                                      \
     .device_type = MLA_DEVICE_CUDA,                                                               \
     .name = #stem "_cuda",                                                                        \
     .family = "cuda",                                                                             \
     .formats = formats_text,                                                                      \
     .features = features_text,                                                                    \
     .cpu_features_text = "",                                                                      \
     .cuda_arch_min = 80,                                                                          \
     .cuda_arch_max = 999,                                                                         \
     .accepts = accepts_any,                                                                       \
     .workspace_bytes = no_workspace,                                                              \
     .cost_us = row_cost_us,                                                                       \
     .run = mlai_cuda_##stem},

const mla_solution mlai_rows_cuda[] = {MLAI_CUDA_ELEMENTWISE_OPS(ROW)};

const int32_t mlai_n_rows_cuda = (int32_t)(sizeof mlai_rows_cuda / sizeof mlai_rows_cuda[0]);
