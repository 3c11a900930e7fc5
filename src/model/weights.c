/*
 * Loads weights (weights.h): find by name, check the shape, then borrow or convert. Block-scaled
 * fp8: value[i, j] = e4m3[i, j] * scale_inv[i / br, j / bc] in f32, then rounded once to the wanted
 * format. Matrices are 64-byte aligned when owned. Every size is bounded by the file's own, so that
 * products cannot overflow. Called by deepseek.c and the tests.
 */
#include "weights.h"

#include "convert.h"
#include "fault.h"

#include <stdio.h>
#include <stdlib.h>

#define ALIGNMENT ((size_t)64)
#define MAX_NAME 512

static void *allocate(size_t bytes)
{
    /* aligned_alloc wants a multiple of the alignment; never 0, so that NULL means failure. */
    size_t padded = (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    return padded < bytes ? NULL : aligned_alloc(ALIGNMENT, padded);
}

static mla_status find_shaped(const mlai_weight_source *source, const char *name, int32_t rank,
                              int64_t rows, int64_t cols, const mlai_st_tensor **out,
                              mla_diag *diag)
{
    const mlai_st_tensor *tensor = mlai_st_find(source->reader, name);
    if (tensor == NULL)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "the checkpoint has no tensor %s, which its config.json asks for",
                               name);
    if (tensor->rank != rank || tensor->shape[0] != rows ||
        (rank == 2 && tensor->shape[1] != cols)) {
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "tensor %s has rank %d and shape [%lld, %lld]; config.json asks for "
                               "%s[%lld, %lld]",
                               name, tensor->rank,
                               (long long)(tensor->rank > 0 ? tensor->shape[0] : 0),
                               (long long)(tensor->rank > 1 ? tensor->shape[1] : 0),
                               rank == 1 ? "the vector " : "", (long long)rows, (long long)cols);
    }
    *out = tensor;
    return MLA_OK;
}

