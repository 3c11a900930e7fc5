/*
 * Suites; see suite.h. For each problem: ask mla_explain, run what accepted it with its full name
 * forced, look at what rejected it, run once with nothing forced (the row said to be chosen), and
 * at times ask whether larger problems need at least as much workspace and whether one byte less is
 * refused. Contexts take turns: 1, 2, 3 and 7 threads, and tasks run one by one in reverse order.
 */
#include "oracle/suite.h"

#include "test.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_ROWS 64
#define N_CONTEXTS 5
#define FAILURES_SHOWN 3

typedef struct suite_row {
    const char *name;
    int32_t runs_here;
    int32_t is_wanted; /* by --solution */
    int32_t accepted;
    int32_t rejected;
    int32_t failures;
    double worst;
    double seconds;
} suite_row;

typedef struct suite {
    const operator_table *op;
    const char *program;
    uint64_t seed;
    int32_t count;
    int32_t verbose;
    const char *solution;
    mla_context *contexts[N_CONTEXTS];
    int32_t n_contexts; /* one on a device */
    suite_row rows[MAX_ROWS];
    int32_t n_rows;
    int32_t call_failures; /* of what no row answers for */
} suite;

static void record(suite *s, suite_row *row, const problem_base *p, const char *why)
{
    int32_t *failures = row ? &row->failures : &s->call_failures;
    if ((*failures)++ >= FAILURES_SHOWN)
        return;
    print_error("%s: %s\n    problem: %s\n    replay:  %s --seed %" PRIu64 " --count 1%s%s%s\n",
                row ? row->name : mla_op_name(s->op->op), why, p->text, s->program, p->seed,
                row ? " --solution " : "", row ? row->name : "",
                scene_device() ? " --device cuda" : "");
}

static suite_row *row_named(suite *s, const char *name)
{
    for (int32_t i = 0; i < s->n_rows; i++)
        if (strcmp(s->rows[i].name, name) == 0)
            return &s->rows[i];
    return NULL;
}

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- one row, one problem -------------------------------------------------------------------- */

static void check_workspace_grows(suite *s, suite_row *row, mla_context *ctx, problem_base *p)
{
    char why[200];
    mla_problem small = MLA_PROBLEM_INIT;
    uint64_t needed = 0, more = 0;
    if (s->op->problem(p, &small, NULL) != MLA_OK ||
        mla_workspace_bytes(ctx, &small, row->name, &needed, NULL) != MLA_OK)
        return;
    rng r = rng_stream(p->seed, 0x9e);
    for (int32_t i = 0; i < 8; i++) {
        mla_problem large = small;
        large.batch += rng_chance(&r, 50) ? rng_range(&r, 0, 9) : 0;
        large.tokens += large.batch - small.batch + (rng_chance(&r, 50) ? rng_range(&r, 0, 99) : 0);
        large.max_q_len += rng_chance(&r, 50) ? rng_range(&r, 0, 9) : 0;
        large.max_kv_len += rng_chance(&r, 50) ? rng_range(&r, 0, 9999) : 0;
        mla_status status = mla_workspace_bytes(ctx, &large, row->name, &more, NULL);
        if (status == MLA_OK && more >= needed)
            continue;
        if (status != MLA_OK)
            snprintf(why, sizeof why, "takes the problem but not a larger capacity: %s",
                     mla_status_name(status));
        else
            snprintf(why, sizeof why,
                     "workspace falls from %" PRIu64 " to %" PRIu64 " bytes for a larger problem",
                     needed, more);
        record(s, row, p, why);
        return;
    }
}

