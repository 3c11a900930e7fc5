/*
 * Attention of one unit of keys against one block of query rows with AMX bf16 tiles: the formats
 * and the rounding of attention_bf16.c (bf16 products, f32 sums, P rounded to bf16). Called by the
 * drivers through mlai_attention_kernel.
 *
 * A tile is 16 rows of 64 bytes; C[16][16] f32 += A[16][32] bf16 x B[16 pairs][16][2] bf16.
 *
 *   scores^T   C [16 keys][16 rows]: A = 16 key rows where they lie (one stride), 32 dims
 *                                    B = packed Q [pair of dims][rows]
 *              2 x 2 tiles (32 keys x 32 rows), or 4 x 1 for the last odd 16 rows
 *   softmax    [key][rows] -> P [row][keys] bf16: rows in lanes, then 16 x 16 transposes of pairs
 *   values     C [16 rows][16 columns]: A = P, 32 keys
 *                                       B = V interleaved [pair of keys][16 columns][2]
 *              1 x 4 tiles (16 rows x 64 columns); a panel of 64 columns is interleaved just before
 *              its use and stays in L1 (32 KiB) for all rows of the block
 *
 * Keys that do not lie 16 at one stride are copied (16 rows at a time), as are tails. ds656: scores
 * of each 128 dims are summed apart and multiplied by the key's scale; the scale of a value tile
 * goes into P. Tiles are configured and released in each call, so threads need no preparation; the
 * process must have asked for them (src/cpu/features.c does).
 */
#include "cpu/kernels/bf16_rows.h"

enum {
    TILE = 16,        /* rows of a tile, and columns of C */
    TILE_DIMS = 32,   /* bf16 of a tile row */
    GROUP = 4 * TILE, /* query rows whose scores are alive together */
    PANEL = 4 * TILE, /* columns of values */
    P_STRIDE = MLAI_UNIT_KEYS
};

typedef struct tile_config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

static void configure_tiles(void)
{
    tile_config config = {.palette = 1};
    for (int32_t i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = TILE;
    }
    __asm__ volatile("" : : "r"(&config) : "memory"); /* as in clear_c; the address must be known */
    _tile_loadconfig(&config);
}

static int64_t pairs_of(const mlai_attention_shape *shape)
{
    return padded_dims(shape) / 2;
}

static int64_t tiles_up(int64_t rows)
{
    return (rows + TILE - 1) / TILE * TILE;
}

static uint64_t q_bytes(const mlai_attention_shape *shape, int32_t n_rows)
{
    return (uint64_t)tiles_up(n_rows) * (uint64_t)pairs_of(shape) * sizeof(uint32_t);
}

/* ---- scratch -------------------------------------------------------------------------------- */

typedef struct scratch {
    float *scores;    /* [MLAI_UNIT_KEYS][GROUP] */
    uint16_t *p;      /* [tiles][MLAI_BLOCK_ROWS][P_STRIDE] */
    float *a;         /* [MLAI_BLOCK_ROWS] factor of the accumulator in the fold */
    float *b;         /* [MLAI_BLOCK_ROWS] factor of the unit */
    uint32_t *panel;  /* [PAIRS][PANEL] */
    float *c;         /* [4][TILE][TILE] a tile row of C on its way */
    uint16_t *gather; /* [MLAI_UNIT_KEYS][padded dims] key rows that do not lie at one stride */
    bf16_copies copies;
    int32_t tiles; /* P's versions: 4 for ds656, else 1 */
} scratch;

