/*
 * Helpers of the tests of bad calls (test_arguments*.c). A case starts from a good call and spoils
 * one thing: the call gets the expected status and a sentence that names the argument, and no byte
 * of its operands changes. What needs no live value is refused by mla_<op>_problem alike.
 *
 * A file defines, for each operator in turn, SPOIL, SPOIL_LIVE and problem_function.
 */
#ifndef MLA_TEST_ARGUMENTS_H
#define MLA_TEST_ARGUMENTS_H

#include "statuses.h"
#include "test.h"
#include <math.h>
#include <mla/ops.h>
#include <stdlib.h>
#include <string.h>

/* All operands of a case lie here, so that one comparison shows that nothing was written. */
enum { ARENA_BYTES = 1 << 18 };
static _Alignas(64) unsigned char arena[ARENA_BYTES];
static unsigned char before[ARENA_BYTES];
static size_t arena_used;
static mla_context *ctx;
static mla_diag diag;

static void *take(size_t bytes)
{
    const size_t aligned = (bytes + 127) / 64 * 64;
    assert_true(arena_used + aligned <= sizeof arena);
    void *p = arena + arena_used;
    arena_used += aligned;
    return p;
}

static mla_tensor make(int32_t format, int32_t rank, int64_t n0, int64_t n1, int64_t n2, int64_t n3)
{
    const int64_t shape[4] = {n0, n1, n2, n3};
    int64_t n = 1;
    for (int32_t i = 0; i < rank; i++)
        n *= shape[i];
    return mla_tensor_make(take((size_t)(n * mla_format_bytes(format))), format, rank, shape);
}

static mla_tensor make_i32(int64_t n, const int32_t *values)
{
    mla_tensor t = make(MLA_FORMAT_I32, 1, n, 0, 0, 0);
    memcpy(t.data, values, (size_t)n * sizeof *values);
    return t;
}

static void fresh(void)
{
    memset(arena, 0, sizeof arena);
    arena_used = 0;
}

static void *workspace_for(const mla_problem *problem, uint64_t *bytes)
{
    assert_ok(mla_workspace_bytes(ctx, problem, NULL, bytes, &diag), &diag);
    return *bytes > 0 ? aligned_alloc(64, (size_t)(*bytes + 63) / 64 * 64) : NULL;
}

/*
 * For operator `name` with parameters `type`: SPOIL refuses with and without pointers, SPOIL_LIVE
 * only in the call, since only the values are wrong.
 */
#define SPOIL_CASE(type, name, good, problem_status, change, status, words)                        \
    do {                                                                                           \
        type params, *p = &params;                                                                 \
        mla_problem problem = MLA_PROBLEM_INIT;                                                    \
        fresh();                                                                                   \
        good(p);                                                                                   \
        change;                                                                                    \
        memcpy(before, arena, sizeof arena);                                                       \
        assert_fails(name(ctx, p, &diag), status, &diag, words);                                   \
        assert_memory_equal(before, arena, sizeof arena);                                          \
        assert_int_equal(name(ctx, p, NULL), status);                                              \
        if (problem_status)                                                                        \
            assert_fails(problem_function(p, &problem, &diag), status, &diag, words);              \
    } while (0)

