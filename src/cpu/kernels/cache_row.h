/*
 * One row of the cache, in parts: the latent (R values) and the rope key (P values), which lie one
 * after the other in a row or in two tensors. Storing converts, divides by k_scale and may
 * sanitize; loading multiplies by k_scale. ds656 rows: 512 e4m3, four f32 scales, 64 bf16. All
 * offsets are 64-bit. Used by the write, gather and rope_write kernels.
 */
#ifndef MLAI_CACHE_ROW_H
#define MLAI_CACHE_ROW_H

#include "cpu/elementwise.h"
#include "cpu/kernels/lanes.h"
#include "cpu/kernels/stream.h"
#include <float.h>

enum {
    MLAI_CHUNK = 512,
    MLAI_DS656_LATENT = 512,
    MLAI_DS656_ROPE = 64,
    MLAI_DS656_TILE = 128,
    MLAI_DS656_SCALES_AT = 512,
    MLAI_DS656_ROPE_AT = 528
};

typedef struct mlai_cache {
    char *latent;
    char *rope;
    int64_t page_bytes, row_bytes;           /* strides of the latent part */
    int64_t rope_page_bytes, rope_row_bytes; /* strides of the rope part */
    int64_t page_size;
    int64_t n_latent, n_rope; /* R and P */
    int32_t format;
    float k_scale;
    bool sanitize;
    bool is_streaming; /* rows written, or read out of the cache, pass by the caches */
} mlai_cache;

static inline mlai_cache mlai_cache_make(const mla_tensor *kv_cache,
                                         const mla_tensor *kv_cache_rope, int32_t kv_lora_rank,
                                         int32_t qk_rope_head_dim, float k_scale, int32_t flags)
{
    const int64_t bytes = mlai_lane_bytes(kv_cache->format);
    mlai_cache cache = {.latent = kv_cache->data,
                        .page_bytes = kv_cache->stride[0] * bytes,
                        .row_bytes = kv_cache->stride[1] * bytes,
                        .page_size = kv_cache->shape[1],
                        .n_latent = kv_lora_rank,
                        .n_rope = qk_rope_head_dim,
                        .format = kv_cache->format,
                        .k_scale = k_scale,
                        .sanitize = (flags & MLA_WRITE_SANITIZE) != 0};
    cache.rope = cache.latent + kv_lora_rank * bytes;
    cache.rope_page_bytes = cache.page_bytes;
    cache.rope_row_bytes = cache.row_bytes;
    if (mlai_present(kv_cache_rope)) {
        cache.rope = kv_cache_rope->data;
        cache.rope_page_bytes = kv_cache_rope->stride[0] * bytes;
        cache.rope_row_bytes = kv_cache_rope->stride[1] * bytes;
    }
    if (cache.format == MLA_FORMAT_DS656)
        cache.rope = cache.latent + MLAI_DS656_ROPE_AT;
    return cache;
}

typedef struct mlai_cache_row {
    char *latent;
    char *rope;
} mlai_cache_row;

static inline mlai_cache_row mlai_cache_row_at(const mlai_cache *cache, int64_t slot)
{
    const int64_t page = slot / cache->page_size, offset = slot % cache->page_size;
    return (mlai_cache_row){cache->latent + page * cache->page_bytes + offset * cache->row_bytes,
                            cache->rope + page * cache->rope_page_bytes +
                                offset * cache->rope_row_bytes};
}

/* NaN becomes 0, and what would be infinite in the cache's format its largest finite value. */
static inline void mlai_sanitize(float *x, int64_t n, int32_t format)
{
    float largest = FLT_MAX;
    if (format == MLA_FORMAT_BF16 || format == MLA_FORMAT_DS656)
        largest = 0x1.fep127f;
    else if (format == MLA_FORMAT_F16)
        largest = 65504.0f;
    for (int64_t i = 0; i < n; i++) {
        float value = x[i] == x[i] ? x[i] : 0.0f;
        value = value > largest ? largest : value;
        x[i] = value < -largest ? -largest : value;
    }
}

static inline void mlai_put_bytes(const mlai_cache *cache, char *out, const char *in, int64_t bytes)
{
    if (cache->is_streaming)
        mlai_stream_copy(out, in, bytes);
    else
        memcpy(out, in, (size_t)bytes);
}

