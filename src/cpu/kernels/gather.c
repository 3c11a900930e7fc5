/*
 * gather: row i of latent [T, R] and rope [T, P] (or one [T, R + P]) is slot slots[i] of the cache
 * times k_scale, in the outputs' format; negative slots give 0. Called through the families'
 * tables.
 */
#include "cpu/kernels/cache_row.h"

typedef struct gather_work {
    const mla_gather_kv_params *params;
    mlai_cache cache;
} gather_work;

/* The cache row of token MLAI_ROWS_AHEAD later, or `row`; asks for the row that it will fill. */
MLAI_INLINE mlai_cache_row find_ahead(const gather_work *work, int64_t token, int64_t end,
                                      mlai_cache_row row)
{
    const mla_tensor *latent = &work->params->latent;
    token += MLAI_ROWS_AHEAD;
    if (token >= end)
        return row;
    const int64_t bytes = mlai_lane_bytes(latent->format);
    const int64_t slot = mlai_index_at(&work->params->slots, token);
    if (!work->cache.is_streaming)
        mlai_prefetch_bytes((const char *)latent->data + token * latent->stride[0] * bytes,
                            latent->shape[1] * bytes, true);
    return slot < 0 ? row : mlai_cache_row_at(&work->cache, slot);
}

static void gather_rows(void *arg, int32_t task, int64_t first, int64_t end)
{
    const gather_work *work = arg;
    const mla_gather_kv_params *p = work->params;
    const int32_t format = p->latent.format;
    const int64_t bytes = mlai_lane_bytes(format);
    const int64_t latent_stride = p->latent.stride[0] * bytes;
    const int64_t n_latent = work->cache.n_latent, n_rope = work->cache.n_rope;
    char *rope = (char *)p->latent.data + n_latent * bytes;
    int64_t rope_stride = latent_stride;
    if (mlai_present(&p->rope)) {
        rope = p->rope.data;
        rope_stride = p->rope.stride[0] * bytes;
    }
    (void)task;
    for (int64_t i = first; i < end; i++) {
        const int64_t slot = mlai_index_at(&p->slots, i);
        char *latent_out = (char *)p->latent.data + i * latent_stride;
        char *rope_out = rope + i * rope_stride;
        if (slot < 0) {
            memset(latent_out, 0, (size_t)(n_latent * bytes));
            if (n_rope > 0)
                memset(rope_out, 0, (size_t)(n_rope * bytes));
            continue;
        }
        const mlai_cache_row row = mlai_cache_row_at(&work->cache, slot);
        const mlai_cache_row ahead = find_ahead(work, i, end, row);
        mlai_load_latent(&work->cache, row, latent_out, format, ahead);
        if (n_rope > 0)
            mlai_load_rope(&work->cache, row, rope_out, format, ahead);
    }
    mlai_stream_end(work->cache.is_streaming);
}

mla_status MLAI_IN_FAMILY(mlai_gather_run)(const mla_exec *exec, const mla_problem *problem,
                                           const void *params, mla_diag *diag)
{
    (void)diag;
    const mla_gather_kv_params *p = params;
    const int64_t width = (int64_t)p->kv_lora_rank + p->qk_rope_head_dim;
    gather_work work = {.params = p,
                        .cache = mlai_cache_make(&p->kv_cache, &p->kv_cache_rope, p->kv_lora_rank,
                                                 p->qk_rope_head_dim, p->k_scale, 0)};
    work.cache.is_streaming =
        mlai_should_stream(problem->tokens * width * mlai_lane_bytes(problem->out_format));
    mlai_for_rows(exec, problem->tokens, 4 * width, gather_rows, &work);
    return MLA_OK;
}