#define IN_EVERY_OPERATOR(type, name, good)                                                        \
    do {                                                                                           \
        type own, *base = &own;                                                                    \
        mla_problem made = MLA_PROBLEM_INIT;                                                       \
        uint64_t bytes;                                                                            \
        fresh();                                                                                   \
        good(base);                                                                                \
        assert_ok(problem_function(base, &made, &diag), &diag);                                    \
        assert_int_equal(made.struct_size, sizeof made);                                           \
        assert_int_equal(made.device_type, MLA_DEVICE_CPU);                                        \
        void *workspace = workspace_for(&made, &bytes);                                            \
        base->call.workspace = workspace;                                                          \
        base->call.workspace_bytes = bytes;                                                        \
        assert_ok(name(ctx, base, &diag), &diag);                                                  \
        struct {                                                                                   \
            type params;                                                                           \
            int64_t tail[2];                                                                       \
        } longer = {.params = own};                                                                \
        longer.params.struct_size = sizeof longer;                                                 \
        assert_ok(name(ctx, &longer.params, &diag), &diag);                                        \
        longer.tail[1] = 1;                                                                        \
        assert_fails(name(ctx, &longer.params, &diag), MLA_ERROR_VERSION, &diag, #type);           \
        free(workspace);                                                                           \
        assert_fails(name(NULL, base, &diag), MLA_ERROR_ARGUMENT, &diag, "ctx");                   \
        assert_fails(name(ctx, NULL, &diag), MLA_ERROR_ARGUMENT, &diag, #type);                    \
        assert_fails(problem_function(NULL, &made, &diag), MLA_ERROR_ARGUMENT, &diag, #type);      \
        assert_fails(problem_function(base, NULL, &diag), MLA_ERROR_ARGUMENT, &diag, "problem");   \
        made.struct_size = 8;                                                                      \
        assert_fails(problem_function(base, &made, &diag), MLA_ERROR_VERSION, &diag, "problem");   \
        made.struct_size = UINT32_MAX;                                                             \
        assert_fails(problem_function(base, &made, &diag), MLA_ERROR_VERSION, &diag, "problem");   \
        SPOIL(p->struct_size = 0, MLA_ERROR_VERSION, "struct_size");                               \
        SPOIL(p->struct_size -= 8, MLA_ERROR_VERSION, "struct_size");                              \
        SPOIL(p->struct_size = UINT32_MAX, MLA_ERROR_VERSION, "struct_size");                      \
        SPOIL(p->call.reserved[2] = p, MLA_ERROR_ARGUMENT, "call.reserved[2]");                    \
        SPOIL_LIVE(p->call.solution = "no_such_row", MLA_ERROR_NOT_FOUND, "no_such_row");          \
    } while (0)

/* One required tensor: absent, of another format, wrong device, no data, not contiguous. */
#define SPOIL_TENSOR(field)                                                                        \
    do {                                                                                           \
        SPOIL(p->field = (mla_tensor){0}, MLA_ERROR_ARGUMENT, #field);                             \
        SPOIL(p->field.rank = 6, MLA_ERROR_SHAPE, #field);                                         \
        SPOIL(p->field.rank = -1, MLA_ERROR_SHAPE, #field);                                        \
        SPOIL_OTHER(field);                                                                        \
    } while (0)

#define SPOIL_OTHER(field)                                                                         \
    do {                                                                                           \
        SPOIL(p->field.format = 77, MLA_ERROR_FORMAT, #field);                                     \
        SPOIL(p->field.device_type = 9, MLA_ERROR_DEVICE, "device");                               \
        SPOIL(p->field.device_index = 1, MLA_ERROR_DEVICE, "device");                              \
        SPOIL(p->field.device_type = MLA_DEVICE_CUDA, MLA_ERROR_DEVICE, "device");                 \
        SPOIL(p->field.shape[0] = -1, MLA_ERROR_SHAPE, #field);                                    \
        SPOIL(p->field.stride[0] = -1, MLA_ERROR_STRIDE, #field);                                  \
        SPOIL_LIVE(p->field.data = NULL, MLA_ERROR_ARGUMENT, #field);                              \
    } while (0)

#define SPOIL_STRIDES(field)                                                                       \
    do {                                                                                           \
        SPOIL(p->field.stride[p->field.rank - 1] = 2, MLA_ERROR_STRIDE, #field);                   \
        SPOIL_LIVE(p->field.data = (char *)p->field.data + 1, MLA_ERROR_STRIDE, #field);           \
    } while (0)

/* Requests, query length, heads, R, P, D, pages, page size, table width. */
enum { B = 2, Q = 3, H = 4, R = 8, P = 4, D = R + P, PAGES = 5, PS = 4, W = 3 };

/* Element i of an i32 operand. */
#define I32(field, i) ((int32_t *)p->field.data)[i]

static int start(void **state)
{
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    (void)state;
    options.ignore_environment = 1;
    options.cpu_only = 1;
    return mla_context_create(&options, &ctx, &diag) == MLA_OK ? 0 : -1;
}

static int stop(void **state)
{
    (void)state;
    mla_context_destroy(ctx);
    return 0;
}

#endif