/* At most MLAI_CHUNK values to out. */
static inline void mlai_put_values(const mlai_cache *cache, char *out, int32_t format,
                                   const float *values, int64_t n)
{
    if (!cache->is_streaming) {
        mlai_narrow(out, format, values, n);
        return;
    }
    _Alignas(64) char row[MLAI_CHUNK * sizeof(float)];
    mlai_narrow(row, format, values, n);
    mlai_stream_copy(out, row, n * mlai_lane_bytes(format));
}

/* n values of one part, from `in` of a float format. Not for ds656 latents. */
static inline void mlai_store_part(const mlai_cache *cache, char *out, int32_t out_format,
                                   const char *in, int32_t in_format, int64_t n)
{
    const int64_t in_bytes = mlai_lane_bytes(in_format), out_bytes = mlai_lane_bytes(out_format);
    if (in_format == out_format && !cache->sanitize) {
        mlai_put_bytes(cache, out, in, n * out_bytes);
        return;
    }
    _Alignas(64) float values[MLAI_CHUNK];
    const float scale = cache->k_scale;
    for (int64_t first = 0; first < n; first += MLAI_CHUNK) {
        const int64_t count = mlai_min_i64(MLAI_CHUNK, n - first);
        mlai_widen(values, in + first * in_bytes, in_format, count);
        if (cache->sanitize)
            mlai_sanitize(values, count, out_format);
        if (scale != 1.0f)
            for (int64_t i = 0; i < count; i++)
                values[i] /= scale;
        mlai_put_values(cache, out + first * out_bytes, out_format, values, count);
    }
}

/*
 * The largest magnitude of a tile, NaN aside. Magnitudes are compared as integers, which order like
 * the values; 32 running maxima make the loop plain vector code.
 */
static inline float mlai_tile_largest(const float *x)
{
    int32_t largest[32] = {0};
    for (int32_t first = 0; first < MLAI_DS656_TILE; first += 32)
        for (int32_t i = 0; i < 32; i++) {
            int32_t magnitude = (int32_t)(mlai_f32_bits(x[first + i]) & 0x7fffffffu);
            magnitude = magnitude > 0x7f800000 ? 0 : magnitude;
            largest[i] = magnitude > largest[i] ? magnitude : largest[i];
        }
    for (int32_t half = 16; half > 0; half /= 2)
        for (int32_t i = 0; i < half; i++)
            largest[i] = largest[i] > largest[i + half] ? largest[i] : largest[i + half];
    return mlai_f32_from_bits((uint32_t)largest[0]);
}

/*
 * The latent of a ds656 row: each 128 values with scale = max|x| / 448. A scale that is 0 or not
 * finite (a zero tile, an infinity) becomes 1.
 */
static inline void mlai_store_ds656_latent(const mlai_cache *cache, char *row, const char *in,
                                           int32_t in_format)
{
    _Alignas(64) float values[MLAI_DS656_LATENT];
    float scales[MLAI_DS656_LATENT / MLAI_DS656_TILE];
    mlai_widen(values, in, in_format, cache->n_latent);
    if (cache->sanitize)
        mlai_sanitize(values, cache->n_latent, MLA_FORMAT_DS656);
    for (int32_t tile = 0; tile < MLAI_DS656_LATENT / MLAI_DS656_TILE; tile++) {
        float *x = values + tile * MLAI_DS656_TILE;
        float scale = mlai_tile_largest(x) / 448.0f;
        scale = scale > 0.0f && scale <= FLT_MAX ? scale : 1.0f;
        for (int32_t i = 0; i < MLAI_DS656_TILE; i++)
            x[i] /= scale;
        scales[tile] = scale;
    }
    mlai_put_values(cache, row, MLA_FORMAT_E4M3, values, cache->n_latent);
    memcpy(row + MLAI_DS656_SCALES_AT, scales, sizeof scales);
}

static inline void mlai_store_latent(const mlai_cache *cache, mlai_cache_row row, const char *in,
                                     int32_t in_format)
{
    if (cache->format == MLA_FORMAT_DS656)
        mlai_store_ds656_latent(cache, row.latent, in, in_format);
    else
        mlai_store_part(cache, row.latent, cache->format, in, in_format, cache->n_latent);
}

