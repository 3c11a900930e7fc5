/*
 * Forward metadata: what all layers of one forward share.
 *
 *   rows of a batch:   0 .. E - 1 extends | E .. bs - 1 decodes
 *   prefill metadata:  rows 0 .. E - 1        decode metadata: all rows, with num_extends to skip
 *
 * seq_lens, indices and the extends' lengths are views of the caller's arrays: a drafter that
 * bumps its lengths in place needs no new init. Page tables are gathered (rows of req_to_page by
 * request), with as many columns as both W and the table have, so that a length past the table is
 * noticed instead of read as page 0. On the CPU all values are checked before anything is kept;
 * a device gathers its tables itself, on the batch's stream.
 *
 * Called once a forward, before the layers.
 */
#include "backend/backend.h"
#include "cache/cache.h"

int32_t mla_forward_mode_from_num_extends(int32_t num_extends, int32_t bs)
{
    if (bs <= 0)
        return MLA_FORWARD_IDLE;
    if (num_extends > 0)
        return num_extends < bs ? MLA_FORWARD_MIXED : MLA_FORWARD_EXTEND;
    return MLA_FORWARD_DECODE;
}

const char *mla_forward_mode_name(int32_t mode)
{
    switch (mode) {
    case MLA_FORWARD_EXTEND:
        return "extend";
    case MLA_FORWARD_DECODE:
        return "decode";
    case MLA_FORWARD_MIXED:
        return "mixed";
    case MLA_FORWARD_IDLE:
        return "idle";
    default:
        return "unknown";
    }
}

void mlai_backend_forget(mla_backend *backend)
{
    backend->has_prefill = false;
    backend->has_decode = false;
    backend->n_scopes = 0;
    backend->phase = MLAI_PHASE_EAGER;
    backend->current = NULL;
}

/* ---- checks ---------------------------------------------------------------------------------- */

mla_status mlai_backend_check_lens(const mla_backend *backend, const mla_tensor *seq_lens,
                                   int64_t first, int64_t count, int64_t reach, int64_t columns,
                                   mla_diag *diag)
{
    int64_t context_len = backend->config.context_len;
    int64_t limit = mlai_min_i64(context_len, columns * backend->config.page_size);
    if (!mlai_backend_is_on_host(backend))
        return MLA_OK;
    for (int64_t i = first; i < first + count; i++) {
        int64_t len = mlai_index_at(seq_lens, i);
        if (len < 0)
            return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                             "seq_lens[%lld] is %lld: lengths are not negative", (long long)i,
                             (long long)len);
        if (len + reach <= limit)
            continue;
        if (limit == context_len)
            return mlai_fail(
                diag, MLA_ERROR_CAPACITY,
                "seq_lens[%lld] is %lld and its last token sees %lld rows: context_len "
                "is %lld",
                (long long)i, (long long)len, (long long)(len + reach), (long long)context_len);
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "seq_lens[%lld] is %lld and its last token sees %lld rows: the page table "
                         "has %lld columns of %d tokens",
                         (long long)i, (long long)len, (long long)(len + reach), (long long)columns,
                         backend->config.page_size);
    }
    return MLA_OK;
}

mla_status mlai_backend_check_indices(const mla_backend *backend, const mla_tensor *t,
                                      const char *name, uint32_t formats, int64_t least,
                                      mla_diag *diag)
{
    if (mlai_backend_is_on_host(backend))
        return mlai_check_host_indices(t, name, formats, least, diag);
    MLAI_TRY(mlai_check_tensor(t, name, formats, 1, 1, true, diag));
    MLAI_TRY(mlai_backend_check_device(backend, t, name, diag));
    if (t->shape[0] < least)
        return mlai_fail(diag, MLA_ERROR_SHAPE, "%s has %lld entries: at least %lld are needed",
                         name, (long long)t->shape[0], (long long)least);
    return MLA_OK;
}

