/*
 * The latent KV pool: sizes, creation, and a layer as an operand of the operators.
 *
 * A row holds R + P values of the pool's format, or 656 bytes (ds656). Layers, pages and rows have
 * strides of their own (cache.h); any nesting is taken as long as no two rows overlap. With the
 * defaults the layout is packed, layer outermost, (num_pages + 1) * page_size rows a layer.
 *
 * Limits: page ids are i32, so num_pages is at most 2^31 - 2; sizes are checked in 64 bits. Memory
 * that the pool owns is zeroed, on the CPU by calloc, so that the pages of a large pool cost
 * nothing before their first use. Who calls it: engines, the backend (get_key_buffer,
 * set_mla_kv_buffer), the allocator's copy on write.
 */
#include "cache/cache.h"
#include <stdlib.h>

#define MAX_NUM_PAGES ((int64_t)INT32_MAX - 1)
#define MEMORY_ALIGNMENT 64

typedef struct stride_level {
    const char *name;
    uint64_t stride_bytes;
    uint64_t count;
} stride_level;

/* Everything about a configuration but its number of pages and its memory. */
static mla_status check_dims(const mla_kv_pool_config *c, mla_diag *diag)
{
    if (c->device_type != MLA_DEVICE_CPU && c->device_type != MLA_DEVICE_CUDA)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "device_type %d: 1 (cpu) and 2 (cuda) exist",
                         c->device_type);
    if (c->device_index < 0)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "device_index %d is negative", c->device_index);
    if (c->num_layers < 1)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "num_layers %d: at least 1 is needed",
                         c->num_layers);
    if (c->page_size < 1)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "page_size %d: at least 1 token is needed",
                         c->page_size);
    if (c->kv_lora_rank < 1)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "kv_lora_rank %d: at least 1 is needed",
                         c->kv_lora_rank);
    if (c->qk_rope_head_dim < 0)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "qk_rope_head_dim %d is negative",
                         c->qk_rope_head_dim);
    if (c->format == MLA_FORMAT_DS656) {
        if (c->kv_lora_rank != 512 || c->qk_rope_head_dim != 64)
            return mlai_fail(diag, MLA_ERROR_FORMAT,
                             "format ds656 holds kv_lora_rank 512 and qk_rope_head_dim 64, not %d "
                             "and %d: take another format",
                             c->kv_lora_rank, c->qk_rope_head_dim);
        return MLA_OK;
    }
    if (c->format < 0 || c->format > 31 || !((MLAI_FLOATS | MLAI_FP8) >> c->format & 1))
        return mlai_fail(diag, MLA_ERROR_FORMAT,
                         "format %s: a pool takes f32, bf16, f16, e4m3, e5m2 or ds656",
                         mla_format_name(c->format));
    return MLA_OK;
}

static uint64_t row_payload_bytes(const mla_kv_pool_config *c)
{
    if (c->format == MLA_FORMAT_DS656)
        return MLA_DS656_ROW_BYTES;
    return ((uint64_t)c->kv_lora_rank + (uint64_t)c->qk_rope_head_dim) *
           (uint64_t)mla_format_bytes(c->format);
}

static mla_status too_large(const mla_kv_pool_config *c, mla_diag *diag)
{
    return mlai_fail(diag, MLA_ERROR_CAPACITY,
                     "a pool of %d layers with %lld pages of %d tokens is over 64 bits in bytes",
                     c->num_layers, (long long)c->num_pages, c->page_size);
}

/*
 * Fills the strides that are 0 and gives the bytes from the first to the last. Rows do not overlap
 * when, from the smallest stride to the largest, each is at least the span of everything inside it.
 */
