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
 * table[row, p / PS] * PS + p % PS, as i32, or as i64 where a slot of this forward passes i32
 * (always on a device, whose pages are not read here). Every position occurs in one window, so all
 * slots together are the sum of the prefixes.
 *
 * One block of memory holds all arrays and grows when a forward needs more than any before it:
 *   tensors [K] | starts [K] | slots [sum of prefixes] | lengths [K, E] | cumulative [K, E + 1] |
 *   maxima [K]
 * A device has a twin of starts .. maxima, whose slots a kernel fills in from the others.
 */
#include "backend/backend.h"
#include "cache/cache.h"
#include <stdlib.h>

typedef struct window_layout {
    int64_t win;
    int64_t n_windows;
    int64_t n_slots;
    bool is_wide; /* i64 slots */
    uint64_t starts_at, slots_at, lens_at, cum_at, max_at, bytes;
} window_layout;

/* Every live prefix page once: negative ids are refused, the largest decides the slots' width. */
static mla_status check_pages(const mla_backend *backend, const mla_forward_batch *batch,
                              window_layout *layout, mla_diag *diag)
{
    int64_t page_size = backend->config.page_size;
    for (int32_t i = 0; i < batch->num_extends; i++) {
        int64_t prefix = backend->extend_prefixes[i];
        layout->n_slots += prefix;
        if (!mlai_backend_is_on_host(backend))
            continue;
        const int32_t *row = mlai_request_pages(&batch->req_to_page, &batch->req_pool_indices, i);
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
    }
    return MLA_OK;
}

/* Offsets of the arrays; false when they do not fit 64 bits. */
static bool lay_out(window_layout *layout, int64_t num_extends)
{
    uint64_t k = (uint64_t)layout->n_windows, e = (uint64_t)num_extends, part;
    uint64_t slot_bytes = layout->is_wide ? sizeof(int64_t) : sizeof(int32_t);
    layout->starts_at = k * sizeof(mla_tensor);
    layout->slots_at = layout->starts_at + k * sizeof(int64_t);
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

static mla_status no_memory(uint64_t bytes, mla_diag *diag)
{
    return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY,
                     "no memory for prefix windows of %llu bytes: extend fewer requests at once",
                     (unsigned long long)bytes);
}

