/*
 * Which pages each request has: i32 [max_requests + 1, max_pages], entry 0 = unset, and how many
 * are set. The last row belongs to no request; padded rows of a captured batch point at it and
 * read page 0. Rows are filled from the left and never overflow: a request that would pass
 * max_pages is an error, since a clamped table makes a request read or overwrite pages of its own
 * past.
 *
 * reserve makes the rows of coming tokens writable. Pages that the request owns and is about to
 * write may be shared with others (a common prefix); those are replaced by fresh ones. Only the
 * page of row `length` holds live rows of this request, so only its first length % page_size rows
 * are copied.
 *
 * Called by engines and by the model runner.
 */
#include "cache/cache.h"
#include <stdlib.h>

struct mla_req_to_page {
    int32_t max_requests;
    int32_t max_pages;
    int32_t *pages; /* [max_requests + 1, max_pages] */
    int32_t *count; /* [max_requests] */
};

mla_status mla_req_to_page_create(int32_t max_requests, int32_t max_pages, mla_req_to_page **out,
                                  mla_diag *diag)
{
    if (out == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "out is NULL: give a place for the table");
    if (max_requests < 1 || max_pages < 1 || max_requests == INT32_MAX)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "max_requests %d and max_pages %d: both are at least 1", max_requests,
                         max_pages);
    uint64_t cells = ((uint64_t)max_requests + 1) * (uint64_t)max_pages; /* below 2^62 */
    mla_req_to_page *table = calloc(1, sizeof *table);
    if (table != NULL) {
        table->max_requests = max_requests;
        table->max_pages = max_pages;
        if (cells <= SIZE_MAX / sizeof *table->pages)
            table->pages = calloc((size_t)cells, sizeof *table->pages);
        table->count = calloc((size_t)max_requests, sizeof *table->count);
    }
    if (table == NULL || table->pages == NULL || table->count == NULL) {
        mla_req_to_page_destroy(table);
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY,
                         "no memory for a table of %d requests with %d pages each", max_requests,
                         max_pages);
    }
    *out = table;
    return MLA_OK;
}

void mla_req_to_page_destroy(mla_req_to_page *table)
{
    if (table == NULL)
        return;
    free(table->pages);
    free(table->count);
    free(table);
}

mla_tensor mla_req_to_page_tensor(const mla_req_to_page *table)
{
    if (table == NULL)
        return mla_tensor_make(NULL, MLA_FORMAT_I32, 0, NULL);
    return mla_tensor_2d(table->pages, MLA_FORMAT_I32, (int64_t)table->max_requests + 1,
                         table->max_pages);
}

int32_t mla_req_to_page_count(const mla_req_to_page *table, int32_t req)
{
    if (table == NULL || req < 0 || req >= table->max_requests)
        return -1;
    return table->count[req];
}

static int32_t *row_of(mla_req_to_page *table, int32_t req)
{
    return table->pages + (int64_t)req * table->max_pages;
}

static mla_status check_request(const mla_req_to_page *table, int32_t req, mla_diag *diag)
{
    if (table == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "table is NULL: give one");
    if (req < 0 || req >= table->max_requests)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "req %d: the table has requests 0 to %d", req,
                         table->max_requests - 1);
    return MLA_OK;
}

static mla_status over_capacity(const mla_req_to_page *table, int32_t req, int64_t wanted,
                                mla_diag *diag)
{
    return mlai_fail(diag, MLA_ERROR_CAPACITY,
                     "request %d would have %lld pages: the table holds max_pages %d a request",
                     req, (long long)wanted, table->max_pages);
}

mla_status mla_req_to_page_append(mla_req_to_page *table, int32_t req, int32_t n,
                                  const int32_t *ids, mla_diag *diag)
{
    MLAI_TRY(check_request(table, req, diag));
    if (n < 0 || (n > 0 && ids == NULL))
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "n is %d and ids is %s: give n >= 0 ids", n,
                         ids == NULL ? "NULL" : "set");
    if (n > table->max_pages - table->count[req])
        return over_capacity(table, req, (int64_t)table->count[req] + n, diag);
    for (int32_t i = 0; i < n; i++)
        if (ids[i] < 1)
            return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                             "ids[%d] is %d: pages are numbered from 1, page 0 is reserved", i,
                             ids[i]);
    if (n > 0)
        memcpy(row_of(table, req) + table->count[req], ids, (size_t)n * sizeof *ids);
    table->count[req] += n;
    return MLA_OK;
}

