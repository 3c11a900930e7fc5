/*
 * Values: two key rows interleave to pairs (k0 k1) of a column, low and high half of each 128-bit
 * lane, so 32 columns c come as  lo = 0-3 8-11 16-19 24-27,  hi = 4-7 12-15 20-23 28-31; o keeps
 * that order, finish undoes it. One chain over the pairs of keys.
 *
 *   up to 16 rows  interleaved in registers, once for each tile of columns;
 *                  tile: 16 rows x 16 columns (8 x 32, 4 x 64)
 *   more rows      from panels [pair of keys][64][2] of 64 columns, filled before or by the first
 *                  tile of rows; tile: 6 rows x 64 columns
 */
#ifndef MLAI_DOT_VALUES_H
#define MLAI_DOT_VALUES_H

#include "cpu/kernels/dot_unit.h"
#include "cpu/kernels/row_feed.h"

enum { O_ROWS = 6 };

/* Columns column..column + width - 1 of pairs of key rows first..end-1 into a panel. */
static void interleave_panel(uint32_t *panel, const void *const *values, int32_t first, int32_t end,
                             int64_t column, int64_t width)
{
    for (int32_t pair = first; pair < end; pair++) {
        const uint16_t *v0 = (const uint16_t *)values[2 * pair] + column;
        const uint16_t *v1 = (const uint16_t *)values[2 * pair + 1] + column;
        uint32_t *out = panel + pair * width;
        for (int64_t at = 0; at < width; at += CHUNK) {
            __m512i x0 = _mm512_loadu_si512(v0 + at), x1 = _mm512_loadu_si512(v1 + at);
            _mm512_storeu_si512(out + at, _mm512_unpacklo_epi16(x0, x1));
            _mm512_storeu_si512(out + at + V_LANES, _mm512_unpackhi_epi16(x0, x1));
        }
    }
}

/* All of the values, panel after panel, a row at a time. */
static void interleave_values(const mlai_unit *u, const scratch *s, const void *const *values)
{
    int64_t columns = padded(u->shape->value_dims);
    for (int32_t pair = 0; pair < (u->n_keys + 1) / 2; pair++) {
        for (int64_t column = 0; column < columns; column += PANEL) {
            int64_t width = columns - column < PANEL ? columns - column : PANEL;
            interleave_panel(s->panels + column * PAIRS, values, pair, pair + 1, column, width);
        }
    }
}

/* Pairs of keys between two askings for memory: for half a row or so at a time. */
MLAI_INLINE int32_t step_pairs(int32_t n_vecs)
{
    return n_vecs == PANEL_VECS ? 4 : 16;
}

/* acc += p x values of `count` pairs of keys, from `pair` on; see value_tile. */
MLAI_INLINE void value_pairs(const int32_t count, const int32_t n_rows, const int32_t n_vecs,
                             const bool has_panel, const bool has_rows, vec acc[V_LANES][4],
                             uint32_t *panel, const void *const *values, int64_t from, bool is_high,
                             const uint32_t *p, int32_t pair)
{
    MLAI_UNROLL
    for (int32_t j = pair; j < pair + count; j++) {
        __m512i x[4];
        if (!has_rows) {
            MLAI_UNROLL
            for (int32_t i = 0; i < n_vecs; i++)
                x[i] = _mm512_loadu_si512(panel + (j * n_vecs + i) * V_LANES);
        } else {
            const uint16_t *v0 = (const uint16_t *)values[2 * j] + from;
            const uint16_t *v1 = (const uint16_t *)values[2 * j + 1] + from;
            MLAI_UNROLL
            for (int32_t i = 0; i < n_vecs; i += 2) {
                __m512i x0 = _mm512_loadu_si512(v0 + i * V_LANES);
                __m512i x1 = _mm512_loadu_si512(v1 + i * V_LANES);
                if (n_vecs == 1) {
                    x[0] = is_high ? _mm512_unpackhi_epi16(x0, x1) : _mm512_unpacklo_epi16(x0, x1);
                } else {
                    x[i] = _mm512_unpacklo_epi16(x0, x1);
                    x[i + 1] = _mm512_unpackhi_epi16(x0, x1);
                }
            }
            MLAI_UNROLL
            for (int32_t i = 0; has_panel && i < n_vecs; i++)
                _mm512_storeu_si512(panel + (j * n_vecs + i) * V_LANES, x[i]);
        }
        MLAI_UNROLL
        for (int32_t r = 0; r < n_rows; r++) {
            __m512i w = pair_at(p + j * V_LANES + r);
            MLAI_UNROLL
            for (int32_t i = 0; i < n_vecs; i++)
                acc[r][i] = dot(acc[r][i], x[i], w);
        }
    }
}

