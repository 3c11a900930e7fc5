/*
 * Timing one bench row (measure.h).
 */
#include "measure.h"
#include "cli.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_TIMES (1 << 20)
#define MAX_ROUNDS 1000
#define CEILING_MILLISECONDS 10.0

/* A last-level cache that the system does not tell about. */
#define UNKNOWN_CACHE_BYTES (64u << 20)

uint64_t bench_cold_bytes(void)
{
    long llc = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
    llc = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    uint64_t bytes = llc > 0 ? (uint64_t)llc : UNKNOWN_CACHE_BYTES;
    return 2 * bytes + (64u << 20);
}

/* Memory that can be had without swapping, or a bound that refuses nothing when it is not known. */
static uint64_t available_bytes(void)
{
    unsigned long long kib = 0;
    char line[128];
    FILE *file = fopen("/proc/meminfo", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
            break;
    }
    if (file != NULL)
        fclose(file);
    return kib > 0 ? (uint64_t)kib * 1024 : (uint64_t)INT64_MAX;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int64_t n)
{
    qsort(values, (size_t)n, sizeof *values, compare_doubles);
    return n % 2 != 0 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

/* ---- preparation --------------------------------------------------------------------------- */

/* Buffers that the memory ceiling reads or copies. */
typedef struct ceiling_buffers {
    uint64_t bytes;
    char *source;
    char *target; /* NULL = read only */
} ceiling_buffers;

static bool make_buffers(ceiling_buffers *b, const bench_row *row)
{
    uint64_t least = 32768u * (uint64_t)row->threads;
    uint64_t bytes = row->is_cold ? bench_cold_bytes() : row->set_bytes;
    bytes = bytes < bench_cold_bytes() ? bytes : bench_cold_bytes();
    /* A copy touches source and target, which together are the working set. */
    bytes = row->work.is_moving && !row->is_cold ? bytes / 2 : bytes;
    b->bytes = bytes > least ? bytes : least;
    b->source = bench_allocate(b->bytes);
    b->target = row->work.is_moving ? bench_allocate(b->bytes) : NULL;
    if (b->source == NULL || (row->work.is_moving && b->target == NULL)) {
        cli_refuse("%.1f MB for the memory ceiling could not be allocated",
                   (double)b->bytes * 1e-6);
        return false;
    }
    memset(b->source, 1, b->bytes);
    if (b->target != NULL)
        memset(b->target, 1, b->bytes);
    return true;
}

static bool find_solution(mla_context *ctx, bench_dataset *data, const char *solution,
                          bench_row *row)
{
    const op_row *op = op_find(data->w.op);
    mla_problem problem = MLA_PROBLEM_INIT;
    mla_diag diag = {{0}};
    const char *name = NULL;
    mla_status status = op->problem(&data->sets[0].params, &problem, &diag);
    if (status == MLA_OK)
        status = mla_solution_choose(ctx, &problem, solution, &name, &diag);
    if (status == MLA_OK)
        status = mla_workspace_bytes(ctx, &problem, solution, &data->workspace_bytes, &diag);
    if (status != MLA_OK) {
        cli_refuse_status(status, &diag);
        return false;
    }
    snprintf(row->solution, sizeof row->solution, "%s", name);
    for (int32_t i = 0; i < mla_solution_count(ctx); i++) {
        mla_solution_info info = MLA_SOLUTION_INFO_INIT;
        if (mla_solution_describe(ctx, i, &info, NULL) == MLA_OK && strcmp(info.name, name) == 0)
            snprintf(row->family, sizeof row->family, "%s", info.family);
    }
    data->workspace = bench_allocate(data->workspace_bytes + 64);
    if (data->workspace == NULL) {
        cli_refuse("a workspace of %llu bytes could not be allocated",
                   (unsigned long long)data->workspace_bytes);
        return false;
    }
    for (int32_t s = 0; s < data->n_sets; s++) {
        mla_call *call = op_call_of(op, &data->sets[s].params);
        call->solution = solution;
        call->workspace = data->workspace;
        call->workspace_bytes = data->workspace_bytes;
    }
    return true;
}

static bool run_set(mla_context *ctx, const bench_dataset *data, int32_t set)
{
    mla_diag diag = {{0}};
    mla_status status = op_find(data->w.op)->run(ctx, &data->sets[set].params, &diag);
    if (status == MLA_OK)
        return true;
    cli_refuse_status(status, &diag);
    return false;
}

static int32_t set_count(const bench_row *row, const bench_settings *settings)
{
    if (!settings->is_cold)
        return 1;
    uint64_t n = bench_cold_bytes() / (row->set_bytes > 0 ? row->set_bytes : 1) + 2;
    return n < BENCH_MAX_SETS ? (int32_t)n : BENCH_MAX_SETS;
}

/* ---- rounds -------------------------------------------------------------------------------- */

/* A peer beside the row. */
typedef struct peer_run {
    const bench_peer *peer;
    void *state;
    double *us;
    int64_t n;
} peer_run;

typedef struct timings {
    double *us; /* every timed call */
    int64_t n;
    double gflops[MAX_ROUNDS];
    double gbps[MAX_ROUNDS];
    double clock[MAX_ROUNDS];
    double per_cycle[MAX_ROUNDS];
    double dot[MAX_ROUNDS];
    peer_run peers[BENCH_MAX_PEERS];
    int32_t n_peers;
} timings;

static bool time_round(mla_context *ctx, const bench_dataset *data, double budget_us,
                       int32_t *cursor, timings *t)
{
    /* The ceilings have taken the caches; a warm row gets them back first. */
    if (data->n_sets == 1 && !run_set(ctx, data, 0))
        return false;
    double start = bench_now_us();
    double now = start;
    do {
        int32_t set = *cursor;
        *cursor = set + 1 < data->n_sets ? set + 1 : 0;
        double before = bench_now_us();
        if (!run_set(ctx, data, set))
            return false;
        now = bench_now_us();
        t->us[t->n++] = now - before;
    } while (now - start < budget_us && t->n < MAX_TIMES);
    return true;
}

static void time_peer(peer_run *p, double budget_us)
{
    p->peer->run(p->state);
    double start = bench_now_us();
    double now = start;
    do {
        double before = bench_now_us();
        p->peer->run(p->state);
        now = bench_now_us();
        p->us[p->n++] = now - before;
    } while (now - start < budget_us && p->n < MAX_TIMES);
}

/* Peers that take the row and compute it right; the others are told on stderr. */
static void start_peers(mla_context *ctx, const bench_dataset *data, const bench_settings *settings,
                        timings *t)
{
    mla_tensor *out = &data->sets[0].params.u.decode.out;
    uint64_t bytes = 0;
    for (int32_t i = 0; i < settings->n_peers && t->n_peers < BENCH_MAX_PEERS; i++) {
        peer_run p = {.peer = settings->peers[i]};
        if (!p.peer->takes(data))
            continue;
        p.state = p.peer->make(data, ctx);
        p.us = malloc(MAX_TIMES * sizeof *p.us);
        bool good = p.state != NULL && p.us != NULL;
        if (good) {
            op_tensor_bytes(out, &bytes);
            memset(out->data, 0xff, (size_t)bytes);
            p.peer->run(p.state);
            good = bench_verify(data, ctx).is_good;
        }
        if (good) {
            t->peers[t->n_peers++] = p;
            continue;
        }
        fprintf(stderr, "mla: %s could not do this row, or did it wrong\n", p.peer->name);
        if (p.state != NULL)
            p.peer->destroy(p.state);
        free(p.us);
    }
}

static void finish_peers(bench_row *row, timings *t, bool is_timed)
{
    for (int32_t i = 0; i < t->n_peers; i++) {
        peer_run *p = &t->peers[i];
        bench_peer_result *result = &row->peers[row->n_peers++];
        result->name = p->peer->name;
        if (is_timed) {
            result->us_median = median(p->us, p->n);
            result->ratio = result->us_median / row->us_median;
        }
        p->peer->destroy(p->state);
        free(p->us);
    }
}

static bool time_rounds(mla_context *ctx, const bench_dataset *data, const bench_settings *settings,
                        const ceiling_buffers *buffers, bench_row *row, timings *t)
{
    uint64_t features = mla_context_cpu_features(ctx);
    bool has_dot = bench_unit_available(BENCH_UNIT_DOT_AVX512_BF16, features);
    double budget_us = settings->seconds * 1e6 / settings->rounds;
    int32_t cursor = 0;
    for (int32_t r = 0; r < settings->rounds; r++) {
        bench_rate rate = bench_measure_unit(ctx, row->unit, CEILING_MILLISECONDS);
        t->gflops[r] = rate.gflops;
        t->clock[r] = rate.clock_ghz;
        t->per_cycle[r] = rate.flop_per_cycle;
        if (has_dot && row->unit != BENCH_UNIT_DOT_AVX512_BF16)
            rate = bench_measure_unit(ctx, BENCH_UNIT_DOT_AVX512_BF16, CEILING_MILLISECONDS);
        t->dot[r] = has_dot ? rate.flop_per_cycle : 0.0;
        t->gbps[r] = bench_measure_memory(ctx, buffers->source, buffers->target, buffers->bytes,
                                          CEILING_MILLISECONDS);
        if (!time_round(ctx, data, budget_us, &cursor, t))
            return false;
        for (int32_t i = 0; i < t->n_peers; i++)
            time_peer(&t->peers[i], budget_us);
    }
    return true;
}

static void summarize(bench_row *row, timings *t)
{
    row->samples = t->n;
    row->us_median = median(t->us, t->n);
    row->us_min = t->us[0];
    row->us_p95 = t->us[(int64_t)ceil(0.95 * (double)t->n) - 1];
    row->ceiling_gflops = median(t->gflops, row->rounds);
    row->ceiling_gbps = median(t->gbps, row->rounds);
    row->clock_ghz = median(t->clock, row->rounds);
    row->unit_flop_per_cycle = median(t->per_cycle, row->rounds);
    row->dot_flop_per_cycle = median(t->dot, row->rounds);
    row->is_disturbed = row->dot_flop_per_cycle > 0.0 &&
                        row->dot_flop_per_cycle < 0.95 * bench_dot_flop_per_cycle();
    row->gflops = row->work.flops / row->us_median * 1e-3;
    row->gbps = row->work.bytes / row->us_median * 1e-3;
    row->floor_us =
        fmax(row->work.flops / row->ceiling_gflops, row->work.bytes / row->ceiling_gbps) * 1e-3;
    row->share_of_ceiling = row->floor_us / row->us_median;
}

static bench_unit find_unit(mla_context *ctx, const bench_row *row)
{
    const workload *w = &row->w;
    uint64_t features = mla_context_cpu_features(ctx);
    bool is_wide = w->dtype == MLA_FORMAT_F32 || w->dtype == MLA_FORMAT_F16 ||
                   w->kv_dtype == MLA_FORMAT_F32 || w->kv_dtype == MLA_FORMAT_F16;
    bench_unit unit = bench_unit_for(row->family, is_wide ? MLA_FORMAT_F32 : w->dtype, features);
    if (unit != BENCH_UNIT_DOT_AVX512_BF16)
        return unit;
    bench_rate dot = bench_measure_unit(ctx, unit, CEILING_MILLISECONDS);
    bench_rate fma = bench_measure_unit(ctx, BENCH_UNIT_FMA_AVX512, CEILING_MILLISECONDS);
    return dot.gflops >= fma.gflops ? unit : BENCH_UNIT_FMA_AVX512;
}

static bool measure_data(mla_context *ctx, bench_dataset *data, const bench_settings *settings,
                         bench_row *row)
{
    ceiling_buffers buffers = {0, NULL, NULL};
    if (!find_solution(ctx, data, settings->solution, row) || !run_set(ctx, data, 0))
        return false;
    row->verdict = bench_verify(data, ctx);
    if (!row->verdict.is_good) {
        cli_refuse("%s is wrong here and is not timed: error %.3g over %.3g, worst row %.3g over "
                   "%.3g, LSE %.3g over %.3g in %lld sampled rows",
                   row->solution, row->verdict.error, row->verdict.bound, row->verdict.row_error,
                   row->verdict.row_bound, row->verdict.lse_error, row->verdict.lse_bound,
                   (long long)row->verdict.n_samples);
        return false;
    }
    row->work = bench_work_of(data);
    row->unit = find_unit(ctx, row);
    timings *t = calloc(1, sizeof *t);
    double *us = malloc(MAX_TIMES * sizeof *us);
    bool good = t != NULL && us != NULL && make_buffers(&buffers, row);
    if (good) {
        t->us = us;
        start_peers(ctx, data, settings, t);
        good = time_rounds(ctx, data, settings, &buffers, row, t);
    }
    if (good)
        summarize(row, t);
    if (t != NULL)
        finish_peers(row, t, good);
    bench_release(buffers.source);
    bench_release(buffers.target);
    free(us);
    free(t);
    return good;
}

bool bench_measure(mla_context *ctx, const workload *w, const int64_t *lens,
                   const bench_settings *settings, bench_row *row)
{
    bench_dataset data;
    memset(row, 0, sizeof *row);
    row->w = *w;
    row->lens = lens;
    row->is_cold = settings->is_cold;
    row->rounds = settings->rounds < MAX_ROUNDS ? settings->rounds : MAX_ROUNDS;
    row->threads = mla_context_n_threads(ctx);
    if (!bench_set_bytes(w, lens, &row->set_bytes))
        return false;
    if (row->set_bytes == 0) {
        cli_refuse("%s of 0 tokens has nothing to measure", mla_op_name(w->op));
        return false;
    }
    row->sets = set_count(row, settings);
    if ((double)row->sets * (double)row->set_bytes > 0.8 * (double)available_bytes()) {
        cli_refuse("%d times %.1f MB for the tensors is over 0.8 of the free memory",
                   (int)row->sets, (double)row->set_bytes * 1e-6);
        return false;
    }
    if (!bench_dataset_make(&data, ctx, w, lens, row->sets, settings->seed))
        return false;
    bool good = measure_data(ctx, &data, settings, row);
    bench_dataset_free(&data);
    return good;
}
