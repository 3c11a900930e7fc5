/*
 * libmla: solutions, the rows a kernel is chosen from, and how to add your own.
 *
 * This header has a version of its own (MLA_SOLUTION_VERSION): rows are called with parameter
 * structs of the headers they were compiled with, checked by struct_size.
 *
 * A row is a constant: what it is called, what it needs, what it takes, what it costs, how it runs.
 * `accepts` alone decides legality; the API, the command line and the tests all ask it. The
 * operator has validated every argument before `run` is called: formats, shapes, strides, scales,
 * live lengths and page ids (on the CPU), workspace size.
 */
#ifndef MLA_SOLUTION_H
#define MLA_SOLUTION_H

#include <mla/ops.h>

#define MLA_SOLUTION_VERSION 1

/* What a row may use while it runs, and what it may ask when it is costed. */
typedef struct mla_exec {
    uint32_t struct_size;
    int32_t n_threads; /* make at most that many tasks */
    mla_run run;       /* CPU: see context.h */
    void *run_user;
    uint64_t cpu_features;
    void *device; /* CUDA: opaque to callers' rows */
    void *stream;
    void *workspace; /* at least workspace_bytes(problem, exec) bytes, 64-byte aligned */
    uint64_t workspace_bytes;
} mla_exec;

typedef struct mla_solution {
    uint32_t struct_size;
    int32_t version;               /* MLA_SOLUTION_VERSION */
    int32_t op;                    /* mla_op */
    int32_t device_type;           /* mla_device_type */
    const char *name;              /* unique: <op>_<q format>[_<cache format>]_<isa or arch> */
    const char *family;            /* "c", "avx2", "avx512", "avx512_bf16", ... */
    const char *formats;           /* for people: "q bf16; cache bf16" */
    const char *features;          /* for people: "any heads, any page size, LSE, cap, mask" */
    uint64_t cpu_features;         /* bits that must all be there */
    const char *cpu_features_text; /* "avx512 avx512_bf16" or "" */
    int32_t cuda_arch_min;         /* CUDA rows: compute capability x 10, from this one */
    int32_t cuda_arch_max;         /* to this one; both 0 on the CPU */
    /* 1 = takes it. 0 = does not; then `why` (if not NULL) gets one short reason, zero-terminated.
     * Must not turn on batch, tokens, max_q_len or max_kv_len (cost_us may), so that a workspace
     * sized for a capacity fits whichever row a smaller call chooses. */
    int32_t (*accepts)(const mla_problem *problem, char *why, uint64_t why_bytes);
    /* Monotonic in batch, tokens, max_q_len and max_kv_len. */
    uint64_t (*workspace_bytes)(const mla_problem *problem, const mla_exec *exec);
    /* Estimated microseconds on this machine; only the order between rows matters. */
    double (*cost_us)(const mla_problem *problem, const mla_exec *exec);
    /* `params` is the operator's parameter struct (mla_decode_params for decode and extend ...). */
    mla_status (*run)(const mla_exec *exec, const mla_problem *problem, const void *params,
                      mla_diag *diag);
    void *reserved[4];
} mla_solution;

/* What mla_solution_info and `mla list` tell about a row in a context. */
typedef struct mla_solution_info {
    uint32_t struct_size;
    int32_t op;
    int32_t device_type;
    int32_t runs_here; /* 1, or 0 with the reason */
    const char *name;
    const char *family;
    const char *formats;
    const char *features;
    char reason[160];
} mla_solution_info;

#define MLA_SOLUTION_INFO_INIT                                                                     \
    {                                                                                              \
        .struct_size = sizeof(mla_solution_info)                                                   \
    }

typedef enum mla_verdict_kind {
    MLA_VERDICT_CHOSEN = 1,
    MLA_VERDICT_ACCEPTED = 2, /* takes the problem, costs more (or is not the forced one) */
    MLA_VERDICT_REJECTED = 3  /* reason says why */
} mla_verdict_kind;

typedef struct mla_verdict {
    uint32_t struct_size;
    int32_t kind; /* mla_verdict_kind */
    const char *name;
    const char *family;
    double cost_us; /* 0 for rejected rows */
    uint64_t workspace_bytes;
    char reason[160];
} mla_verdict;

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Adds rows to a context; *rows and what it points to must outlive the context. Backends size their
 * workspace when they are made, so rows come first. A row with the name of an earlier one replaces
 * it. Errors: MLA_ERROR_VERSION, MLA_ERROR_ARGUMENT (a NULL function, an
 * empty or malformed name), MLA_ERROR_CAPACITY (more than 256 rows in all).
 */
MLA_API mla_status mla_context_add_solutions(mla_context *ctx, const mla_solution *rows,
                                             int32_t n_rows, mla_diag *diag);

/* How many rows the context knows, those that do not run here included. */
MLA_API int32_t mla_solution_count(const mla_context *ctx);

/* Row `index` in table order. Errors: MLA_ERROR_ARGUMENT (index), MLA_ERROR_VERSION. */
MLA_API mla_status mla_solution_describe(const mla_context *ctx, int32_t index,
                                         mla_solution_info *info, mla_diag *diag);

/*
 * What would be chosen for a problem, and why not the others: one verdict for each row of the
 * problem's operator and device, in table order. *n_verdicts: in, the room in `verdicts` (each with
 * struct_size set); out, how many there are. `solution` as in mla_call. Returns MLA_OK also when
 * nothing takes the problem (then none is CHOSEN). Errors: MLA_ERROR_CAPACITY (too little room:
 * *n_verdicts says how much; or a capacity of the problem is too large), MLA_ERROR_NOT_FOUND,
 * MLA_ERROR_ARGUMENT, MLA_ERROR_VERSION.
 */
MLA_API mla_status mla_explain(const mla_context *ctx, const mla_problem *problem,
                               const char *solution, mla_verdict *verdicts, int32_t *n_verdicts,
                               mla_diag *diag);

/*
 * The name of the row that would be chosen. *name is static or belongs to the row. Errors:
 * MLA_ERROR_UNSUPPORTED, MLA_ERROR_NOT_FOUND, MLA_ERROR_ARGUMENT, MLA_ERROR_CAPACITY.
 */
MLA_API mla_status mla_solution_choose(const mla_context *ctx, const mla_problem *problem,
                                       const char *solution, const char **name, mla_diag *diag);

#ifdef __cplusplus
}
#endif
#endif