mla_status mlai_backend_check_rows(const mla_backend *backend, const mla_tensor *req_pool_indices,
                                   const mla_tensor *req_to_page, int32_t bs, mla_diag *diag)
{
    MLAI_TRY(mlai_backend_check_indices(backend, req_pool_indices, "req_pool_indices", MLAI_INDICES,
                                        bs, diag));
    if (mlai_backend_is_on_host(backend))
        return mlai_check_request_rows(req_to_page, req_pool_indices, bs, diag);
    MLAI_TRY(mlai_check_tensor(req_to_page, "req_to_page", MLAI_F(I32), 2, 2, true, diag));
    return mlai_backend_check_device(backend, req_to_page, "req_to_page", diag);
}

mla_status mlai_backend_gather_pages(const mla_backend *backend, void *stream,
                                     const mla_tensor *req_to_page, mla_tensor req_pool_indices,
                                     const mla_tensor *table, mla_diag *diag)
{
    const mlai_device *device = &backend->device;
    if (device->runtime == NULL)
        return mla_build_page_table(*req_to_page, req_pool_indices, *table, diag);
    return device->runtime->gather_pages(device->handle, stream, req_to_page, &req_pool_indices,
                                         table, diag);
}

static mla_status check_counts(const mla_backend *backend, const mla_forward_batch *batch,
                               mla_diag *diag)
{
    int32_t bs = batch->bs, e = batch->num_extends;
    bool fits = false;
    const char *want = "";
    if (bs < 0)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "bs is %d: it is not negative", bs);
    switch (batch->forward_mode) {
    case MLA_FORWARD_EXTEND:
        fits = e >= 1 && e == bs;
        want = "extend has bs = num_extends >= 1";
        break;
    case MLA_FORWARD_MIXED:
        fits = e >= 1 && e < bs;
        want = "mixed has 1 <= num_extends < bs";
        break;
    case MLA_FORWARD_DECODE:
        fits = e >= 0 && e <= bs;
        want = "decode has 0 <= num_extends <= bs";
        break;
    case MLA_FORWARD_IDLE:
        fits = e == 0 && bs == 0;
        want = "idle has neither";
        break;
    default:
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "forward_mode is %d: 1 (extend) to 4 (idle) exist", batch->forward_mode);
    }
    if (!fits)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "bs is %d and num_extends %d: %s", bs, e, want);
    if (bs > backend->config.max_bs)
        return mlai_fail(diag, MLA_ERROR_CAPACITY, "bs is %d: this backend was made for max_bs %d",
                         bs, backend->config.max_bs);
    return MLA_OK;
}

/* ---- prefill --------------------------------------------------------------------------------- */

/* The host's copy of an extend array: the twin where there is one, which must then agree. A
 * device's array is not read. */
static mla_status take_extend_lens(const mla_backend *backend, const mla_tensor *t,
                                   const mla_tensor *twin, const char *name, int32_t e,
                                   int32_t *out, mla_diag *diag)
{
    bool is_on_host = mlai_backend_is_on_host(backend);
    MLAI_TRY(mlai_backend_check_indices(backend, t, name, MLAI_F(I32), e, diag));
    if (mlai_present(twin) || !is_on_host) {
        char twin_name[64] = "";
        mlai_append(twin_name, sizeof twin_name, "%s_cpu", name);
        MLAI_TRY(mlai_check_host_indices(twin, twin_name, MLAI_F(I32), e, diag));
    }
    if (!is_on_host)
        t = twin;
    for (int32_t i = 0; i < e; i++) {
        int64_t value = mlai_index_at(t, i);
        if (value < 0)
            return mlai_fail(diag, MLA_ERROR_ARGUMENT, "%s[%d] is %lld: it is not negative", name,
                             i, (long long)value);
        if (mlai_present(twin) && mlai_index_at(twin, i) != value)
            return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                             "%s[%d] is %lld and its host twin says %lld: they must agree", name, i,
                             (long long)value, (long long)mlai_index_at(twin, i));
        out[i] = (int32_t)value;
    }
    return MLA_OK;
}

