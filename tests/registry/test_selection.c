/*
 * Choosing a solution: who wins when several say what to force, what unknown and unfit names give,
 * rows that a caller adds, and what mla_explain and mla_workspace_bytes tell. The rows here are of
 * the merge operator, whose parameters are small; they only count their calls.
 */
#include "chosen.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int32_t runs[4];
static uint64_t seen_workspace_bytes;

static int32_t accepts_all(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    (void)problem;
    (void)why;
    (void)why_bytes;
    return 1;
}

static int32_t accepts_f16(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    if (problem->q_format == MLA_FORMAT_F16)
        return 1;
    if (why)
        snprintf(why, why_bytes, "takes f16 states only");
    return 0;
}

static uint64_t no_workspace(const mla_problem *problem, const mla_exec *exec)
{
    (void)problem;
    (void)exec;
    return 0;
}

static uint64_t large_workspace(const mla_problem *problem, const mla_exec *exec)
{
    (void)exec;
    return 4096 + 64 * (uint64_t)problem->tokens;
}

static double cheap(const mla_problem *problem, const mla_exec *exec)
{
    (void)problem;
    (void)exec;
    return 1e-9;
}

static double cheap_when_small(const mla_problem *problem, const mla_exec *exec)
{
    (void)exec;
    return problem->tokens <= 4 ? 1e-10 : 1e9;
}

static double dear(const mla_problem *problem, const mla_exec *exec)
{
    (void)problem;
    (void)exec;
    return 1e12;
}

static mla_status run_0(const mla_exec *exec, const mla_problem *problem, const void *params,
                        mla_diag *diag)
{
    (void)exec;
    (void)problem;
    (void)params;
    (void)diag;
    runs[0]++;
    return MLA_OK;
}

static mla_status run_1(const mla_exec *exec, const mla_problem *problem, const void *params,
                        mla_diag *diag)
{
    const mla_merge_state_params *p = params;
    (void)problem;
    (void)diag;
    assert_int_equal(p->struct_size, sizeof *p);
    seen_workspace_bytes = exec->workspace_bytes;
    runs[1]++;
    return MLA_OK;
}

static mla_status run_2(const mla_exec *exec, const mla_problem *problem, const void *params,
                        mla_diag *diag)
{
    (void)exec;
    (void)problem;
    (void)params;
    (void)diag;
    runs[2]++;
    return MLA_OK;
}

#define ROW(row_name, row_family, accept, bytes, cost, runner)                                     \
    {                                                                                              \
        .struct_size = sizeof(mla_solution), .version = MLA_SOLUTION_VERSION, .op = MLA_OP_MERGE,  \
        .device_type = MLA_DEVICE_CPU, .name = row_name, .family = row_family, .formats = "any",   \
        .features = "counts", .cpu_features_text = "", .accepts = accept,                          \
        .workspace_bytes = bytes, .cost_us = cost, .run = runner                                   \
    }

static const mla_solution rows[] = {
    ROW("merge_one", "one", accepts_all, no_workspace, dear, run_0),
    ROW("merge_two", "two", accepts_all, large_workspace, dear, run_1),
    ROW("merge_f16_three", "three", accepts_f16, no_workspace, dear, run_2),
};

/* Two states of one token, one head, four values. */
typedef struct merge_call {
    float out[2][4], lse[2], merged[4];
    mla_tensor outs[2], lses[2];
    mla_merge_state_params params;
} merge_call;

static void merge_call_init(merge_call *m)
{
    memset(m, 0, sizeof *m);
    for (int32_t i = 0; i < 2; i++) {
        m->outs[i] = mla_tensor_3d(m->out[i], MLA_FORMAT_F32, 1, 1, 4);
        m->lses[i] = mla_tensor_2d(&m->lse[i], MLA_FORMAT_F32, 1, 1);
    }
    m->params = (mla_merge_state_params)MLA_MERGE_STATE_PARAMS_INIT;
    m->params.n_states = 2;
    m->params.outs = m->outs;
    m->params.lses = m->lses;
    m->params.out = mla_tensor_3d(m->merged, MLA_FORMAT_F32, 1, 1, 4);
}

