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

static void rotate_queries(const rope_write_work *work, int64_t token, int64_t ahead,
                           const float *cos, const float *sin)
{
    const mla_rope_write_kv_params *p = work->params;
    const mla_tensor *q = &p->q_pe, *out = &p->q_pe_out;
    const int64_t q_bytes = mlai_lane_bytes(q->format), out_bytes = mlai_lane_bytes(out->format);
    const mlai_heads x = {(char *)q->data + token * q->stride[0] * q_bytes, q->stride[1] * q_bytes,
                          q->format};
    const mlai_heads y = {(char *)out->data + token * out->stride[0] * out_bytes,
                          out->stride[1] * out_bytes, out->format};
    /* In place, the line to be written is in the cache. */
    const bool passes_by = work->cache.is_streaming || work->cache.is_staged;
    mlai_rotate_heads(&y, &x, q->shape[1], cos, sin, q->shape[2], p->is_interleaved != 0,
                      passes_by && out->data != q->data,
                      (const char *)q->data + ahead * q->stride[0] * q_bytes);
}

/* The rotated key to the cache's row, where there is one, and to k_pe_out, where it is given. */
static void rotate_key(const rope_write_work *work, int64_t token, int64_t ahead,
                       const mlai_cache_row *row, const float *cos, const float *sin)
{
    const mla_rope_write_kv_params *p = work->params;
    const mlai_cache *cache = &work->cache;
    const bool is_interleaved = p->is_interleaved != 0, has_out = mlai_present(&p->k_pe_out);
    const int64_t stride = p->k_pe.stride[0] * mlai_lane_bytes(p->k_pe.format);
    const int64_t out_bytes = has_out ? mlai_lane_bytes(p->k_pe_out.format) : 0;
    const mlai_heads x = {(char *)p->k_pe.data + token * stride, 0, p->k_pe.format};
    const char *x_ahead = (const char *)p->k_pe.data + ahead * stride;
    mlai_heads out = {NULL, 0, p->k_pe_out.format};
    if (has_out)
        out.data = (char *)p->k_pe_out.data + token * p->k_pe_out.stride[0] * out_bytes;
    if (!mlai_is_change(&cache->change) && mlai_rotates_blocks(cache->n_rope, is_interleaved)) {
        const mlai_heads to_cache = {row->rope, 0, cache->rope_format};
        if (row->rope != NULL)
            mlai_rotate_heads(&to_cache, &x, 1, cos, sin, cache->n_rope, is_interleaved,
                              cache->is_streaming, x_ahead);
        if (has_out)
            mlai_rotate_heads(&out, &x, 1, cos, sin, cache->n_rope, is_interleaved, false, x_ahead);
        return;
    }
    mlai_rotated y;
    for (int64_t pair = 0; pair < cache->n_rope / 2; pair += MLAI_PAIRS) {
        mlai_rotate_chunk(&y, x.data, x.format, cos, sin, cache->n_rope, pair, is_interleaved);
        for (int32_t k = 0; k < y.n_parts; k++) {
            const float *values = y.values + k * y.part_values;
            if (row->rope != NULL)
                mlai_store_rope(cache, *row, y.part_first[k], (const char *)values, MLA_FORMAT_F32,
                                y.part_values, x_ahead);
            if (has_out)
                mlai_narrow(out.data + y.part_first[k] * out_bytes, out.format, values,
                            y.part_values);
        }
    }
}

static void write_token(const rope_write_work *work, const mlai_queued *q, mlai_stage *stage)
{
    const mla_rope_write_kv_params *p = work->params;
    const mlai_cache *cache = &work->cache;
    const int64_t token = q->token, slot = q->slot;
    const int64_t position = mlai_index_at(&p->positions, token);
    const float *cos = mlai_angles_at(&p->cos, position);
    const float *sin = mlai_angles_at(&p->sin, position);
    const int32_t format = p->latent.format;
    const int64_t bytes = mlai_lane_bytes(format);
    if (mlai_present(&p->q_pe))
        rotate_queries(work, token, q->ahead, cos, sin);

    mlai_cache_row row = {NULL, NULL};
    if (slot >= 0) {
        row = mlai_cache_row_at(cache, slot);
        if (cache->is_staged)
            row = mlai_stage_row(stage, row);
        const int64_t stride = p->latent.stride[0] * bytes;
        mlai_store_latent(cache, row, (const char *)p->latent.data + token * stride, format,
                          (const char *)p->latent.data + q->ahead * stride);
    }
    if (cache->n_rope > 0)
        rotate_key(work, token, q->ahead, &row, cos, sin);
}

static void rope_write_task(void *arg, int32_t task)
{
    const rope_write_work *work = arg;
    const mla_rope_write_kv_params *p = work->params;
    mlai_token_queue queue = mlai_queue_make(&p->slots, task, work->n_tasks);
    mlai_queued q;
    mlai_stage stage = {.to = NULL, .n_bytes = 0};
    const bool passes_by = work->cache.is_streaming || work->cache.is_staged;
    while (mlai_queue_take(&queue, &q)) {
        const int64_t position = mlai_index_at(&p->positions, q.ahead);
        const int64_t angle_bytes = p->qk_rope_head_dim / 2 * (int64_t)sizeof(float);
        mlai_prefetch_bytes((const char *)mlai_angles_at(&p->cos, position), angle_bytes, false);
        mlai_prefetch_bytes((const char *)mlai_angles_at(&p->sin, position), angle_bytes, false);
        if (!passes_by && q.ahead_slot >= 0)
            mlai_prefetch_bytes(mlai_cache_row_at(&work->cache, q.ahead_slot).latent,
                                work->row_bytes, true);
        write_token(work, &q, &stage);
    }
    if (work->cache.is_staged)
        mlai_stage_empty(&stage);
    mlai_stream_end(passes_by);
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
    if (mlai_should_stream(problem->tokens * (work.row_bytes + 2 * query_values)))
        mlai_cache_stream(&work.cache);
    work.n_tasks = mlai_slot_tasks(exec, problem->tokens, 4 * width);
    if (work.n_tasks == 1)
        rope_write_task(&work, 0);
    else
        exec->run(exec->run_user, work.n_tasks, rope_write_task, &work);
    return MLA_OK;
}
