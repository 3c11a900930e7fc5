/*
 * cuBLAS, loaded at run time where it is installed: the products of the absorbed path for many
 * tokens. libmla links neither it nor the CUDA runtime, and runs without.
 *
 * A process loads it once and keeps it; the one that an engine has loaded already is taken. A
 * device gets a handle for each CUDA context that calls come from, made at the first call (which
 * allocates inside cuBLAS, also when the stream is being captured) and ended with the libmla
 * context. It gets no workspace, so calls on several streams do not meet.
 */
#ifndef MLAI_CUDA_CUBLAS_H
#define MLAI_CUDA_CUBLAS_H

#include "cuda/cuda.h"

/* x[t, h, :] w[h] = out[t, h, :] for h in 0..heads-1; strides in elements, the last ones 1 but w's,
 * which is contiguous along k or along n. */
typedef struct mlai_cublas_product {
    const void *x, *w;
    void *out;
    int64_t x_token_stride, x_head_stride;
    int64_t w_head_stride, w_k_stride, w_n_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t tokens, heads, depth, columns;
    int32_t format, out_format; /* of x and w; the same, or f32 */
} mlai_cublas_product;

/* NULL, or why there is no cuBLAS in this process. */
const char *mlai_cublas_reason(void);

/*
 * Enqueues the product on exec->stream. *done is false, and nothing was enqueued, where cuBLAS does
 * not take it: no cuBLAS, one that does not start on this device, strides that it cannot express.
 * Error: MLA_ERROR_DEVICE.
 */
mla_status mlai_cublas_run(const mla_exec *exec, const mlai_cublas_product *product, bool *done,
                           mla_diag *diag);

/* Ends a device's handles. */
void mlai_cublas_close(mlai_cuda_device *device);

#endif
