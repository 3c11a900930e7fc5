/*
 * Attention of one unit of keys against one block of query rows with the bf16 dot product: q bf16
 * (or fp8, exact in bf16), cache bf16 or fp8 (exact) or ds656. Products of pairs in f32
 * accumulators, both for the scores and for the values; probabilities are rounded to bf16, their
 * sum is not. Called by the drivers through mlai_attention_kernel.
 *
 * Rows lie in lanes. Nothing of K is packed: a pair of dims of a key is four bytes of its row,
 * which the instruction takes as a broadcast operand:
 *
 *   Q packed [pair of dims][rows]        key row: bf16 d0 d1 | d2 d3 | ...
 *     zmm: r0(d0 d1) r1(d0 d1) ...  x      broadcast (d0 d1)             -> scores [key][rows] f32
 *   tile: up to 4 vectors of rows x 6 keys, one chain over the pairs of dims
 *
 *   softmax [key][rows] -> P packed [pair of keys][rows]: r0(k0 k1) r1(k0 k1) ...
 *
 *   V: two key rows interleave to pairs (k0 k1) of a column: low and high half of each 128-bit
 * lane, so 32 columns c come as  lo = 0-3 8-11 16-19 24-27,  hi = 4-7 12-15 20-23 28-31; o keeps
 * that order, finish undoes it. up to 16 rows: interleaved in registers, once for each tile of
 * columns more rows:     interleaved once a unit into panels [64 columns][pair of keys][64][2] (L1)
 *   tile: 6 rows x 4 vectors of columns (or 16 x 1), one chain over the pairs of keys
 *
 * ds656: the scores of each 128 dims are summed apart and then multiplied by the key's scale of
 * that tile; for the values the scale goes into P (one packed P a tile), so that only P is rounded.
 *
 * is_narrow (few heads): Q packed [row][dims], key rows loaded as vectors of 32 dims, one sum a
 * lane, lanes added at the end; tile: 4 rows x 4 keys.
 *
 * The instruction flushes subnormals and rounds to nearest inside. Limits: dims of a piece that is
 * odd and values that are no multiple of 32 columns are copied to scratch and padded.
 */
#include "cpu/kernels/bf16_rows.h"

