/*
 * gather: row i of latent [T, R] and rope [T, P] (or one [T, R + P]) is slot slots[i] of the cache
 * times k_scale, in the outputs' format; negative slots give 0. The row a few tokens ahead is
 * prefetched, since slots jump from page to page. Called through the families' tables.
 */
#include "cpu/kernels/cache_row.h"

enum { AHEAD = 4, LINE_BYTES = 64 };

typedef struct gather_work {
    const mla_gather_kv_params *params;
    mlai_cache cache;
    int64_t prefetch_bytes; /* of the latent part */
} gather_work;

static void prefetch_row(const gather_work *work, int64_t i, int64_t end)
{
    if (i >= end)
        return;
    const int64_t slot = mlai_index_at(&work->params->slots, i);
    if (slot < 0)
        return;
    const char *row = mlai_cache_row_at(&work->cache, slot).latent;
    for (int64_t at = 0; at < work->prefetch_bytes; at += LINE_BYTES)
        __builtin_prefetch(row + at);
}

static void gather_rows(void *arg, int32_t task, int64_t first, int64_t end)
{
    const gather_work *work = arg;
    const mla_gather_kv_params *p = work->params;
    const int32_t format = p->latent.format;
    const int64_t bytes = mla_format_bytes(format);
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
        prefetch_row(work, i + AHEAD, end);
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
        mlai_load_latent(&work->cache, row, latent_out, format);
        if (n_rope > 0)
            mlai_load_rope(&work->cache, row, rope_out, format);
    }
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
    work.prefetch_bytes = p->kv_cache.shape[2] * mla_format_bytes(p->kv_cache.format);
    mlai_for_rows(exec, problem->tokens, 4 * width, gather_rows, &work);
    return MLA_OK;
}
