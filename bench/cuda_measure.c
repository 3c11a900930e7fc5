/*
 * Measuring a row on a GPU (cuda_measure.h).
 */
#include "cuda_measure.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Left free on the device for the driver, graphs and images. */
#define RESERVE_BYTES (UINT64_C(1) << 30)
#define COMPARE_BYTES (UINT64_C(64) << 20)
#define MAX_TENSORS 160
#define ENQUEUE_LOOPS 9

/* A tensor on both sides. */
typedef struct mirror {
    op_role role;
    uint64_t bytes;
    void *host;
    void *device;
} mirror;

typedef struct job {
    cuda_bench *bench;
    device_memory *memory;
    bench_dataset data; /* host */
    op_params params;   /* the same with device pointers */
    const op_row *op;
    mirror mirrors[MAX_TENSORS];
    int32_t n_mirrors;
    void *workspace;
} job;

bool cuda_bench_open(cuda_bench *bench, int32_t index, int64_t n_threads)
{
    char why[256] = "";
    mla_diag diag = {{0}};
    bench->ctx = cli_context_for(MLA_DEVICE_CUDA, n_threads, NULL);
    if (bench->ctx == NULL)
        return false;
    bench->info = (mla_device_info)MLA_DEVICE_INFO_INIT;
    mla_status status =
        mla_context_describe_device(bench->ctx, MLA_DEVICE_CUDA, index, &bench->info, &diag);
    if (status != MLA_OK) {
        cli_refuse_status(status, &diag);
        cuda_bench_close(bench);
        return false;
    }
    bench->gpu = cuda_gpu_open(index, why, sizeof why);
    if (bench->gpu == NULL) {
        cli_refuse("--device cuda:%d: %s", (int)index, why);
        cuda_bench_close(bench);
        return false;
    }
    bench->ceilings = cuda_ceilings_measure(bench->gpu);
    return true;
}

void cuda_bench_close(cuda_bench *bench)
{
    mla_context_destroy(bench->ctx);
    cuda_gpu_close(bench->gpu);
    bench->ctx = NULL;
    bench->gpu = NULL;
}

void cuda_row_finish(cuda_row *row, const cuda_ceilings *ceilings)
{
    bool is_fp8 = mla_format_bytes(row->w.dtype) == 1;
    row->ceiling_tflops = row->w.dtype == MLA_FORMAT_F32 ? 0.0
                          : is_fp8                       ? ceilings->fp8_tflops
                                                         : ceilings->bf16_tflops;
    row->ceiling_gbps = row->work.is_moving ? ceilings->copy_gbps : ceilings->read_gbps;
    row->tflops = row->work.flops / row->us_median * 1e-6;
    row->gbps = row->work.bytes / row->us_median * 1e-3;
    row->floor_us = row->work.bytes / row->ceiling_gbps * 1e-3;
    if (row->ceiling_tflops > 0.0 && !row->work.is_moving)
        row->floor_us = fmax(row->floor_us, row->work.flops / row->ceiling_tflops * 1e-6);
    row->share = row->floor_us / row->us_median;
    row->ratio = row->peer_us > 0.0 ? row->peer_us / row->us_median : 0.0;
}

static void say(cuda_row *row, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(row->reason, sizeof row->reason, format, arguments);
    va_end(arguments);
}

/* ---- tensors --------------------------------------------------------------------------------- */

static bool mirror_tensor(void *arg, const op_tensor *spec, mla_tensor *t)
{
    job *j = arg;
    mirror *m = &j->mirrors[j->n_mirrors++];
    m->role = spec->role;
    m->host = t->data;
    op_tensor_bytes(t, &m->bytes);
    m->device = device_alloc(j->memory, m->bytes);
    t->data = m->device;
    return j->n_mirrors < MAX_TENSORS;
}

/* Inputs as they were made, outputs full of NaN. */
static void send_tensors(const job *j, bool with_inputs)
{
    for (int32_t i = 0; i < j->n_mirrors; i++) {
        const mirror *m = &j->mirrors[i];
        if (m->role == OP_OUT)
            device_fill(j->memory, m->device, 0xff, m->bytes);
        else if (with_inputs)
            device_upload(j->memory, m->device, m->host, m->bytes);
    }
    device_sync(j->memory);
}

static bool is_written(const mirror *m)
{
    return m->role == OP_OUT || m->role == OP_INOUT || m->role == OP_INOUT_OPT;
}

