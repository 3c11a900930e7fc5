/*
 * Page allocator and request-to-page table: reference counts, all or nothing, lowest id first, copy
 * on write of shared pages, overflow as an error.
 */
#include "statuses.h"
#include <mla/cache.h>

static mla_diag diag;

static mla_page_allocator *make_allocator(int64_t num_pages)
{
    mla_page_allocator *a = NULL;
    assert_ok(mla_page_allocator_create(num_pages, &a, &diag), &diag);
    return a;
}

static void test_lowest_first(void **state)
{
    (void)state;
    mla_page_allocator *a = make_allocator(200);
    int32_t ids[200];
    assert_int_equal(mla_page_allocator_free_count(a), 200);
    assert_ok(mla_page_allocator_alloc(a, 200, ids, &diag), &diag);
    for (int32_t i = 0; i < 200; i++)
        assert_int_equal(ids[i], i + 1); /* page 0 is never handed out */
    assert_int_equal(mla_page_allocator_free_count(a), 0);
    int32_t back[] = {150, 3, 64, 63, 128};
    assert_ok(mla_page_allocator_release(a, 5, back, &diag), &diag);
    int32_t again[5], want[] = {3, 63, 64, 128, 150};
    assert_ok(mla_page_allocator_alloc(a, 5, again, &diag), &diag);
    assert_memory_equal(again, want, sizeof want);
    assert_ok(mla_page_allocator_alloc(a, 0, NULL, &diag), &diag);
    mla_page_allocator_destroy(a);
    mla_page_allocator_destroy(NULL);
}

static void test_all_or_nothing(void **state)
{
    (void)state;
    mla_page_allocator *a = make_allocator(4);
    int32_t ids[5] = {-7, -7, -7, -7, -7};
    assert_fails(mla_page_allocator_alloc(a, 5, ids, &diag), MLA_ERROR_OUT_OF_PAGES, &diag,
                 "5 pages are wanted and 4 of 4 are free");
    assert_int_equal(ids[0], -7);
    assert_int_equal(mla_page_allocator_free_count(a), 4);
    assert_ok(mla_page_allocator_alloc(a, 3, ids, &diag), &diag);

    int32_t with_free[] = {1, 2, 4}, with_zero[] = {1, 0}, too_often[] = {2, 1, 2};
    assert_fails(mla_page_allocator_retain(a, 3, with_free, &diag), MLA_ERROR_ARGUMENT, &diag,
                 "ids[2] is page 4, which is free");
    assert_fails(mla_page_allocator_retain(a, 2, with_zero, &diag), MLA_ERROR_ARGUMENT, &diag,
                 "ids[1] is 0");
    assert_fails(mla_page_allocator_release(a, 3, too_often, &diag), MLA_ERROR_ARGUMENT, &diag,
                 "ids[2] is page 2");
    assert_fails(mla_page_allocator_release(a, 3, with_free, &diag), MLA_ERROR_ARGUMENT, &diag,
                 "page 4");
    for (int32_t id = 1; id <= 3; id++)
        assert_int_equal(mla_page_allocator_ref_count(a, id), 1);
    assert_int_equal(mla_page_allocator_free_count(a), 1);
    assert_int_equal(mla_page_allocator_ref_count(a, 4), 0);
    assert_int_equal(mla_page_allocator_ref_count(a, 5), -1);
    assert_int_equal(mla_page_allocator_ref_count(a, 0), -1);
    assert_fails(mla_page_allocator_alloc(a, -1, ids, &diag), MLA_ERROR_ARGUMENT, &diag, "-1");
    assert_fails(mla_page_allocator_alloc(a, 1, NULL, &diag), MLA_ERROR_ARGUMENT, &diag, "NULL");
    mla_page_allocator_destroy(a);
}

static void test_references(void **state)
{
    (void)state;
    mla_page_allocator *a = make_allocator(3);
    int32_t ids[3], twice[] = {2, 2};
    assert_ok(mla_page_allocator_alloc(a, 3, ids, &diag), &diag);
    assert_ok(mla_page_allocator_retain(a, 2, twice, &diag), &diag);
    assert_int_equal(mla_page_allocator_ref_count(a, 2), 3);
    assert_ok(mla_page_allocator_release(a, 2, twice, &diag), &diag);
    assert_int_equal(mla_page_allocator_ref_count(a, 2), 1);
    assert_int_equal(mla_page_allocator_free_count(a), 0);
    assert_ok(mla_page_allocator_retain(a, 1, twice, &diag), &diag);
    assert_ok(mla_page_allocator_release(a, 2, twice, &diag), &diag); /* freed once, not twice */
    assert_int_equal(mla_page_allocator_free_count(a), 1);
    assert_fails(mla_page_allocator_create(0, &a, &diag), MLA_ERROR_ARGUMENT, &diag, "num_pages 0");
    mla_page_allocator_destroy(a);
}

