/*
 * The parts of `mla bench --device cuda` that need no GPU: baseline files, figures of a row, bars,
 * tables and the picture.
 */
#include "cuda_report.h"
#include "test.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char file_text[] =
    "op,peer,dtype,batch,heads,q_len,kv_len,causal,us_per_layer_call,us_with_plan,tflops,gbps\r\n"
    "decode,FlashMLA,bf16,1,16,1,1024,1,14.8,40.1,2.4,82\n"
    "decode,FlashMLA,bf16,16,16,1,1024,1,20.0,46.1,30.1,1024\n"
    "\n"
    "decode,FlashMLA,bf16,128,16,1,4096,1,150,186.7,120.7,4022\n"
    "prefill,FlashAttention-3,bf16,1,16,512,512,1,24.1,24.1,55.6,\n"
    "prefill,FlashAttention-3,bf16,4,16,512,81920,0,2427.4,2427.4,707.7,\n";

static void test_reads_a_baseline(void **state)
{
    (void)state;
    baseline b;
    assert_true(baseline_parse("text", file_text, &b));
    assert_int_equal(b.n, 5);
    assert_int_equal(b.rows[1].w.batch, 16);
    assert_int_equal(b.rows[1].w.kv_dtype, MLA_FORMAT_BF16);
    assert_true(b.rows[1].us == 20.0);
    assert_string_equal(b.rows[3].peer, "FlashAttention-3");
    assert_int_equal(b.rows[3].w.kv_heads, 16);
    assert_true(b.rows[3].w.is_causal);
    assert_false(b.rows[4].w.is_causal);

    workload w = b.rows[2].w;
    w.kv_dtype = MLA_FORMAT_E4M3; /* its bf16 peer stands beside it */
    assert_ptr_equal(baseline_find(&b, &w), &b.rows[2]);
    w.kv_len++;
    assert_null(baseline_find(&b, &w));
    baseline_free(&b);
}

static void test_columns_have_defaults(void **state)
{
    (void)state;
    baseline b;
    assert_true(baseline_parse("text",
                               "us_per_layer_call,kv_len,q_len,heads,batch,op,page_size,kv_dtype\n"
                               "5.5,100,2,8,3,decode,16,e4m3\n",
                               &b));
    assert_int_equal(b.n, 1);
    assert_int_equal(b.rows[0].w.page_size, 16);
    assert_int_equal(b.rows[0].w.dtype, MLA_FORMAT_BF16);
    assert_int_equal(b.rows[0].w.kv_dtype, MLA_FORMAT_E4M3);
    assert_int_equal(b.rows[0].w.batch, 3);
    assert_true(b.rows[0].w.is_causal);
    assert_string_equal(b.rows[0].peer, "peer");
    baseline_free(&b);
}

static void test_refuses_wrong_baselines(void **state)
{
    (void)state;
    static const char *const wrong[] = {
        "",
        "op,batch,heads,q_len,kv_len\ndecode,1,1,1,1\n",                             /* no time */
        "op,batch,heads,q_len,kv_len,us_per_layer_call\n",                           /* no row */
        "op,batch,heads,q_len,kv_len,us_per_layer_call\nfly,1,1,1,1,5\n",            /* operator */
        "op,batch,heads,q_len,kv_len,us_per_layer_call\ndecode,1,1,1,x,5\n",         /* number */
        "op,batch,heads,q_len,kv_len,us_per_layer_call\ndecode,1,1,1,1,0\n",         /* time 0 */
        "op,batch,heads,q_len,kv_len,us_per_layer_call\ndecode,1,1,1,1,nan\n",       /* no time */
        "op,batch,heads,q_len,kv_len,us_per_layer_call\ndecode,1,1,1\n",             /* short */
        "op,batch,heads,q_len,kv_len,us_per_layer_call,dtype\ndecode,1,1,1,1,5,f9\n" /* format */
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        baseline b;
        assert_false(baseline_parse("text", wrong[i], &b));
        assert_null(b.rows);
    }
    baseline b;
    assert_false(baseline_read("/no/such/file", &b));
}

