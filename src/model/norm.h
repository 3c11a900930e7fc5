/*
 * The small per-token operations of a decoder layer: RMS norm, SwiGLU, residual sums, and the
 * rotary tables.
 *
 * Rows are f32 with a stride; results are rounded to the compute format (f32 or bf16) where they
 * feed a product. RMS norm: y_i = w_i * x_i / sqrt(mean(x^2) + eps), sums in f32 over 16 lanes.
 * SwiGLU: y = gate / (1 + exp(-gate)) * up. Rotary tables: cos and sin [max_position, P / 2] in
 * f32, angles in f32 as the model was trained (position times inverse frequency, both f32), times
 * the attention factor. Called by mlp.c and deepseek.c.
 */
#ifndef MLAI_MODEL_NORM_H
#define MLAI_MODEL_NORM_H

#include "config.h"

#include <stdint.h>

/* y[t] = rms_norm(x[t]) * weight, rounded to `format`, for m rows of n values. y may be x. */
void mlai_rms_norm(const float *x, int64_t ldx, int64_t m, int64_t n, const float *weight,
                   double eps, int32_t format, float *y, int64_t ldy);

/* gate[i] = silu(gate[i]) * up[i], rounded to `format`. */
void mlai_swiglu(float *gate, const float *up, int64_t n, int32_t format);

/* inv_freq[P / 2] of the configuration's rotary embedding. */
void mlai_rope_frequencies(const mlai_rope_config *rope, int64_t rope_dim, float *inv_freq);

/* Fills cos and sin [max_position, P / 2]; inv_freq as above. */
void mlai_rope_tables(const mlai_rope_config *rope, const float *inv_freq, int64_t rope_dim,
                      int64_t max_position, float *cos_table, float *sin_table);

#endif
