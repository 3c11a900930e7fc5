/*
 * A vector of f32 for kernels that are one source for several instruction sets: 16 lanes of
 * AVX-512, 8 of AVX2 with FMA and F16C, else 4 through the compiler's vector extension (NEON where
 * MLAI_NEON is set, SSE2, any). Every function does the same thing on each; only v_fma differs in
 * rounding: one rounding where the instruction set has fused multiply-add, two in the portable form
 * (-ffp-contract=off keeps it so).
 *
 * V_32_REGISTERS is defined where there are 32 of them, so that tiles can be twice as large.
 *
 * Also here: v_exp2 for x <= 0 (relative error 1.5e-7; exactly 1 at 0, exactly 0 below -125, NaN
 * for NaN) and v_tanh (absolute error 1e-7, relative 3e-7).
 */
#ifndef MLAI_VEC_F32_H
#define MLAI_VEC_F32_H

#include "base/convert.h"
#include <math.h>
#include <stdint.h>

#if defined(__clang__)
/* A tile whose loops vanish after inlining has nothing left to unroll; that is no fault. */
#pragma clang diagnostic ignored "-Wpass-failed"
#define MLAI_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MLAI_UNROLL _Pragma("GCC unroll 32")
#endif
#define MLAI_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) || defined(MLAI_NEON)
#define V_32_REGISTERS
#endif

#if defined(__AVX512F__)
#include <immintrin.h>
enum { V_LANES = 16 };
typedef __m512 vec;
typedef __mmask16 vec_mask;

MLAI_INLINE vec v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
MLAI_INLINE void v_store(float *p, vec a)
{
    _mm512_storeu_ps(p, a);
}
MLAI_INLINE vec v_set1(float a)
{
    return _mm512_set1_ps(a);
}
MLAI_INLINE vec v_fma(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}
MLAI_INLINE vec v_mul(vec a, vec b)
{
    return _mm512_mul_ps(a, b);
}
MLAI_INLINE vec v_add(vec a, vec b)
{
    return _mm512_add_ps(a, b);
}
MLAI_INLINE vec v_sub(vec a, vec b)
{
    return _mm512_sub_ps(a, b);
}
MLAI_INLINE vec v_div(vec a, vec b)
{
    return _mm512_div_ps(a, b);
}
MLAI_INLINE vec v_max(vec a, vec b)
{
    return _mm512_max_ps(a, b);
}
MLAI_INLINE vec_mask v_less(vec a, vec b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
MLAI_INLINE vec v_select(vec_mask m, vec yes, vec no)
{
    return _mm512_mask_blend_ps(m, no, yes);
}
/* Lanes whose count is not above `index`. */
MLAI_INLINE vec_mask v_not_above(const int32_t *counts, int32_t index)
{
    return _mm512_cmple_epi32_mask(_mm512_loadu_si512(counts), _mm512_set1_epi32(index));
}
MLAI_INLINE vec_mask v_nonzero_bytes(const uint8_t *p)
{
    return _mm_cmpneq_epi8_mask(_mm_loadu_si128((const __m128i *)p), _mm_setzero_si128());
}
/* a with the sign of s, a >= 0. */
MLAI_INLINE vec v_with_sign(vec a, vec s)
{
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_castps_si512(a), _mm512_castps_si512(s), _mm512_set1_epi32(INT32_MIN), 0xf8));
}
MLAI_INLINE vec v_abs(vec a)
{
    return _mm512_abs_ps(a);
}
/* The lanes of a, b, c, d added up: four sums to out. */
MLAI_INLINE void v_add_lanes(float *out, vec a, vec b, vec c, vec d)
{
    vec ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    vec cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    vec sums = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
MLAI_INLINE void v_prefetch(const void *p)
{
    _mm_prefetch((const char *)p, _MM_HINT_T0);
}
/* 2^n * p where n = the integer that x rounds to; f = x - n. */
#define V_SPLIT_EXP2(x, n, f)                                                                      \
    vec n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);                \
    vec f = _mm512_sub_ps(x, n)
#define V_JOIN_EXP2(x, n, p)                                                                       \
    _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, v_set1(-125.0f), _CMP_NLT_UQ), p, n)

