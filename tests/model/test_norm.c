/*
 * RMS norm, SwiGLU and the rotary tables against their formulas in f64, and number formats against
 * their definitions.
 */
#include "support.h"
#include "test.h"

#include <convert.h>
#include <math.h>
#include <norm.h>
#include <stdlib.h>

static void test_rms_norm(void **state)
{
    (void)state;
    static const int64_t widths[] = {1, 15, 16, 33, 192, 513};
    for (size_t w = 0; w < sizeof widths / sizeof widths[0]; w++) {
        int64_t n = widths[w];
        float x[3 * 520];
        float weight[520];
        float y[3 * 520];
        fill_random(x, 3 * 520, w);
        fill_random(weight, n, w + 10);
        mlai_rms_norm(x, 520, 3, n, weight, 1e-6, MLA_FORMAT_F32, y, 520);
        for (int t = 0; t < 3; t++) {
            double sum = 0.0;
            for (int64_t i = 0; i < n; i++)
                sum += (double)x[t * 520 + i] * x[t * 520 + i];
            for (int64_t i = 0; i < n; i++) {
                double want = weight[i] * x[t * 520 + i] / sqrt(sum / (double)n + 1e-6);
                assert_true(fabs(y[t * 520 + i] - want) <= 1e-6 * fabs(want) + 1e-12);
            }
        }
        mlai_rms_norm(x, 520, 3, n, weight, 1e-6, MLA_FORMAT_BF16, x, 520);
        for (int64_t i = 0; i < n; i++)
            assert_true(fabsf(x[i] - y[i]) <= fabsf(y[i]) * 0x1p-8f);
    }
}

static void test_swiglu(void **state)
{
    (void)state;
    float gate[8] = {0.0f, 1.0f, -1.0f, 100.0f, -100.0f, 5.0f, -0.25f, 1e-8f};
    const float up[8] = {3.0f, 2.0f, 1.0f, -1.0f, 7.0f, 0.5f, 4.0f, 1.0f};
    double want[8];
    for (int i = 0; i < 8; i++)
        want[i] = gate[i] / (1.0 + exp(-(double)gate[i])) * up[i];
    mlai_swiglu(gate, up, 8, MLA_FORMAT_F32);
    for (int i = 0; i < 8; i++)
        assert_true(fabs(gate[i] - want[i]) <= 1e-6 * fabs(want[i]) + 1e-38);
}

static void test_rope_tables(void **state)
{
    (void)state;
    enum { DIM = 64, POSITIONS = 700 };
    mlai_rope_config rope = {.type = MLAI_ROPE_YARN,
                             .theta = 10000.0,
                             .factor = 4.0,
                             .original_max_position = 1024.0,
                             .beta_fast = 32.0,
                             .beta_slow = 1.0,
                             .attention_factor = 1.25,
                             .is_truncated = true};
    float inv_freq[DIM / 2];
    static float cosines[POSITIONS * DIM / 2];
    static float sines[POSITIONS * DIM / 2];
    mlai_rope_frequencies(&rope, DIM, inv_freq);
    mlai_rope_tables(&rope, inv_freq, DIM, POSITIONS, cosines, sines);
    double low = floor(DIM * log(1024.0 / (32.0 * 2.0 * M_PI)) / (2.0 * log(10000.0)));
    double high = ceil(DIM * log(1024.0 / (2.0 * M_PI)) / (2.0 * log(10000.0)));
    for (int i = 0; i < DIM / 2; i++) {
        double base = pow(10000.0, 2.0 * i / DIM);
        double ramp = fmin(fmax((i - low) / (high - low), 0.0), 1.0);
        double frequency = ramp / (4.0 * base) + (1.0 - ramp) / base;
        assert_true(fabs(inv_freq[i] / frequency - 1.0) < 1e-6);
        for (int p = 0; p < POSITIONS; p += 233) {
            /* The angle is an f32 product, so it is off by up to 2^-24 of itself. */
            double angle = p * (double)inv_freq[i];
            double bound = 1.25 * (angle * 0x1p-23 + 2e-7);
            assert_true(fabs(cosines[p * DIM / 2 + i] - 1.25 * cos(angle)) < bound);
            assert_true(fabs(sines[p * DIM / 2 + i] - 1.25 * sin(angle)) < bound);
        }
    }
    rope.type = MLAI_ROPE_LINEAR;
    mlai_rope_frequencies(&rope, DIM, inv_freq);
    assert_true(fabs(inv_freq[0] - 0.25) < 1e-7);
    rope.type = MLAI_ROPE_DEFAULT;
    mlai_rope_frequencies(&rope, DIM, inv_freq);
    assert_true(inv_freq[0] == 1.0f);
}

static void test_formats(void **state)
{
    (void)state;
    assert_true(mlai_model_e4m3_to_f32(0x7e) == 448.0f && mlai_model_e4m3_to_f32(0x01) == 0x1p-9f);
    assert_true(isnan(mlai_model_e4m3_to_f32(0x7f)) && isnan(mlai_model_e4m3_to_f32(0xff)));
    assert_true(mlai_model_e5m2_to_f32(0x7b) == 57344.0f && isinf(mlai_model_e5m2_to_f32(0x7c)));
    for (int bits = 0; bits < 256; bits++) {
        int exponent = bits >> 3 & 15;
        double magnitude =
            exponent == 0 ? ldexp(bits & 7, -9) : ldexp(8 + (bits & 7), exponent - 10);
        if ((bits & 0x7f) != 0x7f)
            assert_true(mlai_model_e4m3_to_f32((uint8_t)bits) ==
                        (float)((bits & 0x80) != 0 ? -magnitude : magnitude));
    }
    for (uint32_t bits = 0; bits < 65536; bits++) {
        int exponent = bits >> 10 & 31;
        double magnitude =
            exponent == 0 ? ldexp(bits & 1023, -24) : ldexp(1024 + (bits & 1023), exponent - 25);
        float value = mlai_model_f16_to_f32((uint16_t)bits);
        if (exponent < 31)
            assert_true(value == (float)((bits & 0x8000u) != 0 ? -magnitude : magnitude));
        float wide = mlai_model_bf16_to_f32((uint16_t)bits);
        if (!isnan(wide))
            assert_int_equal(mlai_model_bf16_from_f32(wide), bits);
        else
            assert_true(isnan(mlai_model_bf16_to_f32(mlai_model_bf16_from_f32(wide))));
    }
    /* Ties go to the even neighbour: 1 + 2^-8 down to 1, 1 + 3 * 2^-8 up to 1 + 2^-6. */
    assert_int_equal(mlai_model_bf16_from_f32(1.0f + 0x1p-8f), 0x3f80);
    assert_int_equal(mlai_model_bf16_from_f32(1.0f + 3 * 0x1p-8f), 0x3f82);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rms_norm),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_rope_tables),
        cmocka_unit_test(test_formats),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
