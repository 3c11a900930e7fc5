/*
 * Projections through CBLAS (linear.h), and the bf16 paths around it. Shapes: x [m, cols], W [rows,
 * cols], y [m, rows], f32 sums. With a BLAS that may be called from several threads at once, every
 * product splits W's rows over the context's threads, each part one single-threaded call: two pools
 * that spin beside each other cost more than the BLAS's own split gains. The own bf16 product is
 * one dot product for each y value in a fixed order (two accumulators of 16 lanes, then a fold), so
 * the number of threads does not change it. Called by mlp.c, forward.c and attention.c.
 */
#include "linear.h"

#include "convert.h"
#include "fault.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>

#define PANEL_VALUES ((int64_t)1 << 21)
#define MIN_PANEL_ROWS 64
#define MAX_DOT_TOKENS 4
#define NARROW_TOKENS 256
/* Weights below which waking threads costs more than the product. */
#define MIN_TASK_VALUES ((int64_t)1 << 16)

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

/* sum x[i] * w[i] with w in bf16. */
MLAI_CPU_CLONES static float dot_bf16(const float *x, const uint16_t *w, int64_t n)
{
    f32x16 sum[2] = {{0}, {0}};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        for (int j = 0; j < 2; j++) {
            u16x16 half;
            f32x16 left;
            f32x16 right;
            memcpy(&half, w + i + 16 * j, sizeof half);
            memcpy(&left, x + i + 16 * j, sizeof left);
            u32x16 wide = __builtin_convertvector(half, u32x16) << 16;
            memcpy(&right, &wide, sizeof right);
            sum[j] += left * right;
        }
    }
    sum[0] += sum[1];
    float total = 0.0f;
    for (int lane = 0; lane < 16; lane++)
        total += sum[0][lane];
    for (; i < n; i++)
        total += x[i] * mlai_model_bf16_to_f32(w[i]);
    return total;
}

/*
 * One product, split over W's rows. `run_rows` computes rows first .. end of it on one thread.
 */
typedef struct product_job product_job;
struct product_job {
    void (*run_rows)(const product_job *job, int64_t first, int64_t end);
    const void *w;
    int64_t rows;
    int64_t cols;
    const float *x;
    const uint16_t *narrow; /* x in bf16, for cblas_sbgemm */
    int64_t ldx;
    int64_t m;
    float *y;
    int64_t ldy;
    int32_t n_tasks;
};

static void product_task(void *arg, int32_t task)
{
    const product_job *job = arg;
    /* Cut at multiples of 16 rows, so that no task but the last has a ragged edge. */
    int64_t blocks = (job->rows + 15) / 16;
    int64_t first = blocks * task / job->n_tasks * 16;
    int64_t end = blocks * (task + 1) / job->n_tasks * 16;
    end = end < job->rows ? end : job->rows;
    if (first < end)
        job->run_rows(job, first, end);
}

/* Runs the job in as many tasks as its work is worth; work counts values read or computed with. */
static void run_product(mlai_compute *compute, product_job *job, int64_t work)
{
    int64_t tasks = work / MIN_TASK_VALUES;
    int64_t threads = mla_context_n_threads(compute->ctx);
    tasks = tasks < threads ? tasks : threads;
    job->n_tasks = tasks > 1 ? (int32_t)tasks : 1;
    if (job->n_tasks == 1)
        job->run_rows(job, 0, job->rows);
    else
        mla_context_run(compute->ctx, job->n_tasks, product_task, job);
}

static void dot_rows(const product_job *job, int64_t first, int64_t end)
{
    for (int64_t r = first; r < end; r++) {
        const uint16_t *row = (const uint16_t *)job->w + r * job->cols;
        for (int64_t t = 0; t < job->m; t++)
            job->y[t * job->ldy + r] = dot_bf16(job->x + t * job->ldx, row, job->cols);
    }
}

static void gemm_rows(const product_job *job, int64_t first, int64_t end)
{
    const float *w = (const float *)job->w + first * job->cols;
    int rows = (int)(end - first);
    int cols = (int)job->cols;
    if (job->m == 1)
        cblas_sgemv(CblasRowMajor, CblasNoTrans, rows, cols, 1.0f, w, cols, job->x, 1, 0.0f,
                    job->y + first, 1);
    else
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)job->m, rows, cols, 1.0f, job->x,
                    (int)job->ldx, w, cols, 0.0f, job->y + first, (int)job->ldy);
}

