/*
 * Attention of one unit of keys against one block of query rows with the bf16 dot product: q bf16
 * (or fp8, exact in bf16), cache bf16 or fp8 (exact) or ds656. Products of pairs in f32
 * accumulators, both for the scores and for the values; probabilities are rounded to bf16, their
 * sum is not. Called by the drivers through mlai_attention_kernel.
 *
 * Rows lie in lanes. Nothing of K is packed: a pair of dims of a key is four bytes of its row,
 * which the instruction takes as a broadcast operand:
 *
 *   Q packed [pair of dims][rows]           key row: bf16 d0 d1 | d2 d3 | ...
 *     zmm: r0(d0 d1) r1(d0 d1) ...  x      broadcast (d0 d1)             -> scores [key][rows] f32
 *   tile: 4 vectors of rows x 6 keys (3 x 8, 2 x 8, 1 x 8), one chain over the pairs of dims
 *
 *   softmax [key][rows] -> P packed [vector][pair of keys][16]: r0(k0 k1) r1(k0 k1) ...
 *
 *   V: two key rows interleave to pairs (k0 k1) of a column: low and high half of each 128-bit
 * lane, so 32 columns c come as  lo = 0-3 8-11 16-19 24-27,  hi = 4-7 12-15 20-23 28-31; o keeps
 * that order, finish undoes it. up to 16 rows: interleaved in registers, once for each tile of
 * columns, tile: 16 rows x 16 columns (8 x 32, 4 x 64); more rows: into panels [pair of
 * keys][64][2] of 64 columns for all rows of the block, which the first tile fills, tile: 6 rows x
 * 64 columns. One chain over the pairs of keys in both.
 *
 * Memory: the rows of the unit that comes next are asked for into the second-level cache, a few
 * lines at every step of the scores and of the values, so that the memory works all the time.
 * Not so rows of explicit keys and values: these may lie a power of two apart and would drive each
 * other out of the few sets that they share. Their values are interleaved first, row by row.
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
#include <float.h>

enum {
    G_VECS = 4,
    GROUP = G_VECS * V_LANES, /* rows whose scores are alive together */
    S_KEYS = 8,               /* keys of a tile of scores, at most */
    DIRECT_ROWS = 16,         /* blocks of up to that many rows interleave in registers */
    LINE_PAIRS = 16,          /* pairs of dims in a cache line */
    STEP_PAIRS = 4,           /* pairs of keys between two askings for memory */

    O_ROWS = 6,
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

static uint64_t q_bytes(const mlai_attention_shape *shape, int32_t n_rows)
{
    uint64_t rows = (uint64_t)(n_rows + V_LANES - 1) / V_LANES * V_LANES;
    uint64_t pairs = (uint64_t)(shape->is_narrow ? padded_dims(shape) / 2 : pairs_of(shape));
    return rows * pairs * sizeof(uint32_t);
}

/* ---- scratch -------------------------------------------------------------------------------- */

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

/* 16 rows of up to 16 pairs of dims, from dim d on, as 16 vectors of rows. */
static __attribute__((noinline)) void load_part(const mlai_attention_shape *shape,
                                                const void *const *rows, int32_t n_rows, int32_t d,
                                                int32_t m, __m512i x[V_LANES])
{
    int64_t byte = (int64_t)d * mla_format_bytes(shape->q_format);
    uint16_t part[CHUNK];
    for (int32_t lane = 0; lane < V_LANES; lane++) {
        memset(part, 0, sizeof part);
        if (lane < n_rows)
            row_to_bf16(part, (const char *)rows[lane] + byte, shape->q_format, m);
        x[lane] = _mm512_loadu_si512(part);
    }
    transpose16(x);
}

/* The same of 16 whole chunks. */
MLAI_INLINE void load_chunks(const void *const *rows, int32_t d, __m512i x[V_LANES])
{
    MLAI_UNROLL
    for (int32_t lane = 0; lane < V_LANES; lane++)
        x[lane] = _mm512_loadu_si512((const uint16_t *)rows[lane] + d);
    transpose16(x);
}

