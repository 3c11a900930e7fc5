/*
 * Attention of one unit of keys against one block of query rows in f32 arithmetic: any query and
 * any cache format, widened to f32. One source for the families c, avx2, avx512 and neon
 * (vec_f32.h); called by the drivers in src/cpu/decode.c and src/cpu/prefill.c through
 * mlai_attention_kernel.
 *
 * Rows lie in lanes, in groups of G_VECS vectors; a group goes through three stages:
 *
 *     Q packed [dims][group]        keys: row pointers            scores [keys][group]
 *     +--------------------+        k0 -> ........ D ........     +----------------+
 *     | d0: r0 r1 r2 ...   |   x    k1 -> ................     =  | k0: r0 r1 ...  |
 *     | d1: r0 r1 r2 ...   |        k2 -> ................        | k1: r0 r1 ...  |
 *     +--------------------+        (one value broadcast)         +----------------+
 *     tile: G_VECS vectors of rows x key_tile(G_VECS) keys in registers, one chain over the dims
 *
 *     softmax: scale, cap, mask, maximum over the unit, 2^(s - m), sum; in place, rows in lanes
 *
 *     o [rows][V] = o * a + (sum over keys of p[key][row] * v[key][column]) * b
 *     tile: O_ROWS rows x O_VECS vectors of columns in registers, one chain over the keys
 *
 * is_narrow (few heads): Q packed [row][dims], keys loaded as vectors of dims, one sum a lane,
 * lanes added at the end; tile: 4 rows x 4 keys (2 x 4 with 16 registers).
 *
 * f32 rows are read where they lie; others are widened to scratch once a unit (f32, at most
 * 256 x (D + 30) values). Columns of o are padded with zeros to a multiple of V_LANES.
 */
#include "cpu/attention_kernel.h"
#include "cpu/kernels/finish_row.h"
#include "cpu/kernels/softmax.h"
#include "cpu/kernels/vec_f32.h"
#include "cpu/kernels/widen_f32.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define KERNEL JOIN(mlai_attention_f32_, MLAI_FAMILY)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

/*
 * Register tiles, of 32 registers (AVX-512, NEON) or 16. With 32: 6 keys x 4 vectors of rows are 24
 * sums, 4 vectors of rows and one broadcast key, 29 in all; 10 loads for 24 products, so that 4
 * products a cycle need less than 2 loads; 24 chains hide a latency of 4 cycles in 4 units (16).
 */
#if defined(V_32_REGISTERS)
enum { G_VECS = 4, O_ROWS = 6, O_VECS = 4 };
#elif defined(__AVX2__)
enum { G_VECS = 2, O_ROWS = 6, O_VECS = 2 };
#else
enum { G_VECS = 2, O_ROWS = 4, O_VECS = 2 };
#endif
enum {
    S_ROWS = MLAI_UNIT_KEYS,
    GROUP = G_VECS * V_LANES,
    COPY_AHEAD = 4, /* rows that a copy prefetches ahead */
    LINE = 16       /* values in a cache line */
};

static int64_t padded(int64_t n)
{
    return (n + V_LANES - 1) / V_LANES * V_LANES;
}

static int64_t o_stride(const mlai_attention_shape *shape)
{
    return padded(shape->value_dims);
}

static int64_t key_dims(const mlai_attention_shape *shape)
{
    return (int64_t)shape->piece_dims[0] + (shape->n_pieces > 1 ? shape->piece_dims[1] : 0);
}

/* Dims of a row when each piece is padded to whole vectors. */
static int64_t padded_dims(const mlai_attention_shape *shape)
{
    int64_t n = 0;
    for (int32_t i = 0; i < shape->n_pieces; i++)
        n += padded(shape->piece_dims[i]);
    return n;
}

static uint64_t q_bytes(const mlai_attention_shape *shape, int32_t n_rows)
{
    int64_t dims = shape->is_narrow ? padded_dims(shape) : key_dims(shape);
    return (uint64_t)padded(n_rows) * (uint64_t)dims * sizeof(float);
}

/* ---- scratch -------------------------------------------------------------------------------- */

