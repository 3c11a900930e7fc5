/*
 * Positions, slots, lengths, their running sum and page tables in stream order, on the CPU and,
 * with --device cuda[:N], on a GPU. Everything that must not be read or written is poison
 * (oracle/scene.h); table entries past a request's pages hold an absurd id.
 */
#include "oracle/numeric.h"
#include "oracle/operators.h"
#include "oracle/scene.h"
#include "statuses.h"
#include <mla/cache.h>
#include <stdlib.h>

#define ABSURD 2147480000

enum { MAX_REQUESTS = 40, PROBLEMS = 60 };

typedef struct problem {
    scene scene;
    int64_t n, rows, columns, tokens, sum;
    int32_t page_size;
    mla_tensor table, rows_of, cached, fresh;             /* inputs */
    mla_tensor positions, slots, lens, cumulative, pages; /* outputs */
} problem;

static mla_diag diag;
static mla_context *ctx;
static const mla_tensor none = {.rank = 0};

static int64_t index_in(const mla_tensor *t, int64_t i)
{
    return t->format == MLA_FORMAT_I64 ? ((int64_t *)t->data)[i * t->stride[0]]
                                       : ((int32_t *)t->data)[i * t->stride[0]];
}

static void put(const mla_tensor *t, int64_t i, int64_t value)
{
    if (t->format == MLA_FORMAT_I64)
        ((int64_t *)t->data)[i * t->stride[0]] = value;
    else
        ((int32_t *)t->data)[i * t->stride[0]] = (int32_t)value;
}

static mla_tensor vector(problem *p, rng *r, const char *name, scene_role role, bool may_be_wide,
                         int64_t n)
{
    const int32_t format = may_be_wide && rng_chance(r, 50) ? MLA_FORMAT_I64 : MLA_FORMAT_I32;
    return scene_tensor(&p->scene, r, name, role, SCENE_PACKED, format, 1, &n);
}

/* Requests of 0 to 5 pages; `slack` tokens of capacity past their sum (negative: too few). */
static problem *make(rng *r, int64_t slack)
{
    problem *p = calloc(1, sizeof *p);
    assert_non_null(p);
    p->n = rng_range(r, 0, MAX_REQUESTS);
    p->rows = rng_range(r, 1, 12);
    p->columns = rng_range(r, 5, 9);
    p->page_size = (int32_t)rng_range(r, 1, 70);
    const int64_t shape[2] = {p->rows, p->columns};
    const scene_layout layout = rng_chance(r, 50) ? SCENE_GAPS : SCENE_PACKED;
    p->table = scene_tensor(&p->scene, r, "table", SCENE_INPUT, layout, MLA_FORMAT_I32, 2, shape);
    int64_t *live = calloc((size_t)p->rows, sizeof *live);
    assert_non_null(live);
    for (int64_t row = 0; row < p->rows; row++) {
        live[row] = rng_range(r, 0, 5);
        int32_t *pages = (int32_t *)p->table.data + row * p->table.stride[0];
        for (int64_t c = 0; c < p->columns; c++)
            pages[c] = c < live[row] ? (int32_t)rng_range(r, 0, 1 << 20) : ABSURD;
    }
    p->rows_of = vector(p, r, "rows", SCENE_INPUT, true, p->n);
    p->cached = vector(p, r, "cached", SCENE_INPUT, false, p->n);
    p->fresh = vector(p, r, "fresh", SCENE_INPUT, false, p->n);
    for (int64_t i = 0; i < p->n; i++) {
        const int64_t row = rng_range(r, 0, p->rows - 1);
        const int64_t length = rng_range(r, 0, live[row] * p->page_size);
        const int64_t fresh =
            rng_chance(r, 30) ? rng_range(r, 0, length > 0) : rng_range(r, 0, length);
        put(&p->rows_of, i, row);
        put(&p->cached, i, length - fresh);
        put(&p->fresh, i, fresh);
        p->sum += fresh;
    }
    free(live);
    p->tokens = p->sum + slack > 0 ? p->sum + slack : 0;
    p->positions = vector(p, r, "positions", SCENE_OUTPUT, true, p->tokens);
    p->slots = vector(p, r, "slots", SCENE_OUTPUT, true, p->tokens);
    p->lens = vector(p, r, "lens", SCENE_OUTPUT, false, p->n);
    p->cumulative = vector(p, r, "cumulative", SCENE_OUTPUT, false, p->n + 1);
    const int64_t out[2] = {p->n, rng_range(r, 0, p->columns + 3)};
    p->pages = scene_tensor(&p->scene, r, "pages", SCENE_OUTPUT, layout, MLA_FORMAT_I32, 2, out);
    return p;
}

static void end(problem *p)
{
    scene_free(&p->scene);
    free(p);
}

