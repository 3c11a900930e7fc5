/* A small world for the backend's tests; see world.h. */
#include "backend/world.h"
#include <stdlib.h>

mla_diag diag;

mla_config world_config(void)
{
    mla_config c = MLA_CONFIG_INIT;
    c.num_attention_heads = 4;
    c.attn_tp_size = 2;
    c.kv_lora_rank = 8;
    c.qk_nope_head_dim = 4;
    c.qk_rope_head_dim = 4;
    c.v_head_dim = 6;
    c.page_size = 4;
    c.context_len = 256;
    c.q_format = c.kv_format = MLA_FORMAT_F32;
    c.softmax_scale = 0.3f;
    c.max_bs = WORLD_REQUESTS;
    c.max_tokens = 64;
    c.speculative_num_draft_tokens = 2;
    c.chunk_capacity = 64;
    return c;
}

world *world_make(mla_config config, bool with_spy)
{
    world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->config = config;
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.ignore_environment = with_spy; /* which may force other rows than the spy's */
    assert_ok(mla_context_create(&options, &w->ctx, &diag), &diag);
    if (with_spy)
        assert_ok(spy_add(w->ctx, &diag), &diag);
    spy_forget();
    assert_ok(mla_backend_create(w->ctx, &config, &w->backend, &diag), &diag);

    mla_kv_pool_config p = MLA_KV_POOL_CONFIG_INIT;
    p.num_layers = WORLD_LAYERS;
    p.num_pages = WORLD_REQUESTS * WORLD_COLUMNS;
    p.page_size = config.page_size;
    p.format = config.kv_format;
    p.kv_lora_rank = config.kv_lora_rank;
    p.qk_rope_head_dim = config.qk_rope_head_dim;
    assert_ok(mla_kv_pool_create(w->ctx, &p, &w->pool, &diag), &diag);
    for (int32_t layer = 0; layer < WORLD_LAYERS; layer++) {
        mla_kv_layer_info info = MLA_KV_LAYER_INFO_INIT;
        assert_ok(mla_kv_pool_get_layer_info(w->pool, layer, &info, &diag), &diag);
        /* All bits set is NaN in every format. */
        memset((char *)info.base + info.page_stride_bytes, 0xff,
               info.layer_bytes - info.page_stride_bytes);
    }
    for (int32_t r = 0; r < WORLD_REQUESTS; r++) {
        w->rows[r] = r;
        for (int32_t c = 0; c < WORLD_COLUMNS; c++) /* 5 is prime to the number of pages */
            w->table[r][c] = 1 + (c * WORLD_REQUESTS + r) * 5 % (WORLD_REQUESTS * WORLD_COLUMNS);
    }
    return w;
}

void world_end(world *w)
{
    mla_kv_pool_destroy(w->pool);
    mla_backend_destroy(w->backend);
    mla_context_destroy(w->ctx);
    free(w);
}

int64_t world_slot(const world *w, int32_t request, int64_t position)
{
    int64_t page_size = w->config.page_size;
    return w->table[request][position / page_size] * page_size + position % page_size;
}

void world_random(float *values, int64_t n, uint32_t seed)
{
    uint32_t x = seed * 2654435761u + 12345u;
    for (int64_t i = 0; i < n; i++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        values[i] = (float)(int32_t)x / 2147483648.0f;
    }
}

void world_fill(world *w, int32_t request, int64_t first, int64_t end)
{
    float row[1024];
    int64_t width = w->config.kv_lora_rank + w->config.qk_rope_head_dim;
    assert_true(width <= 1024);
    mla_tensor none = {.rank = 0};
    for (int32_t layer = 0; layer < WORLD_LAYERS; layer++)
        for (int64_t p = first; p < end; p++) {
            int64_t slot = world_slot(w, request, p);
            world_random(row, width, (uint32_t)((request * 1000 + p) * 2 + layer));
            assert_ok(mla_kv_pool_set_mla_kv_buffer(
                          w->pool, layer, mla_tensor_1d(&slot, MLA_FORMAT_I64, 1),
                          mla_tensor_2d(row, MLA_FORMAT_F32, 1, width), none, 1.0f, 0, NULL, &diag),
                      &diag);
        }
}

void world_poison(world *w, int32_t request, int64_t position)
{
    int64_t slot = world_slot(w, request, position);
    mla_kv_layer_info info = MLA_KV_LAYER_INFO_INIT;
    char row[8192];
    assert_ok(mla_kv_pool_get_layer_info(w->pool, 0, &info, &diag), &diag);
    assert_true(info.row_bytes <= sizeof row);
    memset(row, 0xff, sizeof row);
    for (int32_t layer = 0; layer < WORLD_LAYERS; layer++)
        assert_ok(mla_kv_pool_import_rows(w->pool, layer, 1,
                                          mla_tensor_1d(&slot, MLA_FORMAT_I64, 1), row,
                                          info.row_bytes, &diag),
                  &diag);
}

mla_forward_batch world_batch(world *w, int32_t bs, int32_t *seq_lens)
{
    mla_forward_batch batch = MLA_FORWARD_BATCH_INIT;
    batch.forward_mode = MLA_FORWARD_DECODE;
    batch.bs = bs;
    batch.req_pool_indices = mla_tensor_1d(w->rows, MLA_FORMAT_I64, bs);
    batch.seq_lens = world_i32(seq_lens, bs);
    batch.req_to_page = mla_tensor_2d(w->table, MLA_FORMAT_I32, WORLD_REQUESTS + 1, WORLD_COLUMNS);
    return batch;
}

mla_tensor world_i32(const int32_t *values, int64_t n)
{
    return mla_tensor_1d(values, MLA_FORMAT_I32, n);
}
