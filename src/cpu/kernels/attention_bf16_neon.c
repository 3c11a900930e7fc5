/*
 * Attention of one unit of keys against one block of query rows with the bf16 matrix product of
 * aarch64 (BFMMLA): q bf16 (or fp8, exact in bf16), cache bf16 or fp8 (exact) or ds656. Both
 * products sum in f32; probabilities are rounded to bf16, their sum is not. Called by the drivers
 * through mlai_attention_kernel.
 *
 * The instruction takes two rows of four values each and gives the 2 x 2 sums of their products:
 *
 *     a: r0(0-3) r1(0-3)   b: c0(0-3) c1(0-3)   ->  sum: r0c0 r0c1 r1c0 r1c1
 *
 * so both operands are packed as quads [quad][pair][2][4], a group of 4 pairs (8 rows, keys or
 * columns) next to each other, and one loop serves both products:
 *
 *     scores  a = Q [group of 8 rows][quad of dims]      b = 8 keys [quad of dims]
 *     values  a = P [group of 8 rows][quad of keys]      b = 8 columns [quad of keys]
 *
 *     32 registers: 4 x 4 sums of 2 x 2, 4 of a, 4 of b; 8 loads for 16 products of 32 FLOP; 16
 *     chains hide a latency of 4 in 4 units. Blocks of fewer than 8 rows leave out pairs.
 *
 * A tile of 8 keys is packed once for all rows of the block (9 KiB at 576 dims, first-level cache),
 * values 64 columns at a time (32 KiB). Rows whose width or format does not suit are made bf16 in
 * scratch first. ds656: the scores of each 128 dims are summed apart and then multiplied by the
 * key's scale of that tile; for the values the scale goes into P, one P a tile.
 *
 * Order of additions: rope or pieces in order, one chain over the quads; the four products of a
 * quad are added as the instruction does. It takes subnormals as zero.
 */
#include "cpu/kernels/finish_row.h"
#include "cpu/kernels/lanes.h"
#include "cpu/kernels/softmax.h"

enum {
    QUAD = 4,
    GROUP = 8, /* rows, keys or columns of a tile */
    PAIRS = GROUP / 2,
    STEP = GROUP * QUAD, /* values of a group's quad */
    GROUPS = MLAI_BLOCK_ROWS / GROUP,
    KEY_QUADS = MLAI_UNIT_KEYS / QUAD,
    PANEL = 64, /* columns packed at a time; a tile of ds656 is a multiple */
    P_GROUP = KEY_QUADS * STEP,
    P_SIZE = GROUPS * P_GROUP,
    ROWS_AHEAD = 8 /* that packing prefetches */
};

static int64_t round_up(int64_t n, int64_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}

static int64_t o_stride(const mlai_attention_shape *shape)
{
    return round_up(shape->value_dims, GROUP);
}

/* Quads of dims of a key, each piece rounded up. */
static int64_t dim_quads(const mlai_attention_shape *shape)
{
    int64_t n = 0;
    for (int32_t i = 0; i < shape->n_pieces; i++)
        n += round_up(shape->piece_dims[i], QUAD) / QUAD;
    return n;
}

static uint64_t q_bytes(const mlai_attention_shape *shape, int32_t n_rows)
{
    return (uint64_t)round_up(n_rows, GROUP) * (uint64_t)dim_quads(shape) * QUAD * sizeof(uint16_t);
}

/* ---- scratch -------------------------------------------------------------------------------- */

