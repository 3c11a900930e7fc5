/*
 * Bounds and comparison; see compare.h. `worst` values are errors divided by their bounds, so that
 * one number tells how close a result came: 1 is the limit.
 */
#include "oracle/compare.h"

#include "oracle/numeric.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

compare_bound compare_bound_of(int32_t q_format, int32_t kv_format, int32_t out_format)
{
    compare_bound b = {0.0, numeric_epsilon(out_format), 0.0, 0.0};
    (void)kv_format; /* the cache is taken as stored: its own rounding is no error */
    if (q_format == MLA_FORMAT_F16) {
        b.probability = 0x1p-11;
        b.lse = 5e-5;
    } else if (q_format != MLA_FORMAT_F32) {
        b.probability = 0x1p-9;
        b.lse = 1e-4;
    }
    return b;
}

bool compare_value(double got, double want, double slack)
{
    if (isnan(want) || isnan(got))
        return isnan(want) && isnan(got);
    if (isinf(want) || isinf(got))
        return want == got;
    return fabs(got - want) <= slack;
}

bool compare_near(const void *a, const void *b, int32_t format, int64_t n)
{
    double largest = 0.0;
    for (int64_t i = 0; i < n; i++)
        largest = fmax(largest, fabs(numeric_get(a, format, i)));
    for (int64_t i = 0; i < n; i++)
        if (!(fabs(numeric_get(a, format, i) - numeric_get(b, format, i)) <= largest / 128.0))
            return false;
    return true;
}

static double ratio(double error, double bound)
{
    if (isnan(error))
        return INFINITY;
    if (error == 0.0)
        return 0.0;
    return bound > 0.0 ? error / bound : INFINITY;
}

typedef struct row_verdict {
    double worst; /* error over bound */
    const char *what;
    int64_t element;
    double got;
    double want;
} row_verdict;

static void worsen(row_verdict *v, double r, const char *what, int64_t element, double got,
                   double want)
{
    if (r > v->worst) {
        v->worst = r;
        v->what = what;
        v->element = element;
        v->got = got;
        v->want = want;
    }
}

/* Roundings of a key's elements are independent: a score of some hundred of them moves by 0.03 of
 * what it adds up times one rounding, seldom by four times that. */
static double score_error(const oracle_result *want, int64_t row, compare_bound bound)
{
    return bound.key * want->condition[row] / 8.0;
}

static void judge_lse(const oracle_result *want, int64_t row, const mla_tensor *lse,
                      compare_bound bound, row_verdict *v)
{
    double got = oracle_lse_at(lse, want->token[row], want->head[row]);
    double expected = want->lse[row];
    if (isinf(expected) || isinf(got) || isnan(got)) {
        worsen(v, got == expected ? 0.0 : INFINITY, "lse", -1, got, expected);
        return;
    }
    double slack = bound.lse + score_error(want, row, bound) +
                   0x1p-24 * (16.0 + 2.0 * fabs(expected) + 4.0 * want->condition[row]);
    worsen(v, ratio(fabs(got - expected), slack), "lse", -1, got, expected);
}

static row_verdict judge_row(const oracle_result *want, int64_t row, const mla_tensor *out,
                             const mla_tensor *lse, compare_bound bound)
{
    row_verdict v = {0.0, "", 0, 0.0, 0.0};
    const double *reference = want->out + row * want->width;
    const double *magnitude = want->magnitude + row * want->width;
    const double *spread = want->spread + row * want->width;
    const void *at = oracle_out_row(out, want->token[row], want->head[row]);
    double tiny = 2.0 * numeric_smallest(out->format) + 1e-36;
    /* f32 work: the score's error moves p by as much, relatively; sums add a few roundings. A plain
     * sum of n products strays by 0.6 of 2^-24 times the sum of their magnitudes, whatever n. */
    double work = 0x1p-24 * (8.0 + 4.0 * want->condition[row]) + score_error(want, row, bound);
    double error2 = 0.0, by_output2 = 0.0, by_p2 = 0.0, working2 = 0.0, norm2 = 0.0;
    for (int64_t i = 0; i < want->width; i++) {
        double got = numeric_get(at, out->format, i);
        double error = fabs(got - reference[i]);
        if (want->visible[row] == 0)
            worsen(&v, got == 0.0 ? 0.0 : INFINITY, "out of an empty row", i, got, 0.0);
        double slack = (2.0 * bound.probability + 2.0 * work) * magnitude[i] +
                       1.01 * bound.output * fabs(reference[i]) + tiny;
        worsen(&v, ratio(error, slack), "out element", i, got, reference[i]);
        double by_output = bound.output * reference[i], by_p = bound.probability * spread[i];
        error2 += error * error;
        by_output2 += by_output * by_output;
        by_p2 += by_p * by_p;
        working2 += magnitude[i] * magnitude[i];
        norm2 += reference[i] * reference[i];
    }
    /* Roundings are uniform within their bounds, so their norm is about 0.6 of these sums for many
     * keys and wide rows; with few that matter the law of large numbers does not hold yet. */
    double narrow = 1.0 + 4.0 / (double)want->width;
    double norm_slack = narrow * sqrt(by_output2 + 3.0 * by_p2) + work * sqrt(working2) +
                        tiny * sqrt((double)want->width);
    worsen(&v, ratio(sqrt(error2), norm_slack), "norm of the row's error", -1, sqrt(error2),
           sqrt(norm2));
    if (lse && lse->rank)
        judge_lse(want, row, lse, bound, &v);
    return v;
}

