/*
 * Backend: its state, shared by the files of this folder.
 *
 * Ownership. The backend owns the page tables, cumulative lengths, prefix windows, the workspace
 * and the cast buffers. Lengths, indices and the extends' lengths belong to the caller; metadata
 * holds views of them. Metadata is defined from a successful init (or capture, replay) to the next
 * one, and only the kinds that the mode defines.
 *
 * On a device the page tables, cumulative lengths, window slots, the workspace and the cast buffers
 * lie there, and so do the caller's tensors; what decides shapes (the extends' lengths) comes from
 * the host twins. Values on the device are clamped by the kernels that read them, never checked.
 *
 * Steps run in one of three phases. EAGER chooses a solution at every call. CAPTURE also remembers,
 * for the batch size, which solution each kind of call chose. REPLAY forces the remembered one and
 * refuses calls that were not captured.
 */
#ifndef MLAI_BACKEND_H
#define MLAI_BACKEND_H

#include "base/base.h"
#include "registry/registry.h"
#include <mla/backend.h>
#include <mla/solution.h>

#define MLAI_MAX_SCOPES 16
#define MLAI_MAX_CAPTURED_CALLS 16
#define MLAI_DEFAULT_CHUNK_CAPACITY 32768

typedef enum mlai_phase { MLAI_PHASE_EAGER, MLAI_PHASE_CAPTURE, MLAI_PHASE_REPLAY } mlai_phase;

/* One kind of decode call of a captured step: what it was chosen by, and the row's name. */
typedef struct mlai_captured_call {
    mla_problem problem;
    const char *solution; /* belongs to the row */
} mlai_captured_call;

typedef struct mlai_captured_batch {
    int32_t n_calls;
    mlai_captured_call calls[MLAI_MAX_CAPTURED_CALLS];
} mlai_captured_batch;

typedef struct mlai_graph_state {
    int32_t max_bs;                /* 0 = no graph state */
    int32_t *page_table;           /* [max_bs, W], fixed address, on the backend's device */
    mla_tensor seq_lens;           /* the caller's, aliased */
    mlai_captured_batch **batches; /* [max_bs + 1], by batch size; NULL = not captured */
} mlai_graph_state;

struct mla_backend {
    mla_context *ctx;
    mlai_device device;
    mla_config config; /* defaults filled in; its solution points to the copy below */
    char *solution;
    int32_t num_heads;     /* H: local heads */
    int64_t table_width;   /* W */
    int64_t max_kv_tokens; /* keys in one prefill call: max_tokens or one prefix window */

    void *workspace; /* aligned to 64 bytes, zeroed when it is made */
    uint64_t workspace_bytes;
    void *workspace_memory;
    uint8_t *query_cast; /* e4m3 [max_tokens, H, D], with MLA_DECODE_QUERY_CAST */
    uint8_t *kv_cast;    /* e4m3 [max_kv_tokens, H, L + V], from the first e4m3 extend on */

    mlai_phase phase;
    bool has_prefill;
    bool has_decode;
    mla_prefill_metadata prefill;
    mla_decode_metadata decode;
    int32_t scopes[MLAI_MAX_SCOPES]; /* what each scope found */
    int32_t n_scopes;
    int32_t *page_table;      /* [max_bs, W], on the device */
    int32_t *cum_extend;      /* [max_bs + 1] */
    int32_t *extend_lens;     /* [max_bs] */
    int32_t *extend_prefixes; /* [max_bs] */
    void *windows;            /* the prefix windows' arrays, grown as needed */
    uint64_t windows_bytes;
    int32_t *device_cum_extend; /* the twins of cum_extend and windows; NULL on the CPU */
    void *device_windows;
    uint64_t device_windows_bytes;

    mlai_graph_state graph;
    mlai_captured_batch *current; /* CAPTURE and REPLAY: of the current batch size */

    mla_record_step record;
    void *record_user;
};

/* config.c: n * bytes zeroed bytes on the backend's device; NULL when they do not fit or do not
 * exist. */
