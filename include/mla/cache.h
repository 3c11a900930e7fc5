/*
 * libmla: the paged latent KV cache and its bookkeeping.
 *
 * One token of one layer is a row [normalized latent (R) | rotated rope key (P)]. A page holds
 * page_size rows; slot = page * page_size + offset. **Page 0 is reserved**: allocators hand out ids
 * from 1, unset table entries are 0, padded tokens write to slot 0. A pool of num_pages usable
 * pages therefore has num_pages + 1 pages.
 *
 * Everything here is bookkeeping on the host except the pool's memory, which lies on the CPU or on
 * a device of the context. Functions of a device's pool that take no stream use the device's
 * default stream and are done when they return; the caller has waited for its own work on those
 * rows. Thread rule: one object, one thread at a time.
 */
#ifndef MLA_CACHE_H
#define MLA_CACHE_H

#include <mla/ops.h>

typedef struct mla_kv_pool mla_kv_pool;
typedef struct mla_page_allocator mla_page_allocator;
typedef struct mla_req_to_page mla_req_to_page;

/* ---- the pool ------------------------------------------------------------------------------- */

typedef struct mla_kv_pool_config {
    uint32_t struct_size;
    int32_t device_type;
    int32_t device_index;
    int32_t num_layers;
    int64_t num_pages; /* usable pages; page 0 comes on top */
    int32_t page_size; /* tokens */
    int32_t format;    /* f32 bf16 f16 e4m3 e5m2 ds656 */
    int32_t kv_lora_rank;
    int32_t qk_rope_head_dim;
    void *memory;          /* NULL = the pool allocates, zeroed; else the caller's, left as it is */
    uint64_t memory_bytes; /* with memory: its size; aligned to 64 bytes */
    uint64_t row_stride_bytes;   /* 0 = one row; arenas may use more (a multiple of the element) */
    uint64_t page_stride_bytes;  /* 0 = page_size rows */
    uint64_t layer_stride_bytes; /* 0 = num_pages + 1 pages */
} mla_kv_pool_config;

#define MLA_KV_POOL_CONFIG_INIT                                                                    \
    {                                                                                              \
        .struct_size = sizeof(mla_kv_pool_config), .device_type = MLA_DEVICE_CPU                   \
    }

/* One layer's memory, for an engine that moves pages itself. */
typedef struct mla_kv_layer_info {
    uint32_t struct_size;
    int32_t reserved0;
    void *base;         /* of page 0 */
    uint64_t row_bytes; /* payload of one token */
    uint64_t row_stride_bytes;
    uint64_t page_stride_bytes;
    uint64_t page_bytes;  /* page_size rows: the item to move when strides are packed */
    uint64_t layer_bytes; /* first byte to last byte */
    int64_t num_pages;    /* page 0 included */
} mla_kv_layer_info;

#define MLA_KV_LAYER_INFO_INIT                                                                     \
    {                                                                                              \
        .struct_size = sizeof(mla_kv_layer_info)                                                   \
    }

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes that a pool of this configuration needs, page 0 included. Errors: MLA_ERROR_ARGUMENT,
 * MLA_ERROR_FORMAT, MLA_ERROR_STRIDE, MLA_ERROR_CAPACITY (over 64 bits). */
MLA_API mla_status mla_kv_pool_bytes(const mla_kv_pool_config *config, uint64_t *bytes,
                                     mla_diag *diag);

/* The largest num_pages whose pool fits budget_bytes; config->num_pages is ignored.
 * MLA_ERROR_CAPACITY when not even one usable page fits. */
MLA_API mla_status mla_kv_pool_pages_for_budget(const mla_kv_pool_config *config,
                                                uint64_t budget_bytes, int64_t *num_pages,
                                                mla_diag *diag);

/* ctx must outlive the pool. Errors: as mla_kv_pool_bytes, MLA_ERROR_OUT_OF_MEMORY,
 * MLA_ERROR_CAPACITY (memory_bytes too small; the sentence says how much is needed),
 * MLA_ERROR_DEVICE (the context has no such device). */
MLA_API mla_status mla_kv_pool_create(mla_context *ctx, const mla_kv_pool_config *config,
                                      mla_kv_pool **out, mla_diag *diag);

/* NULL is allowed. Caller-owned memory is left alone. */
MLA_API void mla_kv_pool_destroy(mla_kv_pool *pool);

/* The configuration with all defaults filled in. Valid as long as the pool. */
MLA_API const mla_kv_pool_config *mla_kv_pool_get_config(const mla_kv_pool *pool);

/* The layer as a cache operand: [num_pages + 1, page_size, D] (ds656: .., 656). Borrowed. */
MLA_API mla_status mla_kv_pool_get_key_buffer(const mla_kv_pool *pool, int32_t layer_id,
                                              mla_tensor *kv_cache, mla_diag *diag);