/* [group][pair of dims][rows of the group] */
static void pack_q(const mlai_attention_shape *shape, void *q, const void *const *const rows[],
                   int32_t n_rows)
{
    if (shape->is_narrow) {
        pack_q_narrow(shape, q, rows, n_rows);
        return;
    }
    int64_t pairs = pairs_of(shape);
    int32_t n_vecs = (n_rows + V_LANES - 1) / V_LANES;
    for (int32_t vec_index = 0; vec_index < n_vecs; vec_index++) {
        int32_t first = vec_index * V_LANES, group = vec_index / G_VECS * G_VECS;
        bool is_whole = first + V_LANES <= n_rows && shape->q_format == MLA_FORMAT_BF16;
        int64_t width = (int64_t)(n_vecs - group < G_VECS ? n_vecs - group : G_VECS) * V_LANES;
        uint32_t *out = (uint32_t *)q + (int64_t)group * V_LANES * pairs + (first % GROUP);
        for (int32_t piece = 0; piece < shape->n_pieces; piece++) {
            int32_t n = shape->piece_dims[piece];
            for (int32_t d = 0; d < n; d += CHUNK) {
                int32_t m = n - d < CHUNK ? n - d : CHUNK;
                __m512i x[V_LANES];
                if (m == CHUNK && is_whole) {
                    load_chunks(rows[piece] + first, d, x);
                    MLAI_UNROLL
                    for (int32_t i = 0; i < V_LANES; i++)
                        _mm512_storeu_si512(out + i * width, x[i]);
                    out += V_LANES * width;
                    continue;
                }
                load_part(shape, rows[piece] + first, n_rows - first, d, m, x);
                for (int32_t i = 0; i < (m + 1) / 2; i++, out += width)
                    _mm512_storeu_si512(out, x[i]);
            }
        }
    }
}

/* ---- the rows that come next ---------------------------------------------------------------- */

/* Cache lines of rows that are asked for a few at a time, while others are computed with. */
typedef struct feed {
    const void *const *rows[MLAI_MAX_PIECES + 1]; /* pieces, and values that are no piece */
    int64_t bytes[MLAI_MAX_PIECES + 1];
    int32_t n_kinds;
    int32_t kind;
    int32_t key, end; /* of rows */
    int32_t step_lines;
    int64_t at; /* byte of the row */
} feed;

static int64_t lines_of(int64_t bytes)
{
    return (bytes + 63) / 64;
}

