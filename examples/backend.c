/*
 * Decode steps of two requests through the backend, as an engine runs them: pages from an
 * allocator, slots and lengths from the page table, metadata once a step, then for each layer the
 * projections (left out here), the cache write and the attention. Values are made up so that the
 * answer is known: the latents of a request are all its number, and so is what attention returns.
 */
#include <mla/mla.h>
#include <stdio.h>
#include <stdlib.h>

#define TRY(call)                                                                                  \
    if ((call) != MLA_OK)                                                                          \
    return fprintf(stderr, "%s\n", diag.text), 1

enum { LAYERS = 2, HEADS = 8, RANK = 64, ROPE = 16, PAGE = 4, REQUESTS = 2, STEPS = 10 };

static float query[REQUESTS][HEADS][RANK + ROPE], row[REQUESTS][RANK + ROPE];
static float out[REQUESTS][HEADS][RANK];
static int32_t requests[REQUESTS] = {0, 1}, cached[REQUESTS], fresh[REQUESTS] = {1, 1};
static int32_t seq_lens[REQUESTS], slots[REQUESTS];

int main(void)
{
    mla_diag diag = {{0}};
    mla_context *ctx;
    mla_kv_pool *pool;
    mla_page_allocator *allocator;
    mla_req_to_page *table;
    mla_backend *backend;
    TRY(mla_context_create(NULL, &ctx, &diag));

    mla_kv_pool_config pool_config = MLA_KV_POOL_CONFIG_INIT;
    pool_config.num_layers = LAYERS;
    pool_config.num_pages = 16;
    pool_config.page_size = PAGE;
    pool_config.format = MLA_FORMAT_F32;
    pool_config.kv_lora_rank = RANK;
    pool_config.qk_rope_head_dim = ROPE;
    TRY(mla_kv_pool_create(ctx, &pool_config, &pool, &diag));
    TRY(mla_page_allocator_create(pool_config.num_pages, &allocator, &diag));
    TRY(mla_req_to_page_create(REQUESTS, 8, &table, &diag));

    mla_config config = MLA_CONFIG_INIT;
    config.num_attention_heads = HEADS;
    config.kv_lora_rank = RANK;
    config.qk_nope_head_dim = 32;
    config.qk_rope_head_dim = ROPE;
    config.v_head_dim = 32;
    config.page_size = PAGE;
    config.context_len = 8 * PAGE;
    config.q_format = MLA_FORMAT_F32;
    config.kv_format = MLA_FORMAT_F32;
    config.softmax_scale = mla_softmax_scale(32, ROPE, 1.0f, 0.0f);
    config.max_bs = REQUESTS;
    TRY(mla_backend_create(ctx, &config, &backend, &diag));

    mla_tensor ids = mla_tensor_1d(requests, MLA_FORMAT_I32, REQUESTS);
    mla_tensor lens = mla_tensor_1d(seq_lens, MLA_FORMAT_I32, REQUESTS);
    mla_tensor where = mla_tensor_1d(slots, MLA_FORMAT_I32, REQUESTS), none = {0};
    for (int step = 0; step < STEPS; step++) {
        for (int r = 0; r < REQUESTS; r++)
            TRY(mla_req_to_page_reserve(table, allocator, &pool, 1, r, PAGE, cached[r], 1, &diag));
        TRY(mla_positions_and_slots(
            mla_req_to_page_tensor(table), ids, mla_tensor_1d(cached, MLA_FORMAT_I32, REQUESTS),
            mla_tensor_1d(fresh, MLA_FORMAT_I32, REQUESTS), PAGE, none, where, lens, &diag));

        mla_forward_batch batch = MLA_FORWARD_BATCH_INIT;
        batch.forward_mode = MLA_FORWARD_DECODE;
        batch.bs = REQUESTS;
        batch.req_pool_indices = ids;
        batch.seq_lens = lens;
        batch.req_to_page = mla_req_to_page_tensor(table);
        TRY(mla_backend_init_forward_metadata(backend, &batch, &diag));

        for (int layer_id = 0; layer_id < LAYERS; layer_id++) {
            for (int r = 0; r < REQUESTS; r++)
                for (int i = 0; i < RANK; i++)
                    row[r][i] = (float)(r + 1);
            mla_layer layer = MLA_LAYER_INIT;
            layer.layer_id = layer_id;
            mla_forward_decode_args args = MLA_FORWARD_DECODE_ARGS_INIT;
            args.bs = REQUESTS;
            args.q = mla_tensor_3d(query, MLA_FORMAT_F32, REQUESTS, HEADS, RANK + ROPE);
            args.k = mla_tensor_2d(row, MLA_FORMAT_F32, REQUESTS, RANK + ROPE);
            args.out_cache_loc = where;
            args.out = mla_tensor_3d(out, MLA_FORMAT_F32, REQUESTS, HEADS, RANK);
            TRY(mla_backend_forward_decode(backend, &layer, pool, &args, &diag));
        }
        for (int r = 0; r < REQUESTS; r++)
            cached[r]++;
    }
    printf("after %d steps: request 0 gives %.3f, request 1 gives %.3f, %lld pages are free\n",
           STEPS, out[0][0][0], out[1][0][0], (long long)mla_page_allocator_free_count(allocator));

    mla_backend_destroy(backend);
    mla_req_to_page_destroy(table);
    mla_page_allocator_destroy(allocator);
    mla_kv_pool_destroy(pool);
    mla_context_destroy(ctx);
    return 0;
}