MLA_API mla_status mla_kv_pool_get_layer_info(const mla_kv_pool *pool, int32_t layer_id,
                                              mla_kv_layer_info *info, mla_diag *diag);

/* mla_write_kv into the layer: latent [T, R] and rope [T, P], or latent [T, D] and rope absent.
 * k_scale 1 where the format has none; call may be NULL. */
MLA_API mla_status mla_kv_pool_set_mla_kv_buffer(mla_kv_pool *pool, int32_t layer_id,
                                                 mla_tensor slots, mla_tensor latent,
                                                 mla_tensor rope, float k_scale, int32_t flags,
                                                 const mla_call *call, mla_diag *diag);

/* mla_gather_kv from the layer, in the outputs' format. call may be NULL. */
MLA_API mla_status mla_kv_pool_get_mla_kv_buffer(const mla_kv_pool *pool, int32_t layer_id,
                                                 mla_tensor slots, mla_tensor latent,
                                                 mla_tensor rope, float k_scale,
                                                 const mla_call *call, mla_diag *diag);

/*
 * Copies rows src_slots[i] to dst_slots[i] in every layer, byte for byte, as if all sources were
 * read first. i32 or i64 [n] on the host. Errors: MLA_ERROR_CAPACITY (a slot outside the pool),
 * MLA_ERROR_ARGUMENT (a destination twice), MLA_ERROR_OUT_OF_MEMORY.
 */
MLA_API mla_status mla_kv_pool_move_kv_cache(mla_kv_pool *pool, mla_tensor dst_slots,
                                             mla_tensor src_slots, mla_diag *diag);

/* Zeroes every layer (the payload of each row; arena gaps are left alone). */
MLA_API mla_status mla_kv_pool_clear(mla_kv_pool *pool, void *stream, mla_diag *diag);

/*
 * Host copies: rows slots[i] of layers layer_first .. + layer_count, packed
 * [layer][row][row_bytes]. bytes must be layer_count * n * row_bytes. Export reads the pool, import
 * writes it.
 */
MLA_API mla_status mla_kv_pool_export_rows(const mla_kv_pool *pool, int32_t layer_first,
                                           int32_t layer_count, mla_tensor slots, void *host,
                                           uint64_t bytes, mla_diag *diag);
MLA_API mla_status mla_kv_pool_import_rows(mla_kv_pool *pool, int32_t layer_first,
                                           int32_t layer_count, mla_tensor slots, const void *host,
                                           uint64_t bytes, mla_diag *diag);

/* ---- pages ---------------------------------------------------------------------------------- */

/* Hands out page ids 1..num_pages with reference counts, lowest free id first. */
MLA_API mla_status mla_page_allocator_create(int64_t num_pages, mla_page_allocator **out,
                                             mla_diag *diag);
MLA_API void mla_page_allocator_destroy(mla_page_allocator *allocator);
MLA_API int64_t mla_page_allocator_free_count(const mla_page_allocator *allocator);

/* n ids, each with one reference, or MLA_ERROR_OUT_OF_PAGES and none. */
MLA_API mla_status mla_page_allocator_alloc(mla_page_allocator *allocator, int64_t n, int32_t *ids,
                                            mla_diag *diag);

/* One more reference to each (prefix sharing). All or nothing. Error: MLA_ERROR_ARGUMENT (an id out
 * of range or free). */
MLA_API mla_status mla_page_allocator_retain(mla_page_allocator *allocator, int64_t n,
                                             const int32_t *ids, mla_diag *diag);

/* One reference less; at none the page is free. All or nothing. Error: MLA_ERROR_ARGUMENT (an id
 * out of range, free, or listed more often than it has references). */
MLA_API mla_status mla_page_allocator_release(mla_page_allocator *allocator, int64_t n,
                                              const int32_t *ids, mla_diag *diag);

/* References of a page: 0 when free, -1 when out of range. */
MLA_API int32_t mla_page_allocator_ref_count(const mla_page_allocator *allocator, int32_t id);

/* ---- which pages a request has --------------------------------------------------------------- */

/*
 * The table i32 [max_requests + 1, max_pages], zeroed; row max_requests is the sentinel for padded
 * rows and stays zero. Memory belongs to the table; see mla_req_to_page_tensor.
 */
MLA_API mla_status mla_req_to_page_create(int32_t max_requests, int32_t max_pages,
                                          mla_req_to_page **out, mla_diag *diag);
MLA_API void mla_req_to_page_destroy(mla_req_to_page *table);

/* i32 [max_requests + 1, max_pages] on the host. Borrowed. */
MLA_API mla_tensor mla_req_to_page_tensor(const mla_req_to_page *table);

/* How many pages a request has; -1 for a request out of range. */
MLA_API int32_t mla_req_to_page_count(const mla_req_to_page *table, int32_t req);