/* n rope values from value `first` on. */
static inline void mlai_store_rope(const mlai_cache *cache, mlai_cache_row row, int64_t first,
                                   const char *in, int32_t in_format, int64_t n)
{
    const int32_t format = cache->format == MLA_FORMAT_DS656 ? MLA_FORMAT_BF16 : cache->format;
    mlai_store_part(cache, row.rope + first * mlai_lane_bytes(format), format, in, in_format, n);
}

static inline void mlai_load_part(const mlai_cache *cache, char *out, int32_t out_format,
                                  const char *in, int32_t in_format, int64_t n)
{
    const int64_t in_bytes = mlai_lane_bytes(in_format), out_bytes = mlai_lane_bytes(out_format);
    const float scale = cache->k_scale;
    if (in_format == out_format && scale == 1.0f) {
        mlai_put_bytes(cache, out, in, n * out_bytes);
        return;
    }
    _Alignas(64) float values[MLAI_CHUNK];
    for (int64_t first = 0; first < n; first += MLAI_CHUNK) {
        const int64_t count = mlai_min_i64(MLAI_CHUNK, n - first);
        mlai_widen(values, in + first * in_bytes, in_format, count);
        if (scale != 1.0f)
            for (int64_t i = 0; i < count; i++)
                values[i] *= scale;
        mlai_put_values(cache, out + first * out_bytes, out_format, values, count);
    }
}

static inline void mlai_load_latent(const mlai_cache *cache, mlai_cache_row row, char *out,
                                    int32_t out_format)
{
    if (cache->format != MLA_FORMAT_DS656) {
        mlai_load_part(cache, out, out_format, row.latent, cache->format, cache->n_latent);
        return;
    }
    _Alignas(64) float values[MLAI_DS656_LATENT];
    float scales[MLAI_DS656_LATENT / MLAI_DS656_TILE];
    memcpy(scales, row.latent + MLAI_DS656_SCALES_AT, sizeof scales);
    mlai_widen(values, row.latent, MLA_FORMAT_E4M3, cache->n_latent);
    for (int32_t tile = 0; tile < MLAI_DS656_LATENT / MLAI_DS656_TILE; tile++)
        for (int32_t i = 0; i < MLAI_DS656_TILE; i++)
            values[tile * MLAI_DS656_TILE + i] *= scales[tile];
    mlai_put_values(cache, out, out_format, values, cache->n_latent);
}

static inline void mlai_load_rope(const mlai_cache *cache, mlai_cache_row row, char *out,
                                  int32_t out_format)
{
    const int32_t format = cache->format == MLA_FORMAT_DS656 ? MLA_FORMAT_BF16 : cache->format;
    mlai_load_part(cache, out, out_format, row.rope, format, cache->n_rope);
}

/*
 * Rows are asked for a few tokens before they are used, to write (1) or to read (0): slots jump
 * from page to page, where the processor's own prefetching does not follow. Functions that only
 * prefetch are inlined by force: gcc takes a call of one for a call without effect and drops it.
 */
enum { MLAI_ROWS_AHEAD = 4, MLAI_LINE_BYTES = 64 };

#define MLAI_PREFETCHER static inline __attribute__((always_inline))

#define MLAI_PREFETCH_BYTES(start, n_bytes, to_write)                                              \
    do {                                                                                           \
        for (int64_t at_byte = 0; at_byte < (n_bytes); at_byte += MLAI_LINE_BYTES)                 \
            __builtin_prefetch((start) + at_byte, to_write);                                       \
    } while (0)

/*
 * Tokens shared out over tasks by the row they write, so that two tokens with one slot are written
 * by one task, in order, and the row is never a mixture. Neighbouring slots stay together.
 */
static inline bool mlai_owns_slot(int64_t slot, int64_t token, int32_t task, int32_t n_tasks)
{
    if (n_tasks == 1)
        return true;
    const uint64_t group = slot < 0 ? (uint64_t)token : (uint64_t)slot / 4u;
    return (int32_t)(((group * 0x9e3779b97f4a7c15u) >> 32) % (uint32_t)n_tasks) == task;
}

/* As many tasks as have at least 32 KiB each to move. */
static inline int32_t mlai_slot_tasks(const mla_exec *exec, int64_t tokens, int64_t token_bytes)
{
    const int64_t worth = tokens / (32768 / mlai_max_i64(token_bytes, 1) + 1) + 1;
    return (int32_t)mlai_max_i64(1, mlai_min_i64(worth, exec->n_threads));
}

#endif
