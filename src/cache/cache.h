/*
 * Cache: what its files share. The pool's memory is [layer][page][row], each level with a stride in
 * bytes of its own, so that one layout serves packed pools (layer outermost) and arenas in which a
 * page holds the rows of all layers (page outermost). A row is row_bytes of payload; what lies
 * between payloads is never touched.
 *
 *   byte of (layer l, slot s) = base + l * layer_stride + (s / PS) * page_stride
 *                             + (s % PS) * row_stride
 *
 * All of it in 64 bits. Used by the files of this folder; src/backend uses what stands last, the
 * checks of index tensors and request tables.
 */
#ifndef MLAI_CACHE_H
#define MLAI_CACHE_H

#include "base/base.h"
#include "registry/registry.h"
#include <mla/cache.h>

struct mla_kv_pool {
    mla_context *ctx;
    mla_kv_pool_config config; /* defaults filled in */
    uint64_t row_bytes;
    uint8_t *base; /* of layer 0, page 0 */
    void *owned;   /* what to free, NULL for a caller's memory */
    mlai_device device;
};

static inline int64_t mlai_kv_pool_slots(const mla_kv_pool *pool)
{
    return (pool->config.num_pages + 1) * (int64_t)pool->config.page_size;
}

static inline uint8_t *mlai_kv_pool_row(const mla_kv_pool *pool, int32_t layer, int64_t slot)
{
    const mla_kv_pool_config *c = &pool->config;
    return pool->base + (uint64_t)layer * c->layer_stride_bytes +
           (uint64_t)(slot / c->page_size) * c->page_stride_bytes +
           (uint64_t)(slot % c->page_size) * c->row_stride_bytes;
}

/* Rows 0 .. n_rows - 1 of page src to page dst, in every layer. Both pages lie in the pool. Error:
 * MLA_ERROR_DEVICE. */
mla_status mlai_kv_pool_copy_page_rows(mla_kv_pool *pool, int32_t dst, int32_t src, int32_t n_rows,
                                       mla_diag *diag);

int64_t mlai_page_allocator_num_pages(const mla_page_allocator *allocator);

/* A rank-1 host tensor of i32 or i64 (as `formats` says) with at least `least` entries. */
mla_status mlai_check_host_indices(const mla_tensor *t, const char *name, uint32_t formats,
                                   int64_t least, mla_diag *diag);

/* req_to_page, and that the first n of req_pool_indices (checked before) name rows of it. */
mla_status mlai_check_request_rows(const mla_tensor *req_to_page,
                                   const mla_tensor *req_pool_indices, int64_t n, mla_diag *diag);

/* Entry i of a rank-1 host tensor of i32 or i64. */
static inline void mlai_store_index(const mla_tensor *t, int64_t i, int64_t value)
{
    if (t->format == MLA_FORMAT_I64)
        ((int64_t *)t->data)[i * t->stride[0]] = value;
    else
        ((int32_t *)t->data)[i * t->stride[0]] = (int32_t)value;
}

/* The pages of the request at place i. */
static inline const int32_t *mlai_request_pages(const mla_tensor *req_to_page,
                                                const mla_tensor *req_pool_indices, int64_t i)
{
    return (const int32_t *)req_to_page->data +
           mlai_index_at(req_pool_indices, i) * req_to_page->stride[0];
}

#endif
