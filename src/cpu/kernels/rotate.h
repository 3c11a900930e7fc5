/*
 * Rotation of one head's P values by the angles of one position, in f32 and in chunks of pairs, so
 * that any P works without scratch. A chunk reads its pairs before it gives them out and touches no
 * others: working in place is safe.
 *
 *   interleaved  y[2i] = x[2i] c_i - x[2i+1] s_i ;  y[2i+1] = x[2i+1] c_i + x[2i] s_i
 *   half-split   y[i]  = x[i] c_i - x[i+P/2] s_i ;  y[i+P/2] = x[i+P/2] c_i + x[i] s_i
 *
 * Used by the rope and rope_write kernels.
 */
#ifndef MLAI_ROTATE_H
#define MLAI_ROTATE_H

#include "cpu/elementwise.h"
#include "cpu/kernels/lanes.h"

enum { MLAI_PAIRS = 128 };

/* A rotated chunk: `n_parts` runs of `part_values` values each, run k for x[part_first[k]...]. */
typedef struct mlai_rotated {
    float values[2 * MLAI_PAIRS];
    int32_t n_parts;
    int64_t part_values;
    int64_t part_first[2];
} mlai_rotated;

static inline void mlai_rotate_chunk(mlai_rotated *y, const char *x, int32_t format,
                                     const float *cos, const float *sin, int64_t rope_dim,
                                     int64_t first_pair, bool is_interleaved)
{
    const int64_t half = rope_dim / 2, bytes = mlai_lane_bytes(format);
    const int64_t n = mlai_min_i64(MLAI_PAIRS, half - first_pair);
    const float *restrict c = cos + first_pair, *restrict s = sin + first_pair;
    float in[2 * MLAI_PAIRS];
    float *restrict out = y->values;
    if (is_interleaved) {
        y->n_parts = 1;
        y->part_values = 2 * n;
        y->part_first[0] = 2 * first_pair;
        mlai_widen(in, x + 2 * first_pair * bytes, format, 2 * n);
        for (int64_t i = 0; i < n; i++) {
            out[2 * i] = in[2 * i] * c[i] - in[2 * i + 1] * s[i];
            out[2 * i + 1] = in[2 * i + 1] * c[i] + in[2 * i] * s[i];
        }
    } else {
        y->n_parts = 2;
        y->part_values = n;
        y->part_first[0] = first_pair;
        y->part_first[1] = half + first_pair;
        mlai_widen(in, x + first_pair * bytes, format, n);
        mlai_widen(in + n, x + (half + first_pair) * bytes, format, n);
        for (int64_t i = 0; i < n; i++) {
            out[i] = in[i] * c[i] - in[n + i] * s[i];
            out[n + i] = in[n + i] * c[i] + in[i] * s[i];
        }
    }
}

/* One head from x to out, each of its own format; out may be x. */
static inline void mlai_rotate_head(char *out, int32_t out_format, const char *x, int32_t format,
                                    const float *cos, const float *sin, int64_t rope_dim,
                                    bool is_interleaved)
{
    const int64_t out_bytes = mlai_lane_bytes(out_format);
    mlai_rotated y;
    for (int64_t pair = 0; pair < rope_dim / 2; pair += MLAI_PAIRS) {
        mlai_rotate_chunk(&y, x, format, cos, sin, rope_dim, pair, is_interleaved);
        for (int32_t k = 0; k < y.n_parts; k++)
            mlai_narrow(out + y.part_first[k] * out_bytes, out_format, y.values + k * y.part_values,
                        y.part_values);
    }
}

static inline const float *mlai_angles_at(const mla_tensor *table, int64_t position)
{
    return (const float *)table->data + position * table->stride[0];
}

#endif
