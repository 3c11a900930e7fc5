/*
 * The thread pool: each task exactly once, writes seen after the run, many short runs in a row,
 * callers on several threads, and items drawn once each under any runner.
 */
#include "test.h"

#include "cpu/cpu.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { TASKS = 64, RUNS = 3000 };

typedef struct counts {
    int32_t plain[TASKS]; /* not atomic: each task owns one entry */
} counts;

static void count_task(void *arg, int32_t task)
{
    ((counts *)arg)->plain[task]++;
}

static void every_task_once(void **state)
{
    (void)state;
    for (int32_t n_threads = 1; n_threads <= 5; n_threads++) {
        mlai_thread_pool *pool = NULL;
        assert_int_equal(mlai_thread_pool_create(n_threads, &pool, NULL), MLA_OK);
        counts c;
        memset(&c, 0, sizeof c);
        for (int32_t run = 0; run < RUNS; run++)
            mlai_thread_pool_run(pool, run % TASKS + 1, count_task, &c);
        for (int32_t task = 0; task < TASKS; task++) {
            int32_t want = 0;
            for (int32_t run = 0; run < RUNS; run++)
                want += task < run % TASKS + 1;
            assert_int_equal(c.plain[task], want);
        }
        mlai_thread_pool_destroy(pool);
    }
}

static void *call_often(void *user)
{
    counts c;
    memset(&c, 0, sizeof c);
    for (int32_t run = 0; run < 500; run++)
        mlai_thread_pool_run(user, 3, count_task, &c);
    return (void *)(intptr_t)(c.plain[0] == 500 && c.plain[1] == 500 && c.plain[2] == 500);
}

static void callers_take_turns(void **state)
{
    (void)state;
    mlai_thread_pool *pool = NULL;
    assert_int_equal(mlai_thread_pool_create(3, &pool, NULL), MLA_OK);
    pthread_t callers[4];
    for (int32_t i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&callers[i], NULL, call_often, pool), 0);
    for (int32_t i = 0; i < 4; i++) {
        void *ok;
        pthread_join(callers[i], &ok);
        assert_true(ok != NULL);
    }
    mlai_thread_pool_destroy(pool);
}

static void mark_items(void *arg, int32_t task, int64_t first, int64_t end)
{
    _Atomic int32_t *marks = arg;
    assert_true(task >= 0 && task < 4);
    for (int64_t i = first; i < end; i++)
        atomic_fetch_add(&marks[i], 1);
}

/* A runner without threads that goes backwards: no task may wait for another. */
static void run_backwards(void *user, int32_t n_tasks, mla_task fn, void *arg)
{
    (void)user;
    for (int32_t task = n_tasks - 1; task >= 0; task--)
        fn(arg, task);
}

static void every_item_once(void **state)
{
    (void)state;
    mlai_thread_pool *pool = NULL;
    assert_int_equal(mlai_thread_pool_create(4, &pool, NULL), MLA_OK);
    mla_exec threaded = {.n_threads = 4, .run = mlai_thread_pool_run, .run_user = pool};
    mla_exec serial = {.n_threads = 4, .run = run_backwards};
    for (int64_t n = 0; n < 200; n += 7) {
        for (int64_t grain = 0; grain < 20; grain += 3) {
            _Atomic int32_t marks[200];
            for (int64_t i = 0; i < 200; i++)
                atomic_init(&marks[i], 0);
            mlai_for_items(&threaded, n, grain, mark_items, marks);
            mlai_for_items(&serial, n, grain, mark_items, marks);
            for (int64_t i = 0; i < 200; i++)
                assert_int_equal(atomic_load(&marks[i]), i < n ? 2 : 0);
        }
    }
    mlai_thread_pool_destroy(pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_task_once),
        cmocka_unit_test(callers_take_turns),
        cmocka_unit_test(every_item_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
