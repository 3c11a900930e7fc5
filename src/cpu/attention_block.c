/*
 * The shared part of the attention drivers, see attention_block.h.
 */
#include "cpu/attention_block.h"

#include <math.h>

void *mlai_arena_take(mlai_arena *arena, uint64_t bytes)
{
    uint64_t at = arena->used_bytes;
    uint64_t end = mlai_add_saturating(at, bytes);
    arena->used_bytes = end > UINT64_MAX - 63 ? UINT64_MAX : mlai_align_up(end, 64);
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
    memory->apart = mlai_triple_take(arena, n_rows, stride);
    memory->saved = mlai_arena_take(arena, (MLAI_MAX_PIECES + 1) * MLAI_UNIT_KEYS * sizeof(void *));
}

void mlai_block_memory_start(mlai_block_memory *memory, const mlai_attention_shape *shape)
{
    memset((void *)(uintptr_t)memory->zeros, 0, zero_row_bytes(shape));
    for (int32_t i = 0; i < MLAI_MAX_PIECES; i++)
        memset(memory->keys[i], 0, MLAI_UNIT_POINTERS * sizeof(void *));
    memset(memory->values, 0, MLAI_UNIT_POINTERS * sizeof(void *));
}

/* ---- values that are not finite ------------------------------------------------------------- */

static bool is_finite_u8(const uint8_t *x, int64_t n, uint8_t top)
{
    uint32_t bad = 0;
    for (int64_t i = 0; i < n; i++)
        bad |= (x[i] & top) == top;
    return bad == 0;
}

static bool is_finite_u16(const uint16_t *x, int64_t n, uint16_t top)
{
    uint32_t bad = 0;
    for (int64_t i = 0; i < n; i++)
        bad |= (x[i] & top) == top;
    return bad == 0;
}

static bool is_finite_u32(const uint32_t *x, int64_t n)
{
    uint32_t bad = 0;
    for (int64_t i = 0; i < n; i++)
        bad |= (x[i] & 0x7f800000u) == 0x7f800000u;
    return bad == 0;
}

/* Whether n values of a row are finite, by their exponent bits. */
static bool is_finite_row(const void *row, int32_t format, int64_t n)
{
    uint32_t scales[MLAI_DS656_TILES];
    switch (format) {
    case MLA_FORMAT_F32:
        return is_finite_u32(row, n);
    case MLA_FORMAT_BF16:
        return is_finite_u16(row, n, 0x7f80);
    case MLA_FORMAT_F16:
        return is_finite_u16(row, n, 0x7c00);
    case MLA_FORMAT_E4M3:
        return is_finite_u8(row, n, 0x7f);
    case MLA_FORMAT_E5M2:
        return is_finite_u8(row, n, 0x7c);
    default: /* ds656 */
        memcpy(scales, (const char *)row + n, sizeof scales);
        return is_finite_u8(row, n, 0x7f) && is_finite_u32(scales, MLAI_DS656_TILES);
    }
}

/* Keys first..end-1, which not every row sees. */
static bool are_finite(const mlai_unit *u, int32_t first)
{
    for (int32_t key = first; key < u->n_keys; key++) {
        if (!is_finite_row(u->values[key], u->shape->kv_format, u->shape->value_dims))
            return false;
    }
    return true;
}

static void set_pointers(mlai_block_memory *memory, const void *const *saved, const mlai_unit *u,
                         int32_t row)
{
    const void **slots[MLAI_MAX_PIECES + 1] = {memory->keys[0], memory->keys[1], memory->values};
    for (int32_t slot = 0; slot <= MLAI_MAX_PIECES; slot++) {
        for (int32_t key = 0; key < u->n_keys; key++) {
            bool is_seen = row < 0 || (key < u->visible[row] &&
                                       !(u->hidden && u->hidden[key * MLAI_BLOCK_ROWS + row]));
            slots[slot][key] = is_seen ? saved[slot * MLAI_UNIT_KEYS + key] : memory->zeros;
        }
    }
}

/* The unit once for each run of rows that see the same keys; their triples join acc as one would.
 */
