/*
 * Configuration and registry: every field is checked and named, defaults are filled in, DeepSeek's
 * softmax scale, backends by name.
 */
#include "group_context.h"
#include <math.h>
#include <mla/backend.h>

static mla_config good_config(void)
{
    mla_config c = MLA_CONFIG_INIT;
    c.num_attention_heads = 16;
    c.attn_tp_size = 4;
    c.kv_lora_rank = 32;
    c.qk_nope_head_dim = 16;
    c.qk_rope_head_dim = 8;
    c.v_head_dim = 16;
    c.context_len = 1000;
    c.q_format = MLA_FORMAT_BF16;
    c.kv_format = MLA_FORMAT_BF16;
    c.softmax_scale = 0.2f;
    c.max_bs = 4;
    c.speculative_num_draft_tokens = 3;
    return c;
}

static void test_defaults(void **state)
{
    (void)state;
    mla_config c = good_config();
    char name[] = "c";
    c.solution = name;
    mla_backend *b = NULL;
    assert_ok(mla_backend_create(ctx, &c, &b, &diag), &diag);
    name[0] = 'x'; /* copied */
    const mla_config *full = mla_backend_get_config(b);
    assert_int_equal(full->max_tokens, 12);
    assert_int_equal(full->chunk_capacity, 32768);
    assert_string_equal(full->solution, "c");
    assert_ok(mla_backend_set_solution(b, NULL, &diag), &diag);
    assert_null(mla_backend_get_config(b)->solution);
    assert_fails(mla_backend_set_solution(b, "nosuch", &diag), MLA_ERROR_NOT_FOUND, &diag,
                 "nosuch");
    assert_null(mla_backend_get_config(b)->solution);
    mla_backend_destroy(b);
    mla_backend_destroy(NULL);
}

static void test_every_field(void **state)
{
    (void)state;
    mla_backend *b = NULL;
#define REFUSED(field, value, status, words)                                                       \
    do {                                                                                           \
        mla_config c = good_config();                                                              \
        c.field = value;                                                                           \
        assert_fails(mla_backend_create(ctx, &c, &b, &diag), status, &diag, words);                \
        assert_null(b);                                                                            \
    } while (0)
    REFUSED(device_type, MLA_DEVICE_CUDA, MLA_ERROR_DEVICE, "no device 0 of type 2");
    REFUSED(device_type, 0, MLA_ERROR_ARGUMENT, "config.device_type");
    REFUSED(device_index, 1, MLA_ERROR_DEVICE, "no device 1 of type 1");
    REFUSED(num_attention_heads, 0, MLA_ERROR_ARGUMENT, "config.num_attention_heads");
    REFUSED(attn_tp_size, 0, MLA_ERROR_ARGUMENT, "config.attn_tp_size");
    REFUSED(attn_tp_size, 3, MLA_ERROR_ARGUMENT, "does not divide num_attention_heads 16");
    REFUSED(kv_lora_rank, 0, MLA_ERROR_ARGUMENT, "config.kv_lora_rank");
    REFUSED(qk_nope_head_dim, 0, MLA_ERROR_ARGUMENT, "config.qk_nope_head_dim");
    REFUSED(qk_rope_head_dim, -1, MLA_ERROR_ARGUMENT, "config.qk_rope_head_dim");
    REFUSED(v_head_dim, 0, MLA_ERROR_ARGUMENT, "config.v_head_dim");
    REFUSED(page_size, 0, MLA_ERROR_ARGUMENT, "config.page_size");
    REFUSED(context_len, 0, MLA_ERROR_ARGUMENT, "config.context_len");
    REFUSED(context_len, INT64_C(1) << 31, MLA_ERROR_ARGUMENT, "config.context_len");
    REFUSED(q_format, MLA_FORMAT_E4M3, MLA_ERROR_FORMAT, "config.q_format is e4m3");
    REFUSED(q_format, 0, MLA_ERROR_FORMAT, "config.q_format is none");
    REFUSED(kv_format, MLA_FORMAT_I32, MLA_ERROR_FORMAT, "config.kv_format is i32");
    REFUSED(kv_format, MLA_FORMAT_DS656, MLA_ERROR_FORMAT, "512");
    REFUSED(softmax_scale, 0.0f, MLA_ERROR_ARGUMENT, "config.softmax_scale");
    REFUSED(softmax_scale, (float)INFINITY, MLA_ERROR_ARGUMENT, "config.softmax_scale");
    REFUSED(softmax_scale, (float)NAN, MLA_ERROR_ARGUMENT, "config.softmax_scale");
    REFUSED(is_draft, 2, MLA_ERROR_ARGUMENT, "config.is_draft");
    REFUSED(speculative_num_draft_tokens, 0, MLA_ERROR_ARGUMENT,
            "config.speculative_num_draft_tokens");
    REFUSED(decode_query, 2, MLA_ERROR_ARGUMENT, "config.decode_query");
    REFUSED(decode_query, MLA_DECODE_QUERY_CAST, MLA_ERROR_ARGUMENT, "config.decode_query is cast");
    REFUSED(kv_cache_quant_method, MLA_QUANT_PER_TOKEN_HEAD, MLA_ERROR_UNSUPPORTED,
            "per_token_head");
    REFUSED(kv_cache_quant_method, 5, MLA_ERROR_ARGUMENT, "config.kv_cache_quant_method");
    REFUSED(max_bs, 0, MLA_ERROR_ARGUMENT, "config.max_bs");
    REFUSED(max_tokens, -1, MLA_ERROR_ARGUMENT, "config.max_tokens");
    REFUSED(max_tokens, INT64_C(1) << 31, MLA_ERROR_ARGUMENT, "config.max_tokens");
    REFUSED(chunk_capacity, -1, MLA_ERROR_ARGUMENT, "config.chunk_capacity");
    REFUSED(solution, "nosuch", MLA_ERROR_NOT_FOUND, "nosuch");
    REFUSED(struct_size, 4, MLA_ERROR_VERSION, "struct_size");
#undef REFUSED
    assert_fails(mla_backend_create(ctx, NULL, &b, &diag), MLA_ERROR_ARGUMENT, &diag, "NULL");
    assert_fails(mla_backend_create(NULL, NULL, &b, &diag), MLA_ERROR_ARGUMENT, &diag, "ctx");
}