static mla_context *plain_context(void)
{
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.ignore_environment = 1;
    options.n_threads = 1;
    options.cpu_only = 1;
    mla_context *ctx = make_context(&options);
    assert_int_equal(mla_context_add_solutions(ctx, rows, 3, NULL), MLA_OK);
    return ctx;
}

/* ---- precedence ------------------------------------------------------------------------------ */

static void call_beats_scope_beats_the_rest(void **unused)
{
    (void)unused;
    mla_context *ctx = plain_context();
    assert_int_equal(mla_context_push_solution(ctx, "one", NULL), MLA_OK);
    assert_string_equal(chosen(ctx, NULL), "merge_one");
    assert_int_equal(mla_context_push_solution(ctx, "two", NULL), MLA_OK);
    assert_string_equal(chosen(ctx, NULL), "merge_two");
    assert_string_equal(chosen(ctx, "merge_one"), "merge_one");
    assert_int_equal(mla_context_pop_solution(ctx, NULL), MLA_OK);
    assert_string_equal(chosen(ctx, NULL), "merge_one");
    assert_int_equal(mla_context_pop_solution(ctx, NULL), MLA_OK);
    assert_string_equal(family_of(ctx, chosen(ctx, "c")), "c");
    mla_context_destroy(ctx);
}

static void option_beats_environment(void **unused)
{
    (void)unused;
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.cpu_only = 1;
    setenv("MLA_SOLUTION", "c", 1);
    mla_context *ctx = make_context(&options);
    assert_string_equal(family_of(ctx, chosen(ctx, NULL)), "c");
    mla_context_destroy(ctx);

    options.ignore_environment = 1;
    ctx = make_context(&options);
    char best[64];
    snprintf(best, sizeof best, "%s", family_of(ctx, chosen(ctx, NULL)));
    mla_context_destroy(ctx);

    options.ignore_environment = 0;
    options.solution = best;
    ctx = make_context(&options);
    assert_string_equal(family_of(ctx, chosen(ctx, NULL)), best);
    assert_int_equal(mla_context_add_solutions(ctx, rows, 3, NULL), MLA_OK);
    assert_int_equal(mla_context_push_solution(ctx, "one", NULL), MLA_OK);
    assert_string_equal(chosen(ctx, NULL), "merge_one");
    mla_context_destroy(ctx);

    /* the environment is read at creation, and an unknown name in it is an error there */
    setenv("MLA_SOLUTION", "no_such_family", 1);
    mla_diag diag = {{0}};
    options.solution = NULL;
    assert_int_equal(mla_context_create(&options, &ctx, &diag), MLA_ERROR_NOT_FOUND);
    assert_non_null(strstr(diag.text, "MLA_SOLUTION"));
    unsetenv("MLA_SOLUTION");
}

static void full_names_concern_their_operator_and_beat_families(void **unused)
{
    (void)unused;
    mla_context *ctx = plain_context();
    assert_string_equal(chosen(ctx, "two,merge_one"), "merge_one");
    assert_string_equal(chosen(ctx, "merge_one,two"), "merge_one");
    assert_string_equal(chosen(ctx, " one , two "), "merge_one");
    /* a row of another operator says nothing about merge: the scope decides */
    assert_int_equal(mla_context_push_solution(ctx, "two", NULL), MLA_OK);
    assert_string_equal(chosen(ctx, "write_c"), "merge_two");
    assert_string_equal(chosen(ctx, "write_c,one"), "merge_one");
    mla_context_destroy(ctx);
}

static void scopes_nest_and_end(void **unused)
{
    (void)unused;
    mla_context *ctx = plain_context();
    mla_diag diag = {{0}};
    for (int32_t i = 0; i < 16; i++)
        assert_int_equal(mla_context_push_solution(ctx, i % 2 ? "one" : "two", &diag), MLA_OK);
    assert_int_equal(mla_context_push_solution(ctx, "one", &diag), MLA_ERROR_CAPACITY);
    assert_true(diag.text[0]);
    for (int32_t i = 0; i < 16; i++) {
        assert_string_equal(chosen(ctx, NULL), i % 2 ? "merge_two" : "merge_one");
        assert_int_equal(mla_context_pop_solution(ctx, &diag), MLA_OK);
    }
    assert_int_equal(mla_context_pop_solution(ctx, &diag), MLA_ERROR_STATE);
    mla_context_destroy(ctx);
}