/* Part `part` of n_parts of the rows after this unit, in about `steps` steps. */
static feed start_feed(const mlai_unit *u, int32_t part, int32_t n_parts, int64_t steps)
{
    const mlai_attention_shape *shape = u->shape;
    int64_t lines = 0, bytes = mla_format_bytes(shape->kv_format);
    feed f = {.key = u->n_ahead * part / n_parts, .end = u->n_ahead * (part + 1) / n_parts};
    if (f.key == f.end)
        return f;
    if (shape->kv_format == MLA_FORMAT_DS656) {
        f.rows[0] = u->keys[0];
        f.bytes[0] = MLA_DS656_ROW_BYTES;
        f.n_kinds = 1;
    }
    for (int32_t i = 0; i < shape->n_pieces && shape->kv_format != MLA_FORMAT_DS656; i++) {
        const char *row = u->keys[i][MLAI_UNIT_KEYS];
        if (i > 0 && row == (const char *)u->keys[0][MLAI_UNIT_KEYS] + f.bytes[0]) {
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
    const char *row = f->rows[f->kind][MLAI_UNIT_KEYS + f->key];
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

/* Keys that some of rows row..row+n_rows-1 sees. */
static int32_t keys_seen(const mlai_unit *u, int32_t row, int32_t n_rows)
{
    int32_t seen = 0;
    for (int32_t r = row; r < row + n_rows; r++)
        seen = u->visible[r] > seen ? u->visible[r] : seen;
    return seen < u->n_keys ? seen : u->n_keys;
}

/* ---- scores --------------------------------------------------------------------------------- */

typedef struct tile_of_scores {
    vec acc[S_KEYS][G_VECS];
} tile_of_scores;

/* acc += q x keys over n_pairs pairs that start `byte` bytes into the rows. */
MLAI_INLINE void score_pairs(const int32_t n_vecs, const int32_t n_keys, tile_of_scores *t,
                             const void *const *keys, int64_t byte, int64_t n_pairs,
                             const uint32_t *q, int64_t stride, feed *ahead)
{
    const char *k[S_KEYS];
    MLAI_UNROLL
    for (int32_t j = 0; j < n_keys; j++)
        k[j] = (const char *)keys[j] + byte;
    /* A cache line of each key at a time; without a feed also the line of the tile that is next. */
    for (int64_t line = 0; line < n_pairs; line += LINE_PAIRS) {
        if (ahead)
            feed_step(ahead);
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
            q += stride;
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
                            const scratch *s, const bf16_rows *rows, const uint32_t *q,
                            int64_t stride, int32_t first_vec, int32_t key, feed *ahead)
{
    tile_of_scores t;
    float *scores = s->scores + key * stride + first_vec * V_LANES;
    q += first_vec * V_LANES;
    clear_tile(n_vecs, n_keys, &t);
    if (s->tiles == 1) {
        for (int32_t piece = 0; piece < u->shape->n_pieces; piece++) {
            int64_t n = (u->shape->piece_dims[piece] + 1) / 2;
            score_pairs(n_vecs, n_keys, &t, rows->keys[piece] + key, 0, n, q, stride, ahead);
            q += n * stride;
        }
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++) {
            MLAI_UNROLL
            for (int32_t v = 0; v < n_vecs; v++)
                v_store(scores + j * stride + v * V_LANES, t.acc[j][v]);
        }
        return;
    }
    /* ds656: rope first, then each tile of 128 dims times its scale. */
    int64_t tile_pairs = MLAI_DS656_TILE / 2, step = tile_pairs * stride;
    score_pairs(n_vecs, n_keys, &t, rows->keys[1] + key, 0, u->shape->piece_dims[1] / 2,
                q + MLAI_DS656_TILES * step, stride, ahead);
    for (int32_t tile = 0; tile <= MLAI_DS656_TILES; tile++) {
        const float *scales = s->scales + (int64_t)key * MLAI_DS656_TILES + tile - 1;
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++) {
            MLAI_UNROLL
            for (int32_t v = 0; v < n_vecs; v++) {
                float *at = scores + j * stride + v * V_LANES;
                v_store(at, tile == 0 ? t.acc[j][v]
                                      : v_fma(t.acc[j][v], v_set1(scales[j * MLAI_DS656_TILES]),
                                              v_load(at)));
            }
        }
        if (tile == MLAI_DS656_TILES)
            break;
        clear_tile(n_vecs, n_keys, &t);
        score_pairs(n_vecs, n_keys, &t, rows->keys[0] + key, tile * MLAI_DS656_TILE * 2, tile_pairs,
                    q + tile * step, stride, ahead);
    }
}

/* Keys first..end-1 of n_vecs vectors of rows from first_vec on. */
MLAI_INLINE void score_keys(const int32_t n_vecs, const int32_t tile, const mlai_unit *u,
                            const scratch *s, const bf16_rows *rows, const uint32_t *q,
                            int64_t stride, int32_t first_vec, int32_t first, int32_t end,
                            feed *ahead)
{
    int32_t key = first;
    for (; key + tile <= end; key += tile)
        score_tile(n_vecs, tile, u, s, rows, q, stride, first_vec, key, ahead);
    if (key + 4 <= end) {
        score_tile(n_vecs, 4, u, s, rows, q, stride, first_vec, key, ahead);
        key += 4;
    }
    for (; key < end; key += 2)
        score_tile(n_vecs, 2, u, s, rows, q, stride, first_vec, key, ahead);
}

/* The same for one vector of rows; its tile is short, so the next line of each key is asked for. */
MLAI_INLINE void score_vector_pairs(const int32_t n_keys, vec acc[S_KEYS], const void *const *keys,
                                    int64_t byte, int64_t n_pairs, const uint32_t *q, feed *ahead)
{
    const char *k[S_KEYS];
    MLAI_UNROLL
    for (int32_t j = 0; j < n_keys; j++)
        k[j] = (const char *)keys[j] + byte;
    /* A cache line of each key at a time, and the line after it. */
    for (int64_t line = 0; line < n_pairs; line += LINE_PAIRS) {
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++)
            _mm_prefetch(k[j] + 4 * (line + LINE_PAIRS), _MM_HINT_T0);
        feed_step(ahead);
        int64_t end = line + LINE_PAIRS < n_pairs ? line + LINE_PAIRS : n_pairs;
        for (int64_t i = line; i < end; i++) {
            __m512i row = _mm512_loadu_si512(q + i * V_LANES);
            MLAI_UNROLL
            for (int32_t j = 0; j < n_keys; j++)
                acc[j] = dot(acc[j], row, pair_at(k[j] + 4 * i));
        }
    }
}

/* One vector of rows against n_keys keys from `key` on; not ds656. */
MLAI_INLINE void score_vector_tile(const int32_t n_keys, const mlai_unit *u, const scratch *s,
                                   const bf16_rows *rows, const uint32_t *q, int32_t key,
                                   feed *ahead)
{
    vec acc[S_KEYS];
    MLAI_UNROLL
    for (int32_t j = 0; j < n_keys; j++)
        acc[j] = v_set1(0.0f);
    for (int32_t piece = 0; piece < u->shape->n_pieces; piece++) {
        int64_t n = (u->shape->piece_dims[piece] + 1) / 2;
        score_vector_pairs(n_keys, acc, rows->keys[piece] + key, 0, n, q, ahead);
        q += n * V_LANES;
    }
    MLAI_UNROLL
    for (int32_t j = 0; j < n_keys; j++)
        v_store(s->scores + (key + j) * V_LANES, acc[j]);
}

/* A function of its own, for the sake of its registers. */
static __attribute__((noinline)) void score_vector(const mlai_unit *u, const scratch *s,
                                                   const bf16_rows *rows, const uint32_t *q,
                                                   int32_t n_keys, feed *ahead)
{
    int32_t key = 0;
    for (; key + S_KEYS <= n_keys; key += S_KEYS)
        score_vector_tile(S_KEYS, u, s, rows, q, key, ahead);
    for (; key < n_keys; key += 2)
        score_vector_tile(2, u, s, rows, q, key, ahead);
}

/*
 * A group of n_vecs vectors of rows, the first of which is block row `row`. What lies above the
 * diagonal of a causal block is left out by vectors: once the keys that a vector sees are done, the
 * vectors behind it go on alone.
 */
static void score_group(const mlai_unit *u, const scratch *s, const bf16_rows *rows,
                        const uint32_t *q, int32_t row, int32_t n_vecs, int32_t n_keys, feed *ahead)
{
    int64_t stride = n_vecs * V_LANES;
    n_keys += n_keys & 1;
    if (n_vecs == 1 && s->tiles == 1 && ahead) {
        score_vector(u, s, rows, q, n_keys, ahead);
        return;
    }
    for (int32_t v = 0, key = 0, end; v < n_vecs; v++, key = end) {
        end = keys_seen(u, row + v * V_LANES, V_LANES);
        end = mlai_max_i64(key, end + (end & 1));
        switch (n_vecs - v) {
        case 4:
            score_keys(4, 6, u, s, rows, q, stride, v, key, end, ahead);
            break;
        case 3:
            score_keys(3, 8, u, s, rows, q, stride, v, key, end, ahead);
            break;
        case 2:
            score_keys(2, 8, u, s, rows, q, stride, v, key, end, ahead);
            break;
        default:
            score_keys(1, 8, u, s, rows, q, stride, v, key, end, ahead);
        }
    }
}

/* acc[row][key] += q x keys with dims in lanes; q points at the first row's dims. */
MLAI_INLINE void narrow_dims(const int32_t n_rows, const int32_t n_keys, vec acc[4][8],
                             const void *const *keys, int64_t first, int64_t n, const uint16_t *q,
                             int64_t q_stride, feed *ahead)
{
    for (int64_t d = 0; d < n; d += CHUNK) {
        __m512i x[8];
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++)
            x[j] = _mm512_loadu_si512((const uint16_t *)keys[j] + first + d);
        feed_step(ahead);
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
                             int32_t key, float *scores, feed *ahead)
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
            narrow_dims(n_rows, n_keys, acc, rows->keys[piece] + key, 0, n, q + at, q_stride,
                        ahead);
            at += n;
        }
    } else {
        narrow_dims(n_rows, n_keys, acc, rows->keys[1] + key, 0, padded(u->shape->piece_dims[1]),
                    q + MLAI_DS656_TILES * MLAI_DS656_TILE, q_stride, ahead);
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
                        MLAI_DS656_TILE, q + tile * MLAI_DS656_TILE, q_stride, ahead);
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
                    scores[(j + i) * V_LANES + r] = four[i];
            }
        }
    }
}