static void test_a_newer_struct(void **state)
{
    (void)state;
    struct {
        mla_config config;
        int64_t later;
    } newer = {good_config(), 0};
    newer.config.struct_size = sizeof newer;
    mla_backend *b = NULL;
    assert_ok(mla_backend_create(ctx, &newer.config, &b, &diag), &diag);
    mla_backend_destroy(b);
    b = NULL;
    newer.later = 1;
    assert_fails(mla_backend_create(ctx, &newer.config, &b, &diag), MLA_ERROR_VERSION, &diag,
                 "does not know");
}

static void test_softmax_scale(void **state)
{
    (void)state;
    assert_true(fabs((double)mla_softmax_scale(128, 64, 1.0f, 0.0f) - 0.07216878) < 1e-7);
    assert_true(fabs((double)mla_softmax_scale(128, 64, 0.5f, 1.0f) - 0.07216878) < 1e-7);
    assert_true(fabs((double)mla_softmax_scale(128, 64, 40.0f, 0.0f) - 0.07216878) < 1e-7);
    /* factor 40 and mscale_all_dim 1: m = 1.36888794 */
    assert_true(fabs((double)mla_softmax_scale(128, 64, 40.0f, 1.0f) - 0.13523377) < 1e-7);
    assert_true(fabs((double)mla_softmax_scale(128, 64, 40.0f, 0.707f) - 0.11472139) < 1e-7);
}