/* ---- errors ---------------------------------------------------------------------------------- */

static void unknown_names_list_what_exists(void **unused)
{
    (void)unused;
    mla_context *ctx = plain_context();
    mla_problem problem = merge_problem();
    mla_diag diag = {{0}};
    const char *name = NULL;
    uint64_t bytes = 0;
    int32_t n = 0;
    merge_call m;
    merge_call_init(&m);
    m.params.call.solution = "nope";
    assert_int_equal(mla_merge_state(ctx, &m.params, &diag), MLA_ERROR_NOT_FOUND);
    assert_non_null(strstr(diag.text, "nope"));
    assert_non_null(strstr(diag.text, "one"));
    assert_non_null(strstr(diag.text, "three"));
    assert_int_equal(mla_solution_choose(ctx, &problem, "c,nope", &name, &diag),
                     MLA_ERROR_NOT_FOUND);
    assert_int_equal(mla_workspace_bytes(ctx, &problem, "nope", &bytes, &diag),
                     MLA_ERROR_NOT_FOUND);
    mla_status status = mla_explain(ctx, &problem, "nope", NULL, &n, &diag);
    assert_true(status == MLA_ERROR_NOT_FOUND || status == MLA_ERROR_CAPACITY);
    assert_int_equal(mla_context_push_solution(ctx, "nope", &diag), MLA_ERROR_NOT_FOUND);
    assert_non_null(strstr(diag.text, "two"));
    /* a prefix of a name is not the name */
    assert_int_equal(mla_context_push_solution(ctx, "merge_on", &diag), MLA_ERROR_NOT_FOUND);
    mla_context_destroy(ctx);

    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.solution = "nope";
    options.ignore_environment = 1;
    options.cpu_only = 1;
    ctx = NULL;
    assert_int_equal(mla_context_create(&options, &ctx, &diag), MLA_ERROR_NOT_FOUND);
    assert_null(ctx);
    assert_non_null(strstr(diag.text, "nope"));
}

static void a_forced_row_that_does_not_fit_is_an_error(void **unused)
{
    (void)unused;
    mla_context *ctx = plain_context();
    mla_diag diag = {{0}};
    merge_call m;
    merge_call_init(&m);
    runs[2] = 0;
    m.params.call.solution = "merge_f16_three";
    assert_int_equal(mla_merge_state(ctx, &m.params, &diag), MLA_ERROR_UNSUPPORTED);
    assert_non_null(strstr(diag.text, "takes f16 states only"));
    m.params.call.solution = "three";
    assert_int_equal(mla_merge_state(ctx, &m.params, &diag), MLA_ERROR_UNSUPPORTED);
    m.params.call.solution = NULL;
    assert_int_equal(mla_context_push_solution(ctx, "three", &diag), MLA_OK);
    assert_int_equal(mla_merge_state(ctx, &m.params, &diag), MLA_ERROR_UNSUPPORTED);
    assert_int_equal(runs[2], 0);
    mla_context_destroy(ctx);
}

/* A family without a row for the operator cannot run it. */
static void a_family_without_the_operator_is_an_error(void **unused)
{
    (void)unused;
    mla_context *ctx = plain_context();
    mla_diag diag = {{0}};
    mla_problem problem = merge_problem();
    const char *name = NULL;
    problem.op = MLA_OP_PACK;
    assert_int_equal(mla_solution_choose(ctx, &problem, "one", &name, &diag),
                     MLA_ERROR_UNSUPPORTED);
    assert_true(diag.text[0]);
    problem.op = 77;
    assert_int_equal(mla_solution_choose(ctx, &problem, NULL, &name, &diag), MLA_ERROR_ARGUMENT);
    mla_context_destroy(ctx);
}