typedef struct scratch {
    float *scores;    /* [GROUPS][MLAI_UNIT_KEYS][GROUP] */
    uint16_t *p;      /* [tiles][GROUPS][KEY_QUADS][STEP] */
    uint16_t *keys;   /* [dim_quads][STEP], 8 keys */
    uint16_t *panel;  /* [PANEL / GROUP][KEY_QUADS][STEP] */
    float *a;         /* [MLAI_BLOCK_ROWS] factor of the accumulator in the fold */
    float *b;         /* [MLAI_BLOCK_ROWS] factor of the unit */
    float *scales;    /* [MLAI_DS656_TILES][MLAI_UNIT_KEYS], ds656 only; 0 past the last key */
    uint16_t *copies; /* [MLAI_UNIT_KEYS][copy_width], rows made bf16 */
    uint16_t *zeros;  /* [copy_width] */
    const void **pointers[MLAI_MAX_PIECES + 1]; /* [MLAI_UNIT_KEYS] to copies; last: values */
    int64_t offset[MLAI_MAX_PIECES + 1];        /* of a piece in a copy; last: values */
    int64_t copy_width;
    int32_t tiles; /* P's versions: 4 for ds656, else 1 */
} scratch;

static void *carve(char **at, uint64_t bytes)
{
    char *p = *at;
    *at += mlai_align_up(bytes, 64);
    return p;
}

static scratch cut_scratch(const mlai_attention_shape *shape, char *base, char **end)
{
    scratch s;
    char *at = base;
    s.tiles = shape->kv_format == MLA_FORMAT_DS656 ? MLAI_DS656_TILES : 1;
    s.copy_width = 0;
    for (int32_t i = 0; i < shape->n_pieces; i++) {
        s.offset[i] = s.copy_width;
        s.copy_width += round_up(shape->piece_dims[i], GROUP);
    }
    s.offset[MLAI_MAX_PIECES] = s.copy_width;
    s.copy_width += o_stride(shape);
    s.scores = carve(&at, (uint64_t)GROUPS * MLAI_UNIT_KEYS * GROUP * sizeof(float));
    s.p = carve(&at, (uint64_t)s.tiles * P_SIZE * sizeof(uint16_t));
    s.keys = carve(&at, (uint64_t)dim_quads(shape) * STEP * sizeof(uint16_t));
    s.panel = carve(&at, (uint64_t)PANEL / GROUP * KEY_QUADS * STEP * sizeof(uint16_t));
    s.a = carve(&at, MLAI_BLOCK_ROWS * sizeof(float));
    s.b = carve(&at, MLAI_BLOCK_ROWS * sizeof(float));
    s.scales = carve(&at, MLAI_DS656_TILES * MLAI_UNIT_KEYS * sizeof(float));
    s.copies = carve(&at, (uint64_t)MLAI_UNIT_KEYS * (uint64_t)s.copy_width * sizeof(uint16_t));
    s.zeros = carve(&at, (uint64_t)s.copy_width * sizeof(uint16_t));
    for (int32_t i = 0; i <= MLAI_MAX_PIECES; i++)
        s.pointers[i] = carve(&at, MLAI_UNIT_KEYS * sizeof(void *));
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

/* ---- rows to bf16 --------------------------------------------------------------------------- */

/* n values of bf16, e4m3 or e5m2 as bf16, which is exact: the upper halves of their f32. */
static void row_to_bf16(uint16_t *out, const void *in, int32_t format, int32_t n)
{
    if (format == MLA_FORMAT_BF16) {
        memcpy(out, in, (size_t)n * sizeof *out);
        return;
    }
    const uint8_t *bytes = in;
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint8x8_t x = vld1_u8(bytes + i);
        float32x4x2_t wide =
            format == MLA_FORMAT_E4M3 ? mlai_neon_from_e4m3(x) : mlai_neon_from_e5m2(x);
        vst1q_u16(out + i, vuzp2q_u16(vreinterpretq_u16_f32(wide.val[0]),
                                      vreinterpretq_u16_f32(wide.val[1])));
    }
    for (; i < n; i++) {
        float x = format == MLA_FORMAT_E4M3 ? mlai_lane_from_e4m3(bytes[i])
                                            : mlai_lane_from_e5m2(bytes[i]);
        out[i] = (uint16_t)(mlai_f32_bits(x) >> 16);
    }
}