static void fetch_outputs(const job *j)
{
    for (int32_t i = 0; i < j->n_mirrors; i++) {
        const mirror *m = &j->mirrors[i];
        if (is_written(m))
            device_download(j->memory, m->host, m->device, m->bytes);
    }
}

/* Do the outputs on the device have the bits that were fetched? */
static bool outputs_are_same(const job *j)
{
    bool is_same = true;
    char *piece = malloc(COMPARE_BYTES);
    if (piece == NULL)
        return false;
    for (int32_t i = 0; i < j->n_mirrors; i++) {
        const mirror *m = &j->mirrors[i];
        for (uint64_t at = 0; is_written(m) && at < m->bytes; at += COMPARE_BYTES) {
            uint64_t n = m->bytes - at < COMPARE_BYTES ? m->bytes - at : COMPARE_BYTES;
            device_download(j->memory, piece, (const char *)m->device + at, n);
            is_same = is_same && memcmp(piece, (const char *)m->host + at, (size_t)n) == 0;
        }
    }
    free(piece);
    return is_same;
}

static void free_job(job *j)
{
    for (int32_t i = 0; i < j->n_mirrors; i++)
        device_free(j->memory, j->mirrors[i].device);
    bench_dataset_free(&j->data);
    free(j);
}

/* ---- one solution ---------------------------------------------------------------------------- */

/* Which row takes the problem; it is looked up before any tensor is made. */
static bool choose(cuda_bench *bench, const op_params *params, const char *solution, cuda_row *row,
                   uint64_t *workspace_bytes)
{
    const char *name = NULL;
    mla_diag diag = {{0}};
    mla_problem problem = MLA_PROBLEM_INIT;
    mla_status status = op_find(params->op)->problem(params, &problem, &diag);
    if (status == MLA_OK)
        status = mla_solution_choose(bench->ctx, &problem, solution, &name, &diag);
    if (status == MLA_OK)
        status = mla_workspace_bytes(bench->ctx, &problem, solution, workspace_bytes, &diag);
    if (status != MLA_OK) {
        say(row, "%s", diag.text[0] != '\0' ? diag.text : mla_status_message(status));
        return false;
    }
    snprintf(row->solution, sizeof row->solution, "%s", name);
    for (int32_t i = 0; i < mla_solution_count(bench->ctx); i++) {
        mla_solution_info info = MLA_SOLUTION_INFO_INIT;
        if (mla_solution_describe(bench->ctx, i, &info, NULL) == MLA_OK &&
            strcmp(info.name, name) == 0)
            snprintf(row->family, sizeof row->family, "%s", info.family);
    }
    return true;
}

static bool call(const job *j, cuda_row *row)
{
    mla_diag diag = {{0}};
    mla_status status = j->op->run(j->bench->ctx, &j->params, &diag);
    if (status != MLA_OK)
        say(row, "%s", diag.text[0] != '\0' ? diag.text : mla_status_message(status));
    return status == MLA_OK;
}

