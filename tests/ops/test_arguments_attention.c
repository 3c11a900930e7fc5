/*
 * Bad calls of the attention operators: decode, extend, prefill. See arguments.h. Also here: empty
 * batches, and rows without keys.
 */
#include "ops/arguments.h"

/* ---- decode ------------------------------------------------------------------------------------
 */

static void good_decode(mla_decode_params *p)
{
    const int32_t lengths[B] = {9, 3}, table[B * W] = {4, 2, 1, 3, -1, 2147480000};
    *p = (mla_decode_params)MLA_DECODE_PARAMS_INIT;
    p->kv_lora_rank = R;
    p->qk_rope_head_dim = P;
    p->softmax_scale = 0.25f;
    p->q = make(MLA_FORMAT_BF16, 4, B, Q, H, D);
    p->kv_cache = make(MLA_FORMAT_BF16, 3, PAGES, PS, D, 0);
    p->page_table = make(MLA_FORMAT_I32, 2, B, W, 0, 0);
    memcpy(p->page_table.data, table, sizeof table);
    p->cache_seqlens = make_i32(B, lengths);
    p->out = make(MLA_FORMAT_BF16, 4, B, Q, H, R);
    p->lse = make(MLA_FORMAT_F32, 3, B, Q, H, 0);
}

static void good_ragged(mla_decode_params *p)
{
    const int32_t cu[B + 1] = {0, 1, 4};
    good_decode(p);
    p->q = make(MLA_FORMAT_BF16, 3, 4, H, D, 0);
    p->cu_seqlens_q = make_i32(B + 1, cu);
    p->max_q_len = 3;
    p->out = make(MLA_FORMAT_F32, 3, 4, H, R, 0);
    p->lse = make(MLA_FORMAT_F32, 2, 4, H, 0, 0);
}

static void good_split(mla_decode_params *p)
{
    good_decode(p);
    p->q = make(MLA_FORMAT_BF16, 4, B, Q, H, R);
    p->q_rope = make(MLA_FORMAT_BF16, 4, B, Q, H, P);
    p->kv_cache = make(MLA_FORMAT_BF16, 3, PAGES, PS, R, 0);
    p->kv_cache_rope = make(MLA_FORMAT_BF16, 3, PAGES, PS, P, 0);
}

static void good_masked(mla_decode_params *p)
{
    good_decode(p);
    p->is_causal = 0;
    p->mask = make(MLA_FORMAT_U8, 2, B * Q, Q, 0, 0);
}

static void good_shard(mla_decode_params *p)
{
    const int32_t global[B] = {18, 6};
    good_decode(p);
    p->global_seqlens = make_i32(B, global);
    p->key_position_first = 1;
    p->key_position_stride = 2;
}

#define SPOIL(change, status, words)                                                               \
    SPOIL_CASE(mla_decode_params, mla_decode_with_kvcache, good, 1, change, status, words)
#define SPOIL_LIVE(change, status, words)                                                          \
    SPOIL_CASE(mla_decode_params, mla_decode_with_kvcache, good, 0, change, status, words)
#define problem_function mla_decode_problem

