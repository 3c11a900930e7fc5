/*
 * The pool's rows as bytes: move, clear, export, import, copy of a page's rows. Nothing here knows
 * formats; a row is row_bytes at mlai_kv_pool_row(layer, slot).
 *
 * Slots come from the host as i32 or i64 [n] and are all checked before the first byte is written.
 * A move stages one layer's rows, n * row_bytes, so that overlapping lists behave as if every
 * source had been read first.
 *
 * Rows that follow each other in the pool's memory go in one copy: a page of a packed pool is one.
 * A device copies on its default stream, and every function waits for its copies: none of this is
 * made for the path of a forward. Called by engines (compaction, swapping out, transfer) and by
 * copy on write.
 */
#include "cache/cache.h"
#include <stdlib.h>

/* Host or device memory to host or device memory; on a device enqueued on the default stream. */
static mla_status copy(const mla_kv_pool *pool, void *to, const void *from, uint64_t bytes,
                       mla_diag *diag)
{
    const mlai_device *d = &pool->device;
    if (d->runtime != NULL)
        return d->runtime->copy(d->handle, NULL, to, from, bytes, diag);
    memcpy(to, from, (size_t)bytes);
    return MLA_OK;
}

static mla_status wait(const mla_kv_pool *pool, mla_diag *diag)
{
    const mlai_device *d = &pool->device;
    return d->runtime != NULL ? d->runtime->wait(d->handle, NULL, diag) : MLA_OK;
}

/* What `bytes` rows of a move are staged in; NULL when there is no memory. */
static void *make_stage(const mla_kv_pool *pool, uint64_t bytes)
{
    const mlai_device *d = &pool->device;
    if (d->runtime != NULL)
        return d->runtime->alloc(d->handle, bytes);
    return bytes <= SIZE_MAX ? malloc((size_t)bytes) : NULL;
}

static void free_stage(const mla_kv_pool *pool, void *stage)
{
    const mlai_device *d = &pool->device;
    if (d->runtime != NULL)
        d->runtime->release(d->handle, stage);
    else
        free(stage);
}

mla_status mlai_check_host_indices(const mla_tensor *t, const char *name, uint32_t formats,
                                   int64_t least, mla_diag *diag)
{
    MLAI_TRY(mlai_check_tensor(t, name, formats, 1, 1, true, diag));
    if (t->device_type != MLA_DEVICE_CPU)
        return mlai_fail(diag, MLA_ERROR_DEVICE, "%s is on device_type %d: it is read on the host",
                         name, t->device_type);
    if (t->shape[0] < least)
        return mlai_fail(diag, MLA_ERROR_SHAPE, "%s has %lld entries: at least %lld are needed",
                         name, (long long)t->shape[0], (long long)least);
    return MLA_OK;
}

static mla_status check_slots(const mla_kv_pool *pool, const mla_tensor *slots, const char *name,
                              mla_diag *diag)
{
    MLAI_TRY(mlai_check_host_indices(slots, name, MLAI_INDICES, 0, diag));
    int64_t limit = mlai_kv_pool_slots(pool);
    for (int64_t i = 0; i < slots->shape[0]; i++) {
        int64_t slot = mlai_index_at(slots, i);
        if (slot < 0 || slot >= limit)
            return mlai_fail(diag, MLA_ERROR_CAPACITY,
                             "%s[%lld] is %lld: the pool has slots 0 to %lld", name, (long long)i,
                             (long long)slot, (long long)(limit - 1));
    }
    return MLA_OK;
}

static int compare_i64(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static mla_status check_distinct(const mla_tensor *slots, const char *name, mla_diag *diag)
{
    int64_t n = slots->shape[0];
    int64_t *sorted =
        (uint64_t)n > SIZE_MAX / sizeof *sorted ? NULL : malloc((size_t)n * sizeof *sorted);
    if (sorted == NULL)
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY, "no memory to check %lld slots of %s",
                         (long long)n, name);
    for (int64_t i = 0; i < n; i++)
        sorted[i] = mlai_index_at(slots, i);
    qsort(sorted, (size_t)n, sizeof *sorted, compare_i64);
    mla_status status = MLA_OK;
    for (int64_t i = 1; i < n && status == MLA_OK; i++)
        if (sorted[i] == sorted[i - 1])
            status = mlai_fail(diag, MLA_ERROR_ARGUMENT,
                               "%s lists slot %lld twice: a destination takes one row", name,
                               (long long)sorted[i]);
    free(sorted);
    return status;
}