enum {
    G_VECS = 4,
    GROUP = G_VECS * V_LANES,
    O_ROWS = 6,
    O_VECS = 4,
    PANEL = O_VECS * V_LANES, /* columns */
    DIRECT_ROWS = 16,         /* blocks of up to that many rows interleave in registers */
    LINE_PAIRS = 16           /* pairs of dims in a cache line */
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

static uint64_t q_bytes(const mlai_attention_shape *shape, int32_t n_rows)
{
    uint64_t rows = (uint64_t)(n_rows + V_LANES - 1) / V_LANES * V_LANES;
    uint64_t pairs = (uint64_t)(shape->is_narrow ? padded_dims(shape) / 2 : pairs_of(shape));
    return rows * pairs * sizeof(uint32_t);
}

/* ---- scratch -------------------------------------------------------------------------------- */

typedef struct scratch {
    float *scores;    /* [MLAI_UNIT_KEYS][GROUP] */
    uint32_t *p;      /* [tiles][PAIRS][GROUP] */
    float *a;         /* [MLAI_BLOCK_ROWS] factor of the accumulator in the fold */
    float *b;         /* [MLAI_BLOCK_ROWS] factor of the unit */
    float *scales;    /* of copies */
    uint32_t *panels; /* interleaved values */
    bf16_copies copies;
    int32_t tiles; /* P's versions: 4 for ds656, else 1 */
} scratch;

static scratch cut_scratch(const mlai_attention_shape *shape, char *base, char **end)
{
    scratch s;
    char *at = base;
    uint64_t columns = (uint64_t)padded(shape->value_dims);
    s.tiles = shape->kv_format == MLA_FORMAT_DS656 ? MLAI_DS656_TILES : 1;
    s.scores = (float *)carve(&at, (uint64_t)MLAI_UNIT_KEYS * GROUP * sizeof(float));
    s.p = (uint32_t *)carve(&at, (uint64_t)s.tiles * PAIRS * GROUP * sizeof(uint32_t));
    s.a = (float *)carve(&at, MLAI_BLOCK_ROWS * sizeof(float));
    s.b = (float *)carve(&at, MLAI_BLOCK_ROWS * sizeof(float));
    s.panels = (uint32_t *)carve(&at, columns * PAIRS * sizeof(uint32_t));
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

/* ---- queries -------------------------------------------------------------------------------- */

/* [row][padded dims] */
static void pack_q_narrow(const mlai_attention_shape *shape, uint16_t *q,
                          const void *const *const rows[], int32_t n_rows)
{
    for (int32_t row = 0; row < n_rows; row++) {
        for (int32_t piece = 0; piece < shape->n_pieces; piece++) {
            int64_t n = shape->piece_dims[piece], width = padded(n);
            row_to_bf16(q, rows[piece][row], shape->q_format, (int32_t)n);
            memset(q + n, 0, (size_t)(width - n) * sizeof *q);
            q += width;
        }
    }
}

static void pack_q(const mlai_attention_shape *shape, void *q, const void *const *const rows[],
                   int32_t n_rows)
{
    if (shape->is_narrow) {
        pack_q_narrow(shape, q, rows, n_rows);
        return;
    }
    enum { PART = 64 };
    uint16_t part[PART];
    int64_t pairs = pairs_of(shape);
    int32_t n_vecs = (n_rows + V_LANES - 1) / V_LANES;
    int32_t bytes = mla_format_bytes(shape->q_format);
    for (int32_t first = 0; first < n_rows; first += GROUP) {
        int32_t vecs = n_vecs - first / V_LANES;
        int64_t width = (vecs < G_VECS ? vecs : G_VECS) * V_LANES;
        uint32_t *group = (uint32_t *)q + (int64_t)first * pairs;
        for (int64_t lane = 0; lane < width; lane++) {
            uint32_t *out = group + lane;
            if (first + lane >= n_rows) {
                for (int64_t i = 0; i < pairs; i++)
                    out[i * width] = 0;
                continue;
            }
            for (int32_t piece = 0; piece < shape->n_pieces; piece++) {
                const char *in = rows[piece][first + lane];
                int32_t n = shape->piece_dims[piece];
                for (int32_t d = 0; d < n; d += PART) {
                    int32_t m = n - d < PART ? n - d : PART;
                    row_to_bf16(part, in + (int64_t)d * bytes, shape->q_format, m);
                    if (m & 1)
                        part[m] = 0;
                    for (int32_t i = 0; i < m; i += 2) {
                        memcpy(out, part + i, sizeof *out);
                        out += width;
                    }
                }
            }
        }
    }
}

/* ---- scores --------------------------------------------------------------------------------- */

typedef struct tile_of_scores {
    vec acc[12][G_VECS];
} tile_of_scores;

/* acc += q x keys over n_pairs pairs that start `byte` bytes into the rows. */
MLAI_INLINE void score_pairs(const int32_t n_vecs, const int32_t n_keys, tile_of_scores *t,
                             const void *const *keys, int64_t byte, int64_t n_pairs,
                             const uint32_t *q)
{
    const char *k[12];
    MLAI_UNROLL
    for (int32_t j = 0; j < n_keys; j++)
        k[j] = (const char *)keys[j] + byte;
    /* A cache line of each key at a time, and the same line of the tile that comes next. */
    for (int64_t line = 0; line < n_pairs; line += LINE_PAIRS) {
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++)
            _mm_prefetch((const char *)keys[n_keys + j] + byte + 4 * line, _MM_HINT_T0);
        int64_t end = line + LINE_PAIRS < n_pairs ? line + LINE_PAIRS : n_pairs;
        for (int64_t i = line; i < end; i++) {
            __m512i row[G_VECS];
            MLAI_UNROLL
            for (int32_t v = 0; v < n_vecs; v++)
                row[v] = _mm512_loadu_si512(q + v * V_LANES);
            MLAI_UNROLL
            for (int32_t j = 0; j < n_keys; j++) {
                __m512i x = pair_at(k[j] + 4 * i);
                MLAI_UNROLL
                for (int32_t v = 0; v < n_vecs; v++)
                    t->acc[j][v] = dot(t->acc[j][v], row[v], x);
            }
            q += n_vecs * V_LANES;
        }
    }
}

MLAI_INLINE void clear_tile(const int32_t n_vecs, const int32_t n_keys, tile_of_scores *t)
{
    MLAI_UNROLL
    for (int32_t j = 0; j < n_keys; j++) {
        MLAI_UNROLL
        for (int32_t v = 0; v < n_vecs; v++)
            t->acc[j][v] = v_set1(0.0f);
    }
}

MLAI_INLINE void score_tile(const int32_t n_vecs, const int32_t n_keys, const mlai_unit *u,
                            const scratch *s, const bf16_rows *rows, const uint32_t *q, int32_t key)
{
    tile_of_scores t;
    float *scores = s->scores + (int64_t)key * n_vecs * V_LANES;
    clear_tile(n_vecs, n_keys, &t);
    if (s->tiles == 1) {
        for (int32_t piece = 0; piece < u->shape->n_pieces; piece++) {
            int64_t n = (u->shape->piece_dims[piece] + 1) / 2;
            score_pairs(n_vecs, n_keys, &t, rows->keys[piece] + key, 0, n, q);
            q += n * n_vecs * V_LANES;
        }
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++) {
            MLAI_UNROLL
            for (int32_t v = 0; v < n_vecs; v++)
                v_store(scores + (j * n_vecs + v) * V_LANES, t.acc[j][v]);
        }
        return;
    }
    /* ds656: rope first, then each tile of 128 dims times its scale. */
    int64_t tile_pairs = MLAI_DS656_TILE / 2, step = tile_pairs * n_vecs * V_LANES;
    score_pairs(n_vecs, n_keys, &t, rows->keys[1] + key, 0, u->shape->piece_dims[1] / 2,
                q + MLAI_DS656_TILES * step);
    for (int32_t tile = 0; tile <= MLAI_DS656_TILES; tile++) {
        const float *scales = s->scales + (int64_t)key * MLAI_DS656_TILES + tile - 1;
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++) {
            MLAI_UNROLL
            for (int32_t v = 0; v < n_vecs; v++) {
                float *at = scores + (j * n_vecs + v) * V_LANES;
                v_store(at, tile == 0 ? t.acc[j][v]
                                      : v_fma(t.acc[j][v], v_set1(scales[j * MLAI_DS656_TILES]),
                                              v_load(at)));
            }
        }
        if (tile == MLAI_DS656_TILES)
            break;
        clear_tile(n_vecs, n_keys, &t);
        score_pairs(n_vecs, n_keys, &t, rows->keys[0] + key, tile * MLAI_DS656_TILE * 2, tile_pairs,
                    q + tile * step);
    }
}

