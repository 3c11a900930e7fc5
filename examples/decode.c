/*
 * One decode step over a paged latent cache: a pool, pages for a request, rows written, attention.
 * The query is zero, so every row weighs the same: the output is the mean of the latents and the
 * LSE the logarithm of their number.
 */
#include <mla/mla.h>
#include <stdio.h>
#include <stdlib.h>

#define TRY(call)                                                                                  \
    if ((call) != MLA_OK)                                                                          \
    return fprintf(stderr, "%s\n", diag.text), 1

enum { HEADS = 16, RANK = 512, ROPE = 64, PAGE = 64, LENGTH = 100 };

static float rows[LENGTH][RANK + ROPE], query[HEADS][RANK + ROPE], out[HEADS][RANK], lse[HEADS];
static int32_t request = 0, cached = 0, length = LENGTH, slots[LENGTH], pages[2];

int main(void)
{
    mla_diag diag = {{0}};
    mla_context *ctx;
    TRY(mla_context_create(NULL, &ctx, &diag));

    mla_kv_pool_config config = MLA_KV_POOL_CONFIG_INIT;
    config.num_layers = 1;
    config.num_pages = 8;
    config.page_size = PAGE;
    config.format = MLA_FORMAT_BF16;
    config.kv_lora_rank = RANK;
    config.qk_rope_head_dim = ROPE;
    mla_kv_pool *pool;
    mla_page_allocator *allocator;
    mla_req_to_page *table;
    TRY(mla_kv_pool_create(ctx, &config, &pool, &diag));
    TRY(mla_page_allocator_create(config.num_pages, &allocator, &diag));
    TRY(mla_req_to_page_create(1, 2, &table, &diag));

    /* Pages for the request's tokens, and the slots that its rows go to. */
    mla_tensor req = mla_tensor_1d(&request, MLA_FORMAT_I32, 1);
    mla_tensor slot = mla_tensor_1d(slots, MLA_FORMAT_I32, LENGTH);
    mla_tensor none = mla_tensor_1d(NULL, 0, 0), old = mla_tensor_1d(&cached, MLA_FORMAT_I32, 1);
    none.rank = 0;
    mla_tensor len = mla_tensor_1d(&length, MLA_FORMAT_I32, 1);
    TRY(mla_req_to_page_reserve(table, allocator, &pool, 1, request, PAGE, 0, LENGTH, &diag));
    TRY(mla_positions_and_slots(mla_req_to_page_tensor(table), req, old, len, PAGE, none, slot,
                                none, &diag));
    for (int t = 0; t < LENGTH; t++)
        for (int i = 0; i < RANK; i++)
            rows[t][i] = (float)t / LENGTH;
    mla_call call = {0};
    TRY(mla_kv_pool_set_mla_kv_buffer(pool, 0, slot,
                                      mla_tensor_2d(rows, MLA_FORMAT_F32, LENGTH, RANK + ROPE),
                                      none, 1.0f, 0, &call, &diag));

    mla_decode_params decode = MLA_DECODE_PARAMS_INIT;
    decode.kv_lora_rank = RANK;
    decode.qk_rope_head_dim = ROPE;
    decode.softmax_scale = mla_softmax_scale(128, ROPE, 1.0f, 0.0f);
    decode.q = mla_tensor_4d(query, MLA_FORMAT_F32, 1, 1, HEADS, RANK + ROPE);
    TRY(mla_kv_pool_get_key_buffer(pool, 0, &decode.kv_cache, &diag));
    decode.page_table = mla_tensor_2d(pages, MLA_FORMAT_I32, 1, 2);
    TRY(mla_build_page_table(mla_req_to_page_tensor(table), req, decode.page_table, &diag));
    decode.cache_seqlens = len;
    decode.out = mla_tensor_4d(out, MLA_FORMAT_F32, 1, 1, HEADS, RANK);
    decode.lse = mla_tensor_3d(lse, MLA_FORMAT_F32, 1, 1, HEADS);

    /* Workspace for the largest problem; an engine allocates it once. */
    mla_problem problem = MLA_PROBLEM_INIT;
    TRY(mla_decode_problem(&decode, &problem, &diag));
    TRY(mla_workspace_bytes(ctx, &problem, NULL, &decode.call.workspace_bytes, &diag));
    decode.call.workspace = aligned_alloc(64, (decode.call.workspace_bytes / 64 + 1) * 64);
    TRY(mla_decode_with_kvcache(ctx, &decode, &diag));
    printf("mean of the latents %.4f, lse %.4f\n", out[0][0], lse[0]);

    free(decode.call.workspace);
    mla_req_to_page_destroy(table);
    mla_page_allocator_destroy(allocator);
    mla_kv_pool_destroy(pool);
    mla_context_destroy(ctx);
    return 0;
}
