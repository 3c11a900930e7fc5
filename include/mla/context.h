/*
 * libmla: the context. It knows the machine (CPU features, devices), the threads, the solutions
 * (kernels) and which of them are forced. There are no globals: two contexts with different feature
 * masks can stand side by side in one process.
 *
 * Thread rule: a context may be used by several threads at once; calls that change it (create,
 * destroy, the scope functions, adding solutions) must not run beside others on the same context.
 * With the default thread pool, operators called at once take turns.
 *
 * Choice of a solution: rows whose features the machine has and that accept the problem, lowest
 * estimated cost first, ties by table order. Inputs of the choice are capacities known to the host,
 * never live lengths, so eager calls and captured graphs choose alike. A forced solution that does
 * not fit is an error, never a silent fallback. Precedence: the call's `solution`, then the
 * innermost scope, then the context option, then the environment variable MLA_SOLUTION read at
 * creation. Each of these is a comma-separated list of families ("avx2") or full row names
 * ("decode_bf16_avx512_bf16"); a full name concerns its own operator only and beats a family; a
 * family concerns every operator.
 */
#ifndef MLA_CONTEXT_H
#define MLA_CONTEXT_H

#include <mla/tensor.h>

typedef struct mla_context mla_context;

/* name, bit, spelling */
#define MLA_CPU_FEATURE_LIST(X)                                                                    \
    X(MLA_CPU_AVX2, 0, "avx2")               /* AVX2, FMA and F16C */                              \
    X(MLA_CPU_AVX512, 1, "avx512")           /* AVX512 F, BW, DQ, VL, CD */                        \
    X(MLA_CPU_AVX512_BF16, 2, "avx512_bf16") /* with AVX512 above */                               \
    X(MLA_CPU_AVX512_VBMI, 3, "avx512_vbmi")                                                       \
    X(MLA_CPU_AMX_BF16, 4, "amx_bf16")   /* with AVX512_BF16, where the OS lets tiles be used */   \
    X(MLA_CPU_NEON, 5, "neon")           /* aarch64's vectors */                                   \
    X(MLA_CPU_NEON_BF16, 6, "neon_bf16") /* BFDOT, BFMMLA, BFCVT; f16 arithmetic with them */

enum {
#define MLA_CPU_FEATURE_ENTRY(name, bit, text) name = 1 << (bit),
    MLA_CPU_FEATURE_LIST(MLA_CPU_FEATURE_ENTRY)
#undef MLA_CPU_FEATURE_ENTRY
};

/* One piece of work: `task` runs from 0 to n_tasks - 1. */
typedef void (*mla_task)(void *arg, int32_t task);

/*
 * A thread runner: calls fn(arg, i) once for each i in 0..n_tasks-1, in any order, on any threads,
 * and returns when all are done. libmla never has one task wait for another, so running them one
 * after the other is allowed. Memory written before run() is seen by the tasks, and theirs after
 * it.
 */
typedef void (*mla_run)(void *user, int32_t n_tasks, mla_task fn, void *arg);

typedef struct mla_context_options {
    uint32_t struct_size;
    int32_t n_threads;          /* how many tasks to make; 0 = the cores this process may run on */
    mla_run run;                /* NULL = a pool of n_threads - 1 threads owned by the context */
    void *run_user;             /* passed to run */
    uint64_t cpu_features;      /* 0 = what the machine has; else that, masked with this */
    const char *solution;       /* forced solutions as above, or NULL; copied */
    int32_t use_baseline;       /* 1 = no CPU features at all (only plain C); 0 = as above */
    int32_t ignore_environment; /* 1 = MLA_SOLUTION is not read */
    int32_t cpu_only; /* 1 = other devices are not looked for; 0 = all that the machine has */
} mla_context_options;

#define MLA_CONTEXT_OPTIONS_INIT                                                                   \
    {                                                                                              \
        .struct_size = sizeof(mla_context_options)                                                 \
    }

/* One device of a context. */
typedef struct mla_device_info {
    uint32_t struct_size;
    int32_t device_type;
    int32_t device_index;
    int32_t arch;           /* CUDA: compute capability x 10 */
    int32_t n_processors;   /* CUDA: multiprocessors; CPU: cores this process may run on */
    int32_t driver_version; /* CUDA: as the driver counts, 12040 = 12.4 */
    int64_t l2_bytes;       /* CUDA */
    char name[96];
} mla_device_info;

#define MLA_DEVICE_INFO_INIT                                                                       \
    {                                                                                              \
        .struct_size = sizeof(mla_device_info)                                                     \
    }

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Makes a context. options may be NULL (all defaults). *out is set only on success and belongs to
 * the caller. Errors: MLA_ERROR_ARGUMENT (negative or over 1024 threads), MLA_ERROR_NOT_FOUND (a
 * forced solution that is no family and no row), MLA_ERROR_OUT_OF_MEMORY, MLA_ERROR_VERSION.
 */
MLA_API mla_status mla_context_create(const mla_context_options *options, mla_context **out,
                                      mla_diag *diag);

/* Ends the context and its threads. NULL is allowed. Backends and pools made from it go first. */
MLA_API void mla_context_destroy(mla_context *ctx);

/* Bits of MLA_CPU_FEATURE_LIST that this context may use. */
MLA_API uint64_t mla_context_cpu_features(const mla_context *ctx);

/* How many tasks an operator makes at most. */
MLA_API int32_t mla_context_n_threads(const mla_context *ctx);

/* How many devices of a type the context has: 1 for the CPU. */
MLA_API int32_t mla_context_device_count(const mla_context *ctx, int32_t device_type);

/* Why there is none, "" when there is one. Valid as long as the context. */
MLA_API const char *mla_context_device_reason(const mla_context *ctx, int32_t device_type);

/* Errors: MLA_ERROR_DEVICE (no such device; the sentence says why), MLA_ERROR_VERSION. */
MLA_API mla_status mla_context_describe_device(const mla_context *ctx, int32_t device_type,
                                               int32_t device_index, mla_device_info *info,
                                               mla_diag *diag);

/*
 * Runs fn(arg, 0..n_tasks-1) on the context's threads, for callers that want to share them.
 * Must not be called from within a task.
 */
MLA_API void mla_context_run(mla_context *ctx, int32_t n_tasks, mla_task fn, void *arg);

/*
 * Forces solutions until the matching pop; nests up to 16 deep. Errors: MLA_ERROR_NOT_FOUND with
 * the names that exist, MLA_ERROR_CAPACITY (too deep).
 */
MLA_API mla_status mla_context_push_solution(mla_context *ctx, const char *solution,
                                             mla_diag *diag);

/* Ends the innermost scope. Error: MLA_ERROR_STATE when there is none. */
MLA_API mla_status mla_context_pop_solution(mla_context *ctx, mla_diag *diag);

#ifdef __cplusplus
}
#endif
#endif