MLAI_INLINE void score_keys(const int32_t n_vecs, const int32_t tile, const mlai_unit *u,
                            const scratch *s, const bf16_rows *rows, const uint32_t *q,
                            int32_t n_keys)
{
    int32_t key = 0;
    for (; key + tile <= n_keys; key += tile)
        score_tile(n_vecs, tile, u, s, rows, q, key);
    for (; key < n_keys; key += 2)
        score_tile(n_vecs, 2, u, s, rows, q, key);
}

static void score_group(const mlai_unit *u, const scratch *s, const bf16_rows *rows,
                        const uint32_t *q, int32_t n_vecs, int32_t n_keys)
{
    n_keys += n_keys & 1;
    switch (n_vecs) {
    case 4:
        score_keys(4, 6, u, s, rows, q, n_keys);
        break;
    case 3:
        score_keys(3, 8, u, s, rows, q, n_keys);
        break;
    case 2:
        score_keys(2, 12, u, s, rows, q, n_keys);
        break;
    default:
        score_keys(1, 12, u, s, rows, q, n_keys);
    }
}

/* acc[row][key] += q x keys with dims in lanes; q points at the first row's dims. */
MLAI_INLINE void narrow_dims(const int32_t n_rows, const int32_t n_keys, vec acc[4][8],
                             const void *const *keys, int64_t first, int64_t n, const uint16_t *q,
                             int64_t q_stride)
{
    for (int64_t d = 0; d < n; d += CHUNK) {
        __m512i x[8];
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++) {
            x[j] = _mm512_loadu_si512((const uint16_t *)keys[j] + first + d);
            _mm_prefetch((const char *)((const uint16_t *)keys[n_keys + j] + first + d),
                         _MM_HINT_T0);
        }
        MLAI_UNROLL
        for (int32_t r = 0; r < n_rows; r++) {
            __m512i row = _mm512_loadu_si512(q + r * q_stride + d);
            MLAI_UNROLL
            for (int32_t j = 0; j < n_keys; j++)
                acc[r][j] = dot(acc[r][j], row, x[j]);
        }
    }
}

