/*
 * Positions, write slots and page tables in stream order: the device's kernels where the tensors
 * lie on one, the host's functions (positions.c) where they do not.
 */
#include "cache/cache.h"

static mla_status check(const mla_tensor *first, const mla_tensor *t, const char *name,
                        uint32_t formats, int32_t rank, mla_diag *diag)
{
    MLAI_TRY(mlai_check_tensor(t, name, formats, rank, rank, true, diag));
    if (t->device_type == first->device_type && t->device_index == first->device_index)
        return MLA_OK;
    return mlai_fail(diag, MLA_ERROR_DEVICE,
                     "%s is on device_type %d index %d, req_to_page on %d index %d: all tensors of "
                     "a call are on one device",
                     name, t->device_type, t->device_index, first->device_type,
                     first->device_index);
}

static mla_status check_optional(const mla_tensor *first, const mla_tensor *t, const char *name,
                                 uint32_t formats, int64_t want, const char *meaning,
                                 mla_diag *diag)
{
    if (!mlai_present(t))
        return MLA_OK;
    MLAI_TRY(check(first, t, name, formats, 1, diag));
    return want < 0 ? MLA_OK : mlai_check_extent(t, name, 0, want, meaning, diag);
}

static mla_status check_tokens(const mlai_tokens *tokens, mla_diag *diag)
{
    const mla_tensor *table = tokens->req_to_page;
    MLAI_TRY(check(table, table, "req_to_page", MLAI_F(I32), 2, diag));
    MLAI_TRY(check(table, tokens->req_pool_indices, "req_pool_indices", MLAI_INDICES, 1, diag));
    const int64_t n = tokens->req_pool_indices->shape[0];
    MLAI_TRY(check(table, tokens->cached_lens, "cached_lens", MLAI_F(I32), 1, diag));
    MLAI_TRY(
        mlai_check_extent(tokens->cached_lens, "cached_lens", 0, n, "one for each request", diag));
    MLAI_TRY(check(table, tokens->new_lens, "new_lens", MLAI_F(I32), 1, diag));
    MLAI_TRY(mlai_check_extent(tokens->new_lens, "new_lens", 0, n, "one for each request", diag));
    if (tokens->page_size < 1)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "page_size %lld: at least 1 token is needed",
                         (long long)tokens->page_size);
    MLAI_TRY(check_optional(table, tokens->positions, "positions", MLAI_INDICES, -1, "", diag));
    const bool both = mlai_present(tokens->positions);
    MLAI_TRY(check_optional(table, tokens->slots, "slots", MLAI_INDICES,
                            both ? tokens->positions->shape[0] : -1, "those of positions", diag));
    MLAI_TRY(check_optional(table, tokens->seq_lens, "seq_lens", MLAI_F(I32), n,
                            "one for each request", diag));
    return check_optional(table, tokens->cu_seqlens_q, "cu_seqlens_q", MLAI_F(I32), n + 1,
                          "the requests and one", diag);
}

/* The first `count` entries of an optional output go to the host's function, the others here. */
static mla_tensor head_of(const mla_tensor *t, int64_t count)
{
    return mlai_present(t) ? mla_tensor_slice(*t, 0, 0, count) : *t;
}

static mla_status fill_on_host(const mlai_tokens *tokens, mla_diag *diag)
{
    const int64_t n = tokens->req_pool_indices->shape[0];
    const mla_tensor *outputs[] = {tokens->positions, tokens->slots};
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t fresh = mlai_index_at(tokens->new_lens, i);
        sum += fresh > 0 ? fresh : 0;
    }
    for (int k = 0; k < 2; k++)
        if (mlai_present(outputs[k]) && outputs[k]->shape[0] < sum)
            return mlai_fail(diag, MLA_ERROR_SHAPE, "%s has %lld entries: new_lens add up to %lld",
                             k ? "slots" : "positions", (long long)outputs[k]->shape[0],
                             (long long)sum);
    if (mlai_present(tokens->cu_seqlens_q) && sum > INT32_MAX)
        return mlai_fail(diag, MLA_ERROR_CAPACITY, "new_lens add up to %lld: cu_seqlens_q is i32",
                         (long long)sum);
    MLAI_TRY(mla_positions_and_slots(*tokens->req_to_page, *tokens->req_pool_indices,
                                     *tokens->cached_lens, *tokens->new_lens,
                                     (int32_t)tokens->page_size, head_of(tokens->positions, sum),
                                     head_of(tokens->slots, sum), *tokens->seq_lens, diag));
    for (int k = 0; k < 2; k++)
        for (int64_t t = sum; mlai_present(outputs[k]) && t < outputs[k]->shape[0]; t++)
            mlai_store_index(outputs[k], t, k ? -1 : 0);
    for (int64_t i = 0, before = 0; mlai_present(tokens->cu_seqlens_q) && i <= n; i++) {
        mlai_store_index(tokens->cu_seqlens_q, i, before);
        before += i < n ? mlai_index_at(tokens->new_lens, i) : 0;
    }
    return MLA_OK;
}

mla_status mla_enqueue_positions_and_slots(mla_context *ctx, void *stream, mla_tensor req_to_page,
                                           mla_tensor req_pool_indices, mla_tensor cached_lens,
                                           mla_tensor new_lens, int32_t page_size,
                                           mla_tensor positions, mla_tensor slots,
                                           mla_tensor seq_lens, mla_tensor cu_seqlens_q,
                                           mla_diag *diag)
{
    mlai_device device;
    const mlai_tokens tokens = {
        .req_to_page = &req_to_page,
        .req_pool_indices = &req_pool_indices,
        .cached_lens = &cached_lens,
        .new_lens = &new_lens,
        .positions = &positions,
        .slots = &slots,
        .seq_lens = &seq_lens,
        .cu_seqlens_q = &cu_seqlens_q,
        .page_size = page_size,
    };
    MLAI_TRY(check_tokens(&tokens, diag));
    MLAI_TRY(
        mlai_context_device(ctx, req_to_page.device_type, req_to_page.device_index, &device, diag));
    return device.runtime ? device.runtime->fill_tokens(device.handle, stream, &tokens, diag)
                          : fill_on_host(&tokens, diag);
}

mla_status mla_enqueue_page_table(mla_context *ctx, void *stream, mla_tensor req_to_page,
                                  mla_tensor req_pool_indices, mla_tensor out, mla_diag *diag)
{
    mlai_device device;
    MLAI_TRY(check(&req_to_page, &req_to_page, "req_to_page", MLAI_F(I32), 2, diag));
    MLAI_TRY(check(&req_to_page, &req_pool_indices, "req_pool_indices", MLAI_INDICES, 1, diag));
    MLAI_TRY(check(&req_to_page, &out, "out", MLAI_F(I32), 2, diag));
    MLAI_TRY(mlai_check_extent(&req_pool_indices, "req_pool_indices", 0, out.shape[0],
                               "the rows of out", diag));
    MLAI_TRY(
        mlai_context_device(ctx, req_to_page.device_type, req_to_page.device_index, &device, diag));
    if (!device.runtime)
        return mla_build_page_table(req_to_page, req_pool_indices, out, diag);
    return device.runtime->gather_pages(device.handle, stream, &req_to_page, &req_pool_indices,
                                        &out, diag);
}
