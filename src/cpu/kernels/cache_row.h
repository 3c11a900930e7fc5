/*
 * One row of the cache, in parts: the latent (R values) and the rope key (P values), which lie one
 * after the other in a row or in two tensors. Storing converts, divides by k_scale and may
 * sanitize; loading multiplies by k_scale. ds656 rows: 512 e4m3, four f32 scales, 64 bf16. All
 * offsets are 64-bit. Used by the write, gather and rope_write kernels.
 */
#ifndef MLAI_CACHE_ROW_H
#define MLAI_CACHE_ROW_H

#include "cpu/elementwise.h"
#include "cpu/kernels/convert_row.h"

enum {
    MLAI_DS656_LATENT = 512,
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
    int32_t rope_format;
    float k_scale;
    mlai_change change; /* of a row that is stored */
    bool is_streaming;  /* rows written, or read out of the cache, pass by the caches */
    bool is_staged;     /* so do rows written, but through an mlai_stage */
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
                        .rope_format = kv_cache->format,
                        .k_scale = k_scale,
                        .change = {.divisor = k_scale, .factor = 1.0f, .largest = INFINITY}};
    cache.rope = cache.latent + kv_lora_rank * bytes;
    cache.rope_page_bytes = cache.page_bytes;
    cache.rope_row_bytes = cache.row_bytes;
    if (mlai_present(kv_cache_rope)) {
        cache.rope = kv_cache_rope->data;
        cache.rope_page_bytes = kv_cache_rope->stride[0] * bytes;
        cache.rope_row_bytes = kv_cache_rope->stride[1] * bytes;
    }
    if (cache.format == MLA_FORMAT_DS656) {
        cache.rope = cache.latent + MLAI_DS656_ROPE_AT;
        cache.rope_format = MLA_FORMAT_BF16;
    }
    /* What would be infinite in the cache's format becomes its largest finite value. */
    if ((flags & MLA_WRITE_SANITIZE) != 0)
        cache.change.largest = cache.rope_format == MLA_FORMAT_BF16  ? 0x1.fep127f
                               : cache.rope_format == MLA_FORMAT_F16 ? 65504.0f
                                                                     : FLT_MAX;
    return cache;
}