static mla_status init_prefill(mla_backend *backend, const mla_forward_batch *batch, mla_diag *diag)
{
    int32_t e = batch->num_extends;
    MLAI_TRY(take_extend_lens(backend, &batch->extend_seq_lens, &batch->extend_seq_lens_cpu,
                              "extend_seq_lens", e, backend->extend_lens, diag));
    MLAI_TRY(take_extend_lens(backend, &batch->extend_prefix_lens, &batch->extend_prefix_lens_cpu,
                              "extend_prefix_lens", e, backend->extend_prefixes, diag));
    bool is_on_host = mlai_backend_is_on_host(backend);
    int64_t tokens = 0;
    int32_t max_new = 0, max_prefix = 0;
    backend->cum_extend[0] = 0;
    for (int32_t i = 0; i < e; i++) {
        int64_t fresh = backend->extend_lens[i], prefix = backend->extend_prefixes[i];
        int64_t len =
            is_on_host ? mlai_index_at(&batch->seq_lens, i) : prefix + fresh; /* else not read */
        if (len != prefix + fresh)
            return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                             "seq_lens[%d] is %lld: extend_prefix_lens %lld and extend_seq_lens "
                             "%lld make %lld",
                             i, (long long)len, (long long)prefix, (long long)fresh,
                             (long long)(prefix + fresh));
        tokens += fresh;
        if (tokens > backend->config.max_tokens)
            return mlai_fail(diag, MLA_ERROR_CAPACITY,
                             "the extends have %lld or more new tokens: this backend was made for "
                             "max_tokens %lld",
                             (long long)tokens, (long long)backend->config.max_tokens);
        backend->cum_extend[i + 1] = (int32_t)tokens;
        max_new = backend->extend_lens[i] > max_new ? backend->extend_lens[i] : max_new;
        max_prefix =
            backend->extend_prefixes[i] > max_prefix ? backend->extend_prefixes[i] : max_prefix;
    }
    int32_t *cum = backend->cum_extend;
    if (!is_on_host) {
        cum = backend->device_cum_extend;
        MLAI_TRY(backend->device.runtime->copy(backend->device.handle, batch->stream, cum,
                                               backend->cum_extend, ((uint64_t)e + 1) * sizeof *cum,
                                               diag));
    }
    backend->prefill = (mla_prefill_metadata){
        .struct_size = sizeof backend->prefill,
        .num_extends = e,
        .seq_lens = mla_tensor_slice(batch->seq_lens, 0, 0, e),
        .req_pool_indices = mla_tensor_slice(batch->req_pool_indices, 0, 0, e),
        .extend_prefix_lens = mla_tensor_slice(batch->extend_prefix_lens, 0, 0, e),
        .extend_seq_lens = mla_tensor_slice(batch->extend_seq_lens, 0, 0, e),
        .cum_extend_seq_lens =
            mlai_backend_tensor(backend, mla_tensor_1d(cum, MLA_FORMAT_I32, (int64_t)e + 1)),
        .extend_seq_lens_cpu = backend->extend_lens,
        .max_extend_seq_len = max_new,
        .max_extend_prefix_len = max_prefix,
    };
    return mlai_backend_build_windows(backend, batch, diag);
}

/* ---- decode ---------------------------------------------------------------------------------- */

static mla_status init_decode(mla_backend *backend, const mla_forward_batch *batch, mla_diag *diag)
{
    int32_t bs = batch->bs;
    int64_t columns = backend->table_width;
    mla_tensor seq_lens = mlai_backend_tensor(backend, mla_tensor_1d(NULL, MLA_FORMAT_I32, 0));
    if (bs > 0) {
        columns = mlai_min_i64(columns, batch->req_to_page.shape[1]);
        seq_lens = mla_tensor_slice(batch->seq_lens, 0, 0, bs);
    }
    mla_tensor table = mlai_backend_tensor(
        backend, mla_tensor_2d(backend->page_table, MLA_FORMAT_I32, bs, columns));
    table.stride[0] = backend->table_width;
    if (bs > 0)
        MLAI_TRY(mlai_backend_gather_pages(backend, batch->stream, &batch->req_to_page,
                                           mla_tensor_slice(batch->req_pool_indices, 0, 0, bs),
                                           &table, diag));
    backend->decode = (mla_decode_metadata){
        .struct_size = sizeof backend->decode,
        .num_extends = batch->num_extends,
        .page_table = table,
        .seq_lens = seq_lens,
    };
    return MLA_OK;
}