MLAI_INLINE void narrow_rows(const int32_t n_rows, const int32_t tile, const mlai_unit *u,
                             const scratch *s, const bf16_rows *rows, const uint16_t *q,
                             int32_t n_keys, float *scores, feed *ahead)
{
    int32_t key = 0;
    for (; key + tile <= n_keys; key += tile)
        narrow_tile(n_rows, tile, u, s, rows, q, key, scores + key * V_LANES, ahead);
    for (; key < n_keys; key += 2)
        narrow_tile(n_rows, 2, u, s, rows, q, key, scores + key * V_LANES, ahead);
}

static void score_narrow(const mlai_unit *u, const scratch *s, const bf16_rows *rows, int32_t first,
                         int32_t n_keys, feed *ahead)
{
    int64_t dims = padded_dims(u->shape);
    int32_t end = first + V_LANES < u->n_rows ? first + V_LANES : u->n_rows;
    n_keys += n_keys & 1;
    if (end - first < V_LANES) /* lanes that hold no row */
        memset(s->scores, 0, (size_t)n_keys * V_LANES * sizeof(float));
    for (int32_t row = first; row < end;) {
        const uint16_t *q = (const uint16_t *)u->q + row * dims;
        float *scores = s->scores + (row - first);
        int32_t left = end - row;
        if (left >= 4 && s->tiles == 1) {
            narrow_rows(4, 4, u, s, rows, q, n_keys, scores, ahead);
            row += 4;
        } else if (left >= 2) {
            narrow_rows(2, 4, u, s, rows, q, n_keys, scores, ahead);
            row += 2;
        } else {
            narrow_rows(1, 8, u, s, rows, q, n_keys, scores, ahead);
            row += 1;
        }
    }
}