typedef struct scratch {
    float *scores; /* [S_ROWS][GROUP] */
    float *a;      /* [MLAI_BLOCK_ROWS] factor of the accumulator in the fold */
    float *b;      /* [MLAI_BLOCK_ROWS] factor of the unit */
    const void *
        *pointers[MLAI_MAX_PIECES + 1]; /* [MLAI_TILE_POINTERS] widened rows; last: values */
    float *rows; /* [MLAI_UNIT_KEYS + 1][row_floats] widened rows, the last one zeros */
    int64_t row_floats;
    int64_t offset[MLAI_MAX_PIECES + 1]; /* of a piece in a widened row; last: values */
} scratch;

static int64_t row_floats(const mlai_attention_shape *shape)
{
    return padded_dims(shape) + padded(shape->value_dims);
}

static uint64_t scratch_bytes(const mlai_attention_shape *shape, int32_t n_rows)
{
    (void)n_rows;
    uint64_t floats = (uint64_t)S_ROWS * GROUP + 2u * MLAI_BLOCK_ROWS +
                      (uint64_t)(MLAI_UNIT_KEYS + 1) * (uint64_t)row_floats(shape);
    return floats * sizeof(float) + (MLAI_MAX_PIECES + 1) * MLAI_TILE_POINTERS * sizeof(void *);
}

static scratch take_scratch(const mlai_unit *u)
{
    scratch s;
    char *at = u->scratch;
    for (int32_t i = 0; i <= MLAI_MAX_PIECES; i++) {
        s.pointers[i] = (const void **)at;
        at += MLAI_TILE_POINTERS * sizeof(void *);
    }
    s.scores = (float *)at;
    s.a = s.scores + (int64_t)S_ROWS * GROUP;
    s.b = s.a + MLAI_BLOCK_ROWS;
    s.rows = s.b + MLAI_BLOCK_ROWS;
    s.row_floats = row_floats(u->shape);
    int64_t offset = 0;
    for (int32_t i = 0; i < u->shape->n_pieces; i++) {
        s.offset[i] = offset;
        offset += padded(u->shape->piece_dims[i]);
    }
    s.offset[MLAI_MAX_PIECES] = offset;
    return s;
}

/* ---- queries -------------------------------------------------------------------------------- */

/* [row][padded dims] */
static void pack_q_narrow(const mlai_attention_shape *shape, float *q,
                          const void *const *const rows[], int32_t n_rows)
{
    for (int32_t row = 0; row < n_rows; row++) {
        for (int32_t piece = 0; piece < shape->n_pieces; piece++) {
            int64_t n = shape->piece_dims[piece], width = padded(n);
            widen_row(q, rows[piece][row], shape->q_format, (int32_t)n);
            for (int64_t i = n; i < width; i++)
                q[i] = 0.0f;
            q += width;
        }
    }
}

static void pack_q(const mlai_attention_shape *shape, void *q, const void *const *const rows[],
                   int32_t n_rows)
{
    enum { CHUNK = 64 };
    if (shape->is_narrow) {
        pack_q_narrow(shape, q, rows, n_rows);
        return;
    }
    float chunk[CHUNK];
    int64_t dims = key_dims(shape);
    int32_t n_vecs = (n_rows + V_LANES - 1) / V_LANES;
    int32_t bytes = mla_format_bytes(shape->q_format);
    for (int32_t first = 0; first < n_rows; first += GROUP) {
        int32_t vecs = n_vecs - first / V_LANES;
        int64_t width = (vecs < G_VECS ? vecs : G_VECS) * V_LANES;
        float *group = (float *)q + (int64_t)first * dims;
        for (int64_t lane = 0; lane < width; lane++) {
            float *out = group + lane;
            if (first + lane >= n_rows) {
                for (int64_t d = 0; d < dims; d++)
                    out[d * width] = 0.0f;
                continue;
            }
            for (int32_t piece = 0; piece < shape->n_pieces; piece++) {
                const char *in = rows[piece][first + lane];
                int32_t n = shape->piece_dims[piece];
                for (int32_t d = 0; d < n; d += CHUNK) {
                    int32_t part = n - d < CHUNK ? n - d : CHUNK;
                    widen_row(chunk, in + (int64_t)d * bytes, shape->q_format, part);
                    for (int32_t i = 0; i < part; i++)
                        out[(int64_t)(d + i) * width] = chunk[i];
                }
                out += n * width;
            }
        }
    }
}