static scratch cut_scratch(const mlai_attention_shape *shape, char *base, char **end)
{
    scratch s;
    char *at = base;
    s.tiles = shape->kv_format == MLA_FORMAT_DS656 ? MLAI_DS656_TILES : 1;
    s.scores = (float *)carve(&at, (uint64_t)MLAI_UNIT_KEYS * GROUP * sizeof(float));
    s.p = (uint16_t *)carve(&at, (uint64_t)s.tiles * MLAI_BLOCK_ROWS * P_STRIDE * sizeof(uint16_t));
    s.a = (float *)carve(&at, MLAI_BLOCK_ROWS * sizeof(float));
    s.b = (float *)carve(&at, MLAI_BLOCK_ROWS * sizeof(float));
    s.panel = (uint32_t *)carve(&at, (uint64_t)PAIRS * PANEL * sizeof(uint32_t));
    s.c = (float *)carve(&at, 4 * TILE * TILE * sizeof(float));
    s.gather = (uint16_t *)carve(&at, (uint64_t)MLAI_UNIT_KEYS * (uint64_t)padded_dims(shape) *
                                          sizeof(uint16_t));
    s.copies = cut_copies(shape, &at);
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

/* To [row tile][pair of dims][TILE rows], pieces padded to whole tiles of dims. */
static void pack_q(const mlai_attention_shape *shape, void *q, const void *const *const rows[],
                   int32_t n_rows)
{
    uint16_t part[TILE_DIMS];
    int64_t pairs = pairs_of(shape);
    int32_t bytes = mla_format_bytes(shape->q_format);
    memset(q, 0, q_bytes(shape, n_rows));
    for (int32_t row = 0; row < n_rows; row++) {
        uint32_t *out = (uint32_t *)q + row / TILE * TILE * pairs + row % TILE;
        for (int32_t piece = 0; piece < shape->n_pieces; piece++) {
            const char *in = rows[piece][row];
            int32_t n = shape->piece_dims[piece];
            for (int32_t d = 0; d < n; d += TILE_DIMS) {
                int32_t m = n - d < TILE_DIMS ? n - d : TILE_DIMS;
                memset(part, 0, sizeof part);
                row_to_bf16(part, in + (int64_t)d * bytes, shape->q_format, m);
                for (int32_t i = 0; i < TILE_DIMS; i += 2) {
                    memcpy(out, part + i, sizeof *out);
                    out += TILE;
                }
            }
        }
    }
}

/* ---- scores --------------------------------------------------------------------------------- */

/* 16 keys of one piece as a tile loads them. */
typedef struct key_tile {
    const char *at;
    int64_t stride_bytes;
} key_tile;

/* keys[0..15] where they lie when they have one stride, else copied to `out`; live of them exist.
 */
static key_tile find_tile(const void *const *keys, int32_t live, int64_t dims, uint16_t *out)
{
    const char *first = keys[0];
    int64_t stride = live > 1 ? (const char *)keys[1] - first : 0;
    bool is_regular = live >= TILE && stride > 0;
    for (int32_t i = 2; i < TILE && is_regular; i++)
        is_regular = (const char *)keys[i] == first + i * stride;
    if (is_regular)
        return (key_tile){first, stride};
    for (int32_t i = 0; i < TILE; i++) {
        if (i < live)
            copy_bf16_row(out + i * dims, keys[i], (int32_t)dims);
        else
            memset(out + i * dims, 0, (size_t)dims * sizeof *out);
    }
    return (key_tile){(const char *)out, dims * (int64_t)sizeof *out};
}

/* Tiles of all keys of a unit, by piece. */
typedef struct key_tiles {
    key_tile piece[MLAI_MAX_PIECES][MLAI_UNIT_KEYS / TILE];
} key_tiles;

static void find_tiles(const mlai_unit *u, const scratch *s, const bf16_rows *rows,
                       key_tiles *tiles)
{
    uint16_t *out = s->gather;
    for (int32_t piece = 0; piece < u->shape->n_pieces; piece++) {
        int64_t dims = padded(u->shape->piece_dims[piece]);
        /* Scores come 32 keys at a time: up to an even number of tiles. */
        for (int32_t key = 0; key < (u->n_keys + 2 * TILE - 1) / (2 * TILE) * (2 * TILE);
             key += TILE) {
            int32_t live = u->n_keys - key;
            tiles->piece[piece][key / TILE] = find_tile(rows->keys[piece] + key, live, dims, out);
            out += TILE * dims;
        }
    }
}

/* Prefetches one line of each of n_keys keys, `byte` bytes into the rows. */
MLAI_INLINE void prefetch_keys(const void *const *keys, const int32_t n_keys, int64_t byte)
{
    MLAI_UNROLL
    for (int32_t i = 0; i < n_keys; i++)
        v_prefetch((const char *)keys[i] + byte);
}

/* C += keys x q over n_dims dims: 2 key tiles x 2 row tiles in tiles 0-3. */
static void score_2x2(const key_tile *k, int64_t byte, int64_t n_dims, const uint32_t *q,
                      int64_t q_tile, const void *const *ahead)
{
    const char *k0 = k[0].at + byte, *k1 = k[1].at + byte;
    for (int64_t d = 0; d < n_dims; d += TILE_DIMS) {
        _tile_loadd(4, k0 + 2 * d, k[0].stride_bytes);
        _tile_loadd(5, k1 + 2 * d, k[1].stride_bytes);
        _tile_loadd(6, q, 64);
        _tile_loadd(7, q + q_tile, 64);
        if (ahead)
            prefetch_keys(ahead, 2 * TILE, byte + 2 * d);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        q += TILE * TILE;
    }
}

/* The same for 2 key tiles x 1 row tile, in tiles 0 and 2. */
static void score_2x1(const key_tile *k, int64_t byte, int64_t n_dims, const uint32_t *q,
                      const void *const *ahead)
{
    const char *k0 = k[0].at + byte, *k1 = k[1].at + byte;
    for (int64_t d = 0; d < n_dims; d += TILE_DIMS) {
        _tile_loadd(6, q, 64);
        _tile_loadd(4, k0 + 2 * d, k[0].stride_bytes);
        _tile_loadd(5, k1 + 2 * d, k[1].stride_bytes);
        if (ahead)
            prefetch_keys(ahead, 2 * TILE, byte + 2 * d);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        q += TILE * TILE;
    }
}

static void clear_c(void)
{
    /* Tile loads do not tell the compiler that they read memory: what was stored is to be there. */
    __asm__ volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* C to the scores of 32 keys x (16 or 32) rows. */
static void store_scores(float *scores, int64_t stride, bool is_pair)
{
    _tile_stored(0, scores, stride * (int64_t)sizeof(float));
    _tile_stored(2, scores + TILE * stride, stride * (int64_t)sizeof(float));
    if (is_pair) {
        _tile_stored(1, scores + TILE, stride * (int64_t)sizeof(float));
        _tile_stored(3, scores + TILE * stride + TILE, stride * (int64_t)sizeof(float));
    }
}

/* scores += C * scale of the key, for one tile of 128 dims of ds656 rows. */
static void add_scaled(const scratch *s, float *scores, int64_t stride, const float *scales,
                       bool is_pair)
{
    int32_t vecs = is_pair ? 2 : 1;
    store_scores(s->c, 2 * TILE, is_pair);
    for (int32_t key = 0; key < 2 * TILE; key++) {
        vec scale = v_set1(scales[key * MLAI_DS656_TILES]);
        for (int32_t i = 0; i < vecs; i++) {
            float *at = scores + key * stride + i * TILE;
            v_store(at, v_fma(v_load(s->c + key * 2 * TILE + i * TILE), scale, v_load(at)));
        }
    }
}

/* Scores of keys key..key+31 against the row tiles from `row` on (one, or two if is_pair). */
static void score_block(const mlai_unit *u, const scratch *s, const key_tiles *tiles, int32_t key,
                        int32_t row, bool is_pair, float *scores, int64_t stride, bool is_first)
{
    int64_t pairs = pairs_of(u->shape);
    const uint32_t *q = (const uint32_t *)u->q + row * pairs;
    bool is_direct = u->shape->kv_format == MLA_FORMAT_BF16;
    clear_c();
    for (int32_t turn = 0; turn < u->shape->n_pieces; turn++) {
        /* ds656: rope first, then the tiles of the latent with their scales. */
        int32_t piece = s->tiles > 1 ? 1 - turn : turn;
        const key_tile *k = &tiles->piece[piece][key / TILE];
        int64_t dims = padded(u->shape->piece_dims[piece]);
        int64_t before = piece == 1 ? padded(u->shape->piece_dims[0]) / 2 : 0;
        const uint32_t *from = q + before * TILE;
        const void *const *ahead = is_first && is_direct ? u->keys[piece] + key + 2 * TILE : NULL;
        int64_t step = s->tiles > 1 && piece == 0 ? MLAI_DS656_TILE : dims;
        for (int64_t d = 0; d < dims; d += step) {
            if (is_pair)
                score_2x2(k, 2 * d, step, from + d / 2 * TILE, TILE * pairs, ahead);
            else
                score_2x1(k, 2 * d, step, from + d / 2 * TILE, ahead);
            if (s->tiles == 1)
                continue;
            if (piece == 1)
                store_scores(scores, stride, is_pair);
            else
                add_scaled(s, scores, stride,
                           s->copies.scales + (int64_t)key * MLAI_DS656_TILES + d / MLAI_DS656_TILE,
                           is_pair);
            clear_c();
        }
    }
    if (s->tiles == 1)
        store_scores(scores, stride, is_pair);
}

static void score_group(const mlai_unit *u, const scratch *s, const key_tiles *tiles, int32_t first,
                        int32_t width, int32_t n_keys)
{
    for (int32_t key = 0; key < n_keys; key += 2 * TILE) {
        for (int32_t row = 0; row < width; row += 2 * TILE) {
            float *scores = s->scores + (int64_t)key * width + row;
            score_block(u, s, tiles, key, first + row, row + TILE < width, scores, width,
                        first + row == 0);
        }
    }
}

/* ---- softmax -------------------------------------------------------------------------------- */

/* P of 16 rows and 32 keys, in pairs of keys, to [row][keys]. */
static void store_p(uint16_t *p, __m512i pairs[TILE])
{
    transpose16(pairs);
    for (int32_t r = 0; r < TILE; r++)
        _mm512_storeu_si512(p + (int64_t)r * P_STRIDE, pairs[r]);
}

static void softmax_group(const mlai_unit *u, const scratch *s, int32_t first, int32_t width,
                          int32_t n_keys)
{
    for (int32_t lane = 0; lane < width; lane += TILE) {
        float *scores = s->scores + lane;
        int32_t row = first + lane;
        vec m = scores_to_base2(u, scores, width, n_keys, row);
        vec from = score_origin(m), l = v_set1(0.0f), l_odd = l;
        for (int32_t key = 0; key < n_keys; key += 2 * TILE) {
            vec even[TILE], odd[TILE];
            __m512i pairs[TILE];
            MLAI_UNROLL
            for (int32_t i = 0; i < TILE; i++) {
                const float *at = scores + (int64_t)(key + 2 * i) * width;
                even[i] = odd[i] = v_set1(0.0f);
                if (key + 2 * i < n_keys)
                    even[i] = exp2_for_bf16(v_sub(v_load(at), from));
                if (key + 2 * i + 1 < n_keys)
                    odd[i] = exp2_for_bf16(v_sub(v_load(at + width), from));
                l = v_add(l, even[i]);
                l_odd = v_add(l_odd, odd[i]);
            }
            uint16_t *p = s->p + (int64_t)row * P_STRIDE + key;
            for (int32_t tile = 0; tile < s->tiles; tile++) {
                const float *scales = s->copies.scales + (int64_t)key * MLAI_DS656_TILES + tile;
                for (int32_t i = 0; i < TILE; i++) {
                    vec x = even[i], y = odd[i];
                    if (s->tiles > 1 && key + 2 * i < n_keys) {
                        x = v_mul(x, v_set1(scales[2 * i * MLAI_DS656_TILES]));
                        y = v_mul(y, v_set1(scales[(2 * i + 1) * MLAI_DS656_TILES]));
                    }
                    pairs[i] = join_pairs(x, y);
                }
                store_p(p + (int64_t)tile * MLAI_BLOCK_ROWS * P_STRIDE, pairs);
            }
        }
        take_max_and_sum(u, row, m, v_add(l, l_odd), s->a, s->b);
    }
}

/* ---- values --------------------------------------------------------------------------------- */

/* Columns column..column+width-1 of n_keys keys, a multiple of 32 of them: [pair of keys][width].
 */
static void interleave_panel(const scratch *s, const bf16_rows *rows, int32_t n_keys,
                             int64_t column, int64_t width)
{
    const void *zeros = s->copies.rows + MLAI_UNIT_KEYS * s->copies.row_halfs;
    for (int32_t pair = 0; pair < (n_keys + 2 * TILE - 1) / (2 * TILE) * TILE; pair++) {
        bool is_live = 2 * pair < n_keys;
        const uint16_t *v0 = is_live ? rows->values[2 * pair] : zeros;
        const uint16_t *v1 = is_live ? rows->values[2 * pair + 1] : zeros;
        uint32_t *out = s->panel + pair * width;
        for (int64_t c = 0; c < width; c += CHUNK) {
            __m512i x0 = _mm512_loadu_si512(v0 + column + c);
            __m512i x1 = _mm512_loadu_si512(v1 + column + c);
            _mm512_storeu_si512(out + c, _mm512_unpacklo_epi16(x0, x1));
            _mm512_storeu_si512(out + c + V_LANES, _mm512_unpackhi_epi16(x0, x1));
        }
    }
}

/* 16 rows from `row` on x 64 (or 32) columns of the panel. */
static void value_tile(const mlai_unit *u, const scratch *s, const uint16_t *p, int32_t n_keys,
                       int32_t row, int64_t column, int64_t width)
{
    clear_c();
    const uint32_t *v = s->panel;
    int64_t step = width * (int64_t)sizeof(uint32_t);
    for (int32_t key = 0; key < n_keys; key += 2 * TILE) {
        _tile_loadd(4, p + key, P_STRIDE * sizeof(uint16_t));
        _tile_loadd(5, v, step);
        _tile_loadd(6, v + TILE, step);
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 6);
        if (width == PANEL) {
            _tile_loadd(7, v + 2 * TILE, step);
            _tile_loadd(5, v + 3 * TILE, step);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 4, 5);
        }
        v += TILE * width;
    }
    const int64_t c_stride = PANEL * (int64_t)sizeof(float);
    _tile_stored(0, s->c, c_stride);
    _tile_stored(1, s->c + TILE, c_stride);
    if (width == PANEL) {
        _tile_stored(2, s->c + 2 * TILE, c_stride);
        _tile_stored(3, s->c + 3 * TILE, c_stride);
    }
    int32_t end = row + TILE < u->n_rows ? row + TILE : u->n_rows;
    for (int32_t r = row; r < end; r++) {
        const float *c = s->c + (int64_t)(r - row) * PANEL;
        vec acc[4] = {v_load(c), v_load(c + TILE), v_load(c + 2 * TILE), v_load(c + 3 * TILE)};
        if (width == PANEL)
            fold_row(4, u, s->a, s->b, r, column, acc);
        else
            fold_row(2, u, s->a, s->b, r, column, acc);
    }
}

