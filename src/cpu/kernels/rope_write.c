/*
 * rope_write: for each token rotates q_pe [H, P], rotates k_pe [P], and writes (latent, rotated
 * k_pe) to its slot. The rotated key goes from f32 to the cache's format (one rounding) and, where
 * asked for, to k_pe_out. Tokens with a negative slot are rotated and not written. See rotate.h and
 * cache_row.h. Called through the families' tables.
 */
#include "cpu/kernels/cache_row.h"
#include "cpu/kernels/rotate.h"

typedef struct rope_write_work {
    const mla_rope_write_kv_params *params;
    mlai_cache cache;
    int64_t row_bytes; /* of the latent part's tensor */
    int32_t n_tasks;
} rope_write_work;

/* What a later token reads and, unless stores pass by the caches, the row that it writes. */
MLAI_PREFETCHER void prefetch_row(const rope_write_work *work, int32_t task, int64_t token)
{
    const mla_rope_write_kv_params *p = work->params;
    const mla_tensor *slots = &p->slots, *latent = &p->latent, *q = &p->q_pe;
    if (token >= slots->shape[0])
        return;
    const int64_t slot = mlai_index_at(slots, token);
    if (slot < 0 || !mlai_owns_slot(slot, token, task, work->n_tasks))
        return;
    const int64_t bytes = mlai_lane_bytes(latent->format);
    const int64_t position = mlai_index_at(&p->positions, token);
    MLAI_PREFETCH_BYTES((const char *)latent->data + token * latent->stride[0] * bytes,
                        latent->shape[latent->rank - 1] * bytes, 0);
    MLAI_PREFETCH_BYTES((const char *)mlai_angles_at(&p->cos, position),
                        p->qk_rope_head_dim / 2 * (int64_t)sizeof(float), 0);
    MLAI_PREFETCH_BYTES((const char *)mlai_angles_at(&p->sin, position),
                        p->qk_rope_head_dim / 2 * (int64_t)sizeof(float), 0);
    if (mlai_present(q) && q->stride[1] == q->shape[2])
        MLAI_PREFETCH_BYTES((const char *)q->data +
                                token * q->stride[0] * mlai_lane_bytes(q->format),
                            q->shape[1] * q->shape[2] * mlai_lane_bytes(q->format), 0);
    if (!work->cache.is_streaming)
        MLAI_PREFETCH_BYTES(mlai_cache_row_at(&work->cache, slot).latent, work->row_bytes, 1);
}

static void rotate_queries(const rope_write_work *work, int64_t token, const float *cos,
                           const float *sin)
{
    const mla_rope_write_kv_params *p = work->params;
    const mla_tensor *q = &p->q_pe, *out = &p->q_pe_out;
    const int64_t q_bytes = mlai_lane_bytes(q->format), out_bytes = mlai_lane_bytes(out->format);
    for (int64_t head = 0; head < q->shape[1]; head++) {
        const int64_t q_at = token * q->stride[0] + head * q->stride[1];
        const int64_t out_at = token * out->stride[0] + head * out->stride[1];
        mlai_rotate_head((char *)out->data + out_at * out_bytes, out->format,
                         (const char *)q->data + q_at * q_bytes, q->format, cos, sin, q->shape[2],
                         p->is_interleaved != 0, work->cache.is_streaming);
    }
}

static void write_token(const rope_write_work *work, int64_t token, int64_t slot)
{
    const mla_rope_write_kv_params *p = work->params;
    const mlai_cache *cache = &work->cache;
    const int64_t position = mlai_index_at(&p->positions, token);
    const float *cos = mlai_angles_at(&p->cos, position);
    const float *sin = mlai_angles_at(&p->sin, position);
    const int32_t format = p->latent.format;
    const int64_t bytes = mlai_lane_bytes(format);
    if (mlai_present(&p->q_pe))
        rotate_queries(work, token, cos, sin);

    mlai_cache_row row = {NULL, NULL};
    if (slot >= 0) {
        row = mlai_cache_row_at(cache, slot);
        mlai_store_latent(
            cache, row, (const char *)p->latent.data + token * p->latent.stride[0] * bytes, format);
    }
    const bool has_out = mlai_present(&p->k_pe_out);
    if (slot < 0 && !has_out)
        return;
    const char *k_pe = (const char *)p->k_pe.data + token * p->k_pe.stride[0] * bytes;
    const int64_t out_bytes = has_out ? mlai_lane_bytes(p->k_pe_out.format) : 0;
    char *out = NULL;
    if (has_out)
        out = (char *)p->k_pe_out.data + token * p->k_pe_out.stride[0] * out_bytes;
    mlai_rotated y;
    for (int64_t pair = 0; pair < cache->n_rope / 2; pair += MLAI_PAIRS) {
        mlai_rotate_chunk(&y, k_pe, format, cos, sin, cache->n_rope, pair, p->is_interleaved != 0);
        for (int32_t k = 0; k < y.n_parts; k++) {
            const float *values = y.values + k * y.part_values;
            if (slot >= 0)
                mlai_store_rope(cache, row, y.part_first[k], (const char *)values, MLA_FORMAT_F32,
                                y.part_values);
            if (has_out)
                mlai_narrow(out + y.part_first[k] * out_bytes, p->k_pe_out.format, values,
                            y.part_values);
        }
    }
}

static void rope_write_task(void *arg, int32_t task)
{
    const rope_write_work *work = arg;
    const mla_tensor *slots = &work->params->slots;
    for (int64_t token = 0; token < slots->shape[0]; token++) {
        prefetch_row(work, task, token + MLAI_ROWS_AHEAD * work->n_tasks);
        const int64_t slot = mlai_index_at(slots, token);
        if (mlai_owns_slot(slot, token, task, work->n_tasks))
            write_token(work, token, slot);
    }
    mlai_stream_end(work->cache.is_streaming);
}

mla_status MLAI_IN_FAMILY(mlai_rope_write_run)(const mla_exec *exec, const mla_problem *problem,
                                               const void *params, mla_diag *diag)
{
    (void)diag;
    const mla_rope_write_kv_params *p = params;
    const int64_t query_values =
        mlai_present(&p->q_pe) ? p->q_pe.shape[1] * p->qk_rope_head_dim : 0;
    const int64_t width = (int64_t)p->kv_lora_rank + p->qk_rope_head_dim + query_values;
    rope_write_work work = {.params = p,
                            .cache =
                                mlai_cache_make(&p->kv_cache, &p->kv_cache_rope, p->kv_lora_rank,
                                                p->qk_rope_head_dim, p->k_scale, p->flags)};
    work.row_bytes = p->kv_cache.shape[2] * mlai_lane_bytes(p->kv_cache.format);
    work.cache.is_streaming =
        mlai_should_stream(problem->tokens * (work.row_bytes + 2 * query_values));
    work.n_tasks = mlai_slot_tasks(exec, problem->tokens, 4 * width);
    if (work.n_tasks == 1)
        rope_write_task(&work, 0);
    else
        exec->run(exec->run_user, work.n_tasks, rope_write_task, &work);
    return MLA_OK;
}
