/*
 * Bars: groups of rows and what their figures must reach, and the rows beyond a baseline file that
 * some of them need. cuda_groups.c holds both as tables.
 */
#ifndef MLA_BENCH_CUDA_GROUPS_H
#define MLA_BENCH_CUDA_GROUPS_H

#include "baseline.h"
#include "cuda_measure.h"

/* A row that no baseline file has. */
typedef struct cuda_extra {
    int32_t op;
    int64_t batch, heads, q_len, kv_len;
    int64_t page_size;
    int32_t dtype, kv_dtype;
    const int64_t *lens; /* NULL = kv_len each */
} cuda_extra;

extern const cuda_extra cuda_extras[];
extern const int32_t cuda_n_extras;

/* The extra row as a settled workload. */
workload cuda_extra_workload(const cuda_extra *extra);

/* How a group came out. Every figure is "higher is better" and has its bar beneath it. */
typedef struct cuda_group_result {
    const char *name;
    const char *figure; /* what is summed up: "peer's time over ours" ... */
    int32_t n_rows;     /* timed */
    int32_t n_missing;  /* in the group, but not timed */
    double mean;        /* geometric */
    double least;
    double mean_bar;  /* 0 = none */
    double least_bar; /* 0 = none */
    bool is_reached;
} cuda_group_result;

#define CUDA_MAX_GROUPS 40

/* Groups with at least one row, in the table's order; returns how many. */
int32_t cuda_groups(const cuda_row *rows, int32_t n, cuda_group_result *results);

#endif
