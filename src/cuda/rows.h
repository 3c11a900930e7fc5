/*
 * What src/builtin.c needs to know of the CUDA room. Includes nothing of CUDA.
 */
#ifndef MLAI_CUDA_ROWS_H
#define MLAI_CUDA_ROWS_H

#include "registry/registry.h"

extern const mlai_device_runtime mlai_cuda_runtime;

/* The fast Hopper family and the portable one, in table order. */
extern const mla_solution mlai_rows_cuda[];
extern const int32_t mlai_n_rows_cuda;

#endif
