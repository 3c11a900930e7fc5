/*
 * Sessions: refusals at creation and in use, truncation (append = rebuild), sampling by seed, text
 * and ids of a byte-level model, an EOS, and what a failed forward leaves behind.
 */
#include "support.h"
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static mla_context *ctx;
static mla_model *target;
static mla_model *variant;

static int open_models(void **state)
{
    (void)state;
    mla_diag diag = {{0}};
    must(mla_context_create(NULL, &ctx, &diag), &diag, "context");
    target = load_model(ctx, "tiny/target", MLA_FORMAT_F32);
    variant = load_model(ctx, "variants/v2_grouped", MLA_FORMAT_F32);
    return 0;
}

static int close_models(void **state)
{
    (void)state;
    mla_model_destroy(target);
    mla_model_destroy(variant);
    mla_context_destroy(ctx);
    return 0;
}

static mla_model_session *open_session(mla_model *model, int64_t max_length, int64_t chunk_tokens)
{
    mla_model_session_options options = MLA_MODEL_SESSION_OPTIONS_INIT;
    mla_model_session *session = NULL;
    mla_diag diag = {{0}};
    options.max_length = max_length;
    options.chunk_tokens = chunk_tokens;
    options.page_size = 4;
    must(mla_model_session_create(model, &options, &session, &diag), &diag, "session");
    return session;
}

