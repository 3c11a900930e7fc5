/*
 * Device memory and the launchers of the backend's metadata kernels (kernels/metadata.cu). See
 * memory.h and registry.h.
 */
#include "cuda/memory.h"
#include "cuda/cuda.h"
#include "cuda/kernels/metadata.h"
#include "cuda/portable.h"

enum { WARPS = MLAI_METADATA_THREADS / 32, BLOCKS_PER_SM = 8, MAX_GRID_Y = 65535 };

static mla_status fail(const mlai_cuda_device *device, CUresult result, const char *what,
                       mla_diag *diag)
{
    return mlai_fail(diag, MLA_ERROR_DEVICE, "%s failed on %s: %s", what, device->name,
                     mlai_cuda_error_name(device->cuda, result));
}

void *mlai_cuda_alloc(void *device, uint64_t bytes)
{
    mlai_cuda_device *d = device;
    const mlai_cuda_api *api = &d->cuda->api;
    CUdeviceptr memory = 0;
    bool pushed;
    if (bytes > SIZE_MAX || mlai_cuda_enter(d, &pushed, NULL) != MLA_OK)
        return NULL;
    const size_t size = bytes > 0 ? (size_t)bytes : 1;
    CUresult result = api->cuMemAlloc(&memory, size);
    if (result == CUDA_SUCCESS) {
        result = api->cuMemsetD8Async(memory, 0, size, NULL);
        if (result == CUDA_SUCCESS)
            result = api->cuStreamSynchronize(NULL);
        if (result != CUDA_SUCCESS) {
            api->cuMemFree(memory);
            memory = 0;
        }
    }
    mlai_cuda_leave(d, pushed);
    return (void *)(uintptr_t)memory;
}

void mlai_cuda_release(void *device, void *memory)
{
    mlai_cuda_device *d = device;
    bool pushed;
    if (!memory || mlai_cuda_enter(d, &pushed, NULL) != MLA_OK)
        return;
    d->cuda->api.cuMemFree((CUdeviceptr)(uintptr_t)memory);
    mlai_cuda_leave(d, pushed);
}

mla_status mlai_cuda_copy(void *device, void *stream, void *to, const void *from, uint64_t bytes,
                          mla_diag *diag)
{
    mlai_cuda_device *d = device;
    bool pushed;
    if (bytes == 0)
        return MLA_OK;
    MLAI_TRY(mlai_cuda_enter(d, &pushed, diag));
    const CUresult result = d->cuda->api.cuMemcpyAsync(
        (CUdeviceptr)(uintptr_t)to, (CUdeviceptr)(uintptr_t)from, (size_t)bytes, stream);
    mlai_cuda_leave(d, pushed);
    return result == CUDA_SUCCESS ? MLA_OK : fail(d, result, "a copy", diag);
}

mla_status mlai_cuda_clear(void *device, void *stream, void *memory, uint64_t stride,
                           uint64_t row_bytes, uint64_t rows, mla_diag *diag)
{
    mlai_cuda_device *d = device;
    bool pushed;
    if (row_bytes == 0 || rows == 0)
        return MLA_OK;
    MLAI_TRY(mlai_cuda_enter(d, &pushed, diag));
    const CUdeviceptr at = (CUdeviceptr)(uintptr_t)memory;
    const CUresult result =
        stride == row_bytes
            ? d->cuda->api.cuMemsetD8Async(at, 0, (size_t)(row_bytes * rows), stream)
            : d->cuda->api.cuMemsetD2D8Async(at, (size_t)stride, 0, (size_t)row_bytes, (size_t)rows,
                                             stream);
    mlai_cuda_leave(d, pushed);
    return result == CUDA_SUCCESS ? MLA_OK : fail(d, result, "zeroing memory", diag);
}

mla_status mlai_cuda_wait(void *device, void *stream, mla_diag *diag)
{
    mlai_cuda_device *d = device;
    bool pushed;
    MLAI_TRY(mlai_cuda_enter(d, &pushed, diag));
    const CUresult result = d->cuda->api.cuStreamSynchronize(stream);
    mlai_cuda_leave(d, pushed);
    return result == CUDA_SUCCESS ? MLA_OK : fail(d, result, "work on a stream", diag);
}

/* ---- metadata -------------------------------------------------------------------------------- */

static mla_status launch(mlai_cuda_device *device, void *stream, const char *symbol, int64_t x,
                         int64_t y, void *params, mla_diag *diag)
{
    CUkernel kernel;
    if (x == 0 || y == 0)
        return MLA_OK;
    MLAI_TRY(mlai_cuda_kernel(device, "metadata", symbol, 0, &kernel, diag));
    const int64_t most = (int64_t)device->sm_count * BLOCKS_PER_SM;
    const mlai_cuda_launch shape = {
        .grid = {(uint32_t)mlai_min_i64(x, most), (uint32_t)mlai_min_i64(y, MAX_GRID_Y), 1},
        .block = {MLAI_METADATA_THREADS, 1, 1}};
    const mla_exec exec = {.struct_size = sizeof exec, .device = device, .stream = stream};
    return mlai_cuda_run(&exec, kernel, &shape, params, diag);
}

