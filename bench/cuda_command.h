/*
 * `mla bench` on a GPU: rows measured, told and kept for the tables that come at the end. The
 * device is opened, and its ceilings measured, with the first row.
 */
#ifndef MLA_BENCH_CUDA_COMMAND_H
#define MLA_BENCH_CUDA_COMMAND_H

#include "cuda_measure.h"

typedef struct cuda_command {
    cuda_bench bench;
    int64_t threads; /* of the host, for making and verifying; 0 = all */
    bool as_json;
    bool with_extras;     /* rows beyond the baseline file, cuda_groups.h */
    const char *markdown; /* a file, or NULL */
    const char *plot;     /* a file, or NULL */
    cuda_row *rows;
    int32_t n_rows;
    int32_t room;
    int32_t n_failed;
} cuda_command;

/* One row; lens as in bench_measure. An exit status of cli.h. */
int cuda_command_row(cuda_command *c, const workload *w, const int64_t *lens);

/*
 * Every row of the baseline file (of one operator, unless op is MLA_OP_NONE) and, if asked for, the
 * extra rows, on the device of `like`. Goes on after rows that are not timed; the status tells.
 */
int cuda_command_against(cuda_command *c, const char *path, int32_t op, const workload *like);

/* Writes the Markdown and the picture and frees everything; `code` is the status so far. */
int cuda_command_end(cuda_command *c, int code);

#endif
