/*
 * Problems for the attention operators: a shape says everything about a call, made at random from a
 * seed or by hand; a problem is its tensors in a scene, poisoned wherever nothing is live.
 *
 * The data of a request depends on its `identity` and the shape's content seed only, not on where
 * in the batch it stands, which pages it has, how tensors are strided or how wide the table is: so
 * two shapes that differ in such things must give the same bits.
 */
#ifndef MLA_TESTS_ORACLE_PROBLEM_H
#define MLA_TESTS_ORACLE_PROBLEM_H

#include "oracle/scene.h"
#include <mla/ops.h>

#define PROBLEM_MAX_BATCH 96
#define PROBLEM_TEXT_BYTES 640

/* What every problem begins with; the suites know no more. */
typedef struct problem_base {
    scene scene;
    uint64_t seed;
    const char *row; /* that ran it last: some have bounds of their own */
    char text[PROBLEM_TEXT_BYTES];
} problem_base;

typedef enum problem_mask {
    PROBLEM_CAUSAL = 0,
    PROBLEM_FULL = 1, /* not causal, no mask */
    PROBLEM_TREE = 2, /* not causal, each token sees its ancestors in the window */
    PROBLEM_NOISE = 3 /* not causal, a mask of random bits, empty rows included */
} problem_mask;

typedef struct decode_shape {
    uint64_t content_seed;
    uint64_t placement_seed; /* pages, strides, absurd ids */
    int32_t is_extend;       /* mla_extend_with_kvcache */
    int32_t is_ragged;
    int32_t batch;
    int32_t identity[PROBLEM_MAX_BATCH];
    int32_t q_len[PROBLEM_MAX_BATCH]; /* all the same when not ragged */
    int32_t kv_len[PROBLEM_MAX_BATCH];
    int32_t query_first[PROBLEM_MAX_BATCH]; /* token j has the data of token query_first + j */
    int32_t heads;
    int32_t kv_lora_rank;
    int32_t qk_rope_head_dim;
    int32_t page_size;
    int32_t q_format;
    int32_t kv_format;
    int32_t out_format;
    int32_t has_lse;
    int32_t split_q;
    int32_t split_cache;
    int32_t rank4_cache;
    int32_t mask; /* problem_mask */
    int32_t seqlen_offset;
    float softmax_scale;
    float logit_cap;
    float k_scale;
    int32_t shard_count; /* 0 = not sharded; else keys first, first + count, ... */
    int32_t shard_first;
    int32_t shard_slack; /* local rows that are live beyond the bound */
    int32_t extra_columns;
    int32_t extra_pages;
    int64_t max_seqlen_kv; /* -1 = the largest live length, 0 = absent, else that much above it */
    scene_layout layout;
    int32_t clean; /* zeros instead of poison in unused slots */
    double q_spread;
    double kv_spread;
    double kv_mean; /* added to the latent of every row: very negative or large scores */
} decode_shape;

typedef struct decode_problem {
    problem_base base;
    decode_shape shape;
    mla_decode_params params;
    mla_tensor pool;            /* the memory that kv_cache (and kv_cache_rope) lie in */
    int64_t work;               /* multiply-adds of the whole call */
    struct oracle_result *want; /* made by the first check */
} decode_problem;

/* One request, one token, 16 heads, 512 + 64, pages of 64, f32, causal. */
decode_shape decode_shape_make(void);

/* Sets batch, and every request's lengths. */
void decode_shape_lengths(decode_shape *s, int32_t batch, const int32_t *q_len,
                          const int32_t *kv_len);

decode_shape decode_shape_random(uint64_t seed, int32_t is_extend);

/* What engines send, which the fast kernels take: the usual dims, 16-bit and fp8 formats, aligned
 * strides, whole sequences, longer contexts. */
decode_shape decode_shape_usual(uint64_t seed, int32_t is_extend);
decode_problem *decode_problem_make(const decode_shape *shape, uint64_t seed);
void decode_problem_free(decode_problem *p);

typedef struct prefill_shape {
    uint64_t content_seed;
    uint64_t placement_seed;
    int32_t batch;
    int32_t identity[PROBLEM_MAX_BATCH];
    int32_t q_len[PROBLEM_MAX_BATCH];
    int32_t kv_len[PROBLEM_MAX_BATCH];
    int32_t query_first[PROBLEM_MAX_BATCH];
    int32_t heads;
    int32_t kv_heads;
    int32_t qk_head_dim;
    int32_t v_head_dim;
    int32_t q_format;
    int32_t kv_format;
    int32_t out_format;
    int32_t has_lse;
    int32_t is_causal;
    int32_t max_mode; /* 0 = absent, 1 = exact, 2 = larger */
    float softmax_scale;
    float logit_cap;
    float k_scale;
    float v_scale;
    scene_layout layout;
    double spread;
} prefill_shape;

typedef struct prefill_problem {
    problem_base base;
    prefill_shape shape;
    mla_prefill_params params;
    int64_t work;
    struct oracle_result *want;
} prefill_problem;

prefill_shape prefill_shape_make(void);
void prefill_shape_lengths(prefill_shape *s, int32_t batch, const int32_t *q_len,
                           const int32_t *kv_len);
prefill_shape prefill_shape_random(uint64_t seed);
prefill_shape prefill_shape_usual(uint64_t seed); /* see decode_shape_usual */
prefill_problem *prefill_problem_make(const prefill_shape *shape, uint64_t seed);
void prefill_problem_free(prefill_problem *p);

/* A float format for queries, caches and outputs, with the weights of their use. */
int32_t problem_pick_format(rng *r);

#endif