static void check_workspace_refused(suite *s, suite_row *row, mla_context *ctx, problem_base *p)
{
    char why[400] = "";
    mla_problem problem = MLA_PROBLEM_INIT;
    mla_diag diag = {{0}};
    uint64_t bytes = 0;
    if (s->op->problem(p, &problem, &diag) != MLA_OK || problem.tokens == 0 || problem.batch == 0)
        return;
    if (mla_workspace_bytes(ctx, &problem, row->name, &bytes, &diag) != MLA_OK || bytes == 0)
        return;
    void *memory = NULL;
    if (posix_memalign(&memory, 64, (size_t)bytes) != 0)
        return;
    mla_call call = {.solution = row->name, .workspace = memory, .workspace_bytes = bytes - 1};
    scene_reset(&p->scene);
    mla_status status = s->op->run(ctx, p, &call, &diag);
    if (status != MLA_ERROR_WORKSPACE || !diag.text[0])
        record(s, row, p, "a workspace one byte too small was not refused");
    else if (!scene_untouched(&p->scene, why, sizeof why))
        record(s, row, p, why);
    free(memory);
}

static void run_accepted(suite *s, suite_row *row, mla_context *ctx, problem_base *p)
{
    char why[1200] = "";
    double worst = 0.0, start = seconds_now();
    row->accepted++;
    if (!operator_verify(ctx, s->op, p, row->name, &worst, why, sizeof why))
        record(s, row, p, why);
    else if (scene_device() && !operator_repeats(ctx, s->op, p, row->name, why, sizeof why))
        record(s, row, p, why);
    if (worst > row->worst)
        row->worst = worst;
    if (p->seed % 4 == 0)
        check_workspace_grows(s, row, ctx, p);
    if (p->seed % 8 == 1)
        check_workspace_refused(s, row, ctx, p);
    row->seconds += seconds_now() - start;
}

static void run_rejected(suite *s, suite_row *row, mla_context *ctx, problem_base *p,
                         const mla_problem *problem, const mla_verdict *verdict)
{
    char why[1200] = "";
    row->rejected++;
    if (!verdict->reason[0])
        record(s, row, p, "rejected without a reason");
    /* a call with nothing to do is done before a row is asked */
    if (problem->tokens == 0 || problem->batch == 0)
        return;
    if (!operator_refuses(ctx, s->op, p, row->name, MLA_ERROR_UNSUPPORTED, why, sizeof why))
        record(s, row, p, why);
}

static void run_unforced(suite *s, mla_context *ctx, problem_base *p, const mla_problem *problem,
                         const char *chosen)
{
    char why[1200] = "";
    mla_diag diag = {{0}};
    const char *name = NULL;
    if (!chosen) {
        record(s, NULL, p, "no row takes the problem");
        return;
    }
    if (mla_solution_choose(ctx, problem, NULL, &name, &diag) != MLA_OK ||
        strcmp(name, chosen) != 0)
        record(s, NULL, p, "mla_solution_choose and mla_explain disagree");
    if (!operator_verify(ctx, s->op, p, NULL, NULL, why, sizeof why))
        record(s, NULL, p, why);
}

static void run_problem(suite *s, uint64_t seed)
{
    problem_base *p = s->op->make(seed);
    mla_context *ctx = s->contexts[seed % (uint64_t)s->n_contexts];
    mla_problem problem = MLA_PROBLEM_INIT;
    mla_diag diag = {{0}};
    mla_verdict verdicts[MAX_ROWS];
    int32_t n = MAX_ROWS;
    for (int32_t i = 0; i < MAX_ROWS; i++)
        verdicts[i] = (mla_verdict){.struct_size = sizeof(mla_verdict)};
    if (s->verbose)
        print_message("%" PRIu64 ": %s\n", seed, p->text);
    mla_status status = s->op->problem(p, &problem, &diag);
    if (status == MLA_OK)
        status = mla_explain(ctx, &problem, NULL, verdicts, &n, &diag);
    if (status != MLA_OK) {
        record(s, NULL, p, diag.text);
        s->op->free(p);
        return;
    }
    const char *chosen = NULL;
    for (int32_t i = 0; i < n; i++) {
        suite_row *row = row_named(s, verdicts[i].name);
        if (!row)
            record(s, NULL, p, "mla_explain names a row that mla_solution_describe does not");
        if (verdicts[i].kind == MLA_VERDICT_CHOSEN)
            chosen = verdicts[i].name;
        if (!row || !row->is_wanted)
            continue;
        if (verdicts[i].kind == MLA_VERDICT_REJECTED)
            run_rejected(s, row, ctx, p, &problem, &verdicts[i]);
        else
            run_accepted(s, row, ctx, p);
    }
    if (!s->solution)
        run_unforced(s, ctx, p, &problem, chosen);
    s->op->free(p);
}

