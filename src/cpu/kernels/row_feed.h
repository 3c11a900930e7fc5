/*
 * Asks for the rows of the unit that comes next while this one is computed, a few cache lines a
 * step, into the second-level cache, so that the memory works all the time. See attention_bf16.c.
 */
#ifndef MLAI_ROW_FEED_H
#define MLAI_ROW_FEED_H

#include "cpu/attention_kernel.h"
#include "cpu/kernels/vec_f32.h"

enum { NEW_KEYS = 16 }; /* keys of a unit that are not worth asking for */

/* Cache lines of rows that are asked for a few at a time, while others are computed with. */
typedef struct feed {
    const void *const *rows[MLAI_MAX_PIECES + 1]; /* pieces, and values that are no piece */
    int64_t bytes[MLAI_MAX_PIECES + 1];
    int32_t n_kinds;
    int32_t kind;
    int32_t key, end; /* places of row pointers */
    int32_t step_lines;
    int64_t at; /* byte of the row */
} feed;

static int64_t lines_of(int64_t bytes)
{
    return (bytes + 63) / 64;
}

/*
 * Part `part` of n_parts of the rows after this unit, in about `steps` steps. When nobody has asked
 * for the unit itself, its own rows come first, but for those that are needed at once; copies ask
 * for what they read.
 */
static feed start_feed(const mlai_unit *u, int32_t part, int32_t n_parts, int64_t steps)
{
    const mlai_attention_shape *shape = u->shape;
    int64_t lines = 0, bytes = mla_format_bytes(shape->kv_format);
    int32_t first = MLAI_UNIT_KEYS, end = MLAI_UNIT_KEYS + u->n_ahead;
    if (u->is_new && u->n_keys == MLAI_UNIT_KEYS && shape->kv_format == MLA_FORMAT_BF16)
        first = NEW_KEYS;
    feed f = {.key = first + (end - first) * part / n_parts,
              .end = first + (end - first) * (part + 1) / n_parts};
    if (f.key == f.end)
        return f;
    if (shape->kv_format == MLA_FORMAT_DS656) {
        f.rows[0] = u->keys[0];
        f.bytes[0] = MLA_DS656_ROW_BYTES;
        f.n_kinds = 1;
    }
    for (int32_t i = 0; i < shape->n_pieces && shape->kv_format != MLA_FORMAT_DS656; i++) {
        const char *row = u->keys[i][f.key];
        if (i > 0 && row == (const char *)u->keys[0][f.key] + f.bytes[0]) {
            f.bytes[0] += shape->piece_dims[i] * bytes; /* one row after all */
            continue;
        }
        f.rows[f.n_kinds] = u->keys[i];
        f.bytes[f.n_kinds++] = shape->piece_dims[i] * bytes;
    }
    if (u->values != u->keys[0]) {
        f.rows[f.n_kinds] = u->values;
        f.bytes[f.n_kinds++] = shape->value_dims * bytes;
    }
    for (int32_t i = 0; i < f.n_kinds; i++)
        lines += lines_of(f.bytes[i]);
    steps = mlai_max_i64(steps, 1);
    /* Steps that end where rows end branch alike. */
    f.step_lines = (int32_t)((lines * (f.end - f.key) + steps - 1) / steps);
    while (f.n_kinds == 1 && f.step_lines < lines && lines % f.step_lines != 0)
        f.step_lines++;
    return f;
}

MLAI_INLINE void feed_step(feed *f)
{
    if (f->key >= f->end)
        return;
    const char *row = f->rows[f->kind][f->key];
    int64_t end = mlai_min_i64(f->at + (int64_t)f->step_lines * 64, f->bytes[f->kind]);
    for (; f->at < end; f->at += 64)
        _mm_prefetch(row + f->at, _MM_HINT_T1);
    if (f->at < f->bytes[f->kind])
        return;
    f->at = 0;
    if (++f->kind == f->n_kinds) {
        f->kind = 0;
        f->key++;
    }
}

#endif
