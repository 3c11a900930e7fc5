/*
 * Weights of a checkpoint as matrices ready for linear.c.
 *
 * A matrix is row-major [rows, cols] in f32 or bf16, as nn.Linear stores it: y = x W^T (+ bias).
 * Sources: f32, bf16, f16, and e4m3 with "<name>_scale_inv" (f32, [ceil(rows / br), ceil(cols /
 * bc)], value = e4m3 * scale of its block; blocks at the edges may be ragged). A bf16 tensor wanted
 * as bf16 is borrowed from the mapped file; everything else is converted once into memory of its
 * own. Shapes are checked against config.json. Called by deepseek.c and the tests.
 */
#ifndef MLAI_MODEL_WEIGHTS_H
#define MLAI_MODEL_WEIGHTS_H

#include "config.h"
#include "safetensors.h"

typedef struct mlai_matrix {
    int32_t format; /* MLA_FORMAT_F32 or MLA_FORMAT_BF16 */
    int64_t rows;
    int64_t cols;
    const void *data; /* NULL = absent */
    void *owned;      /* what to free, or NULL when borrowed */
    float *bias;      /* [rows] or NULL; owned */
} mlai_matrix;

/* Where weights come from and what they become. */
typedef struct mlai_weight_source {
    const mlai_st_reader *reader;
    int32_t format; /* of the matrices: MLA_FORMAT_F32 or MLA_FORMAT_BF16 */
    int64_t fp8_block_rows;
    int64_t fp8_block_cols;
} mlai_weight_source;

/*
 * Loads tensor `name` as [rows, cols]. bias_name NULL or the name of a vector [rows] that must
 * exist. *out must be zero and belongs to the caller. Errors: MLA_ERROR_FILE (missing, another
 * shape or a type that is no weight), MLA_ERROR_OUT_OF_MEMORY.
 */
mla_status mlai_matrix_load(const mlai_weight_source *source, const char *name,
                            const char *bias_name, int64_t rows, int64_t cols, mlai_matrix *out,
                            mla_diag *diag);

/* Loads a vector [n] as f32; the caller frees *out. */
mla_status mlai_vector_load(const mlai_weight_source *source, const char *name, int64_t n,
                            float **out, mla_diag *diag);

/* Frees what the matrix owns and makes it absent. */
void mlai_matrix_free(mlai_matrix *matrix);

/* The view rows first .. first + count, which owns nothing and has no bias. */
mlai_matrix mlai_matrix_rows(const mlai_matrix *matrix, int64_t first, int64_t count);

#endif