/*
 * n_rows rows of one vector x n_vecs vectors of columns; p points at the first row's probabilities.
 * The values are those of the panel, or interleave from rows: a half of a chunk (n_vecs 1), a chunk
 * (2) or two (4), and then fill the panel, if there is one.
 */
MLAI_INLINE void value_tile(const int32_t n_rows, const int32_t n_vecs, const bool has_panel,
                            const bool has_rows, const mlai_unit *u, const scratch *s,
                            uint32_t *panel, const void *const *values, const uint32_t *p,
                            int32_t n_pairs, int32_t row, int64_t column, feed *ahead)
{
    vec acc[V_LANES][4];
    bool is_high = column % CHUNK != 0;
    int64_t from = column / CHUNK * CHUNK, stride = o_stride(u->shape);
    MLAI_UNROLL
    for (int32_t r = 0; r < n_rows; r++) {
        MLAI_UNROLL
        for (int32_t i = 0; i < n_vecs; i++) {
            acc[r][i] = v_set1(0.0f);
            if (has_panel)
                _mm_prefetch((const char *)(u->acc.o + (row + r) * stride + column + i * V_LANES),
                             _MM_HINT_T0);
        }
    }
    int32_t pair = 0;
    if (!has_panel) {
        const int32_t step = step_pairs(n_vecs);
        for (; pair + step <= n_pairs; pair += step) {
            feed_step(ahead);
            value_pairs(step, n_rows, n_vecs, has_panel, has_rows, acc, panel, values, from,
                        is_high, p, pair);
        }
    }
    for (; pair < n_pairs; pair++)
        value_pairs(1, n_rows, n_vecs, has_panel, has_rows, acc, panel, values, from, is_high, p,
                    pair);
    MLAI_UNROLL
    for (int32_t r = 0; r < n_rows; r++)
        fold_row(n_vecs, u, s->a, s->b, row + r, column, acc[r]);
}

/* P for a column: ds656 has one for each tile of columns. */
static const uint32_t *p_of_column(const mlai_unit *u, const scratch *s, int64_t column)
{
    int64_t tile = column / MLAI_DS656_TILE;
    if (s->tiles == 1)
        return s->p;
    return s->p + (is_dealt(u, s) ? tile * (V_LANES / MLAI_DS656_TILES) : tile * s->p_rows * PAIRS);
}

static int32_t pairs_seen(const mlai_unit *u, int32_t row, int32_t n_rows)
{
    return (keys_seen(u, row, n_rows) + 1) / 2;
}

/* n_rows rows of one vector x one panel of n_vecs vectors, which is filled on the way when there
 * are values. */
static void panel_rows(const mlai_unit *u, const scratch *s, uint32_t *panel,
                       const void *const *values, int32_t n_vecs, const uint32_t *p,
                       int32_t n_pairs, int32_t row, int32_t n_rows, int64_t column)
{
    if (values && n_rows == O_ROWS && n_vecs == PANEL_VECS) {
        value_tile(O_ROWS, PANEL_VECS, true, true, u, s, panel, values, p, n_pairs, row, column,
                   NULL);
        return;
    }
    if (values)
        interleave_panel(panel, values, 0, n_pairs, column, n_vecs * V_LANES);
#define PANEL_CASE(rows)                                                                           \
    case rows:                                                                                     \
        if (n_vecs == PANEL_VECS)                                                                  \
            value_tile(rows, PANEL_VECS, true, false, u, s, panel, NULL, p, n_pairs, row, column,  \
                       NULL);                                                                      \
        else                                                                                       \
            value_tile(rows, 2, true, false, u, s, panel, NULL, p, n_pairs, row, column, NULL);    \
        break;
    switch (n_rows) {
        PANEL_CASE(1)
        PANEL_CASE(2)
        PANEL_CASE(3)
        PANEL_CASE(4)
        PANEL_CASE(5)
        PANEL_CASE(6)
    default:
        break;
    }
#undef PANEL_CASE
}

