/*
 * Values and random contents in every format (formats.h). A binary float format is (exponent bits,
 * mantissa bits, bias); rounding to it is a search among its own values, which is slow and plainly
 * right, and is done for a table of 4096 samples only.
 */
#include "formats.h"
#include <math.h>
#include <stdbool.h>
#include <string.h>

static double small_float(uint32_t bits, int exponent_bits, int mantissa_bits)
{
    int bias = (1 << (exponent_bits - 1)) - 1;
    uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
    int exponent = (int)(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
    double sign = (bits >> (exponent_bits + mantissa_bits) & 1u) != 0 ? -1.0 : 1.0;
    if (exponent == 0)
        return sign * ldexp((double)mantissa, 1 - bias - mantissa_bits);
    if (exponent == (1 << exponent_bits) - 1)
        return mantissa != 0 ? (double)NAN : sign * (double)INFINITY;
    return sign * ldexp((double)(mantissa | 1u << mantissa_bits), exponent - bias - mantissa_bits);
}

/* e4m3 "fn": the top exponent is ordinary, only all ones is NaN. */
static double e4m3_value(uint8_t bits)
{
    if ((bits & 0x7f) == 0x7f)
        return (double)NAN;
    double magnitude = (bits & 0x78) == 0x78 ? ldexp((double)(8 | (bits & 7)), 15 - 7 - 3)
                                             : fabs(small_float(bits, 4, 3));
    return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

static double bits_value(int32_t format, uint32_t bits)
{
    float wide;
    switch (format) {
    case MLA_FORMAT_BF16:
        bits <<= 16;
        memcpy(&wide, &bits, sizeof wide);
        return (double)wide;
    case MLA_FORMAT_F16:
        return small_float(bits, 5, 10);
    case MLA_FORMAT_E4M3:
        return e4m3_value((uint8_t)bits);
    case MLA_FORMAT_E5M2:
        return small_float(bits, 5, 2);
    default:
        memcpy(&wide, &bits, sizeof wide);
        return (double)wide;
    }
}

double bench_value(int32_t format, const void *data, int64_t i)
{
    uint32_t word;
    uint16_t half;
    switch (mla_format_bytes(format)) {
    case 4:
        memcpy(&word, (const char *)data + i * 4, sizeof word);
        return bits_value(format, word);
    case 2:
        memcpy(&half, (const char *)data + i * 2, sizeof half);
        return bits_value(format, half);
    default:
        return bits_value(format, ((const uint8_t *)data)[i]);
    }
}

void bench_values(int32_t format, const void *data, int64_t first, int64_t n, double *out)
{
    const char *at = (const char *)data + first * mla_format_bytes(format);
    if (format == MLA_FORMAT_BF16) {
        for (int64_t i = 0; i < n; i++) {
            uint16_t half;
            float wide;
            memcpy(&half, at + i * 2, sizeof half);
            uint32_t bits = (uint32_t)half << 16;
            memcpy(&wide, &bits, sizeof wide);
            out[i] = (double)wide;
        }
        return;
    }
    for (int64_t i = 0; i < n; i++)
        out[i] = bench_value(format, at, i);
}

void bench_ds656_values(const uint8_t *row, double *out)
{
    for (int64_t i = 0; i < 512; i++)
        out[i] = e4m3_value(row[i]) * bench_value(MLA_FORMAT_F32, row + 512, i / 128);
    bench_values(MLA_FORMAT_BF16, row + 528, 0, 64, out + 512);
}

double bench_random_normal(uint64_t *state)
{
    double radius = sqrt(-2.0 * log(bench_random_unit(state)));
    return radius * cos(6.283185307179586 * bench_random_unit(state));
}

/* The element of a 1- or 2-byte format that is nearest to x: bisection over the positive values,
 * which grow with their bits. |x| is far below every format's largest value here. */
static uint32_t nearest_bits(int32_t format, double x)
{
    uint32_t sign = mla_format_bytes(format) == 2 ? 0x8000u : 0x80u;
    double magnitude = fabs(x);
    uint32_t low = 0;
    uint32_t high = format == MLA_FORMAT_E4M3   ? 0x7e
                    : format == MLA_FORMAT_E5M2 ? 0x7b
                    : format == MLA_FORMAT_F16  ? 0x7bff
                                                : 0x7f7f;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (bits_value(format, middle) <= magnitude)
            low = middle;
        else
            high = middle;
    }
    bool is_nearer_high =
        bits_value(format, high) - magnitude < magnitude - bits_value(format, low);
    return (is_nearer_high ? high : low) | (x < 0.0 ? sign : 0u);
}

void bench_table_make(bench_table *table, int32_t format)
{
    uint64_t state = 0x9e3779b97f4a7c15ull;
    table->format = format;
    for (int i = 0; i < BENCH_TABLE_SIZE; i++) {
        float x = (float)bench_random_normal(&state);
        if (format == MLA_FORMAT_F32)
            memcpy(&table->bits[i], &x, sizeof x);
        else
            table->bits[i] = nearest_bits(format, (double)x);
    }
}

void bench_fill_normal(const bench_table *table, void *data, int64_t n, uint64_t seed)
{
    uint64_t state = seed * 2 + 1;
    uint32_t *words = data;
    uint16_t *halves = data;
    uint8_t *bytes = data;
    int32_t size = mla_format_bytes(table->format);
    uint64_t bits = 0;
    /* One random number gives five indices of 12 bits. */
    for (int64_t i = 0; i < n; i++) {
        if (i % 5 == 0)
            bits = bench_random(&state);
        uint32_t value = table->bits[bits & (BENCH_TABLE_SIZE - 1)];
        bits >>= 12;
        if (size == 4)
            words[i] = value;
        else if (size == 2)
            halves[i] = (uint16_t)value;
        else
            bytes[i] = (uint8_t)value;
    }
}

void bench_fill_ds656(const bench_table *e4m3, const bench_table *bf16, void *data, int64_t n_rows,
                      uint64_t seed)
{
    uint8_t *rows = data;
    uint64_t state = seed * 2 + 1;
    for (int64_t r = 0; r < n_rows; r++) {
        uint8_t *row = rows + r * MLA_DS656_ROW_BYTES;
        float scales[4];
        for (int i = 0; i < 4; i++)
            scales[i] = (float)(0.5 + bench_random_unit(&state));
        bench_fill_normal(e4m3, row, 512, bench_random(&state));
        memcpy(row + 512, scales, sizeof scales);
        bench_fill_normal(bf16, row + 528, 64, bench_random(&state));
    }
}