static void test_modes(void **state)
{
    (void)state;
    assert_int_equal(mla_forward_mode_from_num_extends(0, 0), MLA_FORWARD_IDLE);
    assert_int_equal(mla_forward_mode_from_num_extends(3, -1), MLA_FORWARD_IDLE);
    assert_int_equal(mla_forward_mode_from_num_extends(0, 5), MLA_FORWARD_DECODE);
    assert_int_equal(mla_forward_mode_from_num_extends(1, 5), MLA_FORWARD_MIXED);
    assert_int_equal(mla_forward_mode_from_num_extends(5, 5), MLA_FORWARD_EXTEND);
    assert_int_equal(mla_forward_mode_from_num_extends(6, 5), MLA_FORWARD_EXTEND);
    assert_string_equal(mla_forward_mode_name(MLA_FORWARD_MIXED), "mixed");
    assert_string_equal(mla_forward_mode_name(0), "unknown");
}

/* ---- registry -------------------------------------------------------------------------------- */

static mla_status create_other(mla_context *c, const mla_config *config, void **backend,
                               mla_diag *d)
{
    (void)c;
    (void)config;
    (void)d;
    *backend = NULL;
    return MLA_OK;
}

static void destroy_other(void *backend)
{
    (void)backend;
}

static void test_registry(void **state)
{
    (void)state;
    const mla_backend_row *row = NULL;
    assert_ok(mla_backend_find(NULL, 0, NULL, MLA_ARCH_MLA, &row, &diag), &diag);
    assert_string_equal(row->name, "mla");
    mla_config c = good_config();
    void *made = NULL;
    assert_ok(row->create(ctx, &c, &made, &diag), &diag);
    assert_non_null(mla_backend_get_config(made));
    row->destroy(made);

    assert_fails(mla_backend_find(NULL, 0, "flash", MLA_ARCH_MLA, &row, &diag), MLA_ERROR_NOT_FOUND,
                 &diag, "there are mla");
    assert_fails(mla_backend_find(NULL, 0, NULL, MLA_ARCH_MHA, &row, &diag), MLA_ERROR_NOT_FOUND,
                 &diag, "\"mha\"");
    assert_fails(mla_backend_find(NULL, 0, NULL, MLA_ARCH_DSA, &row, &diag), MLA_ERROR_NOT_FOUND,
                 &diag, "\"dsa\"");
    assert_fails(mla_backend_find(NULL, 0, "mla", MLA_ARCH_MHA, &row, &diag), MLA_ERROR_UNSUPPORTED,
                 &diag, "does not serve the mha architecture");
    assert_fails(mla_backend_find(NULL, 0, "mla", 3, &row, &diag), MLA_ERROR_ARGUMENT, &diag,
                 "architecture is 3");

    const mla_backend_row rows[] = {
        {"flash", MLA_ARCH_MLA | MLA_ARCH_MHA, create_other, destroy_other},
        {"dsa", MLA_ARCH_DSA, create_other, destroy_other},
        {"flash", MLA_ARCH_MLA, create_other, destroy_other},
    };
    assert_ok(mla_backend_find(rows, 3, "flash", MLA_ARCH_MLA, &row, &diag), &diag);
    assert_ptr_equal(row, &rows[2]); /* the last one wins */
    assert_ok(mla_backend_find(rows, 3, NULL, MLA_ARCH_DSA, &row, &diag), &diag);
    assert_ptr_equal(row, &rows[1]);
    assert_fails(mla_backend_find(rows, 3, "nosuch", MLA_ARCH_MLA, &row, &diag),
                 MLA_ERROR_NOT_FOUND, &diag, "there are mla, flash, dsa");
    assert_fails(mla_backend_find(rows, 3, "dsa", MLA_ARCH_MLA, &row, &diag), MLA_ERROR_UNSUPPORTED,
                 &diag, "these do: mla, flash");
    const mla_backend_row own[] = {{"mla", MLA_ARCH_MLA, create_other, destroy_other}};
    assert_ok(mla_backend_find(own, 1, NULL, MLA_ARCH_MLA, &row, &diag), &diag);
    assert_ptr_equal(row, &own[0]); /* also over the built-in one */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),       cmocka_unit_test(test_every_field),
        cmocka_unit_test(test_a_newer_struct), cmocka_unit_test(test_softmax_scale),
        cmocka_unit_test(test_modes),          cmocka_unit_test(test_registry),
    };
    return cmocka_run_group_tests_name("backend_config", tests, make_context, end_context);
}
