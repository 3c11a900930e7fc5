/*
 * write: row i of latent [T, R] and rope [T, P] (or one [T, R + P]) goes to slot slots[i] of the
 * cache, converted to its format; negative slots are skipped. Of equal slots the last row stays.
 * See cache_row.h for the conversion. Called through the families' tables.
 */
#include "cpu/kernels/cache_row.h"

typedef struct write_work {
    const mla_write_kv_params *params;
    mlai_cache cache;
    int64_t row_bytes; /* of the latent part's tensor */
    int32_t n_tasks;
} write_work;

/* What a later token reads and, unless stores pass by the caches, the row that it writes. */
MLAI_PREFETCHER void prefetch_row(const write_work *work, int32_t task, int64_t token)
{
    const mla_tensor *slots = &work->params->slots, *latent = &work->params->latent;
    if (token >= slots->shape[0])
        return;
    const int64_t slot = mlai_index_at(slots, token);
    if (slot < 0 || !mlai_owns_slot(slot, token, task, work->n_tasks))
        return;
    const int64_t bytes = mlai_lane_bytes(latent->format);
    MLAI_PREFETCH_BYTES((const char *)latent->data + token * latent->stride[0] * bytes,
                        latent->shape[latent->rank - 1] * bytes, 0);
    if (!work->cache.is_streaming)
        MLAI_PREFETCH_BYTES(mlai_cache_row_at(&work->cache, slot).latent, work->row_bytes, 1);
}

static void write_task(void *arg, int32_t task)
{
    const write_work *work = arg;
    const mla_write_kv_params *p = work->params;
    const int32_t format = p->latent.format;
    const int64_t bytes = mlai_lane_bytes(format), tokens = p->slots.shape[0];
    const int64_t latent_stride = p->latent.stride[0] * bytes;
    const char *rope = (const char *)p->latent.data + work->cache.n_latent * bytes;
    int64_t rope_stride = latent_stride;
    if (mlai_present(&p->rope)) {
        rope = p->rope.data;
        rope_stride = p->rope.stride[0] * bytes;
    }
    for (int64_t i = 0; i < tokens; i++) {
        prefetch_row(work, task, i + MLAI_ROWS_AHEAD * work->n_tasks);
        const int64_t slot = mlai_index_at(&p->slots, i);
        if (slot < 0 || !mlai_owns_slot(slot, i, task, work->n_tasks))
            continue;
        const mlai_cache_row row = mlai_cache_row_at(&work->cache, slot);
        mlai_store_latent(&work->cache, row, (const char *)p->latent.data + i * latent_stride,
                          format);
        if (work->cache.n_rope > 0)
            mlai_store_rope(&work->cache, row, 0, rope + i * rope_stride, format,
                            work->cache.n_rope);
    }
    mlai_stream_end(work->cache.is_streaming);
}

mla_status MLAI_IN_FAMILY(mlai_write_run)(const mla_exec *exec, const mla_problem *problem,
                                          const void *params, mla_diag *diag)
{
    (void)diag;
    const mla_write_kv_params *p = params;
    const int64_t width = (int64_t)p->kv_lora_rank + p->qk_rope_head_dim;
    write_work work = {.params = p,
                       .cache = mlai_cache_make(&p->kv_cache, &p->kv_cache_rope, p->kv_lora_rank,
                                                p->qk_rope_head_dim, p->k_scale, p->flags)};
    work.row_bytes = p->kv_cache.shape[2] * mlai_lane_bytes(p->kv_cache.format);
    work.cache.is_streaming = mlai_should_stream(problem->tokens * work.row_bytes);
    work.n_tasks = mlai_slot_tasks(exec, problem->tokens, 4 * width);
    if (work.n_tasks == 1)
        write_task(&work, 0);
    else
        exec->run(exec->run_user, work.n_tasks, write_task, &work);
    return MLA_OK;
}
