/*
 * Every operator as the suites see it: how to make a random problem, run it and check the result.
 * The same table serves the suites (all rows of the registry times generated problems) and the
 * tests of relations between calls.
 *
 * operator_run is the one way to run a problem: outputs are reset to poison, the workspace is
 * exactly as large as the library says, filled with poison and fenced by canaries, and afterwards
 * inputs, gaps and canaries are looked at.
 *
 * With a device in use (scene.h) contexts have that device, rows are the device's, and the
 * workspace's head keeps from call to call what the calls before left in it (ops.h).
 */
#ifndef MLA_TESTS_ORACLE_OPERATORS_H
#define MLA_TESTS_ORACLE_OPERATORS_H

#include "oracle/oracle.h"
#include "oracle/problem.h"
#include <mla/solution.h>

typedef struct operator_table {
    int32_t op;
    int32_t usual_count; /* random problems of a usual run */
    problem_base *(*make)(uint64_t seed);
    mla_status (*problem)(const problem_base *p, mla_problem *out, mla_diag *diag);
    mla_status (*run)(mla_context *ctx, problem_base *p, const mla_call *call, mla_diag *diag);
    /* Compares with the oracle, computed at the first call. *worst: error over bound. */
    bool (*check)(problem_base *p, double *worst, char *why, size_t why_bytes);
    void (*free)(problem_base *p);
} operator_table;

extern const operator_table decode_operator;
extern const operator_table extend_operator;
extern const operator_table prefill_operator;
extern const operator_table merge_operator;
extern const operator_table write_operator;
extern const operator_table gather_operator;
extern const operator_table rope_operator;
extern const operator_table rope_write_operator;
extern const operator_table absorb_operator;
extern const operator_table project_operator;
extern const operator_table pack_operator;

/* Runs and looks at memory; false and `why` on any error. solution may be NULL. */
bool operator_run(mla_context *ctx, const operator_table *op, problem_base *p, const char *solution,
                  char *why, size_t why_bytes);

/* The call has to be refused with `expected`, one sentence, and no byte written. */
bool operator_refuses(mla_context *ctx, const operator_table *op, problem_base *p,
                      const char *solution, mla_status expected, char *why, size_t why_bytes);

/* Whether the named row (or family) takes the problem. */
bool operator_accepts(mla_context *ctx, const operator_table *op, const problem_base *p,
                      const char *solution);

/* operator_run and the oracle's check. */
bool operator_verify(mla_context *ctx, const operator_table *op, problem_base *p,
                     const char *solution, double *worst, char *why, size_t why_bytes);

/* Runs a problem again and compares the outputs, which hold the first run's, bit for bit. */
bool operator_repeats(mla_context *ctx, const operator_table *op, problem_base *p,
                      const char *solution, char *why, size_t why_bytes);

/* Uses the device that "--device cuda[:N]" names, when it is among the arguments, and takes both
 * out of them. Where the library or the machine has no such device the program says so and ends
 * with 77, which ctest counts as skipped. */
void operator_take_device(int *argc, char **argv);

/* The kind of device that the tests run on: MLA_DEVICE_CPU, or MLA_DEVICE_CUDA. */
int32_t operator_device_type(void);

/* Whether a row's bits depend on its own query, keys and length only. A device's fast rows cut
 * their work by all lengths of a call: other calls give the same up to the order of sums. */
bool operator_keeps_bits(const char *row);

/* Contexts of the tests: n_threads of the default pool, or 0 = a runner that does five tasks one
 * after the other, the last first. MLA_SOLUTION is not read. Ends the program on failure. */
mla_context *operator_context(int32_t n_threads);

/* Names of the rows of an operator that run here, NULL-terminated; at most 64. `filter` is NULL, a
 * family or a full name. */
typedef struct operator_rows {
    int32_t n;
    const char *name[64];
} operator_rows;
operator_rows operator_rows_here(const mla_context *ctx, int32_t op, const char *filter);

/* Families with a row of the operator that runs here, each once. */
operator_rows operator_families_here(const mla_context *ctx, int32_t op);

#endif
