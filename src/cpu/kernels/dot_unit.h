/*
 * What the parts of the bf16 dot kernel share (attention_bf16.c): the product, tile sizes, scratch.
 */
#ifndef MLAI_DOT_UNIT_H
#define MLAI_DOT_UNIT_H

#include "cpu/kernels/bf16_rows.h"

enum {
    G_VECS = 4,
    GROUP = G_VECS * V_LANES, /* rows whose scores are alive together */
    LINE_PAIRS = 16,          /* pairs of dims in a cache line */
    NARROW_STEP = 4,          /* is_narrow: chunks of dims between two askings for memory */
    PANEL_VECS = 4,
    PANEL = PANEL_VECS * V_LANES /* columns */
};

MLAI_INLINE vec dot(vec acc, __m512i a, __m512i b)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}

MLAI_INLINE __m512i pair_at(const void *p)
{
    int32_t x;
    memcpy(&x, p, sizeof x);
    return _mm512_set1_epi32(x);
}

static int64_t pairs_of(const mlai_attention_shape *shape)
{
    int64_t n = 0;
    for (int32_t i = 0; i < shape->n_pieces; i++)
        n += (shape->piece_dims[i] + 1) / 2;
    return n;
}

typedef struct scratch {
    float *scores;    /* [MLAI_UNIT_KEYS][up to GROUP] */
    uint32_t *p;      /* [tiles][p_rows / V_LANES][PAIRS][V_LANES] */
    float *a;         /* [MLAI_BLOCK_ROWS] factor of the accumulator in the fold */
    float *b;         /* [MLAI_BLOCK_ROWS] factor of the unit */
    uint32_t *panels; /* [columns / PANEL][PAIRS][PANEL] interleaved values */
    float *scales;    /* of copies */
    bf16_copies copies;
    int32_t tiles;  /* P's versions: 4 for ds656, else 1 */
    int32_t p_rows; /* whose P is alive together, so that it stays in the second-level cache */
} scratch;

static scratch cut_scratch(const mlai_attention_shape *shape, char *base, char **end)
{
    scratch s;
    char *at = base;
    s.tiles = shape->kv_format == MLA_FORMAT_DS656 ? MLAI_DS656_TILES : 1;
    s.p_rows = s.tiles > 1 ? MLAI_BLOCK_ROWS / 2 : MLAI_BLOCK_ROWS;
    s.scores = (float *)carve(&at, (uint64_t)MLAI_UNIT_KEYS * GROUP * sizeof(float));
    s.p = (uint32_t *)carve(&at, (uint64_t)(s.tiles * s.p_rows) * PAIRS * sizeof(uint32_t));
    s.a = (float *)carve(&at, MLAI_BLOCK_ROWS * sizeof(float));
    s.b = (float *)carve(&at, MLAI_BLOCK_ROWS * sizeof(float));
    s.panels =
        (uint32_t *)carve(&at, (uint64_t)padded(shape->value_dims) * PAIRS * sizeof(uint32_t));
    s.copies = cut_copies(shape, &at);
    s.scales = s.copies.scales;
    *end = at;
    return s;
}

static uint64_t scratch_bytes(const mlai_attention_shape *shape, int32_t n_rows)
{
    (void)n_rows;
    char *end;
    cut_scratch(shape, NULL, &end);
    return (uint64_t)(uintptr_t)end;
}

/* Keys that some of rows row..row+n_rows-1 sees. */
static int32_t keys_seen(const mlai_unit *u, int32_t row, int32_t n_rows)
{
    int32_t seen = 0;
    for (int32_t r = row; r < row + n_rows; r++)
        seen = u->visible[r] > seen ? u->visible[r] : seen;
    return seen < u->n_keys ? seen : u->n_keys;
}

#endif
