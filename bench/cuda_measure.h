/*
 * One bench row on a GPU: the tensors are made on the host, sent to the device, computed there,
 * brought back and verified (verify.h), and only then timed.
 *
 * What is timed is a replay of a CUDA graph that holds one call, between two events on an idle
 * stream, on the same tensors each time; the median of 20. Beside it stands the median of 20 that
 * were queued without a gap. The replays must leave the very bits that the verified eager call
 * gave. The enqueue time is the host's, of an eager call.
 */
#ifndef MLA_BENCH_CUDA_MEASURE_H
#define MLA_BENCH_CUDA_MEASURE_H

#include "cuda_ceilings.h"
#include "verify.h"

typedef struct cuda_bench {
    mla_context *ctx;
    cuda_gpu *gpu;
    mla_device_info info;
    cuda_ceilings ceilings;
    uint64_t seed;
    const char *solution; /* forced, or NULL */
    const char *also;     /* a second solution for attention rows, or NULL */
} cuda_bench;

typedef struct cuda_row {
    workload w;
    const int64_t *lens; /* the caller's, NULL = kv_len each */
    bool is_second;      /* of cuda_bench.also */
    char solution[96];
    char family[32];
    bool is_timed;    /* false: `reason` says why not */
    bool is_wrong;    /* it ran, but what it computed is not right */
    char reason[256]; /* a sentence */
    bench_verdict verdict;
    bench_work work;
    double us_min;
    double us_median;
    double us_p95;
    double us_queued; /* median of replays that follow each other without a gap */
    double enqueue_us;
    double tflops;
    double gbps;
    double floor_us;
    double share;          /* of the floor: floor_us / us_median */
    double ceiling_tflops; /* 0 = not known */
    double ceiling_gbps;
    int32_t clock_mhz;
    char peer[48]; /* "" = none; from the baseline file */
    double peer_us;
    double ratio; /* peer_us / us_median */
} cuda_row;

#define CUDA_REPLAYS 20

/*
 * Opens GPU `index` with a context on it and measures the ceilings. False after a sentence; what
 * was opened is then closed again.
 */
bool cuda_bench_open(cuda_bench *bench, int32_t index, int64_t n_threads);
void cuda_bench_close(cuda_bench *bench);

/* Measures the workload into rows[0] and, with bench->also, rows[1]; returns how many. */
int32_t cuda_measure(cuda_bench *bench, const workload *w, const int64_t *lens, cuda_row *rows);

/* Sets us_median's followers (rates, floor, share, ratio) from the work and the ceilings. */
void cuda_row_finish(cuda_row *row, const cuda_ceilings *ceilings);

#endif
