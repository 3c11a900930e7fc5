/*
 * A small seeded generator for test data (splitmix64): the same seed gives the same problem on
 * every machine and compiler. Streams are made by hashing a seed with a number, so that the data of
 * one request does not depend on how many numbers another has drawn.
 */
#ifndef MLA_TESTS_ORACLE_RNG_H
#define MLA_TESTS_ORACLE_RNG_H

#include <stdbool.h>
#include <stdint.h>

typedef struct rng {
    uint64_t state;
} rng;

static inline uint64_t rng_mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static inline uint64_t rng_next(rng *r)
{
    r->state += UINT64_C(0x9e3779b97f4a7c15);
    return rng_mix(r->state);
}

/* An independent stream for each pair. */
static inline rng rng_stream(uint64_t seed, uint64_t number)
{
    rng r = {rng_mix(seed ^ rng_mix(number + UINT64_C(0x9e3779b97f4a7c15)))};
    return r;
}

/* Whole numbers low..high, both included. */
static inline int64_t rng_range(rng *r, int64_t low, int64_t high)
{
    return low + (int64_t)(rng_next(r) % (uint64_t)(high - low + 1));
}

static inline bool rng_chance(rng *r, int32_t percent)
{
    return rng_range(r, 0, 99) < percent;
}

static inline double rng_uniform(rng *r)
{
    return (double)(rng_next(r) >> 11) * 0x1p-53;
}

/* Mean 0, variance 1, bell-shaped (the sum of four uniform 16-bit numbers), never over 3.5. */
static inline double rng_normal(rng *r)
{
    uint64_t x = rng_next(r);
    int64_t sum = (int64_t)(x & 0xffff) + (int64_t)((x >> 16) & 0xffff) +
                  (int64_t)((x >> 32) & 0xffff) + (int64_t)(x >> 48);
    return (double)(sum - 2 * 0xffff) * (1.7320508075688772 / 65536.0);
}

#define RNG_PICK(r, array)                                                                         \
    ((array)[rng_range((r), 0, (int64_t)(sizeof(array) / sizeof((array)[0])) - 1)])

#endif