/* Rows that are written pass by the caches. */
static inline void mlai_cache_stream(mlai_cache *cache)
{
    cache->is_staged = cache->format == MLA_FORMAT_DS656;
    cache->is_streaming = !cache->is_staged;
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

/* Rows are asked for this many of a task's rows before they are used: slots jump from page to page,
 * where the processor's own prefetching does not follow. */
enum { MLAI_ROWS_AHEAD = 4 };

/* ---- ds656 -------------------------------------------------------------------------------------
 */

/* The largest magnitude of a tile, NaN aside. */
MLAI_INLINE float mlai_tile_largest(const float *x)
{
    float lanes[V_LANES];
    vec largest = v_set1(0.0f);
    MLAI_UNROLL
    for (int32_t i = 0; i < MLAI_DS656_TILE; i += V_LANES)
        largest = v_max(v_abs(v_load(x + i)), largest);
    v_store(lanes, largest);
    for (int32_t half = V_LANES / 2; half > 0; half /= 2)
        for (int32_t i = 0; i < half; i++)
            lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}

/*
 * The latent of a ds656 row: n = 512 codes, then the scale max|x| / 448 of each 128 values, or 1
 * where that is 0 or not finite (a zero tile, an infinity). `ahead` is the input of a later row.
 */
MLAI_APART void mlai_store_ds656_latent(char *row, const char *in, int32_t in_format, int64_t n,
                                        const mlai_change *change, const char *ahead)
{
    const bool is_held = change->largest <= FLT_MAX;
    if (in_format == MLA_FORMAT_BF16 && !is_held &&
        MLAI_FROM_BF16(ds656_of_bf16, row, in, ahead) != 0)
        return;
    _Alignas(64) float values[MLAI_DS656_LATENT];
    mlai_prefetch_bytes(ahead, n * mlai_lane_bytes(in_format), false);
    mlai_widen(values, in, in_format, n);
    if (is_held)
        mlai_hold_values(values, n, change->largest);
    for (int32_t tile = 0; tile < MLAI_DS656_LATENT / MLAI_DS656_TILE; tile++) {
        float *x = values + tile * MLAI_DS656_TILE;
        float scale = mlai_tile_largest(x) / 448.0f;
        scale = scale > 0.0f && scale <= FLT_MAX ? scale : 1.0f;
        for (int32_t i = 0; i < MLAI_DS656_TILE; i++)
            x[i] /= scale;
        memcpy(row + MLAI_DS656_SCALES_AT + tile * sizeof scale, &scale, sizeof scale);
    }
    mlai_narrow(row, MLA_FORMAT_E4M3, values, n);
}

static inline void mlai_load_ds656_latent(const mlai_cache *cache, char *out, int32_t out_format,
                                          const char *row, const char *ahead)
{
    for (int32_t tile = 0; tile < MLAI_DS656_LATENT / MLAI_DS656_TILE; tile++) {
        const int64_t at = tile * MLAI_DS656_TILE;
        mlai_change change = mlai_no_change;
        memcpy(&change.factor, row + MLAI_DS656_SCALES_AT + tile * sizeof(float), sizeof(float));
        mlai_convert_row(out + at * mlai_lane_bytes(out_format), out_format, row + at,
                         MLA_FORMAT_E4M3, MLAI_DS656_TILE, &change, cache->is_streaming,
                         ahead + at);
    }
}

/* ---- rows --------------------------------------------------------------------------------------
 */

/* `ahead` is the input of a later row, or `in`. */
static inline void mlai_store_latent(const mlai_cache *cache, mlai_cache_row row, const char *in,
                                     int32_t in_format, const char *ahead)
{
    if (cache->format == MLA_FORMAT_DS656)
        mlai_store_ds656_latent(row.latent, in, in_format, cache->n_latent, &cache->change, ahead);
    else
        mlai_convert_row(row.latent, cache->format, in, in_format, cache->n_latent, &cache->change,
                         cache->is_streaming, ahead);
}

/* n rope values from value `first` on. */
static inline void mlai_store_rope(const mlai_cache *cache, mlai_cache_row row, int64_t first,
                                   const char *in, int32_t in_format, int64_t n, const char *ahead)
{
    mlai_convert_row(row.rope + first * mlai_lane_bytes(cache->rope_format), cache->rope_format, in,
                     in_format, n, &cache->change, cache->is_streaming, ahead);
}

/* `ahead` is a later row of the cache, or `row`. */
static inline void mlai_load_latent(const mlai_cache *cache, mlai_cache_row row, char *out,
                                    int32_t out_format, mlai_cache_row ahead)
{
    const mlai_change change = {1.0f, cache->k_scale, INFINITY};
    if (cache->format == MLA_FORMAT_DS656)
        mlai_load_ds656_latent(cache, out, out_format, row.latent, ahead.latent);
    else
        mlai_convert_row(out, out_format, row.latent, cache->format, cache->n_latent, &change,
                         cache->is_streaming, ahead.latent);
}

static inline void mlai_load_rope(const mlai_cache *cache, mlai_cache_row row, char *out,
                                  int32_t out_format, mlai_cache_row ahead)
{
    const mlai_change change = {1.0f, cache->k_scale, INFINITY};
    mlai_convert_row(out, out_format, row.rope, cache->rope_format, cache->n_rope, &change,
                     cache->is_streaming, ahead.rope);
}

/*
 * Rows of ds656 that pass by the caches. 656 bytes are ten lines and a quarter: four rows in a row
 * are made here and stored together, as 41 lines.
 */
enum { MLAI_STAGE_BYTES = 4 * MLA_DS656_ROW_BYTES };

typedef struct mlai_stage {
    _Alignas(64) char made[MLAI_STAGE_BYTES];
    char *to;
    int64_t n_bytes;
} mlai_stage;

static inline void mlai_stage_empty(mlai_stage *stage)
{
    if (stage->n_bytes > 0)
        mlai_stream_copy(stage->to, stage->made, stage->n_bytes, stage->made);
    stage->n_bytes = 0;
}

/* Where to make the row that belongs to `row`. */
static inline mlai_cache_row mlai_stage_row(mlai_stage *stage, mlai_cache_row row)
{
    if (stage->n_bytes == 0 || stage->n_bytes == MLAI_STAGE_BYTES ||
        row.latent != stage->to + stage->n_bytes) {
        mlai_stage_empty(stage);
        stage->to = row.latent;
    }
    char *made = stage->made + stage->n_bytes;
    stage->n_bytes += MLA_DS656_ROW_BYTES;
    return (mlai_cache_row){made, made + MLAI_DS656_ROPE_AT};
}

/* ---- who writes which row ----------------------------------------------------------------------
 */

/*
 * Tokens shared out over tasks by the row they write, so that two tokens with one slot are written
 * by one task, in order, and the row is never a mixture. Runs of 2^run_bits slots go to the tasks
 * in turn, from another start after each 16 runs, so that no pattern of pages gives all to one
 * task. Runs are 4 slots, or 64 where there are enough of them: the processor reads on past a run's
 * end.
 */
static inline int32_t mlai_run_bits(int64_t tokens, int32_t n_tasks)
{
    return tokens >= (int64_t)n_tasks * 1024 ? 6 : 2;
}

static inline bool mlai_owns_slot(int64_t slot, int64_t token, int32_t run_bits, int32_t task,
                                  int32_t n_tasks)
{
    const uint64_t run = (uint64_t)(slot < 0 ? token : slot) >> run_bits;
    const uint64_t start = (run / 16u * 0x9e3779b97f4a7c15u) >> 40;
    return n_tasks == 1 || (int32_t)((uint32_t)(run + start) % (uint32_t)n_tasks) == task;
}

/* As many tasks as have at least 32 KiB each to move. */
static inline int32_t mlai_slot_tasks(const mla_exec *exec, int64_t tokens, int64_t token_bytes)
{
    const int64_t worth = tokens / (32768 / mlai_max_i64(token_bytes, 1) + 1) + 1;
    return (int32_t)mlai_max_i64(1, mlai_min_i64(worth, exec->n_threads));
}

/* A task's tokens in order, the next MLAI_ROWS_AHEAD of them known. */
typedef struct mlai_token_queue {
    const mla_tensor *slots;
    int32_t task, n_tasks, run_bits;
    int64_t next;                       /* the first token that was not looked at */
    int64_t token[MLAI_ROWS_AHEAD + 1]; /* a ring; -1 after the last */
    int64_t slot[MLAI_ROWS_AHEAD + 1];
    int32_t at;
} mlai_token_queue;

static inline void mlai_queue_find(mlai_token_queue *q, int32_t entry)
{
    const int64_t n = q->slots->shape[0];
    q->token[entry] = -1;
    while (q->next < n) {
        const int64_t token = q->next++, slot = mlai_index_at(q->slots, token);
        if (!mlai_owns_slot(slot, token, q->run_bits, q->task, q->n_tasks))
            continue;
        q->token[entry] = token;
        q->slot[entry] = slot;
        return;
    }
}

static inline mlai_token_queue mlai_queue_make(const mla_tensor *slots, int32_t task,
                                               int32_t n_tasks)
{
    mlai_token_queue q = {.slots = slots,
                          .task = task,
                          .n_tasks = n_tasks,
                          .run_bits = mlai_run_bits(slots->shape[0], n_tasks)};
    for (int32_t i = 0; i <= MLAI_ROWS_AHEAD; i++)
        mlai_queue_find(&q, i);
    return q;
}

typedef struct mlai_queued {
    int64_t token, slot;
    int64_t ahead, ahead_slot; /* MLAI_ROWS_AHEAD later, or the same */
} mlai_queued;

/* The task's next token; false after the last. */
static inline bool mlai_queue_take(mlai_token_queue *q, mlai_queued *item)
{
    const int32_t now = q->at, newest = now == 0 ? MLAI_ROWS_AHEAD : now - 1;
    if (q->token[now] < 0)
        return false;
    const int32_t ahead = q->token[newest] < 0 ? now : newest;
    *item = (mlai_queued){q->token[now], q->slot[now], q->token[ahead], q->slot[ahead]};
    mlai_queue_find(q, now);
    q->at = now == MLAI_ROWS_AHEAD ? 0 : now + 1;
    return true;
}

#endif
