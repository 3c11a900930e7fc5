/*
 * The shared part of the attention drivers, see attention_block.h.
 */
#include "cpu/attention_block.h"

#include <math.h>

void *mlai_arena_take(mlai_arena *arena, uint64_t bytes)
{
    uint64_t at = arena->used_bytes;
    arena->used_bytes = at + mlai_align_up(bytes, 64);
    return arena->base ? arena->base + at : NULL;
}

mlai_triple mlai_triple_take(mlai_arena *arena, int64_t n_rows, int64_t o_stride)
{
    mlai_triple t;
    t.m = mlai_arena_take(arena, (uint64_t)n_rows * sizeof(float));
    t.l = mlai_arena_take(arena, (uint64_t)n_rows * sizeof(float));
    t.o = mlai_arena_take(arena, (uint64_t)n_rows * (uint64_t)o_stride * sizeof(float));
    return t;
}

/* Bytes of the widest row that a kernel may read through a pointer. */
static uint64_t zero_row_bytes(const mlai_attention_shape *shape)
{
    int64_t n = shape->value_dims;
    for (int32_t i = 0; i < shape->n_pieces; i++)
        n = mlai_max_i64(n, shape->piece_dims[i]);
    uint64_t bytes = (uint64_t)n * (uint64_t)mla_format_bytes(shape->kv_format);
    return bytes > MLA_DS656_ROW_BYTES ? bytes : MLA_DS656_ROW_BYTES;
}

void mlai_block_memory_take(mlai_arena *arena, const mlai_attention_kernel *kernel,
                            const mlai_attention_shape *shape, int32_t n_rows, bool has_mask,
                            mlai_block_memory *memory)
{
    int64_t stride = kernel->o_stride(shape);
    for (int32_t i = 0; i < MLAI_MAX_PIECES; i++) {
        memory->keys[i] = mlai_arena_take(arena, MLAI_UNIT_POINTERS * sizeof(void *));
        memory->q_rows[i] = mlai_arena_take(arena, MLAI_BLOCK_ROWS * sizeof(void *));
    }
    memory->values = mlai_arena_take(arena, MLAI_UNIT_POINTERS * sizeof(void *));
    memory->zeros = mlai_arena_take(arena, zero_row_bytes(shape));
    memory->bounds = mlai_arena_take(arena, MLAI_BLOCK_ROWS * sizeof(int64_t));
    memory->visible = mlai_arena_take(arena, MLAI_BLOCK_ROWS * sizeof(int32_t));
    memory->hidden =
        has_mask ? mlai_arena_take(arena, (uint64_t)MLAI_UNIT_KEYS * MLAI_BLOCK_ROWS) : NULL;
    memory->q = mlai_arena_take(arena, kernel->q_bytes(shape, n_rows));
    memory->scratch = mlai_arena_take(arena, kernel->scratch_bytes(shape, n_rows));
    memory->total = mlai_triple_take(arena, n_rows, stride);
    memory->segment = mlai_triple_take(arena, n_rows, stride);
}

void mlai_block_memory_start(mlai_block_memory *memory, const mlai_attention_shape *shape)
{
    memset((void *)(uintptr_t)memory->zeros, 0, zero_row_bytes(shape));
    for (int32_t i = 0; i < MLAI_MAX_PIECES; i++)
        memset(memory->keys[i], 0, MLAI_UNIT_POINTERS * sizeof(void *));
    memset(memory->values, 0, MLAI_UNIT_POINTERS * sizeof(void *));
}

void mlai_block_run_unit(const mlai_block *block, int64_t unit, const uint8_t *hidden,
                         mlai_triple acc, bool is_first)
{
    mlai_block_memory *memory = block->memory;
    int64_t first_key = unit * MLAI_UNIT_KEYS;
    int32_t n_keys = (int32_t)mlai_min_i64(MLAI_UNIT_KEYS, block->max_bound - first_key);
    int32_t lanes = block->kernel->lanes;
    int32_t padded_rows = (block->n_rows + lanes - 1) / lanes * lanes;
    for (int32_t row = 0; row < block->n_rows; row++) {
        int64_t seen = memory->bounds[row] - first_key;
        memory->visible[row] = (int32_t)mlai_max_i64(0, mlai_min_i64(seen, n_keys));
    }
    /* Lanes beyond the rows must not make anyone mask: they see all, and nobody reads them. */
    for (int32_t row = block->n_rows; row < padded_rows; row++)
        memory->visible[row] = MLAI_UNIT_KEYS;
    if (n_keys & 1) {
        for (int32_t i = 0; i < block->shape->n_pieces; i++)
            memory->keys[i][n_keys] = memory->zeros;
        memory->values[n_keys] = memory->zeros;
    }
    mlai_unit u = {
        .shape = block->shape,
        .q = memory->q,
        .n_rows = block->n_rows,
        .n_keys = n_keys,
        .visible = memory->visible,
        .hidden = hidden,
        .scale = block->scale,
        .cap = block->cap,
        .acc = acc,
        .is_first = is_first,
        .scratch = memory->scratch,
    };
    for (int32_t i = 0; i < block->shape->n_pieces; i++)
        u.keys[i] = memory->keys[i];
    u.values = block->shares_rows ? (const void *const *)memory->keys[0] : memory->values;
    block->kernel->unit(&u);
}

void mlai_progress_close(const mlai_attention_kernel *kernel, mlai_progress *progress,
                         int64_t o_stride, int64_t unit_end, int64_t n_units, int32_t first,
                         int32_t end)
{
    if (unit_end < n_units && unit_end % MLAI_SEGMENT_UNITS != 0)
        return;
    if (progress->has_total) {
        kernel->fold(progress->total, progress->segment, o_stride, first, end);
    } else {
        mlai_triple empty = progress->total;
        progress->total = progress->segment;
        progress->segment = empty;
    }
    progress->has_total = true;
    progress->has_segment = false;
}

float mlai_triple_lse(float m, float l)
{
    if (l == 0.0f)
        return -INFINITY;
    return (float)((double)m * 0.69314718055994530942) + logf(l);
}

int32_t mlai_block_rows(const mlai_attention_kernel *kernel, int64_t max_rows)
{
    int64_t n_blocks = mlai_max_i64(1, mlai_ceil_div(max_rows, MLAI_BLOCK_ROWS));
    int64_t rows = mlai_max_i64(1, mlai_ceil_div(max_rows, n_blocks));
    return (int32_t)(mlai_ceil_div(rows, kernel->lanes) * kernel->lanes);
}