/* [group][quad of dims][row pair][2][4]; rows beyond the last are zeros. */
static void pack_q(const mlai_attention_shape *shape, void *q, const void *const *const rows[],
                   int32_t n_rows)
{
    enum { CHUNK = 64 };
    uint16_t *out = q;
    int32_t bytes = mla_format_bytes(shape->q_format);
    for (int32_t first = 0; first < n_rows; first += GROUP) {
        for (int32_t piece = 0; piece < shape->n_pieces; piece++) {
            int32_t n = shape->piece_dims[piece];
            for (int32_t d = 0; d < n; d += CHUNK) {
                int32_t part = n - d < CHUNK ? n - d : CHUNK, quads = (part + QUAD - 1) / QUAD;
                for (int32_t lane = 0; lane < GROUP; lane++) {
                    uint16_t chunk[CHUNK] = {0};
                    if (first + lane < n_rows)
                        row_to_bf16(chunk,
                                    (const char *)rows[piece][first + lane] + (int64_t)d * bytes,
                                    shape->q_format, part);
                    for (int32_t i = 0; i < quads; i++)
                        memcpy(out + (int64_t)i * STEP + lane * QUAD, chunk + i * QUAD,
                               QUAD * sizeof *out);
                }
                out += (int64_t)quads * STEP;
            }
        }
    }
}

typedef struct bf16_rows {
    const void *const *keys[MLAI_MAX_PIECES];
    const void *const *values;
} bf16_rows;

static const void *const *copy_rows(const mlai_unit *u, const scratch *s, int32_t slot,
                                    const void *const *in, int32_t n, int32_t format)
{
    int64_t width = round_up(n, GROUP), bytes = (int64_t)n * mla_format_bytes(format);
    for (int32_t key = 0; key < u->n_keys; key++) {
        uint16_t *out = s->copies + key * s->copy_width + s->offset[slot];
        for (int64_t at = 0; at < bytes; at += 64)
            v_prefetch((const char *)in[key + ROWS_AHEAD] + at);
        row_to_bf16(out, in[key], format, n);
        for (int64_t i = n; i < width; i++)
            out[i] = 0;
        s->pointers[slot][key] = out;
    }
    return s->pointers[slot];
}

/* A unit's rows as bf16: keys of whole quads, values of whole groups of columns. */
static bf16_rows take_rows(const mlai_unit *u, const scratch *s)
{
    const mlai_attention_shape *shape = u->shape;
    bool is_ds656 = shape->kv_format == MLA_FORMAT_DS656;
    bool is_bf16 = shape->kv_format == MLA_FORMAT_BF16;
    bool values_fit = is_bf16 && shape->value_dims % GROUP == 0;
    bool one_row = u->values == u->keys[0];
    bf16_rows rows = {{NULL, NULL}, NULL};
    for (int32_t i = 0; i < shape->n_pieces; i++) {
        bool is_own = is_bf16 || (is_ds656 && i == 1);
        int32_t format = is_own ? MLA_FORMAT_BF16 : is_ds656 ? MLA_FORMAT_E4M3 : shape->kv_format;
        if (is_own && shape->piece_dims[i] % QUAD == 0 && !(one_row && i == 0 && !values_fit))
            rows.keys[i] = u->keys[i];
        else
            rows.keys[i] = copy_rows(u, s, i, u->keys[i], shape->piece_dims[i], format);
    }
    if (one_row)
        rows.values = rows.keys[0];
    else if (values_fit)
        rows.values = u->values;
    else
        rows.values =
            copy_rows(u, s, MLAI_MAX_PIECES, u->values, shape->value_dims, shape->kv_format);
    for (int32_t key = 0; is_ds656 && key < MLAI_UNIT_KEYS; key++) {
        float scales[MLAI_DS656_TILES] = {0};
        if (key < u->n_keys)
            memcpy(scales, (const char *)u->keys[0][key] + 512, sizeof scales);
        for (int32_t tile = 0; tile < MLAI_DS656_TILES; tile++)
            s->scales[tile * MLAI_UNIT_KEYS + key] = scales[tile];
    }
    memset(s->zeros, 0, (size_t)s->copy_width * sizeof *s->zeros);
    return rows;
}