/* How many of `most` rows from `slot` on lie in memory one behind the other, without gaps. */
static int64_t rows_in_one_run(const mla_kv_pool *pool, int64_t slot, int64_t most)
{
    const mla_kv_pool_config *c = &pool->config;
    if (c->row_stride_bytes != pool->row_bytes)
        return 1;
    if (c->page_stride_bytes == c->row_stride_bytes * (uint64_t)c->page_size)
        return most;
    return mlai_min_i64(most, c->page_size - slot % c->page_size);
}

/* Rows slots[..] of a layer to `out`, or, where that is NULL, from `in`: packed one behind the
 * other in list order. */
static mla_status copy_rows(const mla_kv_pool *pool, int32_t layer, const mla_tensor *slots,
                            uint8_t *out, const uint8_t *in, mla_diag *diag)
{
    const int64_t n = slots->shape[0];
    int64_t run = 0;
    for (int64_t i = 0; i < n; i += run) {
        const int64_t slot = mlai_index_at(slots, i);
        const int64_t most = rows_in_one_run(pool, slot, n - i);
        for (run = 1; run < most && mlai_index_at(slots, i + run) == slot + run;)
            run++;
        uint8_t *row = mlai_kv_pool_row(pool, layer, slot);
        const uint64_t at = (uint64_t)i * pool->row_bytes, bytes = (uint64_t)run * pool->row_bytes;
        MLAI_TRY(out ? copy(pool, out + at, row, bytes, diag)
                     : copy(pool, row, in + at, bytes, diag));
    }
    return MLA_OK;
}

mla_status mla_kv_pool_move_kv_cache(mla_kv_pool *pool, mla_tensor dst_slots, mla_tensor src_slots,
                                     mla_diag *diag)
{
    if (pool == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "pool is NULL: give one");
    MLAI_TRY(check_slots(pool, &dst_slots, "dst_slots", diag));
    MLAI_TRY(check_slots(pool, &src_slots, "src_slots", diag));
    int64_t n = dst_slots.shape[0];
    if (src_slots.shape[0] != n)
        return mlai_fail(diag, MLA_ERROR_SHAPE,
                         "dst_slots has %lld entries and src_slots %lld: one for each row",
                         (long long)n, (long long)src_slots.shape[0]);
    if (n == 0)
        return MLA_OK;
    MLAI_TRY(check_distinct(&dst_slots, "dst_slots", diag));

    uint64_t bytes, row_bytes = pool->row_bytes;
    uint8_t *stage = NULL;
    if (mlai_mul_u64((uint64_t)n, row_bytes, &bytes))
        stage = make_stage(pool, bytes);
    if (stage == NULL)
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY,
                         "no memory to move %lld rows of %llu bytes: move fewer at once",
                         (long long)n, (unsigned long long)row_bytes);
    mla_status status = MLA_OK;
    for (int32_t layer = 0; layer < pool->config.num_layers && status == MLA_OK; layer++) {
        status = copy_rows(pool, layer, &src_slots, stage, NULL, diag);
        if (status == MLA_OK)
            status = copy_rows(pool, layer, &dst_slots, NULL, stage, diag);
    }
    if (status == MLA_OK)
        status = wait(pool, diag);
    free_stage(pool, stage);
    return status;
}

/* Zeroes `rows` rows that follow each other at the row stride. */
static mla_status clear_rows(mla_kv_pool *pool, void *stream, uint8_t *row, uint64_t rows,
                             mla_diag *diag)
{
    const uint64_t stride = pool->config.row_stride_bytes;
    const mlai_device *d = &pool->device;
    if (d->runtime != NULL)
        return d->runtime->clear(d->handle, stream, row, stride, pool->row_bytes, rows, diag);
    if (stride == pool->row_bytes)
        memset(row, 0, (size_t)(pool->row_bytes * rows));
    else
        for (uint64_t i = 0; i < rows; i++)
            memset(row + i * stride, 0, pool->row_bytes);
    return MLA_OK;
}