/* ---- softmax -------------------------------------------------------------------------------- */

/*
 * What turns products q . k of block rows first..first + 15 into scores in base 2: factor and
 * maximum; score = product * factor. With a cap, or a factor that turns the order round, the
 * products are made scores first and the factor is 1. Products of keys that a row does not see
 * become -inf.
 */
static vec find_maximum(const mlai_unit *u, float *scores, int64_t stride, int32_t n_keys,
                        int32_t first, float *factor)
{
    const int32_t *visible = u->visible + first;
    *factor = u->scale * 1.4426950408889634f;
    if (u->cap > 0.0f || !(*factor >= FLT_MIN)) {
        *factor = 1.0f;
        return scores_to_base2(u, scores, stride, n_keys, first);
    }
    int32_t key = 0, all_see = u->hidden ? 0 : n_keys;
    for (int32_t i = 0; i < V_LANES; i++)
        all_see = visible[i] < all_see ? visible[i] : all_see;
    vec none = v_set1(-INFINITY), m[4] = {none, none, none, none};
    for (; key + 4 <= all_see; key += 4) {
        MLAI_UNROLL
        for (int32_t i = 0; i < 4; i++)
            m[i] = v_max(m[i], v_load(scores + (key + i) * stride));
    }
    for (; key < n_keys; key++) {
        float *at = scores + key * stride;
        vec s = v_select(v_not_above(visible, key), none, v_load(at));
        if (u->hidden)
            s = v_select(v_nonzero_bytes(u->hidden + (int64_t)key * MLAI_BLOCK_ROWS + first), none,
                         s);
        v_store(at, s);
        m[0] = v_max(m[0], s);
    }
    return v_mul(v_max(v_max(m[0], m[1]), v_max(m[2], m[3])), v_set1(*factor));
}