static void bad_rows_are_refused(void **unused)
{
    (void)unused;
    mla_context *ctx = plain_context();
    mla_diag diag = {{0}};
    int32_t before = mla_solution_count(ctx);
    mla_solution row = rows[0];
    row.version = MLA_SOLUTION_VERSION + 1;
    assert_int_equal(mla_context_add_solutions(ctx, &row, 1, &diag), MLA_ERROR_VERSION);
    row = rows[0];
    row.struct_size = 8;
    assert_int_equal(mla_context_add_solutions(ctx, &row, 1, &diag), MLA_ERROR_VERSION);
    row.struct_size = UINT32_MAX;
    assert_int_equal(mla_context_add_solutions(ctx, &row, 1, &diag), MLA_ERROR_VERSION);
    row = rows[0];
    row.run = NULL;
    assert_int_equal(mla_context_add_solutions(ctx, &row, 1, &diag), MLA_ERROR_ARGUMENT);
    row = rows[0];
    row.name = "";
    assert_int_equal(mla_context_add_solutions(ctx, &row, 1, &diag), MLA_ERROR_ARGUMENT);
    row.name = "with,comma";
    assert_int_equal(mla_context_add_solutions(ctx, &row, 1, &diag), MLA_ERROR_ARGUMENT);
    row = rows[0];
    row.op = 99;
    assert_int_equal(mla_context_add_solutions(ctx, &row, 1, &diag), MLA_ERROR_ARGUMENT);
    assert_int_equal(mla_solution_count(ctx), before);

    mla_solution *many = calloc(257, sizeof *many);
    char(*names)[16] = calloc(257, sizeof *names);
    assert_true(many && names);
    for (int32_t i = 0; i < 257; i++) {
        many[i] = rows[0];
        snprintf(names[i], sizeof names[i], "merge_%d", i);
        many[i].name = names[i];
    }
    assert_int_equal(mla_context_add_solutions(ctx, many, 257, &diag), MLA_ERROR_CAPACITY);
    assert_int_equal(mla_solution_count(ctx), before);
    mla_context_destroy(ctx);
    free(many);
    free(names);
}

/* ---- rows of the caller ---------------------------------------------------------------------- */

static void callers_rows_are_chosen_by_cost_and_replace_by_name(void **unused)
{
    (void)unused;
    static const mla_solution cheap_row[] = {
        ROW("merge_cheap", "cheap", accepts_all, no_workspace, cheap, run_0)};
    static const mla_solution same_name[] = {
        ROW("merge_cheap", "cheaper", accepts_all, no_workspace, cheap, run_2)};
    mla_context *ctx = plain_context();
    merge_call m;
    merge_call_init(&m);
    assert_int_equal(mla_context_add_solutions(ctx, cheap_row, 1, NULL), MLA_OK);
    int32_t n = mla_solution_count(ctx);
    runs[0] = runs[2] = 0;
    assert_int_equal(mla_merge_state(ctx, &m.params, NULL), MLA_OK);
    assert_int_equal(runs[0], 1);
    assert_int_equal(mla_context_add_solutions(ctx, same_name, 1, NULL), MLA_OK);
    assert_int_equal(mla_solution_count(ctx), n);
    assert_int_equal(mla_merge_state(ctx, &m.params, NULL), MLA_OK);
    assert_int_equal(runs[0], 1);
    assert_int_equal(runs[2], 1);
    assert_string_equal(family_of(ctx, "merge_cheap"), "cheaper");
    mla_context_destroy(ctx);
}

static void ties_go_to_the_earlier_row(void **unused)
{
    (void)unused;
    static const mla_solution equal[] = {
        ROW("merge_first", "first", accepts_all, no_workspace, cheap, run_0),
        ROW("merge_second", "second", accepts_all, no_workspace, cheap, run_2)};
    mla_context *ctx = plain_context();
    assert_int_equal(mla_context_add_solutions(ctx, equal, 2, NULL), MLA_OK);
    assert_string_equal(chosen(ctx, NULL), "merge_first");
    mla_context_destroy(ctx);
}

