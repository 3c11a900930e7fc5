/*
 * Number formats for the bench: exact values of stored elements as doubles, for the reference, and
 * tables of normally distributed elements, for filling tensors fast.
 *
 * Written from the formats' definitions and used by the bench alone, so that a mistake in the
 * library's own conversion cannot hide behind itself.
 */
#ifndef MLA_BENCH_FORMATS_H
#define MLA_BENCH_FORMATS_H

#include <mla/tensor.h>
#include <stdint.h>

/* Element i of contiguous memory in a float format (f32 bf16 f16 e4m3 e5m2). */
double bench_value(int32_t format, const void *data, int64_t i);

/* n elements from `first` on, as doubles. */
void bench_values(int32_t format, const void *data, int64_t first, int64_t n, double *out);

/* A ds656 row as doubles: 0..511 latent, 512..575 rope. */
void bench_ds656_values(const uint8_t *row, double *out);

/* A small fast generator (xorshift64*); the state must not be 0. */
static inline uint64_t bench_random(uint64_t *state)
{
    uint64_t x = *state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return x * 0x2545f4914f6cdd1dull;
}

static inline uint64_t bench_random_below(uint64_t *state, uint64_t n)
{
    return (bench_random(state) >> 11) % n;
}

/* Uniform in (0, 1). */
static inline double bench_random_unit(uint64_t *state)
{
    return ((double)(bench_random(state) >> 12) + 0.5) * 0x1p-52;
}

/* Standard normal. */
double bench_random_normal(uint64_t *state);

#define BENCH_TABLE_SIZE 4096

/* Samples of N(0, 1), rounded to a float format. */
typedef struct bench_table {
    int32_t format;
    uint32_t bits[BENCH_TABLE_SIZE];
} bench_table;

void bench_table_make(bench_table *table, int32_t format);

/* n elements drawn from the table; a function of table, n and seed alone. */
void bench_fill_normal(const bench_table *table, void *data, int64_t n, uint64_t seed);

/* n rows of ds656 from a table of e4m3 and one of bf16, with random scales in [0.5, 1.5). */
void bench_fill_ds656(const bench_table *e4m3, const bench_table *bf16, void *data, int64_t n_rows,
                      uint64_t seed);

#endif
