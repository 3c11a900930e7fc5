/*
 * Captured steps: metadata in buffers of fixed address.
 *
 *   init_graph_state   page table [max_bs, W] of zeros (page 0), lengths = the caller's buffer
 *   capture bs         metadata = views [:bs]; each forward_decode chooses and is remembered
 *   replay bs          pages copied into rows [:bs], the same views made current; each
 *                      forward_decode is forced to the solution it had at capture
 *
 * What fixes a call's solution is its problem: formats, dims, batch, tokens, capacities. A replayed
 * call whose problem was not captured would have no fixed solution, so it is refused, as a captured
 * graph would simply not contain it. Lengths are the caller's, read when the attention runs.
 *
 * Called by engines around the layers of a decode step.
 */
#include "backend/backend.h"
#include "cache/cache.h"
#include <stdlib.h>

void mlai_backend_free_graph(mla_backend *backend)
{
    mlai_graph_state *g = &backend->graph;
    for (int32_t bs = 1; bs <= g->max_bs; bs++)
        free(g->batches[bs]);
    free(g->batches);
    mlai_backend_free(backend, g->page_table);
    *g = (mlai_graph_state){.max_bs = 0};
}

mla_status mla_backend_init_graph_state(mla_backend *backend, int32_t max_bs,
                                        mla_tensor seq_lens_buf, mla_diag *diag)
{
    if (backend == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "backend is NULL: give one");
    if (max_bs < 1)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "max_bs is %d: at least 1 is needed", max_bs);
    if (max_bs > backend->config.max_bs)
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "max_bs is %d: this backend was made for max_bs %d", max_bs,
                         backend->config.max_bs);
    MLAI_TRY(mlai_backend_check_indices(backend, &seq_lens_buf, "seq_lens_buf", MLAI_F(I32), max_bs,
                                        diag));
    mlai_graph_state fresh = {.max_bs = max_bs, .seq_lens = seq_lens_buf};
    fresh.page_table = mlai_backend_alloc(backend, (uint64_t)max_bs * sizeof(int32_t),
                                          (uint64_t)backend->table_width);
    fresh.batches = calloc((size_t)max_bs + 1, sizeof(mlai_captured_batch *));
    if (fresh.page_table == NULL || fresh.batches == NULL) {
        mlai_backend_free(backend, fresh.page_table);
        free(fresh.batches);
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY,
                         "no memory for a captured page table of %d requests with %lld pages each",
                         max_bs, (long long)backend->table_width);
    }
    mlai_backend_forget(backend); /* the current metadata may view the old table */
    mlai_backend_free_graph(backend);
    backend->graph = fresh;
    return MLA_OK;
}

static mla_status check_step(const mla_backend *backend, int32_t bs, int32_t forward_mode,
                             const char *what, mla_diag *diag)
{
    if (backend == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "backend is NULL: give one");
    if (forward_mode == MLA_FORWARD_EXTEND || forward_mode == MLA_FORWARD_MIXED)
        return mlai_fail(diag, MLA_ERROR_UNSUPPORTED,
                         "forward_mode is %s: only decode steps can be %s, run it eagerly",
                         mla_forward_mode_name(forward_mode), what);
    if (forward_mode != 0 && forward_mode != MLA_FORWARD_DECODE && forward_mode != MLA_FORWARD_IDLE)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "forward_mode is %d: 2 (decode) and 4 (idle) can be %s", forward_mode,
                         what);
    if (backend->graph.max_bs == 0)
        return mlai_fail(diag, MLA_ERROR_STATE,
                         "there is no graph state: call mla_backend_init_graph_state first");
    if (bs < 1)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "bs is %d: a step can be %s from 1 on", bs,
                         what);
    if (bs > backend->graph.max_bs)
        return mlai_fail(diag, MLA_ERROR_CAPACITY, "bs is %d: the graph state holds max_bs %d", bs,
                         backend->graph.max_bs);
    return MLA_OK;
}

static mla_tensor captured_table(const mla_backend *backend, int32_t bs)
{
    return mlai_backend_tensor(backend, mla_tensor_2d(backend->graph.page_table, MLA_FORMAT_I32, bs,
                                                      backend->table_width));
}

/* Makes the views of a batch size the current decode metadata. */
static void make_current(mla_backend *backend, int32_t bs, mlai_phase phase)
{
    mlai_backend_forget(backend);
    backend->decode = (mla_decode_metadata){
        .struct_size = sizeof backend->decode,
        .page_table = captured_table(backend, bs),
        .seq_lens = mla_tensor_slice(backend->graph.seq_lens, 0, 0, bs),
    };
    backend->has_decode = true;
    backend->phase = phase;
    backend->current = backend->graph.batches[bs];
}

