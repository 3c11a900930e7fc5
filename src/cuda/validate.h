/*
 * Validate mode (call.device_error): the check of a call's live values, enqueued before the call's
 * own kernels. See kernels/validate.cu. Called by the registry through runtime.c.
 */
#ifndef MLAI_CUDA_VALIDATE_H
#define MLAI_CUDA_VALIDATE_H

#include <mla/solution.h>

/* Operators that read no live values enqueue nothing. */
mla_status mlai_cuda_validate(const mla_exec *exec, const mla_problem *problem, const void *params,
                              mla_device_error *error, mla_diag *diag);

#endif
