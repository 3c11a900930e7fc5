/*
 * The Hopper solutions of attention, for the table in rows_cuda.c: decode_sm90a.c, prefill_sm90a.c.
 * Launchers turn the validated parameter struct into the kernel's own and launch on exec->stream:
 * asynchronous, no allocation, no synchronisation, fit for graph capture.
 */
#ifndef MLAI_CUDA_SM90A_H
#define MLAI_CUDA_SM90A_H

#include <mla/solution.h>

/* Ends an accepts() whose other parameters are why and why_bytes. */
#define MLAI_REFUSE(...)                                                                           \
    do {                                                                                           \
        if (why)                                                                                   \
            mlai_append(why, why_bytes, __VA_ARGS__);                                              \
        return 0;                                                                                  \
    } while (0)

/* The cost of what the kernels' 31-bit counts do not hold: any row that can run costs less. */
#define MLAI_TOO_LARGE_US 1e30

/* One line a pair of formats. The stem names the image and the symbols decode_<stem>_r<rows>, and
 * with decode_ and extend_ before it the rows; `kinds` says which kernels the image has.
 *   stem, q format, cache format, kinds, for people */
#define MLAI_DECODE_SM90A_LIST(X)                                                                  \
    X(bf16_sm90a, MLA_FORMAT_BF16, MLA_FORMAT_BF16, CLUSTERS, "q and cache bf16; out bf16 f32")    \
    X(f16_sm90a, MLA_FORMAT_F16, MLA_FORMAT_F16, CLUSTERS, "q and cache f16; out f16 f32")         \
    X(bf16_e4m3_sm90a, MLA_FORMAT_BF16, MLA_FORMAT_E4M3, TO_32,                                    \
      "q bf16; cache e4m3; out bf16 f32")                                                          \
    X(e4m3_sm90a, MLA_FORMAT_E4M3, MLA_FORMAT_E4M3, TO_64, "q and cache e4m3; out bf16 f32")       \
    X(bf16_ds656_sm90a, MLA_FORMAT_BF16, MLA_FORMAT_DS656, TO_32,                                  \
      "q bf16; cache ds656; out bf16 f32")

#define MLAI_DECODE_SM90A_DECLARE(stem, q, kv, kinds, text)                                        \
    int32_t mlai_cuda_decode_##stem##_accepts(const mla_problem *problem, char *why,               \
                                              uint64_t why_bytes);                                 \
    mla_status mlai_cuda_decode_##stem(const mla_exec *exec, const mla_problem *problem,           \
                                       const void *params, mla_diag *diag);
MLAI_DECODE_SM90A_LIST(MLAI_DECODE_SM90A_DECLARE)

uint64_t mlai_cuda_decode_sm90a_bytes(const mla_problem *problem, const mla_exec *exec);
double mlai_cuda_decode_sm90a_cost_us(const mla_problem *problem, const mla_exec *exec);

/*   stem, format of q, k, v and out */
#define MLAI_PREFILL_SM90A_LIST(X)                                                                 \
    X(bf16_sm90a, MLA_FORMAT_BF16, "q, k, v and out bf16")                                         \
    X(f16_sm90a, MLA_FORMAT_F16, "q, k, v and out f16")

#define MLAI_PREFILL_SM90A_DECLARE(stem, format, text)                                             \
    int32_t mlai_cuda_prefill_##stem##_accepts(const mla_problem *problem, char *why,              \
                                               uint64_t why_bytes);                                \
    mla_status mlai_cuda_prefill_##stem(const mla_exec *exec, const mla_problem *problem,          \
                                        const void *params, mla_diag *diag);
MLAI_PREFILL_SM90A_LIST(MLAI_PREFILL_SM90A_DECLARE)

uint64_t mlai_cuda_prefill_sm90a_bytes(const mla_problem *problem, const mla_exec *exec);
double mlai_cuda_prefill_sm90a_cost_us(const mla_problem *problem, const mla_exec *exec);

#endif
