/*
 * Products against a plain double loop: f32 and bf16 weights, token counts on both sides of every
 * switch of path, ragged extents, strided rows, bias. Bounds: f32 sums of n terms, so the error of
 * a row relative to the norm of its terms stays below 4e-6 for these sizes.
 */
#include "support.h"
#include "test.h"

#include <convert.h>
#include <linear.h>
#include <math.h>
#include <stdlib.h>

static void check_shape(mlai_compute *compute, int32_t format, int64_t m, int64_t rows,
                        int64_t cols, bool has_bias)
{
    int64_t ldx = cols + 3;
    int64_t ldy = rows + 5;
    float *w = calloc((size_t)(rows * cols), sizeof *w);
    float *x = calloc((size_t)(m * ldx), sizeof *x);
    float *y = calloc((size_t)(m * ldy), sizeof *y);
    uint16_t *narrow = calloc((size_t)(rows * cols), sizeof *narrow);
    fill_random(w, rows * cols, (uint64_t)(rows + cols));
    fill_random(x, m * ldx, (uint64_t)m);
    for (int64_t i = 0; i < m * ldy; i++)
        y[i] = NAN;
    mlai_model_row_round(x, format, m * ldx);
    mlai_model_row_round(w, format, rows * cols);
    mlai_model_row_from_f32(narrow, MLA_FORMAT_BF16, w, rows * cols);
    mlai_matrix matrix = {.format = format,
                          .rows = rows,
                          .cols = cols,
                          .data = format == MLA_FORMAT_F32 ? (void *)w : (void *)narrow};
    float *bias = calloc((size_t)rows, sizeof *bias);
    fill_random(bias, rows, 77);
    matrix.bias = has_bias ? bias : NULL;
    mla_diag diag = {{0}};
    must(mlai_compute_reserve(compute, &matrix, &diag), &diag, "reserve");
    mlai_linear(compute, &matrix, x, ldx, m, y, ldy);
    double worst = 0.0;
    for (int64_t t = 0; t < m; t++) {
        for (int64_t r = 0; r < rows; r++) {
            double sum = has_bias ? bias[r] : 0.0;
            double size = fabs(sum);
            for (int64_t c = 0; c < cols; c++) {
                double term = (double)x[t * ldx + c] * w[r * cols + c];
                sum += term;
                size += fabs(term);
            }
            double error = fabs(y[t * ldy + r] - sum) / size;
            if (!(error <= 4e-6))
                fail_msg("%s m %d rows %d cols %d at (%d, %d): %g, want %g",
                         mla_format_name(format), (int)m, (int)rows, (int)cols, (int)t, (int)r,
                         (double)y[t * ldy + r], sum);
            worst = error > worst ? error : worst;
        }
        for (int64_t r = rows; r < ldy; r++)
            assert_true(isnan(y[t * ldy + r]));
    }
    free(bias);
    free(narrow);
    free(y);
    free(x);
    free(w);
}

static void test_products(void **state)
{
    (void)state;
    static const int64_t tokens[] = {1, 2, 4, 5, 8, 33, 300};
    static const int64_t shapes[][2] = {{1, 1},    {3, 31},    {17, 32},   {96, 33},
                                        {258, 96}, {130, 257}, {512, 576}, {64, 2050}};
    static const int32_t formats[] = {MLA_FORMAT_F32, MLA_FORMAT_BF16};
    for (int threads = 1; threads <= 2; threads++) {
        mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
        mla_context *ctx = NULL;
        mla_diag diag = {{0}};
        options.n_threads = threads;
        must(mla_context_create(&options, &ctx, &diag), &diag, "context");
        for (int f = 0; f < 2; f++) {
            mlai_compute compute;
            must(mlai_compute_init(ctx, formats[f], &compute, &diag), &diag, "compute");
            for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
                for (size_t t = 0; t < sizeof tokens / sizeof tokens[0]; t++)
                    check_shape(&compute, formats[f], tokens[t], shapes[s][0], shapes[s][1],
                                (s + t) % 2 == 0);
            }
            mlai_compute_free(&compute);
        }
        mla_context_destroy(ctx);
    }
}

/* A decode's product does not depend on how many threads split its rows. */
static void test_threads_agree(void **state)
{
    (void)state;
    enum { ROWS = 1000, COLS = 777 };
    static uint16_t w[ROWS * COLS];
    static float x[COLS];
    static float y[3][ROWS];
    uint64_t random = 5;
    for (int i = 0; i < ROWS * COLS; i++)
        w[i] = mlai_model_bf16_from_f32(random_value(&random));
    fill_random(x, COLS, 9);
    mlai_matrix matrix = {.format = MLA_FORMAT_BF16, .rows = ROWS, .cols = COLS, .data = w};
    for (int threads = 1; threads <= 3; threads++) {
        mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
        mla_context *ctx = NULL;
        mlai_compute compute;
        mla_diag diag = {{0}};
        options.n_threads = threads;
        must(mla_context_create(&options, &ctx, &diag), &diag, "context");
        must(mlai_compute_init(ctx, MLA_FORMAT_BF16, &compute, &diag), &diag, "compute");
        mlai_linear(&compute, &matrix, x, COLS, 1, y[threads - 1], ROWS);
        mlai_compute_free(&compute);
        mla_context_destroy(ctx);
    }
    assert_memory_equal(y[0], y[1], sizeof y[0]);
    assert_memory_equal(y[0], y[2], sizeof y[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_threads_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