/* Scores of n_rows rows (lanes lane.. of a group) and n_keys keys. */
MLAI_INLINE void narrow_tile(const int32_t n_rows, const int32_t n_keys, const mlai_unit *u,
                             const scratch *s, const bf16_rows *rows, const uint16_t *q,
                             int32_t key, float *scores, int64_t stride)
{
    vec acc[4][8], sum[4][8];
    int64_t q_stride = padded_dims(u->shape);
    MLAI_UNROLL
    for (int32_t r = 0; r < 4; r++) {
        MLAI_UNROLL
        for (int32_t j = 0; j < 8; j++)
            acc[r][j] = sum[r][j] = v_set1(0.0f);
    }
    if (s->tiles == 1) {
        int64_t at = 0;
        for (int32_t piece = 0; piece < u->shape->n_pieces; piece++) {
            int64_t n = padded(u->shape->piece_dims[piece]);
            narrow_dims(n_rows, n_keys, acc, rows->keys[piece] + key, 0, n, q + at, q_stride);
            at += n;
        }
    } else {
        narrow_dims(n_rows, n_keys, acc, rows->keys[1] + key, 0, padded(u->shape->piece_dims[1]),
                    q + MLAI_DS656_TILES * MLAI_DS656_TILE, q_stride);
        for (int32_t tile = 0; tile < MLAI_DS656_TILES; tile++) {
            const float *scales = s->scales + (int64_t)key * MLAI_DS656_TILES + tile;
            MLAI_UNROLL
            for (int32_t r = 0; r < n_rows; r++) {
                MLAI_UNROLL
                for (int32_t j = 0; j < n_keys; j++) {
                    sum[r][j] = acc[r][j];
                    acc[r][j] = v_set1(0.0f);
                }
            }
            narrow_dims(n_rows, n_keys, acc, rows->keys[0] + key, tile * MLAI_DS656_TILE,
                        MLAI_DS656_TILE, q + tile * MLAI_DS656_TILE, q_stride);
            MLAI_UNROLL
            for (int32_t r = 0; r < n_rows; r++) {
                MLAI_UNROLL
                for (int32_t j = 0; j < n_keys; j++)
                    acc[r][j] = v_fma(acc[r][j], v_set1(scales[j * MLAI_DS656_TILES]), sum[r][j]);
            }
        }
    }
    MLAI_UNROLL
    for (int32_t r = 0; r < n_rows; r++) {
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j += 4) {
            float four[4];
            v_add_lanes(four, acc[r][j], acc[r][j + 1], acc[r][j + 2], acc[r][j + 3]);
            MLAI_UNROLL
            for (int32_t i = 0; i < 4; i++) {
                if (j + i < n_keys)
                    scores[(int64_t)(j + i) * stride + r] = four[i];
            }
        }
    }
}

MLAI_INLINE void narrow_rows(const int32_t n_rows, const int32_t tile, const mlai_unit *u,
                             const scratch *s, const bf16_rows *rows, const uint16_t *q,
                             int32_t n_keys, float *scores, int64_t stride)
{
    int32_t key = 0;
    for (; key + tile <= n_keys; key += tile)
        narrow_tile(n_rows, tile, u, s, rows, q, key, scores + key * stride, stride);
    for (; key < n_keys; key += 2)
        narrow_tile(n_rows, 2, u, s, rows, q, key, scores + key * stride, stride);
}