static bool is_plain_float(int32_t format)
{
    return format == MLA_FORMAT_F32 || format == MLA_FORMAT_BF16 || format == MLA_FORMAT_F16;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* Block scales of an fp8 matrix, as f32 [ceil(rows / br), ceil(cols / bc)]. */
static mla_status load_scales(const mlai_weight_source *source, const char *name, int64_t rows,
                              int64_t cols, float **out, mla_diag *diag)
{
    char scale_name[MAX_NAME];
    snprintf(scale_name, sizeof scale_name, "%s_scale_inv", name);
    int64_t scale_rows = ceil_div(rows, source->fp8_block_rows);
    int64_t scale_cols = ceil_div(cols, source->fp8_block_cols);
    const mlai_st_tensor *tensor = NULL;
    mla_status status = find_shaped(source, scale_name, 2, scale_rows, scale_cols, &tensor, diag);
    if (status != MLA_OK)
        return status;
    int32_t format = mlai_st_dtype_format(tensor->dtype);
    if (!is_plain_float(format))
        return mlai_model_fail(diag, MLA_ERROR_FILE, "tensor %s is %s; scales are F32, BF16 or F16",
                               scale_name, mlai_st_dtype_name(tensor->dtype));
    int64_t n = scale_rows * scale_cols;
    *out = allocate((size_t)n * sizeof **out);
    if (*out == NULL)
        return mlai_model_fail_memory(diag, scale_name, (unsigned long long)n * sizeof **out);
    mlai_model_row_to_f32(*out, tensor->data, format, n);
    return MLA_OK;
}

/* Row r of the source as f32, scales applied. */
static void widen_row(const mlai_weight_source *source, const mlai_st_tensor *tensor, int64_t r,
                      int64_t cols, const float *scales, float *row)
{
    int32_t format = mlai_st_dtype_format(tensor->dtype);
    size_t row_bytes = (size_t)cols * (size_t)mlai_st_dtype_bytes(tensor->dtype);
    mlai_model_row_to_f32(row, (const char *)tensor->data + (size_t)r * row_bytes, format, cols);
    if (scales == NULL)
        return;
    int64_t block = source->fp8_block_cols;
    const float *scale = scales + r / source->fp8_block_rows * ceil_div(cols, block);
    for (int64_t first = 0; first < cols; first += block) {
        int64_t end = first + block < cols ? first + block : cols;
        for (int64_t c = first; c < end; c++)
            row[c] *= scale[first / block];
    }
}

static mla_status convert_matrix(const mlai_weight_source *source, const char *name,
                                 const mlai_st_tensor *tensor, mlai_matrix *out, mla_diag *diag)
{
    float *scales = NULL;
    if (mlai_st_dtype_format(tensor->dtype) == MLA_FORMAT_E4M3) {
        mla_status status = load_scales(source, name, out->rows, out->cols, &scales, diag);
        if (status != MLA_OK)
            return status;
    }
    size_t row_bytes = (size_t)out->cols * (size_t)mla_format_bytes(out->format);
    size_t bytes = 0;
    float *row = allocate((size_t)out->cols * sizeof *row);
    bool fits = !__builtin_mul_overflow((size_t)out->rows, row_bytes, &bytes);
    out->owned = fits ? allocate(bytes) : NULL;
    if (row == NULL || out->owned == NULL) {
        free(row);
        free(scales);
        return mlai_model_fail_memory(diag, name, bytes);
    }
    for (int64_t r = 0; r < out->rows; r++) {
        widen_row(source, tensor, r, out->cols, scales, row);
        mlai_model_row_from_f32((char *)out->owned + (size_t)r * row_bytes, out->format, row,
                                out->cols);
    }
    out->data = out->owned;
    free(row);
    free(scales);
    return MLA_OK;
}

mla_status mlai_matrix_load(const mlai_weight_source *source, const char *name,
                            const char *bias_name, int64_t rows, int64_t cols, mlai_matrix *out,
                            mla_diag *diag)
{
    const mlai_st_tensor *tensor = NULL;
    mla_status status = find_shaped(source, name, 2, rows, cols, &tensor, diag);
    if (status != MLA_OK)
        return status;
    int32_t format = mlai_st_dtype_format(tensor->dtype);
    if (!is_plain_float(format) && format != MLA_FORMAT_E4M3)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "tensor %s is %s; weights are F32, BF16, F16 or F8_E4M3", name,
                               mlai_st_dtype_name(tensor->dtype));
    *out = (mlai_matrix){.format = source->format, .rows = rows, .cols = cols};
    if (format == source->format)
        out->data = tensor->data;
    else
        status = convert_matrix(source, name, tensor, out, diag);
    if (status == MLA_OK && bias_name != NULL)
        status = mlai_vector_load(source, bias_name, rows, &out->bias, diag);
    if (status != MLA_OK)
        mlai_matrix_free(out);
    return status;
}

mla_status mlai_vector_load(const mlai_weight_source *source, const char *name, int64_t n,
                            float **out, mla_diag *diag)
{
    const mlai_st_tensor *tensor = NULL;
    mla_status status = find_shaped(source, name, 1, n, 1, &tensor, diag);
    if (status != MLA_OK)
        return status;
    int32_t format = mlai_st_dtype_format(tensor->dtype);
    if (!is_plain_float(format))
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "tensor %s is %s; vectors are F32, BF16 or F16", name,
                               mlai_st_dtype_name(tensor->dtype));
    float *vector = allocate((size_t)n * sizeof *vector);
    if (vector == NULL)
        return mlai_model_fail_memory(diag, name, (unsigned long long)n * sizeof *vector);
    mlai_model_row_to_f32(vector, tensor->data, format, n);
    *out = vector;
    return MLA_OK;
}

void mlai_matrix_free(mlai_matrix *matrix)
{
    free(matrix->owned);
    free(matrix->bias);
    *matrix = (mlai_matrix){0};
}

mlai_matrix mlai_matrix_rows(const mlai_matrix *matrix, int64_t first, int64_t count)
{
    mlai_matrix view = *matrix;
    size_t row_bytes = (size_t)matrix->cols * (size_t)mla_format_bytes(matrix->format);
    view.data = (const char *)matrix->data + (size_t)first * row_bytes;
    view.rows = count;
    view.owned = NULL;
    view.bias = NULL;
    return view;
}
