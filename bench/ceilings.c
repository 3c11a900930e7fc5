/*
 * Measuring ceilings on the threads of a context (ceilings.h).
 *
 * A measurement is one mla_context_run with a task for each thread. A task of a unit first times a
 * chain of dependent multiplications (3 cycles each on every x86-64 of the AVX2 age and later, and
 * the multiply-add latency class on ARM cores), then the unit, then the chain again, so that the
 * clock is that of the moment. Tasks are long (milliseconds) against the microseconds that waking
 * a thread takes.
 */
#include "ceilings.h"
#include <string.h>
#include <time.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MAX_TASKS 1024

/* Cycles of one dependent 64-bit multiplication. */
#define MULTIPLY_CYCLES 3

typedef struct unit_row {
    const char *name;
    uint64_t needs; /* MLA_CPU_ bits */
    double (*run)(int64_t rounds);
} unit_row;

static const unit_row units[BENCH_UNIT_COUNT] = {
    [BENCH_UNIT_FMA_C] = {"f32 FMA (C)", 0, bench_fma_c},
#ifdef BENCH_WITH_X86
    [BENCH_UNIT_FMA_AVX2] = {"f32 FMA (AVX2)", MLA_CPU_AVX2, bench_fma_avx2},
    [BENCH_UNIT_FMA_AVX512] = {"f32 FMA (AVX-512)", MLA_CPU_AVX512, bench_fma_avx512},
    [BENCH_UNIT_DOT_AVX512_BF16] = {"bf16 dot (AVX-512 BF16)", MLA_CPU_AVX512_BF16,
                                    bench_dot_avx512_bf16},
#endif
#ifdef BENCH_WITH_AMX
    [BENCH_UNIT_DOT_AMX_BF16] = {"bf16 dot (AMX)", MLA_CPU_AMX_BF16, bench_dot_amx_bf16},
#endif
#ifdef BENCH_WITH_NEON
    [BENCH_UNIT_FMA_NEON] = {"f32 FMA (NEON)", MLA_CPU_NEON, bench_fma_neon},
    [BENCH_UNIT_DOT_NEON_BF16] = {"bf16 dot (NEON BF16)", MLA_CPU_NEON_BF16, bench_dot_neon_bf16},
#endif
};

const char *bench_unit_name(bench_unit unit)
{
    return units[unit].name != NULL ? units[unit].name : "not in this build";
}

