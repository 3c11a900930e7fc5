/*
 * Attention of one unit of keys against one block of query rows with the bf16 dot product: q bf16
 * (or fp8, exact in bf16), cache bf16 or fp8 (exact) or ds656. Products of pairs in f32
 * accumulators, both for the scores and for the values; probabilities are rounded to bf16, their
 * sum is not. Called by the drivers through mlai_attention_kernel. The parts:
 *
 *   dot_queries.h             Q packed, once a block
 *   dot_scores.h, dot_narrow.h   q x keys -> scores [key][rows]
 *   dot_softmax.h             scores -> P, and (m, l)
 *   dot_values.h              P x values, folded into o
 *   row_feed.h                rows of the unit that comes next are asked for meanwhile
 *
 * Explicit keys and values (prefill) lie far apart, often a power of two, and drive each other out
 * of the few cache sets that they share. Where several blocks of rows come to a unit it is packed
 * once: keys one after the other, values interleaved. Else values are interleaved first, row by
 * row.
 *
 * The instruction flushes subnormals and rounds to nearest inside. Limits: dims of a piece that is
 * odd and values that are no multiple of 32 columns are copied to scratch and padded.
 */
#include "cpu/kernels/dot_narrow.h"
#include "cpu/kernels/dot_queries.h"
#include "cpu/kernels/dot_scores.h"
#include "cpu/kernels/dot_softmax.h"
#include "cpu/kernels/dot_values.h"

enum { DIRECT_ROWS = 16 }; /* blocks of up to that many rows interleave in registers */

/* ---- packed units --------------------------------------------------------------------------- */

/* Keys as rows of one stride, values interleaved: [pointers of each piece][rows][panels]. */
typedef struct packed {
    const void **keys; /* [MLAI_TILE_POINTERS] */
    uint16_t *rows;    /* [MLAI_UNIT_KEYS + 1][row_halfs], the last one zeros */
    int64_t row_halfs;
    uint32_t *panels;
} packed;

static packed cut_packed(const mlai_attention_shape *shape, char *base, uint64_t *bytes)
{
    packed p;
    char *at = base;
    p.row_halfs = padded(shape->piece_dims[0]);
    p.keys = (const void **)carve(&at, MLAI_TILE_POINTERS * sizeof(void *));
    p.rows =
        (uint16_t *)carve(&at, (uint64_t)((MLAI_UNIT_KEYS + 1) * p.row_halfs) * sizeof(uint16_t));
    p.panels =
        (uint32_t *)carve(&at, (uint64_t)padded(shape->value_dims) * PAIRS * sizeof(uint32_t));
    *bytes = (uint64_t)(at - base);
    return p;
}

static uint64_t packed_bytes(const mlai_attention_shape *shape)
{
    uint64_t bytes = 0;
    if (shape->n_pieces == 1)
        cut_packed(shape, NULL, &bytes);
    return bytes;
}

/* Whether all of n_pairs pairs of values are finite: no exponent is all ones. */
static bool are_panels_finite(const uint32_t *panels, int64_t columns, int32_t n_pairs)
{
    const __m512i top = _mm512_set1_epi16(0x7f80);
    __mmask32 bad = 0;
    for (int64_t column = 0; column < columns; column += PANEL) {
        int64_t width = columns - column < PANEL ? columns - column : PANEL;
        for (int64_t at = 0; at < n_pairs * width; at += V_LANES) {
            __m512i x = _mm512_loadu_si512(panels + column * PAIRS + at);
            bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, top), top);
        }
    }
    return bad == 0;
}

static bool pack_unit(const mlai_unit *u, void *base)
{
    char *end;
    uint64_t bytes;
    const mlai_attention_shape *shape = u->shape;
    scratch s = cut_scratch(shape, u->scratch, &end);
    packed p = cut_packed(shape, base, &bytes);
    bf16_rows rows = take_rows(u, &s.copies, 2);
    for (int32_t key = 0; key < MLAI_TILE_POINTERS; key++) {
        int32_t row = key < u->n_keys ? key : MLAI_UNIT_KEYS;
        p.keys[key] = p.rows + row * p.row_halfs;
    }
    for (int32_t key = 0; key < u->n_keys; key++) {
        for (int64_t at = 0; at < p.row_halfs; at += CHUNK)
            _mm_prefetch((const uint16_t *)rows.keys[0][key + COPY_AHEAD] + at, _MM_HINT_T0);
        copy_bf16_row(p.rows + key * p.row_halfs, rows.keys[0][key], shape->piece_dims[0]);
    }
    memset(p.rows + MLAI_UNIT_KEYS * p.row_halfs, 0, (size_t)p.row_halfs * sizeof *p.rows);
    s.panels = p.panels;
    interleave_values(u, &s, rows.values);
    return are_panels_finite(p.panels, padded(shape->value_dims), (u->n_keys + 1) / 2);
}

