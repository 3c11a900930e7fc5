/*
 * The CPU solutions of the operators that are not attention: merge, write, gather, rope,
 * rope_write, absorb, project, pack. Each kernel is one source under kernels/, compiled once for
 * each family with the family's instruction set and MLAI_FAMILY set to its name; no contraction of
 * a * b + c, so that the memory-bound ones give the same bits in every family. Only absorb and
 * project use fused multiply-add where the family has it.
 *
 * The family tables (rows_<family>.c) list them with MLAI_ELEMENTWISE_ROWS. All of them take every
 * problem that the operator layer lets through, need no workspace, and give each row the same bits
 * whatever the other rows, the thread count and the place in the cache are.
 */
#ifndef MLAI_ELEMENTWISE_H
#define MLAI_ELEMENTWISE_H

#include "cpu/cpu.h"
#include <mla/ops.h>

/* operator constant, stem, formats and features for people */
#define MLAI_ELEMENTWISE_OPS(X, family)                                                            \
    X(MERGE, merge, family, "states f32 bf16 f16; out f32 bf16 f16",                               \
      "1 to 64 states, any widths and strides, in place")                                          \
    X(WRITE, write, family, "rows f32 bf16 f16; cache f32 bf16 f16 e4m3 e5m2 ds656",               \
      "any dims, page sizes and strides, split cache, k_scale, sanitize")                          \
    X(GATHER, gather, family, "cache f32 bf16 f16 e4m3 e5m2 ds656; rows f32 bf16 f16 e4m3 e5m2",   \
      "any dims, page sizes and strides, split cache, k_scale")                                    \
    X(ROPE, rope, family, "x f32 bf16 f16; out f32 bf16 f16 e4m3 e5m2",                            \
      "interleaved and half-split, any even width, in place")                                      \
    X(ROPE_WRITE, rope_write, family,                                                              \
      "rows f32 bf16 f16; q out f32 bf16 f16 e4m3 e5m2; cache f32 bf16 f16 e4m3 e5m2 ds656",       \
      "as rope and write together")                                                                \
    X(ABSORB, absorb, family, "q f32 bf16 f16; weight the same or f32; out also e4m3 e5m2",        \
      "any dims, weight contiguous in either of its last two")                                     \
    X(PROJECT, project, family, "latent f32 bf16 f16; weight the same or f32; out f32 bf16 f16",   \
      "any dims, weight contiguous in either of its last two, gate")                               \
    X(PACK, pack, family, "k and v f32 bf16 f16; out f32 bf16 f16 e4m3 e5m2",                      \
      "any dims and strides, scales")

/* Defined once, in elementwise.c. */
#define MLAI_ELEMENTWISE_ACCEPTS(constant, stem, family, formats, features)                        \
    int32_t mlai_##stem##_accepts(const mla_problem *problem, char *why, uint64_t why_bytes);
MLAI_ELEMENTWISE_OPS(MLAI_ELEMENTWISE_ACCEPTS, )
uint64_t mlai_no_workspace(const mla_problem *problem, const mla_exec *exec);

/* Defined in each family by the kernels. */
#define MLAI_ELEMENTWISE_DECLARE(constant, stem, family, formats, features)                        \
    mla_status mlai_##stem##_run_##family(const mla_exec *exec, const mla_problem *problem,        \
                                          const void *params, mla_diag *diag);                     \
    double mlai_##stem##_cost_##family(const mla_problem *problem, const mla_exec *exec);
MLAI_ELEMENTWISE_OPS(MLAI_ELEMENTWISE_DECLARE, c)
#if defined(MLAI_WITH_X86_FAMILIES)
MLAI_ELEMENTWISE_OPS(MLAI_ELEMENTWISE_DECLARE, avx2)
MLAI_ELEMENTWISE_OPS(MLAI_ELEMENTWISE_DECLARE, avx512)
MLAI_ELEMENTWISE_OPS(MLAI_ELEMENTWISE_DECLARE, avx512_bf16)
MLAI_ELEMENTWISE_OPS(MLAI_ELEMENTWISE_DECLARE, amx_bf16)
#endif
#if defined(MLAI_WITH_NEON_FAMILIES)
MLAI_ELEMENTWISE_OPS(MLAI_ELEMENTWISE_DECLARE, neon)
MLAI_ELEMENTWISE_OPS(MLAI_ELEMENTWISE_DECLARE, neon_bf16)
#endif

/* One family's rows; before it, the table defines MLAI_ROWS_FEATURES and MLAI_ROWS_FEATURES_TEXT.
 */
#define MLAI_ELEMENTWISE_ROW(constant, stem, family_name, formats_text, features_text)             \
    {.struct_size = sizeof(mla_solution),                                                          \
     .version = MLA_SOLUTION_VERSION,                                                              \
     .op = MLA_OP_##constant,                                                                      \
     .device_type = MLA_DEVICE_CPU,                                                                \
     .name = #stem "_" #family_name,                                                               \
     .family = #family_name,                                                                       \
     .formats = formats_text,                                                                      \
     .features = features_text,                                                                    \
     .cpu_features = MLAI_ROWS_FEATURES,                                                           \
     .cpu_features_text = MLAI_ROWS_FEATURES_TEXT,                                                 \
     .accepts = mlai_##stem##_accepts,                                                             \
     .workspace_bytes = mlai_no_workspace,                                                         \
     .cost_us = mlai_##stem##_cost_##family_name,                                                  \
     .run = mlai_##stem##_run_##family_name},
#define MLAI_ELEMENTWISE_ROWS(family) MLAI_ELEMENTWISE_OPS(MLAI_ELEMENTWISE_ROW, family)

/* In a kernel: the name of its function in the family it is compiled for. */
#define MLAI_JOIN_NAMES(a, b) a##_##b
#define MLAI_JOIN(a, b) MLAI_JOIN_NAMES(a, b)
#define MLAI_IN_FAMILY(stem) MLAI_JOIN(stem, MLAI_FAMILY)

/*
 * Rows over threads: at least 32 KiB of traffic a chunk, since waking a thread costs more than
 * moving less, and about eight chunks a thread, so that a slow thread delays little.
 */
static inline void mlai_for_rows(const mla_exec *exec, int64_t n_rows, int64_t row_bytes,
                                 mlai_item_fn fn, void *arg)
{
    const int64_t smallest = 32768 / mlai_max_i64(row_bytes, 1) + 1;
    const int64_t even = n_rows / (8 * (int64_t)mlai_max_i64(exec->n_threads, 1)) + 1;
    mlai_for_items(exec, n_rows, mlai_max_i64(smallest, even), fn, arg);
}

#endif