static void test_decode(void **state)
{
    void (*good)(mla_decode_params *) = good_decode;
    (void)state;
    IN_EVERY_OPERATOR(mla_decode_params, mla_decode_with_kvcache, good);
    SPOIL_TENSOR(q);
    SPOIL_STRIDES(q);
    SPOIL_TENSOR(kv_cache);
    SPOIL_STRIDES(kv_cache);
    SPOIL_TENSOR(page_table);
    SPOIL_STRIDES(page_table);
    SPOIL_TENSOR(cache_seqlens);
    SPOIL_TENSOR(out);
    SPOIL_STRIDES(out);
    SPOIL_OTHER(lse);
    SPOIL_STRIDES(lse);
    SPOIL(p->softmax_scale = 0.0f, MLA_ERROR_ARGUMENT, "softmax_scale");
    SPOIL(p->softmax_scale = NAN, MLA_ERROR_ARGUMENT, "softmax_scale");
    SPOIL(p->softmax_scale = INFINITY, MLA_ERROR_ARGUMENT, "softmax_scale");
    SPOIL(p->logit_cap = -1.0f, MLA_ERROR_ARGUMENT, "logit_cap");
    SPOIL(p->logit_cap = NAN, MLA_ERROR_ARGUMENT, "logit_cap");
    SPOIL(p->logit_cap = INFINITY, MLA_ERROR_ARGUMENT, "logit_cap");
    SPOIL(p->k_scale = 0.0f, MLA_ERROR_ARGUMENT, "k_scale");
    SPOIL(p->k_scale = NAN, MLA_ERROR_ARGUMENT, "k_scale");
    SPOIL(p->k_scale = 2.0f, MLA_ERROR_ARGUMENT, "k_scale");
    SPOIL(p->is_causal = 2, MLA_ERROR_ARGUMENT, "is_causal");
    SPOIL(p->reserved0 = 1, MLA_ERROR_ARGUMENT, "reserved0");
    SPOIL(p->kv_lora_rank = 0, MLA_ERROR_SHAPE, "kv_lora_rank");
    SPOIL(p->kv_lora_rank = R + 1, MLA_ERROR_SHAPE, "kv_lora_rank");
    SPOIL(p->qk_rope_head_dim = -1, MLA_ERROR_SHAPE, "qk_rope_head_dim");
    SPOIL(p->max_q_len = -1, MLA_ERROR_ARGUMENT, "max_q_len");
    SPOIL(p->max_seqlen_kv = -1, MLA_ERROR_ARGUMENT, "max_seqlen_kv");
    SPOIL(p->key_position_stride = 0, MLA_ERROR_ARGUMENT, "key_position_stride");
    SPOIL(p->key_position_first = 3, MLA_ERROR_ARGUMENT, "global_seqlens");
    SPOIL(p->q.shape[2] = 0, MLA_ERROR_SHAPE, "head count of q");
    SPOIL(p->q.shape[3]--, MLA_ERROR_SHAPE, "q has shape");
    SPOIL(p->q = mla_tensor_slice(p->q, 0, 0, 1), MLA_ERROR_SHAPE, "page_table");
    SPOIL(p->kv_cache.shape[2]--, MLA_ERROR_SHAPE, "kv_cache");
    SPOIL(p->kv_cache.shape[1] = 0, MLA_ERROR_SHAPE, "page_size");
    SPOIL(p->kv_cache = make(MLA_FORMAT_BF16, 4, PAGES, PS, 2, D), MLA_ERROR_SHAPE, "kv_cache");
    SPOIL(p->kv_cache.format = MLA_FORMAT_DS656, MLA_ERROR_SHAPE, "ds656");
    SPOIL(p->page_table.format = MLA_FORMAT_I64, MLA_ERROR_FORMAT, "page_table");
    SPOIL(p->cache_seqlens.shape[0] = 1, MLA_ERROR_SHAPE, "cache_seqlens");
    SPOIL(p->cu_seqlens_q = p->cache_seqlens, MLA_ERROR_SHAPE, "cu_seqlens_q");
    SPOIL(p->out.shape[3]++, MLA_ERROR_SHAPE, "out");
    SPOIL(p->out.format = MLA_FORMAT_E4M3, MLA_ERROR_FORMAT, "out");
    SPOIL(p->out.stride[2] = 0, MLA_ERROR_STRIDE, "out");
    SPOIL(p->lse.shape[2]++, MLA_ERROR_SHAPE, "lse");
    SPOIL(p->lse.format = MLA_FORMAT_BF16, MLA_ERROR_FORMAT, "lse");
    SPOIL(p->mask = make(MLA_FORMAT_U8, 2, B * Q, Q, 0, 0), MLA_ERROR_ARGUMENT, "mask");
    SPOIL_LIVE(p->out.data = p->q.data, MLA_ERROR_ARGUMENT, "out");
    SPOIL_LIVE(p->out.data = p->kv_cache.data, MLA_ERROR_ARGUMENT, "out");
    SPOIL_LIVE(p->lse.data = p->out.data, MLA_ERROR_ARGUMENT, "lse");
}