static mla_status run(problem *p, bool in_place, unsigned wanted)
{
    mla_tensor table = p->table, rows = p->rows_of, cached = p->cached, fresh = p->fresh;
    mla_tensor positions = wanted & 1 ? p->positions : none, slots = wanted & 2 ? p->slots : none;
    mla_tensor cumulative = wanted & 4 ? p->cumulative : none;
    mla_tensor lens = in_place ? p->cached : wanted & 8 ? p->lens : none;
    void *stream = scene_device() ? device_stream(scene_device()) : NULL;
    scene_reset(&p->scene);
    SCENE_PLACE(&p->scene, &table, &rows, &cached, &fresh, &positions, &slots, &lens, &cumulative);
    const mla_status status =
        mla_enqueue_positions_and_slots(ctx, stream, table, rows, cached, fresh, p->page_size,
                                        positions, slots, lens, cumulative, &diag);
    scene_fetch(&p->scene);
    return status;
}

/* The whole-number element 0xff..ff that an output not written still holds. */
static void assert_all(const mla_tensor *t, int64_t value)
{
    for (int64_t i = 0; i < t->shape[0]; i++)
        assert_int_equal(index_in(t, i), value);
}

static void check(problem *p, unsigned wanted)
{
    int64_t t = 0, before = 0;
    for (int64_t i = 0; i < p->n; i++) {
        const int64_t row = index_in(&p->rows_of, i);
        const int32_t *pages = (const int32_t *)p->table.data + row * p->table.stride[0];
        const int64_t fresh = index_in(&p->fresh, i);
        const int64_t length = wanted & 8 ? index_in(&p->lens, i) : 0;
        const int64_t cached = index_in(&p->cached, i);
        if (wanted & 8)
            assert_int_equal(length, cached + fresh);
        if (wanted & 4)
            assert_int_equal(index_in(&p->cumulative, i), before);
        before += fresh;
        for (int64_t j = 0; j < fresh; j++, t++) {
            const int64_t position = cached + j;
            if (t < p->tokens && wanted & 1)
                assert_int_equal(index_in(&p->positions, t), position);
            if (t < p->tokens && wanted & 2)
                assert_int_equal(index_in(&p->slots, t),
                                 pages[position / p->page_size] * (int64_t)p->page_size +
                                     position % p->page_size);
        }
    }
    if (wanted & 4)
        assert_int_equal(index_in(&p->cumulative, p->n), before);
    for (; t < p->tokens; t++) {
        if (wanted & 1)
            assert_int_equal(index_in(&p->positions, t), 0);
        if (wanted & 2)
            assert_int_equal(index_in(&p->slots, t), -1);
    }
    if (!(wanted & 1))
        assert_all(&p->positions, -1);
    if (!(wanted & 4))
        assert_all(&p->cumulative, -1);
    if (!(wanted & 8))
        assert_all(&p->lens, -1);
}

static void test_generated(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < PROBLEMS; i++) {
        char why[200];
        rng r = rng_stream(17, i);
        problem *p = make(&r, i % 3 ? rng_range(&r, 0, 700) : 0);
        const unsigned wanted = i % 2 ? (unsigned)rng_range(&r, 0, 15) : 15;
        scene_seal(&p->scene);
        assert_ok(run(p, false, wanted), &diag);
        if (!scene_intact(&p->scene, why, sizeof why))
            fail_msg("problem %d: %s", (int)i, why);
        check(p, wanted);
        end(p);
    }
}

static void test_lengths_in_place(void **state)
{
    (void)state;
    rng r = rng_stream(18, 1);
    problem *p = make(&r, 5);
    int64_t before[MAX_REQUESTS];
    for (int64_t i = 0; i < p->n; i++)
        before[i] = index_in(&p->cached, i);
    scene_seal(&p->scene);
    assert_ok(run(p, true, 7), &diag);
    assert_true(p->n > 1);
    for (int64_t i = 0; i < p->n; i++) {
        assert_int_equal(index_in(&p->cached, i), before[i] + index_in(&p->fresh, i));
        put(&p->cached, i, before[i]);
    }
    check(p, 7);
    end(p);
}

static void test_page_tables(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < PROBLEMS; i++) {
        char why[200];
        rng r = rng_stream(19, i);
        problem *p = make(&r, 0);
        mla_tensor table = p->table, rows = p->rows_of, out = p->pages;
        scene_seal(&p->scene);
        scene_reset(&p->scene);
        SCENE_PLACE(&p->scene, &table, &rows, &out);
        assert_ok(mla_enqueue_page_table(ctx, scene_device() ? device_stream(scene_device()) : NULL,
                                         table, rows, out, &diag),
                  &diag);
        scene_fetch(&p->scene);
        if (!scene_intact(&p->scene, why, sizeof why))
            fail_msg("problem %d: %s", (int)i, why);
        for (int64_t k = 0; k < p->n; k++)
            for (int64_t c = 0; c < p->pages.shape[1]; c++) {
                const int64_t row = index_in(&p->rows_of, k);
                const int32_t *pages = (const int32_t *)p->table.data + row * p->table.stride[0];
                assert_int_equal(((int32_t *)p->pages.data)[k * p->pages.stride[0] + c],
                                 c < p->columns ? pages[c] : 0);
            }
        end(p);
    }
}