static mla_status lay_out(mla_kv_pool_config *c, uint64_t *bytes, mla_diag *diag)
{
    uint64_t row_bytes = row_payload_bytes(c);
    uint64_t pages = (uint64_t)c->num_pages + 1;
    if (c->row_stride_bytes == 0)
        c->row_stride_bytes = row_bytes;
    if (c->page_stride_bytes == 0 &&
        !mlai_mul_u64(c->row_stride_bytes, (uint64_t)c->page_size, &c->page_stride_bytes))
        return too_large(c, diag);
    if (c->layer_stride_bytes == 0 &&
        !mlai_mul_u64(c->page_stride_bytes, pages, &c->layer_stride_bytes))
        return too_large(c, diag);

    stride_level levels[3] = {
        {"row_stride_bytes", c->row_stride_bytes, (uint64_t)c->page_size},
        {"page_stride_bytes", c->page_stride_bytes, pages},
        {"layer_stride_bytes", c->layer_stride_bytes, (uint64_t)c->num_layers},
    };
    for (int i = 1; i < 3; i++)
        for (int j = i; j > 0 && levels[j].stride_bytes < levels[j - 1].stride_bytes; j--) {
            stride_level t = levels[j];
            levels[j] = levels[j - 1];
            levels[j - 1] = t;
        }
    uint64_t element = (uint64_t)mla_format_bytes(c->format);
    uint64_t span = row_bytes;
    for (int i = 0; i < 3; i++) {
        if (levels[i].stride_bytes % element != 0)
            return mlai_fail(diag, MLA_ERROR_STRIDE, "%s %llu is not a multiple of %llu bytes (%s)",
                             levels[i].name, (unsigned long long)levels[i].stride_bytes,
                             (unsigned long long)element, mla_format_name(c->format));
        if (levels[i].count == 1)
            continue;
        if (levels[i].stride_bytes < span)
            return mlai_fail(diag, MLA_ERROR_STRIDE,
                             "%s %llu is less than the %llu bytes that lie inside it: rows would "
                             "overlap",
                             levels[i].name, (unsigned long long)levels[i].stride_bytes,
                             (unsigned long long)span);
        uint64_t steps;
        if (!mlai_mul_u64(levels[i].stride_bytes, levels[i].count - 1, &steps) ||
            !mlai_add_u64(steps, span, &span))
            return too_large(c, diag);
    }
    /* Addresses and element strides are signed 64-bit numbers further down. */
    if (span > (uint64_t)INT64_MAX || c->layer_stride_bytes > (uint64_t)INT64_MAX ||
        c->page_stride_bytes > (uint64_t)INT64_MAX || c->row_stride_bytes > (uint64_t)INT64_MAX)
        return too_large(c, diag);
    *bytes = span;
    return MLA_OK;
}

static mla_status take_config(const mla_kv_pool_config *callers, mla_kv_pool_config *own,
                              mla_diag *diag)
{
    MLAI_TRY(mlai_take_struct(own, sizeof *own, sizeof *own, callers, "mla_kv_pool_config", diag));
    return check_dims(own, diag);
}

static mla_status take_sized_config(const mla_kv_pool_config *callers, mla_kv_pool_config *own,
                                    uint64_t *bytes, mla_diag *diag)
{
    MLAI_TRY(take_config(callers, own, diag));
    if (own->num_pages < 1 || own->num_pages > MAX_NUM_PAGES)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "num_pages %lld: 1 to %lld usable pages are possible",
                         (long long)own->num_pages, (long long)MAX_NUM_PAGES);
    return lay_out(own, bytes, diag);
}

mla_status mla_kv_pool_bytes(const mla_kv_pool_config *config, uint64_t *bytes, mla_diag *diag)
{
    if (bytes == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "bytes is NULL: give a place for the result");
    mla_kv_pool_config own;
    uint64_t needed = 0;
    MLAI_TRY(take_sized_config(config, &own, &needed, diag));
    *bytes = needed;
    return MLA_OK;
}

/* Whether a pool of num_pages pages can be laid out in budget_bytes. */
static bool fits(const mla_kv_pool_config *config, int64_t num_pages, uint64_t budget_bytes)
{
    mla_kv_pool_config c = *config;
    uint64_t bytes = 0;
    c.num_pages = num_pages;
    return lay_out(&c, &bytes, NULL) == MLA_OK && bytes <= budget_bytes;
}

