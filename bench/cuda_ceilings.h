/*
 * A GPU's ceilings, measured by the kernels of cuda_ceilings.cu in the run that uses them, and what
 * a reader of the figures must know about it: driver and clocks.
 */
#ifndef MLA_BENCH_CUDA_CEILINGS_H
#define MLA_BENCH_CUDA_CEILINGS_H

#include "device_memory.h"
#include <stdbool.h>

typedef struct cuda_gpu cuda_gpu;

/* Opens GPU `index` and loads the kernels. NULL with a reason in `why`. */
cuda_gpu *cuda_gpu_open(int32_t index, char *why, size_t why_bytes);
void cuda_gpu_close(cuda_gpu *gpu);

device_memory *cuda_gpu_memory(cuda_gpu *gpu);
uint64_t cuda_gpu_free_bytes(cuda_gpu *gpu);

/* The driver's version as its maker writes it ("580.65.06"), or "CUDA 13.0" without NVML. */
const char *cuda_gpu_driver(const cuda_gpu *gpu);

/* The multiprocessors' clock now, in MHz; 0 without NVML. */
int32_t cuda_gpu_clock_mhz(const cuda_gpu *gpu);

/* Keeps the stream busy for so long, so that what is enqueued next runs without gaps. */
void cuda_gpu_spin(cuda_gpu *gpu, double us);

typedef struct cuda_ceilings {
    double read_gbps;
    double copy_gbps;       /* bytes read and written */
    double bf16_tflops;     /* of bf16 and f16 products; 0 where the GPU has no wgmma */
    double fp8_tflops;      /* of e4m3 products; 0 likewise */
    double empty_us;        /* graph of one empty kernel, between two events, on an idle stream */
    double empty_queued_us; /* the same behind other work */
    int32_t clock_mhz;      /* while the bf16 products ran */
    int32_t clock_max_mhz;
    int32_t memory_clock_mhz;
} cuda_ceilings;

/* About a second. */
cuda_ceilings cuda_ceilings_measure(cuda_gpu *gpu);

/* Microseconds of each of `n` replays of a graph, in order, all enqueued behind a spin that is long
 * enough for the host, or (is_idle) each on an idle stream. */
void cuda_time_graph(cuda_gpu *gpu, const device_graph *graph, int32_t n, bool is_idle, double *us);

/* Sorts; the middle one, or the mean of the middle two. */
double cuda_median(double *values, int32_t n);

#endif
