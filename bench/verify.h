/*
 * Is what a solution wrote right? The check that a bench row must pass before it is timed.
 *
 * Sampled rows of the outputs, the first and the last among them, against the definition in double
 * precision on the inputs as stored: softmax(scale * q . k) v over the visible keys, w . x, the
 * rotation, the stored bytes. The measure is the norm of the difference over the norm of the
 * reference, over all sampled rows together and for the worst of them, and for the LSE the largest
 * absolute difference. NaN anywhere fails. tests/ has the full oracles; this one guards figures.
 */
#ifndef MLA_BENCH_VERIFY_H
#define MLA_BENCH_VERIFY_H

#include "dataset.h"

typedef struct bench_verdict {
    bool is_good;
    int64_t n_samples;
    double error; /* norm over norm, all sampled rows together */
    double bound;
    double row_error; /* the worst single row */
    double row_bound;
    double lse_error; /* absolute; 0 without an LSE */
    double lse_bound;
} bench_verdict;

/* Checks the outputs in set 0 after a run on it. The reference is spread over the threads of ctx.
 */
bench_verdict bench_verify(const bench_dataset *data, mla_context *ctx);

/* What one call does: multiply-adds count as two, bytes are what must be moved at least once. */
typedef struct bench_work {
    double flops;
    double bytes;
    bool is_moving; /* reads and writes memory and little else: its ceiling is a copy */
} bench_work;

bench_work bench_work_of(const bench_dataset *data);

#endif