static void a_row_gets_the_workspace_it_asked_for(void **unused)
{
    (void)unused;
    mla_context *ctx = plain_context();
    mla_problem problem = merge_problem();
    mla_diag diag = {{0}};
    merge_call m;
    merge_call_init(&m);
    uint64_t bytes = 0;
    assert_int_equal(mla_workspace_bytes(ctx, &problem, "two", &bytes, NULL), MLA_OK);
    assert_int_equal(bytes, 4096 + 64);
    uint8_t *memory = NULL;
    assert_int_equal(posix_memalign((void **)&memory, 64, 8192), 0);
    m.params.call = (mla_call){.solution = "two", .workspace = memory, .workspace_bytes = bytes};
    assert_int_equal(mla_merge_state(ctx, &m.params, &diag), MLA_OK);
    assert_true(seen_workspace_bytes >= bytes);
    m.params.call.workspace_bytes = bytes - 1;
    assert_int_equal(mla_merge_state(ctx, &m.params, &diag), MLA_ERROR_WORKSPACE);
    assert_non_null(strstr(diag.text, "4160"));
    assert_non_null(strstr(diag.text, "4159"));
    m.params.call.workspace_bytes = bytes;
    m.params.call.workspace = NULL;
    assert_int_equal(mla_merge_state(ctx, &m.params, &diag), MLA_ERROR_WORKSPACE);
    m.params.call.workspace = memory + 8;
    assert_int_equal(mla_merge_state(ctx, &m.params, &diag), MLA_ERROR_WORKSPACE);
    free(memory);
    mla_context_destroy(ctx);
}

/* A smaller call may choose another row; the workspace of the capacity has to do for it too. */
static void a_capacity_covers_rows_that_smaller_calls_choose(void **unused)
{
    (void)unused;
    static const mla_solution small[] = {
        ROW("merge_small", "small", accepts_all, large_workspace, cheap_when_small, run_1)};
    mla_context *ctx = plain_context();
    assert_int_equal(mla_context_add_solutions(ctx, small, 1, NULL), MLA_OK);
    mla_problem problem = merge_problem(), large = problem;
    large.tokens = 1000;
    uint64_t few = 0, many = 0;
    assert_string_equal(chosen(ctx, NULL), "merge_small");
    assert_int_equal(mla_workspace_bytes(ctx, &problem, NULL, &few, NULL), MLA_OK);
    assert_int_equal(mla_workspace_bytes(ctx, &large, NULL, &many, NULL), MLA_OK);
    assert_true(few >= 4096 && many >= few);
    mla_context_destroy(ctx);
}

static void explain_tells_about_every_row(void **unused)
{
    (void)unused;
    mla_context *ctx = plain_context();
    mla_problem problem = merge_problem();
    mla_diag diag = {{0}};
    int32_t n = 0;
    assert_int_equal(mla_explain(ctx, &problem, NULL, NULL, &n, &diag), MLA_ERROR_CAPACITY);
    assert_true(n >= 4 && n <= 64);
    mla_verdict verdicts[64];
    for (int32_t i = 0; i < 64; i++)
        verdicts[i] = (mla_verdict){.struct_size = sizeof(mla_verdict)};
    static const char *const forced[] = {NULL, "one", "merge_two", "three"};
    static const char *const expected[] = {NULL, "merge_one", "merge_two", NULL};
    for (int32_t f = 0; f < 4; f++) {
        int32_t room = 64, n_chosen = 0;
        assert_int_equal(mla_explain(ctx, &problem, forced[f], verdicts, &room, &diag), MLA_OK);
        assert_int_equal(room, n);
        for (int32_t i = 0; i < n; i++) {
            assert_true(verdicts[i].name && verdicts[i].family);
            if (verdicts[i].kind == MLA_VERDICT_CHOSEN) {
                n_chosen++;
                assert_string_equal(verdicts[i].name,
                                    expected[f] ? expected[f] : chosen(ctx, forced[f]));
            }
            if (verdicts[i].kind == MLA_VERDICT_REJECTED)
                assert_true(verdicts[i].reason[0]);
            if (strcmp(verdicts[i].name, "merge_f16_three") == 0) {
                assert_int_equal(verdicts[i].kind, MLA_VERDICT_REJECTED);
                assert_non_null(strstr(verdicts[i].reason, "f16"));
            }
            if (strcmp(verdicts[i].name, "merge_two") == 0)
                assert_int_equal(verdicts[i].workspace_bytes, 4096 + 64);
        }
        assert_int_equal(n_chosen, f == 3 ? 0 : 1);
    }
    mla_context_destroy(ctx);
}

