/*
 * The context's inside: shared by context.c (life, scopes) and choose.c (rows).
 */
#ifndef MLAI_CONTEXT_H
#define MLAI_CONTEXT_H

#include "registry/registry.h"

enum { MLAI_MAX_ROWS = 256, MLAI_MAX_SCOPES = 16 };

struct mla_context {
    int32_t n_threads;
    mla_run run;
    void *run_user;
    struct mlai_thread_pool *pool; /* NULL when the caller runs tasks */
    uint64_t cpu_features;
    const mlai_device_runtime *runtime; /* NULL = only the CPU */
    void *devices;                      /* the runtime's; NULL = none here */
    char devices_why[160];
    const mla_solution *rows[MLAI_MAX_ROWS];
    int32_t n_rows;
    char *forced;      /* context option, or NULL */
    char *environment; /* MLA_SOLUTION at creation, or NULL */
    char *scopes[MLAI_MAX_SCOPES];
    int32_t n_scopes;
};

/* Every name of a list must be a family or a row. */
mla_status mlai_check_forced(const mla_context *ctx, const char *list, const char *whose,
                             mla_diag *diag);

#endif