/* ---- the table ------------------------------------------------------------------------------- */

static mla_req_to_page *make_table(int32_t max_requests, int32_t max_pages)
{
    mla_req_to_page *t = NULL;
    assert_ok(mla_req_to_page_create(max_requests, max_pages, &t, &diag), &diag);
    return t;
}

static int32_t cell(const mla_req_to_page *table, int32_t req, int32_t column)
{
    mla_tensor t = mla_req_to_page_tensor(table);
    return ((const int32_t *)t.data)[req * t.stride[0] + column];
}

static void test_table(void **state)
{
    (void)state;
    mla_req_to_page *t = make_table(2, 3);
    mla_tensor view = mla_req_to_page_tensor(t);
    assert_int_equal(view.shape[0], 3); /* the sentinel row comes on top */
    assert_int_equal(view.shape[1], 3);
    int32_t ids[] = {5, 6, 7}, zero[] = {0};
    assert_ok(mla_req_to_page_append(t, 1, 2, ids, &diag), &diag);
    assert_fails(mla_req_to_page_append(t, 1, 2, ids, &diag), MLA_ERROR_CAPACITY, &diag,
                 "request 1 would have 4 pages");
    assert_int_equal(mla_req_to_page_count(t, 1), 2);
    assert_int_equal(cell(t, 1, 2), 0);
    assert_ok(mla_req_to_page_append(t, 1, 1, ids + 2, &diag), &diag);
    assert_int_equal(cell(t, 1, 2), 7);
    assert_int_equal(mla_req_to_page_count(t, 0), 0);
    assert_int_equal(mla_req_to_page_count(t, 2), -1);
    assert_fails(mla_req_to_page_append(t, 2, 1, ids, &diag), MLA_ERROR_ARGUMENT, &diag, "req 2");
    assert_fails(mla_req_to_page_append(t, 0, 1, zero, &diag), MLA_ERROR_ARGUMENT, &diag,
                 "page 0 is reserved");
    for (int32_t column = 0; column < 3; column++)
        assert_int_equal(cell(t, 2, column), 0);
    /* Truncation without an allocator only forgets. */
    assert_ok(mla_req_to_page_truncate(t, NULL, 1, 4, 5, &diag), &diag);
    assert_int_equal(mla_req_to_page_count(t, 1), 2);
    assert_int_equal(cell(t, 1, 2), 0);
    assert_fails(mla_req_to_page_truncate(t, NULL, 1, 4, 9, &diag), MLA_ERROR_ARGUMENT, &diag,
                 "length 9");
    mla_req_to_page_destroy(t);
    mla_req_to_page_destroy(NULL);
    assert_fails(mla_req_to_page_create(0, 3, &t, &diag), MLA_ERROR_ARGUMENT, &diag,
                 "max_requests 0");
}

static void test_reserve_grows(void **state)
{
    (void)state;
    mla_page_allocator *a = make_allocator(7);
    mla_req_to_page *t = make_table(2, 4);
    assert_ok(mla_req_to_page_reserve(t, a, NULL, 0, 0, 4, 0, 5, &diag), &diag);
    assert_int_equal(mla_req_to_page_count(t, 0), 2);
    assert_ok(mla_req_to_page_reserve(t, a, NULL, 0, 0, 4, 5, 3, &diag), &diag);
    assert_int_equal(mla_req_to_page_count(t, 0), 2); /* rows 5..7 fit the second page */
    assert_ok(mla_req_to_page_reserve(t, a, NULL, 0, 0, 4, 8, 1, &diag), &diag);
    assert_int_equal(mla_req_to_page_count(t, 0), 3);
    assert_int_equal(cell(t, 0, 2), 3);
    assert_ok(mla_req_to_page_reserve(t, a, NULL, 0, 0, 4, 9, 0, &diag), &diag);
    assert_fails(mla_req_to_page_reserve(t, a, NULL, 0, 0, 4, 9, 8, &diag), MLA_ERROR_CAPACITY,
                 &diag, "5 pages");
    assert_fails(mla_req_to_page_reserve(t, a, NULL, 0, 0, 4, 13, 1, &diag), MLA_ERROR_ARGUMENT,
                 &diag, "length 13");
    assert_ok(mla_req_to_page_reserve(t, a, NULL, 0, 1, 4, 0, 16, &diag), &diag);
    assert_fails(mla_req_to_page_reserve(t, a, NULL, 0, 0, 4, 9, 7, &diag), MLA_ERROR_OUT_OF_PAGES,
                 &diag, "needs 1 pages and 0 are free");
    assert_int_equal(mla_req_to_page_count(t, 0), 3);
    mla_page_allocator_destroy(a);
    mla_req_to_page_destroy(t);
}

