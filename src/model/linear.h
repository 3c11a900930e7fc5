/*
 * y = x W^T (+ bias): the projections of the model, through a CBLAS.
 *
 * x [m, cols] and y [m, rows] are f32 with row strides ldx and ldy; W is row-major [rows, cols] in
 * f32 or bf16 (weights.h); sums are f32. In bf16 mode the caller keeps activations at bf16 values
 * (mlai_model_row_round), so that products are those of bf16 hardware with f32 sums.
 *   f32   m = 1: sgemv; else sgemm.
 *   bf16  m <= 4: own dot products that read each weight once, widened in registers, because a step
 *         of few tokens is bound by the read of the weights; else cblas_sbgemm where the BLAS has
 *         it and computes right, or panels of W widened to f32 (2^21 values at a time) and sgemm.
 * Threads: as many as the context's. OpenBLAS, where it was built with threads, is set to one (for
 * the process) and called from the context's; another BLAS is called once and splits by itself.
 * Limits: extents up to 2^31 - 1. Called by mlp.c and deepseek.c.
 */
#ifndef MLAI_MODEL_LINEAR_H
#define MLAI_MODEL_LINEAR_H

#include "weights.h"

#include <mla/context.h>
#include <stdbool.h>

/* What a product needs beside its operands. One thread at a time. */
typedef struct mlai_compute {
    mla_context *ctx;
    int32_t format;      /* of activations: MLA_FORMAT_F32 or MLA_FORMAT_BF16 */
    bool is_blas_shared; /* products are split over the context's threads */
    bool has_bf16_gemm;  /* cblas_sbgemm is there and passed its check */
    float *panel;        /* widened weights */
    int64_t panel_values;
    uint16_t *narrow; /* bf16 activations for cblas_sbgemm */
    int64_t narrow_values;
} mlai_compute;

/*
 * Sets the BLAS's threads, and checks it against plain loops on a few small products, since old
 * builds are wrong on some new CPUs. ctx must outlive *out. Errors:
 * MLA_ERROR_UNSUPPORTED (the BLAS computes wrong; the sentence says what to do).
 */
mla_status mlai_compute_init(mla_context *ctx, int32_t format, mlai_compute *out, mla_diag *diag);

/* Makes room for products with this matrix, so that none allocates. */
mla_status mlai_compute_reserve(mlai_compute *compute, const mlai_matrix *matrix, mla_diag *diag);

void mlai_compute_free(mlai_compute *compute);

/* y = x W^T (+ W.bias). x and y may not overlap. m may be 0. */
void mlai_linear(mlai_compute *compute, const mlai_matrix *w, const float *x, int64_t ldx,
                 int64_t m, float *y, int64_t ldy);

#endif