static void test_creation_refusals(void **state)
{
    (void)state;
    static const struct {
        int32_t kv_format;
        int32_t page_size;
        int64_t max_length;
        int64_t chunk_tokens;
        int64_t chunk_capacity;
        mla_status want;
        const char *part;
    } cases[] = {
        {0, 0, 0, 0, 0, MLA_ERROR_ARGUMENT, "max_length"},
        {0, 0, -5, 0, 0, MLA_ERROR_ARGUMENT, "max_length"},
        {0, 0, 4097, 0, 0, MLA_ERROR_CAPACITY, "max_position_embeddings"},
        {0, -1, 16, 0, 0, MLA_ERROR_ARGUMENT, "page_size"},
        {0, 0, 16, -1, 0, MLA_ERROR_ARGUMENT, "chunk_tokens"},
        {0, 0, 16, 1 << 21, 0, MLA_ERROR_ARGUMENT, "chunk_tokens"},
        {0, 0, 16, 0, -1, MLA_ERROR_ARGUMENT, "chunk_capacity"},
        {MLA_FORMAT_I32, 0, 16, 0, 0, MLA_ERROR_FORMAT, "i32"},
        {99, 0, 16, 0, 0, MLA_ERROR_FORMAT, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        mla_model_session_options options = MLA_MODEL_SESSION_OPTIONS_INIT;
        mla_model_session *session = NULL;
        mla_diag diag = {{0}};
        options.kv_format = cases[i].kv_format;
        options.page_size = cases[i].page_size;
        options.max_length = cases[i].max_length;
        options.chunk_tokens = cases[i].chunk_tokens;
        options.chunk_capacity = cases[i].chunk_capacity;
        assert_int_equal(mla_model_session_create(target, &options, &session, &diag),
                         cases[i].want);
        assert_null(session);
        if (strstr(diag.text, cases[i].part) == NULL)
            fail_msg("\"%s\" does not mention \"%s\"", diag.text, cases[i].part);
    }
    /* ds656 needs a latent of 512 and a rope part of 64. */
    mla_model_session_options options = MLA_MODEL_SESSION_OPTIONS_INIT;
    mla_model_session *session = NULL;
    mla_diag diag = {{0}};
    options.max_length = 16;
    options.kv_format = MLA_FORMAT_DS656;
    assert_int_not_equal(mla_model_session_create(variant, &options, &session, &diag), MLA_OK);
    assert_true(diag.text[0] != '\0');
    options.struct_size = 4;
    assert_int_equal(mla_model_session_create(variant, &options, &session, &diag),
                     MLA_ERROR_VERSION);
}

static void test_use_refusals(void **state)
{
    (void)state;
    mla_model_session *session = open_session(target, 8, 3);
    const int32_t good[6] = {65, 66, 67, 68, 69, 70};
    const int32_t bad[2] = {65, 258};
    const int32_t negative[1] = {-1};
    float logits[2 * 258];
    mla_diag diag = {{0}};
    assert_int_equal(mla_model_session_prefill(session, bad, 2, NULL, 0, NULL, NULL, &diag),
                     MLA_ERROR_ARGUMENT);
    assert_int_equal(mla_model_session_prefill(session, negative, 1, NULL, 0, NULL, NULL, &diag),
                     MLA_ERROR_ARGUMENT);
    assert_int_equal(mla_model_session_prefill(session, good, 0, NULL, 0, NULL, NULL, &diag),
                     MLA_ERROR_ARGUMENT);
    assert_int_equal(mla_model_session_prefill(session, good, 2, logits, 3, NULL, NULL, &diag),
                     MLA_ERROR_ARGUMENT);
    assert_int_equal(mla_model_session_length(session), 0);
    must(mla_model_session_prefill(session, good, 6, NULL, 0, NULL, NULL, &diag), &diag, "six");
    assert_int_equal(mla_model_session_prefill(session, good, 3, NULL, 0, NULL, NULL, &diag),
                     MLA_ERROR_CAPACITY);
    assert_int_equal(mla_model_session_length(session), 6);
    must(mla_model_session_decode(session, 71, logits, &diag), &diag, "seventh");
    must(mla_model_session_decode(session, 72, NULL, &diag), &diag, "eighth");
    assert_int_equal(mla_model_session_decode(session, 73, logits, &diag), MLA_ERROR_CAPACITY);
    assert_int_equal(mla_model_session_truncate(session, 9, &diag), MLA_ERROR_ARGUMENT);
    assert_int_equal(mla_model_session_truncate(session, -1, &diag), MLA_ERROR_ARGUMENT);
    assert_int_equal(mla_model_session_length(session), 8);
    mla_model_session_destroy(session);
    mla_model_session_destroy(NULL);
}

/* Prefill whole, in chunks, by decodes, and after going back: the same logits to rounding. */
static void test_append_is_rebuild(void **state)
{
    (void)state;
    enum { N = 23 };
    int32_t ids[N];
    float want[258];
    float got[258];
    mla_diag diag = {{0}};
    for (int i = 0; i < N; i++)
        ids[i] = 97 + i * 7 % 26;
    mla_model_session *session = open_session(target, N, 0);
    must(mla_model_session_prefill(session, ids, N, want, 1, NULL, NULL, &diag), &diag, "whole");
    mla_model_session_destroy(session);
    session = open_session(target, N, 5);
    must(mla_model_session_prefill(session, ids, N, got, 1, NULL, NULL, &diag), &diag, "chunks");
    assert_true(relative_error(got, want, 258) < 1e-5);
    for (int64_t back = N - 1; back >= 0; back -= 6) {
        must(mla_model_session_truncate(session, back, &diag), &diag, "truncate");
        for (int64_t i = back; i < N; i++)
            must(mla_model_session_decode(session, ids[i], got, &diag), &diag, "decode");
        assert_true(relative_error(got, want, 258) < 1e-5);
    }
    mla_model_session_destroy(session);
}

typedef struct heard {
    char text[512];
    size_t bytes;
    int64_t n_ids;
    int64_t n_ends;
} heard;

static void listen(void *user, int32_t id, const char *text, size_t bytes)
{
    heard *h = user;
    memcpy(h->text + h->bytes, text, bytes);
    h->bytes += bytes;
    h->n_ids += id >= 0;
    h->n_ends += id < 0;
}

static void test_generate(void **state)
{
    (void)state;
    const char prompt[] = "SQLite is";
    int32_t ids[16];
    int64_t n = 16;
    mla_diag diag = {{0}};
    must(mla_model_encode(target, prompt, strlen(prompt), ids, &n, &diag), &diag, "encode");
    assert_int_equal(n, 10);
    assert_int_equal(ids[0], 256);
    int32_t out[4][40];
    for (int run = 0; run < 4; run++) {
        mla_model_session *session = open_session(target, 64, 4);
        mla_model_generate_params params = MLA_MODEL_GENERATE_PARAMS_INIT;
        mla_model_generate_result result = MLA_MODEL_GENERATE_RESULT_INIT;
        heard h = {.bytes = 0};
        params.prompt_ids = ids;
        params.n_prompt = n;
        params.max_tokens = 40;
        params.temperature = run == 0 ? 0.0 : 1.0;
        params.seed = run < 3 ? 5 : 6;
        params.top_p = 0.9;
        params.on_token = listen;
        params.user = &h;
        params.ids = out[run];
        must(mla_model_generate(session, &params, &result, &diag), &diag, "generate");
        assert_int_equal(h.n_ids, result.n_ids);
        assert_int_equal(h.n_ends, 1);
        assert_int_equal(result.prefill_tokens, n);
        assert_int_equal(result.decode_tokens, result.n_ids - 1);
        if (run == 0) {
            assert_int_equal(result.n_ids, 40);
            assert_memory_equal(h.text, " a single table column and a state of th", 40);
        }
        mla_model_session_destroy(session);
    }
    assert_memory_equal(out[1], out[2], sizeof out[1]);
    assert_memory_not_equal(out[1], out[3], sizeof out[1]);
}

static void test_ids_only_models(void **state)
{
    (void)state;
    int32_t ids[8];
    int64_t n = 8;
    mla_diag diag = {{0}};
    mla_model_info info = MLA_MODEL_INFO_INIT;
    must(mla_model_get_info(variant, &info, &diag), &diag, "info");
    assert_int_equal(info.is_byte_level, 0);
    assert_int_equal(mla_model_encode(variant, "x", 1, ids, &n, &diag), MLA_ERROR_UNSUPPORTED);
    assert_non_null(strstr(diag.text, "ids"));
    n = 1;
    assert_int_equal(mla_model_encode(target, "xyz", 3, ids, &n, &diag), MLA_ERROR_CAPACITY);
    info.struct_size = 1;
    assert_int_equal(mla_model_get_info(variant, &info, &diag), MLA_ERROR_VERSION);
}

static void test_load_refusals(void **state)
{
    (void)state;
    char path[PATH_BYTES];
    mla_model *model = NULL;
    mla_diag diag = {{0}};
    assert_int_equal(mla_model_load(ctx, "/nowhere", MLA_FORMAT_F32, &model, &diag),
                     MLA_ERROR_FILE);
    model_path("tiny/target", path);
    assert_int_equal(mla_model_load(ctx, path, MLA_FORMAT_E4M3, &model, &diag), MLA_ERROR_FORMAT);
    assert_int_equal(mla_model_load(NULL, path, MLA_FORMAT_F32, &model, &diag), MLA_ERROR_ARGUMENT);
    assert_null(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_creation_refusals), cmocka_unit_test(test_use_refusals),
        cmocka_unit_test(test_append_is_rebuild), cmocka_unit_test(test_generate),
        cmocka_unit_test(test_ids_only_models),   cmocka_unit_test(test_load_refusals),
    };
    return cmocka_run_group_tests(tests, open_models, close_models);
}