/* What the CPU refuses and a GPU clamps. */
static void test_bad_values(void **state)
{
    (void)state;
    const bool is_cuda = scene_device() != NULL;
    rng r = rng_stream(20, 3);
    problem *p = make(&r, 40);
    assert_true(p->n > 3 && p->slots.shape[0] == p->sum + 40);
    put(&p->cached, 0, -5);
    put(&p->fresh, 0, 2);
    put(&p->fresh, 1, -3);
    put(&p->rows_of, 2, p->rows);
    put(&p->fresh, 2, 2);
    put(&p->cached, 3, p->columns * p->page_size - 1);
    put(&p->fresh, 3, 2);
    scene_seal(&p->scene);
    const mla_status status = run(p, false, 15);
    if (!is_cuda) {
        char why[200];
        assert_int_equal(status, MLA_ERROR_CAPACITY);
        assert_true(scene_untouched(&p->scene, why, sizeof why));
        end(p);
        return;
    }
    assert_ok(status, &diag);
    assert_int_equal(index_in(&p->positions, 0), 0);
    assert_int_equal(index_in(&p->positions, 1), 1);
    assert_int_equal(index_in(&p->cumulative, 1), 2);
    assert_int_equal(index_in(&p->cumulative, 2), 2); /* -3 new tokens are none */
    assert_int_equal(index_in(&p->slots, 2), -1);     /* no such row */
    assert_int_equal(index_in(&p->slots, 3), -1);
    assert_int_equal(index_in(&p->positions, 5), p->columns * p->page_size);
    assert_int_equal(index_in(&p->slots, 5), -1); /* past the table */
    end(p);
    r = rng_stream(21, 3);
    p = make(&r, -7);
    assert_true(p->sum > 7);
    scene_seal(&p->scene);
    assert_ok(run(p, false, 15), &diag);
    check(p, 15);
    end(p);
}

static void test_refusals(void **state)
{
    (void)state;
    int32_t table[2][3] = {{1, 2, 3}, {0, 0, 0}}, one[2] = {0, 1}, lens[2] = {2, 1};
    int32_t out[4] = {7, 7, 7, 7};
    const mla_tensor t = mla_tensor_2d(table, MLA_FORMAT_I32, 2, 3);
    const mla_tensor v = mla_tensor_1d(one, MLA_FORMAT_I32, 2);
    const mla_tensor l = mla_tensor_1d(lens, MLA_FORMAT_I32, 2);
    const mla_tensor o = mla_tensor_1d(out, MLA_FORMAT_I32, 3);
#define CALL(table, cached, fresh, page_size, positions, slots, seq_lens, cumulative)              \
    mla_enqueue_positions_and_slots(ctx, NULL, table, v, cached, fresh, page_size, positions,      \
                                    slots, seq_lens, cumulative, &diag)
    assert_fails(CALL(t, l, l, 0, o, none, none, none), MLA_ERROR_ARGUMENT, &diag, "page_size 0");
    assert_fails(CALL(t, o, l, 4, o, none, none, none), MLA_ERROR_SHAPE, &diag, "cached_lens");
    assert_fails(CALL(t, l, o, 4, o, none, none, none), MLA_ERROR_SHAPE, &diag, "new_lens");
    assert_fails(CALL(t, l, l, 4, o, v, none, none), MLA_ERROR_SHAPE, &diag, "slots");
    assert_fails(CALL(t, l, l, 4, none, none, o, none), MLA_ERROR_SHAPE, &diag, "seq_lens");
    assert_fails(CALL(t, l, l, 4, none, none, none, v), MLA_ERROR_SHAPE, &diag, "cu_seqlens_q");
    assert_fails(CALL(t, mla_tensor_on(l, MLA_DEVICE_CUDA, 0), l, 4, o, none, none, none),
                 MLA_ERROR_DEVICE, &diag, "cached_lens is on device_type");
    assert_fails(CALL(mla_tensor_on(t, MLA_DEVICE_CUDA, 99), l, l, 4, o, none, none, none),
                 MLA_ERROR_DEVICE, &diag, "req_pool_indices is on device_type");
    assert_fails(CALL(t, l, l, 4, v, none, none, none), MLA_ERROR_SHAPE, &diag, "add up to 3");
    assert_int_equal(out[0], 7);
    assert_fails(
        mla_enqueue_page_table(ctx, NULL, t, v, mla_tensor_2d(out, MLA_FORMAT_I32, 1, 3), &diag),
        MLA_ERROR_SHAPE, &diag, "req_pool_indices");
    assert_fails(mla_enqueue_page_table(
                     ctx, NULL, t, v,
                     mla_tensor_on(mla_tensor_2d(out, MLA_FORMAT_I32, 2, 2), MLA_DEVICE_CUDA, 0),
                     &diag),
                 MLA_ERROR_DEVICE, &diag, "out is on device_type");
#undef CALL
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_generated), cmocka_unit_test(test_lengths_in_place),
        cmocka_unit_test(test_page_tables), cmocka_unit_test(test_bad_values),
        cmocka_unit_test(test_refusals)};
    operator_take_device(&argc, argv);
    ctx = operator_context(1);
    const int failed = cmocka_run_group_tests_name("enqueue", tests, NULL, NULL);
    mla_context_destroy(ctx);
    return failed;
}
