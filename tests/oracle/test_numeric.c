/*
 * Tests of the reference number formats against figures of their specifications: OCP 8-bit floating
 * point v1.0, IEEE 754 binary16, bfloat16. The library's conversions are tested against these in
 * the write, gather and rope suites.
 */
#include "oracle/numeric.h"
#include "oracle/rng.h"

#include "test.h"
#include <math.h>

static uint32_t bits_of(int32_t format, double x)
{
    uint64_t cell = 0;
    numeric_put(&cell, format, 0, x);
    return (uint32_t)cell;
}

static double value_of(int32_t format, uint32_t bits)
{
    uint64_t cell = bits;
    return numeric_get(&cell, format, 0);
}

static void e4m3_follows_the_specification(void **unused)
{
    (void)unused;
    assert_true(value_of(MLA_FORMAT_E4M3, 0x7e) == 448.0);
    assert_true(value_of(MLA_FORMAT_E4M3, 0x08) == 0x1p-6);
    assert_true(value_of(MLA_FORMAT_E4M3, 0x07) == 0.875 * 0x1p-6);
    assert_true(value_of(MLA_FORMAT_E4M3, 0x01) == 0x1p-9);
    assert_true(isnan(value_of(MLA_FORMAT_E4M3, 0x7f)) && isnan(value_of(MLA_FORMAT_E4M3, 0xff)));
    assert_int_equal(bits_of(MLA_FORMAT_E4M3, 1e9), 0x7e);
    assert_int_equal(bits_of(MLA_FORMAT_E4M3, -INFINITY), 0xfe);
    assert_int_equal(bits_of(MLA_FORMAT_E4M3, 0x1p-10), 0x00); /* a tie goes to even */
    assert_int_equal(bits_of(MLA_FORMAT_E4M3, 0x1.8p-9), 0x02);
    assert_int_equal(bits_of(MLA_FORMAT_E4M3, 0x1.1p0), 0x38);
    assert_int_equal(bits_of(MLA_FORMAT_E4M3, 0x1.3p0), 0x3a);
}

static void e5m2_follows_the_specification(void **unused)
{
    (void)unused;
    assert_true(value_of(MLA_FORMAT_E5M2, 0x7b) == 57344.0);
    assert_true(value_of(MLA_FORMAT_E5M2, 0x7c) == INFINITY);
    assert_true(isnan(value_of(MLA_FORMAT_E5M2, 0x7d)));
    assert_true(value_of(MLA_FORMAT_E5M2, 0x04) == 0x1p-14);
    assert_true(value_of(MLA_FORMAT_E5M2, 0x01) == 0x1p-16);
    assert_int_equal(bits_of(MLA_FORMAT_E5M2, INFINITY), 0x7b);
    assert_int_equal(bits_of(MLA_FORMAT_E5M2, -70000.0), 0xfb);
}

static void f16_and_bf16_follow_ieee(void **unused)
{
    (void)unused;
    assert_true(value_of(MLA_FORMAT_F16, 0x7bff) == 65504.0);
    assert_true(value_of(MLA_FORMAT_F16, 0x0001) == 0x1p-24);
    assert_int_equal(bits_of(MLA_FORMAT_F16, 65519.0), 0x7bff);
    assert_int_equal(bits_of(MLA_FORMAT_F16, 65520.0), 0x7c00);
    assert_int_equal(bits_of(MLA_FORMAT_F16, 1.0), 0x3c00);
    assert_int_equal(bits_of(MLA_FORMAT_BF16, 1.0), 0x3f80);
    assert_int_equal(bits_of(MLA_FORMAT_BF16, 0x1.01p0), 0x3f80);
    assert_int_equal(bits_of(MLA_FORMAT_BF16, 0x1.03p0), 0x3f82);
    assert_int_equal(bits_of(MLA_FORMAT_BF16, -INFINITY), 0xff80);
}

static void every_value_survives_a_round_trip(void **unused)
{
    (void)unused;
    static const int32_t formats[] = {MLA_FORMAT_BF16, MLA_FORMAT_F16, MLA_FORMAT_E4M3,
                                      MLA_FORMAT_E5M2};
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        uint32_t n = mla_format_bytes(formats[f]) == 1 ? 256 : 65536;
        for (uint32_t bits = 0; bits < n; bits++) {
            double x = value_of(formats[f], bits);
            bool saturates = formats[f] == MLA_FORMAT_E5M2 && isinf(x);
            if (isnan(x))
                assert_true(isnan(numeric_round(formats[f], x)));
            else if (!saturates)
                assert_int_equal(bits_of(formats[f], x), bits);
        }
    }
}

static void rounding_picks_the_nearest(void **unused)
{
    (void)unused;
    static const int32_t formats[] = {MLA_FORMAT_BF16, MLA_FORMAT_F16, MLA_FORMAT_E4M3,
                                      MLA_FORMAT_E5M2};
    rng r = rng_stream(5, 5);
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++)
        for (int32_t i = 0; i < 2000; i++) {
            double x = (double)(float)(rng_normal(&r) * exp(8.0 * rng_uniform(&r) - 4.0));
            uint32_t bits = bits_of(formats[f], x);
            double got = value_of(formats[f], bits);
            for (int32_t step = -1; step <= 1; step += 2) {
                double other = value_of(formats[f], bits + (uint32_t)step);
                if (isfinite(other))
                    assert_true(fabs(got - x) <= fabs(other - x));
            }
        }
}

static void a_ds656_row_holds_its_parts(void **unused)
{
    (void)unused;
    float latent[512], rope[64];
    double got[512], key[64];
    uint8_t row[MLA_DS656_ROW_BYTES];
    for (int32_t i = 0; i < 512; i++)
        latent[i] = i / 128 == 1 ? 0.0f : (float)((i % 128) - 60) * 0.25f;
    for (int32_t i = 0; i < 64; i++)
        rope[i] = (float)i;
    numeric_to_ds656(row, latent, rope);
    numeric_from_ds656(row, got, key);
    for (int32_t i = 0; i < 512; i++)
        assert_true(fabs(got[i] - (double)latent[i]) <= 0.0625 * fabs((double)latent[i]) + 1e-4);
    for (int32_t i = 0; i < 64; i++)
        assert_true(key[i] == (double)rope[i]);
    float one;
    uint8_t *at = (uint8_t *)&one;
    for (int32_t i = 0; i < 4; i++)
        at[i] = row[516 + i];
    assert_true(one == 1.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e4m3_follows_the_specification),
        cmocka_unit_test(e5m2_follows_the_specification),
        cmocka_unit_test(f16_and_bf16_follow_ieee),
        cmocka_unit_test(every_value_survives_a_round_trip),
        cmocka_unit_test(rounding_picks_the_nearest),
        cmocka_unit_test(a_ds656_row_holds_its_parts),
    };
    return cmocka_run_group_tests_name("numeric", tests, NULL, NULL);
}