/* ---- the unit ------------------------------------------------------------------------------- */

/* Steps of a feed in the scores of a unit, about. */
static int64_t score_steps(const mlai_unit *u)
{
    const mlai_attention_shape *shape = u->shape;
    int64_t chunks = padded_dims(shape) / CHUNK;
    if (shape->is_narrow)
        return chunks / NARROW_STEP * (u->n_keys / 4 + 1) * (u->n_rows < 4 ? 1 : u->n_rows / 4);
    return chunks * (u->n_keys / S_KEYS + 1) * ((u->n_rows + GROUP - 1) / GROUP);
}

/* P of rows first..end-1, the first row's at the front. */
static void scores_to_p(const mlai_unit *u, const scratch *s, const bf16_rows *rows, int32_t first,
                        int32_t end, feed *ahead)
{
    int64_t pairs = pairs_of(u->shape);
    int32_t group = u->shape->is_narrow ? V_LANES : GROUP;
    for (int32_t row = first; row < end; row += group) {
        /* A group's and a vector's own bounds, so that a causal block skips what lies above its
         * diagonal. */
        int32_t n_rows = end - row < group ? end - row : group;
        int32_t n_vecs = (n_rows + V_LANES - 1) / V_LANES, n_keys = keys_seen(u, row, n_rows);
        if (n_keys == 0 && !u->is_first)
            continue;
        if (u->shape->is_narrow)
            score_narrow(u, s, rows, row, n_keys, ahead);
        else
            score_group(u, s, rows, (const uint32_t *)u->q + row * pairs, row, n_vecs, n_keys,
                        ahead);
        for (int32_t i = 0; i < n_vecs; i++) {
            int32_t at = row + i * V_LANES, n = end - at < V_LANES ? end - at : V_LANES;
            softmax_rows(u, s, s->scores + i * V_LANES, n_vecs * V_LANES,
                         s->p + (int64_t)(at - first) * PAIRS, at, keys_seen(u, at, n));
        }
    }
}

static void unit(const mlai_unit *u)
{
    char *end;
    scratch s = cut_scratch(u->shape, u->scratch, &end);
    bool is_direct = !u->packed && u->n_rows <= DIRECT_ROWS, is_shared = u->values == u->keys[0];
    bf16_rows rows;
    if (u->packed) {
        uint64_t bytes;
        packed p = cut_packed(u->shape, (char *)(uintptr_t)u->packed, &bytes);
        rows = (bf16_rows){{p.keys}, NULL};
        s.panels = p.panels;
        is_shared = false;
    } else {
        rows = take_rows(u, &s.copies, u->shape->is_narrow ? CHUNK : 2);
    }
    feed ahead = start_feed(u, 0, is_direct ? 2 : 1, score_steps(u));
    if (is_direct) {
        scores_to_p(u, &s, &rows, 0, u->n_rows, &ahead);
        values_direct(u, &s, rows.values);
        return;
    }
    if (!is_shared && !u->packed)
        interleave_values(u, &s, rows.values);
    for (int32_t first = 0; first < u->n_rows; first += s.p_rows) {
        int32_t last = u->n_rows - first < s.p_rows ? u->n_rows : first + s.p_rows;
        scores_to_p(u, &s, &rows, first, last, is_shared || u->packed ? &ahead : NULL);
        values_from_panels(u, &s, is_shared ? rows.values : NULL, first, last);
    }
}

const mlai_attention_kernel mlai_attention_bf16_avx512_bf16 = {
    .name = "attention_bf16_avx512_bf16",
    .lanes = V_LANES,
    .o_stride = o_stride,
    .q_bytes = q_bytes,
    .scratch_bytes = scratch_bytes,
    .packed_bytes = packed_bytes,
    .pack_q = pack_q,
    .pack_unit = pack_unit,
    .unit = unit,
    .fold = fold_triples,
    .finish = finish,
};
