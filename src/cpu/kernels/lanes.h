/*
 * Conversion of rows between f32 and the storage formats, for the memory-bound kernels: the same
 * results as base/convert.h, written without branches so that compilers turn each loop into vector
 * code for the family it is compiled for (MLAI_FAMILY, see elementwise.h). lanes_x86.h
 * and lanes_neon.h do the front of a row where the compilers' own code is slow.
 *
 * Subnormal numbers are made by adding or subtracting a power of two, never by multiplying with
 * one, so that no operand is a subnormal f32 (slow on many processors) and rounding is the adder's.
 * NaN stays NaN; narrowing gives the NaN that base/convert.h gives. fp8 saturates, infinities too.
 */
#ifndef MLAI_LANES_H
#define MLAI_LANES_H

#include "cpu/kernels/vec_f32.h"

/* Constants of narrowing to an fp8 format, with `shift` = 23 - mantissa bits. */
typedef struct mlai_fp8_narrow {
    int shift;
    int32_t max_bits;        /* f32 bits of the largest finite value */
    int32_t min_normal_bits; /* f32 bits of the smallest normal value */
    int32_t round_and_bias;  /* half a unit less one, less the difference of the biases */
    float aligner;           /* the power of two whose f32 unit is the subnormal step */
} mlai_fp8_narrow;

static const mlai_fp8_narrow mlai_narrow_e4m3 = {20, 0x43e00000, 0x3c800000, 0x7ffff - 0x3c000000,
                                                 0x1p14f};
static const mlai_fp8_narrow mlai_narrow_e5m2 = {21, 0x47600000, 0x38800000, 0xfffff - 0x38000000,
                                                 0x1p7f};

#if defined(__F16C__) && defined(__AVX2__)
#include "cpu/kernels/lanes_x86.h"
#define MLAI_LANES_FRONT(name, ...) mlai_x86_##name(__VA_ARGS__)
#elif defined(MLAI_NEON)
#include "cpu/kernels/lanes_neon.h"
#define MLAI_LANES_FRONT(name, ...) mlai_neon_##name(__VA_ARGS__)
#else
#define MLAI_LANES_FRONT(name, ...) 0
#define MLAI_LANES_ARE_PLAIN
#endif

/* Where the rest of a row of n values ends: there is none after whole blocks of 64, all of which
 * the front does. Compilers that see n would warn of a loop past its end. */
#if defined(MLAI_LANES_ARE_PLAIN)
#define MLAI_REST_END(n) (n)
#else
#define MLAI_REST_END(n) ((n) % 64 == 0 ? 0 : (n))
#endif

/* Conversions straight from bf16, where the family has them; 0 says that it was not done. */
#if defined(__AVX512F__)
#define MLAI_FROM_BF16(name, ...) mlai_x86_##name(__VA_ARGS__)
#else
#define MLAI_FROM_BF16(name, ...) 0
#endif

/* Bytes of a value of a float format, or 1 for ds656: mla_format_bytes without a call. */
static inline int64_t mlai_lane_bytes(int32_t format)
{
    if (format == MLA_FORMAT_F32)
        return 4;
    return format == MLA_FORMAT_BF16 || format == MLA_FORMAT_F16 ? 2 : 1;
}

/* ---- one value ---------------------------------------------------------------------------------
 */

static inline float mlai_lane_from_f16(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000u) << 16, shifted = (uint32_t)(x & 0x7fffu) << 13;
    const uint32_t normal = shifted + 0x38000000u;
    const float subnormal = mlai_f32_from_bits(shifted | 0x38800000u) - 0x1p-14f;
    uint32_t bits = shifted < 0x00800000u ? mlai_f32_bits(subnormal) : normal;
    bits = shifted >= 0x0f800000u ? shifted | 0x7f800000u : bits;
    bits |= shifted > 0x0f800000u ? 0x00400000u : 0u;
    return mlai_f32_from_bits(bits | sign);
}

static inline uint16_t mlai_lane_to_f16(float x)
{
    const uint32_t bits = mlai_f32_bits(x), magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    const uint32_t subnormal =
        mlai_f32_bits(mlai_f32_from_bits(magnitude) + 0.5f) - mlai_f32_bits(0.5f);
    uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;
    result = magnitude > 0x7f800000u ? 0x7e00u : result;
    return (uint16_t)(result | ((bits >> 16) & 0x8000u));
}

static inline float mlai_lane_from_e4m3(uint8_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x80u) << 24, shifted = (uint32_t)(x & 0x7fu) << 20;
    const float subnormal = mlai_f32_from_bits(shifted | 0x3c800000u) - 0x1p-6f;
    uint32_t bits = shifted < 0x00800000u ? mlai_f32_bits(subnormal) : shifted + 0x3c000000u;
    bits = shifted == 0x07f00000u ? 0x7fc00000u : bits;
    return mlai_f32_from_bits(bits | sign);
}

static inline uint8_t mlai_lane_to_e4m3(float x)
{
    const uint32_t bits = mlai_f32_bits(x), magnitude = bits & 0x7fffffffu;
    const uint32_t held = magnitude < 0x43e00000u ? magnitude : 0x43e00000u; /* at most 448 */
    const uint32_t normal = (held + 0x7ffffu + ((held >> 20) & 1u) - 0x3c000000u) >> 20;
    const uint32_t subnormal =
        mlai_f32_bits(mlai_f32_from_bits(held) + 0x1p14f) - mlai_f32_bits(0x1p14f);
    uint32_t result = held < 0x3c800000u ? subnormal : normal;
    result = magnitude > 0x7f800000u ? 0x7fu : result;
    return (uint8_t)(result | ((bits >> 24) & 0x80u));
}

