/*
 * The runner against Hugging Face transformers, in process: greedy ids in f32 with chunk and page
 * sizes that take turns, logits in f32, bf16 and with every cache format; that the way a prompt is
 * cut changes nothing but rounding, with narrow caches too; and how many tokens choose other
 * experts in bf16. tests/golden runs the whole grid of sizes and families, and the long prompt,
 * through the command.
 *
 * Bounds: f32 1e-5 (norm over norm); median over positions of the per-position relative error: bf16
 * 2e-2, e4m3 7e-2, e5m2 15e-2, ds656 as e4m3.
 */
#include "golden.h"
#include "test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static mla_context *ctx;

static int open_context(void **state)
{
    (void)state;
    mla_diag diag = {{0}};
    must(mla_context_create(NULL, &ctx, &diag), &diag, "context");
    return 0;
}

static int close_context(void **state)
{
    (void)state;
    mla_context_destroy(ctx);
    return 0;
}

static void test_greedy_ids(void **state)
{
    (void)state;
    static const int64_t chunks[] = {1, 7, 64, 1000, 0};
    static const int32_t pages[] = {1, 16, 64, 100};
    int n_cases = 0;
    const golden_case *cases = golden_cases(&n_cases);
    for (int i = 0; i < n_cases; i++) {
        const golden_case *c = &cases[i];
        if (c->is_long)
            continue;
        mla_model *model = load_model(ctx, c->model, MLA_FORMAT_F32);
        int64_t at = first_difference(model, c, pages[i % 4], chunks[i % 5], 16);
        if (at >= 0)
            fail_msg("%s, chunk %lld, page %d: id %lld differs", c->name, (long long)chunks[i % 5],
                     pages[i % 4], (long long)at);
        mla_model_destroy(model);
    }
}

static bool takes_cache(const golden_case *c, int32_t kv_format)
{
    bool is_512_64 = strstr(c->model, "tiny/") != NULL || strstr(c->model, "full_dims") != NULL;
    return kv_format != MLA_FORMAT_DS656 || is_512_64;
}

static void check_logits(int32_t format, int32_t kv_format, bool is_median, double bound)
{
    int n_cases = 0;
    const golden_case *cases = golden_cases(&n_cases);
    double worst = 0.0;
    for (int i = 0; i < n_cases; i++) {
        const golden_case *c = &cases[i];
        if (c->logits == NULL || c->is_long || !takes_cache(c, kv_format))
            continue;
        mla_model *model = load_model(ctx, c->model, format);
        float *logits = golden_run_logits(model, c, kv_format, 0, 0);
        const float *tail = logits + (c->n_prompt - c->tail) * c->vocab;
        double error = is_median ? median_row_error(tail, c->logits, c->tail, c->vocab)
                                 : relative_error(tail, c->logits, c->tail * c->vocab);
        if (!(error <= bound))
            fail_msg("%s, %s cache: %g over %g", c->name, mla_format_name(kv_format), error, bound);
        worst = error > worst ? error : worst;
        free(logits);
        mla_model_destroy(model);
    }
    print_message("logits %s, %s cache: worst %s error %.3g (bound %g)\n", mla_format_name(format),
                  mla_format_name(kv_format), is_median ? "median" : "relative", worst, bound);
}

static void test_logits_f32(void **state)
{
    (void)state;
    check_logits(MLA_FORMAT_F32, MLA_FORMAT_F32, false, 1e-5);
}

static void test_logits_bf16(void **state)
{
    (void)state;
    check_logits(MLA_FORMAT_BF16, MLA_FORMAT_BF16, true, 2e-2);
}

static void test_logits_narrow_caches(void **state)
{
    (void)state;
    check_logits(MLA_FORMAT_F32, MLA_FORMAT_E4M3, true, 7e-2);
    check_logits(MLA_FORMAT_F32, MLA_FORMAT_E5M2, true, 15e-2);
    check_logits(MLA_FORMAT_F32, MLA_FORMAT_DS656, true, 7e-2);
    check_logits(MLA_FORMAT_F32, MLA_FORMAT_BF16, true, 2e-2);
    check_logits(MLA_FORMAT_F32, MLA_FORMAT_F16, true, 2e-2);
    check_logits(MLA_FORMAT_BF16, MLA_FORMAT_E4M3, true, 9e-2);
}

/*
 * New tokens attend rows as the cache holds them, so a cut prompt sees the same rows as a whole
 * one. What is left is f32 rounding, which now and then tips a value of the next layer's row to the
 * other neighbour of its format: far below that format's own error.
 */