mla_status mla_kv_pool_pages_for_budget(const mla_kv_pool_config *config, uint64_t budget_bytes,
                                        int64_t *num_pages, mla_diag *diag)
{
    if (num_pages == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "num_pages is NULL: give a place for the result");
    mla_kv_pool_config own, one;
    MLAI_TRY(take_config(config, &own, diag));
    uint64_t least = 0;
    one = own;
    one.num_pages = 1;
    MLAI_TRY(lay_out(&one, &least, diag));
    if (least > budget_bytes)
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "budget_bytes %llu: one usable page (and page 0) in %d layers takes %llu",
                         (unsigned long long)budget_bytes, own.num_layers,
                         (unsigned long long)least);
    /* Size grows with the pages, and a fixed layer stride holds only so many: bisect. */
    int64_t low = 1, high = MAX_NUM_PAGES;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (fits(&own, middle, budget_bytes))
            low = middle;
        else
            high = middle - 1;
    }
    *num_pages = low;
    return MLA_OK;
}

mla_status mla_kv_pool_create(mla_context *ctx, const mla_kv_pool_config *config, mla_kv_pool **out,
                              mla_diag *diag)
{
    if (ctx == NULL || out == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "%s is NULL: give one",
                         ctx == NULL ? "ctx" : "out");
    mla_kv_pool_config own;
    uint64_t bytes = 0;
    MLAI_TRY(take_sized_config(config, &own, &bytes, diag));
    mlai_device device;
    MLAI_TRY(mlai_context_device(ctx, own.device_type, own.device_index, &device, diag));
    if (own.memory != NULL) {
        if ((uintptr_t)own.memory % MEMORY_ALIGNMENT != 0)
            return mlai_fail(diag, MLA_ERROR_STRIDE, "memory is not aligned to %d bytes",
                             MEMORY_ALIGNMENT);
        if (own.memory_bytes < bytes)
            return mlai_fail(diag, MLA_ERROR_CAPACITY,
                             "memory_bytes %llu: this pool needs %llu (page 0 included)",
                             (unsigned long long)own.memory_bytes, (unsigned long long)bytes);
    }
    mla_kv_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY, "no memory for a pool's descriptor");
    pool->ctx = ctx;
    pool->row_bytes = row_payload_bytes(&own);
    pool->device = device;
    if (own.memory == NULL) {
        if (device.runtime != NULL)
            pool->owned = device.runtime->alloc(device.handle, bytes);
        else if (bytes <= SIZE_MAX - MEMORY_ALIGNMENT)
            pool->owned = calloc(1, (size_t)bytes + MEMORY_ALIGNMENT);
        if (pool->owned == NULL) {
            free(pool);
            return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY,
                             "no memory for a pool of %llu bytes: take fewer pages "
                             "(mla_kv_pool_pages_for_budget)",
                             (unsigned long long)bytes);
        }
        own.memory =
            (void *)(uintptr_t)mlai_align_up((uint64_t)(uintptr_t)pool->owned, MEMORY_ALIGNMENT);
        own.memory_bytes = bytes;
    }
    pool->base = own.memory;
    pool->config = own;
    *out = pool;
    return MLA_OK;
}

void mla_kv_pool_destroy(mla_kv_pool *pool)
{
    if (pool == NULL)
        return;
    if (pool->device.runtime != NULL)
        pool->device.runtime->release(pool->device.handle, pool->owned);
    else
        free(pool->owned);
    free(pool);
}

const mla_kv_pool_config *mla_kv_pool_get_config(const mla_kv_pool *pool)
{
    return pool == NULL ? NULL : &pool->config;
}

static mla_status check_layer(const mla_kv_pool *pool, int32_t layer_id, mla_diag *diag)
{
    if (pool == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "pool is NULL: give one");
    if (layer_id < 0 || layer_id >= pool->config.num_layers)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "layer_id %d: the pool has layers 0 to %d",
                         layer_id, pool->config.num_layers - 1);
    return MLA_OK;
}