static inline float mlai_lane_from_e5m2(uint8_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x80u) << 24, shifted = (uint32_t)(x & 0x7fu) << 21;
    const float subnormal = mlai_f32_from_bits(shifted | 0x38800000u) - 0x1p-14f;
    uint32_t bits = shifted < 0x00800000u ? mlai_f32_bits(subnormal) : shifted + 0x38000000u;
    bits = shifted >= 0x0f800000u ? shifted | 0x7f800000u : bits;
    bits |= shifted > 0x0f800000u ? 0x00400000u : 0u;
    return mlai_f32_from_bits(bits | sign);
}

static inline uint8_t mlai_lane_to_e5m2(float x)
{
    const uint32_t bits = mlai_f32_bits(x), magnitude = bits & 0x7fffffffu;
    const uint32_t held = magnitude < 0x47600000u ? magnitude : 0x47600000u; /* at most 57344 */
    const uint32_t normal = (held + 0xfffffu + ((held >> 21) & 1u) - 0x38000000u) >> 21;
    const uint32_t subnormal =
        mlai_f32_bits(mlai_f32_from_bits(held) + 0x1p7f) - mlai_f32_bits(0x1p7f);
    uint32_t result = held < 0x38800000u ? subnormal : normal;
    result = magnitude > 0x7f800000u ? 0x7fu : result;
    return (uint8_t)(result | ((bits >> 24) & 0x80u));
}

static inline uint16_t mlai_lane_to_bf16(float x)
{
    const uint32_t bits = mlai_f32_bits(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

/* ---- rows --------------------------------------------------------------------------------------
 */

/* n values of f32 bf16 f16 e4m3 e5m2 as f32; for a format and n known to the compiler. */
MLAI_INLINE void mlai_widen_block(float *restrict out, const void *restrict in,
                                  const int32_t format, const int64_t n)
{
    const uint16_t *restrict in16 = in;
    const uint8_t *restrict in8 = in;
    switch (format) {
    case MLA_FORMAT_F32:
        memcpy(out, in, (size_t)n * sizeof *out);
        break;
    case MLA_FORMAT_BF16:
        for (int64_t i = MLAI_LANES_FRONT(widen_bf16, out, in16, n); i < MLAI_REST_END(n); i++)
            out[i] = mlai_f32_from_bf16(in16[i]);
        break;
    case MLA_FORMAT_F16:
        for (int64_t i = MLAI_LANES_FRONT(widen_f16, out, in16, n); i < MLAI_REST_END(n); i++)
            out[i] = mlai_lane_from_f16(in16[i]);
        break;
    case MLA_FORMAT_E4M3:
        for (int64_t i = MLAI_LANES_FRONT(widen_e4m3, out, in8, n); i < MLAI_REST_END(n); i++)
            out[i] = mlai_lane_from_e4m3(in8[i]);
        break;
    case MLA_FORMAT_E5M2:
        for (int64_t i = MLAI_LANES_FRONT(widen_e5m2, out, in8, n); i < MLAI_REST_END(n); i++)
            out[i] = mlai_lane_from_e5m2(in8[i]);
        break;
    default:
        break;
    }
}

/* n values of f32 to f32 bf16 f16 e4m3 e5m2, rounded to nearest even, fp8 saturating; likewise. */
MLAI_INLINE void mlai_narrow_block(void *restrict out, const int32_t format,
                                   const float *restrict in, const int64_t n)
{
    uint16_t *restrict out16 = out;
    uint8_t *restrict out8 = out;
    switch (format) {
    case MLA_FORMAT_F32:
        memcpy(out, in, (size_t)n * sizeof *in);
        break;
    case MLA_FORMAT_BF16:
        for (int64_t i = MLAI_LANES_FRONT(narrow_bf16, out16, in, n); i < MLAI_REST_END(n); i++)
            out16[i] = mlai_lane_to_bf16(in[i]);
        break;
    case MLA_FORMAT_F16:
        for (int64_t i = MLAI_LANES_FRONT(narrow_f16, out16, in, n); i < MLAI_REST_END(n); i++)
            out16[i] = mlai_lane_to_f16(in[i]);
        break;
    case MLA_FORMAT_E4M3:
        for (int64_t i = MLAI_LANES_FRONT(narrow_fp8, out8, in, n, &mlai_narrow_e4m3);
             i < MLAI_REST_END(n); i++)
            out8[i] = mlai_lane_to_e4m3(in[i]);
        break;
    case MLA_FORMAT_E5M2:
        for (int64_t i = MLAI_LANES_FRONT(narrow_fp8, out8, in, n, &mlai_narrow_e5m2);
             i < MLAI_REST_END(n); i++)
            out8[i] = mlai_lane_to_e5m2(in[i]);
        break;
    default:
        break;
    }
}

/* The same for any. */
static inline void mlai_widen(float *restrict out, const void *restrict in, int32_t format,
                              int64_t n)
{
    mlai_widen_block(out, in, format, n);
}

static inline void mlai_narrow(void *restrict out, int32_t format, const float *restrict in,
                               int64_t n)
{
    mlai_narrow_block(out, format, in, n);
}

#endif
