/*
 * The bench refuses to time what is wrong: rows with planted mistakes are put before the built-in
 * ones, and bench_measure must turn each down, while the right one passes.
 */
#include "measure.h"
#include "test.h"
#include <math.h>
#include <mla/solution.h>
#include <stdlib.h>
#include <string.h>

typedef enum mistake { NONE, ZERO_OUTPUT, LAST_KEY_MISSED, HEADS_SWAPPED, LSE_BASE_2 } mistake;

/* A solution's functions have no user pointer; tests run one after the other. */
static mistake planted;
static mla_context *right_context;

static int32_t accept_all(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    (void)problem;
    (void)why;
    (void)why_bytes;
    return 1;
}

static uint64_t no_workspace(const mla_problem *problem, const mla_exec *exec)
{
    (void)problem;
    (void)exec;
    return 0;
}

static double no_cost(const mla_problem *problem, const mla_exec *exec)
{
    (void)problem;
    (void)exec;
    return 0.0;
}

static void spoil(const mla_decode_params *p)
{
    int64_t heads = p->out.shape[p->out.rank - 2];
    int64_t rows = p->out.shape[0] * (p->out.rank == 4 ? p->out.shape[1] : 1) * heads;
    size_t row_bytes = (size_t)p->kv_lora_rank * 2;
    char *out = p->out.data;
    float *lse = p->lse.data;
    if (planted == ZERO_OUTPUT)
        memset(out, 0, (size_t)rows * row_bytes);
    if (planted == HEADS_SWAPPED) {
        char *row = malloc(row_bytes);
        memcpy(row, out, row_bytes);
        memcpy(out, out + row_bytes, row_bytes);
        memcpy(out + row_bytes, row, row_bytes);
        free(row);
    }
    for (int64_t i = 0; planted == LSE_BASE_2 && i < rows; i++)
        lse[i] /= 0.69314718f;
}

/* The right answer of another context, spoiled. */
static mla_status run_planted(const mla_exec *exec, const mla_problem *problem, const void *params,
                              mla_diag *diag)
{
    (void)exec;
    mla_decode_params p = *(const mla_decode_params *)params;
    int64_t batch = p.cache_seqlens.shape[0];
    int32_t *lens = malloc((size_t)batch * sizeof *lens);
    for (int64_t i = 0; i < batch; i++) {
        int32_t len = ((const int32_t *)p.cache_seqlens.data)[i];
        lens[i] = planted == LAST_KEY_MISSED && len > 0 ? len - 1 : len;
    }
    p.cache_seqlens = mla_tensor_1d(lens, MLA_FORMAT_I32, batch);
    memset(&p.call, 0, sizeof p.call);
    mla_status status =
        mla_workspace_bytes(right_context, problem, NULL, &p.call.workspace_bytes, diag);
    p.call.workspace = aligned_alloc(64, (size_t)(p.call.workspace_bytes / 64 + 1) * 64);
    if (status == MLA_OK)
        status = mla_decode_with_kvcache(right_context, &p, diag);
    if (status == MLA_OK)
        spoil(&p);
    free(p.call.workspace);
    free(lens);
    return status;
}

static const mla_solution planted_row = {
    .struct_size = sizeof planted_row,
    .version = MLA_SOLUTION_VERSION,
    .op = MLA_OP_DECODE,
    .device_type = MLA_DEVICE_CPU,
    .name = "decode_planted",
    .family = "planted",
    .formats = "any",
    .features = "wrong on purpose",
    .cpu_features_text = "",
    .accepts = accept_all,
    .workspace_bytes = no_workspace,
    .cost_us = no_cost,
    .run = run_planted,
};

static bool measure(mistake what, bench_row *row)
{
    mla_context *ctx = NULL;
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.ignore_environment = 1;
    options.n_threads = 2;
    assert_int_equal(mla_context_create(&options, &ctx, NULL), MLA_OK);
    assert_int_equal(mla_context_add_solutions(ctx, &planted_row, 1, NULL), MLA_OK);
    workload w = workload_default(MLA_OP_DECODE);
    w.heads = 4;
    w.batch = 2;
    w.kv_len = 1000;
    workload_settle(&w);
    bench_settings settings = {.rounds = 1, .seconds = 0.001, .seed = 1};
    settings.solution = "planted";
    planted = what;
    bool good = bench_measure(ctx, &w, NULL, &settings, row);
    mla_context_destroy(ctx);
    return good;
}

static void test_right_row_is_timed(void **state)
{
    bench_row row;
    (void)state;
    assert_true(measure(NONE, &row));
    assert_true(row.verdict.is_good);
    assert_string_equal(row.solution, "decode_planted");
    assert_true(row.us_median > 0.0);
}

static void test_wrong_rows_are_refused(void **state)
{
    (void)state;
    for (int what = ZERO_OUTPUT; what <= LSE_BASE_2; what++) {
        bench_row row;
        assert_false(measure((mistake)what, &row));
        assert_false(row.verdict.is_good);
        assert_true(row.verdict.n_samples > 0);
        assert_true(row.us_median == 0.0);
    }
}

static int make_right_context(void **state)
{
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    (void)state;
    options.ignore_environment = 1;
    options.n_threads = 1;
    return mla_context_create(&options, &right_context, NULL) == MLA_OK ? 0 : -1;
}

static int end_right_context(void **state)
{
    (void)state;
    mla_context_destroy(right_context);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right_row_is_timed),
        cmocka_unit_test(test_wrong_rows_are_refused),
    };
    return cmocka_run_group_tests(tests, make_right_context, end_right_context);
}