bool compare_attention(const oracle_result *want, const mla_tensor *out, const mla_tensor *lse,
                       compare_bound bound, char *why, size_t why_bytes)
{
    double worst = 1.0;
    bool ok = true;
    for (int64_t row = 0; row < want->n_rows; row++) {
        row_verdict v = judge_row(want, row, out, lse, bound);
        if (v.worst > worst) {
            worst = v.worst;
            ok = false;
            snprintf(why, why_bytes,
                     "token %lld head %lld (%lld keys visible): %s %lld is %.9g, should be %.9g, "
                     "%.3g times the bound",
                     (long long)want->token[row], (long long)want->head[row],
                     (long long)want->visible[row], v.what, (long long)v.element, v.got, v.want,
                     v.worst);
        }
    }
    return ok;
}

double compare_attention_worst(const oracle_result *want, const mla_tensor *out,
                               const mla_tensor *lse, compare_bound bound)
{
    double worst = 0.0;
    for (int64_t row = 0; row < want->n_rows; row++)
        worst = fmax(worst, judge_row(want, row, out, lse, bound).worst);
    return worst;
}

bool compare_finite(const mla_tensor *t, char *why, size_t why_bytes)
{
    int64_t n[4];
    for (int32_t i = 0; i < 4; i++)
        n[i] = i < t->rank ? t->shape[i] : 1;
    for (int64_t i0 = 0; i0 < n[0]; i0++)
        for (int64_t i1 = 0; i1 < n[1]; i1++)
            for (int64_t i2 = 0; i2 < n[2]; i2++)
                for (int64_t i3 = 0; i3 < n[3]; i3++) {
                    double x = numeric_at(t, i0, i1, i2, i3);
                    if (isfinite(x))
                        continue;
                    snprintf(why, why_bytes, "element [%lld, %lld, %lld, %lld] is %g",
                             (long long)i0, (long long)i1, (long long)i2, (long long)i3, x);
                    return false;
                }
    return true;
}

bool compare_bits(const mla_tensor *a, const mla_tensor *b, char *why, size_t why_bytes)
{
    int64_t n[4];
    for (int32_t i = 0; i < 4; i++) {
        n[i] = i < a->rank ? a->shape[i] : 1;
        if (i < a->rank && (a->rank != b->rank || a->shape[i] != b->shape[i])) {
            snprintf(why, why_bytes, "shapes differ");
            return false;
        }
    }
    size_t bytes = (size_t)mla_format_bytes(a->format);
    for (int64_t i0 = 0; i0 < n[0]; i0++)
        for (int64_t i1 = 0; i1 < n[1]; i1++)
            for (int64_t i2 = 0; i2 < n[2]; i2++)
                for (int64_t i3 = 0; i3 < n[3]; i3++) {
                    const void *x = numeric_address(a, i0, i1, i2, i3);
                    const void *y = numeric_address(b, i0, i1, i2, i3);
                    if (memcmp(x, y, bytes) == 0)
                        continue;
                    snprintf(why, why_bytes,
                             "element [%lld, %lld, %lld, %lld] is %.9g here and %.9g there",
                             (long long)i0, (long long)i1, (long long)i2, (long long)i3,
                             numeric_get(x, a->format, 0), numeric_get(y, b->format, 0));
                    return false;
                }
    return true;
}