/* ---- keys and values to f32 ----------------------------------------------------------------- */

typedef struct f32_rows {
    const void *const *keys[MLAI_MAX_PIECES];
    const void *const *values;
} f32_rows;

/* One kind of rows (a piece, or values) to scratch; pads columns and the odd row with zeros. */
static const void *const *widen_rows(const mlai_unit *u, const scratch *s, int32_t slot,
                                     const void *const *in, int32_t n, bool is_ds656_latent,
                                     int32_t format)
{
    int64_t width = padded(n);
    for (int32_t key = 0; key < u->n_keys; key++) {
        float *out = s->rows + key * s->row_floats + s->offset[slot];
        for (int32_t at = 0; at < n; at += 64)
            v_prefetch((const char *)in[key + COPY_AHEAD] + at);
        if (is_ds656_latent)
            widen_ds656_latent(out, in[key]);
        else
            widen_row(out, in[key], format, n);
        for (int64_t i = n; i < width; i++)
            out[i] = 0.0f;
        s->pointers[slot][key] = out;
    }
    float *zeros = s->rows + MLAI_UNIT_KEYS * s->row_floats + s->offset[slot];
    for (int64_t i = 0; i < width; i++)
        zeros[i] = 0.0f;
    for (int32_t key = u->n_keys; key < MLAI_TILE_POINTERS; key++)
        s->pointers[slot][key] = zeros;
    return s->pointers[slot];
}

static f32_rows take_rows(const mlai_unit *u, const scratch *s)
{
    const mlai_attention_shape *shape = u->shape;
    bool is_ds656 = shape->kv_format == MLA_FORMAT_DS656;
    bool is_f32 = shape->kv_format == MLA_FORMAT_F32;
    bool values_fit = is_f32 && shape->value_dims % V_LANES == 0;
    bool one_row = u->values == u->keys[0];
    f32_rows rows = {{NULL, NULL}, NULL};
    for (int32_t i = 0; i < shape->n_pieces; i++) {
        int32_t format = is_ds656 ? MLA_FORMAT_BF16 : shape->kv_format;
        bool fits = is_f32 && (!shape->is_narrow || shape->piece_dims[i] % V_LANES == 0);
        if (fits && !(one_row && i == 0 && !values_fit))
            rows.keys[i] = u->keys[i];
        else
            rows.keys[i] =
                widen_rows(u, s, i, u->keys[i], shape->piece_dims[i], is_ds656 && i == 0, format);
    }
    if (one_row)
        rows.values = rows.keys[0];
    else if (values_fit)
        rows.values = u->values;
    else
        rows.values = widen_rows(u, s, MLAI_MAX_PIECES, u->values, shape->value_dims, false,
                                 shape->kv_format);
    return rows;
}

/* ---- scores --------------------------------------------------------------------------------- */

/* n_keys keys from `key` on against n_vecs vectors of rows; both are constants after inlining. */
MLAI_INLINE void score_tile(const int32_t n_vecs, const int32_t n_keys, const mlai_unit *u,
                            const f32_rows *rows, const float *q, int32_t key, float *scores)
{
    vec acc[12][G_VECS];
    MLAI_UNROLL
    for (int32_t j = 0; j < n_keys; j++) {
        MLAI_UNROLL
        for (int32_t i = 0; i < n_vecs; i++)
            acc[j][i] = v_set1(0.0f);
    }
    for (int32_t piece = 0; piece < u->shape->n_pieces; piece++) {
        const float *k[12];
        MLAI_UNROLL
        for (int32_t j = 0; j < n_keys; j++)
            k[j] = rows->keys[piece][key + j];
        int64_t n = u->shape->piece_dims[piece];
        /* A cache line of each key at a time, and the same line of the tile that comes next. */
        for (int64_t line = 0; line < n; line += LINE) {
            MLAI_UNROLL
            for (int32_t j = 0; j < n_keys; j++)
                v_prefetch((const float *)rows->keys[piece][key + n_keys + j] + line);
            int64_t end = line + LINE < n ? line + LINE : n;
            for (int64_t d = line; d < end; d++) {
                vec row[G_VECS];
                MLAI_UNROLL
                for (int32_t i = 0; i < n_vecs; i++)
                    row[i] = v_load(q + i * V_LANES);
                MLAI_UNROLL
                for (int32_t j = 0; j < n_keys; j++) {
                    vec x = v_set1(k[j][d]);
                    MLAI_UNROLL
                    for (int32_t i = 0; i < n_vecs; i++)
                        acc[j][i] = v_fma(row[i], x, acc[j][i]);
                }
                q += n_vecs * V_LANES;
            }
        }
    }
    MLAI_UNROLL
    for (int32_t j = 0; j < n_keys; j++) {
        MLAI_UNROLL
        for (int32_t i = 0; i < n_vecs; i++)
            v_store(scores + ((int64_t)(key + j) * n_vecs + i) * V_LANES, acc[j][i]);
    }
}

