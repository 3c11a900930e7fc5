/*
 * One decode step over a paged latent cache, without the backend: a pool, rows written to the pages
 * of a request, attention. The query is zero, so every row weighs the same: the output is the mean
 * of the latents and the LSE the logarithm of their number.
 */
#include <mla/mla.h>
#include <stdio.h>
#include <stdlib.h>

#define TRY(call)                                                                                  \
    if ((call) != MLA_OK)                                                                          \
    return fprintf(stderr, "%s\n", diag.text), 1

enum { HEADS = 16, RANK = 512, ROPE = 64, PAGE = 64, LENGTH = 100 };

static float rows[LENGTH][RANK + ROPE], query[HEADS][RANK + ROPE], out[HEADS][RANK], lse[HEADS];
static int32_t pages[] = {3, 1}, slots[LENGTH], length = LENGTH;

int main(void)
{
    mla_diag diag = {{0}};
    mla_context *ctx;
    mla_kv_pool *pool;
    mla_tensor cache, none = {0};
    mla_kv_pool_config config = MLA_KV_POOL_CONFIG_INIT;
    config.num_layers = 1;
    config.num_pages = 8;
    config.page_size = PAGE;
    config.format = MLA_FORMAT_BF16;
    config.kv_lora_rank = RANK;
    config.qk_rope_head_dim = ROPE;
    TRY(mla_context_create(NULL, &ctx, &diag));
    TRY(mla_kv_pool_create(ctx, &config, &pool, &diag));
    TRY(mla_kv_pool_get_key_buffer(pool, 0, &cache, &diag));

    for (int t = 0; t < LENGTH; t++) {
        slots[t] = pages[t / PAGE] * PAGE + t % PAGE;
        for (int i = 0; i < RANK; i++)
            rows[t][i] = (float)t / LENGTH;
    }
    mla_tensor new_rows = mla_tensor_2d(rows, MLA_FORMAT_F32, LENGTH, RANK + ROPE);
    mla_tensor new_slots = mla_tensor_1d(slots, MLA_FORMAT_I32, LENGTH);
    TRY(mla_kv_pool_set_mla_kv_buffer(pool, 0, new_slots, new_rows, none, 1.0f, 0, NULL, &diag));

    mla_decode_params decode = MLA_DECODE_PARAMS_INIT;
    decode.kv_lora_rank = RANK;
    decode.qk_rope_head_dim = ROPE;
    decode.softmax_scale = mla_softmax_scale(128, ROPE, 1.0f, 0.0f);
    decode.q = mla_tensor_4d(query, MLA_FORMAT_F32, 1, 1, HEADS, RANK + ROPE);
    decode.kv_cache = cache;
    decode.page_table = mla_tensor_2d(pages, MLA_FORMAT_I32, 1, 2);
    decode.cache_seqlens = mla_tensor_1d(&length, MLA_FORMAT_I32, 1);
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
    mla_kv_pool_destroy(pool);
    mla_context_destroy(ctx);
    return 0;
}
