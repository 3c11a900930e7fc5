/*
 * GPU bench rows as text, JSON lines, a Markdown table and a picture.
 */
#ifndef MLA_BENCH_CUDA_REPORT_H
#define MLA_BENCH_CUDA_REPORT_H

#include "cuda_groups.h"
#include <stdio.h>

/* What stands above every table: device, driver, clocks, ceilings. */
void cuda_print_ceilings(FILE *out, const cuda_bench *bench, const char *driver);
void cuda_print_header(FILE *out);
void cuda_print_row(FILE *out, const cuda_row *row);
void cuda_print_groups(FILE *out, const cuda_row *rows, int32_t n);

/* One line: the keys of the CPU's rows (report.h) that make sense here, and family, second, tflops,
 * ceiling_tflops, us_queued, enqueue_us, replays, peer, peer_us, ratio (null without a peer),
 * lse_error, driver, clock_mhz, clock_max_mhz, memory_clock_mhz, reason (null when timed). */
int cuda_print_json(const cuda_row *row, const cuda_bench *bench, const char *driver);

/* Both print a sentence and return false on failure. */
bool cuda_write_markdown(const char *path, const cuda_bench *bench, const char *driver,
                         const cuda_row *rows, int32_t n);

/* Two bars a row, ours and the peer's: floor over time, so that a full bar is the machine's limit.
 */
bool cuda_plot(const char *path, const char *device_name, const cuda_row *rows, int32_t n);

#endif