/* ---- products ------------------------------------------------------------------------------- */

MLAI_INLINE bfloat16x8_t load_pair(const uint16_t *p)
{
    return vreinterpretq_bf16_u16(vld1q_u16(p));
}

MLAI_INLINE void clear(vec sum[PAIRS][PAIRS])
{
    MLAI_UNROLL
    for (int32_t i = 0; i < PAIRS; i++) {
        MLAI_UNROLL
        for (int32_t j = 0; j < PAIRS; j++)
            sum[i][j] = v_set1(0.0f);
    }
}

/* sum += a x b over n_quads quads; n_pairs pairs of rows. */
MLAI_INLINE void add_quads(const int32_t n_pairs, vec sum[PAIRS][PAIRS], const uint16_t *a,
                           const uint16_t *b, int64_t n_quads)
{
    for (int64_t quad = 0; quad < n_quads; quad++, a += STEP, b += STEP) {
        bfloat16x8_t y[PAIRS];
        MLAI_UNROLL
        for (int32_t j = 0; j < PAIRS; j++)
            y[j] = load_pair(b + j * 2 * QUAD);
        MLAI_UNROLL
        for (int32_t i = 0; i < n_pairs; i++) {
            bfloat16x8_t x = load_pair(a + i * 2 * QUAD);
            MLAI_UNROLL
            for (int32_t j = 0; j < PAIRS; j++)
                sum[i][j] = vbfmmlaq_f32(sum[i][j], x, y[j]);
        }
    }
}

/* One of the two rows of x = r0c0 r0c1 r1c0 r1c1 and y = r0c2 r0c3 r1c2 r1c3. */
MLAI_INLINE vec take_row(bool is_second, vec x, vec y)
{
    float64x2_t low = vreinterpretq_f64_f32(x), high = vreinterpretq_f64_f32(y);
    return vreinterpretq_f32_f64(is_second ? vzip2q_f64(low, high) : vzip1q_f64(low, high));
}

/* ---- scores --------------------------------------------------------------------------------- */

/* Keys key..key+7 to s->keys; those from n_keys on are zeros. */
static void pack_keys(const mlai_unit *u, const scratch *s, const bf16_rows *rows, int32_t key)
{
    uint16_t *out = s->keys;
    for (int32_t piece = 0; piece < u->shape->n_pieces; piece++) {
        int64_t quads = round_up(u->shape->piece_dims[piece], QUAD) / QUAD;
        for (int32_t j = 0; j < GROUP; j += 2) {
            const void *const *at = rows->keys[piece] + key + j;
            const uint16_t *even = key + j < u->n_keys ? at[0] : s->zeros;
            const uint16_t *odd = key + j + 1 < u->n_keys ? at[1] : s->zeros;
            if (rows->keys[piece] == u->keys[piece]) { /* not copied: ask for later ones */
                for (int64_t d = 0; d < quads * QUAD; d += 32) {
                    v_prefetch((const uint16_t *)u->keys[piece][key + j + ROWS_AHEAD] + d);
                    v_prefetch((const uint16_t *)u->keys[piece][key + j + ROWS_AHEAD + 1] + d);
                }
            }
            for (int64_t i = 0; i < quads; i++)
                vst1q_u16(out + i * STEP + j * QUAD,
                          vcombine_u16(vld1_u16(even + i * QUAD), vld1_u16(odd + i * QUAD)));
        }
        out += quads * STEP;
    }
}

