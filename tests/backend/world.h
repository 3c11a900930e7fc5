/*
 * A small world for the backend's tests: a context (with the watching solutions or without), a
 * backend, a pool of two layers and a request-to-page table of eight requests and the sentinel.
 *
 * Pages of a request are scattered over the pool. Rows that no test has filled hold NaN (or what
 * poison their format has), page 0 holds zeros, the sentinel row of the table is zero.
 */
#ifndef MLA_TESTS_BACKEND_WORLD_H
#define MLA_TESTS_BACKEND_WORLD_H

#include "backend/spy.h"
#include "statuses.h"
#include <mla/backend.h>
#include <stdbool.h>

enum { WORLD_REQUESTS = 8, WORLD_COLUMNS = 64, WORLD_LAYERS = 2 };

typedef struct world {
    mla_context *ctx;
    mla_backend *backend;
    mla_kv_pool *pool;
    mla_config config;
    int64_t rows[WORLD_REQUESTS]; /* 0, 1, 2 ... */
    int32_t table[WORLD_REQUESTS + 1][WORLD_COLUMNS];
} world;

/* The sentence of the last failure. */
extern mla_diag diag;

/* H 2 (4 heads over 2 ranks), R 8, N 4, P 4, V 6, PS 4, context 256, f32, S 2, 8 requests. */
mla_config world_config(void);

/* On the heap, since the backend keeps views of its arrays. */
world *world_make(mla_config config, bool with_spy);
void world_end(world *w);

/* Row `request`'s slot of a position. */
int64_t world_slot(const world *w, int32_t request, int64_t position);

/* Fills positions first .. end - 1 of a request in every layer with values that depend on nothing
 * but (request, position, layer), through the library's own write. Not with the spy. */
void world_fill(world *w, int32_t request, int64_t first, int64_t end);

/* Makes position p of a request NaN in every layer, for rows that must not be read. */
void world_poison(world *w, int32_t request, int64_t position);

/* A decode batch over the first bs rows; more can be set on it before the init. */
mla_forward_batch world_batch(world *w, int32_t bs, int32_t *seq_lens);

/* n values in (-1, 1) from a seed. */
void world_random(float *values, int64_t n, uint32_t seed);

mla_tensor world_i32(const int32_t *values, int64_t n);

#endif
