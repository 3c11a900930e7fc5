/*
 * Bench rows as text, as JSON lines and as a roofline picture.
 */
#ifndef MLA_BENCH_REPORT_H
#define MLA_BENCH_REPORT_H

#include "measure.h"

#include <cjson/cJSON.h>

void bench_print_header(void);
void bench_print_row(const bench_row *row);

/* One line: op, solution, device, device_name, heads, kv_heads, batch, q_len, kv_len, lengths,
 * page_size, dtype, kv_dtype, causal, threads, cold, rounds, us_min, us_median, us_p95, gflops,
 * gbps, floor_us, ceiling_gflops, ceiling_gbps, share_of_ceiling, verified, commit, compiler and
 * what a reader needs to judge them: samples, sets, set_bytes, seed, error, ceiling, clock_ghz,
 * dot_flop_per_cycle, disturbed, peers (mla_peers only). lengths is null where every request has
 * kv_len keys. */
int bench_print_json(const bench_row *row, const char *device_name, uint64_t seed);

/* A row's problem, heads to causal, into its JSON object; lens null: all have kv_len keys. */
void bench_add_problem(cJSON *o, const workload *w, const int64_t *lens);

/*
 * Draws rows over their machine's roofline: FLOP a byte across, GFLOP/s up, both logarithmic. Rows
 * without a product that counts are left out. Prints a sentence and returns false on failure.
 */
bool bench_plot(const char *path, const bench_row *rows, int32_t n, const char *device_name);

#endif
