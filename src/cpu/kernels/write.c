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

static void write_task(void *arg, int32_t task)
{
    const write_work *work = arg;
    const mla_write_kv_params *p = work->params;
    const mlai_cache *cache = &work->cache;
    const int32_t format = p->latent.format;
    const bool passes_by = cache->is_streaming || cache->is_staged;
    const int64_t bytes = mlai_lane_bytes(format);
    const int64_t latent_stride = p->latent.stride[0] * bytes;
    const char *latent = p->latent.data, *rope = latent + cache->n_latent * bytes;
    int64_t rope_stride = latent_stride;
    if (mlai_present(&p->rope)) {
        rope = p->rope.data;
        rope_stride = p->rope.stride[0] * bytes;
    }
    mlai_token_queue queue = mlai_queue_make(&p->slots, task, work->n_tasks);
    mlai_queued q;
    mlai_stage stage = {.to = NULL, .n_bytes = 0};
    while (mlai_queue_take(&queue, &q)) {
        if (!passes_by && q.ahead_slot >= 0)
            mlai_prefetch_bytes(mlai_cache_row_at(cache, q.ahead_slot).latent, work->row_bytes,
                                true);
        if (q.slot < 0)
            continue;
        mlai_cache_row row = mlai_cache_row_at(cache, q.slot);
        if (cache->is_staged)
            row = mlai_stage_row(&stage, row);
        mlai_store_latent(cache, row, latent + q.token * latent_stride, format,
                          latent + q.ahead * latent_stride);
        if (cache->n_rope > 0)
            mlai_store_rope(cache, row, 0, rope + q.token * rope_stride, format, cache->n_rope,
                            rope + q.ahead * rope_stride);
    }
    if (cache->is_staged)
        mlai_stage_empty(&stage);
    mlai_stream_end(passes_by);
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
    if (mlai_should_stream(problem->tokens * work.row_bytes))
        mlai_cache_stream(&work.cache);
    work.n_tasks = mlai_slot_tasks(exec, problem->tokens, 4 * width);
    if (work.n_tasks == 1)
        write_task(&work, 0);
    else
        exec->run(exec->run_user, work.n_tasks, write_task, &work);
    return MLA_OK;
}