/* n_pairs pairs of rows of a group against the 8 packed keys from `key` on. */
MLAI_INLINE void score_tile(const int32_t n_pairs, const mlai_unit *u, const scratch *s,
                            const uint16_t *q, int32_t key, float *scores)
{
    vec sum[PAIRS][PAIRS];
    clear(sum);
    if (s->tiles == 1) {
        add_quads(n_pairs, sum, q, s->keys, dim_quads(u->shape));
    } else { /* ds656: rope first, then each tile of 128 dims times its scale */
        const int64_t quads = MLAI_DS656_TILE / QUAD, rope = MLAI_DS656_TILES * quads * STEP;
        add_quads(n_pairs, sum, q + rope, s->keys + rope,
                  round_up(u->shape->piece_dims[1], QUAD) / QUAD);
        for (int32_t tile = 0; tile < MLAI_DS656_TILES; tile++) {
            const float *scales = s->scales + tile * MLAI_UNIT_KEYS + key;
            vec part[PAIRS][PAIRS];
            clear(part);
            add_quads(n_pairs, part, q + tile * quads * STEP, s->keys + tile * quads * STEP, quads);
            MLAI_UNROLL
            for (int32_t j = 0; j < PAIRS; j++) {
                float32x2_t two = vld1_f32(scales + 2 * j);
                vec scale = vcombine_f32(two, two);
                MLAI_UNROLL
                for (int32_t i = 0; i < n_pairs; i++)
                    sum[i][j] = v_fma(part[i][j], scale, sum[i][j]);
            }
        }
    }
    /* [key][8 rows]: even lanes belong to the pair's first key, odd ones to its second. */
    MLAI_UNROLL
    for (int32_t i = 0; i < n_pairs; i += 2) {
        MLAI_UNROLL
        for (int32_t j = 0; j < PAIRS; j++) {
            float *at = scores + (int64_t)(key + 2 * j) * GROUP + 2 * i;
            v_store(at, vuzp1q_f32(sum[i][j], sum[i + 1][j]));
            v_store(at + GROUP, vuzp2q_f32(sum[i][j], sum[i + 1][j]));
        }
    }
}

static void score_group(const mlai_unit *u, const scratch *s, const uint16_t *q, int32_t n_pairs,
                        int32_t key, float *scores)
{
    switch (n_pairs) {
    case 1:
        score_tile(1, u, s, q, key, scores);
        break;
    case 2:
        score_tile(2, u, s, q, key, scores);
        break;
    case 3:
        score_tile(3, u, s, q, key, scores);
        break;
    default:
        score_tile(PAIRS, u, s, q, key, scores);
    }
}

/* ---- softmax -------------------------------------------------------------------------------- */

/* Probabilities p[key][4 rows] of four keys to two pairs of rows [2][4 keys]. */
MLAI_INLINE void store_quad(uint16_t *out, const vec p[QUAD], const float *scales)
{
    float32x4x2_t k01 = vtrnq_f32(p[0], p[1]), k23 = vtrnq_f32(p[2], p[3]);
    vec row[QUAD] = {
        take_row(false, k01.val[0], k23.val[0]), take_row(false, k01.val[1], k23.val[1]),
        take_row(true, k01.val[0], k23.val[0]), take_row(true, k01.val[1], k23.val[1])};
    MLAI_UNROLL
    for (int32_t i = 0; i < QUAD; i += 2) {
        vec even = row[i], odd = row[i + 1];
        if (scales) {
            even = v_mul(even, v_load(scales));
            odd = v_mul(odd, v_load(scales));
        }
        vst1q_u16(out + i * QUAD, mlai_neon_to_bf16(even, odd));
    }
}