static const cuda_ceilings ceilings = {
    .read_gbps = 4000.0, .copy_gbps = 3000.0, .bf16_tflops = 800.0, .fp8_tflops = 1400.0};

/* A row timed at `us`, beside the baseline's row for its shape. */
static cuda_row timed(const baseline *b, const workload *w, double us)
{
    cuda_row row;
    memset(&row, 0, sizeof row);
    row.w = *w;
    row.is_timed = true;
    row.verdict.is_good = true;
    row.us_median = us;
    row.enqueue_us = 2.0;
    row.work = (bench_work){us * 400e6, us * 2e6, false};
    const baseline_row *peer = baseline_find(b, w);
    if (peer != NULL) {
        row.peer_us = peer->us;
        memcpy(row.peer, peer->peer, sizeof row.peer);
    }
    cuda_row_finish(&row, &ceilings);
    return row;
}

static void test_figures_of_a_row(void **state)
{
    (void)state;
    baseline b;
    assert_true(baseline_parse("text", file_text, &b));
    cuda_row row = timed(&b, &b.rows[2].w, 100.0);
    assert_true(fabs(row.tflops - 400.0) < 1e-6);
    assert_true(fabs(row.gbps - 2000.0) < 1e-6);
    /* 40 GFLOP at 800 TFLOP/s and 200 MB at 4 TB/s both take 50 us. */
    assert_true(fabs(row.floor_us - 50.0) < 1e-6);
    assert_true(fabs(row.share - 0.5) < 1e-9);
    assert_true(fabs(row.ratio - 1.5) < 1e-9);

    row.w.dtype = MLA_FORMAT_E4M3;
    row.work.flops *= 7.0; /* 280 GFLOP at 1400 */
    cuda_row_finish(&row, &ceilings);
    assert_true(fabs(row.floor_us - 200.0) < 1e-6);

    row.work.is_moving = true; /* only bytes count, against the copy */
    cuda_row_finish(&row, &ceilings);
    assert_true(fabs(row.floor_us - 200.0 / 3.0) < 1e-6);
    baseline_free(&b);
}

static const cuda_group_result *find_group(const cuda_group_result *results, int32_t n,
                                           const char *start)
{
    for (int32_t i = 0; i < n; i++) {
        if (strncmp(results[i].name, start, strlen(start)) == 0)
            return &results[i];
    }
    return NULL;
}

static void test_bars(void **state)
{
    (void)state;
    cuda_group_result results[CUDA_MAX_GROUPS];
    baseline b;
    assert_true(baseline_parse("text", file_text, &b));
    cuda_row rows[6] = {timed(&b, &b.rows[0].w, 14.8 / 4.0), timed(&b, &b.rows[1].w, 20.0),
                        timed(&b, &b.rows[2].w, 160.0), timed(&b, &b.rows[3].w, 10.0)};
    workload f16 = b.rows[2].w;
    f16.dtype = f16.kv_dtype = MLA_FORMAT_F16;
    rows[4] = timed(&b, &f16, 320.0);
    int32_t n = cuda_groups(rows, 5, results);

    const cuda_group_result *small = find_group(results, n, "decode bf16, batch 1 to 16");
    assert_non_null(small);
    assert_int_equal(small->n_rows, 2);
    assert_true(fabs(small->mean - 2.0) < 1e-9); /* of 4 and 1 */
    assert_true(fabs(small->least - 1.0) < 1e-9);
    assert_true(small->is_reached);
    const cuda_group_result *large = find_group(results, n, "decode bf16, batch 64 and 128");
    assert_non_null(large);
    assert_true(fabs(large->least - 150.0 / 160.0) < 1e-9);
    assert_false(large->is_reached); /* the least is good enough, the mean is not */
    assert_true(find_group(results, n, "prefill bf16, 1 x 512")->is_reached);
    const cuda_group_result *half = find_group(results, n, "f16 against bf16");
    assert_non_null(half);
    assert_true(fabs(half->least - 0.5) < 1e-9);
    assert_false(half->is_reached);
    assert_null(find_group(results, n, "ds656"));
    assert_null(find_group(results, n, "second solution"));

    /* A row that could not be timed takes its group's bar down. */
    rows[1].is_timed = false;
    n = cuda_groups(rows, 5, results);
    small = find_group(results, n, "decode bf16, batch 1 to 16");
    assert_int_equal(small->n_missing, 1);
    assert_false(small->is_reached);

    /* A second solution's rows count in its own group only. */
    rows[5] = timed(&b, &b.rows[2].w, 150.0 / 0.45);
    rows[5].is_second = true;
    n = cuda_groups(rows, 6, results);
    assert_int_equal(find_group(results, n, "decode bf16, batch 64 and 128")->n_rows, 1);
    assert_true(find_group(results, n, "second solution, decode")->is_reached);
    baseline_free(&b);
}

