/*
 * A cblas_sbgemm for tests: C = A B^T in row-major order, bf16 in, f64 sums. Many builds of BLAS
 * lack the function; with this one the path around it is tested everywhere.
 */
#include <convert.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

void cblas_sbgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                  const uint16_t *a, int lda, const uint16_t *b, int ldb, float beta, float *c,
                  int ldc);

void cblas_sbgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                  const uint16_t *a, int lda, const uint16_t *b, int ldb, float beta, float *c,
                  int ldc)
{
    /* CBLAS's values of row-major, no transpose, transpose. */
    bool is_known =
        order == 101 && trans_a == 111 && trans_b == 112 && alpha == 1.0f && beta == 0.0f;
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = is_known ? 0.0 : NAN;
            for (int x = 0; x < k; x++)
                sum += (double)mlai_model_bf16_to_f32(a[(int64_t)i * lda + x]) *
                       (double)mlai_model_bf16_to_f32(b[(int64_t)j * ldb + x]);
            c[(int64_t)i * ldc + j] = (float)sum;
        }
    }
}