static void test_decode_live(void **state)
{
    void (*good)(mla_decode_params *) = good_decode;
    (void)state;
    SPOIL_LIVE(I32(cache_seqlens, 0) = W * PS + 1, MLA_ERROR_CAPACITY, "cache_seqlens[0]");
    SPOIL_LIVE(I32(cache_seqlens, 1) = -1, MLA_ERROR_ARGUMENT, "cache_seqlens[1]");
    SPOIL_LIVE(p->max_seqlen_kv = 8, MLA_ERROR_CAPACITY, "max_seqlen_kv");
    SPOIL_LIVE(I32(page_table, 2) = PAGES, MLA_ERROR_CAPACITY, "page_table[0, 2]");
    SPOIL_LIVE(I32(page_table, 0) = -1, MLA_ERROR_CAPACITY, "page_table[0, 0]");
    SPOIL_LIVE(I32(cache_seqlens, 1) = 5, MLA_ERROR_CAPACITY, "page_table[1, 1]");
    /* A draft's last token sees q_len - 1 rows past the length: those must fit too. */
    SPOIL_LIVE((p->seqlen_offset = 0, I32(cache_seqlens, 0) = W * PS - 1), MLA_ERROR_CAPACITY,
               "cache_seqlens[0]");
    SPOIL_LIVE((p->seqlen_offset = 0, I32(cache_seqlens, 1) = 3), MLA_ERROR_CAPACITY,
               "page_table[1, 1]");
    SPOIL_LIVE(p->kv_cache.shape[0] = 0, MLA_ERROR_CAPACITY, "page_table[0, 0]");
    good = good_shard;
    SPOIL_LIVE(I32(global_seqlens, 1) = -4, MLA_ERROR_ARGUMENT, "global_seqlens[1]");
}

static void test_decode_variants(void **state)
{
    void (*good)(mla_decode_params *) = good_ragged;
    (void)state;
    IN_EVERY_OPERATOR(mla_decode_params, mla_decode_with_kvcache, good);
    SPOIL_OTHER(cu_seqlens_q);
    SPOIL(p->cu_seqlens_q = (mla_tensor){0}, MLA_ERROR_SHAPE, "cu_seqlens_q");
    SPOIL(p->cu_seqlens_q.shape[0] = 0, MLA_ERROR_SHAPE, "cu_seqlens_q");
    SPOIL(p->cu_seqlens_q.shape[0] = 2, MLA_ERROR_SHAPE, "page_table");
    SPOIL_LIVE(p->max_q_len = 2, MLA_ERROR_CAPACITY, "max_q_len");
    SPOIL_LIVE(I32(cu_seqlens_q, 0) = 1, MLA_ERROR_CAPACITY, "cu_seqlens_q");
    SPOIL_LIVE(I32(cu_seqlens_q, 1) = 5, MLA_ERROR_CAPACITY, "cu_seqlens_q");
    SPOIL_LIVE(I32(cu_seqlens_q, 2) = 3, MLA_ERROR_CAPACITY, "cu_seqlens_q");

    good = good_split;
    IN_EVERY_OPERATOR(mla_decode_params, mla_decode_with_kvcache, good);
    SPOIL_OTHER(q_rope);
    SPOIL_OTHER(kv_cache_rope);
    SPOIL(p->q_rope.format = MLA_FORMAT_F32, MLA_ERROR_FORMAT, "q_rope");
    SPOIL(p->q_rope.shape[3]--, MLA_ERROR_SHAPE, "q_rope");
    SPOIL(p->q_rope.shape[2]--, MLA_ERROR_SHAPE, "q_rope");
    SPOIL(p->kv_cache_rope.format = MLA_FORMAT_F16, MLA_ERROR_FORMAT, "kv_cache_rope");
    SPOIL(p->kv_cache_rope.shape[0]--, MLA_ERROR_SHAPE, "kv_cache_rope");
    SPOIL(p->kv_cache_rope.shape[1]--, MLA_ERROR_SHAPE, "kv_cache_rope");
    SPOIL(p->kv_cache_rope.shape[2]--, MLA_ERROR_SHAPE, "kv_cache_rope");
    SPOIL(p->q_rope = (mla_tensor){0}, MLA_ERROR_SHAPE, "q has shape");

    good = good_masked;
    IN_EVERY_OPERATOR(mla_decode_params, mla_decode_with_kvcache, good);
    SPOIL_OTHER(mask);
    SPOIL(p->is_causal = 1, MLA_ERROR_ARGUMENT, "mask");
    SPOIL(p->mask.shape[0]--, MLA_ERROR_SHAPE, "mask");
    SPOIL(p->mask.shape[1]--, MLA_ERROR_SHAPE, "mask");

    good = good_shard;
    IN_EVERY_OPERATOR(mla_decode_params, mla_decode_with_kvcache, good);
    SPOIL_OTHER(global_seqlens);
    SPOIL(p->global_seqlens.shape[0]--, MLA_ERROR_SHAPE, "global_seqlens");
    SPOIL(p->key_position_first = -1, MLA_ERROR_ARGUMENT, "key_position_first");
}