static void test_truncate_releases(void **state)
{
    (void)state;
    mla_page_allocator *a = make_allocator(4);
    mla_req_to_page *t = make_table(1, 4);
    assert_ok(mla_req_to_page_reserve(t, a, NULL, 0, 0, 4, 0, 16, &diag), &diag);
    assert_int_equal(mla_page_allocator_free_count(a), 0);
    assert_ok(mla_req_to_page_truncate(t, a, 0, 4, 5, &diag), &diag);
    assert_int_equal(mla_page_allocator_free_count(a), 2);
    assert_int_equal(mla_req_to_page_count(t, 0), 2);
    assert_int_equal(cell(t, 0, 2), 0);
    assert_ok(mla_req_to_page_truncate(t, a, 0, 4, 0, &diag), &diag);
    assert_int_equal(mla_page_allocator_free_count(a), 4);
    mla_page_allocator_destroy(a);
    mla_req_to_page_destroy(t);
}

/* ---- copy on write --------------------------------------------------------------------------- */

typedef struct sharing {
    mla_context *ctx;
    mla_kv_pool *pools[2];
    mla_page_allocator *allocator;
    mla_req_to_page *table;
} sharing;

/* Value of pool p, layer l, slot s: one float a row. */
static float *row_of(mla_kv_pool *pool, int32_t layer, int64_t slot)
{
    mla_tensor t;
    assert_ok(mla_kv_pool_get_key_buffer(pool, layer, &t, &diag), &diag);
    return (float *)t.data + slot;
}

static sharing make_sharing(int64_t num_pages)
{
    sharing s = {0};
    assert_ok(mla_context_create(NULL, &s.ctx, &diag), &diag);
    mla_kv_pool_config c = MLA_KV_POOL_CONFIG_INIT;
    c.num_layers = 2;
    c.num_pages = num_pages;
    c.page_size = 4;
    c.format = MLA_FORMAT_F32;
    c.kv_lora_rank = 1;
    for (int p = 0; p < 2; p++) {
        assert_ok(mla_kv_pool_create(s.ctx, &c, &s.pools[p], &diag), &diag);
        for (int32_t layer = 0; layer < 2; layer++)
            for (int64_t slot = 0; slot < (num_pages + 1) * 4; slot++)
                *row_of(s.pools[p], layer, slot) = (float)(p * 1000 + layer * 100 + slot);
    }
    s.allocator = make_allocator(num_pages);
    s.table = make_table(3, 4);
    return s;
}

static void end_sharing(sharing *s)
{
    for (int p = 0; p < 2; p++)
        mla_kv_pool_destroy(s->pools[p]);
    mla_page_allocator_destroy(s->allocator);
    mla_req_to_page_destroy(s->table);
    mla_context_destroy(s->ctx);
}

static void test_copy_on_write(void **state)
{
    (void)state;
    sharing s = make_sharing(6);
    int32_t shared[2];
    /* Requests 0 and 1 share 6 tokens: pages 1 and 2, the second holding two live rows. */
    assert_ok(mla_req_to_page_reserve(s.table, s.allocator, s.pools, 2, 0, 4, 0, 6, &diag), &diag);
    shared[0] = cell(s.table, 0, 0);
    shared[1] = cell(s.table, 0, 1);
    assert_ok(mla_page_allocator_retain(s.allocator, 2, shared, &diag), &diag);
    assert_ok(mla_req_to_page_append(s.table, 1, 2, shared, &diag), &diag);

    assert_ok(mla_req_to_page_reserve(s.table, s.allocator, s.pools, 2, 1, 4, 6, 3, &diag), &diag);
    assert_int_equal(cell(s.table, 1, 0), 1); /* full and not written: stays shared */
    assert_int_equal(cell(s.table, 1, 1), 3); /* its own copy */
    assert_int_equal(cell(s.table, 1, 2), 4); /* row 8 */
    assert_int_equal(cell(s.table, 0, 1), 2);
    assert_int_equal(mla_page_allocator_ref_count(s.allocator, 1), 2);
    assert_int_equal(mla_page_allocator_ref_count(s.allocator, 2), 1);
    assert_int_equal(mla_page_allocator_ref_count(s.allocator, 3), 1);
    for (int p = 0; p < 2; p++)
        for (int32_t layer = 0; layer < 2; layer++) {
            float base = (float)(p * 1000 + layer * 100);
            assert_true(*row_of(s.pools[p], layer, 12) == base + 8); /* live rows came along */
            assert_true(*row_of(s.pools[p], layer, 13) == base + 9);
            assert_true(*row_of(s.pools[p], layer, 14) == base + 14); /* others did not */
            assert_true(*row_of(s.pools[p], layer, 8) == base + 8);
        }
    /* Request 0 is alone on its page now, and writes it in place. */
    assert_ok(mla_req_to_page_reserve(s.table, s.allocator, s.pools, 2, 0, 4, 6, 2, &diag), &diag);
    assert_int_equal(cell(s.table, 0, 1), 2);
    end_sharing(&s);
}

