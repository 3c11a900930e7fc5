/*
 * Conversion between f32 and the storage formats, one value at a time and by rows. All conversions
 * to a narrower format round to nearest even. fp8: saturating (|x| over the maximum gives the
 * maximum, infinities too; NaN stays NaN). Formats: OCP 8-bit floating point specification v1.0;
 * bf16: upper half of f32. Widening is exact.
 */
#ifndef MLAI_CONVERT_H
#define MLAI_CONVERT_H

#include <mla/tensor.h>
#include <stdint.h>
#include <string.h>

static inline float mlai_f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline uint32_t mlai_f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float mlai_f32_from_bf16(uint16_t x)
{
    return mlai_f32_from_bits((uint32_t)x << 16);
}
static inline uint16_t mlai_bf16_from_f32(float x)
{
    uint32_t bits = mlai_f32_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40u); /* NaN stays NaN */
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float mlai_f32_from_f16(uint16_t x);
uint16_t mlai_f16_from_f32(float x);
float mlai_f32_from_e4m3(uint8_t x);
uint8_t mlai_e4m3_from_f32(float x);
float mlai_f32_from_e5m2(uint8_t x);
uint8_t mlai_e5m2_from_f32(float x);

/* The 256 values of each fp8 format, for kernels that look them up. */
extern const float mlai_e4m3_table[256];
extern const float mlai_e5m2_table[256];

/* n contiguous values of a float format (f32 bf16 f16 e4m3 e5m2) to f32, times scale if not 1. */
void mlai_row_to_f32(float *out, const void *in, int32_t format, int64_t n, float scale);

/* n f32 values to a float format, divided by scale if not 1, rounded, saturating for fp8. */
void mlai_row_from_f32(void *out, int32_t format, const float *in, int64_t n, float scale);

#endif
