/*
 * The plan of a decode call, see attention_plan.h. One pass over the blocks for the total, one for
 * the cuts; 64-bit costs in row-keys.
 */
#include "cpu/attention_plan.h"

enum {
    KEY_ROWS = 6,         /* cost of a key beside its rows (interleave, conversion), in rows */
    ROW_KEYS = 64,        /* cost of a row beside its keys (packing, writing), in keys */
    MIN_TASK_COST = 2048, /* row-keys below which a thread does not pay */
    SNAP_SHARE = 32       /* a cut moves to a segment's start when that costs 1 / 32 of a share */
};

static int64_t unit_cost(int32_t n_rows, int32_t lanes)
{
    return (mlai_ceil_div(n_rows, lanes) * lanes + KEY_ROWS) * MLAI_UNIT_KEYS;
}

static int64_t block_cost(int32_t n_rows, int32_t lanes, int64_t max_bound)
{
    int64_t rows = mlai_ceil_div(n_rows, lanes) * lanes;
    return (rows + KEY_ROWS) * max_bound + rows * ROW_KEYS;
}

/* The unit of a block at which `cost` of it is done: nearest, or a segment's start close by. */
static int64_t cut_unit(int64_t cost, int64_t cost_of_unit, int64_t share)
{
    int64_t unit = (cost + cost_of_unit / 2) / cost_of_unit;
    int64_t segment = (unit + MLAI_SEGMENT_UNITS / 2) / MLAI_SEGMENT_UNITS * MLAI_SEGMENT_UNITS;
    int64_t moved = (segment > unit ? segment - unit : unit - segment) * cost_of_unit;
    return moved <= share / SNAP_SHARE ? segment : unit;
}

int32_t mlai_plan_make(const mlai_plan_source *source, int32_t max_tasks, mlai_plan_position *cuts)
{
    int64_t total = 0, max_bound;
    int32_t n_rows;
    for (int64_t request = 0; request < source->n_requests; request++) {
        int64_t n_blocks = source->n_blocks(source->user, request);
        for (int64_t block = 0; block < n_blocks; block++) {
            source->block(source->user, request, block, &n_rows, &max_bound);
            total += block_cost(n_rows, source->lanes, max_bound);
        }
    }
    int32_t n_tasks = (int32_t)mlai_max_i64(1, mlai_min_i64(max_tasks, total / MIN_TASK_COST));
    int64_t share = total / n_tasks, begin = 0;
    int32_t next = 1;
    cuts[0] = (mlai_plan_position){0, 0, 0};
    for (int64_t request = 0; request < source->n_requests && next < n_tasks; request++) {
        int64_t n_blocks = source->n_blocks(source->user, request);
        for (int64_t block = 0; block < n_blocks && next < n_tasks; block++) {
            source->block(source->user, request, block, &n_rows, &max_bound);
            int64_t end = begin + block_cost(n_rows, source->lanes, max_bound);
            int64_t n_units = mlai_block_units(max_bound);
            for (; next < n_tasks && share * next < end; next++) {
                int64_t unit =
                    cut_unit(share * next - begin, unit_cost(n_rows, source->lanes), share);
                if (unit < n_units)
                    cuts[next] = (mlai_plan_position){request, block, unit};
                else if (block + 1 < n_blocks)
                    cuts[next] = (mlai_plan_position){request, block + 1, 0};
                else
                    cuts[next] = (mlai_plan_position){request + 1, 0, 0};
            }
            begin = end;
        }
    }
    for (; next <= n_tasks; next++)
        cuts[next] = (mlai_plan_position){source->n_requests, 0, 0};
    return n_tasks;
}

/*
 * A range that starts inside a block keeps at most 7 units, the block's segments and a last one
 * begun. Nor can it keep more rows of triples than it has row-units, which is its share of the call
 * plus the rounding of both cuts (half a unit each, or a share's 1 / SNAP_SHARE); a call too small
 * for max_tasks has shares below 2 * MIN_TASK_COST.
 */
uint64_t mlai_plan_partial_rows(int64_t max_blocks, int32_t block_rows, int64_t max_keys,
                                int32_t max_tasks)
{
    if (max_tasks < 2)
        return 0;
    int64_t units = mlai_block_units(max_keys);
    int64_t by_tree =
        mlai_min_i64(units, MLAI_SEGMENT_UNITS + mlai_ceil_div(units, MLAI_SEGMENT_UNITS));
    double total = (double)max_blocks * ((double)(block_rows + KEY_ROWS) * (double)max_keys +
                                         (double)block_rows * ROW_KEYS);
    double share = total / max_tasks + 2.0 * MIN_TASK_COST;
    share += share * 2.0 / SNAP_SHARE;
    double by_share = share / MLAI_UNIT_KEYS + 2.0 * (block_rows + KEY_ROWS);
    double tree_rows = (double)by_tree * block_rows;
    return (uint64_t)(by_share < tree_rows ? by_share + 1.0 : tree_rows);
}
