/*
 * A block of query rows on its way over its keys: what decode.c and prefill.c share. Memory of one
 * task, the bounds of the rows, and the units of one block, one call a unit:
 *
 *   keys      0        256       512  ...      2048             4096
 *   units     |  u0  |  u1  |  u2  | ... |  u7  |  u8  | ... | u15 |
 *   segments  |<----------- segment 0 --------->|<-- segment 1 --->|
 *
 * The result of a row is a tree over absolute key positions: units fold left to right inside a
 * segment, segments fold left to right. Who computes which part, and when, changes no bit.
 */
#ifndef MLAI_ATTENTION_BLOCK_H
#define MLAI_ATTENTION_BLOCK_H

#include "cpu/attention_kernel.h"

/* Memory of one task, cut from the workspace. */
typedef struct mlai_block_memory {
    const void **keys[MLAI_MAX_PIECES]; /* [MLAI_UNIT_POINTERS] */
    const void **values;                /* likewise, for values that are not the keys' */
    const void *zeros;                  /* a row of zeros as wide as the widest row */
    int64_t *bounds;                    /* [MLAI_BLOCK_ROWS] */
    int32_t *visible;                   /* [MLAI_BLOCK_ROWS] */
    uint8_t *hidden;                    /* [MLAI_UNIT_KEYS][MLAI_BLOCK_ROWS], NULL without a mask */
    const void **q_rows[MLAI_MAX_PIECES]; /* [MLAI_BLOCK_ROWS] */
    void *q;
    void *scratch;
    mlai_triple total;   /* whole segments */
    mlai_triple segment; /* the running one */
    mlai_triple apart;   /* a unit done again, see mlai_block_run_unit */
    const void **saved;  /* [MLAI_MAX_PIECES + 1][MLAI_UNIT_KEYS] its pointers meanwhile */
} mlai_block_memory;

typedef struct mlai_block {
    const mlai_attention_kernel *kernel;
    const mlai_attention_shape *shape;
    mlai_block_memory *memory;
    int32_t n_rows;
    int64_t max_bound; /* the largest of memory->bounds */
    int64_t end_key;   /* keys from here on are another task's, or nobody's */
    int64_t found;     /* keys below have their row pointers, see mlai_block_keep_rows */
    float scale;
    float cap;
    bool shares_rows;   /* values are the first columns of keys[0] */
    const void *packed; /* of the unit that runs, whose values are all finite; or NULL */
    int32_t
        n_ahead; /* row pointers from MLAI_UNIT_KEYS on that are not the block's next unit, or 0 */
    bool is_new; /* see mlai_unit */
} mlai_block;

/* A bump allocator that only counts when base is NULL: sizing and cutting are one function. */
typedef struct mlai_arena {
    char *base;
    uint64_t used_bytes;
} mlai_arena;

void *mlai_arena_take(mlai_arena *arena, uint64_t bytes);

/* Room for blocks of up to n_rows rows (a multiple of the kernel's lanes), zero row included. */
void mlai_block_memory_take(mlai_arena *arena, const mlai_attention_kernel *kernel,
                            const mlai_attention_shape *shape, int32_t n_rows, bool has_mask,
                            mlai_block_memory *memory);
/* Writes the zero row and clears the pointers. Once a task, before its first unit. */
void mlai_block_memory_start(mlai_block_memory *memory, const mlai_attention_shape *shape);

mlai_triple mlai_triple_take(mlai_arena *arena, int64_t n_rows, int64_t o_stride);

/* Units of a block: 0 when no row sees anything. */
static inline int64_t mlai_block_units(int64_t max_bound)
{
    return mlai_ceil_div(max_bound, MLAI_UNIT_KEYS);
}

/*
 * Before a unit: row pointers that the unit before it has found go to the front. Keys
 * block->found..mlai_block_keys_end() - 1 are then to be found; key k belongs at index
 * k - unit * MLAI_UNIT_KEYS.
 */
void mlai_block_keep_rows(mlai_block *block, int64_t unit);

static inline int64_t mlai_block_keys_end(const mlai_block *block, int64_t unit)
{
    return mlai_min_i64(unit * MLAI_UNIT_KEYS + MLAI_UNIT_POINTERS, block->end_key);
}

/*
 * One unit into acc (written when is_first, else folded). memory->keys (and values) hold the unit's
 * row pointers up to its n_keys = min(MLAI_UNIT_KEYS, max_bound - unit * MLAI_UNIT_KEYS) keys, and
 * from MLAI_UNIT_KEYS on those of the next unit up to end_key.
 *
 * A kernel multiplies a key's values with p = 0 for rows of the block that do not see it, which is
 * harmless as long as they are finite. Values that some row does not see are therefore looked at
 * first; when they hold NaN or infinity, rows that see the same keys are done apart, with rows of
 * zeros in place of the others: the same bits, only slower.
 */
void mlai_block_run_unit(const mlai_block *block, int64_t unit, const uint8_t *hidden,
                         mlai_triple acc, bool is_first);

/* Packs keys 0..n_keys-1 of memory->keys and values, see pack_unit. */
bool mlai_block_pack_unit(const mlai_block *block, int32_t n_keys, void *packed);

/* A row's tree half way: what is folded of whole segments and of the running one. */
typedef struct mlai_progress {
    mlai_triple total;
    mlai_triple segment;
    bool has_total;
    bool has_segment;
} mlai_progress;

/* After progress->segment has taken in keys up to unit `unit_end`: closes the segment when it ends
 * there. Rows first..end-1. */
void mlai_progress_close(const mlai_attention_kernel *kernel, mlai_progress *progress,
                         int64_t o_stride, int64_t unit_end, int64_t n_units, int32_t first,
                         int32_t end);

/* Rows of queries and outputs lie far apart: nobody else asks for their lines ahead of time. */
static inline void mlai_prefetch_row(const void *row, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += 64)
        __builtin_prefetch((const char *)row + at, 0, 2);
}

/* ln 2 * m + ln l, or -inf. */
float mlai_triple_lse(float m, float l);

/* Query rows of a block: as even as lanes allow, at most MLAI_BLOCK_ROWS. */
int32_t mlai_block_rows(const mlai_attention_kernel *kernel, int64_t max_rows);

#endif
