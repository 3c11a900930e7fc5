/*
 * The number formats in double, written from their definitions and independent of the library's own
 * conversions: sign, exponent and mantissa fields with a bias; narrowing rounds to nearest even by
 * quanta. f16 and bf16 overflow to infinity; e4m3 (maximum 448, no infinity) and e5m2 (maximum
 * 57344) saturate, infinities too; NaN stays NaN. The library narrows from f32, so callers that
 * want its bits hand in values that are exact in f32.
 */
#ifndef MLA_TESTS_ORACLE_NUMERIC_H
#define MLA_TESTS_ORACLE_NUMERIC_H

#include <mla/tensor.h>
#include <stdbool.h>
#include <stdint.h>

/* Element `index` of contiguous data of a float format, or of i32 and i64. */
double numeric_get(const void *data, int32_t format, int64_t index);

/* Rounds and stores; see above. */
void numeric_put(void *data, int32_t format, int64_t index, double value);

/* value as the format holds it. */
double numeric_round(int32_t format, double value);

/* Half a unit in the last place relative to a value of 1: the largest relative rounding error. */
double numeric_epsilon(int32_t format);

/* The smallest number above 0 that the format holds. */
double numeric_smallest(int32_t format);

/* One 656-byte row to doubles and back. latent has 512 values, rope 64. */
void numeric_from_ds656(const uint8_t *row, double *latent, double *rope);
void numeric_to_ds656(uint8_t *row, const float *latent, const float *rope);

/* Elements of tensors by index; missing dimensions are ignored. */
void *numeric_address(const mla_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3);
double numeric_at(const mla_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3);
void numeric_set(const mla_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3, double x);

#endif
