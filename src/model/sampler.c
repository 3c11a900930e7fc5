/*
 * Sampling (sampler.h). Nucleus sampling needs the probable ids in falling order; an id whose
 * probability is below (1 - top_p) / vocab cannot be in the smallest set that reaches top_p, since
 * all such ids together stay below 1 - top_p, so only the others are sorted. Probabilities are
 * f64 and never normalised: draws scale by the kept sum instead. Called by generate.c and the
 * tests.
 */
#include "sampler.h"

#include "fault.h"

#include <math.h>
#include <stdlib.h>

double mlai_sampler_uniform(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (double)(z >> 11) * 0x1p-53;
}

mla_status mlai_sampler_init(double temperature, double top_p, uint64_t seed, int64_t vocab_size,
                             mlai_sampler *out, mla_diag *diag)
{
    if (!(temperature >= 0.0) || isinf(temperature))
        return mlai_model_fail(diag, MLA_ERROR_ARGUMENT,
                               "temperature is %g; it must be 0 (greedy) or a positive number",
                               temperature);
    if (!(top_p > 0.0 && top_p <= 1.0))
        return mlai_model_fail(diag, MLA_ERROR_ARGUMENT,
                               "top_p is %g; it must be above 0 and at most 1", top_p);
    *out = (mlai_sampler){
        .temperature = temperature, .top_p = top_p, .state = seed, .vocab_size = vocab_size};
    if (temperature > 0.0) {
        out->candidates = malloc((size_t)vocab_size * sizeof *out->candidates);
        if (out->candidates == NULL)
            return mlai_model_fail_memory(diag, "the sampler",
                                          (unsigned long long)vocab_size * sizeof *out->candidates);
    }
    return MLA_OK;
}

void mlai_sampler_free(mlai_sampler *sampler)
{
    free(sampler->candidates);
    *sampler = (mlai_sampler){0};
}

static int64_t greedy(const float *logits, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++) {
        if (logits[i] > logits[best] || (isnan(logits[best]) && !isnan(logits[i])))
            best = i;
    }
    return best;
}

static int by_falling_probability(const void *a, const void *b)
{
    const mlai_candidate *x = a;
    const mlai_candidate *y = b;
    if (x->probability != y->probability)
        return x->probability < y->probability ? 1 : -1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Keeps the smallest most probable set that reaches top_p; returns its size, its sum in *kept. */
static int64_t keep_nucleus(const mlai_sampler *sampler, int64_t n, double sum, double *kept)
{
    mlai_candidate *candidates = sampler->candidates;
    double cutoff = (1.0 - sampler->top_p) * sum / (double)n;
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        if (candidates[i].probability >= cutoff)
            candidates[count++] = candidates[i];
    }
    qsort(candidates, (size_t)count, sizeof *candidates, by_falling_probability);
    double target = sampler->top_p * sum;
    *kept = 0.0;
    for (int64_t i = 0; i < count; i++) {
        *kept += candidates[i].probability;
        if (*kept >= target)
            return i + 1;
    }
    return count;
}

int64_t mlai_sampler_next(mlai_sampler *sampler, const float *logits)
{
    int64_t n = sampler->vocab_size;
    int64_t best = greedy(logits, n);
    /* +inf would make inf - inf below; its id wins as it does greedily. */
    if (sampler->temperature == 0.0 || !isfinite(logits[best]))
        return best;
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        double p = exp(((double)logits[i] - (double)logits[best]) / sampler->temperature);
        p = isnan(p) ? 0.0 : p;
        sampler->candidates[i] = (mlai_candidate){.probability = p, .id = i};
        sum += p;
    }
    double kept = sum;
    int64_t count = sampler->top_p < 1.0 ? keep_nucleus(sampler, n, sum, &kept) : n;
    double left = mlai_sampler_uniform(&sampler->state) * kept;
    for (int64_t i = 0; i < count; i++) {
        left -= sampler->candidates[i].probability;
        if (left < 0.0)
            return sampler->candidates[i].id;
    }
    /* Rounding left a rest: the last id that can be drawn at all. */
    while (count > 1 && sampler->candidates[count - 1].probability == 0.0)
        count--;
    return sampler->candidates[count - 1].id;
}
