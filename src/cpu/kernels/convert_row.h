/*
 * A row from one storage format to another. By blocks of 64 values that stay in registers where the
 * family has vectors, while the row of a later step is asked for line by line:
 *
 *   in     64 values --widen--> f32 --divided or multiplied--> --narrow--> whole lines of out
 *   ahead  64 values prefetched
 *
 * The rest of a row, and what a block does not do, goes in chunks through the first-level cache.
 * The bits are those of lanes.h both ways. Used by the kernels that move rows.
 */
#ifndef MLAI_CONVERT_ROW_H
#define MLAI_CONVERT_ROW_H

#include "base/base.h"
#include "cpu/kernels/lanes.h"
#include "cpu/kernels/stream.h"
#include <float.h>

enum { MLAI_BLOCK = 64, MLAI_CHUNK = 512 };

/* For what is large and would be copied to each of its callers. */
#define MLAI_APART static __attribute__((noinline, unused))

/* What happens to a row's values on the way; only fp8 rows are divided or multiplied. */
typedef struct mlai_change {
    float divisor; /* of fp8 outputs; 1 = none */
    float factor;  /* of fp8 inputs; 1 = none */
    float largest; /* magnitudes are held to this and NaN becomes 0; infinite = neither */
} mlai_change;

static const mlai_change mlai_no_change = {1.0f, 1.0f, INFINITY};

static inline bool mlai_is_change(const mlai_change *c)
{
    return c->divisor != 1.0f || c->factor != 1.0f || c->largest <= FLT_MAX;
}

/* Functions that only prefetch are inlined by force: gcc takes a call of one for a call without
 * effect and drops it. */
MLAI_INLINE void mlai_prefetch_bytes(const char *start, int64_t n_bytes, const bool is_to_write)
{
    for (int64_t i = 0; i < n_bytes; i += MLAI_STREAM_LINE)
        if (is_to_write)
            __builtin_prefetch(start + i, 1);
        else
            __builtin_prefetch(start + i);
}

MLAI_INLINE void mlai_prefetch_lines(const char *p, const int64_t bytes)
{
    MLAI_UNROLL
    for (int64_t i = 0; i < bytes; i += MLAI_STREAM_LINE)
        __builtin_prefetch(p + i);
}

/* Whole lines to where they belong. */
MLAI_INLINE void mlai_put_lines(char *out, const char *made, const int64_t bytes, bool is_streaming)
{
    MLAI_UNROLL
    for (int64_t i = 0; i < bytes; i += MLAI_STREAM_LINE)
        if (is_streaming)
            mlai_stream_line(out + i, made + i);
        else
            mlai_store_line(out + i, made + i);
}

/* ---- blocks ------------------------------------------------------------------------------------
 */

/* The front of a row by blocks; returns how many values it did. */
MLAI_INLINE int64_t mlai_convert_blocks(char *out, const int32_t out_format, const char *in,
                                        const int32_t in_format, int64_t n,
                                        const mlai_change *change, const bool is_scaled,
                                        bool is_streaming, const char *ahead)
{
    const int64_t in_bytes = mlai_lane_bytes(in_format), out_bytes = mlai_lane_bytes(out_format);
    const vec factor = v_set1(change->factor), divisor = v_set1(change->divisor);
    int64_t i = 0;
    for (; i + MLAI_BLOCK <= n; i += MLAI_BLOCK) {
        _Alignas(64) float values[MLAI_BLOCK];
        _Alignas(64) char made[MLAI_BLOCK * sizeof(float)];
        mlai_prefetch_lines(ahead + i * in_bytes, MLAI_BLOCK * in_bytes);
        if (in_format == MLA_FORMAT_BF16 && out_format == MLA_FORMAT_E4M3 && !is_scaled &&
            MLAI_FROM_BF16(e4m3_of_bf16, made, in + i * in_bytes) != 0) {
            mlai_put_lines(out + i, made, MLAI_BLOCK, is_streaming);
            continue;
        }
        mlai_widen_block(values, in + i * in_bytes, in_format, MLAI_BLOCK);
        if (is_scaled) {
            MLAI_UNROLL
            for (int32_t j = 0; j < MLAI_BLOCK; j += V_LANES) {
                const vec x = v_load(values + j);
                v_store(values + j, in_bytes == 1 ? v_mul(x, factor) : v_div(x, divisor));
            }
        }
        mlai_narrow_block(made, out_format, values, MLAI_BLOCK);
        mlai_put_lines(out + i * out_bytes, made, MLAI_BLOCK * out_bytes, is_streaming);
    }
    return i;
}

#define MLAI_BLOCKS(from, to, is_scaled)                                                           \
    mlai_convert_blocks(out, MLA_FORMAT_##to, in, MLA_FORMAT_##from, n, change, is_scaled,         \
                        is_streaming, ahead)
