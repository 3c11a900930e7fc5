/*
 * Registry: the context's table of solutions, how one is chosen and why. Knows rows, not kernels;
 * src/builtin.c names the families.
 *
 * A choice is a loop: features, accepts, forced names, lowest cost, table order.
 */
#ifndef MLAI_REGISTRY_H
#define MLAI_REGISTRY_H

#include "base/base.h"
#include <mla/context.h>
#include <mla/solution.h>

/* The rows of src/builtin.c: families in table order, each a NULL-free array. */
typedef struct mlai_family_rows {
    const mla_solution *rows;
    const int32_t *n_rows;
} mlai_family_rows;
const mlai_family_rows *mlai_builtin_families(int32_t *n_families);

/*
 * A kind of device beside the CPU, as src/builtin.c offers it. open gives NULL and a reason when
 * the machine has none; device gives what rows find in exec->device, or NULL and a reason.
 */
typedef struct mlai_device_runtime {
    int32_t device_type;
    void *(*open)(char *why, size_t why_bytes);
    void (*close)(void *runtime);
    int32_t (*count)(const void *runtime);
    void *(*device)(void *runtime, int32_t device_index, char *why, size_t why_bytes);
    void (*describe)(const void *device, mla_device_info *info);
} mlai_device_runtime;

/* NULL when the library was built without one; then `why` says so. */
const mlai_device_runtime *mlai_builtin_device_runtime(const char **why);

/*
 * Chooses a row for a validated problem. Precedence: `solution` (the call's), scope, context,
 * environment. Errors: MLA_ERROR_UNSUPPORTED with the reasons, MLA_ERROR_NOT_FOUND.
 */
mla_status mlai_choose(const mla_context *ctx, const mla_problem *problem, const char *solution,
                       const mla_solution **row, mla_diag *diag);

/* The exec of a call on this context: threads, features, the problem's device; stream and workspace
 * from call, which may be NULL. */
mla_exec mlai_exec_make(const mla_context *ctx, const mla_problem *problem, const mla_call *call);

/*
 * What every operator does after its checks: choose, size the workspace (MLA_ERROR_WORKSPACE names
 * both sizes and an unaligned pointer), run. `params` is the validated parameter struct.
 */
mla_status mlai_dispatch(mla_context *ctx, const mla_problem *problem, const mla_call *call,
                         const void *params, mla_diag *diag);

#endif
