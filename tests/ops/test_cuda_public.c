/*
 * What the public API says of CUDA calls without a GPU: the layout bits that a problem gets from
 * strides and bases, and the sentence of an error word.
 */
#include "test.h"

#include <mla/mla.h>
#include <string.h>

enum { B = 3, Q = 2, H = 5, R = 512, P = 64, D = R + P, PS = 16, PAGES = 7, W = 4 };

static _Alignas(64) char q_memory[2 * D], rope_memory[64], kv_memory[64], out_memory[64];

static mla_tensor tensor(void *data, int32_t format, int32_t rank, const int64_t *shape)
{
    mla_tensor t = mla_tensor_make(data, format, rank, shape);
    t.device_type = MLA_DEVICE_CUDA;
    return t;
}

/* Pointers are never followed: a problem is made from shapes, formats, strides and addresses. */
static mla_decode_params plain_decode(void)
{
    mla_decode_params p = MLA_DECODE_PARAMS_INIT;
    p.kv_lora_rank = R;
    p.qk_rope_head_dim = P;
    p.softmax_scale = 0.1f;
    p.q = tensor(q_memory, MLA_FORMAT_BF16, 4, (int64_t[]){B, Q, H, D});
    p.kv_cache = tensor(kv_memory, MLA_FORMAT_BF16, 3, (int64_t[]){PAGES, PS, D});
    p.page_table = tensor(out_memory, MLA_FORMAT_I32, 2, (int64_t[]){B, W});
    p.cache_seqlens = tensor(out_memory, MLA_FORMAT_I32, 1, (int64_t[]){B});
    p.out = tensor(out_memory, MLA_FORMAT_BF16, 4, (int64_t[]){B, Q, H, R});
    p.lse = tensor(rope_memory, MLA_FORMAT_F32, 3, (int64_t[]){B, Q, H});
    return p;
}

static void expect_layout(const mla_decode_params *p, int32_t layout)
{
    mla_problem problem = MLA_PROBLEM_INIT;
    mla_diag diag = {{0}};
    if (mla_decode_problem(p, &problem, &diag) != MLA_OK)
        fail_msg("%s", diag.text);
    assert_int_equal(problem.layout, layout);
}

static void scale_strides(mla_tensor *t, int64_t row)
{
    int64_t stride = row;
    for (int32_t i = t->rank - 2; i >= 0; i--) {
        t->stride[i] = stride;
        stride *= t->shape[i];
    }
}

static void test_aligned(void **state)
{
    (void)state;
    mla_decode_params p = plain_decode();
    expect_layout(&p, 0);
    scale_strides(&p.q, D + 8); /* 16 bytes more */
    scale_strides(&p.kv_cache, D + 64);
    expect_layout(&p, 0);
    p.q.stride[0] = 7; /* 14 bytes; of one request there is no next */
    p.q.shape[0] = p.out.shape[0] = p.lse.shape[0] = 1;
    p.page_table.shape[0] = p.cache_seqlens.shape[0] = 1;
    expect_layout(&p, 0);
}

static void test_unaligned(void **state)
{
    (void)state;
    mla_decode_params p = plain_decode();
    scale_strides(&p.q, D + 4);
    expect_layout(&p, MLA_LAYOUT_UNALIGNED);
    p = plain_decode();
    p.kv_cache.data = kv_memory + 8;
    expect_layout(&p, MLA_LAYOUT_UNALIGNED);
    p = plain_decode();
    scale_strides(&p.out, R + 1);
    expect_layout(&p, MLA_LAYOUT_UNALIGNED);
    p = plain_decode();
    p.kv_cache.stride[0] = INT64_C(1) << 39; /* elements of two bytes */
    expect_layout(&p, MLA_LAYOUT_UNALIGNED);
    p = plain_decode();
    p.q.stride[2] = 0; /* all heads the same row: legal to read, not for the copy engine */
    expect_layout(&p, MLA_LAYOUT_UNALIGNED);
}

