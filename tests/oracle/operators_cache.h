/*
 * Problems of the operators that write and read cache rows: write, gather and rope_write. One
 * struct serves all three, since they share the pool, the slots and the rows. Row i of latent and
 * rope belongs to slot slots[i]; all rows go to different slots, some slots are negative.
 */
#ifndef MLA_TESTS_ORACLE_OPERATORS_CACHE_H
#define MLA_TESTS_ORACLE_OPERATORS_CACHE_H

#include "oracle/problem.h"

typedef struct cache_problem {
    problem_base base;
    int32_t op;
    int32_t tokens;
    int32_t kv_lora_rank;
    int32_t qk_rope_head_dim;
    int32_t page_size;
    int32_t format;     /* of the cache */
    int32_t row_format; /* of latent and rope */
    int32_t flags;
    int32_t has_special; /* NaN, infinities and numbers out of range among the rows */
    float k_scale;
    int64_t slot[512];
    mla_tensor kv_cache;
    mla_tensor kv_cache_rope;
    mla_tensor slots;
    mla_tensor latent;
    mla_tensor rope;
    /* rope_write only */
    int32_t is_interleaved;
    int32_t heads;
    int64_t position[512];
    mla_tensor q_pe;
    mla_tensor q_pe_out;
    mla_tensor k_pe_out;
    mla_tensor positions;
    mla_tensor cos;
    mla_tensor sin;
} cache_problem;

cache_problem *cache_problem_make(int32_t op, uint64_t seed);

/* Draws what both rope operators need: positions (i32 or i64) and cos and sin tables, at times as
 * the two halves of one table. */
void rope_tables_make(scene *s, rng *r, scene_layout layout, int32_t tokens, int32_t width,
                      int64_t *position, mla_tensor *positions, mla_tensor *cos, mla_tensor *sin);

/* Rotated element d of x (width P, as doubles) at a position, in double; *size is the sum of the
 * magnitudes added. */
double rope_reference(const double *x, int64_t d, int64_t width, const mla_tensor *cos,
                      const mla_tensor *sin, int64_t position, int32_t is_interleaved,
                      double *size);

/* The distance of `got` from `value` as `format` stores it (rounded, saturating for fp8), over its
 * bound: half a step of the format and `work` before the rounding. Above 1 is wrong. */
double rounded_error(double got, double value, int32_t format, double work);

#endif