#elif defined(__AVX2__)
#include <immintrin.h>
enum { V_LANES = 8 };
typedef __m256 vec;
typedef __m256 vec_mask;

MLAI_INLINE vec v_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
MLAI_INLINE void v_store(float *p, vec a)
{
    _mm256_storeu_ps(p, a);
}
MLAI_INLINE vec v_set1(float a)
{
    return _mm256_set1_ps(a);
}
MLAI_INLINE vec v_fma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}
MLAI_INLINE vec v_mul(vec a, vec b)
{
    return _mm256_mul_ps(a, b);
}
MLAI_INLINE vec v_add(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}
MLAI_INLINE vec v_sub(vec a, vec b)
{
    return _mm256_sub_ps(a, b);
}
MLAI_INLINE vec v_div(vec a, vec b)
{
    return _mm256_div_ps(a, b);
}
MLAI_INLINE vec v_max(vec a, vec b)
{
    return _mm256_max_ps(a, b);
}
MLAI_INLINE vec_mask v_less(vec a, vec b)
{
    return _mm256_cmp_ps(a, b, _CMP_LT_OQ);
}
MLAI_INLINE vec v_select(vec_mask m, vec yes, vec no)
{
    return _mm256_blendv_ps(no, yes, m);
}
MLAI_INLINE vec_mask v_not_above(const int32_t *counts, int32_t index)
{
    __m256i c = _mm256_loadu_si256((const __m256i *)counts);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(index + 1), c));
}
MLAI_INLINE vec_mask v_nonzero_bytes(const uint8_t *p)
{
    __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(b, _mm256_setzero_si256()));
}
MLAI_INLINE vec v_with_sign(vec a, vec s)
{
    return _mm256_or_ps(a, _mm256_and_ps(s, _mm256_set1_ps(-0.0f)));
}
MLAI_INLINE vec v_abs(vec a)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}
MLAI_INLINE void v_add_lanes(float *out, vec a, vec b, vec c, vec d)
{
    vec sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
MLAI_INLINE void v_prefetch(const void *p)
{
    _mm_prefetch((const char *)p, _MM_HINT_T0);
}
#define V_SPLIT_EXP2(x, n, f)                                                                      \
    vec n = _mm256_add_ps(x, _mm256_set1_ps(12582912.0f));                                         \
    vec f = _mm256_sub_ps(x, _mm256_sub_ps(n, _mm256_set1_ps(12582912.0f)))
MLAI_INLINE vec v_join_exp2(vec x, vec n, vec p)
{
    __m256i e = _mm256_slli_epi32(_mm256_castps_si256(n), 23);
    vec r = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), e));
    r = _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-125.0f), _CMP_LT_OQ), r);
    return _mm256_or_ps(r, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
#define V_JOIN_EXP2(x, n, p) v_join_exp2(x, n, p)

#else
enum { V_LANES = 4 };
#if defined(MLAI_NEON)
#include <arm_neon.h>
typedef float32x4_t vec;
typedef int32x4_t vec_mask;
#else
typedef float vec __attribute__((vector_size(16)));
typedef int32_t vec_mask __attribute__((vector_size(16)));
#endif

MLAI_INLINE vec v_load(const float *p)
{
    vec a;
    memcpy(&a, p, sizeof a);
    return a;
}
MLAI_INLINE void v_store(float *p, vec a)
{
    memcpy(p, &a, sizeof a);
}
MLAI_INLINE vec v_set1(float a)
{
    return (vec){a, a, a, a};
}
MLAI_INLINE vec v_fma(vec a, vec b, vec c)
{
#if defined(MLAI_NEON)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}
MLAI_INLINE vec v_mul(vec a, vec b)
{
    return a * b;
}
MLAI_INLINE vec v_add(vec a, vec b)
{
    return a + b;
}
MLAI_INLINE vec v_sub(vec a, vec b)
{
    return a - b;
}
MLAI_INLINE vec v_div(vec a, vec b)
{
    return a / b;
}
MLAI_INLINE vec_mask v_less(vec a, vec b)
{
    return a < b;
}
MLAI_INLINE vec v_select(vec_mask m, vec yes, vec no)
{
    return (vec)(((vec_mask)yes & m) | ((vec_mask)no & ~m));
}
/* Like maxps: b where the comparison fails, so a NaN in b stays. */
MLAI_INLINE vec v_max(vec a, vec b)
{
    return v_select(a > b, a, b);
}
MLAI_INLINE vec_mask v_not_above(const int32_t *counts, int32_t index)
{
    vec_mask c;
    memcpy(&c, counts, sizeof c);
    return c <= (vec_mask){index, index, index, index};
}
MLAI_INLINE vec_mask v_nonzero_bytes(const uint8_t *p)
{
    return (vec_mask){-(p[0] != 0), -(p[1] != 0), -(p[2] != 0), -(p[3] != 0)};
}
MLAI_INLINE vec v_with_sign(vec a, vec s)
{
    vec_mask sign = {INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN};
    return (vec)((vec_mask)a | ((vec_mask)s & sign));
}
MLAI_INLINE vec v_abs(vec a)
{
    vec_mask rest = {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX};
    return (vec)((vec_mask)a & rest);
}
MLAI_INLINE void v_add_lanes(float *out, vec a, vec b, vec c, vec d)
{
#if defined(MLAI_NEON)
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
#else
    out[0] = (a[0] + a[1]) + (a[2] + a[3]);
    out[1] = (b[0] + b[1]) + (b[2] + b[3]);
    out[2] = (c[0] + c[1]) + (c[2] + c[3]);
    out[3] = (d[0] + d[1]) + (d[2] + d[3]);
#endif
}
MLAI_INLINE void v_prefetch(const void *p)
{
    __builtin_prefetch(p);
}
#define V_SPLIT_EXP2(x, n, f)                                                                      \
    vec n = x + v_set1(12582912.0f);                                                               \
    vec f = x - (n - v_set1(12582912.0f))
MLAI_INLINE vec v_join_exp2(vec x, vec n, vec p)
{
    typedef uint32_t bits __attribute__((vector_size(16)));
    vec r = (vec)((bits)p + ((bits)n << 23));
    r = v_select(x < v_set1(-125.0f), v_set1(0.0f), r);
    return v_select(x == x, r, x);
}
#define V_JOIN_EXP2(x, n, p) v_join_exp2(x, n, p)
#endif

/* 2^x for x <= 0 (or up to 0.5 above): n = round(x), then a polynomial of degree 5 on [-1/2, 1/2]
 * with constant term 1, least relative error 9e-8. */
MLAI_INLINE vec v_exp2(vec x)
{
    V_SPLIT_EXP2(x, n, f);
    vec p = v_set1(0x1.5bba12p-10f);
    p = v_fma(p, f, v_set1(0x1.3cea88p-7f));
    p = v_fma(p, f, v_set1(0x1.c6b752p-5f));
    p = v_fma(p, f, v_set1(0x1.ebf9bcp-3f));
    p = v_fma(p, f, v_set1(0x1.62e42ap-1f));
    p = v_fma(p, f, v_set1(1.0f));
    return V_JOIN_EXP2(x, n, p);
}

/* tanh: an odd polynomial below 0.625 (so that small scores keep their relative precision), else
 * (1 - e) / (1 + e) with e = exp(-2 |x|). */
MLAI_INLINE vec v_tanh(vec x)
{
    vec a = v_abs(x), z = v_mul(x, x);
    vec p = v_set1(-5.70498872745e-3f);
    p = v_fma(p, z, v_set1(2.06390887954e-2f));
    p = v_fma(p, z, v_set1(-5.37397155531e-2f));
    p = v_fma(p, z, v_set1(1.33314422036e-1f));
    p = v_fma(p, z, v_set1(-3.33332819422e-1f));
    vec small = v_fma(v_mul(p, z), x, x);
    vec e = v_exp2(v_mul(a, v_set1(-2.885390081777927f)));
    vec large = v_div(v_sub(v_set1(1.0f), e), v_add(v_set1(1.0f), e));
    return v_select(v_less(a, v_set1(0.625f)), small, v_with_sign(large, x));
}

#endif