/* Appends ids at the request's end. Over max_pages: MLA_ERROR_CAPACITY, and none is appended. */
MLA_API mla_status mla_req_to_page_append(mla_req_to_page *table, int32_t req, int32_t n,
                                          const int32_t *ids, mla_diag *diag);

/*
 * Makes rows length .. length + new_tokens - 1 of a request writable: appends fresh pages, and
 * where the last page is shared (more than one reference) and will be written, replaces it by a
 * fresh one and copies its live rows in every layer of `pools` (copy on write). The request must
 * own pages for `length` tokens. All or nothing. n_pools may be 0: an engine with a pool of its own
 * then copies the rows itself where the page id of row `length` changed. Errors:
 * MLA_ERROR_OUT_OF_PAGES, MLA_ERROR_CAPACITY (over max_pages), MLA_ERROR_ARGUMENT.
 */
MLA_API mla_status mla_req_to_page_reserve(mla_req_to_page *table, mla_page_allocator *allocator,
                                           mla_kv_pool *const *pools, int32_t n_pools, int32_t req,
                                           int32_t page_size, int64_t length, int64_t new_tokens,
                                           mla_diag *diag);

/* Keeps the pages of the first `length` tokens and releases the others (allocator may be NULL). */
MLA_API mla_status mla_req_to_page_truncate(mla_req_to_page *table, mla_page_allocator *allocator,
                                            int32_t req, int32_t page_size, int64_t length,
                                            mla_diag *diag);

/* ---- lengths to positions, slots and tables -------------------------------------------------- */

/*
 * For each request i in batch order with cached_lens[i] rows in the cache and new_lens[i] new
 * tokens: positions cached .. cached + new - 1, their slots through the table, and the sum
 * cached + new as seq_lens. Outputs are request-major, T = sum of new_lens.
 *   req_to_page      i32 [rows, M]      req_pool_indices  i32 or i64 [B], rows of it
 *   cached_lens, new_lens  i32 [B]
 *   positions        optional i32 or i64 [T]     slots  optional i32 or i64 [T]
 *   seq_lens         optional i32 [B]
 * Errors: MLA_ERROR_CAPACITY (a position past M pages, a row outside the table, a slot over the
 * format), MLA_ERROR_SHAPE (T), MLA_ERROR_ARGUMENT (negative lengths). Host tensors.
 */
MLA_API mla_status mla_positions_and_slots(mla_tensor req_to_page, mla_tensor req_pool_indices,
                                           mla_tensor cached_lens, mla_tensor new_lens,
                                           int32_t page_size, mla_tensor positions,
                                           mla_tensor slots, mla_tensor seq_lens, mla_diag *diag);

/*
 * out[i, :] = req_to_page[req_pool_indices[i], :W], W = out.shape[1] (the seed's rule: W =
 * ceil(max_seq_len / page_size)); columns past the table's are 0. i32 [B, W]. Host tensors.
 */
MLA_API mla_status mla_build_page_table(mla_tensor req_to_page, mla_tensor req_pool_indices,
                                        mla_tensor out, mla_diag *diag);

/*
 * The two above where the tensors live on a device of `ctx`, enqueued on `stream` (CUstream) and
 * fit for graph capture: nothing is copied to the host, allocated or waited for, and a replay reads
 * the lengths that stand there then. All tensors are on one device; T is a capacity here.
 *   cu_seqlens_q     optional i32 [B + 1], the running sum of new_lens (0 first)
 * Tokens past the sum of new_lens get position 0 and slot -1, which mla_write_kv and its kin skip;
 * of a sum over T the first T are stored. A device cannot return a status: negative lengths count
 * as 0, and a token whose page or request is not in req_to_page, whose page id is negative or whose
 * slot passes i32 (for i32 slots) gets slot -1. seq_lens may be cached_lens; other outputs overlap
 * nothing. On CPU tensors they do what the two above do, errors included, with T as a capacity.
 * Thread rule: any thread. Errors: MLA_ERROR_SHAPE, _FORMAT, _STRIDE, _ARGUMENT (page_size),
 * _DEVICE (a tensor elsewhere, no such device).
 */
MLA_API mla_status mla_enqueue_positions_and_slots(
    mla_context *ctx, void *stream, mla_tensor req_to_page, mla_tensor req_pool_indices,
    mla_tensor cached_lens, mla_tensor new_lens, int32_t page_size, mla_tensor positions,
    mla_tensor slots, mla_tensor seq_lens, mla_tensor cu_seqlens_q, mla_diag *diag);

/* A row of req_pool_indices outside the table reads as pages 0. */
MLA_API mla_status mla_enqueue_page_table(mla_context *ctx, void *stream, mla_tensor req_to_page,
                                          mla_tensor req_pool_indices, mla_tensor out,
                                          mla_diag *diag);

#ifdef __cplusplus
}
#endif
#endif
