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

/* Slots of prefix windows to be filled in: window k of request i has cumulative[k, i + 1] -
 * cumulative[k, i] of them from slots[starts[k] + cumulative[k, i]] on, those of the positions from
 * k * window_tokens on. All arrays lie on the device. */
typedef struct mlai_windows {
    const mla_tensor *req_to_page;
    const mla_tensor *req_pool_indices;
    const int32_t *cumulative; /* [n_windows, n_requests + 1] */
    const int64_t *starts;     /* [n_windows] */
    int64_t *slots;
    int64_t n_windows, n_requests;
    int64_t window_tokens, page_size;
} mlai_windows;

/* What mla_enqueue_positions_and_slots is given (mla/cache.h); absent tensors have no data. */
typedef struct mlai_tokens {
    const mla_tensor *req_to_page, *req_pool_indices, *cached_lens, *new_lens;
    const mla_tensor *positions, *slots, *seq_lens, *cu_seqlens_q;
    int64_t page_size;
} mlai_tokens;

/*
 * A kind of device beside the CPU, as src/builtin.c offers it. open gives NULL and a reason when
 * the machine has none; device gives what rows find in exec->device, or NULL and a reason where
 * `why` is not NULL.
 */
typedef struct mlai_device_runtime {
    int32_t device_type;
    void *(*open)(char *why, size_t why_bytes);
    void (*close)(void *runtime);
    int32_t (*count)(const void *runtime);
    void *(*device)(void *runtime, int32_t device_index, char *why, size_t why_bytes);
    int32_t (*arch)(const void *device); /* what describe says */
    void (*describe)(const void *device, mla_device_info *info);
    /* Enqueues the check of a call's live values before it runs, for call.device_error. */
    mla_status (*validate)(const mla_exec *exec, const mla_problem *problem, const void *params,
                           mla_device_error *error, mla_diag *diag);
    /* Memory for the pool and the backend; `device` as above. alloc gives zeroed memory, aligned to
     * 256 bytes, or NULL. Everything with a stream is enqueued on it; a copy goes in any direction
     * and is done with pageable host memory when it returns. */
    void *(*alloc)(void *device, uint64_t bytes);
    void (*release)(void *device, void *memory);
    mla_status (*copy)(void *device, void *stream, void *to, const void *from, uint64_t bytes,
                       mla_diag *diag);
    mla_status (*clear)(void *device, void *stream, void *memory, uint64_t stride,
                        uint64_t row_bytes, uint64_t rows, mla_diag *diag);
    mla_status (*wait)(void *device, void *stream, mla_diag *diag);
    /* The backend's metadata, from tensors on the device. */
    mla_status (*gather_pages)(void *device, void *stream, const mla_tensor *req_to_page,
                               const mla_tensor *req_pool_indices, const mla_tensor *out,
                               mla_diag *diag);
    mla_status (*fill_windows)(void *device, void *stream, const mlai_windows *windows,
                               mla_diag *diag);
    mla_status (*fill_tokens)(void *device, void *stream, const mlai_tokens *tokens,
                              mla_diag *diag);
    mla_status (*cast)(void *device, void *stream, const mla_tensor *in, const mla_tensor *out,
                       mla_diag *diag);
    mla_status (*count_step)(void *device, void *stream, uint64_t *count, uint64_t *mirror,
                             mla_diag *diag);
} mlai_device_runtime;

/* A device of a context: NULL handle on the CPU. */
typedef struct mlai_device {
    const mlai_device_runtime *runtime; /* NULL = the CPU */
    void *handle;
} mlai_device;

/* Error: MLA_ERROR_DEVICE (no such device; the sentence says why). */
mla_status mlai_context_device(const mla_context *ctx, int32_t device_type, int32_t device_index,
                               mlai_device *device, mla_diag *diag);

/* A problem as of version 0.1. */
#define MLAI_PROBLEM_MIN_BYTES (offsetof(mla_problem, is_split_cache) + sizeof(int32_t))

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