static void values(const mlai_unit *u, const scratch *s, const bf16_rows *rows)
{
    int64_t columns = padded(u->shape->value_dims);
    for (int64_t column = 0; column < columns; column += PANEL) {
        int64_t width = columns - column < PANEL ? columns - column : PANEL;
        int64_t version = s->tiles > 1 ? column / MLAI_DS656_TILE : 0;
        interleave_panel(s, rows, u->n_keys, column, width);
        for (int32_t row = 0; row < u->n_rows; row += TILE) {
            int32_t n_keys = 0;
            for (int32_t r = row; r < row + TILE && r < u->n_rows; r++)
                n_keys = u->visible[r] > n_keys ? u->visible[r] : n_keys;
            n_keys = n_keys < u->n_keys ? n_keys : u->n_keys;
            if (n_keys == 0 && !u->is_first)
                continue;
            const uint16_t *p = s->p + (version * MLAI_BLOCK_ROWS + row) * P_STRIDE;
            value_tile(u, s, p, n_keys, row, column, width);
        }
    }
}

/* ---- the unit ------------------------------------------------------------------------------- */

static void unit(const mlai_unit *u)
{
    char *end;
    scratch s = cut_scratch(u->shape, u->scratch, &end);
    bf16_rows rows = take_rows(u, &s.copies, TILE_DIMS);
    int32_t padded_rows = (int32_t)tiles_up(u->n_rows);
    key_tiles tiles;
    /* The zero row of values beyond the live keys. */
    memset(s.copies.rows + MLAI_UNIT_KEYS * s.copies.row_halfs, 0,
           (size_t)s.copies.row_halfs * sizeof(uint16_t));
    find_tiles(u, &s, &rows, &tiles);
    configure_tiles();
    for (int32_t first = 0; first < padded_rows; first += GROUP) {
        int32_t width = padded_rows - first < GROUP ? padded_rows - first : GROUP;
        /* The group's own bound, so that a causal block skips what lies above its diagonal. */
        int32_t n_keys = 0;
        for (int32_t r = first; r < first + width && r < u->n_rows; r++)
            n_keys = u->visible[r] > n_keys ? u->visible[r] : n_keys;
        n_keys = n_keys < u->n_keys ? n_keys : u->n_keys;
        if (n_keys == 0 && !u->is_first)
            continue;
        score_group(u, &s, &tiles, first, width, n_keys);
        softmax_group(u, &s, first, width, n_keys);
    }
    values(u, &s, &rows);
    _tile_release();
}

const mlai_attention_kernel mlai_attention_bf16_amx_bf16 = {
    .name = "attention_bf16_amx_bf16",
    .lanes = TILE,
    .o_stride = o_stride,
    .q_bytes = q_bytes,
    .scratch_bytes = scratch_bytes,
    .pack_q = pack_q,
    .unit = unit,
    .fold = fold_triples,
    .finish = finish,
};