MLAI_INLINE void score_keys(const int32_t n_vecs, const int32_t tile, const mlai_unit *u,
                            const f32_rows *rows, const float *q, int32_t n_keys, float *scores)
{
    int32_t key = 0;
    for (; key + tile <= n_keys; key += tile)
        score_tile(n_vecs, tile, u, rows, q, key, scores);
    for (; key < n_keys; key += 2)
        score_tile(n_vecs, 2, u, rows, q, key, scores);
}

static void score_group(const mlai_unit *u, const f32_rows *rows, const float *q, int32_t n_vecs,
                        int32_t n_keys, float *scores)
{
    n_keys += n_keys & 1;
    switch (n_vecs) {
#if defined(V_32_REGISTERS)
    case 4:
        score_keys(4, 6, u, rows, q, n_keys, scores);
        break;
    case 3:
        score_keys(3, 8, u, rows, q, n_keys, scores);
        break;
    case 2:
        score_keys(2, 12, u, rows, q, n_keys, scores);
        break;
    default:
        score_keys(1, 12, u, rows, q, n_keys, scores);
#elif defined(__AVX2__)
    case 2:
        score_keys(2, 6, u, rows, q, n_keys, scores);
        break;
    default:
        score_keys(1, 10, u, rows, q, n_keys, scores);
#else
    case 2:
        score_keys(2, 4, u, rows, q, n_keys, scores);
        break;
    default:
        score_keys(1, 6, u, rows, q, n_keys, scores);
#endif
    }
}

/* n_rows rows (from q on) and n_keys keys with dims in lanes; lanes are added at the end. */
MLAI_INLINE void narrow_tile(const int32_t n_rows, const int32_t n_keys, const mlai_unit *u,
                             const f32_rows *rows, const float *q, int32_t key, float *scores,
                             int64_t stride)
{
    vec acc[4][8];
    int64_t q_stride = padded_dims(u->shape);
    MLAI_UNROLL
    for (int32_t r = 0; r < 4; r++) {
        MLAI_UNROLL
        for (int32_t j = 0; j < 8; j++)
            acc[r][j] = v_set1(0.0f);
    }
    for (int32_t piece = 0; piece < u->shape->n_pieces; piece++) {
        const void *const *keys = rows->keys[piece] + key;
        int64_t n = padded(u->shape->piece_dims[piece]);
        for (int64_t d = 0; d < n; d += V_LANES) {
            vec x[8];
            MLAI_UNROLL
            for (int32_t j = 0; j < n_keys; j++) {
                x[j] = v_load((const float *)keys[j] + d);
                v_prefetch((const float *)keys[n_keys + j] + d);
            }
            MLAI_UNROLL
            for (int32_t r = 0; r < n_rows; r++) {
                vec row = v_load(q + r * q_stride + d);
                MLAI_UNROLL
                for (int32_t j = 0; j < n_keys; j++)
                    acc[r][j] = v_fma(row, x[j], acc[r][j]);
            }
        }
        q += n;
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
                    scores[(int64_t)(key + j + i) * stride + r] = four[i];
            }
        }
    }
}