mla_status mla_kv_pool_get_key_buffer(const mla_kv_pool *pool, int32_t layer_id,
                                      mla_tensor *kv_cache, mla_diag *diag)
{
    MLAI_TRY(check_layer(pool, layer_id, diag));
    if (kv_cache == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "kv_cache is NULL: give a place for the result");
    const mla_kv_pool_config *c = &pool->config;
    uint64_t element = (uint64_t)mla_format_bytes(c->format);
    mla_tensor t = mla_tensor_3d(mlai_kv_pool_row(pool, layer_id, 0), c->format, c->num_pages + 1,
                                 c->page_size, (int64_t)(pool->row_bytes / element));
    t.device_type = c->device_type;
    t.device_index = c->device_index;
    t.stride[0] = (int64_t)(c->page_stride_bytes / element);
    t.stride[1] = (int64_t)(c->row_stride_bytes / element);
    *kv_cache = t;
    return MLA_OK;
}

mla_status mla_kv_pool_get_layer_info(const mla_kv_pool *pool, int32_t layer_id,
                                      mla_kv_layer_info *info, mla_diag *diag)
{
    MLAI_TRY(check_layer(pool, layer_id, diag));
    if (info == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "info is NULL: give a place for the result");
    if (info->struct_size != sizeof *info)
        return mlai_fail(diag, MLA_ERROR_VERSION,
                         "info.struct_size %u: this version of mla_kv_layer_info has %u bytes "
                         "(start from MLA_KV_LAYER_INFO_INIT)",
                         info->struct_size, (unsigned)sizeof *info);
    const mla_kv_pool_config *c = &pool->config;
    *info = (mla_kv_layer_info){
        .struct_size = sizeof *info,
        .base = mlai_kv_pool_row(pool, layer_id, 0),
        .row_bytes = pool->row_bytes,
        .row_stride_bytes = c->row_stride_bytes,
        .page_stride_bytes = c->page_stride_bytes,
        .page_bytes = pool->row_bytes * (uint64_t)c->page_size,
        .layer_bytes = (uint64_t)c->num_pages * c->page_stride_bytes +
                       (uint64_t)(c->page_size - 1) * c->row_stride_bytes + pool->row_bytes,
        .num_pages = c->num_pages + 1,
    };
    return MLA_OK;
}

/* The caller gave a pool where the operators got its layer. */
static mla_status name_pool(mla_diag *diag, mla_status status)
{
    static const mlai_name name = {"kv_cache", "pool"};
    return mlai_rename(diag, status, &name, 1);
}

mla_status mla_kv_pool_set_mla_kv_buffer(mla_kv_pool *pool, int32_t layer_id, mla_tensor slots,
                                         mla_tensor latent, mla_tensor rope, float k_scale,
                                         int32_t flags, const mla_call *call, mla_diag *diag)
{
    mla_write_kv_params params = MLA_WRITE_KV_PARAMS_INIT;
    MLAI_TRY(mla_kv_pool_get_key_buffer(pool, layer_id, &params.kv_cache, diag));
    params.flags = flags;
    params.k_scale = k_scale;
    params.latent = latent;
    params.rope = rope;
    params.slots = slots;
    params.kv_lora_rank = pool->config.kv_lora_rank;
    params.qk_rope_head_dim = pool->config.qk_rope_head_dim;
    if (call != NULL)
        params.call = *call;
    return name_pool(diag, mla_write_kv(pool->ctx, &params, diag));
}

mla_status mla_kv_pool_get_mla_kv_buffer(const mla_kv_pool *pool, int32_t layer_id,
                                         mla_tensor slots, mla_tensor latent, mla_tensor rope,
                                         float k_scale, const mla_call *call, mla_diag *diag)
{
    mla_gather_kv_params params = MLA_GATHER_KV_PARAMS_INIT;
    MLAI_TRY(mla_kv_pool_get_key_buffer(pool, layer_id, &params.kv_cache, diag));
    params.k_scale = k_scale;
    params.slots = slots;
    params.latent = latent;
    params.rope = rope;
    params.kv_lora_rank = pool->config.kv_lora_rank;
    params.qk_rope_head_dim = pool->config.qk_rope_head_dim;
    if (call != NULL)
        params.call = *call;
    return name_pool(diag, mla_gather_kv(pool->ctx, &params, diag));
}
