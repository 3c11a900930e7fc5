/*
 * Number formats from their definitions; see numeric.h. A small float of e exponent bits, m
 * mantissa bits and bias b holds (-1)^s 2^(E-b) (1 + M/2^m), or (-1)^s 2^(1-b) M/2^m when E is 0.
 * f16, bf16 and e5m2 keep the largest E for infinity (M = 0) and NaN; e4m3 uses it for numbers up
 * to 448 and only E and M all ones for NaN.
 */
#include "oracle/numeric.h"

#include <math.h>
#include <string.h>

typedef struct small_float {
    int32_t exponent_bits;
    int32_t mantissa_bits;
    int32_t bias;
    double maximum;
    bool has_infinity;
    bool saturates;
} small_float;

static const small_float bf16_layout = {8, 7, 127, 0x1.fep127, true, false};
static const small_float f16_layout = {5, 10, 15, 65504.0, true, false};
static const small_float e4m3_layout = {4, 3, 7, 448.0, false, true};
static const small_float e5m2_layout = {5, 2, 15, 57344.0, true, true};

static const small_float *layout_of(int32_t format)
{
    switch (format) {
    case MLA_FORMAT_BF16:
        return &bf16_layout;
    case MLA_FORMAT_F16:
        return &f16_layout;
    case MLA_FORMAT_E4M3:
        return &e4m3_layout;
    default:
        return &e5m2_layout;
    }
}

static double small_float_get(const small_float *f, uint32_t bits)
{
    uint32_t exponent_all = (1u << f->exponent_bits) - 1;
    uint32_t mantissa_all = (1u << f->mantissa_bits) - 1;
    uint32_t mantissa = bits & mantissa_all;
    uint32_t exponent = (bits >> f->mantissa_bits) & exponent_all;
    double sign = (bits >> (f->mantissa_bits + f->exponent_bits)) & 1 ? -1.0 : 1.0;
    if (exponent == exponent_all && f->has_infinity)
        return mantissa ? NAN : sign * INFINITY;
    if (exponent == exponent_all && mantissa == mantissa_all)
        return NAN;
    if (exponent == 0)
        return sign * ldexp((double)mantissa, 1 - f->bias - f->mantissa_bits);
    return sign *
           ldexp((double)(mantissa + mantissa_all + 1), (int)exponent - f->bias - f->mantissa_bits);
}

static uint32_t small_float_put(const small_float *f, double value)
{
    uint32_t exponent_all = (1u << f->exponent_bits) - 1;
    uint32_t mantissa_all = (1u << f->mantissa_bits) - 1;
    uint32_t sign = signbit(value) ? 1u << (f->mantissa_bits + f->exponent_bits) : 0;
    if (isnan(value))
        return sign | exponent_all << f->mantissa_bits | mantissa_all;
    double magnitude = fabs(value);
    int exponent = 0;
    frexp(magnitude, &exponent); /* magnitude in [2^(exponent-1), 2^exponent) */
    int lowest = 1 - f->bias;
    int scale = exponent - 1 > lowest ? exponent - 1 : lowest;
    double quantum = ldexp(1.0, scale - f->mantissa_bits);
    double rounded = isinf(magnitude) ? INFINITY : nearbyint(magnitude / quantum) * quantum;
    if (rounded > f->maximum) {
        if (!f->saturates)
            return sign | exponent_all << f->mantissa_bits;
        rounded = f->maximum;
    }
    if (rounded < ldexp(1.0, lowest))
        return sign | (uint32_t)ldexp(rounded, f->mantissa_bits - lowest);
    frexp(rounded, &exponent);
    uint32_t field = (uint32_t)(exponent - 1 + f->bias);
    uint32_t mantissa = (uint32_t)ldexp(rounded, f->mantissa_bits - exponent + 1) & mantissa_all;
    return sign | field << f->mantissa_bits | mantissa;
}

/* All values of a format, made from the definition at the first use. */
static double table_get(int32_t format, uint32_t bits)
{
    static double f16_values[65536], e4m3_values[256], e5m2_values[256];
    static bool is_made = false;
    for (uint32_t i = 0; i < 65536 && !is_made; i++) {
        f16_values[i] = small_float_get(&f16_layout, i);
        e4m3_values[i & 0xff] = small_float_get(&e4m3_layout, i & 0xff);
        e5m2_values[i & 0xff] = small_float_get(&e5m2_layout, i & 0xff);
    }
    is_made = true;
    if (format == MLA_FORMAT_F16)
        return f16_values[bits];
    return format == MLA_FORMAT_E4M3 ? e4m3_values[bits] : e5m2_values[bits];
}