mla_status mla_backend_init_forward_metadata(mla_backend *backend, const mla_forward_batch *batch,
                                             mla_diag *diag)
{
    if (backend == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "backend is NULL: give one");
    mlai_backend_forget(backend);
    mla_forward_batch own;
    MLAI_TRY(mlai_take_struct(&own, sizeof own, sizeof own, batch, "mla_forward_batch", diag));
    MLAI_TRY(check_counts(backend, &own, diag));
    if (own.forward_mode == MLA_FORWARD_IDLE)
        return MLA_OK;
    if (own.bs > 0) {
        MLAI_TRY(mlai_backend_check_rows(backend, &own.req_pool_indices, &own.req_to_page, own.bs,
                                         diag));
        MLAI_TRY(mlai_backend_check_indices(backend, &own.seq_lens, "seq_lens", MLAI_F(I32), own.bs,
                                            diag));
        MLAI_TRY(mlai_backend_check_lens(backend, &own.seq_lens, 0, own.bs, 0,
                                         own.req_to_page.shape[1], diag));
    }
    bool has_prefill = own.forward_mode != MLA_FORWARD_DECODE;
    bool has_decode = own.forward_mode != MLA_FORWARD_EXTEND || backend->config.is_draft;
    if (has_prefill)
        MLAI_TRY(init_prefill(backend, &own, diag));
    if (has_decode)
        MLAI_TRY(init_decode(backend, &own, diag));
    backend->has_prefill = has_prefill;
    backend->has_decode = has_decode;
    return MLA_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

mla_status mla_backend_prefill_metadata(const mla_backend *backend,
                                        const mla_prefill_metadata **metadata, mla_diag *diag)
{
    if (backend == NULL || metadata == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "%s is NULL: give one",
                         backend == NULL ? "backend" : "metadata");
    if (!backend->has_prefill)
        return mlai_fail(diag, MLA_ERROR_STATE,
                         "prefill metadata is not defined: the last init must have been extend or "
                         "mixed, and have succeeded");
    *metadata = &backend->prefill;
    return MLA_OK;
}

mla_status mla_backend_decode_metadata(const mla_backend *backend,
                                       const mla_decode_metadata **metadata, mla_diag *diag)
{
    if (backend == NULL || metadata == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "%s is NULL: give one",
                         backend == NULL ? "backend" : "metadata");
    if (!backend->has_decode)
        return mlai_fail(diag, MLA_ERROR_STATE,
                         "decode metadata is not defined: the last init must have been decode or "
                         "mixed (for a draft also extend), and have succeeded");
    *metadata = &backend->decode;
    return MLA_OK;
}

mla_status mla_backend_push_num_extends(mla_backend *backend, int32_t num_extends, mla_diag *diag)
{
    const mla_decode_metadata *metadata = NULL;
    MLAI_TRY(mla_backend_decode_metadata(backend, &metadata, diag));
    int64_t bs = metadata->page_table.shape[0];
    if (num_extends < 0 || num_extends > bs)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "num_extends is %d: the decode metadata has rows for 0 to %lld",
                         num_extends, (long long)bs);
    if (backend->n_scopes == MLAI_MAX_SCOPES)
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "%d scopes of num_extends are open, which is the most: pop one",
                         MLAI_MAX_SCOPES);
    backend->scopes[backend->n_scopes++] = metadata->num_extends;
    backend->decode.num_extends = num_extends;
    return MLA_OK;
}

mla_status mla_backend_pop_num_extends(mla_backend *backend, mla_diag *diag)
{
    if (backend == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "backend is NULL: give one");
    if (backend->n_scopes == 0)
        return mlai_fail(diag, MLA_ERROR_STATE,
                         "no scope of num_extends is open: init and replay end them all");
    backend->decode.num_extends = backend->scopes[--backend->n_scopes];
    return MLA_OK;
}
