/*
 * The CPU solutions of decode, extend and prefill. A row is a kernel (attention_kernel.h) under a
 * driver (decode.c, prefill.c); the family tables (rows_<family>.c) list them with
 * MLAI_ATTENTION_ROWS, after they have defined MLAI_ROWS_FEATURES and MLAI_ROWS_FEATURES_TEXT.
 *
 *   stem          arithmetic                  formats
 *   c             f32, portable C             every pair
 *   avx2          f32, fused multiply-add     every pair
 *   avx512        f32, fused multiply-add     every pair
 *   avx512_bf16   that of avx512              every pair, so that the family covers f32 and f16
 *   bf16_avx512_bf16  bf16 products, f32 sums q bf16 e4m3 e5m2; cache bf16 e4m3 e5m2 ds656
 *   amx_bf16      that of avx512              every pair
 *   bf16_amx_bf16 bf16 tiles, f32 sums        as bf16_avx512_bf16
 *   neon          f32, fused multiply-add     every pair
 *   neon_bf16     that of neon                every pair
 *   bf16_neon_bf16  bf16 2x4 products, f32 sums   as bf16_avx512_bf16
 *
 * All take any head count, page size, dims, strides, masks, key positions and logit caps.
 */
#ifndef MLAI_ATTENTION_H
#define MLAI_ATTENTION_H

#include "cpu/cpu.h"
#include <mla/ops.h>

/* Defined in attention.c for each stem. */
#define MLAI_ATTENTION_DECLARE(stem)                                                               \
    int32_t mlai_attention_accepts_##stem(const mla_problem *problem, char *why,                   \
                                          uint64_t why_bytes);                                     \
    uint64_t mlai_attention_workspace_##stem(const mla_problem *problem, const mla_exec *exec);    \
    double mlai_attention_cost_##stem(const mla_problem *problem, const mla_exec *exec);           \
    mla_status mlai_attention_run_##stem(const mla_exec *exec, const mla_problem *problem,         \
                                         const void *params, mla_diag *diag);
MLAI_ATTENTION_DECLARE(c)
#if defined(MLAI_WITH_X86_FAMILIES)
MLAI_ATTENTION_DECLARE(avx2)
MLAI_ATTENTION_DECLARE(avx512)
MLAI_ATTENTION_DECLARE(avx512_bf16)
MLAI_ATTENTION_DECLARE(bf16_avx512_bf16)
MLAI_ATTENTION_DECLARE(amx_bf16)
MLAI_ATTENTION_DECLARE(bf16_amx_bf16)
#endif
#if defined(MLAI_WITH_NEON_FAMILIES)
MLAI_ATTENTION_DECLARE(neon)
MLAI_ATTENTION_DECLARE(neon_bf16)
MLAI_ATTENTION_DECLARE(bf16_neon_bf16)
#endif

#define MLAI_ATTENTION_ANY "q f32 bf16 f16 e4m3 e5m2; cache f32 bf16 f16 e4m3 e5m2 ds656"
#define MLAI_ATTENTION_ANY_PREFILL "q, k and v f32 bf16 f16 e4m3 e5m2"
#define MLAI_ATTENTION_BF16 "q bf16 e4m3 e5m2; cache bf16 e4m3 e5m2 ds656"
#define MLAI_ATTENTION_BF16_PREFILL "q, k and v bf16 e4m3 e5m2"
#define MLAI_ATTENTION_FEATURES                                                                    \
    "any heads, page size, dims and strides; LSE, cap, mask, key positions, k_scale"
#define MLAI_ATTENTION_FEATURES_PREFILL "any heads (GQA), dims and strides; causal or not, LSE, cap"

#define MLAI_ATTENTION_ROW(constant, prefix, stem, family_name, formats_text, features_text)       \
    {.struct_size = sizeof(mla_solution),                                                          \
     .version = MLA_SOLUTION_VERSION,                                                              \
     .op = MLA_OP_##constant,                                                                      \
     .device_type = MLA_DEVICE_CPU,                                                                \
     .name = prefix "_" #stem,                                                                     \
     .family = #family_name,                                                                       \
     .formats = formats_text,                                                                      \
     .features = features_text,                                                                    \
     .cpu_features = MLAI_ROWS_FEATURES,                                                           \
     .cpu_features_text = MLAI_ROWS_FEATURES_TEXT,                                                 \
     .accepts = mlai_attention_accepts_##stem,                                                     \
     .workspace_bytes = mlai_attention_workspace_##stem,                                           \
     .cost_us = mlai_attention_cost_##stem,                                                        \
     .run = mlai_attention_run_##stem},

#define MLAI_ATTENTION_ROWS(stem, family, formats, formats_prefill)                                \
    MLAI_ATTENTION_ROW(DECODE, "decode", stem, family, formats, MLAI_ATTENTION_FEATURES)           \
    MLAI_ATTENTION_ROW(EXTEND, "extend", stem, family, formats, MLAI_ATTENTION_FEATURES)           \
    MLAI_ATTENTION_ROW(PREFILL, "prefill", stem, family, formats_prefill,                          \
                       MLAI_ATTENTION_FEATURES_PREFILL)

#endif