static void test_extras_are_problems(void **state)
{
    (void)state;
    for (int32_t i = 0; i < cuda_n_extras; i++) {
        op_params params;
        mla_problem problem = MLA_PROBLEM_INIT;
        workload w = cuda_extra_workload(&cuda_extras[i]);
        w.device_type = MLA_DEVICE_CUDA;
        assert_true(workload_params(&w, cuda_extras[i].lens, &params));
        assert_int_equal(op_find(w.op)->problem(&params, &problem, NULL), MLA_OK);
    }
}

static char *read_back(const char *path)
{
    FILE *f = fopen(path, "rb");
    char *text = calloc(1, 1 << 16);
    assert_non_null(f);
    assert_non_null(text);
    assert_true(fread(text, 1, (1 << 16) - 1, f) > 0);
    fclose(f);
    unlink(path);
    return text;
}

static void test_tables_and_picture(void **state)
{
    (void)state;
    static const int64_t lens[2] = {3, 1024};
    char path[64];
    snprintf(path, sizeof path, "/tmp/mla_bench_cuda_%ld", (long)getpid());
    baseline b;
    assert_true(baseline_parse("text", file_text, &b));
    cuda_bench bench = {.ceilings = ceilings, .info = {.name = "A <GPU>", .n_processors = 132}};
    cuda_row rows[3] = {timed(&b, &b.rows[0].w, 10.0), timed(&b, &b.rows[3].w, 10.0),
                        timed(&b, &b.rows[1].w, 10.0)};
    rows[0].w.batch = 2;
    rows[0].lens = lens;
    snprintf(rows[0].solution, sizeof rows[0].solution, "decode_test");
    rows[2].is_timed = false;
    snprintf(rows[2].reason, sizeof rows[2].reason, "too odd");

    assert_true(cuda_write_markdown(path, &bench, "580.1", rows, 3));
    char *text = read_back(path);
    assert_non_null(strstr(text, "driver 580.1"));
    assert_non_null(
        strstr(text, "| decode | 2 | 16 | 1 | [3,1024] | 64 | bf16 | decode_test | 10.0 "));
    assert_non_null(strstr(text, "| 14.8 | 1.48 |"));
    assert_non_null(strstr(text, "| 512 causal |"));
    assert_non_null(strstr(text, "not timed: too odd"));
    assert_non_null(strstr(text, "| prefill bf16, 1 x 512 | 1 |"));
    free(text);

    assert_true(cuda_plot(path, bench.info.name, rows, 3));
    text = read_back(path);
    assert_non_null(strstr(text, "</svg>"));
    assert_null(strstr(text, "<GPU>"));
    int32_t n_bars = 0;
    for (const char *at = text; (at = strstr(at, "height='9.0'")) != NULL; at++)
        n_bars++;
    assert_int_equal(n_bars, 4); /* two rows, ours and the peer's */
    free(text);
    assert_false(cuda_plot(path, bench.info.name, &rows[2], 1));
    assert_false(cuda_write_markdown("/no/such/folder/f.md", &bench, "", rows, 1));
    baseline_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reads_a_baseline),
        cmocka_unit_test(test_columns_have_defaults),
        cmocka_unit_test(test_refuses_wrong_baselines),
        cmocka_unit_test(test_figures_of_a_row),
        cmocka_unit_test(test_bars),
        cmocka_unit_test(test_extras_are_problems),
        cmocka_unit_test(test_tables_and_picture),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