/* Extents and strides whose products leave 64 bits are refused, not computed with. */
static void test_decode_overflow(void **state)
{
    void (*good)(mla_decode_params *) = good_decode;
    const int64_t huge = INT64_C(1) << 40;
    (void)state;
    SPOIL(p->q.stride[0] = INT64_MAX, MLA_ERROR_STRIDE, "q");
    SPOIL(p->kv_cache.stride[0] = INT64_MAX / 2, MLA_ERROR_STRIDE, "kv_cache");
    SPOIL((p->q.shape[0] = p->q.shape[1] = huge, p->q.stride[0] = p->q.stride[1] = 0),
          MLA_ERROR_SHAPE, "q");
    SPOIL((p->page_table.shape[1] = INT64_MAX / 2, p->page_table.stride[0] = 0), MLA_ERROR_STRIDE,
          "page_table");
    SPOIL((p->kv_cache.shape[0] = p->kv_cache.shape[1] = huge,
           p->kv_cache.stride[0] = p->kv_cache.stride[1] = 0),
          MLA_ERROR_SHAPE, "kv_cache");
}
#undef SPOIL
#undef SPOIL_LIVE
#undef problem_function

/* ---- extend ------------------------------------------------------------------------------------
 */

#define SPOIL(change, status, words)                                                               \
    SPOIL_CASE(mla_decode_params, mla_extend_with_kvcache, good_ragged, 1, change, status, words)
#define SPOIL_LIVE(change, status, words)                                                          \
    SPOIL_CASE(mla_decode_params, mla_extend_with_kvcache, good_ragged, 0, change, status, words)
#define problem_function mla_extend_problem

static void test_extend(void **state)
{
    (void)state;
    IN_EVERY_OPERATOR(mla_decode_params, mla_extend_with_kvcache, good_ragged);
    SPOIL(p->cu_seqlens_q = (mla_tensor){0}, MLA_ERROR_ARGUMENT, "cu_seqlens_q");
    SPOIL(p->is_causal = 0, MLA_ERROR_ARGUMENT, "is_causal");
    SPOIL(p->seqlen_offset = 0, MLA_ERROR_ARGUMENT, "seqlen_offset");
    SPOIL(p->mask = make(MLA_FORMAT_U8, 2, 4, 3, 0, 0), MLA_ERROR_ARGUMENT, "mask");
    SPOIL_LIVE(I32(cu_seqlens_q, 2) = 3, MLA_ERROR_CAPACITY, "cu_seqlens_q");
    SPOIL_LIVE(I32(cache_seqlens, 0) = W * PS + 1, MLA_ERROR_CAPACITY, "cache_seqlens[0]");
}
#undef SPOIL
#undef SPOIL_LIVE
#undef problem_function

