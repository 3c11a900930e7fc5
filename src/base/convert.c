/*
 * Format conversion, see convert.h. fp8 to f32 is a table of 256 values; f32 to fp8 rounds the f32
 * bits: for a normal result the mantissa is cut with round to nearest even, for a subnormal result
 * the value is first aligned by adding a power of two whose unit is the subnormal step.
 */
#include "base/convert.h"

#include <math.h>

float mlai_f32_from_f16(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16;
    uint32_t exponent = (x >> 10) & 31u, mantissa = x & 0x3ffu;
    if (exponent == 31)
        return mlai_f32_from_bits(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0) {
        float magnitude = (float)mantissa * 0x1p-24f;
        return mlai_f32_from_bits(sign | mlai_f32_bits(magnitude));
    }
    return mlai_f32_from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

uint16_t mlai_f16_from_f32(float x)
{
    uint32_t bits = mlai_f32_bits(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) /* 65520 and up round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) { /* below 2^-14: steps of 2^-24 */
        float aligned = mlai_f32_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (mlai_f32_bits(aligned) - 0x3f000000u));
    }
    magnitude += 0xfffu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | ((magnitude - 0x38000000u) >> 13));
}

#define E4M3_ROW(s, e)                                                                             \
    s(1.0f + 0.000f) * (e), s(1.0f + 0.125f) * (e), s(1.0f + 0.250f) * (e),                        \
        s(1.0f + 0.375f) * (e), s(1.0f + 0.500f) * (e), s(1.0f + 0.625f) * (e),                    \
        s(1.0f + 0.750f) * (e), s(1.0f + 0.875f) * (e)
#define E4M3_SUBNORMAL(s)                                                                          \
    s 0.0f, s 0x1p-9f, s 0x2p-9f, s 0x3p-9f, s 0x4p-9f, s 0x5p-9f, s 0x6p-9f, s 0x7p-9f
#define E4M3_TOP(s) s 256.0f, s 288.0f, s 320.0f, s 352.0f, s 384.0f, s 416.0f, s 448.0f, s NAN
#define E4M3_HALF(s)                                                                               \
    E4M3_SUBNORMAL(s), E4M3_ROW(s, 0x1p-6f), E4M3_ROW(s, 0x1p-5f), E4M3_ROW(s, 0x1p-4f),           \
        E4M3_ROW(s, 0x1p-3f), E4M3_ROW(s, 0x1p-2f), E4M3_ROW(s, 0x1p-1f), E4M3_ROW(s, 0x1p0f),     \
        E4M3_ROW(s, 0x1p1f), E4M3_ROW(s, 0x1p2f), E4M3_ROW(s, 0x1p3f), E4M3_ROW(s, 0x1p4f),        \
        E4M3_ROW(s, 0x1p5f), E4M3_ROW(s, 0x1p6f), E4M3_ROW(s, 0x1p7f), E4M3_TOP(s)

const float mlai_e4m3_table[256] = {E4M3_HALF(+), E4M3_HALF(-)};

#define E5M2_ROW(s, e) s(1.00f) * (e), s(1.25f) * (e), s(1.50f) * (e), s(1.75f) * (e)
#define E5M2_HALF(s)                                                                               \
    s 0.0f, s 0x1p-16f, s 0x2p-16f, s 0x3p-16f, E5M2_ROW(s, 0x1p-14f), E5M2_ROW(s, 0x1p-13f),      \
        E5M2_ROW(s, 0x1p-12f), E5M2_ROW(s, 0x1p-11f), E5M2_ROW(s, 0x1p-10f), E5M2_ROW(s, 0x1p-9f), \
        E5M2_ROW(s, 0x1p-8f), E5M2_ROW(s, 0x1p-7f), E5M2_ROW(s, 0x1p-6f), E5M2_ROW(s, 0x1p-5f),    \
        E5M2_ROW(s, 0x1p-4f), E5M2_ROW(s, 0x1p-3f), E5M2_ROW(s, 0x1p-2f), E5M2_ROW(s, 0x1p-1f),    \
        E5M2_ROW(s, 0x1p0f), E5M2_ROW(s, 0x1p1f), E5M2_ROW(s, 0x1p2f), E5M2_ROW(s, 0x1p3f),        \
        E5M2_ROW(s, 0x1p4f), E5M2_ROW(s, 0x1p5f), E5M2_ROW(s, 0x1p6f), E5M2_ROW(s, 0x1p7f),        \
        E5M2_ROW(s, 0x1p8f), E5M2_ROW(s, 0x1p9f), E5M2_ROW(s, 0x1p10f), E5M2_ROW(s, 0x1p11f),      \
        E5M2_ROW(s, 0x1p12f), E5M2_ROW(s, 0x1p13f), E5M2_ROW(s, 0x1p14f), E5M2_ROW(s, 0x1p15f),    \
        s INFINITY, s NAN, s NAN, s NAN