/* The request's pages and the lengths of a call, checked together. */
static mla_status check_lengths(const mla_req_to_page *table, int32_t req, int32_t page_size,
                                int64_t length, int64_t new_tokens, mla_diag *diag)
{
    MLAI_TRY(check_request(table, req, diag));
    if (page_size < 1)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "page_size %d: at least 1 token is needed",
                         page_size);
    if (length < 0 || new_tokens < 0 || length > INT64_MAX - new_tokens)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "length %lld and new_tokens %lld: both are at least 0, their sum fits 64 "
                         "bits",
                         (long long)length, (long long)new_tokens);
    if (mlai_ceil_div(length, page_size) > table->count[req])
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "request %d has %d pages of %d tokens, less than its length %lld: append "
                         "the pages of its rows first",
                         req, table->count[req], page_size, (long long)length);
    return MLA_OK;
}

static mla_status check_pools(const mla_page_allocator *allocator, mla_kv_pool *const *pools,
                              int32_t n_pools, int32_t page_size, mla_diag *diag)
{
    if (allocator == NULL || n_pools < 0 || (n_pools > 0 && pools == NULL))
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "allocator is %s, n_pools %d and pools %s: give an allocator and n_pools "
                         ">= 0 pools",
                         allocator == NULL ? "NULL" : "set", n_pools,
                         pools == NULL ? "NULL" : "set");
    for (int32_t i = 0; i < n_pools; i++) {
        const mla_kv_pool_config *c = mla_kv_pool_get_config(pools[i]);
        if (c == NULL)
            return mlai_fail(diag, MLA_ERROR_ARGUMENT, "pools[%d] is NULL: give a pool", i);
        if (c->page_size != page_size || c->num_pages < mlai_page_allocator_num_pages(allocator))
            return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                             "pools[%d] has %lld pages of %d tokens: %lld or more of %d are needed",
                             i, (long long)c->num_pages, c->page_size,
                             (long long)mlai_page_allocator_num_pages(allocator), page_size);
    }
    return MLA_OK;
}

mla_status mla_req_to_page_reserve(mla_req_to_page *table, mla_page_allocator *allocator,
                                   mla_kv_pool *const *pools, int32_t n_pools, int32_t req,
                                   int32_t page_size, int64_t length, int64_t new_tokens,
                                   mla_diag *diag)
{
    MLAI_TRY(check_lengths(table, req, page_size, length, new_tokens, diag));
    MLAI_TRY(check_pools(allocator, pools, n_pools, page_size, diag));
    if (new_tokens == 0)
        return MLA_OK;

    /* Pages first .. end - 1 hold the new rows; those below `owned` are there and may be shared. */
    int64_t first = length / page_size;
    int64_t end = mlai_ceil_div(length + new_tokens, page_size);
    int64_t owned = table->count[req];
    if (end > table->max_pages)
        return over_capacity(table, req, end, diag);
    int32_t *row = row_of(table, req);
    int64_t fresh = mlai_max_i64(end - owned, 0);
    for (int64_t page = first; page < mlai_min_i64(end, owned); page++) {
        int32_t refs = mla_page_allocator_ref_count(allocator, row[page]);
        if (refs < 1)
            return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                             "page %d of request %d is %s in this allocator", row[page], req,
                             refs == 0 ? "free" : "out of range");
        fresh += refs > 1;
    }
    if (fresh > mla_page_allocator_free_count(allocator))
        return mlai_fail(diag, MLA_ERROR_OUT_OF_PAGES,
                         "request %d needs %lld pages and %lld are free: release some or wait", req,
                         (long long)fresh, (long long)mla_page_allocator_free_count(allocator));

    /* From here on nothing but a device can fail: the pages are free and the shared ones in use. */
    for (int64_t page = first; page < mlai_min_i64(end, owned); page++) {
        if (mla_page_allocator_ref_count(allocator, row[page]) == 1)
            continue;
        int32_t shared = row[page], own = 0;
        MLAI_TRY(mla_page_allocator_alloc(allocator, 1, &own, diag));
        int32_t live_rows = page == first ? (int32_t)(length % page_size) : 0;
        for (int32_t i = 0; i < n_pools; i++)
            MLAI_TRY(mlai_kv_pool_copy_page_rows(pools[i], own, shared, live_rows, diag));
        MLAI_TRY(mla_page_allocator_release(allocator, 1, &shared, diag));
        row[page] = own;
    }
    if (end > owned) {
        MLAI_TRY(mla_page_allocator_alloc(allocator, end - owned, row + owned, diag));
        table->count[req] = (int32_t)end;
    }
    return MLA_OK;
}

mla_status mla_req_to_page_truncate(mla_req_to_page *table, mla_page_allocator *allocator,
                                    int32_t req, int32_t page_size, int64_t length, mla_diag *diag)
{
    MLAI_TRY(check_lengths(table, req, page_size, length, 0, diag));
    int32_t keep = (int32_t)mlai_ceil_div(length, page_size);
    int32_t drop = table->count[req] - keep;
    int32_t *row = row_of(table, req);
    if (allocator != NULL)
        MLAI_TRY(mla_page_allocator_release(allocator, drop, row + keep, diag));
    memset(row + keep, 0, (size_t)drop * sizeof *row);
    table->count[req] = keep;
    return MLA_OK;
}
