/*
 * Greedy ids and logits of the shipped models, as Hugging Face transformers computed them in f32:
 * what test_golden.c compares with.
 */
#ifndef MLA_TESTS_MODEL_GOLDEN_H
#define MLA_TESTS_MODEL_GOLDEN_H

#include "support.h"

/* One prompt of one model. `tail` logits rows are those of its last prompt positions. */
typedef struct golden_case {
    char name[96];
    char model[64]; /* under models/ */
    int32_t *prompt;
    int64_t n_prompt;
    int32_t *greedy; /* or NULL */
    int64_t n_greedy;
    float *logits; /* [tail, vocab] or NULL */
    int64_t tail;
    int64_t vocab;
    bool is_long;
} golden_case;

/* Everything in models/, in a fixed order; lives until the program ends. */
const golden_case *golden_cases(int *n);

/* Logits of all prompt positions; the caller frees them. Options as in mla_model.h. */
float *golden_run_logits(mla_model *model, const golden_case *c, int32_t kv_format,
                         int64_t chunk_tokens, int64_t chunk_capacity);

/*
 * The first place where greedy generation differs from the golden ids, or -1. chunk_tokens and
 * chunk_capacity 0: more than any prompt.
 */
int64_t first_difference(mla_model *model, const golden_case *c, int32_t page_size,
                         int64_t chunk_tokens, int64_t chunk_capacity);

#endif
