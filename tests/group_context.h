/*
 * The context and the diagnostics of a test group that needs only the CPU, for programs that hand
 * make_context and end_context to cmocka_run_group_tests_name.
 */
#ifndef MLA_TEST_GROUP_CONTEXT_H
#define MLA_TEST_GROUP_CONTEXT_H

#include "statuses.h"
#include <mla/context.h>

static mla_diag diag;
static mla_context *ctx;

static int make_context(void **state)
{
    (void)state;
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.cpu_only = 1;
    return mla_context_create(&options, &ctx, &diag) == MLA_OK ? 0 : -1;
}

static int end_context(void **state)
{
    (void)state;
    mla_context_destroy(ctx);
    return 0;
}

#endif
