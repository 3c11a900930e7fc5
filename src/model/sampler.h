/*
 * From logits to a token id: greedy, or temperature and top-p with a seeded generator.
 *
 * Greedy (temperature 0): the largest logit, the lowest id among equals. Otherwise the softmax of
 * logits / temperature in f64; with top_p < 1 only the smallest set of most probable ids whose sum
 * reaches top_p stays (ids of equal probability by rising id); one draw u in [0, 1) picks by
 * cumulative sum. NaN logits never win. The generator is SplitMix64: state += 0x9e3779b97f4a7c15,
 * then two xor-shift-multiply rounds; u = upper 53 bits / 2^53. The same seed, logits and options
 * give the same ids on every machine with IEEE arithmetic and the same exp. Called by generate.c
 * and the tests.
 */
#ifndef MLAI_MODEL_SAMPLER_H
#define MLAI_MODEL_SAMPLER_H

#include <mla/status.h>
#include <stdint.h>

typedef struct mlai_candidate {
    double probability;
    int64_t id;
} mlai_candidate;

typedef struct mlai_sampler {
    double temperature; /* 0 = greedy */
    double top_p;       /* in (0, 1] */
    uint64_t state;
    int64_t vocab_size;
    mlai_candidate *candidates; /* [vocab_size]; NULL when greedy */
} mlai_sampler;

/* Errors: MLA_ERROR_ARGUMENT (temperature not finite or below 0, top_p outside (0, 1]),
 * MLA_ERROR_OUT_OF_MEMORY. */
mla_status mlai_sampler_init(double temperature, double top_p, uint64_t seed, int64_t vocab_size,
                             mlai_sampler *out, mla_diag *diag);
void mlai_sampler_free(mlai_sampler *sampler);

/* The next id for logits [vocab_size]. */
int64_t mlai_sampler_next(mlai_sampler *sampler, const float *logits);

/* One draw of the generator in [0, 1). */
double mlai_sampler_uniform(uint64_t *state);

#endif