MLAI_INLINE void narrow_rows(const int32_t n_rows, const int32_t tile, const mlai_unit *u,
                             const f32_rows *rows, const float *q, int32_t n_keys, float *scores,
                             int64_t stride)
{
    int32_t key = 0;
    for (; key + tile <= n_keys; key += tile)
        narrow_tile(n_rows, tile, u, rows, q, key, scores, stride);
    for (; key < n_keys; key += 2)
        narrow_tile(n_rows, 2, u, rows, q, key, scores, stride);
}

static void score_narrow(const mlai_unit *u, const f32_rows *rows, int32_t first, int32_t width,
                         int32_t n_keys, float *scores)
{
    int64_t dims = padded_dims(u->shape);
    int32_t end = first + width < u->n_rows ? first + width : u->n_rows;
    n_keys += n_keys & 1;
    if (end - first < width) /* lanes that hold no row */
        memset(scores, 0, (size_t)n_keys * (size_t)width * sizeof(float));
    for (int32_t row = first; row < end;) {
        const float *q = (const float *)u->q + row * dims;
        float *at = scores + (row - first);
#if defined(V_32_REGISTERS)
        if (end - row >= 4) {
            narrow_rows(4, 4, u, rows, q, n_keys, at, width);
            row += 4;
            continue;
        }
#endif
        if (end - row >= 2) {
            narrow_rows(2, 4, u, rows, q, n_keys, at, width);
            row += 2;
        } else {
            narrow_rows(1, 8, u, rows, q, n_keys, at, width);
            row += 1;
        }
    }
}

/* ---- softmax -------------------------------------------------------------------------------- */

/* Scores of a group to probabilities, in place. */
static void softmax_group(const mlai_unit *u, const scratch *s, int32_t first, int32_t n_vecs,
                          int32_t n_keys)
{
    int64_t stride = (int64_t)n_vecs * V_LANES;
    for (int32_t i = 0; i < n_vecs; i++) {
        float *scores = s->scores + (int64_t)i * V_LANES;
        int32_t row = first + i * V_LANES;
        vec m = scores_to_base2(u, scores, stride, n_keys, row);
        vec from = score_origin(m), l = v_set1(0.0f), l_odd = l;
        int32_t key = 0;
        for (; key + 2 <= n_keys; key += 2) {
            vec even = v_exp2(v_sub(v_load(scores + key * stride), from));
            vec odd = v_exp2(v_sub(v_load(scores + (key + 1) * stride), from));
            l = v_add(l, even);
            l_odd = v_add(l_odd, odd);
            v_store(scores + key * stride, even);
            v_store(scores + (key + 1) * stride, odd);
        }
        for (; key < n_keys; key++) {
            vec even = v_exp2(v_sub(v_load(scores + key * stride), from));
            l = v_add(l, even);
            v_store(scores + key * stride, even);
        }
        take_max_and_sum(u, row, m, v_add(l, l_odd), s->a, s->b);
    }
}

/* ---- values --------------------------------------------------------------------------------- */

/* Block rows row..row+n_rows-1, columns column..column + n_vecs vectors. p points at the first
 * row's probability of key 0. */
MLAI_INLINE void value_tile(const int32_t n_rows, const int32_t n_vecs, const mlai_unit *u,
                            const scratch *s, const void *const *values, int32_t n_keys,
                            const float *p, int64_t p_stride, int32_t row, int64_t column,
                            int64_t stride)
{
    vec acc[O_ROWS][O_VECS];
    MLAI_UNROLL
    for (int32_t r = 0; r < n_rows; r++) {
        MLAI_UNROLL
        for (int32_t i = 0; i < n_vecs; i++)
            acc[r][i] = v_set1(0.0f);
    }
    for (int32_t key = 0; key < n_keys; key++) {
        const float *v = (const float *)values[key] + column;
        vec x[O_VECS];
        MLAI_UNROLL
        for (int32_t i = 0; i < n_vecs; i++)
            x[i] = v_load(v + i * V_LANES);
        MLAI_UNROLL
        for (int32_t r = 0; r < n_rows; r++) {
            vec w = v_set1(p[r]);
            MLAI_UNROLL
            for (int32_t i = 0; i < n_vecs; i++)
                acc[r][i] = v_fma(w, x[i], acc[r][i]);
        }
        p += p_stride;
    }
    MLAI_UNROLL
    for (int32_t r = 0; r < n_rows; r++) {
        float *o = u->acc.o + (row + r) * stride + column;
        if (u->is_first) {
            MLAI_UNROLL
            for (int32_t i = 0; i < n_vecs; i++)
                v_store(o + i * V_LANES, acc[r][i]);
            continue;
        }
        vec a = v_set1(s->a[row + r]), b = v_set1(s->b[row + r]);
        MLAI_UNROLL
        for (int32_t i = 0; i < n_vecs; i++) {
            vec old = v_mul(v_load(o + i * V_LANES), a);
            v_store(o + i * V_LANES, v_fma(acc[r][i], b, old));
        }
    }
}