static void explain_leaves_diag_and_verdicts_alone(void **unused)
{
    (void)unused;
    mla_context *ctx = plain_context();
    mla_problem problem = merge_problem();
    mla_diag diag = {"untouched"};
    mla_verdict verdicts[64];
    int32_t n = 64;
    memset(verdicts, 0x5a, sizeof verdicts);
    for (int32_t i = 0; i < 64; i++)
        verdicts[i].struct_size = sizeof verdicts[i];
    /* that nothing takes it is an answer, not an error */
    assert_int_equal(mla_explain(ctx, &problem, "three", verdicts, &n, &diag), MLA_OK);
    assert_string_equal(diag.text, "untouched");
    static const uint32_t bad_sizes[] = {0, sizeof(mla_verdict) - 1, sizeof(mla_verdict) + 1,
                                         UINT32_MAX};
    const int32_t n_rows = n;
    for (int32_t i = 0; i < 4; i++) {
        mla_verdict kept = verdicts[0];
        kept.cost_us = -1.0;
        verdicts[0] = kept;
        verdicts[n_rows - 1].struct_size = bad_sizes[i];
        n = 64;
        assert_int_equal(mla_explain(ctx, &problem, NULL, verdicts, &n, &diag), MLA_ERROR_VERSION);
        assert_non_null(strstr(diag.text, "struct_size"));
        assert_memory_equal(&verdicts[0], &kept, sizeof kept); /* nor is any verdict written */
    }
    mla_context_destroy(ctx);
}

/* Every query that takes a problem, for one that is out of range. */
static void refused_everywhere(mla_context *ctx, const mla_problem *problem, mla_status status,
                               const char *words)
{
    mla_diag diag = {{0}};
    uint64_t bytes = 77;
    const char *name = "untouched";
    mla_verdict verdicts[64];
    int32_t n = 64;
    for (int32_t i = 0; i < 64; i++)
        verdicts[i] = (mla_verdict){.struct_size = sizeof(mla_verdict)};
    assert_int_equal(mla_workspace_bytes(ctx, problem, NULL, &bytes, &diag), status);
    assert_non_null(strstr(diag.text, words));
    assert_int_equal(bytes, 77);
    assert_int_equal(mla_solution_choose(ctx, problem, NULL, &name, &diag), status);
    assert_non_null(strstr(diag.text, words));
    assert_string_equal(name, "untouched");
    assert_int_equal(mla_explain(ctx, problem, NULL, verdicts, &n, &diag), status);
    assert_non_null(strstr(diag.text, words));
    assert_null(verdicts[0].name);
}

static mla_problem decode_problem(void)
{
    mla_problem p = MLA_PROBLEM_INIT;
    p.op = MLA_OP_DECODE;
    p.device_type = MLA_DEVICE_CPU;
    p.q_format = p.kv_format = p.out_format = MLA_FORMAT_F32;
    p.num_heads = 16;
    p.num_kv_heads = 1;
    p.kv_lora_rank = 512;
    p.qk_rope_head_dim = 64;
    p.page_size = 64;
    p.batch = p.tokens = p.max_q_len = 1;
    p.max_kv_len = 4096;
    p.is_causal = 1;
    return p;
}

