/*
 * What this machine can do at most, measured beside the work that is compared with it.
 *
 * Compute: independent chains of the fastest multiply-add instruction on registers only, so nothing
 * but the execution units limits them. bf16 dot: VDPBF16PS, 64 FLOP an instruction of 512 bits;
 * f32 FMA: 2 FLOP a lane. Memory: every thread reads (or copies) its own part of a buffer; a copy
 * is the faster of memcpy and a loop of stores that pass by the caches. Clock: a chain of dependent
 * multiplications with a known latency. Every figure is the sum over the context's threads, from
 * the first start to the last end.
 *
 * The instruction kernels are files of their own, compiled with their ISA's flags; they are called
 * only where the processor has the ISA. Called by tools/mla_bench.c.
 */
#ifndef MLA_BENCH_CEILINGS_H
#define MLA_BENCH_CEILINGS_H

#include <mla/mla.h>
#include <stdbool.h>
#include <stdint.h>

/* FLOP a cycle of VDPBF16PS chains on an undisturbed core: 64 (one instruction of 512 bits a cycle,
 * Zen 4), and 32 on Intel's cores, which take two cycles for one. */
double bench_dot_flop_per_cycle(void);

typedef enum bench_unit {
    BENCH_UNIT_FMA_C = 0,  /* what the compiler makes of C for the base ISA */
    BENCH_UNIT_FMA_AVX2,   /* 256-bit FMA */
    BENCH_UNIT_FMA_AVX512, /* 512-bit FMA */
    BENCH_UNIT_DOT_AVX512_BF16,
    BENCH_UNIT_DOT_AMX_BF16, /* tiles */
    BENCH_UNIT_FMA_NEON,
    BENCH_UNIT_DOT_NEON_BF16,
    BENCH_UNIT_COUNT
} bench_unit;

const char *bench_unit_name(bench_unit unit);

/* Whether this build and a processor with these MLA_CPU_ features have the unit. */
bool bench_unit_available(bench_unit unit, uint64_t cpu_features);

/* The unit with which a kernel family multiplies and adds values of a format. Where VDPBF16PS is
 * slower than FMA, the faster of the two is a bf16 kernel's ceiling: measure both. */
bench_unit bench_unit_for(const char *family, int32_t format, uint64_t cpu_features);

typedef struct bench_rate {
    double gflops;         /* of all threads */
    double flop_per_cycle; /* of one thread */
    double clock_ghz;
} bench_rate;

/* Runs a unit on all threads of the context for about `milliseconds`. */
bench_rate bench_measure_unit(mla_context *ctx, bench_unit unit, double milliseconds);

/* GB/s of reading or copying (bytes read and written) a buffer of `bytes`, repeatedly for about
 * `milliseconds`; `scratch` is the target of a copy, at least `bytes` long, or NULL to read. */
double bench_measure_memory(mla_context *ctx, const void *buffer, void *scratch, uint64_t bytes,
                            double milliseconds);

/* Microseconds of a monotonic clock. */
double bench_now_us(void);

/* ---- the ISA files ----------------------------------------------------------------------------
 */

/* Runs `rounds` rounds of independent multiply-adds; returns the FLOP done. */
double bench_fma_c(int64_t rounds);
double bench_fma_avx2(int64_t rounds);
double bench_fma_avx512(int64_t rounds);
double bench_dot_avx512_bf16(int64_t rounds);
double bench_dot_amx_bf16(int64_t rounds);
double bench_fma_neon(int64_t rounds);
double bench_dot_neon_bf16(int64_t rounds);

/* Reads whole multiples of 512 bytes; returns something that depends on all of them. */
uint64_t bench_read_c(const void *buffer, uint64_t bytes);
uint64_t bench_read_avx2(const void *buffer, uint64_t bytes);
uint64_t bench_read_avx512(const void *buffer, uint64_t bytes);

/* Copies whole multiples of 512 bytes past the caches; NULL where there is no such store. */
typedef void (*bench_copy)(void *to, const void *from, uint64_t bytes);
extern const bench_copy bench_copy_past_caches;

#endif