/* Block rows first..first+3, which are 4 of a group: scores to P, for n_keys keys. */
static void softmax_rows(const mlai_unit *u, const scratch *s, float *scores, int32_t first,
                         int32_t n_keys)
{
    vec m = scores_to_base2(u, scores, GROUP, n_keys, first);
    vec from = score_origin(m), l[2] = {v_set1(0.0f), v_set1(0.0f)};
    uint16_t *p = s->p + (int64_t)(first / GROUP) * P_GROUP + first % GROUP * QUAD;
    for (int32_t key = 0; key < n_keys; key += QUAD, p += STEP) {
        vec e[QUAD];
        MLAI_UNROLL
        for (int32_t i = 0; i < QUAD; i++) {
            e[i] = v_set1(0.0f);
            if (key + i < n_keys)
                e[i] = v_exp2(v_sub(v_load(scores + (int64_t)(key + i) * GROUP), from));
            l[i % 2] = v_add(l[i % 2], e[i]);
        }
        if (s->tiles == 1) {
            store_quad(p, e, NULL);
            continue;
        }
        for (int32_t tile = 0; tile < MLAI_DS656_TILES; tile++)
            store_quad(p + (int64_t)tile * P_SIZE, e, s->scales + tile * MLAI_UNIT_KEYS + key);
    }
    take_max_and_sum(u, first, m, v_add(l[0], l[1]), s->a, s->b);
}

/* ---- values --------------------------------------------------------------------------------- */

/* `width` columns of the first n_quads quads of keys to the panel. */
static void pack_values(const mlai_unit *u, const scratch *s, const void *const *values,
                        int32_t n_quads, int64_t column, int64_t width)
{
    for (int32_t quad = 0; quad < n_quads; quad++) {
        const uint16_t *v[QUAD];
        for (int32_t i = 0; i < QUAD; i++) {
            int32_t key = quad * QUAD + i;
            v[i] = key < u->n_keys ? (const uint16_t *)values[key] + column : s->zeros;
        }
        for (int64_t at = 0; at < width; at += GROUP) {
            uint16_t *out = s->panel + at / GROUP * P_GROUP + (int64_t)quad * STEP;
            uint16x8x2_t k01 = vzipq_u16(vld1q_u16(v[0] + at), vld1q_u16(v[1] + at));
            uint16x8x2_t k23 = vzipq_u16(vld1q_u16(v[2] + at), vld1q_u16(v[3] + at));
            MLAI_UNROLL
            for (int32_t half = 0; half < 2; half++) {
                uint32x4x2_t all = vzipq_u32(vreinterpretq_u32_u16(k01.val[half]),
                                             vreinterpretq_u32_u16(k23.val[half]));
                vst1q_u16(out + half * 4 * QUAD, vreinterpretq_u16_u32(all.val[0]));
                vst1q_u16(out + half * 4 * QUAD + 2 * QUAD, vreinterpretq_u16_u32(all.val[1]));
            }
        }
    }
}

/* n_pairs pairs of rows from `row` on x 8 columns from `column` on. */
MLAI_INLINE void value_tile(const int32_t n_pairs, const mlai_unit *u, const scratch *s,
                            const uint16_t *p, const uint16_t *panel, int32_t n_quads, int32_t row,
                            int64_t column, int64_t stride)
{
    vec sum[PAIRS][PAIRS];
    clear(sum);
    add_quads(n_pairs, sum, p, panel, n_quads);
    MLAI_UNROLL
    for (int32_t r = 0; r < 2 * n_pairs; r++) {
        if (row + r >= u->n_rows)
            continue;
        float *o = u->acc.o + (row + r) * stride + column;
        MLAI_UNROLL
        for (int32_t half = 0; half < 2; half++) {
            vec x = take_row(r % 2, sum[r / 2][2 * half], sum[r / 2][2 * half + 1]);
            float *at = o + half * V_LANES;
            if (!u->is_first)
                x = v_fma(x, v_set1(s->b[row + r]), v_mul(v_load(at), v_set1(s->a[row + r])));
            v_store(at, x);
        }
    }
}

