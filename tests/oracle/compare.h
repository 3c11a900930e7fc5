/*
 * Comparison of results with the oracles, with bounds that follow from the formats and the problem.
 *
 * An attention output may differ from the oracle by
 *   - the rounding of the output's format, relative to the output itself;
 *   - the rounding of probabilities to the working format (bf16 and fp8 queries: 2^-9, f16: 2^-11,
 *     f32: none), independent from key to key;
 *   - the error of the f32 scores and sums, a few 2^-24 of what they add up.
 * Each element is held to the sum of the worst cases (relative to `magnitude`), and each row's
 * Euclidean norm to the root-mean-square of the first two (relative to `spread`), which shrinks
 * with the square root of the number of keys as the output does: one key too few or too many among
 * thousands fails it. Rows that see nothing must hold exact zeros and an LSE of -inf; nothing else
 * may be infinite or NaN where the oracle is not.
 */
#ifndef MLA_TESTS_ORACLE_COMPARE_H
#define MLA_TESTS_ORACLE_COMPARE_H

#include "oracle/oracle.h"
#include <stdbool.h>
#include <stddef.h>

typedef struct compare_bound {
    double probability; /* relative rounding of one probability */
    double output;      /* relative rounding of one output */
    double lse;         /* absolute, beside the f32 error of the scores */
    double key;         /* relative rounding of a key on its way into a score; mostly 0 */
} compare_bound;

compare_bound compare_bound_of(int32_t q_format, int32_t kv_format, int32_t out_format);

/* lse may be absent. On failure `why` names the worst row and both values. */
bool compare_attention(const oracle_result *want, const mla_tensor *out, const mla_tensor *lse,
                       compare_bound bound, char *why, size_t why_bytes);

/* The largest error over its bound among the rows, for reports; above 1 fails. */
double compare_attention_worst(const oracle_result *want, const mla_tensor *out,
                               const mla_tensor *lse, compare_bound bound);

/* Every element of a float tensor is finite. */
bool compare_finite(const mla_tensor *t, char *why, size_t why_bytes);

/* Same shape and format, every element's bits equal; strides may differ. */
bool compare_bits(const mla_tensor *a, const mla_tensor *b, char *why, size_t why_bytes);

/* n values of two results of one row that may differ by roundings of 16-bit probabilities and
 * outputs: within 1/128 of the largest. NaN is near nothing. */
bool compare_near(const void *a, const void *b, int32_t format, int64_t n);

/* One value against what it should be: NaN for NaN, the same infinity, or within slack. */
bool compare_value(double got, double want, double slack);

#endif
