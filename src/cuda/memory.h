/*
 * Device memory and the backend's metadata on it, as the registry's runtime offers them
 * (registry.h): memory.c. The only place where libmla allocates device memory or waits for a
 * stream; operators do neither.
 */
#ifndef MLAI_CUDA_MEMORY_H
#define MLAI_CUDA_MEMORY_H

#include "registry/registry.h"

void *mlai_cuda_alloc(void *device, uint64_t bytes);
void mlai_cuda_release(void *device, void *memory);
mla_status mlai_cuda_copy(void *device, void *stream, void *to, const void *from, uint64_t bytes,
                          mla_diag *diag);
mla_status mlai_cuda_clear(void *device, void *stream, void *memory, uint64_t stride,
                           uint64_t row_bytes, uint64_t rows, mla_diag *diag);
mla_status mlai_cuda_wait(void *device, void *stream, mla_diag *diag);
mla_status mlai_cuda_gather_pages(void *device, void *stream, const mla_tensor *req_to_page,
                                  const mla_tensor *req_pool_indices, const mla_tensor *out,
                                  mla_diag *diag);
mla_status mlai_cuda_fill_windows(void *device, void *stream, const mlai_windows *windows,
                                  mla_diag *diag);
mla_status mlai_cuda_fill_tokens(void *device, void *stream, const mlai_tokens *tokens,
                                 mla_diag *diag);
mla_status mlai_cuda_cast(void *device, void *stream, const mla_tensor *in, const mla_tensor *out,
                          mla_diag *diag);
mla_status mlai_cuda_count_step(void *device, void *stream, uint64_t *count, uint64_t *mirror,
                                mla_diag *diag);

#endif