static void test_split_query(void **state)
{
    (void)state;
    mla_decode_params p = plain_decode();
    p.q.shape[3] = R;
    p.q_rope = p.q;
    p.q_rope.shape[3] = P;
    p.q_rope.data = q_memory + 2 * R; /* behind q in the same rows */
    expect_layout(&p, 0);
    p.q_rope.stride[2] = D + 8;
    expect_layout(&p, MLA_LAYOUT_SPLIT_QUERY);
    p.q_rope.stride[2] = D;
    p.q_rope.data = rope_memory;
    expect_layout(&p, MLA_LAYOUT_SPLIT_QUERY);
}

static void test_gapped_batch(void **state)
{
    (void)state;
    mla_decode_params p = plain_decode();
    p.out.stride[0] += p.out.stride[1];
    expect_layout(&p, MLA_LAYOUT_GAPPED_BATCH);
    p = plain_decode();
    p.lse.stride[0] += 1;
    expect_layout(&p, MLA_LAYOUT_GAPPED_BATCH);
    /* one token a request: its stride is the request's */
    p.q.shape[1] = p.out.shape[1] = p.lse.shape[1] = 1;
    expect_layout(&p, 0);
}

static void test_prefill(void **state)
{
    (void)state;
    enum { T = 9, L = 192, V = 128 };
    mla_prefill_params p = MLA_PREFILL_PARAMS_INIT;
    p.softmax_scale = 0.1f;
    p.q = tensor(q_memory, MLA_FORMAT_F16, 3, (int64_t[]){T, H, L});
    p.k = tensor(kv_memory, MLA_FORMAT_F16, 3, (int64_t[]){T, H, L});
    p.v = tensor(rope_memory, MLA_FORMAT_F16, 3, (int64_t[]){T, H, V});
    p.cu_seqlens_q = tensor(out_memory, MLA_FORMAT_I32, 1, (int64_t[]){B + 1});
    p.cu_seqlens_kv = p.cu_seqlens_q;
    p.out = tensor(out_memory, MLA_FORMAT_F16, 3, (int64_t[]){T, H, V});
    mla_problem problem = MLA_PROBLEM_INIT;
    assert_int_equal(mla_prefill_problem(&p, &problem, NULL), MLA_OK);
    assert_int_equal(problem.layout, 0);
    p.v.stride[1] = V + 4;
    assert_int_equal(mla_prefill_problem(&p, &problem, NULL), MLA_OK);
    assert_int_equal(problem.layout, MLA_LAYOUT_UNALIGNED);
}

static void test_error_word(void **state)
{
    (void)state;
    mla_diag diag = {{0}};
    mla_device_error error = {0};
    assert_int_equal(mla_device_error_status(&error, &diag), MLA_OK);
    assert_int_equal(diag.text[0], 0);
    assert_int_equal(mla_device_error_status(NULL, &diag), MLA_ERROR_ARGUMENT);
    error = (mla_device_error){MLA_ERROR_CAPACITY, MLA_LIVE_PAGE_TABLE, 2, 5, 2147480000};
    assert_int_equal(mla_device_error_status(&error, &diag), MLA_ERROR_CAPACITY);
    assert_non_null(strstr(diag.text, "page_table[2, 5] was 2147480000"));
#define ENTRY(constant, number, argument)                                                          \
    error = (mla_device_error){MLA_ERROR_ARGUMENT, constant, 3, 0, -4};                            \
    assert_int_equal(mla_device_error_status(&error, &diag), MLA_ERROR_ARGUMENT);                  \
    assert_non_null(strstr(diag.text, argument "[3"));                                             \
    assert_non_null(strstr(diag.text, "was -4"));
    MLA_LIVE_LIST(ENTRY)
#undef ENTRY
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_aligned),     cmocka_unit_test(test_unaligned),
        cmocka_unit_test(test_split_query), cmocka_unit_test(test_gapped_batch),
        cmocka_unit_test(test_prefill),     cmocka_unit_test(test_error_word),
    };
    return cmocka_run_group_tests_name("cuda_public", tests, NULL, NULL);
}