#define MLAI_PAIR(from, to) ((from)*32 + (to))
#define MLAI_PAIR_CASE(from, to)                                                                   \
    case MLAI_PAIR(MLA_FORMAT_##from, MLA_FORMAT_##to):                                            \
        return MLAI_BLOCKS(from, to, false);
#define MLAI_DIVIDED_CASE(from, to)                                                                \
    case MLAI_PAIR(MLA_FORMAT_##from, MLA_FORMAT_##to):                                            \
        return change->divisor != 1.0f ? MLAI_BLOCKS(from, to, true) : MLAI_BLOCKS(from, to, false);
#define MLAI_MULTIPLIED_CASE(from, to)                                                             \
    case MLAI_PAIR(MLA_FORMAT_##from, MLA_FORMAT_##to):                                            \
        return change->factor != 1.0f ? MLAI_BLOCKS(from, to, true) : MLAI_BLOCKS(from, to, false);

/* The front of a row between two different formats, not fp8 to fp8. */
MLAI_APART int64_t mlai_convert_front(char *out, int32_t out_format, const char *in,
                                      int32_t in_format, int64_t n, const mlai_change *change,
                                      bool is_streaming, const char *ahead)
{
    switch (MLAI_PAIR(in_format, out_format)) {
        MLAI_PAIR_CASE(F32, BF16)
        MLAI_PAIR_CASE(F32, F16)
        MLAI_PAIR_CASE(BF16, F32)
        MLAI_PAIR_CASE(BF16, F16)
        MLAI_PAIR_CASE(F16, F32)
        MLAI_PAIR_CASE(F16, BF16)
        MLAI_DIVIDED_CASE(F32, E4M3)
        MLAI_DIVIDED_CASE(F32, E5M2)
        MLAI_DIVIDED_CASE(BF16, E4M3)
        MLAI_DIVIDED_CASE(BF16, E5M2)
        MLAI_DIVIDED_CASE(F16, E4M3)
        MLAI_DIVIDED_CASE(F16, E5M2)
        MLAI_MULTIPLIED_CASE(E4M3, F32)
        MLAI_MULTIPLIED_CASE(E4M3, BF16)
        MLAI_MULTIPLIED_CASE(E4M3, F16)
        MLAI_MULTIPLIED_CASE(E5M2, F32)
        MLAI_MULTIPLIED_CASE(E5M2, BF16)
        MLAI_MULTIPLIED_CASE(E5M2, F16)
    default:
        return 0;
    }
}

/* ---- chunks ------------------------------------------------------------------------------------
 */

static inline void mlai_hold_values(float *x, int64_t n, float largest)
{
    for (int64_t i = 0; i < n; i++) {
        float value = x[i] == x[i] ? x[i] : 0.0f;
        value = value > largest ? largest : value;
        x[i] = value < -largest ? -largest : value;
    }
}

MLAI_APART void mlai_convert_rest(char *out, int32_t out_format, const char *in, int32_t in_format,
                                  int64_t n, const mlai_change *change, bool is_streaming)
{
    const int64_t in_bytes = mlai_lane_bytes(in_format), out_bytes = mlai_lane_bytes(out_format);
    _Alignas(64) float values[MLAI_CHUNK];
    _Alignas(64) char made[MLAI_CHUNK * sizeof(float)];
    for (int64_t first = 0; first < n; first += MLAI_CHUNK) {
        const int64_t count = mlai_min_i64(MLAI_CHUNK, n - first);
        char *to = out + first * out_bytes;
        mlai_widen(values, in + first * in_bytes, in_format, count);
        if (change->largest <= FLT_MAX)
            mlai_hold_values(values, count, change->largest);
        if (change->divisor != 1.0f)
            for (int64_t i = 0; i < count; i++)
                values[i] /= change->divisor;
        if (change->factor != 1.0f)
            for (int64_t i = 0; i < count; i++)
                values[i] *= change->factor;
        mlai_narrow(is_streaming ? made : to, out_format, values, count);
        if (is_streaming)
            mlai_stream_copy(to, made, count * out_bytes, made);
    }
}

/* ---- rows --------------------------------------------------------------------------------------
 */

static inline void mlai_copy_row(char *restrict out, const char *restrict in, int64_t bytes,
                                 bool is_streaming, const char *ahead)
{
    if (is_streaming) {
        mlai_stream_copy(out, in, bytes, ahead);
        return;
    }
    int64_t i = 0;
    for (; i + MLAI_STREAM_LINE <= bytes; i += MLAI_STREAM_LINE) {
        __builtin_prefetch(ahead + i);
        mlai_store_line(out + i, in + i);
    }
    memcpy(out + i, in + i, (size_t)(bytes - i));
}

/*
 * n values of any of the five formats to any. `ahead` is the row of a later step, of the same
 * length, or `in`: any address does.
 */
static inline void mlai_convert_row(char *out, int32_t out_format, const char *in,
                                    int32_t in_format, int64_t n, const mlai_change *change,
                                    bool is_streaming, const char *ahead)
{
    const int64_t in_bytes = mlai_lane_bytes(in_format), out_bytes = mlai_lane_bytes(out_format);
    const bool is_held = change->largest <= FLT_MAX;
    if (in_format == out_format && change->factor == 1.0f && !is_held) {
        mlai_copy_row(out, in, n * out_bytes, is_streaming, ahead);
        return;
    }
    const bool is_lines = !is_streaming || (uintptr_t)out % MLAI_STREAM_LINE == 0;
    int64_t done = 0;
    if (is_lines && !is_held)
        done = mlai_convert_front(out, out_format, in, in_format, n, change, is_streaming, ahead);
    if (done < n)
        mlai_convert_rest(out + done * out_bytes, out_format, in + done * in_bytes, in_format,
                          n - done, change, is_streaming);
}

#endif