const float mlai_e5m2_table[256] = {E5M2_HALF(+), E5M2_HALF(-)};

float mlai_f32_from_e4m3(uint8_t x)
{
    return mlai_e4m3_table[x];
}

float mlai_f32_from_e5m2(uint8_t x)
{
    return mlai_e5m2_table[x];
}

uint8_t mlai_e4m3_from_f32(float x)
{
    uint32_t bits = mlai_f32_bits(x), sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint8_t)(sign | 0x7fu);
    if (magnitude >= 0x43e00000u) /* 448 and up saturate */
        return (uint8_t)(sign | 0x7eu);
    if (magnitude < 0x3c800000u) { /* below 2^-6: steps of 2^-9, the unit of 2^14 in f32 */
        float aligned = mlai_f32_from_bits(magnitude) + 0x1p14f;
        return (uint8_t)(sign | (mlai_f32_bits(aligned) - mlai_f32_bits(0x1p14f)));
    }
    magnitude += 0x7ffffu + ((magnitude >> 20) & 1u);
    return (uint8_t)(sign | ((magnitude - 0x3c000000u) >> 20));
}

uint8_t mlai_e5m2_from_f32(float x)
{
    uint32_t bits = mlai_f32_bits(x), sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint8_t)(sign | 0x7fu);
    if (magnitude >= 0x47600000u) /* 57344 and up saturate */
        return (uint8_t)(sign | 0x7bu);
    if (magnitude < 0x38800000u) { /* below 2^-14: steps of 2^-16, the unit of 2^7 in f32 */
        float aligned = mlai_f32_from_bits(magnitude) + 0x1p7f;
        return (uint8_t)(sign | (mlai_f32_bits(aligned) - mlai_f32_bits(0x1p7f)));
    }
    magnitude += 0xfffffu + ((magnitude >> 21) & 1u);
    return (uint8_t)(sign | ((magnitude - 0x38000000u) >> 21));
}

static void widen(float *out, const void *in, int32_t format, int64_t n)
{
    switch (format) {
    case MLA_FORMAT_F32:
        memcpy(out, in, (size_t)n * sizeof *out);
        break;
    case MLA_FORMAT_BF16:
        for (int64_t i = 0; i < n; i++)
            out[i] = mlai_f32_from_bf16(((const uint16_t *)in)[i]);
        break;
    case MLA_FORMAT_F16:
        for (int64_t i = 0; i < n; i++)
            out[i] = mlai_f32_from_f16(((const uint16_t *)in)[i]);
        break;
    case MLA_FORMAT_E4M3:
        for (int64_t i = 0; i < n; i++)
            out[i] = mlai_e4m3_table[((const uint8_t *)in)[i]];
        break;
    case MLA_FORMAT_E5M2:
        for (int64_t i = 0; i < n; i++)
            out[i] = mlai_e5m2_table[((const uint8_t *)in)[i]];
        break;
    default:
        break;
    }
}

void mlai_row_to_f32(float *out, const void *in, int32_t format, int64_t n, float scale)
{
    if (n <= 0)
        return;
    widen(out, in, format, n);
    if (scale != 1.0f) {
        for (int64_t i = 0; i < n; i++)
            out[i] *= scale;
    }
}

void mlai_row_from_f32(void *out, int32_t format, const float *in, int64_t n, float scale)
{
    for (int64_t i = 0; i < n; i++) {
        float x = scale == 1.0f ? in[i] : in[i] / scale;
        switch (format) {
        case MLA_FORMAT_F32:
            ((float *)out)[i] = x;
            break;
        case MLA_FORMAT_BF16:
            ((uint16_t *)out)[i] = mlai_bf16_from_f32(x);
            break;
        case MLA_FORMAT_F16:
            ((uint16_t *)out)[i] = mlai_f16_from_f32(x);
            break;
        case MLA_FORMAT_E4M3:
            ((uint8_t *)out)[i] = mlai_e4m3_from_f32(x);
            break;
        case MLA_FORMAT_E5M2:
            ((uint8_t *)out)[i] = mlai_e5m2_from_f32(x);
            break;
        default:
            break;
        }
    }
}
