/*
 * Rows measured elsewhere, to stand beside ours: a CSV file with a header line. Columns, in any
 * order: op, batch, heads, q_len, kv_len and us_per_layer_call are required; peer, dtype, kv_dtype,
 * page_size and causal have defaults ("peer", bf16, dtype, 64, 1); other columns are not looked at.
 */
#ifndef MLA_BENCH_BASELINE_H
#define MLA_BENCH_BASELINE_H

#include "workload.h"

typedef struct baseline_row {
    workload w; /* settled; device fields as workload_default has them */
    char peer[48];
    double us;
} baseline_row;

typedef struct baseline {
    baseline_row *rows;
    int32_t n;
} baseline;

/* Reads the file. False after a sentence that names the line. */
bool baseline_read(const char *path, baseline *out);
/* The same from text; `name` stands for the file in sentences. */
bool baseline_parse(const char *name, const char *text, baseline *out);
void baseline_free(baseline *b);

/* The row with this operator, batch, heads, lengths and causality; formats and page sizes may
 * differ. NULL when there is none. */
const baseline_row *baseline_find(const baseline *b, const workload *w);

#endif
