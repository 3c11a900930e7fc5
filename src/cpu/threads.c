/*
 * The default thread pool: n_threads - 1 workers and the caller. A run publishes (fn, arg, n_tasks)
 * under a lock and wakes the workers; tasks are drawn from one atomic counter, so no task waits for
 * another. Workers spin a little before they sleep, since operators follow each other within
 * microseconds. A worker enters a run while it is open, under the lock; when the caller finds no
 * more tasks it closes the run and waits for those that entered, never for one that sleeps through
 * it. Callers on several threads take turns. Workers end with the pool.
 *
 *   generation  grows by one a run, workers wait for it to change
 *   active      workers that have entered the current run and not left it
 */
#include "cpu/cpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { SPINS = 4000 };

struct mlai_thread_pool {
    pthread_mutex_t turn; /* one run at a time */
    pthread_mutex_t lock;
    pthread_cond_t wake; /* generation changed, or the pool ends */
    pthread_cond_t done; /* active became 0 */
    _Atomic uint64_t generation;
    _Atomic int32_t active;
    _Atomic int32_t next_task;
    bool is_open;
    int32_t n_tasks;
    mla_task fn;
    void *arg;
    bool is_ending;
    int32_t n_workers;
    pthread_t *workers;
};

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void draw_tasks(mlai_thread_pool *pool)
{
    for (;;) {
        int32_t task = atomic_fetch_add_explicit(&pool->next_task, 1, memory_order_relaxed);
        if (task >= pool->n_tasks)
            return;
        pool->fn(pool->arg, task);
    }
}

/* Waits for a generation other than *seen; false when the pool ends. *has_entered says whether the
 * worker is in a run, which it then has to leave. */
static bool wait_for_work(mlai_thread_pool *pool, uint64_t *seen, bool *has_entered)
{
    for (int32_t i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&pool->generation, memory_order_acquire) != *seen)
            break;
        relax();
    }
    pthread_mutex_lock(&pool->lock);
    while (atomic_load_explicit(&pool->generation, memory_order_relaxed) == *seen &&
           !pool->is_ending)
        pthread_cond_wait(&pool->wake, &pool->lock);
    *seen = atomic_load_explicit(&pool->generation, memory_order_relaxed);
    *has_entered = pool->is_open;
    if (*has_entered)
        atomic_fetch_add_explicit(&pool->active, 1, memory_order_relaxed);
    const bool go_on = !pool->is_ending;
    pthread_mutex_unlock(&pool->lock);
    return go_on;
}

static void *work(void *user)
{
    mlai_thread_pool *pool = user;
    uint64_t seen = 0;
    bool has_entered = false;
    while (wait_for_work(pool, &seen, &has_entered)) {
        if (!has_entered)
            continue;
        draw_tasks(pool);
        /* The last worker out orders all tasks' writes before the caller's return. */
        if (atomic_fetch_sub_explicit(&pool->active, 1, memory_order_acq_rel) == 1) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->lock);
        }
    }
    return NULL;
}

void mlai_thread_pool_run(void *user, int32_t n_tasks, mla_task fn, void *arg)
{
    mlai_thread_pool *pool = user;
    if (n_tasks <= 0)
        return;
    if (n_tasks == 1 || pool->n_workers == 0) {
        for (int32_t task = 0; task < n_tasks; task++)
            fn(arg, task);
        return;
    }
    pthread_mutex_lock(&pool->turn);
    pthread_mutex_lock(&pool->lock);
    pool->fn = fn;
    pool->arg = arg;
    pool->n_tasks = n_tasks;
    pool->is_open = true;
    atomic_store_explicit(&pool->next_task, 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&pool->generation, 1, memory_order_release);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    draw_tasks(pool);
    pthread_mutex_lock(&pool->lock);
    pool->is_open = false;
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&pool->active, memory_order_acquire) == 0)
            break;
        relax();
    }
    pthread_mutex_lock(&pool->lock);
    while (atomic_load_explicit(&pool->active, memory_order_acquire) != 0)
        pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_unlock(&pool->turn);
}

mla_status mlai_thread_pool_create(int32_t n_threads, mlai_thread_pool **out, mla_diag *diag)
{
    mlai_thread_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY, "no memory for a thread pool");
    pthread_mutex_init(&pool->turn, NULL);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    if (n_threads > 1)
        pool->workers = calloc((size_t)n_threads - 1, sizeof *pool->workers);
    for (int32_t i = 0; i + 1 < n_threads; i++) {
        if (!pool->workers || pthread_create(&pool->workers[i], NULL, work, pool) != 0) {
            mlai_thread_pool_destroy(pool);
            return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY,
                             "thread %d of %d could not be started; set options.n_threads lower",
                             i + 2, n_threads);
        }
        pool->n_workers++;
    }
    *out = pool;
    return MLA_OK;
}

void mlai_thread_pool_destroy(mlai_thread_pool *pool)
{
    if (!pool)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->is_ending = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->n_workers; i++)
        pthread_join(pool->workers[i], NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    pthread_mutex_destroy(&pool->turn);
    free(pool->workers);
    free(pool);
}

/* ---- dynamic items --------------------------------------------------------------------------- */

typedef struct item_work {
    _Atomic int64_t next;
    int64_t n_items;
    int64_t grain;
    mlai_item_fn fn;
    void *arg;
} item_work;

static void item_task(void *user, int32_t task)
{
    item_work *work_list = user;
    for (;;) {
        int64_t first =
            atomic_fetch_add_explicit(&work_list->next, work_list->grain, memory_order_relaxed);
        if (first >= work_list->n_items)
            return;
        int64_t end = mlai_min_i64(first + work_list->grain, work_list->n_items);
        work_list->fn(work_list->arg, task, first, end);
    }
}

void mlai_for_items(const mla_exec *exec, int64_t n_items, int64_t grain, mlai_item_fn fn,
                    void *arg)
{
    if (n_items <= 0)
        return;
    item_work list = {.n_items = n_items, .grain = grain > 0 ? grain : 1, .fn = fn, .arg = arg};
    atomic_init(&list.next, 0);
    int64_t chunks = mlai_ceil_div(n_items, list.grain);
    int32_t n_tasks = (int32_t)mlai_min_i64(exec->n_threads, chunks);
    if (n_tasks == 1)
        fn(arg, 0, 0, n_items);
    else
        exec->run(exec->run_user, n_tasks, item_task, &list);
}