static void softmax_rows(const mlai_unit *u, const scratch *s, float *scores, int64_t stride,
                         uint32_t *p, int32_t first, int32_t n_keys)
{
    float factor;
    vec m = find_maximum(u, scores, stride, n_keys, first, &factor);
    vec from = v_sub(v_set1(0.0f), score_origin(m)), times = v_set1(factor);
    vec l = v_set1(0.0f), l_odd = l;
    for (int32_t key = 0; key < n_keys; key += 2, p += V_LANES) {
        const float *at = scores + key * stride;
        vec even = exp2_for_bf16(v_fma(v_load(at), times, from)), odd = v_set1(0.0f);
        l = v_add(l, even);
        if (key + 1 < n_keys) {
            odd = exp2_for_bf16(v_fma(v_load(at + stride), times, from));
            l_odd = v_add(l_odd, odd);
        }
        if (s->tiles == 1) {
            _mm512_storeu_si512(p, join_pairs(even, odd));
            continue;
        }
        const float *scales = s->scales + (int64_t)key * MLAI_DS656_TILES;
        for (int32_t tile = 0; tile < MLAI_DS656_TILES; tile++)
            _mm512_storeu_si512(p + (int64_t)tile * s->p_rows * PAIRS,
                                join_pairs(v_mul(even, v_set1(scales[tile])),
                                           v_mul(odd, v_set1(scales[MLAI_DS656_TILES + tile]))));
    }
    take_max_and_sum(u, first, m, v_add(l, l_odd), s->a, s->b);
}

/* ---- values --------------------------------------------------------------------------------- */

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
        for (; pair + STEP_PAIRS <= n_pairs; pair += STEP_PAIRS) {
            feed_step(ahead);
            value_pairs(STEP_PAIRS, n_rows, n_vecs, has_panel, has_rows, acc, panel, values, from,
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
static const uint32_t *p_of_column(const scratch *s, int64_t column)
{
    return s->p + (s->tiles > 1 ? column / MLAI_DS656_TILE * s->p_rows * PAIRS : 0);
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
        const uint32_t *p = p_of_column(s, column);
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
    int64_t steps = columns / (n_vecs * V_LANES) * ((n_pairs + STEP_PAIRS - 1) / STEP_PAIRS);
    feed ahead = start_feed(u, 1, 2, steps > 0 ? steps : 1);
    for (int64_t column = 0; column < columns;) {
        const uint32_t *p = p_of_column(s, column);
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
        return chunks * (u->n_keys / 4 + 1) * (u->n_rows < 4 ? 1 : u->n_rows / 4);
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