static bool verify(job *j, cuda_row *row)
{
    if (!call(j, row))
        return false;
    device_sync(j->memory);
    fetch_outputs(j);
    row->verdict = bench_verify(&j->data, j->bench->ctx);
    if (row->verdict.is_good)
        return true;
    row->is_wrong = true;
    const bench_verdict *v = &row->verdict;
    say(row,
        "wrong in %lld sampled rows: error %.3g (bound %.3g), worst row %.3g (%.3g), LSE %.3g "
        "(%.3g)",
        (long long)v->n_samples, v->error, v->bound, v->row_error, v->row_bound, v->lse_error,
        v->lse_bound);
    return false;
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* Host time of an eager call: the least of loops of calls, since whatever disturbs the host only
 * adds. The device works behind it; no loop is so long that the stream's queue fills up. */
static bool time_enqueue(const job *j, cuda_row *row)
{
    int32_t n = (int32_t)fmax(4.0, fmin(100.0, 5e3 / row->us_median));
    for (int32_t i = 0; i < ENQUEUE_LOOPS; i++) {
        double begin = now_us();
        for (int32_t k = 0; k < n; k++) {
            if (!call(j, row))
                return false;
        }
        double us = (now_us() - begin) / n;
        device_sync(j->memory);
        row->enqueue_us = i == 0 ? us : fmin(us, row->enqueue_us);
    }
    return true;
}

static bool time_replays(job *j, cuda_row *row)
{
    double us[CUDA_REPLAYS];
    device_capture_begin(j->memory);
    bool good = call(j, row);
    device_graph *graph = device_capture_end(j->memory);
    if (good) {
        cuda_time_graph(j->bench->gpu, graph, CUDA_REPLAYS, false, us);
        row->us_queued = cuda_median(us, CUDA_REPLAYS);
        cuda_time_graph(j->bench->gpu, graph, CUDA_REPLAYS, true, us);
        row->clock_mhz = cuda_gpu_clock_mhz(j->bench->gpu);
        row->us_median = cuda_median(us, CUDA_REPLAYS);
        row->us_min = us[0];
        row->us_p95 = us[CUDA_REPLAYS - 2];
    }
    device_graph_free(j->memory, graph);
    return good;
}

static void measure_solution(job *j, const char *solution, cuda_row *row)
{
    uint64_t workspace_bytes = 0;
    mla_call *c = op_call_of(j->op, &j->params);
    if (!choose(j->bench, &j->params, solution, row, &workspace_bytes))
        return;
    void *workspace = device_alloc(j->memory, workspace_bytes);
    device_fill(j->memory, workspace, 0, workspace_bytes);
    c->solution = row->solution;
    c->stream = device_stream(j->memory);
    c->workspace = workspace;
    c->workspace_bytes = workspace_bytes;
    row->work = bench_work_of(&j->data);
    row->is_timed = verify(j, row) && time_replays(j, row) && time_enqueue(j, row);
    if (row->is_timed && !outputs_are_same(j)) {
        row->is_timed = false;
        row->is_wrong = true;
        say(row, "replays gave other bits than the verified call");
    }
    device_free(j->memory, workspace);
    if (row->is_timed)
        cuda_row_finish(row, &j->bench->ceilings);
}

/* ---- the row --------------------------------------------------------------------------------- */

static cuda_row row_of(const workload *w, const int64_t *lens, bool is_second)
{
    cuda_row row;
    memset(&row, 0, sizeof row);
    row.w = *w;
    row.lens = lens;
    row.is_second = is_second;
    return row;
}

/* Makes the tensors on both sides; false with a reason in *row. */
static bool make_tensors(job *j, const workload *w, const int64_t *lens, cuda_row *row)
{
    uint64_t bytes = 0;
    uint64_t room = cuda_gpu_free_bytes(j->bench->gpu);
    if (!bench_set_bytes(w, lens, &bytes) || bytes + RESERVE_BYTES > room) {
        say(row, "%.1f GB for the tensors; the device has %.1f GB free", (double)bytes * 1e-9,
            (double)room * 1e-9);
        return false;
    }
    if (!bench_dataset_make(&j->data, j->bench->ctx, w, lens, 1, j->bench->seed)) {
        say(row, "the tensors could not be made on the host");
        return false;
    }
    j->params = j->data.sets[0].params;
    if (!bench_for_each_tensor(&j->params, j, mirror_tensor)) {
        say(row, "more than %d tensors", MAX_TENSORS);
        return false;
    }
    return true;
}

int32_t cuda_measure(cuda_bench *bench, const workload *w, const int64_t *lens, cuda_row *rows)
{
    bool is_attention = w->op == MLA_OP_DECODE || w->op == MLA_OP_EXTEND || w->op == MLA_OP_PREFILL;
    int32_t n = bench->also != NULL && is_attention ? 2 : 1;
    uint64_t workspace_bytes = 0;
    job *j = calloc(1, sizeof *j);
    for (int32_t i = 0; i < n; i++)
        rows[i] = row_of(w, lens, i == 1);
    if (j == NULL || !workload_params(w, lens, &j->params)) {
        say(&rows[0], "the problem does not fit");
        free(j);
        return 1;
    }
    j->bench = bench;
    j->memory = cuda_gpu_memory(bench->gpu);
    j->op = op_find(w->op);
    /* A problem that nothing takes is turned down before gigabytes are filled. */
    bool good = choose(bench, &j->params, bench->solution, &rows[0], &workspace_bytes) || n == 2;
    good = good && make_tensors(j, w, lens, &rows[0]);
    for (int32_t i = 0; good && i < n; i++) {
        send_tensors(j, i == 0);
        rows[i].reason[0] = '\0';
        measure_solution(j, i == 0 ? bench->solution : bench->also, &rows[i]);
    }
    if (!good)
        n = 1;
    free_job(j);
    return n;
}
