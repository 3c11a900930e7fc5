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
#include "cpu/kernels/load_vec.h"
#include "cpu/kernels/stream.h"

enum { MLAI_PAIRS = 128 };

/* A rotated chunk: `n_parts` runs of `part_values` values each, run k for x[part_first[k]...]. */
typedef struct mlai_rotated {
    _Alignas(64) float values[2 * MLAI_PAIRS];
    int32_t n_parts;
    int64_t part_values;
    int64_t part_first[2];
} mlai_rotated;

/* The front of n pairs in vectors, from registers to `out`; returns how many pairs it did. */
MLAI_INLINE int64_t mlai_rotate_front(float *out, const char *x, const float *c, const float *s,
                                      int64_t half, int64_t first_pair, int64_t n,
                                      const bool is_interleaved, const int32_t format)
{
    const int64_t bytes = mlai_lane_bytes(format);
    int64_t i = 0;
    if (!is_interleaved) {
        const char *low = x + first_pair * bytes, *high = low + half * bytes;
        for (; i + V_LANES <= n; i += V_LANES) {
            const vec a = load_vec(low + i * bytes, format), b = load_vec(high + i * bytes, format);
            const vec cos = v_load(c + i), sin = v_load(s + i);
            v_store(out + i, v_sub(v_mul(a, cos), v_mul(b, sin)));
            v_store(out + n + i, v_add(v_mul(b, cos), v_mul(a, sin)));
        }
    }
#if defined(__AVX512F__)
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    for (; is_interleaved && i + 8 <= n; i += 8) {
        const __m512 cos =
            _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(c + i)));
        const __m512 sin =
            _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(s + i)));
        const __m512 in = load_vec(x + 2 * (first_pair + i) * bytes, format);
        const __m512 a = _mm512_mul_ps(in, cos);
        const __m512 b = _mm512_mul_ps(_mm512_permute_ps(in, 0xb1), sin);
        _mm512_storeu_ps(out + 2 * i, _mm512_mask_sub_ps(_mm512_add_ps(a, b), 0x5555, a, b));
    }
#endif
    return i;
}

static inline int64_t mlai_rotate_vectors(float *out, const char *x, int32_t format, const float *c,
                                          const float *s, int64_t half, int64_t first_pair,
                                          int64_t n, bool is_interleaved)
{
#define MLAI_ROTATE_CASE(f)                                                                        \
    case f:                                                                                        \
        return is_interleaved ? mlai_rotate_front(out, x, c, s, half, first_pair, n, true, f)      \
                              : mlai_rotate_front(out, x, c, s, half, first_pair, n, false, f);
    switch (format) {
        MLAI_ROTATE_CASE(MLA_FORMAT_F32)
        MLAI_ROTATE_CASE(MLA_FORMAT_BF16)
        MLAI_ROTATE_CASE(MLA_FORMAT_F16)
    default:
        return 0;
    }
#undef MLAI_ROTATE_CASE
}

static inline void mlai_rotate_chunk(mlai_rotated *y, const char *x, int32_t format,
                                     const float *cos, const float *sin, int64_t rope_dim,
                                     int64_t first_pair, bool is_interleaved)
{
    const int64_t half = rope_dim / 2, bytes = mlai_lane_bytes(format);
    const int64_t n = mlai_min_i64(MLAI_PAIRS, half - first_pair);
    const float *restrict c = cos + first_pair, *restrict s = sin + first_pair;
    float *restrict out = y->values;
    const int64_t done =
        mlai_rotate_vectors(out, x, format, c, s, half, first_pair, n, is_interleaved);
    float in[2 * MLAI_PAIRS];
    if (is_interleaved) {
        y->n_parts = 1;
        y->part_values = 2 * n;
        y->part_first[0] = 2 * first_pair;
        if (done < n)
            mlai_widen(in + 2 * done, x + 2 * (first_pair + done) * bytes, format, 2 * (n - done));
        for (int64_t i = done; i < n; i++) {
            out[2 * i] = in[2 * i] * c[i] - in[2 * i + 1] * s[i];
            out[2 * i + 1] = in[2 * i + 1] * c[i] + in[2 * i] * s[i];
        }
    } else {
        y->n_parts = 2;
        y->part_values = n;
        y->part_first[0] = first_pair;
        y->part_first[1] = half + first_pair;
        if (done < n) {
            mlai_widen(in + done, x + (first_pair + done) * bytes, format, n - done);
            mlai_widen(in + n + done, x + (half + first_pair + done) * bytes, format, n - done);
        }
        for (int64_t i = done; i < n; i++) {
            out[i] = in[i] * c[i] - in[n + i] * s[i];
            out[n + i] = in[n + i] * c[i] + in[i] * s[i];
        }
    }
}

/* One head from x to out, each of its own format; out may be x. */
static inline void mlai_rotate_head(char *out, int32_t out_format, const char *x, int32_t format,
                                    const float *cos, const float *sin, int64_t rope_dim,
                                    bool is_interleaved, bool is_streaming)
{
    const int64_t out_bytes = mlai_lane_bytes(out_format);
    _Alignas(64) char row[2 * MLAI_PAIRS * sizeof(float)];
    mlai_rotated y;
    for (int64_t pair = 0; pair < rope_dim / 2; pair += MLAI_PAIRS) {
        mlai_rotate_chunk(&y, x, format, cos, sin, rope_dim, pair, is_interleaved);
        for (int32_t k = 0; k < y.n_parts; k++) {
            char *to = out + y.part_first[k] * out_bytes;
            mlai_narrow(is_streaming ? row : to, out_format, y.values + k * y.part_values,
                        y.part_values);
            if (is_streaming)
                mlai_stream_copy(to, row, y.part_values * out_bytes);
        }
    }
}

static inline const float *mlai_angles_at(const mla_tensor *table, int64_t position)
{
    return (const float *)table->data + position * table->stride[0];
}

#endif
