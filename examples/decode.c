/* One decode step over a paged cache in the program's own memory. The query is zero, so every row
 * weighs the same and the output is the mean of the cached latents. */
#include <mla/mla.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 16, RANK = 512, ROPE = 64, PAGE = 64, LENGTH = 100 };
static float cache[4][PAGE][RANK + ROPE], query[HEADS][RANK + ROPE], out[HEADS][RANK];
static int32_t pages[] = {3, 1}, length = LENGTH;

int main(void)
{
    mla_context *ctx = NULL;
    mla_diag diag = {{0}};
    mla_problem problem = MLA_PROBLEM_INIT;
    mla_decode_params decode = MLA_DECODE_PARAMS_INIT;
    for (int t = 0; t < LENGTH; t++)
        cache[pages[t / PAGE]][t % PAGE][0] = (float)t;
    decode.kv_lora_rank = RANK;
    decode.qk_rope_head_dim = ROPE;
    decode.softmax_scale = mla_softmax_scale(128, ROPE, 1.0f, 0.0f);
    decode.q = mla_tensor_4d(query, MLA_FORMAT_F32, 1, 1, HEADS, RANK + ROPE);
    decode.kv_cache = mla_tensor_3d(cache, MLA_FORMAT_F32, 4, PAGE, RANK + ROPE);
    decode.page_table = mla_tensor_2d(pages, MLA_FORMAT_I32, 1, 2);
    decode.cache_seqlens = mla_tensor_1d(&length, MLA_FORMAT_I32, 1);
    decode.out = mla_tensor_4d(out, MLA_FORMAT_F32, 1, 1, HEADS, RANK);
    mla_status status = mla_context_create(NULL, &ctx, &diag);
    if (status == MLA_OK)
        status = mla_decode_problem(&decode, &problem, &diag);
    if (status == MLA_OK)
        status = mla_workspace_bytes(ctx, &problem, NULL, &decode.call.workspace_bytes, &diag);
    decode.call.workspace = aligned_alloc(64, (decode.call.workspace_bytes / 64 + 1) * 64);
    if (status == MLA_OK)
        status = mla_decode_with_kvcache(ctx, &decode, &diag);
    printf("%s, mean of column 0: %.2f\n", status == MLA_OK ? "ok" : diag.text, out[0][0]);
    free(decode.call.workspace);
    mla_context_destroy(ctx);
    return status != MLA_OK;
}
