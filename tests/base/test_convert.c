/*
 * Format conversion against the formats' definitions: widening of every code is recomputed with
 * ldexp from sign, exponent and mantissa; narrowing must give the nearest code, ties to the even
 * one, found by searching all codes.
 */
#include "test.h"

#include "base/convert.h"
#include <math.h>
#include <stdlib.h>

typedef struct format {
    const char *name;
    int exponent_bits, mantissa_bits, bias;
    int has_infinity; /* all-ones exponent: infinity and NaN; e4m3 instead: one NaN code */
    double largest;
    unsigned top; /* its code */
    int saturates;
} format;

static const format f16 = {"f16", 5, 10, 15, 1, 65504.0, 0x7bff, 0};
static const format bf16 = {"bf16", 8, 7, 127, 1, 0x1.fep127, 0x7f7f, 0};
static const format e4m3 = {"e4m3", 4, 3, 7, 0, 448.0, 0x7e, 1};
static const format e5m2 = {"e5m2", 5, 2, 15, 1, 57344.0, 0x7b, 1};

static double value_of(const format *f, unsigned code)
{
    unsigned mantissa = code & ((1u << f->mantissa_bits) - 1u);
    unsigned exponent = (code >> f->mantissa_bits) & ((1u << f->exponent_bits) - 1u);
    double sign = code >> (f->mantissa_bits + f->exponent_bits) ? -1.0 : 1.0;
    unsigned top = (1u << f->exponent_bits) - 1u;
    if (f->has_infinity && exponent == top)
        return mantissa ? (double)NAN : sign * (double)INFINITY;
    if (!f->has_infinity && exponent == top && mantissa == (1u << f->mantissa_bits) - 1u)
        return (double)NAN;
    double fraction = ldexp((double)mantissa, -f->mantissa_bits);
    if (exponent == 0)
        return sign * ldexp(fraction, 1 - f->bias);
    return sign * ldexp(1.0 + fraction, (int)exponent - f->bias);
}

static float widen(const format *f, unsigned code)
{
    if (f == &f16)
        return mlai_f32_from_f16((uint16_t)code);
    if (f == &bf16)
        return mlai_f32_from_bf16((uint16_t)code);
    return f == &e4m3 ? mlai_f32_from_e4m3((uint8_t)code) : mlai_f32_from_e5m2((uint8_t)code);
}

static unsigned narrow(const format *f, float x)
{
    if (f == &f16)
        return mlai_f16_from_f32(x);
    if (f == &bf16)
        return mlai_bf16_from_f32(x);
    return f == &e4m3 ? mlai_e4m3_from_f32(x) : mlai_e5m2_from_f32(x);
}

static unsigned codes(const format *f)
{
    return 1u << (1 + f->exponent_bits + f->mantissa_bits);
}

static void check_widening(const format *f)
{
    for (unsigned code = 0; code < codes(f); code++) {
        double want = value_of(f, code);
        float got = widen(f, code);
        if (isnan(want)) {
            assert_true(isnan(got));
            assert_true(isnan(widen(f, narrow(f, got))));
            continue;
        }
        if ((double)got != want || !signbit(got) != !signbit(want))
            fail_msg("%s code %#x widens to %a, not %a", f->name, code, (double)got, want);
        unsigned want_back = code;
        if (isinf(want) && f->saturates)
            want_back = code - 1u;
        if (narrow(f, got) != want_back)
            fail_msg("%s code %#x comes back as %#x", f->name, code, narrow(f, got));
    }
}

/* Positive codes rise with the value, so the nearest one is found by bisection. */
static unsigned nearest(const format *f, float x)
{
    double magnitude = fabs((double)x);
    unsigned sign = signbit(x) ? codes(f) / 2u : 0u, top = f->top;
    if (magnitude >= f->largest) {
        double step = f->largest - value_of(f, top - 1);
        if (f->saturates || magnitude < f->largest + step / 2.0)
            return sign | top;
        return sign | (top + 1); /* infinity */
    }
    unsigned low = 0, high = top;
    while (high - low > 1) {
        unsigned middle = (low + high) / 2u;
        if (value_of(f, middle) <= magnitude)
            low = middle;
        else
            high = middle;
    }
    double below = magnitude - value_of(f, low), above = value_of(f, high) - magnitude;
    if (below < above || (below == above && low % 2u == 0))
        return sign | low;
    return sign | high;
}

static void check_one(const format *f, float x)
{
    unsigned want = nearest(f, x), got = narrow(f, x);
    if (want != got)
        fail_msg("%s of %a is %#x, not %#x", f->name, (double)x, got, want);
}

static void check_narrowing(const format *f)
{
    for (unsigned code = 0; code + 1 < codes(f) / 2u; code++) {
        float a = widen(f, code), b = widen(f, code + 1);
        if (isnan(a) || isnan(b) || isinf(b))
            continue;
        float middle = a + (b - a) / 2.0f;
        check_one(f, middle);
        check_one(f, -middle);
        check_one(f, nextafterf(middle, 0.0f));
        check_one(f, nextafterf(middle, INFINITY));
    }
    check_one(f, (float)f->largest);
    check_one(f, nextafterf((float)f->largest, 0.0f));
    check_one(f, nextafterf((float)f->largest, INFINITY));
    uint32_t state = 12345;
    for (int i = 0; i < 200000; i++) {
        state = state * 1664525u + 1013904223u;
        float x = mlai_f32_from_bits(state);
        if (isfinite(x))
            check_one(f, x);
    }
}

static void widening_is_exact(void **state)
{
    (void)state;
    check_widening(&f16);
    check_widening(&bf16);
    check_widening(&e4m3);
    check_widening(&e5m2);
}

static void narrowing_rounds_to_nearest_even(void **state)
{
    (void)state;
    check_narrowing(&f16);
    check_narrowing(&bf16);
    check_narrowing(&e4m3);
    check_narrowing(&e5m2);
}

static void fp8_saturates(void **state)
{
    (void)state;
    assert_int_equal(mlai_e4m3_from_f32(1e30f), 0x7e);
    assert_int_equal(mlai_e4m3_from_f32(-INFINITY), 0xfe);
    assert_int_equal(mlai_e5m2_from_f32(1e30f), 0x7b);
    assert_int_equal(mlai_e5m2_from_f32(-INFINITY), 0xfb);
    assert_true(isnan(mlai_f32_from_e4m3(mlai_e4m3_from_f32(NAN))));
    assert_true(isnan(mlai_f32_from_e5m2(mlai_e5m2_from_f32(NAN))));
}

static void rows_scale_both_ways(void **state)
{
    (void)state;
    float in[4] = {1.0f, -3.0f, 900.0f, 0.0f}, out[4];
    uint8_t stored[4];
    mlai_row_from_f32(stored, MLA_FORMAT_E4M3, in, 4, 2.0f);
    mlai_row_to_f32(out, stored, MLA_FORMAT_E4M3, 4, 2.0f);
    assert_true(out[0] == 1.0f && out[1] == -3.0f && out[2] == 896.0f && out[3] == 0.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(widening_is_exact),
        cmocka_unit_test(narrowing_rounds_to_nearest_even),
        cmocka_unit_test(fp8_saturates),
        cmocka_unit_test(rows_scale_both_ways),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