/* ---- prefill -----------------------------------------------------------------------------------
 */

static void good_prefill(mla_prefill_params *p)
{
    const int32_t cu_q[3] = {0, 2, 5}, cu_kv[3] = {0, 4, 7};
    *p = (mla_prefill_params)MLA_PREFILL_PARAMS_INIT;
    p->softmax_scale = 0.5f;
    p->q = make(MLA_FORMAT_BF16, 3, 5, 4, 12, 0);
    p->k = make(MLA_FORMAT_BF16, 3, 7, 2, 12, 0);
    p->v = make(MLA_FORMAT_BF16, 3, 7, 2, 8, 0);
    p->cu_seqlens_q = make_i32(3, cu_q);
    p->cu_seqlens_kv = make_i32(3, cu_kv);
    p->out = make(MLA_FORMAT_BF16, 3, 5, 4, 8, 0);
    p->lse = make(MLA_FORMAT_F32, 2, 5, 4, 0, 0);
}

#define SPOIL(change, status, words)                                                               \
    SPOIL_CASE(mla_prefill_params, mla_prefill, good_prefill, 1, change, status, words)
#define SPOIL_LIVE(change, status, words)                                                          \
    SPOIL_CASE(mla_prefill_params, mla_prefill, good_prefill, 0, change, status, words)
#define problem_function mla_prefill_problem

static void test_prefill(void **state)
{
    (void)state;
    IN_EVERY_OPERATOR(mla_prefill_params, mla_prefill, good_prefill);
    SPOIL_TENSOR(q);
    SPOIL_STRIDES(q);
    SPOIL_TENSOR(k);
    SPOIL_STRIDES(k);
    SPOIL_TENSOR(v);
    SPOIL_STRIDES(v);
    SPOIL_TENSOR(cu_seqlens_q);
    SPOIL_TENSOR(cu_seqlens_kv);
    SPOIL_TENSOR(out);
    SPOIL_STRIDES(out);
    SPOIL_OTHER(lse);
    SPOIL(p->softmax_scale = 0.0f, MLA_ERROR_ARGUMENT, "softmax_scale");
    SPOIL(p->logit_cap = -2.0f, MLA_ERROR_ARGUMENT, "logit_cap");
    SPOIL(p->is_causal = -1, MLA_ERROR_ARGUMENT, "is_causal");
    SPOIL(p->k_scale = 0.5f, MLA_ERROR_ARGUMENT, "k_scale");
    SPOIL(p->v_scale = 0.5f, MLA_ERROR_ARGUMENT, "v_scale");
    SPOIL(p->max_seqlen_q = -1, MLA_ERROR_ARGUMENT, "max_seqlen_q");
    SPOIL(p->max_seqlen_kv = -1, MLA_ERROR_ARGUMENT, "max_seqlen_kv");
    SPOIL(p->k.shape[2]--, MLA_ERROR_SHAPE, "k has shape");
    SPOIL(p->v.shape[0]--, MLA_ERROR_SHAPE, "v has shape");
    SPOIL(p->v.shape[1]--, MLA_ERROR_SHAPE, "v has shape");
    SPOIL(p->v.format = MLA_FORMAT_F16, MLA_ERROR_FORMAT, "v is");
    SPOIL(p->q.shape[1] = 3, MLA_ERROR_SHAPE, "k has 2 heads");
    SPOIL(p->cu_seqlens_kv.shape[0] = 2, MLA_ERROR_SHAPE, "cu_seqlens_kv");
    SPOIL(p->cu_seqlens_q.shape[0] = 0, MLA_ERROR_SHAPE, "cu_seqlens_q");
    SPOIL(p->out.shape[0]--, MLA_ERROR_SHAPE, "out");
    SPOIL(p->lse.shape[1]--, MLA_ERROR_SHAPE, "lse");
    SPOIL(p->out.format = MLA_FORMAT_E5M2, MLA_ERROR_FORMAT, "out");
    SPOIL_LIVE(p->out.data = p->v.data, MLA_ERROR_ARGUMENT, "out");
    SPOIL_LIVE(I32(cu_seqlens_q, 0) = -1, MLA_ERROR_CAPACITY, "cu_seqlens_q");
    SPOIL_LIVE(I32(cu_seqlens_q, 1) = 6, MLA_ERROR_CAPACITY, "cu_seqlens_q");
    SPOIL_LIVE(I32(cu_seqlens_q, 2) = 6, MLA_ERROR_CAPACITY, "cu_seqlens_q");
    SPOIL_LIVE(I32(cu_seqlens_kv, 2) = 6, MLA_ERROR_CAPACITY, "cu_seqlens_kv");
    SPOIL_LIVE(p->max_seqlen_q = 2, MLA_ERROR_CAPACITY, "max_seqlen_q");
    SPOIL_LIVE(p->max_seqlen_kv = 3, MLA_ERROR_CAPACITY, "max_seqlen_kv");
}
#undef SPOIL
#undef SPOIL_LIVE
#undef problem_function