/* ---- the program ----------------------------------------------------------------------------- */

static void row_test(void **state)
{
    const suite_row *row = *state;
    if (!row->runs_here || !row->is_wanted)
        skip();
    print_message("    %d accepted, %d rejected, worst error %.2f of its bound, %.1f s\n",
                  row->accepted, row->rejected, row->worst, row->seconds);
    if (row->failures)
        fail_msg("%d failures", row->failures);
}

static void call_test(void **state)
{
    const suite *s = *state;
    if (s->call_failures)
        fail_msg("%d failures", s->call_failures);
}

static void coverage_test(void **state)
{
    const suite *s = *state;
    assert_true(s->n_rows > 0);
    if (s->count < s->op->usual_count || s->solution)
        skip();
    for (int32_t i = 0; i < s->n_rows; i++)
        if (s->rows[i].runs_here && s->rows[i].accepted == 0)
            fail_msg("%s never accepted a problem", s->rows[i].name);
}

static bool parse(suite *s, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        bool has_value = i + 1 < argc;
        if (strcmp(argv[i], "--verbose") == 0)
            s->verbose = 1;
        else if (strcmp(argv[i], "--solution") == 0 && has_value)
            s->solution = argv[++i];
        else if (strcmp(argv[i], "--seed") == 0 && has_value)
            s->seed = strtoull(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--count") == 0 && has_value)
            s->count = (int32_t)strtol(argv[++i], NULL, 10);
        else {
            fprintf(stderr,
                    "usage: %s [--device cuda[:N]] [--solution NAME] [--seed S] [--count N] "
                    "[--verbose]\n",
                    argv[0]);
            return false;
        }
    }
    return true;
}

static void list_rows(suite *s)
{
    const mla_context *ctx = s->contexts[0];
    for (int32_t i = 0; i < mla_solution_count(ctx) && s->n_rows < MAX_ROWS; i++) {
        mla_solution_info info = MLA_SOLUTION_INFO_INIT;
        if (mla_solution_describe(ctx, i, &info, NULL) != MLA_OK || info.op != s->op->op ||
            info.device_type != operator_device_type())
            continue;
        bool wanted = !s->solution || strcmp(s->solution, info.name) == 0 ||
                      strcmp(s->solution, info.family) == 0;
        s->rows[s->n_rows++] =
            (suite_row){.name = info.name, .runs_here = info.runs_here, .is_wanted = wanted};
    }
}

int suite_main(int argc, char **argv, const operator_table *op)
{
    static const int32_t threads[N_CONTEXTS] = {1, 2, 3, 7, 0};
    suite s = {.op = op, .program = argv[0], .seed = 1, .count = op->usual_count};
    operator_take_device(&argc, argv);
    if (!parse(&s, argc, argv))
        return 2;
    s.n_contexts = scene_device() ? 1 : N_CONTEXTS;
    for (int32_t i = 0; i < s.n_contexts; i++)
        s.contexts[i] = operator_context(threads[i]);
    list_rows(&s);
    for (int32_t i = 0; i < s.count; i++)
        run_problem(&s, s.seed + (uint64_t)i);

    struct CMUnitTest tests[MAX_ROWS + 2];
    memset(tests, 0, sizeof tests);
    int32_t n = 0;
    for (; n < s.n_rows; n++)
        tests[n] = (struct CMUnitTest){s.rows[n].name, row_test, NULL, NULL, &s.rows[n]};
    tests[n++] = (struct CMUnitTest){"unforced_calls", call_test, NULL, NULL, &s};
    tests[n++] = (struct CMUnitTest){"every_row_was_used", coverage_test, NULL, NULL, &s};
    int failed = _cmocka_run_group_tests(mla_op_name(op->op), tests, (size_t)n, NULL, NULL);
    for (int32_t i = 0; i < s.n_contexts; i++)
        mla_context_destroy(s.contexts[i]);
    return failed;
}
