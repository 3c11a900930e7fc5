/*
 * Weights: every source format to both compute formats against plain conversion, block scales with
 * ragged edges, biases, refusals; and whole FP8 checkpoints against their dequantised twins.
 */
#include "fp8_checkpoint.h"
#include "support.h"
#include "test.h"

#include <convert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <weights.h>

static mlai_st_reader *reader_of(const mlai_st_tensor *tensors, int64_t n)
{
    char path[PATH_BYTES];
    mlai_st_reader *reader = NULL;
    mla_diag diag = {{0}};
    must(mlai_st_write(scratch_path("w.safetensors", path), tensors, n, NULL, 0, &diag), &diag,
         path);
    must(mlai_st_open(path, &reader, &diag), &diag, path);
    return reader;
}

static void test_block_scales(void **state)
{
    (void)state;
    static const int64_t shapes[][4] = {{1, 1, 128, 128},     {128, 128, 128, 128},
                                        {130, 257, 128, 128}, {127, 129, 128, 128},
                                        {5, 7, 2, 3},         {300, 40, 64, 32}};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        int64_t rows = shapes[s][0];
        int64_t cols = shapes[s][1];
        int64_t br = shapes[s][2];
        int64_t bc = shapes[s][3];
        int64_t scale_rows = (rows + br - 1) / br;
        int64_t scale_cols = (cols + bc - 1) / bc;
        uint8_t *codes = calloc((size_t)(rows * cols), 1);
        float *scales = calloc((size_t)(scale_rows * scale_cols), sizeof *scales);
        for (int64_t i = 0; i < rows * cols; i++)
            codes[i] = (uint8_t)((i * 7 + 3) % 256 % 127 + (i % 2) * 128);
        for (int64_t i = 0; i < scale_rows * scale_cols; i++)
            scales[i] = 0.001f * (float)(i + 1);
        mlai_st_tensor tensors[] = {{.name = "w",
                                     .dtype = MLAI_ST_F8_E4M3,
                                     .rank = 2,
                                     .shape = {rows, cols},
                                     .data = codes,
                                     .size_bytes = rows * cols},
                                    {.name = "w_scale_inv",
                                     .dtype = MLAI_ST_F32,
                                     .rank = 2,
                                     .shape = {scale_rows, scale_cols},
                                     .data = scales,
                                     .size_bytes = 4 * scale_rows * scale_cols}};
        mlai_st_reader *reader = reader_of(tensors, 2);
        for (int f = 0; f < 2; f++) {
            mlai_weight_source source = {.reader = reader,
                                         .fp8_block_rows = br,
                                         .fp8_block_cols = bc,
                                         .format = f == 0 ? MLA_FORMAT_F32 : MLA_FORMAT_BF16};
            mlai_matrix matrix = {0};
            mla_diag diag = {{0}};
            must(mlai_matrix_load(&source, "w", NULL, rows, cols, &matrix, &diag), &diag, "w");
            for (int64_t i = 0; i < rows * cols; i++) {
                float scale = scales[i / cols / br * scale_cols + i % cols / bc];
                float want = (float)fp8_value(codes[i]) * scale;
                float got;
                mlai_model_row_round(&want, source.format, 1);
                mlai_model_row_to_f32(
                    &got, (const char *)matrix.data + i * mla_format_bytes(source.format),
                    source.format, 1);
                assert_true(got == want);
            }
            mlai_matrix_free(&matrix);
        }
        mlai_st_close(reader);
        free(scales);
        free(codes);
    }
}

static void test_plain_formats(void **state)
{
    (void)state;
    float f32[6] = {1.0f, -2.0f, 0.333333f, 1e-20f, 65504.0f, -0.0f};
    uint16_t bf16[6];
    uint16_t f16[6] = {0x3c00, 0xc000, 0x3555, 0x0001, 0x7bff, 0x8000};
    for (int i = 0; i < 6; i++)
        bf16[i] = mlai_model_bf16_from_f32(f32[i]);
    mlai_st_tensor tensors[] = {{.name = "f32",
                                 .dtype = MLAI_ST_F32,
                                 .rank = 2,
                                 .shape = {2, 3},
                                 .data = f32,
                                 .size_bytes = 24},
                                {.name = "bf16",
                                 .dtype = MLAI_ST_BF16,
                                 .rank = 2,
                                 .shape = {2, 3},
                                 .data = bf16,
                                 .size_bytes = 12},
                                {.name = "f16",
                                 .dtype = MLAI_ST_F16,
                                 .rank = 2,
                                 .shape = {2, 3},
                                 .data = f16,
                                 .size_bytes = 12},
                                {.name = "bias",
                                 .dtype = MLAI_ST_BF16,
                                 .rank = 1,
                                 .shape = {2},
                                 .data = bf16,
                                 .size_bytes = 4}};
    mlai_st_reader *reader = reader_of(tensors, 4);
    for (int t = 0; t < 3; t++) {
        for (int f = 0; f < 2; f++) {
            mlai_weight_source source = {.reader = reader,
                                         .fp8_block_rows = 128,
                                         .fp8_block_cols = 128,
                                         .format = f == 0 ? MLA_FORMAT_F32 : MLA_FORMAT_BF16};
            mlai_matrix matrix = {0};
            mla_diag diag = {{0}};
            must(mlai_matrix_load(&source, tensors[t].name, "bias", 2, 3, &matrix, &diag), &diag,
                 tensors[t].name);
            /* Only bf16 wanted as bf16, or f32 as f32, is borrowed. */
            bool is_same = mlai_st_dtype_format(tensors[t].dtype) == source.format;
            assert_true((matrix.owned == NULL) == is_same);
            assert_true(matrix.bias[0] == 1.0f && matrix.bias[1] == -2.0f);
            for (int i = 0; i < 6; i++) {
                float want;
                float got;
                mlai_model_row_to_f32(&want,
                                      (const char *)tensors[t].data +
                                          i * mlai_st_dtype_bytes(tensors[t].dtype),
                                      mlai_st_dtype_format(tensors[t].dtype), 1);
                mlai_model_row_round(&want, source.format, 1);
                mlai_model_row_to_f32(
                    &got, (const char *)matrix.data + i * mla_format_bytes(source.format),
                    source.format, 1);
                assert_memory_equal(&got, &want, sizeof got);
            }
            mlai_matrix_free(&matrix);
        }
    }
    mlai_st_close(reader);
}