static void score_narrow(const mlai_unit *u, const scratch *s, const bf16_rows *rows, int32_t first,
                         int32_t width, int32_t n_keys)
{
    int64_t dims = padded_dims(u->shape);
    int32_t end = first + width < u->n_rows ? first + width : u->n_rows;
    n_keys += n_keys & 1;
    if (end - first < width) /* lanes that hold no row */
        memset(s->scores, 0, (size_t)n_keys * (size_t)width * sizeof(float));
    for (int32_t row = first; row < end;) {
        const uint16_t *q = (const uint16_t *)u->q + row * dims;
        float *scores = s->scores + (row - first);
        int32_t left = end - row;
        if (left >= 4 && s->tiles == 1) {
            narrow_rows(4, 4, u, s, rows, q, n_keys, scores, width);
            row += 4;
        } else if (left >= 2) {
            narrow_rows(2, 4, u, s, rows, q, n_keys, scores, width);
            row += 2;
        } else {
            narrow_rows(1, 8, u, s, rows, q, n_keys, scores, width);
            row += 1;
        }
    }
}

/* ---- softmax -------------------------------------------------------------------------------- */

static void softmax_group(const mlai_unit *u, const scratch *s, int32_t first, int32_t n_vecs,
                          int32_t n_keys)
{
    int64_t stride = (int64_t)n_vecs * V_LANES;
    for (int32_t i = 0; i < n_vecs; i++) {
        float *scores = s->scores + (int64_t)i * V_LANES;
        int32_t row = first + i * V_LANES;
        vec m = scores_to_base2(u, scores, stride, n_keys, row);
        vec from = score_origin(m), l = v_set1(0.0f), l_odd = l;
        for (int32_t key = 0; key < n_keys; key += 2) {
            const float *at = scores + key * stride;
            vec even = exp2_for_bf16(v_sub(v_load(at), from)), odd = v_set1(0.0f);
            l = v_add(l, even);
            if (key + 1 < n_keys) {
                odd = exp2_for_bf16(v_sub(v_load(at + stride), from));
                l_odd = v_add(l_odd, odd);
            }
            uint32_t *p = s->p + key / 2 * stride + (int64_t)i * V_LANES;
            if (s->tiles == 1) {
                _mm512_storeu_si512(p, join_pairs(even, odd));
                continue;
            }
            const float *scales = s->scales + (int64_t)key * MLAI_DS656_TILES;
            for (int32_t tile = 0; tile < MLAI_DS656_TILES; tile++)
                _mm512_storeu_si512(
                    p + (int64_t)tile * PAIRS * GROUP,
                    join_pairs(v_mul(even, v_set1(scales[tile])),
                               v_mul(odd, v_set1(scales[MLAI_DS656_TILES + tile]))));
        }
        take_max_and_sum(u, row, m, v_add(l, l_odd), s->a, s->b);
    }
}

/* ---- values --------------------------------------------------------------------------------- */

/* All key rows into panels: [panel][pair of keys][up to PANEL columns]. */
static void interleave_values(const mlai_unit *u, const scratch *s, const void *const *values)
{
    int64_t columns = padded(u->shape->value_dims);
    int32_t n_pairs = (u->n_keys + 1) / 2;
    for (int32_t pair = 0; pair < n_pairs; pair++) {
        const uint16_t *v0 = values[2 * pair], *v1 = values[2 * pair + 1];
        for (int64_t column = 0; column < columns; column += CHUNK) {
            int64_t panel = column / PANEL * PANEL;
            int64_t width = columns - panel < PANEL ? columns - panel : PANEL;
            uint32_t *out = s->panels + panel * PAIRS + pair * width + (column - panel);
            __m512i x0 = _mm512_loadu_si512(v0 + column), x1 = _mm512_loadu_si512(v1 + column);
            _mm512_storeu_si512(out, _mm512_unpacklo_epi16(x0, x1));
            _mm512_storeu_si512(out + V_LANES, _mm512_unpackhi_epi16(x0, x1));
        }
    }
}