static void run_apart(const mlai_block *block, mlai_unit *u)
{
    mlai_block_memory *memory = block->memory;
    mlai_triple acc = u->acc, apart = memory->apart;
    bool is_first = u->is_first;
    int64_t stride = block->kernel->o_stride(block->shape);
    for (int32_t slot = 0; slot <= MLAI_MAX_PIECES; slot++)
        memcpy(memory->saved + slot * MLAI_UNIT_KEYS,
               slot < MLAI_MAX_PIECES ? memory->keys[slot] : memory->values,
               (size_t)u->n_keys * sizeof(void *));
    u->acc = apart;
    u->is_first = true;
    for (int32_t row = 0, end; row < u->n_rows; row = end) {
        for (end = row + 1; end < u->n_rows && !u->hidden; end++) {
            if (u->visible[end] != u->visible[row])
                break;
        }
        set_pointers(memory, memory->saved, u, row);
        block->kernel->unit(u);
        if (!is_first) {
            block->kernel->fold(acc, apart, stride, row, end);
            continue;
        }
        size_t n = (size_t)(end - row) * sizeof(float);
        memcpy(acc.m + row, apart.m + row, n);
        memcpy(acc.l + row, apart.l + row, n);
        memcpy(acc.o + row * stride, apart.o + row * stride, n * (size_t)stride);
    }
    set_pointers(memory, memory->saved, u, -1);
}

void mlai_block_keep_rows(mlai_block *block, int64_t unit)
{
    mlai_block_memory *memory = block->memory;
    const void **slots[MLAI_MAX_PIECES + 1] = {memory->keys[0], memory->keys[1], memory->values};
    int64_t first = unit * MLAI_UNIT_KEYS;
    if (block->found <= first) {
        block->found = first;
        return;
    }
    for (int32_t slot = 0; slot <= MLAI_MAX_PIECES; slot++)
        memcpy(slots[slot], slots[slot] + MLAI_UNIT_KEYS, MLAI_UNIT_KEYS * sizeof(void *));
}

/* A row of zeros behind an odd number of keys. */
static void pad_keys(const mlai_block *block, int32_t n_keys)
{
    mlai_block_memory *memory = block->memory;
    if (n_keys % 2 == 0)
        return;
    for (int32_t i = 0; i < block->shape->n_pieces; i++)
        memory->keys[i][n_keys] = memory->zeros;
    memory->values[n_keys] = memory->zeros;
}

static mlai_unit unit_of(const mlai_block *block, int32_t n_keys)
{
    mlai_block_memory *memory = block->memory;
    mlai_unit u = {
        .shape = block->shape,
        .q = memory->q,
        .n_rows = block->n_rows,
        .n_keys = n_keys,
        .visible = memory->visible,
        .scale = block->scale,
        .cap = block->cap,
        .scratch = memory->scratch,
        .values = block->shares_rows ? (const void *const *)memory->keys[0]
                                     : (const void *const *)memory->values,
    };
    for (int32_t i = 0; i < block->shape->n_pieces; i++)
        u.keys[i] = memory->keys[i];
    return u;
}

bool mlai_block_pack_unit(const mlai_block *block, int32_t n_keys, void *packed)
{
    mlai_unit u = unit_of(block, n_keys);
    pad_keys(block, n_keys);
    return block->kernel->pack_unit(&u, packed);
}

void mlai_block_run_unit(const mlai_block *block, int64_t unit, const uint8_t *hidden,
                         mlai_triple acc, bool is_first)
{
    mlai_block_memory *memory = block->memory;
    int64_t first_key = unit * MLAI_UNIT_KEYS;
    int32_t n_keys = (int32_t)mlai_min_i64(MLAI_UNIT_KEYS, block->max_bound - first_key);
    int32_t lanes = block->kernel->lanes;
    int32_t padded_rows = (block->n_rows + lanes - 1) / lanes * lanes;
    int32_t seen_by_all = hidden ? 0 : n_keys;
    for (int32_t row = 0; row < block->n_rows; row++) {
        int64_t seen = memory->bounds[row] - first_key;
        memory->visible[row] = (int32_t)mlai_max_i64(0, mlai_min_i64(seen, n_keys));
        if (memory->visible[row] < seen_by_all)
            seen_by_all = memory->visible[row];
    }
    /* Lanes beyond the rows must not make anyone mask: they see all, and nobody reads them. */
    for (int32_t row = block->n_rows; row < padded_rows; row++)
        memory->visible[row] = MLAI_UNIT_KEYS;
    mlai_unit u = unit_of(block, n_keys);
    u.hidden = hidden;
    u.acc = acc;
    u.is_first = is_first;
    u.n_ahead = block->n_ahead;
    u.is_new = block->is_new;
    u.packed = block->packed;
    if (u.packed) {
        block->kernel->unit(&u);
        return;
    }
    pad_keys(block, n_keys);
    if (u.n_ahead == 0)
        u.n_ahead =
            (int32_t)mlai_max_i64(0, mlai_block_keys_end(block, unit) - first_key - MLAI_UNIT_KEYS);
    if (seen_by_all == n_keys || are_finite(&u, seen_by_all))
        block->kernel->unit(&u);
    else
        run_apart(block, &u);
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