static void test_cuts_change_only_rounding(void **state)
{
    (void)state;
    static const int32_t formats[] = {MLA_FORMAT_F32,  MLA_FORMAT_BF16, MLA_FORMAT_F16,
                                      MLA_FORMAT_E4M3, MLA_FORMAT_E5M2, MLA_FORMAT_DS656};
    static const double bounds[] = {1e-5, 3e-3, 1e-3, 2e-2, 4e-2, 2e-2};
    int n_cases = 0;
    const golden_case *cases = golden_cases(&n_cases);
    for (int i = 0; i < n_cases; i++) {
        const golden_case *c = &cases[i];
        if (c->is_long || c->logits == NULL)
            continue;
        mla_model *model = load_model(ctx, c->model, MLA_FORMAT_F32);
        for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
            if (!takes_cache(c, formats[f]))
                continue;
            float *whole = golden_run_logits(model, c, formats[f], 0, 0);
            float *cut = golden_run_logits(model, c, formats[f], 5, 3);
            double error = median_row_error(cut, whole, c->n_prompt, c->vocab);
            if (!(error <= bounds[f]))
                fail_msg("%s, %s cache: cuts change logits by %g", c->name,
                         mla_format_name(formats[f]), error);
            free(whole);
            free(cut);
        }
        mla_model_destroy(model);
    }
}

/* Experts that a prefill chose, each token's sorted. */
typedef struct routes {
    int32_t chosen[1 << 16];
    int64_t n;
    int64_t k;
} routes;

static int compare_ids(const void *a, const void *b)
{
    return *(const int32_t *)a - *(const int32_t *)b;
}

static void keep_routes(void *user, int64_t layer, int64_t first, int64_t n_tokens,
                        const int32_t *chosen)
{
    routes *kept = user;
    (void)layer;
    (void)first;
    assert_true(kept->n + n_tokens * kept->k <= (int64_t)(sizeof kept->chosen / sizeof(int32_t)));
    for (int64_t t = 0; t < n_tokens; t++) {
        int32_t *row = kept->chosen + kept->n;
        memcpy(row, chosen + t * kept->k, (size_t)kept->k * sizeof *row);
        qsort(row, (size_t)kept->k, sizeof *row, compare_ids);
        kept->n += kept->k;
    }
}

static void route_case(const golden_case *c, int32_t format, routes *kept)
{
    mla_model *model = load_model(ctx, c->model, format);
    mla_model_info info = MLA_MODEL_INFO_INIT;
    mla_model_session_options options = MLA_MODEL_SESSION_OPTIONS_INIT;
    mla_model_session *session = NULL;
    mla_diag diag = {{0}};
    must(mla_model_get_info(model, &info, &diag), &diag, c->name);
    options.max_length = c->n_prompt;
    must(mla_model_session_create(model, &options, &session, &diag), &diag, c->name);
    kept->n = 0;
    kept->k = info.num_experts_per_tok;
    mla_model_session_set_on_routing(session, keep_routes, kept);
    must(mla_model_session_prefill(session, c->prompt, c->n_prompt, NULL, 0, NULL, NULL, &diag),
         &diag, c->name);
    assert_int_equal(kept->n, info.num_expert_layers * c->n_prompt * kept->k);
    mla_model_session_destroy(session);
    mla_model_destroy(model);
}

static void test_routing_flips(void **state)
{
    (void)state;
    static routes exact;
    static routes rounded;
    int n_cases = 0;
    const golden_case *cases = golden_cases(&n_cases);
    int64_t choices = 0;
    int64_t flips = 0;
    for (int i = 0; i < n_cases; i++) {
        route_case(&cases[i], MLA_FORMAT_F32, &exact);
        route_case(&cases[i], MLA_FORMAT_BF16, &rounded);
        for (int64_t r = 0; r < exact.n; r += exact.k) {
            choices++;
            flips += memcmp(exact.chosen + r, rounded.chosen + r,
                            (size_t)exact.k * sizeof(int32_t)) != 0;
        }
    }
    print_message("routing: %lld of %lld tokens times layers choose other experts in bf16\n",
                  (long long)flips, (long long)choices);
    assert_true(choices > 6000 && flips * 20 < choices);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy_ids),
        cmocka_unit_test(test_logits_f32),
        cmocka_unit_test(test_logits_bf16),
        cmocka_unit_test(test_logits_narrow_caches),
        cmocka_unit_test(test_cuts_change_only_rounding),
        cmocka_unit_test(test_routing_flips),
    };
    return cmocka_run_group_tests(tests, open_context, close_context);
}