static void capacities_out_of_range(void **unused)
{
    (void)unused;
    mla_context *ctx = plain_context();
#define REFUSED(field, value, status)                                                              \
    do {                                                                                           \
        mla_problem p = decode_problem();                                                          \
        p.field = (value);                                                                         \
        refused_everywhere(ctx, &p, status, "problem." #field);                                    \
    } while (0)
#define REFUSED_64(field)                                                                          \
    REFUSED(field, -1, MLA_ERROR_ARGUMENT);                                                        \
    REFUSED(field, INT64_MIN, MLA_ERROR_ARGUMENT);                                                 \
    REFUSED(field, INT64_MAX, MLA_ERROR_CAPACITY)
    REFUSED_64(batch);
    REFUSED_64(tokens);
    REFUSED_64(max_q_len);
    REFUSED_64(max_kv_len);
    REFUSED_64(page_size);
    REFUSED(num_heads, -1, MLA_ERROR_ARGUMENT);
    REFUSED(num_kv_heads, -1, MLA_ERROR_ARGUMENT);
    REFUSED(kv_lora_rank, INT32_MIN, MLA_ERROR_ARGUMENT);
    REFUSED(qk_rope_head_dim, -1, MLA_ERROR_ARGUMENT);
    REFUSED(qk_nope_head_dim, -1, MLA_ERROR_ARGUMENT);
    REFUSED(qk_head_dim, -1, MLA_ERROR_ARGUMENT);
    REFUSED(v_head_dim, -1, MLA_ERROR_ARGUMENT);
    REFUSED(struct_size, 0, MLA_ERROR_VERSION);
    REFUSED(struct_size, 60, MLA_ERROR_VERSION);
    REFUSED(struct_size, UINT32_MAX, MLA_ERROR_VERSION);
#undef REFUSED_64
#undef REFUSED
    mla_context_destroy(ctx);
}

/* A workspace past 64 bits is refused, not wrapped into a small one. */
static void workspaces_do_not_wrap(void **unused)
{
    (void)unused;
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.n_threads = 64;
    options.ignore_environment = options.cpu_only = 1;
    mla_context *ctx = make_context(&options);
    mla_diag diag = {{0}};
    for (int32_t rank = 1 << 20; rank > 0; rank = rank < 1 << 30 ? rank * 4 : 0) {
        uint64_t before = 0;
        bool is_too_large = false;
        for (int32_t power = 10; power <= 48; power++) {
            mla_problem p = decode_problem();
            uint64_t bytes = 0;
            p.kv_lora_rank = rank;
            p.max_kv_len = INT64_C(1) << power;
            p.batch = INT64_C(1) << 40;
            mla_status status = mla_workspace_bytes(ctx, &p, "c", &bytes, &diag);
            if (status == MLA_OK) {
                assert_false(is_too_large);
                assert_true(bytes >= before);
                before = bytes;
                continue;
            }
            assert_int_equal(status, MLA_ERROR_CAPACITY);
            assert_non_null(strstr(diag.text, "2^62"));
            is_too_large = true;
        }
        assert_true(is_too_large || rank < 1 << 24);
    }
    mla_context_destroy(ctx);
}

int main(void)
{
    unsetenv("MLA_SOLUTION");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(call_beats_scope_beats_the_rest),
        cmocka_unit_test(option_beats_environment),
        cmocka_unit_test(full_names_concern_their_operator_and_beat_families),
        cmocka_unit_test(scopes_nest_and_end),
        cmocka_unit_test(unknown_names_list_what_exists),
        cmocka_unit_test(a_forced_row_that_does_not_fit_is_an_error),
        cmocka_unit_test(a_family_without_the_operator_is_an_error),
        cmocka_unit_test(bad_rows_are_refused),
        cmocka_unit_test(callers_rows_are_chosen_by_cost_and_replace_by_name),
        cmocka_unit_test(ties_go_to_the_earlier_row),
        cmocka_unit_test(a_row_gets_the_workspace_it_asked_for),
        cmocka_unit_test(a_capacity_covers_rows_that_smaller_calls_choose),
        cmocka_unit_test(explain_tells_about_every_row),
        cmocka_unit_test(explain_leaves_diag_and_verdicts_alone),
        cmocka_unit_test(capacities_out_of_range),
        cmocka_unit_test(workspaces_do_not_wrap),
    };
    return cmocka_run_group_tests_name("selection", tests, NULL, NULL);
}
