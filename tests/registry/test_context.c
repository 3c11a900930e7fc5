/*
 * Contexts: their options, CPU features masked differently side by side in one process, and that
 * each built-in family has a row for every operator, so that forcing it holds for a whole run.
 */
#include "chosen.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static void contexts_with_other_features_stand_side_by_side(void **unused)
{
    (void)unused;
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.ignore_environment = 1;
    options.cpu_only = 1;
    mla_context *full = make_context(&options);
    options.use_baseline = 1;
    mla_context *plain = make_context(&options);
    assert_true(mla_context_cpu_features(plain) == 0);
    assert_string_equal(family_of(plain, chosen(plain, NULL)), "c");
    assert_int_equal(mla_solution_count(plain), mla_solution_count(full));
    for (int32_t i = 0; i < mla_solution_count(plain); i++) {
        mla_solution_info info = MLA_SOLUTION_INFO_INIT;
        assert_int_equal(mla_solution_describe(plain, i, &info, NULL), MLA_OK);
        if (info.device_type != MLA_DEVICE_CPU)
            continue;
        assert_int_equal(info.runs_here, strcmp(info.family, "c") == 0);
        assert_true(info.runs_here || info.reason[0]);
    }
    /* one bit at a time: the context has no more than the mask, and no more than the machine */
    for (int32_t bit = 0; bit < 7; bit++) {
        mla_context_options masked = MLA_CONTEXT_OPTIONS_INIT;
        masked.ignore_environment = 1;
        masked.cpu_only = 1;
        masked.cpu_features = UINT64_C(1) << bit;
        mla_context *ctx = make_context(&masked);
        assert_true((mla_context_cpu_features(ctx) & ~masked.cpu_features) == 0);
        assert_true((mla_context_cpu_features(ctx) & ~mla_context_cpu_features(full)) == 0);
        chosen(ctx, NULL);
        mla_context_destroy(ctx);
    }
    /* forcing what the features forbid is an error in one context and none in the other */
    const char *best = chosen(full, NULL);
    if (strcmp(family_of(full, best), "c") != 0) {
        mla_problem problem = merge_problem();
        mla_diag diag = {{0}};
        const char *name = NULL;
        assert_int_equal(mla_solution_choose(plain, &problem, best, &name, &diag),
                         MLA_ERROR_UNSUPPORTED);
        assert_true(diag.text[0]);
        assert_int_equal(mla_solution_choose(full, &problem, best, &name, &diag), MLA_OK);
    }
    mla_context_destroy(full);
    mla_context_destroy(plain);
}

/* Forcing a family has to hold for a whole run, so each has a row for every operator. */
static void families_cover_every_operator(void **unused)
{
    (void)unused;
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.ignore_environment = 1;
    options.cpu_only = 1;
    mla_context *ctx = make_context(&options);
    static const int32_t ops[] = {
#define OP(name, value, text) name,
        MLA_OP_LIST(OP)
#undef OP
    };
    for (int32_t i = 0; i < mla_solution_count(ctx); i++) {
        mla_solution_info info = MLA_SOLUTION_INFO_INIT;
        assert_int_equal(mla_solution_describe(ctx, i, &info, NULL), MLA_OK);
        if (info.device_type != MLA_DEVICE_CPU)
            continue;
        for (size_t o = 0; o < sizeof ops / sizeof ops[0]; o++) {
            bool found = false;
            for (int32_t j = 0; j < mla_solution_count(ctx) && !found; j++) {
                mla_solution_info other = MLA_SOLUTION_INFO_INIT;
                assert_int_equal(mla_solution_describe(ctx, j, &other, NULL), MLA_OK);
                found = other.op == ops[o] && strcmp(other.family, info.family) == 0;
            }
            if (!found)
                fail_msg("family %s has no row for %s", info.family, mla_op_name(ops[o]));
        }
        /* names: <op>_..._<family>, texts for people are there */
        size_t length = strlen(info.name), tail = strlen(info.family);
        assert_true(length > tail && strcmp(info.name + length - tail, info.family) == 0);
        assert_int_equal(strncmp(info.name, mla_op_name(info.op), strlen(mla_op_name(info.op))), 0);
        assert_true(info.formats[0] && info.features[0]);
    }
    mla_context_destroy(ctx);
}

static void contexts_check_their_options(void **unused)
{
    (void)unused;
    mla_context *ctx = NULL;
    mla_diag diag = {{0}};
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.ignore_environment = 1;
    options.cpu_only = 1;
    options.n_threads = -1;
    assert_int_equal(mla_context_create(&options, &ctx, &diag), MLA_ERROR_ARGUMENT);
    assert_non_null(strstr(diag.text, "n_threads"));
    options.n_threads = 1025;
    assert_int_equal(mla_context_create(&options, &ctx, &diag), MLA_ERROR_ARGUMENT);
    options.n_threads = 3;
    options.struct_size = 0;
    assert_int_equal(mla_context_create(&options, &ctx, &diag), MLA_ERROR_VERSION);
    assert_null(ctx);
    options.struct_size = sizeof options;
    ctx = make_context(&options);
    assert_int_equal(mla_context_n_threads(ctx), 3);
    mla_context_destroy(ctx);
    mla_context_destroy(NULL);
}

int main(void)
{
    unsetenv("MLA_SOLUTION");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(contexts_with_other_features_stand_side_by_side),
        cmocka_unit_test(families_cover_every_operator),
        cmocka_unit_test(contexts_check_their_options),
    };
    return cmocka_run_group_tests_name("context", tests, NULL, NULL);
}
