/*
 * The portable CUDA solutions of attention and of the small projections, for the table in
 * rows_cuda.c: decode_portable.c, prefill_portable.c, absorb_project.c (with cuBLAS: cublas.c).
 * Launchers turn the validated parameter struct into the kernel's own and launch on exec->stream:
 * asynchronous, no allocation, no synchronisation, fit for graph capture.
 */
#ifndef MLAI_CUDA_PORTABLE_H
#define MLAI_CUDA_PORTABLE_H

#include "base/base.h"
#include <mla/solution.h>

/* decode and extend */
int32_t mlai_cuda_decode_accepts(const mla_problem *problem, char *why, uint64_t why_bytes);
uint64_t mlai_cuda_decode_bytes(const mla_problem *problem, const mla_exec *exec);
double mlai_cuda_decode_cost_us(const mla_problem *problem, const mla_exec *exec);
mla_status mlai_cuda_decode(const mla_exec *exec, const mla_problem *problem, const void *params,
                            mla_diag *diag);

int32_t mlai_cuda_prefill_accepts(const mla_problem *problem, char *why, uint64_t why_bytes);
double mlai_cuda_prefill_cost_us(const mla_problem *problem, const mla_exec *exec);
mla_status mlai_cuda_prefill(const mla_exec *exec, const mla_problem *problem, const void *params,
                             mla_diag *diag);

double mlai_cuda_product_cost_us(const mla_problem *problem, const mla_exec *exec);
mla_status mlai_cuda_absorb(const mla_exec *exec, const mla_problem *problem, const void *params,
                            mla_diag *diag);
mla_status mlai_cuda_project(const mla_exec *exec, const mla_problem *problem, const void *params,
                             mla_diag *diag);

/* The same products through cuBLAS (cublas.h); what it cannot take goes to the two above. */
int32_t mlai_cuda_cublas_accepts(const mla_problem *problem, char *why, uint64_t why_bytes);
double mlai_cuda_cublas_cost_us(const mla_problem *problem, const mla_exec *exec);
mla_status mlai_cuda_absorb_cublas(const mla_exec *exec, const mla_problem *problem,
                                   const void *params, mla_diag *diag);
mla_status mlai_cuda_project_cublas(const mla_exec *exec, const mla_problem *problem,
                                    const void *params, mla_diag *diag);

/* Whether base and strides, but for the last dimension's, are multiples of `bytes`. */
static inline bool mlai_cuda_is_aligned(const mla_tensor *t, int64_t bytes)
{
    if (!mlai_present(t))
        return true;
    bool aligned = (uintptr_t)t->data % (uintptr_t)bytes == 0;
    for (int32_t i = 0; i + 1 < t->rank; i++)
        aligned = aligned && t->stride[i] * mla_format_bytes(t->format) % bytes == 0;
    return aligned;
}

#endif