double numeric_get(const void *data, int32_t format, int64_t index)
{
    switch (format) {
    case MLA_FORMAT_F32:
        return ((const float *)data)[index];
    case MLA_FORMAT_I32:
        return ((const int32_t *)data)[index];
    case MLA_FORMAT_I64:
        return (double)((const int64_t *)data)[index];
    case MLA_FORMAT_BF16: {
        uint32_t bits = (uint32_t)((const uint16_t *)data)[index] << 16;
        float x;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    case MLA_FORMAT_F16:
        return table_get(format, ((const uint16_t *)data)[index]);
    default:
        return table_get(format, ((const uint8_t *)data)[index]);
    }
}

void numeric_put(void *data, int32_t format, int64_t index, double value)
{
    switch (format) {
    case MLA_FORMAT_F32:
        ((float *)data)[index] = (float)value;
        break;
    case MLA_FORMAT_BF16:
    case MLA_FORMAT_F16:
        ((uint16_t *)data)[index] = (uint16_t)small_float_put(layout_of(format), value);
        break;
    default:
        ((uint8_t *)data)[index] = (uint8_t)small_float_put(layout_of(format), value);
        break;
    }
}

double numeric_round(int32_t format, double value)
{
    uint64_t cell = 0;
    numeric_put(&cell, format, 0, value);
    return numeric_get(&cell, format, 0);
}

double numeric_epsilon(int32_t format)
{
    if (format == MLA_FORMAT_F32)
        return 0x1p-24;
    return ldexp(1.0, -layout_of(format)->mantissa_bits - 1);
}

double numeric_smallest(int32_t format)
{
    if (format == MLA_FORMAT_F32)
        return 0x1p-149;
    const small_float *f = layout_of(format);
    return ldexp(1.0, 1 - f->bias - f->mantissa_bits);
}

void numeric_from_ds656(const uint8_t *row, double *latent, double *rope)
{
    for (int32_t i = 0; i < 512; i++) {
        float scale;
        memcpy(&scale, row + 512 + 4 * (i / 128), sizeof scale);
        latent[i] = numeric_get(row, MLA_FORMAT_E4M3, i) * (double)scale;
    }
    for (int32_t i = 0; i < 64; i++) {
        uint16_t cell;
        memcpy(&cell, row + 528 + 2 * i, sizeof cell);
        rope[i] = numeric_get(&cell, MLA_FORMAT_BF16, 0);
    }
}

void numeric_to_ds656(uint8_t *row, const float *latent, const float *rope)
{
    for (int32_t tile = 0; tile < 4; tile++) {
        const float *x = latent + 128 * tile;
        float largest = 0.0f;
        for (int32_t i = 0; i < 128; i++)
            largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
        float scale = largest == 0.0f ? 1.0f : largest / 448.0f;
        for (int32_t i = 0; i < 128; i++)
            numeric_put(row, MLA_FORMAT_E4M3, 128 * tile + i, (double)(x[i] / scale));
        memcpy(row + 512 + 4 * tile, &scale, sizeof scale);
    }
    for (int32_t i = 0; i < 64; i++) {
        uint16_t cell;
        numeric_put(&cell, MLA_FORMAT_BF16, 0, (double)rope[i]);
        memcpy(row + 528 + 2 * i, &cell, sizeof cell);
    }
}

void *numeric_address(const mla_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    int64_t index[4] = {i0, i1, i2, i3};
    int64_t offset = 0;
    for (int32_t i = 0; i < t->rank && i < 4; i++)
        offset += index[i] * t->stride[i];
    return (uint8_t *)t->data + offset * mla_format_bytes(t->format);
}

double numeric_at(const mla_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    return numeric_get(numeric_address(t, i0, i1, i2, i3), t->format, 0);
}

void numeric_set(const mla_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3, double x)
{
    numeric_put(numeric_address(t, i0, i1, i2, i3), t->format, 0, x);
}
