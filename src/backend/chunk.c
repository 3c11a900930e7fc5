/*
 * Prefix windows: how the extends' cached prefixes are cut for replay.
 *
 *   win = chunk_capacity / E (floor, not a multiple of the page size),  K = ceil(max prefix / win)
 *   window k of request i: positions [k * win, min((k + 1) * win, prefix_i)), none past its prefix
 *
 *   prefixes 256 512 768 1024, win 256:   k = 0  [####|####|####|####]
 *                                         k = 1  [    |####|####|####]
 *                                         k = 2  [    |    |####|####]
 *                                         k = 3  [    |    |    |####]
 *
 * A window holds at most chunk_capacity rows. Its slots are packed request-major, slot(p) =
 * table[row, p / PS] * PS + p % PS, as i32, or as i64 where a slot of this forward passes i32.
 * Every position occurs in one window, so all slots together are the sum of the prefixes.
 *
 * One block of memory holds all arrays and grows when a forward needs more than any before it:
 *   tensors [K] | slots [sum of prefixes] | lengths [K, E] | cumulative [K, E + 1] | maxima [K]
 */
#include "backend/backend.h"
#include "cache/cache.h"
#include <stdlib.h>

typedef struct window_layout {
    int64_t win;
    int64_t n_windows;
    int64_t n_slots;
    bool is_wide; /* i64 slots */
    uint64_t slots_at, lens_at, cum_at, max_at, bytes;
} window_layout;

/* Every live prefix page once: negative ids are refused, the largest decides the slots' width. */
static mla_status check_pages(const mla_backend *backend, int32_t num_extends,
                              const mla_tensor *req_pool_indices, const mla_tensor *req_to_page,
                              window_layout *layout, mla_diag *diag)
{
    int64_t page_size = backend->config.page_size;
    for (int32_t i = 0; i < num_extends; i++) {
        int64_t prefix = backend->extend_prefixes[i];
        const int32_t *row = mlai_request_pages(req_to_page, req_pool_indices, i);
        for (int64_t column = 0; column < mlai_ceil_div(prefix, page_size); column++) {
            if (row[column] < 0)
                return mlai_fail(
                    diag, MLA_ERROR_CAPACITY,
                    "request %d has page %d at column %lld of its prefix: page ids are "
                    "not negative",
                    i, row[column], (long long)column);
            if ((row[column] + INT64_C(1)) * page_size - 1 > INT32_MAX)
                layout->is_wide = true;
        }
        layout->n_slots += prefix;
    }
    return MLA_OK;
}

/* Offsets of the arrays; false when they do not fit 64 bits. */
static bool lay_out(window_layout *layout, int64_t num_extends)
{
    uint64_t k = (uint64_t)layout->n_windows, e = (uint64_t)num_extends, part;
    uint64_t slot_bytes = layout->is_wide ? sizeof(int64_t) : sizeof(int32_t);
    layout->slots_at = k * sizeof(mla_tensor);
    if (!mlai_mul_u64((uint64_t)layout->n_slots, slot_bytes, &part) ||
        !mlai_add_u64(layout->slots_at, part, &layout->lens_at) ||
        !mlai_mul_u64(k * sizeof(int32_t), e, &part) ||
        !mlai_add_u64(layout->lens_at, part, &layout->cum_at) ||
        !mlai_mul_u64(k * sizeof(int32_t), e + 1, &part) ||
        !mlai_add_u64(layout->cum_at, part, &layout->max_at) ||
        !mlai_add_u64(layout->max_at, k * sizeof(int32_t), &layout->bytes))
        return false;
    return layout->bytes <= SIZE_MAX;
}

static mla_status grow(mla_backend *backend, uint64_t bytes, mla_diag *diag)
{
    if (bytes <= backend->windows_bytes)
        return MLA_OK;
    void *memory = malloc((size_t)bytes);
    if (memory == NULL)
        return mlai_fail(
            diag, MLA_ERROR_OUT_OF_MEMORY,
            "no memory for prefix windows of %llu bytes: extend fewer requests at once",
            (unsigned long long)bytes);
    free(backend->windows);
    backend->windows = memory;
    backend->windows_bytes = bytes;
    return MLA_OK;
}