static mlai_cuda_index index_of(const mla_tensor *t)
{
    return (mlai_cuda_index){t->data, t->stride[0], t->format == MLA_FORMAT_I64};
}

mla_status mlai_cuda_gather_pages(void *device, void *stream, const mla_tensor *req_to_page,
                                  const mla_tensor *req_pool_indices, const mla_tensor *out,
                                  mla_diag *diag)
{
    mlai_gather_pages_params own = {.table = req_to_page->data,
                                    .table_rows = req_to_page->shape[0],
                                    .table_columns = req_to_page->shape[1],
                                    .table_stride = req_to_page->stride[0],
                                    .index = index_of(req_pool_indices),
                                    .out = out->data,
                                    .rows = out->shape[0],
                                    .columns = out->shape[1],
                                    .out_stride = out->stride[0]};
    return launch(device, stream, "mla_gather_pages",
                  mlai_ceil_div(own.columns, MLAI_METADATA_THREADS), own.rows, &own, diag);
}

mla_status mlai_cuda_fill_windows(void *device, void *stream, const mlai_windows *windows,
                                  mla_diag *diag)
{
    const mla_tensor *table = windows->req_to_page;
    mlai_fill_windows_params own = {.table = table->data,
                                    .table_rows = table->shape[0],
                                    .table_columns = table->shape[1],
                                    .table_stride = table->stride[0],
                                    .index = index_of(windows->req_pool_indices),
                                    .cumulative = windows->cumulative,
                                    .starts = windows->starts,
                                    .slots = windows->slots,
                                    .windows = windows->n_windows,
                                    .requests = windows->n_requests,
                                    .window_tokens = windows->window_tokens,
                                    .page_size = windows->page_size};
    return launch(device, stream, "mla_fill_windows",
                  mlai_ceil_div(own.window_tokens, MLAI_METADATA_THREADS),
                  own.windows * own.requests, &own, diag);
}

static mlai_cuda_index optional_index(const mla_tensor *t)
{
    return mlai_present(t) ? index_of(t) : (mlai_cuda_index){0};
}

mla_status mlai_cuda_fill_tokens(void *device, void *stream, const mlai_tokens *tokens,
                                 mla_diag *diag)
{
    const mla_tensor *table = tokens->req_to_page;
    const mla_tensor *each = mlai_present(tokens->slots) ? tokens->slots : tokens->positions;
    mlai_fill_tokens_params own = {.table = table->data,
                                   .table_rows = table->shape[0],
                                   .table_columns = table->shape[1],
                                   .table_stride = table->stride[0],
                                   .index = index_of(tokens->req_pool_indices),
                                   .cached_lens = index_of(tokens->cached_lens),
                                   .new_lens = index_of(tokens->new_lens),
                                   .positions = optional_index(tokens->positions),
                                   .slots = optional_index(tokens->slots),
                                   .seq_lens = optional_index(tokens->seq_lens),
                                   .cumulative = optional_index(tokens->cu_seqlens_q),
                                   .requests = tokens->req_pool_indices->shape[0],
                                   .tokens = mlai_present(each) ? each->shape[0] : 0,
                                   .page_size = tokens->page_size};
    return launch(device, stream, "mla_fill_tokens", own.requests + 1, 1, &own, diag);
}

static mlai_cuda_rows rows_of(const mla_tensor *t)
{
    return (mlai_cuda_rows){t->data, t->stride[0], t->stride[1], t->format};
}

mla_status mlai_cuda_cast(void *device, void *stream, const mla_tensor *in, const mla_tensor *out,
                          mla_diag *diag)
{
    mlai_cast_params own = {.in = rows_of(in),
                            .out = rows_of(out),
                            .tokens = in->shape[0],
                            .heads = in->shape[1],
                            .width = in->shape[2],
                            .wide = in->shape[2] % 8 == 0 && mlai_cuda_is_aligned(in, 16) &&
                                    mlai_cuda_is_aligned(out, 16)};
    return launch(device, stream, "mla_cast_rows", mlai_ceil_div(own.tokens * own.heads, WARPS), 1,
                  &own, diag);
}

mla_status mlai_cuda_count_step(void *device, void *stream, uint64_t *count, uint64_t *mirror,
                                mla_diag *diag)
{
    mlai_count_step_params own = {count, mirror};
    return launch(device, stream, "mla_count_step", 1, 1, &own, diag);
}