/* Linux lets a process use the tile registers only when it has asked. */
static bool may_use_tiles(void)
{
#if defined(BENCH_WITH_AMX) && defined(__linux__)
    const long request_permission = 0x1023; /* ARCH_REQ_XCOMP_PERM */
    const long tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

bool bench_unit_available(bench_unit unit, uint64_t cpu_features)
{
    if (unit == BENCH_UNIT_DOT_AMX_BF16 && !may_use_tiles())
        return false;
    return units[unit].run != NULL && (cpu_features & units[unit].needs) == units[unit].needs;
}

bench_unit bench_unit_for(const char *family, int32_t format, uint64_t cpu_features)
{
    /* f16 and f32 have no dot instruction here: their products are f32 FMAs. */
    bool has_dot_format = format != MLA_FORMAT_F32 && format != MLA_FORMAT_F16;
    static const struct {
        const char *family;
        bench_unit unit;
        bool is_dot;
    } order[] = {
        {"amx_bf16", BENCH_UNIT_DOT_AMX_BF16, true},
        {"amx_bf16", BENCH_UNIT_FMA_AVX512, false},
        {"avx512_bf16", BENCH_UNIT_DOT_AVX512_BF16, true},
        {"avx512_bf16", BENCH_UNIT_FMA_AVX512, false},
        {"avx512", BENCH_UNIT_FMA_AVX512, false},
        {"avx2", BENCH_UNIT_FMA_AVX2, false},
        {"neon_bf16", BENCH_UNIT_DOT_NEON_BF16, true},
        {"neon_bf16", BENCH_UNIT_FMA_NEON, false},
        {"neon", BENCH_UNIT_FMA_NEON, false},
    };
    const size_t n = sizeof order / sizeof *order;
    /* Plain C, and a family that is not known here, are held against the best of the machine. */
    bool is_any = true;
    for (size_t i = 0; i < n; i++)
        is_any = is_any && strcmp(family, order[i].family) != 0;
    for (size_t i = 0; i < n; i++) {
        if ((is_any || strcmp(family, order[i].family) == 0) &&
            (has_dot_format || !order[i].is_dot) &&
            bench_unit_available(order[i].unit, cpu_features))
            return order[i].unit;
    }
    return BENCH_UNIT_FMA_C;
}

double bench_dot_flop_per_cycle(void)
{
#if defined(BENCH_WITH_X86)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") ? 32.0 : 64.0;
#else
    return 64.0;
#endif
}

double bench_now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* Cycles a microsecond, by a chain that nothing can shorten. */
static double clock_mhz(void)
{
    const int64_t steps = 60000;
    uint64_t value = 3;
    uint64_t factor = 5;
    double start = bench_now_us();
    for (int64_t i = 0; i < steps; i++) {
        value *= factor;
        __asm__ volatile("" : "+r"(value), "+r"(factor));
    }
    return (double)steps * MULTIPLY_CYCLES / (bench_now_us() - start);
}

/* ---- units --------------------------------------------------------------------------------- */

typedef struct task_times {
    double start_us;
    double end_us;
    double work;
    double clock_mhz;
} task_times;

typedef struct unit_job {
    const unit_row *unit;
    double milliseconds;
    task_times times[MAX_TASKS];
} unit_job;

static void unit_task(void *arg, int32_t task)
{
    unit_job *job = arg;
    task_times *t = &job->times[task];
    int64_t rounds = 500;
    double before = clock_mhz();
    t->start_us = bench_now_us();
    t->end_us = t->start_us;
    t->work = 0.0;
    while (t->end_us - t->start_us < job->milliseconds * 1e3) {
        t->work += job->unit->run(rounds);
        t->end_us = bench_now_us();
    }
    t->clock_mhz = 0.5 * (before + clock_mhz());
}

bench_rate bench_measure_unit(mla_context *ctx, bench_unit unit, double milliseconds)
{
    static unit_job job; /* too large for a stack; the command measures from one thread only */
    int32_t n = mla_context_n_threads(ctx);
    bench_rate rate = {0.0, 0.0, 0.0};
    n = n < MAX_TASKS ? n : MAX_TASKS;
    job.unit = &units[unit];
    job.milliseconds = milliseconds;
    mla_context_run(ctx, n, unit_task, &job);
    double first = job.times[0].start_us;
    double last = job.times[0].end_us;
    double work = 0.0;
    for (int32_t i = 0; i < n; i++) {
        const task_times *t = &job.times[i];
        first = t->start_us < first ? t->start_us : first;
        last = t->end_us > last ? t->end_us : last;
        work += t->work;
        rate.clock_ghz += t->clock_mhz * 1e-3 / n;
        rate.flop_per_cycle += t->work / ((t->end_us - t->start_us) * t->clock_mhz) / n;
    }
    rate.gflops = work / (last - first) * 1e-3;
    return rate;
}

/* ---- memory -------------------------------------------------------------------------------- */

typedef struct memory_job {
    const char *buffer;
    char *scratch;
    uint64_t part_bytes;
    double milliseconds;
    bench_copy copy; /* NULL: memcpy */
    uint64_t (*read)(const void *buffer, uint64_t bytes);
    uint64_t sink[MAX_TASKS];
    task_times times[MAX_TASKS];
} memory_job;

static void memory_task(void *arg, int32_t task)
{
    memory_job *job = arg;
    task_times *t = &job->times[task];
    uint64_t offset = (uint64_t)task * job->part_bytes;
    t->start_us = bench_now_us();
    t->end_us = t->start_us;
    t->work = 0.0;
    while (t->end_us - t->start_us < job->milliseconds * 1e3) {
        if (job->scratch != NULL) {
            if (job->copy != NULL)
                job->copy(job->scratch + offset, job->buffer + offset, job->part_bytes);
            else
                memcpy(job->scratch + offset, job->buffer + offset, job->part_bytes);
            t->work += 2.0 * (double)job->part_bytes;
        } else {
            job->sink[task] |= job->read(job->buffer + offset, job->part_bytes);
            t->work += (double)job->part_bytes;
        }
        t->end_us = bench_now_us();
    }
}

static double measure_job(mla_context *ctx, memory_job *job, int32_t n)
{
    mla_context_run(ctx, n, memory_task, job);
    double first = job->times[0].start_us;
    double last = job->times[0].end_us;
    double work = 0.0;
    for (int32_t i = 0; i < n; i++) {
        first = job->times[i].start_us < first ? job->times[i].start_us : first;
        last = job->times[i].end_us > last ? job->times[i].end_us : last;
        work += job->times[i].work;
    }
    return work / (last - first) * 1e-3;
}

double bench_measure_memory(mla_context *ctx, const void *buffer, void *scratch, uint64_t bytes,
                            double milliseconds)
{
    static memory_job job; /* see bench_measure_unit */
    int32_t n = mla_context_n_threads(ctx);
    uint64_t features = mla_context_cpu_features(ctx);
    n = n < MAX_TASKS ? n : MAX_TASKS;
    job.buffer = buffer;
    job.scratch = scratch;
    job.part_bytes = bytes / (uint64_t)n / 512 * 512;
    job.milliseconds = milliseconds;
    job.read = bench_read_c;
#ifdef BENCH_WITH_X86
    if (features & MLA_CPU_AVX512)
        job.read = bench_read_avx512;
    else if (features & MLA_CPU_AVX2)
        job.read = bench_read_avx2;
#else
    (void)features;
#endif
    if (job.part_bytes == 0)
        return 0.0;
    job.copy = NULL;
    double rate = measure_job(ctx, &job, n);
    if (scratch != NULL && bench_copy_past_caches != NULL) {
        job.copy = bench_copy_past_caches;
        double streamed = measure_job(ctx, &job, n);
        rate = streamed > rate ? streamed : rate;
    }
    return rate;
}
