/*
 * Rotation of heads of P values by the angles of one position, in f32:
 *
 *   interleaved  y[2i] = x[2i] c_i - x[2i+1] s_i ;  y[2i+1] = x[2i+1] c_i + x[2i] s_i
 *   half-split   y[i]  = x[i] c_i - x[i+P/2] s_i ;  y[i+P/2] = x[i+P/2] c_i + x[i] s_i
 *
 * Both are y[j] = x[j] cos[j] + partner[j] sin[j] once the angles are spread over the values, with
 * the sign in sin. That is done once a token, and each head by blocks of 64 values in registers:
 * interleaved where P is a multiple of 64, half-split where P is 64. Other P go by chunks of pairs
 * through the first-level cache. Blocks and chunks read their values before they give them out and
 * touch no others: working in place is safe. Used by the rope and rope_write kernels.
 */
#ifndef MLAI_ROTATE_H
#define MLAI_ROTATE_H

#include "cpu/elementwise.h"
#include "cpu/kernels/convert_row.h"
#include "cpu/kernels/load_vec.h"

enum { MLAI_PAIRS = 128 };

/* The heads of one token. */
typedef struct mlai_heads {
    char *data;
    int64_t head_bytes; /* from one to the next */
    int32_t format;
} mlai_heads;

static inline const float *mlai_angles_at(const mla_tensor *table, int64_t position)
{
    return (const float *)table->data + position * table->stride[0];
}

/* ---- blocks ------------------------------------------------------------------------------------
 */

/* Angles of a block's 32 pairs, spread over its values. */
typedef struct mlai_spread {
    _Alignas(64) float cos[MLAI_BLOCK];
    _Alignas(64) float sin[MLAI_BLOCK];
} mlai_spread;

MLAI_INLINE bool mlai_rotates_blocks(int64_t rope_dim, bool is_interleaved)
{
    return is_interleaved ? rope_dim % MLAI_BLOCK == 0 : rope_dim == MLAI_BLOCK;
}

/* V_LANES / 2 angles, each twice; with the sign of even places changed where asked for. */
MLAI_INLINE vec mlai_twice(const float *angles, const bool is_signed)
{
#if defined(__AVX512F__)
    const __m512i order = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const vec both = _mm512_permutexvar_ps(order, _mm512_castps256_ps512(_mm256_loadu_ps(angles)));
    const __m512i even = _mm512_set1_epi64(INT64_C(0x80000000));
    return is_signed ? _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(both), even))
                     : both;
#elif defined(__AVX2__)
    const __m256i order = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    const vec both = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(angles)), order);
    const __m256 even = _mm256_castsi256_ps(_mm256_set1_epi64x(INT64_C(0x80000000)));
    return is_signed ? _mm256_xor_ps(both, even) : both;
#else
    const float a = is_signed ? -angles[0] : angles[0], b = is_signed ? -angles[1] : angles[1];
    return (vec){a, angles[0], b, angles[1]};
#endif
}

static inline void mlai_spread_angles(mlai_spread *a, const float *cos, const float *sin,
                                      bool is_interleaved)
{
    const int32_t half = MLAI_BLOCK / 2;
    for (int32_t i = 0; is_interleaved && i < MLAI_BLOCK; i += V_LANES) {
        v_store(a->cos + i, mlai_twice(cos + i / 2, false));
        v_store(a->sin + i, mlai_twice(sin + i / 2, true));
    }
    for (int32_t i = 0; !is_interleaved && i < half; i += V_LANES) {
        const vec c = v_load(cos + i), s = v_load(sin + i);
        v_store(a->cos + i, c);
        v_store(a->cos + half + i, c);
        v_store(a->sin + i, v_mul(s, v_set1(-1.0f)));
        v_store(a->sin + half + i, s);
    }
}

/* Each value and its neighbour change places. */
MLAI_INLINE vec mlai_swap_pairs(vec a)
{
#if defined(__AVX512F__)
    return _mm512_permute_ps(a, 0xb1);
#elif defined(__AVX2__)
    return _mm256_permute_ps(a, 0xb1);
#else
    return (vec){a[1], a[0], a[3], a[2]};
#endif
}

MLAI_INLINE void mlai_rotate_block(float *y, const char *x, const int32_t format,
                                   const mlai_spread *a, const bool is_interleaved)
{
    enum { VECTORS = MLAI_BLOCK / V_LANES };
    const int64_t bytes = V_LANES * mlai_lane_bytes(format);
    vec in[VECTORS];
    MLAI_UNROLL
    for (int32_t i = 0; i < VECTORS; i++)
        in[i] = load_vec(x + i * bytes, format);
    MLAI_UNROLL
    for (int32_t i = 0; i < VECTORS; i++) {
        const vec partner =
            is_interleaved ? mlai_swap_pairs(in[i]) : in[(i + VECTORS / 2) % VECTORS];
        v_store(y + i * V_LANES, v_add(v_mul(in[i], v_load(a->cos + i * V_LANES)),
                                       v_mul(partner, v_load(a->sin + i * V_LANES))));
    }
}