/* y = x W^T with f32 weights. */
static void gemm_f32(mlai_compute *compute, const float *w, int64_t rows, int64_t cols,
                     const float *x, int64_t ldx, int64_t m, float *y, int64_t ldy)
{
    product_job job = {.run_rows = gemm_rows,
                       .w = w,
                       .rows = rows,
                       .cols = cols,
                       .x = x,
                       .ldx = ldx,
                       .m = m,
                       .y = y,
                       .ldy = ldy};
    /* A product of 8 tokens takes about as long as the read of its weights. */
    if (compute->is_blas_shared)
        run_product(compute, &job, rows * cols * (m < 8 ? 8 : m) / 8);
    else
        gemm_rows(&job, 0, rows);
}

/* Widens W's rows to f32 at y. */
static void widen_rows(const product_job *job, int64_t first, int64_t end)
{
    mlai_model_row_to_f32(job->y + first * job->cols, (const uint16_t *)job->w + first * job->cols,
                          MLA_FORMAT_BF16, (end - first) * job->cols);
}

static int64_t panel_rows(const mlai_matrix *w)
{
    int64_t rows = PANEL_VALUES / w->cols;
    rows = rows > MIN_PANEL_ROWS ? rows : MIN_PANEL_ROWS;
    return rows < w->rows ? rows : w->rows;
}

static void linear_panels(mlai_compute *compute, const mlai_matrix *w, const float *x, int64_t ldx,
                          int64_t m, float *y, int64_t ldy)
{
    int64_t step = panel_rows(w);
    for (int64_t first = 0; first < w->rows; first += step) {
        int64_t rows = first + step < w->rows ? step : w->rows - first;
        product_job widen = {.run_rows = widen_rows,
                             .w = (const uint16_t *)w->data + first * w->cols,
                             .rows = rows,
                             .cols = w->cols,
                             .y = compute->panel};
        run_product(compute, &widen, rows * w->cols);
        gemm_f32(compute, compute->panel, rows, w->cols, x, ldx, m, y + first, ldy);
    }
}

#ifdef MLAI_HAVE_SBGEMM
/* y = x W^T with both in bf16; x is [m, cols] without gaps. */
static void gemm_bf16(const uint16_t *w, int64_t rows, int64_t cols, const uint16_t *x, int64_t m,
                      float *y, int64_t ldy)
{
    cblas_sbgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)m, (int)rows, (int)cols, 1.0f, x,
                 (int)cols, w, (int)cols, 0.0f, y, (int)ldy);
}

static void gemm_bf16_rows(const product_job *job, int64_t first, int64_t end)
{
    gemm_bf16((const uint16_t *)job->w + first * job->cols, end - first, job->cols, job->narrow,
              job->m, job->y + first, job->ldy);
}

static void linear_sbgemm(mlai_compute *compute, const mlai_matrix *w, const float *x, int64_t ldx,
                          int64_t m, float *y, int64_t ldy)
{
    for (int64_t first = 0; first < m; first += NARROW_TOKENS) {
        int64_t tokens = first + NARROW_TOKENS < m ? NARROW_TOKENS : m - first;
        for (int64_t t = 0; t < tokens; t++)
            mlai_model_row_from_f32(compute->narrow + t * w->cols, MLA_FORMAT_BF16,
                                    x + (first + t) * ldx, w->cols);
        product_job job = {.run_rows = gemm_bf16_rows,
                           .w = w->data,
                           .rows = w->rows,
                           .cols = w->cols,
                           .narrow = compute->narrow,
                           .m = tokens,
                           .y = y + first * ldy,
                           .ldy = ldy};
        if (compute->is_blas_shared)
            run_product(compute, &job, w->rows * w->cols * tokens / 8);
        else
            gemm_bf16_rows(&job, 0, w->rows);
    }
}
#endif

void mlai_linear(mlai_compute *compute, const mlai_matrix *w, const float *x, int64_t ldx,
                 int64_t m, float *y, int64_t ldy)
{
    if (m <= 0 || w->rows == 0)
        return;
    product_job dots = {.run_rows = dot_rows,
                        .w = w->data,
                        .rows = w->rows,
                        .cols = w->cols,
                        .x = x,
                        .ldx = ldx,
                        .m = m,
                        .y = y,
                        .ldy = ldy};
    if (w->format == MLA_FORMAT_F32)
        gemm_f32(compute, w->data, w->rows, w->cols, x, ldx, m, y, ldy);
    else if (m <= MAX_DOT_TOKENS)
        run_product(compute, &dots, w->rows * w->cols);
#ifdef MLAI_HAVE_SBGEMM
    else if (compute->has_bf16_gemm)
        linear_sbgemm(compute, w, x, ldx, m, y, ldy);
#endif
    else
        linear_panels(compute, w, x, ldx, m, y, ldy);
    for (int64_t t = 0; w->bias != NULL && t < m; t++) {
        for (int64_t r = 0; r < w->rows; r++)
            y[t * ldy + r] += w->bias[r];
    }
}

