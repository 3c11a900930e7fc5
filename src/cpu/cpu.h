/*
 * CPU: features of this machine, the default thread pool, and helpers shared by the CPU solutions.
 */
#ifndef MLAI_CPU_H
#define MLAI_CPU_H

#include "base/base.h"
#include "base/convert.h"
#include <mla/solution.h>

/* Bits of MLA_CPU_FEATURE_LIST that the processor and the operating system offer. */
uint64_t mlai_cpu_detect_features(void);

/* Cores this process may run on (its affinity mask), at least 1. */
int32_t mlai_cpu_count(void);

/* The processor's own name, "" when it does not tell. */
void mlai_cpu_name(char *name, size_t name_bytes);

typedef struct mlai_thread_pool mlai_thread_pool;
mla_status mlai_thread_pool_create(int32_t n_threads, mlai_thread_pool **out, mla_diag *diag);
void mlai_thread_pool_destroy(mlai_thread_pool *pool);
/* An mla_run whose user is the pool; callers on several threads take turns. */
void mlai_thread_pool_run(void *pool, int32_t n_tasks, mla_task fn, void *arg);

/*
 * Dynamic work for exec->run: n_tasks = min(n_threads, n_items) tasks draw items from one counter,
 * so no task waits for another. `fn(arg, task, first, end)` handles items first..end-1 with the
 * scratch of `task`; items come in chunks of `grain`.
 */
typedef void (*mlai_item_fn)(void *arg, int32_t task, int64_t first, int64_t end);
void mlai_for_items(const mla_exec *exec, int64_t n_items, int64_t grain, mlai_item_fn fn,
                    void *arg);

/* Families' tables, one a file under src/cpu/. */
extern const mla_solution mlai_rows_c[];
extern const int32_t mlai_n_rows_c;
extern const mla_solution mlai_rows_avx2[];
extern const int32_t mlai_n_rows_avx2;
extern const mla_solution mlai_rows_avx512[];
extern const int32_t mlai_n_rows_avx512;
extern const mla_solution mlai_rows_avx512_bf16[];
extern const int32_t mlai_n_rows_avx512_bf16;
extern const mla_solution mlai_rows_amx_bf16[];
extern const int32_t mlai_n_rows_amx_bf16;
extern const mla_solution mlai_rows_neon[];
extern const int32_t mlai_n_rows_neon;
extern const mla_solution mlai_rows_neon_bf16[];
extern const int32_t mlai_n_rows_neon_bf16;

#endif