static void value_group(const mlai_unit *u, const scratch *s, const uint16_t *p,
                        const uint16_t *panel, int32_t n_quads, int32_t n_pairs, int32_t row,
                        int64_t column, int64_t stride)
{
    switch (n_pairs) {
    case 1:
        value_tile(1, u, s, p, panel, n_quads, row, column, stride);
        break;
    case 2:
        value_tile(2, u, s, p, panel, n_quads, row, column, stride);
        break;
    case 3:
        value_tile(3, u, s, p, panel, n_quads, row, column, stride);
        break;
    default:
        value_tile(PAIRS, u, s, p, panel, n_quads, row, column, stride);
    }
}

/* ---- the unit ------------------------------------------------------------------------------- */

static int32_t pairs_of_group(const mlai_unit *u, int32_t first)
{
    int32_t n_rows = u->n_rows - first < GROUP ? u->n_rows - first : GROUP;
    return (n_rows + 1) / 2;
}

/* Keys that each group of rows sees, so that a causal block skips what lies above its diagonal. */
static int32_t find_bounds(const mlai_unit *u, int32_t bounds[GROUPS])
{
    int32_t most = 0;
    for (int32_t first = 0; first < u->n_rows; first += GROUP) {
        int32_t seen = 0;
        for (int32_t r = first; r < first + GROUP && r < u->n_rows; r++)
            seen = u->visible[r] > seen ? u->visible[r] : seen;
        bounds[first / GROUP] = seen < u->n_keys ? seen : u->n_keys;
        most = bounds[first / GROUP] > most ? bounds[first / GROUP] : most;
    }
    return most;
}

static void unit(const mlai_unit *u)
{
    char *end;
    scratch s = cut_scratch(u->shape, u->scratch, &end);
    bf16_rows rows = take_rows(u, &s);
    const int64_t q_group = dim_quads(u->shape) * STEP, stride = o_stride(u->shape);
    int32_t bounds[GROUPS];
    const int32_t most = find_bounds(u, bounds);
    for (int32_t key = 0; key < most; key += GROUP) {
        pack_keys(u, &s, &rows, key);
        for (int32_t first = 0; first < u->n_rows; first += GROUP) {
            int32_t group = first / GROUP;
            if (key < bounds[group])
                score_group(u, &s, (const uint16_t *)u->q + group * q_group,
                            pairs_of_group(u, first), key,
                            s.scores + (int64_t)group * MLAI_UNIT_KEYS * GROUP);
        }
    }
    for (int32_t first = 0; first < u->n_rows; first += V_LANES) {
        int32_t group = first / GROUP;
        float *scores = s.scores + (int64_t)group * MLAI_UNIT_KEYS * GROUP + first % GROUP;
        if (bounds[group] > 0 || u->is_first)
            softmax_rows(u, &s, scores, first, bounds[group]);
    }
    for (int64_t column = 0; column < stride; column += PANEL) {
        int64_t width = stride - column < PANEL ? stride - column : PANEL;
        const uint16_t *p = s.p + (s.tiles > 1 ? column / MLAI_DS656_TILE * P_SIZE : 0);
        pack_values(u, &s, rows.values, (most + QUAD - 1) / QUAD, column, width);
        for (int32_t first = 0; first < u->n_rows; first += GROUP) {
            int32_t group = first / GROUP, n_quads = (bounds[group] + QUAD - 1) / QUAD;
            if (n_quads == 0 && !u->is_first)
                continue;
            for (int64_t at = 0; at < width; at += GROUP)
                value_group(u, &s, p + (int64_t)group * P_GROUP, s.panel + at / GROUP * P_GROUP,
                            n_quads, pairs_of_group(u, first), first, column + at, stride);
        }
    }
}

const mlai_attention_kernel mlai_attention_bf16_neon_bf16 = {
    .name = "attention_bf16_neon_bf16",
    .lanes = GROUP,
    .o_stride = o_stride,
    .q_bytes = q_bytes,
    .scratch_bytes = scratch_bytes,
    .pack_q = pack_q,
    .unit = unit,
    .fold = fold_triples,
    .finish = finish,
};