MLAI_INLINE void value_rows(const int32_t n_rows, const mlai_unit *u, const scratch *s,
                            const void *const *values, int32_t n_keys, const float *p,
                            int64_t p_stride, int32_t row, int64_t stride, int64_t column)
{
    if (column + O_VECS * V_LANES <= stride) {
        value_tile(n_rows, O_VECS, u, s, values, n_keys, p, p_stride, row, column, stride);
        return;
    }
    for (; column < stride; column += V_LANES)
        value_tile(n_rows, 1, u, s, values, n_keys, p, p_stride, row, column, stride);
}

static void values_group(const mlai_unit *u, const scratch *s, const void *const *values,
                         int32_t first, int32_t width, int32_t n_keys)
{
    int64_t stride = o_stride(u->shape);
    int32_t end = first + width < u->n_rows ? first + width : u->n_rows;
    for (int64_t column = 0; column < stride; column += O_VECS * V_LANES) {
        for (int32_t row = first; row < end; row += O_ROWS) {
            int32_t n_rows = end - row < O_ROWS ? end - row : O_ROWS;
            const float *p = s->scores + (row - first);
            int32_t seen = 0;
            for (int32_t r = 0; r < n_rows; r++)
                seen = u->visible[row + r] > seen ? u->visible[row + r] : seen;
            int32_t keys = seen < n_keys ? seen : n_keys;
            switch (n_rows) {
            case 1:
                value_rows(1, u, s, values, keys, p, width, row, stride, column);
                break;
            case 2:
                value_rows(2, u, s, values, keys, p, width, row, stride, column);
                break;
            case 3:
                value_rows(3, u, s, values, keys, p, width, row, stride, column);
                break;
#if defined(__AVX2__) || defined(V_32_REGISTERS)
            case 4:
                value_rows(4, u, s, values, keys, p, width, row, stride, column);
                break;
            case 5:
                value_rows(5, u, s, values, keys, p, width, row, stride, column);
                break;
#endif
            default:
                value_rows(O_ROWS, u, s, values, keys, p, width, row, stride, column);
            }
        }
    }
}

/* ---- the unit ------------------------------------------------------------------------------- */

static void unit(const mlai_unit *u)
{
    scratch s = take_scratch(u);
    f32_rows rows = take_rows(u, &s);
    int64_t dims = key_dims(u->shape);
    int32_t n_vecs = (u->n_rows + V_LANES - 1) / V_LANES;
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
        const float *q = (const float *)u->q + (int64_t)first * dims;
        if (u->shape->is_narrow)
            score_narrow(u, &rows, first, width, n_keys, s.scores);
        else
            score_group(u, &rows, q, vecs, n_keys, s.scores);
        softmax_group(u, &s, first, vecs, n_keys);
        values_group(u, &s, rows.values, first, width, n_keys);
    }
}

const mlai_attention_kernel KERNEL = {
    .name = "attention_f32_" TEXT(MLAI_FAMILY),
    .lanes = V_LANES,
    .o_stride = o_stride,
    .q_bytes = q_bytes,
    .scratch_bytes = scratch_bytes,
    .pack_q = pack_q,
    .unit = unit,
    .fold = fold_triples,
    .finish = finish,
};