/* n_rows rows x n_vecs vectors of one panel. */
MLAI_INLINE void panel_tile(const int32_t n_rows, const int32_t n_vecs, const mlai_unit *u,
                            const scratch *s, const uint32_t *panel, const uint32_t *p,
                            int64_t p_stride, int32_t n_pairs, int32_t row, int64_t column)
{
    vec acc[O_ROWS][O_VECS];
    MLAI_UNROLL
    for (int32_t r = 0; r < n_rows; r++) {
        MLAI_UNROLL
        for (int32_t i = 0; i < n_vecs; i++)
            acc[r][i] = v_set1(0.0f);
    }
    for (int32_t pair = 0; pair < n_pairs; pair++) {
        __m512i x[O_VECS];
        MLAI_UNROLL
        for (int32_t i = 0; i < n_vecs; i++)
            x[i] = _mm512_loadu_si512(panel + i * V_LANES);
        MLAI_UNROLL
        for (int32_t r = 0; r < n_rows; r++) {
            __m512i w = pair_at(p + r);
            MLAI_UNROLL
            for (int32_t i = 0; i < n_vecs; i++)
                acc[r][i] = dot(acc[r][i], x[i], w);
        }
        panel += n_vecs * V_LANES;
        p += p_stride;
    }
    MLAI_UNROLL
    for (int32_t r = 0; r < n_rows; r++)
        fold_row(n_vecs, u, s->a, s->b, row + r, column, acc[r]);
}

MLAI_INLINE void panel_rows(const int32_t n_vecs, const mlai_unit *u, const scratch *s,
                            const uint32_t *panel, const uint32_t *p, int64_t p_stride,
                            int32_t n_pairs, int32_t row, int32_t n_rows, int64_t column)
{
    switch (n_rows) {
    case 1:
        panel_tile(1, n_vecs, u, s, panel, p, p_stride, n_pairs, row, column);
        break;
    case 2:
        panel_tile(2, n_vecs, u, s, panel, p, p_stride, n_pairs, row, column);
        break;
    case 3:
        panel_tile(3, n_vecs, u, s, panel, p, p_stride, n_pairs, row, column);
        break;
    case 4:
        panel_tile(4, n_vecs, u, s, panel, p, p_stride, n_pairs, row, column);
        break;
    case 5:
        panel_tile(5, n_vecs, u, s, panel, p, p_stride, n_pairs, row, column);
        break;
    default:
        panel_tile(O_ROWS, n_vecs, u, s, panel, p, p_stride, n_pairs, row, column);
    }
}

/* Pairs of keys that rows row..row+n_rows-1 see, at most those of n_keys. */
static int32_t pairs_seen(const mlai_unit *u, int32_t row, int32_t n_rows, int32_t n_keys)
{
    int32_t seen = 0;
    for (int32_t r = row; r < row + n_rows; r++)
        seen = u->visible[r] > seen ? u->visible[r] : seen;
    return ((seen < n_keys ? seen : n_keys) + 1) / 2;
}

static void values_from_panels(const mlai_unit *u, const scratch *s, int32_t first, int32_t width,
                               int32_t n_keys)
{
    int64_t columns = padded(u->shape->value_dims);
    int32_t end = first + width < u->n_rows ? first + width : u->n_rows;
    for (int64_t column = 0; column < columns; column += PANEL) {
        const uint32_t *panel = s->panels + column * PAIRS;
        const uint32_t *p = s->p + (s->tiles > 1 ? column / MLAI_DS656_TILE * PAIRS * GROUP : 0);
        for (int32_t row = first; row < end; row += O_ROWS) {
            int32_t n_rows = end - row < O_ROWS ? end - row : O_ROWS;
            int32_t n_pairs = pairs_seen(u, row, n_rows, n_keys);
            if (columns - column >= PANEL)
                panel_rows(O_VECS, u, s, panel, p + (row - first), width, n_pairs, row, n_rows,
                           column);
            else
                panel_rows(2, u, s, panel, p + (row - first), width, n_pairs, row, n_rows, column);
        }
    }
}

