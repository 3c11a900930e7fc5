/*
 * From lengths to positions, write slots and batch page tables, on the host.
 *
 *   position = cached + i,  slot(position) = table[row, position / PS] * PS + position % PS
 *
 * Only the table entries of the positions asked for are read; entries past them may hold anything.
 * Everything is checked in a first pass, so that an error leaves the outputs as they were. Called
 * by engines once a step.
 */
#include "cache/cache.h"

mla_status mlai_check_request_rows(const mla_tensor *req_to_page,
                                   const mla_tensor *req_pool_indices, int64_t n, mla_diag *diag)
{
    MLAI_TRY(mlai_check_tensor(req_to_page, "req_to_page", MLAI_F(I32), 2, 2, true, diag));
    if (req_to_page->device_type != MLA_DEVICE_CPU)
        return mlai_fail(diag, MLA_ERROR_DEVICE,
                         "req_to_page is on device_type %d: it is read on the host",
                         req_to_page->device_type);
    for (int64_t i = 0; i < n; i++) {
        int64_t row = mlai_index_at(req_pool_indices, i);
        if (row < 0 || row >= req_to_page->shape[0])
            return mlai_fail(diag, MLA_ERROR_CAPACITY,
                             "req_pool_indices[%lld] is %lld: req_to_page has rows 0 to %lld",
                             (long long)i, (long long)row, (long long)(req_to_page->shape[0] - 1));
    }
    return MLA_OK;
}

static mla_status check_output(const mla_tensor *t, const char *name, uint32_t formats, int64_t n,
                               const char *meaning, mla_diag *diag)
{
    if (!mlai_present(t))
        return MLA_OK;
    MLAI_TRY(mlai_check_host_indices(t, name, formats, 0, diag));
    return mlai_check_extent(t, name, 0, n, meaning, diag);
}

/* The pages that request i writes: in the table, not negative, their slots within `slot_limit`. */
static mla_status check_request(const mla_tensor *table, const mla_tensor *req_pool_indices,
                                int64_t i, int64_t first, int64_t count, int64_t page_size,
                                int64_t slot_limit, mla_diag *diag)
{
    if (count == 0)
        return MLA_OK;
    int64_t last_column = (first + count - 1) / page_size;
    if (last_column >= table->shape[1])
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "request %lld reaches position %lld, page %lld of %lld tokens: "
                         "req_to_page has %lld columns",
                         (long long)i, (long long)(first + count - 1), (long long)last_column,
                         (long long)page_size, (long long)table->shape[1]);
    const int32_t *row = mlai_request_pages(table, req_pool_indices, i);
    for (int64_t column = first / page_size; column <= last_column; column++)
        if (row[column] < 0 || (row[column] + INT64_C(1)) * page_size - 1 > slot_limit)
            return mlai_fail(diag, MLA_ERROR_CAPACITY,
                             "request %lld has page %d at column %lld: %s", (long long)i,
                             row[column], (long long)column,
                             row[column] < 0 ? "page ids are not negative"
                                             : "its slots pass i32, give slots as i64");
    return MLA_OK;
}

mla_status mla_positions_and_slots(mla_tensor req_to_page, mla_tensor req_pool_indices,
                                   mla_tensor cached_lens, mla_tensor new_lens, int32_t page_size,
                                   mla_tensor positions, mla_tensor slots, mla_tensor seq_lens,
                                   mla_diag *diag)
{
    MLAI_TRY(mlai_check_host_indices(&req_pool_indices, "req_pool_indices", MLAI_INDICES, 0, diag));
    int64_t n = req_pool_indices.shape[0];
    MLAI_TRY(mlai_check_host_indices(&cached_lens, "cached_lens", MLAI_F(I32), 0, diag));
    MLAI_TRY(mlai_check_extent(&cached_lens, "cached_lens", 0, n, "one for each request", diag));
    MLAI_TRY(mlai_check_host_indices(&new_lens, "new_lens", MLAI_F(I32), 0, diag));
    MLAI_TRY(mlai_check_extent(&new_lens, "new_lens", 0, n, "one for each request", diag));
    if (page_size < 1)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "page_size %d: at least 1 token is needed",
                         page_size);
    MLAI_TRY(mlai_check_request_rows(&req_to_page, &req_pool_indices, n, diag));

    /* Slots that are not asked for need not fit anything. */
    int64_t slot_limit =
        mlai_present(&slots) && slots.format == MLA_FORMAT_I32 ? INT32_MAX : INT64_MAX;
    int64_t tokens = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t cached = mlai_index_at(&cached_lens, i), fresh = mlai_index_at(&new_lens, i);
        if (cached < 0 || fresh < 0 || cached + fresh > INT32_MAX)
            return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                             "request %lld has cached_lens %lld and new_lens %lld: both are at "
                             "least 0 and their sum fits i32",
                             (long long)i, (long long)cached, (long long)fresh);
        MLAI_TRY(check_request(&req_to_page, &req_pool_indices, i, cached, fresh, page_size,
                               slot_limit, diag));
        tokens += fresh;
    }
    MLAI_TRY(
        check_output(&positions, "positions", MLAI_INDICES, tokens, "the sum of new_lens", diag));
    MLAI_TRY(check_output(&slots, "slots", MLAI_INDICES, tokens, "the sum of new_lens", diag));
    MLAI_TRY(check_output(&seq_lens, "seq_lens", MLAI_F(I32), n, "one for each request", diag));

    int64_t t = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t cached = mlai_index_at(&cached_lens, i), fresh = mlai_index_at(&new_lens, i);
        const int32_t *row = mlai_request_pages(&req_to_page, &req_pool_indices, i);
        for (int64_t p = cached; p < cached + fresh; p++, t++) {
            if (mlai_present(&positions))
                mlai_store_index(&positions, t, p);
            if (mlai_present(&slots))
                mlai_store_index(&slots, t,
                                 row[p / page_size] * (int64_t)page_size + p % page_size);
        }
        if (mlai_present(&seq_lens))
            mlai_store_index(&seq_lens, i, cached + fresh);
    }
    return MLA_OK;
}

mla_status mla_build_page_table(mla_tensor req_to_page, mla_tensor req_pool_indices, mla_tensor out,
                                mla_diag *diag)
{
    MLAI_TRY(mlai_check_tensor(&out, "out", MLAI_F(I32), 2, 2, true, diag));
    if (out.device_type != MLA_DEVICE_CPU)
        return mlai_fail(diag, MLA_ERROR_DEVICE, "out is on device_type %d: it is filled here",
                         out.device_type);
    int64_t n = out.shape[0], width = out.shape[1];
    MLAI_TRY(mlai_check_host_indices(&req_pool_indices, "req_pool_indices", MLAI_INDICES, 0, diag));
    MLAI_TRY(
        mlai_check_extent(&req_pool_indices, "req_pool_indices", 0, n, "the rows of out", diag));
    MLAI_TRY(mlai_check_request_rows(&req_to_page, &req_pool_indices, n, diag));
    int64_t columns = mlai_min_i64(width, req_to_page.shape[1]);
    for (int64_t i = 0; i < n; i++) {
        int32_t *row = (int32_t *)out.data + i * out.stride[0];
        if (columns > 0)
            memcpy(row, mlai_request_pages(&req_to_page, &req_pool_indices, i),
                   (size_t)columns * sizeof *row);
        if (width > columns)
            memset(row + columns, 0, (size_t)(width - columns) * sizeof *row);
    }
    return MLA_OK;
}