static void test_copy_on_write_edges(void **state)
{
    (void)state;
    sharing s = make_sharing(5);
    int32_t shared[2];
    assert_ok(mla_req_to_page_reserve(s.table, s.allocator, s.pools, 2, 0, 4, 0, 8, &diag), &diag);
    shared[0] = cell(s.table, 0, 0);
    shared[1] = cell(s.table, 0, 1);
    assert_ok(mla_page_allocator_retain(s.allocator, 2, shared, &diag), &diag);
    assert_ok(mla_req_to_page_append(s.table, 1, 2, shared, &diag), &diag);
    /* The prefix ends at a page's end: nothing to copy, the next page is fresh. */
    assert_ok(mla_req_to_page_reserve(s.table, s.allocator, s.pools, 2, 1, 4, 8, 1, &diag), &diag);
    assert_int_equal(cell(s.table, 1, 1), 2);
    assert_int_equal(cell(s.table, 1, 2), 3);
    /* Rewinding into shared pages (a rejected draft) replaces both of them. */
    assert_ok(mla_req_to_page_truncate(s.table, s.allocator, 1, 4, 8, &diag), &diag);
    assert_ok(mla_req_to_page_reserve(s.table, s.allocator, s.pools, 2, 1, 4, 3, 2, &diag), &diag);
    assert_int_equal(cell(s.table, 1, 0), 3);
    assert_int_equal(cell(s.table, 1, 1), 4);
    assert_true(*row_of(s.pools[0], 0, 14) == 6.0f); /* row 2 of page 1 */
    assert_true(*row_of(s.pools[0], 0, 15) == 15.0f);
    assert_true(*row_of(s.pools[0], 0, 16) == 16.0f); /* no live row in the second page */
    assert_int_equal(mla_page_allocator_ref_count(s.allocator, 1), 1);

    /* Too few pages: nothing changes. One page is left, a copy and a new one are needed. */
    int32_t last = cell(s.table, 1, 1);
    assert_ok(mla_page_allocator_retain(s.allocator, 1, &last, &diag), &diag);
    assert_ok(mla_req_to_page_append(s.table, 2, 1, &last, &diag), &diag);
    assert_int_equal(mla_page_allocator_free_count(s.allocator), 1);
    assert_fails(mla_req_to_page_reserve(s.table, s.allocator, s.pools, 2, 2, 4, 2, 4, &diag),
                 MLA_ERROR_OUT_OF_PAGES, &diag, "needs 2 pages and 1 are free");
    assert_int_equal(cell(s.table, 2, 0), last);
    assert_int_equal(mla_req_to_page_count(s.table, 2), 1);
    assert_int_equal(mla_page_allocator_ref_count(s.allocator, last), 2);
    assert_int_equal(mla_page_allocator_free_count(s.allocator), 1);

    assert_fails(mla_req_to_page_reserve(s.table, s.allocator, s.pools, 2, 2, 8, 2, 4, &diag),
                 MLA_ERROR_ARGUMENT, &diag, "pools[0]");
    int32_t stray = 5; /* free in the allocator */
    assert_ok(mla_req_to_page_truncate(s.table, NULL, 2, 4, 0, &diag), &diag);
    assert_ok(mla_req_to_page_append(s.table, 2, 1, &stray, &diag), &diag);
    assert_fails(mla_req_to_page_reserve(s.table, s.allocator, s.pools, 2, 2, 4, 1, 1, &diag),
                 MLA_ERROR_ARGUMENT, &diag, "page 5 of request 2 is free");
    end_sharing(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lowest_first),  cmocka_unit_test(test_all_or_nothing),
        cmocka_unit_test(test_references),    cmocka_unit_test(test_table),
        cmocka_unit_test(test_reserve_grows), cmocka_unit_test(test_truncate_releases),
        cmocka_unit_test(test_copy_on_write), cmocka_unit_test(test_copy_on_write_edges),
    };
    return cmocka_run_group_tests_name("cache_pages", tests, NULL, NULL);
}
