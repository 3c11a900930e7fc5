/*
 * Running problems; see operators.h. The workspace of a call:
 *
 *   [ 64 bytes canary | exactly mla_workspace_bytes, poison | 64 bytes canary ]
 */
#include "oracle/operators.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CANARY 0x5a
#define CANARY_BYTES 64

static void run_backwards(void *user, int32_t n_tasks, mla_task fn, void *arg)
{
    (void)user;
    for (int32_t i = n_tasks - 1; i >= 0; i--)
        fn(arg, i);
}

mla_context *operator_context(int32_t n_threads)
{
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.n_threads = n_threads > 0 ? n_threads : 5;
    options.run = n_threads > 0 ? NULL : run_backwards;
    options.ignore_environment = 1;
    options.cpu_only = 1;
    mla_context *ctx = NULL;
    mla_diag diag = {{0}};
    if (mla_context_create(&options, &ctx, &diag) != MLA_OK) {
        fprintf(stderr, "no context: %s\n", diag.text);
        exit(1);
    }
    return ctx;
}

operator_rows operator_rows_here(const mla_context *ctx, int32_t op, const char *filter)
{
    operator_rows rows = {0, {NULL}};
    for (int32_t i = 0; i < mla_solution_count(ctx); i++) {
        mla_solution_info info = MLA_SOLUTION_INFO_INIT;
        if (mla_solution_describe(ctx, i, &info, NULL) != MLA_OK || info.op != op)
            continue;
        if (!info.runs_here || info.device_type != MLA_DEVICE_CPU || rows.n == 63)
            continue;
        if (filter && strcmp(filter, info.name) != 0 && strcmp(filter, info.family) != 0)
            continue;
        rows.name[rows.n++] = info.name;
    }
    return rows;
}

operator_rows operator_families_here(const mla_context *ctx, int32_t op)
{
    operator_rows families = {0, {NULL}};
    for (int32_t i = 0; i < mla_solution_count(ctx) && families.n < 63; i++) {
        mla_solution_info info = MLA_SOLUTION_INFO_INIT;
        if (mla_solution_describe(ctx, i, &info, NULL) != MLA_OK || info.op != op ||
            !info.runs_here || info.device_type != MLA_DEVICE_CPU)
            continue;
        bool is_known = false;
        for (int32_t k = 0; k < families.n; k++)
            is_known |= strcmp(families.name[k], info.family) == 0;
        if (!is_known)
            families.name[families.n++] = info.family;
    }
    return families;
}

static bool all_canary(const uint8_t *p)
{
    for (int32_t i = 0; i < CANARY_BYTES; i++)
        if (p[i] != CANARY)
            return false;
    return true;
}

static uint8_t *workspace_make(uint64_t bytes)
{
    uint8_t *memory = NULL;
    size_t whole = (size_t)bytes + 2 * CANARY_BYTES;
    if (posix_memalign((void **)&memory, 64, whole) != 0) {
        fprintf(stderr, "no memory for a workspace of %llu bytes\n", (unsigned long long)bytes);
        exit(1);
    }
    memset(memory, SCENE_POISON, whole);
    memset(memory, CANARY, CANARY_BYTES);
    memset(memory + CANARY_BYTES + bytes, CANARY, CANARY_BYTES);
    return memory;
}

bool operator_run(mla_context *ctx, const operator_table *op, problem_base *p, const char *solution,
                  char *why, size_t why_bytes)
{
    mla_diag diag = {{0}};
    mla_problem problem = MLA_PROBLEM_INIT;
    mla_status status = op->problem(p, &problem, &diag);
    uint64_t bytes = 0;
    if (status == MLA_OK)
        status = mla_workspace_bytes(ctx, &problem, solution, &bytes, &diag);
    if (status != MLA_OK) {
        snprintf(why, why_bytes, "problem or workspace: %s: %s", mla_status_name(status),
                 diag.text);
        return false;
    }
    uint8_t *memory = workspace_make(bytes);
    mla_call call = {.solution = solution,
                     .workspace = bytes ? memory + CANARY_BYTES : NULL,
                     .workspace_bytes = bytes};
    scene_reset(&p->scene);
    status = op->run(ctx, p, &call, &diag);
    bool ok = status == MLA_OK;
    if (!ok)
        snprintf(why, why_bytes, "%s: %s", mla_status_name(status), diag.text);
    else if (!all_canary(memory) || !all_canary(memory + CANARY_BYTES + bytes)) {
        ok = false;
        snprintf(why, why_bytes, "wrote outside its workspace of %llu bytes",
                 (unsigned long long)bytes);
    } else {
        ok = scene_intact(&p->scene, why, why_bytes);
    }
    free(memory);
    return ok;
}

bool operator_refuses(mla_context *ctx, const operator_table *op, problem_base *p,
                      const char *solution, mla_status expected, char *why, size_t why_bytes)
{
    mla_diag diag = {{0}};
    uint8_t *memory = workspace_make(1 << 20);
    mla_call call = {
        .solution = solution, .workspace = memory + CANARY_BYTES, .workspace_bytes = 1 << 20};
    scene_reset(&p->scene);
    mla_status status = op->run(ctx, p, &call, &diag);
    free(memory);
    if (status != expected) {
        snprintf(why, why_bytes, "gave %s (%s) where %s is due", mla_status_name(status), diag.text,
                 mla_status_name(expected));
        return false;
    }
    if (!diag.text[0]) {
        snprintf(why, why_bytes, "%s without a sentence", mla_status_name(status));
        return false;
    }
    return scene_untouched(&p->scene, why, why_bytes);
}

bool operator_accepts(mla_context *ctx, const operator_table *op, const problem_base *p,
                      const char *solution)
{
    mla_problem problem = MLA_PROBLEM_INIT;
    const char *name = NULL;
    return op->problem(p, &problem, NULL) == MLA_OK &&
           mla_solution_choose(ctx, &problem, solution, &name, NULL) == MLA_OK;
}

bool operator_verify(mla_context *ctx, const operator_table *op, problem_base *p,
                     const char *solution, double *worst, char *why, size_t why_bytes)
{
    double unused;
    if (!operator_run(ctx, op, p, solution, why, why_bytes))
        return false;
    return op->check(p, worst ? worst : &unused, why, why_bytes);
}