static void test_refusals(void **state)
{
    (void)state;
    uint8_t bytes[64] = {0};
    mlai_st_tensor tensors[] = {{.name = "bare",
                                 .dtype = MLAI_ST_F8_E4M3,
                                 .rank = 2,
                                 .shape = {4, 4},
                                 .data = bytes,
                                 .size_bytes = 16},
                                {.name = "wrong",
                                 .dtype = MLAI_ST_F8_E4M3,
                                 .rank = 2,
                                 .shape = {4, 4},
                                 .data = bytes,
                                 .size_bytes = 16},
                                {.name = "wrong_scale_inv",
                                 .dtype = MLAI_ST_F32,
                                 .rank = 2,
                                 .shape = {2, 1},
                                 .data = bytes,
                                 .size_bytes = 8},
                                {.name = "typed",
                                 .dtype = MLAI_ST_F8_E4M3,
                                 .rank = 2,
                                 .shape = {4, 4},
                                 .data = bytes,
                                 .size_bytes = 16},
                                {.name = "typed_scale_inv",
                                 .dtype = MLAI_ST_I32,
                                 .rank = 2,
                                 .shape = {1, 1},
                                 .data = bytes,
                                 .size_bytes = 4},
                                {.name = "ints",
                                 .dtype = MLAI_ST_I32,
                                 .rank = 2,
                                 .shape = {4, 4},
                                 .data = bytes,
                                 .size_bytes = 64},
                                {.name = "e5m2",
                                 .dtype = MLAI_ST_F8_E5M2,
                                 .rank = 2,
                                 .shape = {4, 4},
                                 .data = bytes,
                                 .size_bytes = 16},
                                {.name = "flat",
                                 .dtype = MLAI_ST_BF16,
                                 .rank = 1,
                                 .shape = {16},
                                 .data = bytes,
                                 .size_bytes = 32}};
    static const char *const names[] = {"bare", "wrong", "typed", "ints", "e5m2", "flat", "gone"};
    mlai_st_reader *reader = reader_of(tensors, 8);
    mlai_weight_source source = {
        .reader = reader, .fp8_block_rows = 128, .fp8_block_cols = 128, .format = MLA_FORMAT_F32};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        mlai_matrix matrix = {0};
        mla_diag diag = {{0}};
        assert_int_equal(mlai_matrix_load(&source, names[i], NULL, 4, 4, &matrix, &diag),
                         MLA_ERROR_FILE);
        if (strstr(diag.text, names[i]) == NULL)
            fail_msg("\"%s\" does not name %s", diag.text, names[i]);
        assert_null(matrix.data);
    }
    float *vector = NULL;
    assert_int_equal(mlai_vector_load(&source, "flat", 15, &vector, NULL), MLA_ERROR_FILE);
    assert_int_equal(mlai_vector_load(&source, "ints", 16, &vector, NULL), MLA_ERROR_FILE);
    assert_null(vector);
    mlai_st_close(reader);
}

/* An FP8 model equals its dequantised twin bit for bit, and the original within FP8's error. */
static void test_fp8_models(void **state)
{
    (void)state;
    static const char *const names[] = {"v2_grouped", "v3_full_dims_16heads",
                                        "v3_noqlora_small_dims", "v3_yarn_vdim_differs"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char source[PATH_BYTES];
        char name[64];
        char folders[2][PATH_BYTES];
        float *logits[3];
        snprintf(name, sizeof name, "variants/%s", names[i]);
        model_path(name, source);
        for (int side = 0; side < 2; side++) {
            snprintf(name, sizeof name, "%s-%d", names[i], side);
            scratch_folder(name, folders[side]);
        }
        make_fp8_checkpoint(source, folders[0], folders[1]);
        mla_context *ctx = NULL;
        mla_diag diag = {{0}};
        must(mla_context_create(NULL, &ctx, &diag), &diag, "context");
        const int32_t ids[12] = {5, 17, 80, 3, 41, 41, 9, 66, 0, 95, 23, 54};
        for (int side = 0; side < 3; side++) {
            mla_model *model = NULL;
            mla_model_session_options options = MLA_MODEL_SESSION_OPTIONS_INIT;
            must(mla_model_load(ctx, side < 2 ? folders[side] : source, MLA_FORMAT_F32, &model,
                                &diag),
                 &diag, names[i]);
            logits[side] = prefill_logits(model, &options, ids, 12);
            mla_model_destroy(model);
        }
        assert_memory_equal(logits[0], logits[1], 12 * 96 * sizeof(float));
        double error = relative_error(logits[0], logits[2], 12 * 96);
        assert_true(error > 1e-4 && error < 0.15);
        for (int side = 0; side < 3; side++)
            free(logits[side]);
        mla_context_destroy(ctx);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_block_scales),
        cmocka_unit_test(test_plain_formats),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_fp8_models),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
