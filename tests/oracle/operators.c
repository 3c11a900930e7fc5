/*
 * Running problems; see operators.h. The workspace of a call:
 *
 *   [ 256 bytes canary | exactly mla_workspace_bytes, poison | 256 bytes canary ]
 *
 * A device's workspace is one for the whole program, as an engine's stream has it: zeroed when it
 * is made, its head left alone from then on.
 */
#include "oracle/operators.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CANARY 0x5a
#define CANARY_BYTES 256
#define SKIPPED 77

bool operator_keeps_bits(const char *row)
{
    return strstr(row, "_sm90a") == NULL && strstr(row, "_cublas") == NULL;
}

int32_t operator_device_type(void)
{
    return scene_device() ? MLA_DEVICE_CUDA : MLA_DEVICE_CPU;
}

void operator_take_device(int *argc, char **argv)
{
    int at = 1;
    while (at < *argc && strcmp(argv[at], "--device") != 0)
        at++;
    if (at + 1 >= *argc)
        return;
    const char *name = argv[at + 1];
    for (int i = at; i + 2 <= *argc; i++)
        argv[i] = argv[i + 2];
    *argc -= 2;
    if (strncmp(name, "cuda", 4) != 0 || (name[4] && name[4] != ':')) {
        fprintf(stderr, "--device %s: give cuda or cuda:N\n", name);
        exit(2);
    }
    char why[200] = "";
    device_memory *device =
        device_open(name[4] ? (int32_t)strtol(name + 5, NULL, 10) : 0, why, sizeof why);
    if (!device) {
        printf("skipped: %s\n", why);
        exit(SKIPPED);
    }
    scene_use_device(device);
    mla_context *ctx = operator_context(1);
    if (mla_context_device_count(ctx, MLA_DEVICE_CUDA) <= device_index(device)) {
        printf("skipped: %s\n", mla_context_device_reason(ctx, MLA_DEVICE_CUDA));
        exit(SKIPPED);
    }
    mla_context_destroy(ctx);
}

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
    options.cpu_only = operator_device_type() == MLA_DEVICE_CPU;
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
        if (!info.runs_here || info.device_type != operator_device_type() || rows.n == 63)
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
            !info.runs_here || info.device_type != operator_device_type())
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

typedef struct workspace {
    uint8_t *memory; /* what the call gets */
    uint64_t bytes;
} workspace;

static workspace host_workspace(uint64_t bytes)
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
    return (workspace){memory + CANARY_BYTES, bytes};
}

static workspace device_workspace(device_memory *device, uint64_t bytes)
{
    static uint8_t *memory;
    static uint64_t room;
    if (bytes > room || !memory) {
        device_free(device, memory);
        room = bytes;
        memory = device_alloc(device, room + 2 * CANARY_BYTES);
        device_fill(device, memory + CANARY_BYTES, 0, room);
    }
    device_fill(device, memory, CANARY, CANARY_BYTES);
    if (bytes > MLA_CUDA_WORKSPACE_HEAD_BYTES)
        device_fill(device, memory + CANARY_BYTES + MLA_CUDA_WORKSPACE_HEAD_BYTES, SCENE_POISON,
                    bytes - MLA_CUDA_WORKSPACE_HEAD_BYTES);
    if (bytes == 0 || bytes >= MLA_CUDA_WORKSPACE_HEAD_BYTES)
        device_fill(device, memory + CANARY_BYTES + bytes, CANARY, CANARY_BYTES);
    return (workspace){memory + CANARY_BYTES, bytes};
}

static workspace workspace_make(uint64_t bytes)
{
    return scene_device() ? device_workspace(scene_device(), bytes) : host_workspace(bytes);
}

static bool workspace_is_fenced(const workspace *w)
{
    uint8_t fence[2][CANARY_BYTES];
    if (!scene_device())
        return all_canary(w->memory - CANARY_BYTES) && all_canary(w->memory + w->bytes);
    device_download(scene_device(), fence[0], w->memory - CANARY_BYTES, CANARY_BYTES);
    device_download(scene_device(), fence[1], w->memory + w->bytes, CANARY_BYTES);
    return all_canary(fence[0]) && all_canary(fence[1]);
}

static void workspace_free(const workspace *w)
{
    if (!scene_device())
        free(w->memory - CANARY_BYTES);
}

static mla_call call_with(const char *solution, const workspace *w)
{
    return (mla_call){.solution = solution,
                      .stream = scene_device() ? device_stream(scene_device()) : NULL,
                      .workspace = w->bytes ? w->memory : NULL,
                      .workspace_bytes = w->bytes};
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
    if (status == MLA_OK)
        status = mla_solution_choose(ctx, &problem, solution, &p->row, &diag);
    if (status != MLA_OK) {
        snprintf(why, why_bytes, "problem or workspace: %s: %s", mla_status_name(status),
                 diag.text);
        return false;
    }
    workspace memory = workspace_make(bytes);
    mla_call call = call_with(solution, &memory);
    scene_reset(&p->scene);
    status = op->run(ctx, p, &call, &diag);
    scene_fetch(&p->scene);
    bool ok = status == MLA_OK;
    if (!ok)
        snprintf(why, why_bytes, "%s: %s", mla_status_name(status), diag.text);
    else if (!workspace_is_fenced(&memory)) {
        ok = false;
        snprintf(why, why_bytes, "wrote outside its workspace of %llu bytes",
                 (unsigned long long)bytes);
    } else {
        ok = scene_intact(&p->scene, why, why_bytes);
    }
    workspace_free(&memory);
    return ok;
}

bool operator_repeats(mla_context *ctx, const operator_table *op, problem_base *p,
                      const char *solution, char *why, size_t why_bytes)
{
    const size_t bytes = scene_outputs(&p->scene, NULL);
    uint8_t *first = malloc(bytes + 1), *again = malloc(bytes + 1);
    if (!first || !again)
        exit(1);
    scene_outputs(&p->scene, first);
    bool ok = operator_run(ctx, op, p, solution, why, why_bytes);
    scene_outputs(&p->scene, again);
    if (ok && memcmp(first, again, bytes) != 0) {
        ok = false;
        snprintf(why, why_bytes, "the same call gave other bits when it was repeated");
    }
    free(first);
    free(again);
    return ok;
}

bool operator_refuses(mla_context *ctx, const operator_table *op, problem_base *p,
                      const char *solution, mla_status expected, char *why, size_t why_bytes)
{
    mla_diag diag = {{0}};
    workspace memory = workspace_make(1 << 20);
    mla_call call = call_with(solution, &memory);
    scene_reset(&p->scene);
    mla_status status = op->run(ctx, p, &call, &diag);
    scene_fetch(&p->scene);
    workspace_free(&memory);
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