mla_status mla_backend_init_forward_metadata_capture_graph(mla_backend *backend, int32_t bs,
                                                           int32_t forward_mode, mla_diag *diag)
{
    MLAI_TRY(check_step(backend, bs, forward_mode, "captured", diag));
    mlai_captured_batch **batch = &backend->graph.batches[bs];
    if (*batch == NULL)
        *batch = malloc(sizeof **batch);
    if (*batch == NULL)
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY, "no memory to capture a batch");
    (*batch)->n_calls = 0;
    make_current(backend, bs, MLAI_PHASE_CAPTURE);
    return MLA_OK;
}

static void list_captured(const mla_backend *backend, char *text, size_t text_bytes)
{
    for (int32_t bs = 1; bs <= backend->graph.max_bs; bs++)
        if (backend->graph.batches[bs] != NULL)
            mlai_append(text, text_bytes, "%s%d", text[0] != 0 ? " " : "", bs);
    if (text[0] == 0)
        mlai_append(text, text_bytes, "none");
}

mla_status mla_backend_init_forward_metadata_replay_graph(mla_backend *backend, int32_t bs,
                                                          mla_tensor req_pool_indices,
                                                          mla_tensor req_to_page,
                                                          int32_t forward_mode, void *stream,
                                                          mla_diag *diag)
{
    if (backend != NULL)
        mlai_backend_forget(backend);
    MLAI_TRY(check_step(backend, bs, forward_mode, "replayed", diag));
    if (backend->graph.batches[bs] == NULL) {
        char captured[256] = "";
        list_captured(backend, captured, sizeof captured);
        return mlai_fail(diag, MLA_ERROR_NOT_FOUND,
                         "bs %d was never captured (captured: %s): pad the batch to one of them",
                         bs, captured);
    }
    MLAI_TRY(mlai_backend_check_rows(backend, &req_pool_indices, &req_to_page, bs, diag));
    if (req_to_page.shape[1] < backend->table_width)
        return mlai_fail(diag, MLA_ERROR_SHAPE,
                         "req_to_page has %lld columns: the captured table has %lld "
                         "(context_len %lld in pages of %d)",
                         (long long)req_to_page.shape[1], (long long)backend->table_width,
                         (long long)backend->config.context_len, backend->config.page_size);
    MLAI_TRY(mlai_backend_check_lens(backend, &backend->graph.seq_lens, 0, bs, 0,
                                     backend->table_width, diag));
    const mla_tensor table = captured_table(backend, bs);
    MLAI_TRY(mlai_backend_gather_pages(backend, stream, &req_to_page,
                                       mla_tensor_slice(req_pool_indices, 0, 0, bs), &table, diag));
    make_current(backend, bs, MLAI_PHASE_REPLAY);
    return MLA_OK;
}

mla_status mlai_backend_fix_solution(mla_backend *backend, const mla_problem *problem,
                                     const char **solution, mla_diag *diag)
{
    if (backend->phase == MLAI_PHASE_EAGER)
        return MLA_OK;
    mlai_captured_batch *batch = backend->current;
    for (int32_t i = 0; i < batch->n_calls; i++)
        if (memcmp(&batch->calls[i].problem, problem, sizeof *problem) == 0) {
            *solution = batch->calls[i].solution;
            return MLA_OK;
        }
    if (backend->phase == MLAI_PHASE_REPLAY)
        return mlai_fail(diag, MLA_ERROR_STATE,
                         "a decode of %lld tokens for bs %lld, query format %s, was not among the "
                         "%d kinds of calls captured for it: capture it, or init eagerly",
                         (long long)problem->tokens, (long long)problem->batch,
                         mla_format_name(problem->q_format), batch->n_calls);
    if (batch->n_calls == MLAI_MAX_CAPTURED_CALLS)
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "a captured step holds %d kinds of decode calls, which is the most",
                         MLAI_MAX_CAPTURED_CALLS);
    const char *name = NULL;
    MLAI_TRY(mla_solution_choose(backend->ctx, problem, backend->solution, &name, diag));
    batch->calls[batch->n_calls++] = (mlai_captured_call){.problem = *problem, .solution = name};
    *solution = name;
    return MLA_OK;
}

int32_t mla_backend_graph_seq_len_fill_value(void)
{
    return 1; /* one row of page 0, which is finite: cheap, and never empty */
}