static mla_status grow(mla_backend *backend, const window_layout *layout, mla_diag *diag)
{
    uint64_t device_bytes = layout->bytes - layout->starts_at;
    if (layout->bytes > backend->windows_bytes) {
        void *memory = malloc((size_t)layout->bytes);
        if (memory == NULL)
            return no_memory(layout->bytes, diag);
        free(backend->windows);
        backend->windows = memory;
        backend->windows_bytes = layout->bytes;
    }
    if (!mlai_backend_is_on_host(backend) && device_bytes > backend->device_windows_bytes) {
        void *memory = mlai_backend_alloc(backend, 1, device_bytes);
        if (memory == NULL)
            return no_memory(device_bytes, diag);
        mlai_backend_free(backend, backend->device_windows);
        backend->device_windows = memory;
        backend->device_windows_bytes = device_bytes;
    }
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

/* The memory that the metadata shows: on a device the twin, as if the tensors lay before it. */
static char *shown_memory(const mla_backend *backend, const window_layout *layout)
{
    if (mlai_backend_is_on_host(backend))
        return backend->windows;
    return (char *)backend->device_windows - layout->starts_at;
}

/* Everything but a device's slots. */
static void fill(mla_backend *backend, const window_layout *layout, const mla_forward_batch *batch)
{
    char *memory = backend->windows, *shown = shown_memory(backend, layout);
    mla_tensor *tensors = (mla_tensor *)(void *)memory;
    int64_t *starts = (int64_t *)(void *)(memory + layout->starts_at);
    int32_t *lens = (int32_t *)(void *)(memory + layout->lens_at);
    int32_t *cum = (int32_t *)(void *)(memory + layout->cum_at);
    int32_t *maxima = (int32_t *)(void *)(memory + layout->max_at);
    int64_t slot_bytes = layout->is_wide ? (int64_t)sizeof(int64_t) : (int64_t)sizeof(int32_t);
    int32_t format = layout->is_wide ? MLA_FORMAT_I64 : MLA_FORMAT_I32;
    int32_t num_extends = batch->num_extends;
    bool is_on_host = mlai_backend_is_on_host(backend);
    int64_t at = 0;
    for (int64_t k = 0; k < layout->n_windows; k++) {
        int64_t first = k * layout->win;
        starts[k] = at;
        cum[0] = 0;
        maxima[k] = 0;
        for (int32_t i = 0; i < num_extends; i++) {
            int64_t count = mlai_min_i64(layout->win, backend->extend_prefixes[i] - first);
            count = mlai_max_i64(count, 0);
            if (is_on_host)
                fill_slots(memory + layout->slots_at, layout->is_wide, at,
                           mlai_request_pages(&batch->req_to_page, &batch->req_pool_indices, i),
                           first, count, backend->config.page_size);
            at += count;
            lens[i] = (int32_t)count;
            cum[i + 1] = cum[i] + (int32_t)count;
            maxima[k] = lens[i] > maxima[k] ? lens[i] : maxima[k];
        }
        tensors[k] = mlai_backend_tensor(
            backend, mla_tensor_1d(shown + layout->slots_at + (uint64_t)(starts[k] * slot_bytes),
                                   format, at - starts[k]));
        lens += num_extends;
        cum += num_extends + 1;
    }
}

/* The device's twin: what the host computed is copied, the slots are made there. */
static mla_status fill_device(const mla_backend *backend, const window_layout *layout,
                              const mla_forward_batch *batch, mla_diag *diag)
{
    const mlai_device *d = &backend->device;
    const char *memory = backend->windows;
    char *shown = shown_memory(backend, layout);
    MLAI_TRY(d->runtime->copy(d->handle, batch->stream, shown + layout->starts_at,
                              memory + layout->starts_at, layout->slots_at - layout->starts_at,
                              diag));
    MLAI_TRY(d->runtime->copy(d->handle, batch->stream, shown + layout->lens_at,
                              memory + layout->lens_at, layout->bytes - layout->lens_at, diag));
    const mlai_windows windows = {
        .req_to_page = &batch->req_to_page,
        .req_pool_indices = &batch->req_pool_indices,
        .cumulative = (const int32_t *)(void *)(shown + layout->cum_at),
        .starts = (const int64_t *)(void *)(shown + layout->starts_at),
        .slots = (int64_t *)(void *)(shown + layout->slots_at),
        .n_windows = layout->n_windows,
        .n_requests = batch->num_extends,
        .window_tokens = layout->win,
        .page_size = backend->config.page_size,
    };
    return d->runtime->fill_windows(d->handle, batch->stream, &windows, diag);
}

mla_status mlai_backend_build_windows(mla_backend *backend, const mla_forward_batch *batch,
                                      mla_diag *diag)
{
    mla_prefill_metadata *m = &backend->prefill;
    int32_t num_extends = batch->num_extends;
    int64_t capacity = backend->config.chunk_capacity;
    window_layout layout = {.win = capacity / num_extends,
                            .is_wide = !mlai_backend_is_on_host(backend)};
    if (m->max_extend_prefix_len > 0) {
        if (layout.win == 0)
            return mlai_fail(diag, MLA_ERROR_CAPACITY,
                             "num_extends is %d and chunk_capacity %lld tokens: a window needs one "
                             "token for each request, extend fewer at once",
                             num_extends, (long long)capacity);
        layout.n_windows = mlai_ceil_div(m->max_extend_prefix_len, layout.win);
        MLAI_TRY(check_pages(backend, batch, &layout, diag));
    }
    if (!lay_out(&layout, num_extends))
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY,
                         "%lld prefix windows of %d requests are over 64 bits",
                         (long long)layout.n_windows, num_extends);
    MLAI_TRY(grow(backend, &layout, diag));
    bool is_empty = layout.n_windows == 0; /* then there may be no memory at all */
    if (!is_empty)
        fill(backend, &layout, batch);
    if (!is_empty && !mlai_backend_is_on_host(backend))
        MLAI_TRY(fill_device(backend, &layout, batch, diag));

    const char *memory = backend->windows;
    char *shown = is_empty ? NULL : shown_memory(backend, &layout);
    m->chunked_loop_num = (int32_t)layout.n_windows;
    m->chunk_kv_indices_list = is_empty ? NULL : (const mla_tensor *)(const void *)memory;
    m->chunked_seq_len =
        mlai_backend_tensor(backend, mla_tensor_2d(is_empty ? NULL : shown + layout.lens_at,
                                                   MLA_FORMAT_I32, layout.n_windows, num_extends));
    m->cu_chunked_seq_len = mlai_backend_tensor(
        backend, mla_tensor_2d(is_empty ? NULL : shown + layout.cum_at, MLA_FORMAT_I32,
                               layout.n_windows, (int64_t)num_extends + 1));
    m->max_chunk_len_per_loop =
        is_empty ? NULL : (const int32_t *)(const void *)(memory + layout.max_at);
    return MLA_OK;
}
