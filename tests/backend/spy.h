/*
 * Solutions that watch: rows of a family "spy" for decode, prefill and write that cost nothing,
 * take everything and note what they were called with. Added to a context with
 * mla_context_add_solutions, they are chosen for every call and see exactly what the backend and
 * the operators made of it.
 *
 * A decode call leaves, for each query token in order, how many keys it may see and the first page
 * of its request; its output rows hold that number. A prefill leaves its lengths. `trail` gets one
 * letter an event: w write, a attention, and whatever the test adds (r for a recorded step).
 */
#ifndef MLA_TESTS_BACKEND_SPY_H
#define MLA_TESTS_BACKEND_SPY_H

#include <mla/solution.h>

#define SPY_MAX_CALLS 64
#define SPY_MAX_TOKENS 64

typedef struct spy_call {
    int32_t op;
    mla_problem problem;
    mla_decode_params decode;
    mla_prefill_params prefill;
    mla_write_kv_params write;
    uint64_t workspace_bytes;
    int32_t n_tokens;
    int64_t bounds[SPY_MAX_TOKENS]; /* decode: keys seen by each token */
    int32_t pages[SPY_MAX_TOKENS];  /* decode: first page of the token's request */
} spy_call;

typedef struct spy_log {
    int32_t n_calls;
    spy_call calls[SPY_MAX_CALLS];
    char trail[SPY_MAX_CALLS + 1];
} spy_log;

/* One log; tests of one process run one after another. */
extern spy_log spy;

void spy_forget(void);
void spy_event(char letter);

/* Adds the rows. ctx chooses them from then on. */
mla_status spy_add(mla_context *ctx, mla_diag *diag);

/* From now on the rows ask for `factor` times the workspace they asked for at first. */
void spy_need(uint64_t factor);

/* Two more decode rows, "decode_twin_a" and "decode_twin_b", both like decode_spy and cheaper than
 * anything; which of them is the cheaper one is said here. */
mla_status spy_add_twins(mla_context *ctx, mla_diag *diag);
void spy_prefer_twin(char letter);

/* 'a', 'b' or 0: which twin the last decode ran on. */
extern char spy_last_twin;

#endif
