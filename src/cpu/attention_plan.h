/*
 * The plan of a decode call: which task runs which units of which block.
 *
 * The work is one line: request after request, block of rows after block, unit after unit. It is
 * cut into n_tasks contiguous ranges of equal cost (rows x keys); a cut may fall between any two
 * units of a block. Bits do not depend on cuts: attention_block.h gives the tree that every cut
 * leaves whole.
 *
 *   request 0      request 1                              request 2
 *   [b0: u0 u1]    [b0: u0 u1 u2 u3 u4 u5 u6 u7 | u8]     [b0: u0]
 *   '--- task 0 ------------------'--- task 1 ---------------------'
 *
 * A task that starts inside a block keeps what it cannot fold: single units up to the next segment,
 * then one triple a segment. mlai_plan_partial_rows bounds that by capacities alone.
 */
#ifndef MLAI_ATTENTION_PLAN_H
#define MLAI_ATTENTION_PLAN_H

#include "cpu/attention_block.h"

typedef struct mlai_plan_position {
    int64_t request;
    int64_t block;
    int64_t unit;
} mlai_plan_position;

/* Rows and largest bound of a block, asked by request and block index in order. */
typedef struct mlai_plan_source {
    const void *user;
    int64_t n_requests;
    int32_t lanes;
    int64_t (*n_blocks)(const void *user, int64_t request);
    void (*block)(const void *user, int64_t request, int64_t block, int32_t *n_rows,
                  int64_t *max_bound);
} mlai_plan_source;

/* Fills cuts[0..n_tasks] and returns n_tasks <= max_tasks (fewer when the work is small). */
int32_t mlai_plan_make(const mlai_plan_source *source, int32_t max_tasks, mlai_plan_position *cuts);

/*
 * Rows of partial triples that one task may have to keep. max_blocks: blocks of all requests, each
 * of up to block_rows rows and max_keys keys.
 */
uint64_t mlai_plan_partial_rows(int64_t max_blocks, int32_t block_rows, int64_t max_keys,
                                int32_t max_tasks);

static inline bool mlai_plan_same_block(const mlai_plan_position *a, const mlai_plan_position *b)
{
    return a->request == b->request && a->block == b->block;
}

/* Whether a comes before b on the line. */
static inline bool mlai_plan_before(const mlai_plan_position *a, const mlai_plan_position *b)
{
    if (a->request != b->request)
        return a->request < b->request;
    return a->block != b->block ? a->block < b->block : a->unit < b->unit;
}

#endif