/* Slots of positions first .. first + count - 1 of one request. */
static void fill_slots(void *slots, bool is_wide, int64_t at, const int32_t *row, int64_t first,
                       int64_t count, int64_t page_size)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t position = first + i;
        int64_t slot = row[position / page_size] * page_size + position % page_size;
        if (is_wide)
            ((int64_t *)slots)[at + i] = slot;
        else
            ((int32_t *)slots)[at + i] = (int32_t)slot;
    }
}

static void fill(mla_backend *backend, const window_layout *layout, int32_t num_extends,
                 const mla_tensor *req_pool_indices, const mla_tensor *req_to_page)
{
    char *memory = backend->windows;
    mla_tensor *tensors = (mla_tensor *)(void *)memory;
    char *slots = memory + layout->slots_at;
    int32_t *lens = (int32_t *)(void *)(memory + layout->lens_at);
    int32_t *cum = (int32_t *)(void *)(memory + layout->cum_at);
    int32_t *maxima = (int32_t *)(void *)(memory + layout->max_at);
    int64_t slot_bytes = layout->is_wide ? (int64_t)sizeof(int64_t) : (int64_t)sizeof(int32_t);
    int32_t format = layout->is_wide ? MLA_FORMAT_I64 : MLA_FORMAT_I32;
    int64_t at = 0;
    for (int64_t k = 0; k < layout->n_windows; k++) {
        int64_t first = k * layout->win, start = at;
        cum[0] = 0;
        maxima[k] = 0;
        for (int32_t i = 0; i < num_extends; i++) {
            int64_t count = mlai_min_i64(layout->win, backend->extend_prefixes[i] - first);
            count = mlai_max_i64(count, 0);
            fill_slots(slots, layout->is_wide, at,
                       mlai_request_pages(req_to_page, req_pool_indices, i), first, count,
                       backend->config.page_size);
            at += count;
            lens[i] = (int32_t)count;
            cum[i + 1] = cum[i] + (int32_t)count;
            maxima[k] = lens[i] > maxima[k] ? lens[i] : maxima[k];
        }
        tensors[k] = mla_tensor_1d(slots + start * slot_bytes, format, at - start);
        lens += num_extends;
        cum += num_extends + 1;
    }
}

mla_status mlai_backend_build_windows(mla_backend *backend, int32_t num_extends,
                                      const mla_tensor *req_pool_indices,
                                      const mla_tensor *req_to_page, mla_diag *diag)
{
    mla_prefill_metadata *m = &backend->prefill;
    int64_t capacity = backend->config.chunk_capacity;
    window_layout layout = {.win = capacity / num_extends};
    if (m->max_extend_prefix_len > 0) {
        if (layout.win == 0)
            return mlai_fail(diag, MLA_ERROR_CAPACITY,
                             "num_extends is %d and chunk_capacity %lld tokens: a window needs one "
                             "token for each request, extend fewer at once",
                             num_extends, (long long)capacity);
        layout.n_windows = mlai_ceil_div(m->max_extend_prefix_len, layout.win);
        MLAI_TRY(check_pages(backend, num_extends, req_pool_indices, req_to_page, &layout, diag));
    }
    if (!lay_out(&layout, num_extends))
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY,
                         "%lld prefix windows of %d requests are over 64 bits",
                         (long long)layout.n_windows, num_extends);
    MLAI_TRY(grow(backend, layout.bytes, diag));
    bool is_empty = layout.n_windows == 0; /* then there may be no memory at all */
    if (!is_empty)
        fill(backend, &layout, num_extends, req_pool_indices, req_to_page);

    char *memory = backend->windows;
    m->chunked_loop_num = (int32_t)layout.n_windows;
    m->chunk_kv_indices_list = is_empty ? NULL : (const mla_tensor *)(void *)memory;
    m->chunked_seq_len = mla_tensor_2d(is_empty ? NULL : memory + layout.lens_at, MLA_FORMAT_I32,
                                       layout.n_windows, num_extends);
    m->cu_chunked_seq_len = mla_tensor_2d(is_empty ? NULL : memory + layout.cum_at, MLA_FORMAT_I32,
                                          layout.n_windows, (int64_t)num_extends + 1);
    m->max_chunk_len_per_loop = is_empty ? NULL : (const int32_t *)(void *)(memory + layout.max_at);
    return MLA_OK;
}