/* ---- what is legal though it looks odd ---------------------------------------------------------
 */

static void test_empty(void **state)
{
    mla_decode_params decode;
    mla_prefill_params prefill;
    (void)state;
    fresh();
    good_decode(&decode);
    decode.q.shape[0] = decode.page_table.shape[0] = decode.cache_seqlens.shape[0] = 0;
    decode.out.shape[0] = decode.lse.shape[0] = 0;
    decode.q.data = decode.out.data = decode.lse.data = NULL;
    memcpy(before, arena, sizeof arena);
    assert_ok(mla_decode_with_kvcache(ctx, &decode, &diag), &diag);
    good_prefill(&prefill);
    memset(prefill.cu_seqlens_q.data, 0, 3 * sizeof(int32_t));
    memset(prefill.cu_seqlens_kv.data, 0, 3 * sizeof(int32_t));
    prefill.q.shape[0] = prefill.k.shape[0] = prefill.v.shape[0] = 0;
    prefill.out.shape[0] = prefill.lse.shape[0] = 0;
    memcpy(before, arena, sizeof arena);
    assert_ok(mla_prefill(ctx, &prefill, &diag), &diag);
    assert_memory_equal(before, arena, sizeof arena);
}

/* Rows that see nothing get the empty state: with no live key, no page and no table column. */
static void test_no_keys(void **state)
{
    mla_decode_params p;
    mla_problem problem = MLA_PROBLEM_INIT;
    (void)state;
    fresh();
    good_decode(&p);
    memset(p.out.data, 0xff, B * Q * H * R * 2);
    memset(p.cache_seqlens.data, 0, B * sizeof(int32_t));
    p.page_table.shape[1] = 0;
    p.page_table.data = NULL;
    p.kv_cache.shape[0] = 0;
    assert_ok(mla_decode_problem(&p, &problem, &diag), &diag);
    assert_int_equal(problem.max_kv_len, 0);
    void *workspace = workspace_for(&problem, &p.call.workspace_bytes);
    p.call.workspace = workspace;
    assert_ok(mla_decode_with_kvcache(ctx, &p, &diag), &diag);
    free(workspace);
    for (int32_t i = 0; i < B * Q * H * R; i++)
        assert_int_equal(((uint16_t *)p.out.data)[i], 0);
    for (int32_t i = 0; i < B * Q * H; i++)
        assert_true(((float *)p.lse.data)[i] == -INFINITY);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decode),          cmocka_unit_test(test_decode_live),
        cmocka_unit_test(test_decode_variants), cmocka_unit_test(test_decode_overflow),
        cmocka_unit_test(test_extend),          cmocka_unit_test(test_prefill),
        cmocka_unit_test(test_empty),           cmocka_unit_test(test_no_keys),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
