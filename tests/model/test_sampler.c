/*
 * The sampler: greedy choice, its generator against published values, frequencies against
 * probabilities (chi-square), the nucleus against a plain sort, and refusals.
 */
#include "support.h"
#include "test.h"

#include <math.h>
#include <sampler.h>
#include <stdlib.h>

static void test_greedy(void **state)
{
    (void)state;
    mlai_sampler sampler;
    mla_diag diag = {{0}};
    must(mlai_sampler_init(0.0, 1.0, 1, 6, &sampler, &diag), &diag, "greedy");
    const float plain[6] = {0.0f, 3.0f, 3.0f, -1.0f, 2.0f, 1.0f};
    const float broken[6] = {NAN, -INFINITY, NAN, -5.0f, -4.0f, NAN};
    const float hopeless[6] = {NAN, NAN, NAN, NAN, NAN, NAN};
    assert_int_equal(mlai_sampler_next(&sampler, plain), 1);
    assert_int_equal(mlai_sampler_next(&sampler, broken), 4);
    assert_int_equal(mlai_sampler_next(&sampler, hopeless), 0);
    mlai_sampler_free(&sampler);
    must(mlai_sampler_init(1.0, 0.5, 1, 6, &sampler, &diag), &diag, "top-p");
    assert_in_range(mlai_sampler_next(&sampler, broken), 3, 4);
    assert_int_equal(mlai_sampler_next(&sampler, hopeless), 0);
    mlai_sampler_free(&sampler);
}

/* SplitMix64's first outputs for seed 1234567, as its reference prints them. */
static void test_generator(void **state)
{
    (void)state;
    static const uint64_t want[5] = {6457827717110365317u, 3203168211198807973u,
                                     9817491932198370423u, 4593380528125082431u,
                                     16408922859458223821u};
    uint64_t seed = 1234567;
    for (int i = 0; i < 5; i++)
        assert_true(mlai_sampler_uniform(&seed) == (double)(want[i] >> 11) * 0x1p-53);
}

enum { VOCAB = 12, DRAWS = 200000 };

/* Probabilities that a draw should have, by plain sorting. */
static void want_probabilities(const float *logits, double temperature, double top_p, double *want)
{
    double sum = 0.0;
    int order[VOCAB];
    for (int i = 0; i < VOCAB; i++) {
        want[i] = exp(logits[i] / temperature);
        sum += want[i];
        order[i] = i;
    }
    for (int i = 0; i < VOCAB; i++) {
        for (int j = i + 1; j < VOCAB; j++) {
            if (want[order[j]] > want[order[i]]) {
                int swap = order[i];
                order[i] = order[j];
                order[j] = swap;
            }
        }
    }
    double kept = 0.0;
    for (int i = 0; i < VOCAB; i++) {
        if (kept >= top_p * sum && top_p < 1.0)
            want[order[i]] = 0.0;
        else
            kept += want[order[i]];
    }
    for (int i = 0; i < VOCAB; i++)
        want[i] /= kept;
}

static void test_frequencies(void **state)
{
    (void)state;
    static const double settings[][2] = {
        {1.0, 1.0}, {0.5, 1.0}, {2.0, 0.9}, {1.0, 0.5}, {0.7, 0.01}};
    float logits[VOCAB];
    fill_random(logits, VOCAB, 21);
    for (size_t s = 0; s < sizeof settings / sizeof settings[0]; s++) {
        mlai_sampler sampler;
        mla_diag diag = {{0}};
        double want[VOCAB];
        int64_t count[VOCAB] = {0};
        must(mlai_sampler_init(settings[s][0], settings[s][1], 42 + s, VOCAB, &sampler, &diag),
             &diag, "sampler");
        for (int i = 0; i < DRAWS; i++)
            count[mlai_sampler_next(&sampler, logits)]++;
        want_probabilities(logits, settings[s][0], settings[s][1], want);
        double chi_square = 0.0;
        for (int i = 0; i < VOCAB; i++) {
            if (want[i] == 0.0) {
                assert_int_equal(count[i], 0);
                continue;
            }
            double expected = want[i] * DRAWS;
            chi_square += ((double)count[i] - expected) * ((double)count[i] - expected) / expected;
        }
        /* 11 degrees of freedom at most: beyond 40 once in 30,000 seeds; the seeds are fixed. */
        assert_true(chi_square < 40.0);
        mlai_sampler_free(&sampler);
    }
}

static void test_seeds(void **state)
{
    (void)state;
    float logits[VOCAB];
    int64_t ids[3][50];
    fill_random(logits, VOCAB, 22);
    for (int run = 0; run < 3; run++) {
        mlai_sampler sampler;
        must(mlai_sampler_init(1.0, 0.95, run < 2 ? 7 : 8, VOCAB, &sampler, NULL), NULL, "sampler");
        for (int i = 0; i < 50; i++)
            ids[run][i] = mlai_sampler_next(&sampler, logits);
        mlai_sampler_free(&sampler);
    }
    assert_memory_equal(ids[0], ids[1], sizeof ids[0]);
    assert_memory_not_equal(ids[0], ids[2], sizeof ids[0]);
}

static void test_refusals(void **state)
{
    (void)state;
    static const double bad[][2] = {{-1.0, 1.0}, {NAN, 1.0}, {INFINITY, 1.0}, {1.0, 0.0},
                                    {1.0, 1.01}, {1.0, NAN}, {1.0, -0.5},     {0.0, 2.0}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        mlai_sampler sampler;
        mla_diag diag = {{0}};
        assert_int_equal(mlai_sampler_init(bad[i][0], bad[i][1], 0, 4, &sampler, &diag),
                         MLA_ERROR_ARGUMENT);
        assert_true(diag.text[0] != '\0');
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy),      cmocka_unit_test(test_generator),
        cmocka_unit_test(test_frequencies), cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
