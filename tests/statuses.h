/*
 * Assertions on statuses that show the library's sentence when they fail.
 *   assert_ok(call(..., &diag), &diag);
 *   assert_fails(call(..., &diag), MLA_ERROR_SHAPE, &diag, "page_table");
 * The last one also wants the sentence to hold the given words, so that it names what is wrong.
 */
#ifndef MLA_TEST_STATUSES_H
#define MLA_TEST_STATUSES_H

#include "test.h"
#include <mla/status.h>
#include <string.h>

#define assert_ok(call, diag)                                                                      \
    do {                                                                                           \
        (diag)->text[0] = 0;                                                                       \
        mla_status status_of_call = (call);                                                        \
        if (status_of_call != MLA_OK)                                                              \
            fail_msg("%s: %s: %s", #call, mla_status_name(status_of_call), (diag)->text);          \
    } while (0)

#define assert_fails(call, want, diag, words)                                                      \
    do {                                                                                           \
        (diag)->text[0] = 0;                                                                       \
        mla_status status_of_call = (call);                                                        \
        if (status_of_call != (want))                                                              \
            fail_msg("%s: got %s, not %s: %s", #call, mla_status_name(status_of_call),             \
                     mla_status_name(want), (diag)->text);                                         \
        if (strstr((diag)->text, (words)) == NULL)                                                 \
            fail_msg("%s: \"%s\" does not say \"%s\"", #call, (diag)->text, (words));              \
    } while (0)

#endif