void *mlai_backend_alloc(const mla_backend *backend, uint64_t n, uint64_t bytes);
void mlai_backend_free(const mla_backend *backend, void *memory);

/* config.c: grows the workspace to what every call within the capacities may need. */
mla_status mlai_backend_size_workspace(mla_backend *backend, mla_diag *diag);

/* metadata.c: no metadata is defined and no scope open after this. */
void mlai_backend_forget(mla_backend *backend);

/* Lengths of `count` rows from `first` on: 0 .. context_len, and within `columns` pages. `reach` is
 * how many rows past its length a request's last token sees. */
mla_status mlai_backend_check_lens(const mla_backend *backend, const mla_tensor *seq_lens,
                                   int64_t first, int64_t count, int64_t reach, int64_t columns,
                                   mla_diag *diag);

/* A rank-1 tensor on the backend's device with at least `least` entries. */
mla_status mlai_backend_check_indices(const mla_backend *backend, const mla_tensor *t,
                                      const char *name, uint32_t formats, int64_t least,
                                      mla_diag *diag);

/* req_to_page and the rows that the first bs of req_pool_indices name. */
mla_status mlai_backend_check_rows(const mla_backend *backend, const mla_tensor *req_pool_indices,
                                   const mla_tensor *req_to_page, int32_t bs, mla_diag *diag);

/* The pages of the requests, checked before, into the rows of `table`. */
mla_status mlai_backend_gather_pages(const mla_backend *backend, void *stream,
                                     const mla_tensor *req_to_page, mla_tensor req_pool_indices,
                                     const mla_tensor *table, mla_diag *diag);

/* chunk.c: windows over the prefixes in backend->extend_prefixes, into backend->prefill. */
mla_status mlai_backend_build_windows(mla_backend *backend, const mla_forward_batch *batch,
                                      mla_diag *diag);

/* graph.c: the solution of a decode call in the current phase; *solution is set only by one. */
mla_status mlai_backend_fix_solution(mla_backend *backend, const mla_problem *problem,
                                     const char **solution, mla_diag *diag);
void mlai_backend_free_graph(mla_backend *backend);

/* cast.c: operands that the backend itself reads are on its device. */
mla_status mlai_backend_check_device(const mla_backend *backend, const mla_tensor *t,
                                     const char *name, mla_diag *diag);

/* cast.c: e4m3, saturating, [T, H, x] to [T, H, x] of any row strides, on the context's threads or
 * the device's stream. */
mla_status mlai_cast_to_e4m3(const mla_backend *backend, void *stream, const mla_tensor *in,
                             const mla_tensor *out, mla_diag *diag);

/* A forward split in two, so that the step is recorded between its checks and its work. */
typedef struct mlai_decode_step {
    bool is_empty;
    mla_kv_pool *pool;
    mla_layer layer;
    mla_forward_decode_args args;
    mla_decode_params params;
} mlai_decode_step;

mla_status mlai_decode_prepare(mla_backend *backend, const mla_layer *layer, mla_kv_pool *pool,
                               const mla_forward_decode_args *args, mlai_decode_step *step,
                               mla_diag *diag);
mla_status mlai_decode_run(mla_backend *backend, mlai_decode_step *step, mla_diag *diag);

static inline bool mlai_backend_is_on_host(const mla_backend *backend)
{
    return backend->device.runtime == NULL;
}

/* A tensor of the backend's own memory. */
static inline mla_tensor mlai_backend_tensor(const mla_backend *backend, mla_tensor t)
{
    return mla_tensor_on(t, backend->config.device_type, backend->config.device_index);
}

static inline mla_call mlai_backend_call(const mla_backend *backend, void *stream)
{
    mla_call call = {.solution = backend->solution,
                     .stream = stream,
                     .workspace = backend->workspace,
                     .workspace_bytes = backend->workspace_bytes,
                     .device_error = backend->config.device_error};
    return call;
}

#endif