/* Values in [-1, 1) with 7 significant bits, so that they are exact in bf16 too. */
static void fill_check(float *values, int64_t n, uint32_t seed)
{
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (float)((int32_t)(seed >> 24) - 128) * (1.0f / 128.0f);
    }
}

/* Whether the BLAS gives x W^T to rounding for one shape; `is_bf16` asks cblas_sbgemm. */
static bool check_product(mlai_compute *compute, int64_t m, int64_t rows, int64_t cols,
                          bool is_bf16)
{
    float *w = malloc((size_t)(rows * cols + m * cols + m * rows) * sizeof *w);
    uint16_t *narrow = malloc((size_t)((rows + m) * cols) * sizeof *narrow);
    bool ok = w != NULL && narrow != NULL;
    if (ok) {
        float *x = w + rows * cols;
        float *y = x + m * cols;
        fill_check(w, (rows + m) * cols, (uint32_t)(m + rows + cols));
        for (int64_t i = 0; i < m * rows; i++)
            y[i] = NAN;
        mlai_model_row_from_f32(narrow, MLA_FORMAT_BF16, w, (rows + m) * cols);
#ifdef MLAI_HAVE_SBGEMM
        if (is_bf16)
            gemm_bf16(narrow, rows, cols, narrow + rows * cols, m, y, rows);
#endif
        if (!is_bf16)
            gemm_f32(compute, w, rows, cols, x, cols, m, y, rows);
        for (int64_t t = 0; t < m; t++) {
            for (int64_t r = 0; r < rows; r++) {
                double sum = 0.0;
                for (int64_t c = 0; c < cols; c++)
                    sum += (double)x[t * cols + c] * (double)w[r * cols + c];
                /* NaN, where the BLAS wrote nothing, compares false. */
                ok = ok && fabs((double)y[t * rows + r] - sum) <= 1e-4 * (double)cols;
            }
        }
    }
    free(narrow);
    free(w);
    return ok;
}

static bool check_products(mlai_compute *compute, bool is_bf16)
{
    static const int64_t shapes[][3] = {{1, 65, 130}, {5, 33, 64}, {17, 96, 257}, {64, 130, 31}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        if (!check_product(compute, shapes[i][0], shapes[i][1], shapes[i][2], is_bf16))
            return false;
    }
    return true;
}

mla_status mlai_compute_init(mla_context *ctx, int32_t format, mlai_compute *out, mla_diag *diag)
{
    *out = (mlai_compute){.ctx = ctx, .format = format};
#ifdef MLAI_HAVE_OPENBLAS
    /* 1: built with threads of its own, and so with the locks that calls from several need. */
    out->is_blas_shared = openblas_get_parallel() == 1;
    openblas_set_num_threads(out->is_blas_shared ? 1 : mla_context_n_threads(ctx));
#endif
    if (!check_products(out, false))
        return mlai_model_fail(diag, MLA_ERROR_UNSUPPORTED,
                               "the BLAS gives wrong products on this CPU: take a newer one, or "
                               "with OpenBLAS set OPENBLAS_CORETYPE=Haswell");
#ifdef MLAI_HAVE_SBGEMM
    out->has_bf16_gemm = format == MLA_FORMAT_BF16 && check_products(out, true);
#endif
    return MLA_OK;
}

mla_status mlai_compute_reserve(mlai_compute *compute, const mlai_matrix *matrix, mla_diag *diag)
{
    if (matrix->format != MLA_FORMAT_BF16)
        return MLA_OK;
    int64_t panel = compute->has_bf16_gemm ? 0 : panel_rows(matrix) * matrix->cols;
    int64_t narrow = compute->has_bf16_gemm ? NARROW_TOKENS * matrix->cols : 0;
    if (panel > compute->panel_values) {
        free(compute->panel);
        compute->panel = malloc((size_t)panel * sizeof *compute->panel);
        compute->panel_values = compute->panel != NULL ? panel : 0;
    }
    if (narrow > compute->narrow_values) {
        free(compute->narrow);
        compute->narrow = malloc((size_t)narrow * sizeof *compute->narrow);
        compute->narrow_values = compute->narrow != NULL ? narrow : 0;
    }
    if (compute->panel_values < panel || compute->narrow_values < narrow)
        return mlai_model_fail_memory(diag, "scratch for bf16 products",
                                      (unsigned long long)(panel * 4 + narrow * 2));
    return MLA_OK;
}

void mlai_compute_free(mlai_compute *compute)
{
    free(compute->panel);
    free(compute->narrow);
    *compute = (mlai_compute){0};
}