/* More than 16 rows: out of panels, which the first tile of rows fills from `values` or which are
 * filled already (values is NULL). */
static void values_from_panels(const mlai_unit *u, const scratch *s, const void *const *values,
                               int32_t first, int32_t end)
{
    int64_t columns = padded(u->shape->value_dims);
    int32_t most = pairs_seen(u, first, end - first);
    for (int64_t column = 0; column < columns; column += PANEL) {
        const uint32_t *p = p_of_column(u, s, column);
        int32_t n_vecs = columns - column < PANEL ? 2 : PANEL_VECS;
        uint32_t *panel = s->panels + (values ? 0 : column * PAIRS);
        /* 16 rows of a vector in tiles of 6, 6 and 4. */
        for (int32_t row = first, n_rows; row < end; row += n_rows) {
            int32_t lane = row % V_LANES;
            n_rows = lane + O_ROWS < V_LANES ? O_ROWS : V_LANES - lane;
            n_rows = end - row < n_rows ? end - row : n_rows;
            int32_t n_pairs = pairs_seen(u, row, n_rows);
            if (n_pairs > 0 || u->is_first)
                panel_rows(u, s, panel, row == first ? values : NULL, n_vecs,
                           p + (row - lane - first) * PAIRS + lane, n_pairs, row, n_rows, column);
            if (row == first && values)
                interleave_panel(panel, values, n_pairs, most, column, n_vecs * V_LANES);
        }
    }
}

/* Up to 16 rows straight from the key rows. */
static void values_direct(const mlai_unit *u, const scratch *s, const void *const *values)
{
    int64_t columns = padded(u->shape->value_dims);
    int32_t n_pairs = pairs_seen(u, 0, u->n_rows);
    int32_t n_vecs = u->n_rows <= 4 ? 4 : u->n_rows <= 8 ? 2 : 1;
    int64_t steps = columns / (n_vecs * V_LANES) * mlai_ceil_div(n_pairs, step_pairs(n_vecs));
    feed ahead = start_feed(u, 1, 2, steps);
    for (int64_t column = 0; column < columns;) {
        const uint32_t *p = p_of_column(u, s, column);
        int32_t vecs = columns - column < n_vecs * V_LANES ? 2 : n_vecs;
#define DIRECT_CASE(rows, vectors)                                                                 \
    case rows:                                                                                     \
        if (vecs == (vectors))                                                                     \
            value_tile(rows, vectors, false, true, u, s, NULL, values, p, n_pairs, 0, column,      \
                       &ahead);                                                                    \
        else                                                                                       \
            value_tile(rows, 2, false, true, u, s, NULL, values, p, n_pairs, 0, column, &ahead);   \
        break;
        switch (u->n_rows) {
            DIRECT_CASE(1, 4)
            DIRECT_CASE(2, 4)
            DIRECT_CASE(3, 4)
            DIRECT_CASE(4, 4)
            DIRECT_CASE(5, 2)
            DIRECT_CASE(6, 2)
            DIRECT_CASE(7, 2)
            DIRECT_CASE(8, 2)
#undef DIRECT_CASE
#define DIRECT_CASE(rows)                                                                          \
    case rows:                                                                                     \
        value_tile(rows, 1, false, true, u, s, NULL, values, p, n_pairs, 0, column, &ahead);       \
        break;
            DIRECT_CASE(9)
            DIRECT_CASE(10)
            DIRECT_CASE(11)
            DIRECT_CASE(12)
            DIRECT_CASE(13)
            DIRECT_CASE(14)
            DIRECT_CASE(15)
            DIRECT_CASE(16)
#undef DIRECT_CASE
        default:
            break;
        }
        column += (int64_t)vecs * V_LANES;
    }
}

#endif
