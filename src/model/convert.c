/*
 * Conversions between f32 and the formats of checkpoints (convert.h). Narrow floats are widened by
 * placing exponent and mantissa and, for subnormals, by an exact multiplication; fp8 rows go
 * through the scalar function, since weights are converted once when they are loaded. bf16 rows are
 * plain shifts that the compiler turns into vectors. Called by weights.c, linear.c, deepseek.c.
 */
#include "convert.h"

#include <mla/tensor.h>

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float mlai_model_f16_to_f32(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = bits >> 10 & 0x1fu;
    uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 0x1f)
        return from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) {
        float magnitude = (float)mantissa * 0x1p-24f;
        return sign != 0 ? -magnitude : magnitude;
    }
    return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

float mlai_model_e4m3_to_f32(uint8_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x80u) << 24;
    uint32_t exponent = bits >> 3 & 0xfu;
    uint32_t mantissa = bits & 7u;
    if ((bits & 0x7fu) == 0x7fu)
        return from_bits(sign | 0x7fc00000u);
    if (exponent == 0) {
        float magnitude = (float)mantissa * 0x1p-9f;
        return sign != 0 ? -magnitude : magnitude;
    }
    return from_bits(sign | (exponent + 120) << 23 | mantissa << 20);
}

float mlai_model_e5m2_to_f32(uint8_t bits)
{
    return mlai_model_f16_to_f32((uint16_t)(bits << 8));
}

void mlai_model_row_to_f32(float *dst, const void *src, int32_t format, int64_t n)
{
    const uint16_t *half = src;
    const uint8_t *byte = src;
    switch (format) {
    case MLA_FORMAT_F32:
        memcpy(dst, src, (size_t)n * sizeof *dst);
        break;
    case MLA_FORMAT_BF16:
        for (int64_t i = 0; i < n; i++)
            dst[i] = mlai_model_bf16_to_f32(half[i]);
        break;
    case MLA_FORMAT_F16:
        for (int64_t i = 0; i < n; i++)
            dst[i] = mlai_model_f16_to_f32(half[i]);
        break;
    case MLA_FORMAT_E4M3:
        for (int64_t i = 0; i < n; i++)
            dst[i] = mlai_model_e4m3_to_f32(byte[i]);
        break;
    case MLA_FORMAT_E5M2:
        for (int64_t i = 0; i < n; i++)
            dst[i] = mlai_model_e5m2_to_f32(byte[i]);
        break;
    default:
        break;
    }
}

MLAI_CPU_CLONES static void round_row(float *row, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        row[i] = mlai_model_bf16_to_f32(mlai_model_bf16_from_f32(row[i]));
}

MLAI_CPU_CLONES static void narrow_row(uint16_t *restrict dst, const float *restrict src, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = mlai_model_bf16_from_f32(src[i]);
}

void mlai_model_row_from_f32(void *dst, int32_t format, const float *src, int64_t n)
{
    if (format == MLA_FORMAT_BF16)
        narrow_row(dst, src, n);
    else
        memcpy(dst, src, (size_t)n * sizeof *src);
}

void mlai_model_row_round(float *row, int32_t format, int64_t n)
{
    if (format == MLA_FORMAT_BF16)
        round_row(row, n);
}