mla_status mla_kv_pool_clear(mla_kv_pool *pool, void *stream, mla_diag *diag)
{
    if (pool == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "pool is NULL: give one");
    const mla_kv_pool_config *c = &pool->config;
    /* Pages that follow each other as their rows do are one run. */
    const bool is_run = c->page_stride_bytes == c->row_stride_bytes * (uint64_t)c->page_size;
    const int64_t step = is_run ? c->num_pages + 1 : 1;
    for (int32_t layer = 0; layer < c->num_layers; layer++)
        for (int64_t page = 0; page <= c->num_pages; page += step)
            MLAI_TRY(clear_rows(pool, stream, mlai_kv_pool_row(pool, layer, page * c->page_size),
                                (uint64_t)(step * c->page_size), diag));
    return MLA_OK;
}

static mla_status check_transfer(const mla_kv_pool *pool, int32_t layer_first, int32_t layer_count,
                                 const mla_tensor *slots, const void *host, uint64_t bytes,
                                 mla_diag *diag)
{
    if (pool == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "pool is NULL: give one");
    if (layer_first < 0 || layer_count < 0 || layer_first > pool->config.num_layers ||
        layer_count > pool->config.num_layers - layer_first)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "layer_first %d with layer_count %d: the pool has %d layers", layer_first,
                         layer_count, pool->config.num_layers);
    MLAI_TRY(check_slots(pool, slots, "slots", diag));
    uint64_t rows, want;
    if (!mlai_mul_u64((uint64_t)slots->shape[0], (uint64_t)layer_count, &rows) ||
        !mlai_mul_u64(rows, pool->row_bytes, &want))
        return mlai_fail(diag, MLA_ERROR_CAPACITY, "%lld rows in %d layers are over 64 bits",
                         (long long)slots->shape[0], layer_count);
    if (bytes != want)
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "bytes is %llu: %d layers x %lld rows x %llu bytes are %llu",
                         (unsigned long long)bytes, layer_count, (long long)slots->shape[0],
                         (unsigned long long)pool->row_bytes, (unsigned long long)want);
    if (host == NULL && want > 0)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "host is NULL: give %llu bytes",
                         (unsigned long long)want);
    return MLA_OK;
}

mla_status mla_kv_pool_export_rows(const mla_kv_pool *pool, int32_t layer_first,
                                   int32_t layer_count, mla_tensor slots, void *host,
                                   uint64_t bytes, mla_diag *diag)
{
    MLAI_TRY(check_transfer(pool, layer_first, layer_count, &slots, host, bytes, diag));
    if (bytes == 0)
        return MLA_OK;
    const uint64_t layer_bytes = (uint64_t)slots.shape[0] * pool->row_bytes;
    for (int32_t k = 0; k < layer_count; k++)
        MLAI_TRY(copy_rows(pool, layer_first + k, &slots,
                           (uint8_t *)host + (uint64_t)k * layer_bytes, NULL, diag));
    return wait(pool, diag);
}

mla_status mla_kv_pool_import_rows(mla_kv_pool *pool, int32_t layer_first, int32_t layer_count,
                                   mla_tensor slots, const void *host, uint64_t bytes,
                                   mla_diag *diag)
{
    MLAI_TRY(check_transfer(pool, layer_first, layer_count, &slots, host, bytes, diag));
    if (bytes == 0)
        return MLA_OK;
    const uint64_t layer_bytes = (uint64_t)slots.shape[0] * pool->row_bytes;
    for (int32_t k = 0; k < layer_count; k++)
        MLAI_TRY(copy_rows(pool, layer_first + k, &slots, NULL,
                           (const uint8_t *)host + (uint64_t)k * layer_bytes, diag));
    return wait(pool, diag);
}

mla_status mlai_kv_pool_copy_page_rows(mla_kv_pool *pool, int32_t dst, int32_t src, int32_t n_rows,
                                       mla_diag *diag)
{
    int64_t page_size = pool->config.page_size;
    const int64_t run = n_rows > 0 ? rows_in_one_run(pool, 0, n_rows) : 1;
    for (int32_t layer = 0; layer < pool->config.num_layers; layer++)
        for (int64_t i = 0; i < n_rows; i += run)
            MLAI_TRY(copy(pool, mlai_kv_pool_row(pool, layer, dst * page_size + i),
                          mlai_kv_pool_row(pool, layer, src * page_size + i),
                          (uint64_t)run * pool->row_bytes, diag));
    return wait(pool, diag);
}