/* Up to 16 rows straight from the key rows: n_vecs is 1 (a half of a chunk), 2 (a chunk) or 4. */
MLAI_INLINE void direct_tile(const int32_t n_rows, const int32_t n_vecs, const mlai_unit *u,
                             const scratch *s, const void *const *values, const uint32_t *p,
                             int32_t n_pairs, int64_t column)
{
    vec acc[DIRECT_ROWS][4];
    bool is_high = n_vecs == 1 && column % CHUNK != 0;
    int64_t from = column / CHUNK * CHUNK;
    MLAI_UNROLL
    for (int32_t r = 0; r < n_rows; r++) {
        MLAI_UNROLL
        for (int32_t i = 0; i < n_vecs; i++)
            acc[r][i] = v_set1(0.0f);
    }
    for (int32_t pair = 0; pair < n_pairs; pair++) {
        const uint16_t *v0 = (const uint16_t *)values[2 * pair] + from;
        const uint16_t *v1 = (const uint16_t *)values[2 * pair + 1] + from;
        __m512i x[4];
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
        for (int32_t r = 0; r < n_rows; r++) {
            __m512i w = pair_at(p + r);
            MLAI_UNROLL
            for (int32_t i = 0; i < n_vecs; i++)
                acc[r][i] = dot(acc[r][i], x[i], w);
        }
        p += V_LANES;
    }
    MLAI_UNROLL
    for (int32_t r = 0; r < n_rows; r++)
        fold_row(n_vecs, u, s->a, s->b, r, column, acc[r]);
}

static void values_direct(const mlai_unit *u, const scratch *s, const void *const *values,
                          int32_t n_keys)
{
    int64_t columns = padded(u->shape->value_dims);
    int32_t n_pairs = pairs_seen(u, 0, u->n_rows, n_keys);
    int32_t n_vecs = u->n_rows <= 4 ? 4 : u->n_rows <= 8 ? 2 : 1;
    for (int64_t column = 0; column < columns;) {
        const uint32_t *p = s->p + (s->tiles > 1 ? column / MLAI_DS656_TILE * PAIRS * GROUP : 0);
        int32_t vecs = columns - column < n_vecs * V_LANES ? 2 : n_vecs;
#define DIRECT_CASE(rows, vectors)                                                                 \
    case rows:                                                                                     \
        if (vecs == (vectors))                                                                     \
            direct_tile(rows, vectors, u, s, values, p, n_pairs, column);                          \
        else                                                                                       \
            direct_tile(rows, 2, u, s, values, p, n_pairs, column);                                \
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
        direct_tile(rows, 1, u, s, values, p, n_pairs, column);                                    \
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

/* ---- the unit ------------------------------------------------------------------------------- */

static void unit(const mlai_unit *u)
{
    char *end;
    scratch s = cut_scratch(u->shape, u->scratch, &end);
    bf16_rows rows = take_rows(u, &s.copies, u->shape->is_narrow ? CHUNK : 2);
    int64_t pairs = pairs_of(u->shape);
    int32_t n_vecs = (u->n_rows + V_LANES - 1) / V_LANES;
    bool is_direct = u->n_rows <= DIRECT_ROWS;
    if (!is_direct)
        interleave_values(u, &s, rows.values);
    for (int32_t vec_index = 0; vec_index < n_vecs; vec_index += G_VECS) {
        int32_t first = vec_index * V_LANES;
        int32_t vecs = n_vecs - vec_index < G_VECS ? n_vecs - vec_index : G_VECS;
        int32_t width = vecs * V_LANES;
        /* The group's own bound, so that a causal block skips what lies above its diagonal. */
        int32_t n_keys = 0;
        for (int32_t r = first; r < first + width && r < u->n_rows; r++)
            n_keys = u->visible[r] > n_keys ? u->visible[r] : n_keys;
        n_keys = n_keys < u->n_keys ? n_keys : u->n_keys;
        if (n_keys == 0 && !u->is_first)
            continue;
        if (u->shape->is_narrow)
            score_narrow(u, &s, &rows, first, width, n_keys);
        else
            score_group(u, &s, &rows, (const uint32_t *)u->q + (int64_t)first * pairs, vecs,
                        n_keys);
        softmax_group(u, &s, first, vecs, n_keys);
        if (is_direct)
            values_direct(u, &s, rows.values, n_keys);
        else
            values_from_panels(u, &s, first, width, n_keys);
    }
}

const mlai_attention_kernel mlai_attention_bf16_avx512_bf16 = {
    .name = "attention_bf16_avx512_bf16",
    .lanes = V_LANES,
    .o_stride = o_stride,
    .q_bytes = q_bytes,
    .scratch_bytes = scratch_bytes,
    .pack_q = pack_q,
    .unit = unit,
    .fold = fold_triples,
    .finish = finish,
};
