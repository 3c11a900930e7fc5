/*
 * The memory of a bench row: tensors of one call, filled, in one or more copies.
 *
 * Cache pages are given out in random order; page 0, the rows past each request's length, unused
 * table entries and outputs hold NaN or absurd ids, so that reading them shows in the verification.
 * For cold timings there are so many copies ("sets") that a set has left the last-level cache when
 * its turn comes again. Big tensors ask for huge pages, as an engine's pool would.
 */
#ifndef MLA_BENCH_DATASET_H
#define MLA_BENCH_DATASET_H

#include "op_table.h"
#include "workload.h"

#define BENCH_MAX_SETS 4096

typedef struct bench_set {
    op_params params; /* with memory */
} bench_set;

typedef struct bench_dataset {
    workload w;
    int64_t *lens;       /* [batch] */
    int64_t *first_page; /* [batch] position of the request's pages in page_order */
    int32_t *page_order; /* usable pages in the random order in which they were given out */
    int32_t n_sets;
    bench_set *sets;
    uint64_t set_bytes; /* all tensors of a set */
    uint64_t workspace_bytes;
    void *workspace;
} bench_dataset;

/* Visits every tensor of a call, the states of a merge included; stops, and returns false, when
 * visit does. */
typedef bool (*bench_tensor_visit)(void *arg, const op_tensor *spec, mla_tensor *t);
bool bench_for_each_tensor(op_params *params, void *arg, bench_tensor_visit visit);

/* Bytes of one set, by shapes. False after a sentence when the numbers do not fit. */
bool bench_set_bytes(const workload *w, const int64_t *lens, uint64_t *bytes);

/*
 * Makes n_sets filled sets. lens (NULL = kv_len each) is copied. The work is spread over the
 * context's threads. Prints the sentence and returns false when there is not enough memory.
 */
bool bench_dataset_make(bench_dataset *data, mla_context *ctx, const workload *w,
                        const int64_t *lens, int32_t n_sets, uint64_t seed);
void bench_dataset_free(bench_dataset *data);

/* The cache slot of position `at` of a request. */
int64_t bench_slot(const bench_dataset *data, int64_t request, int64_t at);

/* Keys of all requests. */
int64_t bench_total_keys(const bench_dataset *data);

/* Memory with huge pages where they help, not yet touched; released with bench_release. */
void *bench_allocate(uint64_t bytes);
void bench_release(void *memory);

#endif