/* One block of every head; `ahead` is where a later token's x lies. */
MLAI_INLINE void mlai_rotate_blocks(const mlai_heads *out, const int32_t out_format,
                                    const mlai_heads *x, const int32_t format, int64_t first,
                                    int64_t n_heads, const mlai_spread *a,
                                    const bool is_interleaved, bool is_streaming, const char *ahead)
{
    const int64_t bytes = mlai_lane_bytes(format), out_bytes = mlai_lane_bytes(out_format);
    const mlai_spread angles = *a; /* the compiler sees that no store changes it */
    for (int64_t head = 0; head < n_heads; head++) {
        _Alignas(64) float y[MLAI_BLOCK];
        _Alignas(64) char made[MLAI_BLOCK * sizeof(float)];
        char *to = out->data + head * out->head_bytes + first * out_bytes;
        mlai_prefetch_lines(ahead + head * x->head_bytes + first * bytes, MLAI_BLOCK * bytes);
        mlai_rotate_block(y, x->data + head * x->head_bytes + first * bytes, format, &angles,
                          is_interleaved);
        mlai_narrow_block(made, out_format, y, MLAI_BLOCK);
        mlai_put_lines(to, made, MLAI_BLOCK * out_bytes, is_streaming);
    }
}

#define MLAI_ROTATE_CASE(from, to)                                                                 \
    case MLAI_PAIR(MLA_FORMAT_##from, MLA_FORMAT_##to):                                            \
        if (is_interleaved)                                                                        \
            mlai_rotate_blocks(out, MLA_FORMAT_##to, x, MLA_FORMAT_##from, first, n_heads, a,      \
                               true, is_streaming, ahead);                                         \
        else                                                                                       \
            mlai_rotate_blocks(out, MLA_FORMAT_##to, x, MLA_FORMAT_##from, first, n_heads, a,      \
                               false, is_streaming, ahead);                                        \
        break;

MLAI_APART void mlai_rotate_all_heads(const mlai_heads *out, const mlai_heads *x, int64_t first,
                                      int64_t n_heads, const mlai_spread *a, bool is_interleaved,
                                      bool is_streaming, const char *ahead)
{
    switch (MLAI_PAIR(x->format, out->format)) {
        MLAI_ROTATE_CASE(F32, F32)
        MLAI_ROTATE_CASE(F32, BF16)
        MLAI_ROTATE_CASE(F32, F16)
        MLAI_ROTATE_CASE(F32, E4M3)
        MLAI_ROTATE_CASE(F32, E5M2)
        MLAI_ROTATE_CASE(BF16, F32)
        MLAI_ROTATE_CASE(BF16, BF16)
        MLAI_ROTATE_CASE(BF16, F16)
        MLAI_ROTATE_CASE(BF16, E4M3)
        MLAI_ROTATE_CASE(BF16, E5M2)
        MLAI_ROTATE_CASE(F16, F32)
        MLAI_ROTATE_CASE(F16, BF16)
        MLAI_ROTATE_CASE(F16, F16)
        MLAI_ROTATE_CASE(F16, E4M3)
        MLAI_ROTATE_CASE(F16, E5M2)
    default:
        break;
    }
}

/* ---- chunks of pairs ---------------------------------------------------------------------------
 */

/* A rotated chunk: `n_parts` runs of `part_values` values each, run k for x[part_first[k]...]. */
typedef struct mlai_rotated {
    _Alignas(64) float values[2 * MLAI_PAIRS];
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
    float *restrict out = y->values;
    float in[2 * MLAI_PAIRS];
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

MLAI_APART void mlai_rotate_by_chunks(const mlai_heads *out, const mlai_heads *x, int64_t n_heads,
                                      const float *cos, const float *sin, int64_t rope_dim,
                                      bool is_interleaved)
{
    const int64_t out_bytes = mlai_lane_bytes(out->format);
    mlai_rotated y;
    for (int64_t head = 0; head < n_heads; head++)
        for (int64_t pair = 0; pair < rope_dim / 2; pair += MLAI_PAIRS) {
            mlai_rotate_chunk(&y, x->data + head * x->head_bytes, x->format, cos, sin, rope_dim,
                              pair, is_interleaved);
            for (int32_t k = 0; k < y.n_parts; k++)
                mlai_narrow(out->data + head * out->head_bytes + y.part_first[k] * out_bytes,
                            out->format, y.values + k * y.part_values, y.part_values);
        }
}

/* ---- heads -------------------------------------------------------------------------------------
 */

/* The heads of one token from x to out, each of its own format; out may be x. `ahead` is where a
 * later token's x lies, or any address. */
static inline void mlai_rotate_heads(const mlai_heads *out, const mlai_heads *x, int64_t n_heads,
                                     const float *cos, const float *sin, int64_t rope_dim,
                                     bool is_interleaved, bool is_streaming, const char *ahead)
{
    if (!mlai_rotates_blocks(rope_dim, is_interleaved)) {
        mlai_rotate_by_chunks(out, x, n_heads, cos, sin, rope_dim, is_interleaved);
        return;
    }
    const bool is_aligned = ((uintptr_t)out->data | (uintptr_t)out->head_bytes) % 64 == 0;
    for (int64_t first = 0; first < rope_dim; first += MLAI_BLOCK) {
        mlai_spread a;
        mlai_spread_angles(&a, cos + first / 2, sin + first / 2, is_interleaved);
        mlai_rotate_all_heads(out, x, first, n_heads, &a, is_interleaved,
                              is_streaming && is_aligned, ahead);
    }
}

#endif
