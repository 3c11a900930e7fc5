/*
 * absorb and project: out[t, h, :] = x[t, h, :] x w[h], [K] x [K, n], for x [T, H, K] of f32 bf16
 * f16 and w [H, K, n] of the same format or f32, with n or K contiguous. f32 sums.
 *
 *   n contiguous  sums[row][columns] += x[row][k] * w[k][columns], k ascending, one sum an output
 *   K contiguous  for each 512 of K: 16 sums an output, sum l over k = l, l + 16, ..; folded
 *                 16 -> 8 -> 4 -> 2 -> 1 and added to the output's sum, then the last K % 16
 *
 * Work is cut into (head, panel of columns, group of rows); a weight panel is read once a group and
 * serves MR rows at a time from the registers:
 *
 *            NR vectors of columns                      columns c (K contiguous)
 *   rows  +----------------------+             rows   +-----------+
 *    MR   | sums in registers    |  <- x[row][k]      | 16 sums   |  <- x[row][k..], w[c][k..]
 *         +----------------------+     times w[k][..] | in vectors|
 *
 * bf16 by bf16 goes by pairs where there is an instruction for it: product_bf16.h.
 *
 * The order of an output's sum depends on K alone, so a row has the same bits in any company. With
 * a gate g the value is rounded to out's format, times 1 / (1 + exp(-g)) in f32, and rounded again.
 * Called through the families' tables.
 */
#include "cpu/elementwise.h"
#include "cpu/kernels/lanes.h"
#include "cpu/kernels/load_vec.h"

/* Tiles machines start VDPBF16PS every other cycle, which is no faster than their f32 sums. */
#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
#define MLAI_PAIRS_OF_BF16
#include "cpu/kernels/product_bf16.h"
#endif

#if defined(__AVX512F__)
enum { MR = 8, NR = 2, NR_PAIR = 4, NR_ONE = 16, DOT_ROWS = 4, DOT_COLUMNS = 4, DOT_ONE = 8 };
#elif defined(__AVX2__)
enum { MR = 4, NR = 2, NR_PAIR = 4, NR_ONE = 8, DOT_ROWS = 2, DOT_COLUMNS = 2, DOT_ONE = 4 };
#elif defined(MLAI_NEON)
/* 24 sums (6 rows x 4 vectors; 2 x 3 outputs of 4 vectors) of 32 registers, at least 16 of them
 * independent for 4 units of latency 4. */
enum { MR = 6, NR = 4, NR_PAIR = 8, NR_ONE = 16, DOT_ROWS = 2, DOT_COLUMNS = 3, DOT_ONE = 6 };
#else
enum { MR = 4, NR = 2, NR_PAIR = 4, NR_ONE = 8, DOT_ROWS = 2, DOT_COLUMNS = 1, DOT_ONE = 2 };
#endif
enum { PANEL = 512, DEPTH = 512, GROUP_ROWS = 64, DOT_LANES = 16, DOT_VECTORS = 16 / V_LANES };

typedef struct product {
    mla_tensor x;    /* [T, H, K] */
    mla_tensor w;    /* [H, K, n] */
    mla_tensor out;  /* [T, H, n] */
    mla_tensor gate; /* absent, or [T, H, n] */
    int64_t n_panels, panel, n_groups, group_rows;
} product;

/* One weight panel: element (k, c) is at data[k * k_stride + c * c_stride], one stride is 1. */
typedef struct weights {
    const char *data;
    int64_t k_stride, c_stride;
    int32_t format;
    bool is_dot; /* K contiguous; of the whole weight, so that panels do not differ */
} weights;

MLAI_INLINE float load_one(const void *p, int32_t format)
{
    float value;
    if (format == MLA_FORMAT_F32) {
        memcpy(&value, p, sizeof value);
        return value;
    }
    uint16_t half;
    memcpy(&half, p, sizeof half);
    return format == MLA_FORMAT_BF16 ? mlai_f32_from_bf16(half) : mlai_lane_from_f16(half);
}

/* One step of a sum, rounded as the vectors of this family round it. */
MLAI_INLINE float add_product(float a, float b, float c)
{
#if defined(__FMA__) || defined(MLAI_NEON)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* ---- n contiguous ------------------------------------------------------------------------------
 */

/* `rows` x `vectors` of sums over `depth` steps. x has a row stride of DEPTH, sums one of PANEL. */
MLAI_INLINE void outer_tile(float *sums, const float *x, const char *w, int64_t k_bytes,
                            int64_t depth, const int32_t rows, const int32_t vectors,
                            const int32_t format)
{
    const int64_t vector_bytes = V_LANES * (format == MLA_FORMAT_F32 ? 4 : 2);
    vec s[MR][NR_ONE];
    MLAI_UNROLL
    for (int32_t r = 0; r < rows; r++)
        MLAI_UNROLL
    for (int32_t v = 0; v < vectors; v++)
        s[r][v] = v_load(sums + r * PANEL + v * V_LANES);
    for (int64_t k = 0; k < depth; k++) {
        vec column[NR_ONE];
        MLAI_UNROLL
        for (int32_t v = 0; v < vectors; v++)
            column[v] = load_vec(w + k * k_bytes + v * vector_bytes, format);
        MLAI_UNROLL
        for (int32_t r = 0; r < rows; r++) {
            const vec factor = v_set1(x[r * DEPTH + k]);
            MLAI_UNROLL
            for (int32_t v = 0; v < vectors; v++)
                s[r][v] = v_fma(factor, column[v], s[r][v]);
        }
    }
    MLAI_UNROLL
    for (int32_t r = 0; r < rows; r++)
        MLAI_UNROLL
    for (int32_t v = 0; v < vectors; v++)
        v_store(sums + r * PANEL + v * V_LANES, s[r][v]);
}

/* All columns of a panel for `rows` rows: tiles of `vectors`, then one vector, then one by one. */
MLAI_INLINE void outer_columns(float *sums, const float *x, const weights *w, int64_t depth,
                               int64_t columns, const int32_t rows, const int32_t vectors,
                               const int32_t format)
{
    const int64_t bytes = format == MLA_FORMAT_F32 ? 4 : 2, k_bytes = w->k_stride * bytes;
    int64_t c = 0;
    for (; c + vectors * V_LANES <= columns; c += vectors * V_LANES)
        outer_tile(sums + c, x, w->data + c * bytes, k_bytes, depth, rows, vectors, format);
    for (; c + V_LANES <= columns; c += V_LANES)
        outer_tile(sums + c, x, w->data + c * bytes, k_bytes, depth, rows, 1, format);
    for (; c < columns; c++)
        for (int32_t r = 0; r < rows; r++) {
            float sum = sums[r * PANEL + c];
            for (int64_t k = 0; k < depth; k++)
                sum = add_product(x[r * DEPTH + k],
                                  load_one(w->data + k * k_bytes + c * bytes, format), sum);
            sums[r * PANEL + c] = sum;
        }
}

MLAI_INLINE void outer_rows(float *sums, const float *x, const weights *w, int64_t depth,
                            int64_t columns, int64_t rows, const int32_t format)
{
    int64_t r = 0;
    for (; r + MR <= rows; r += MR)
        outer_columns(sums + r * PANEL, x + r * DEPTH, w, depth, columns, MR, NR, format);
    for (; r + 2 <= rows; r += 2)
        outer_columns(sums + r * PANEL, x + r * DEPTH, w, depth, columns, 2, NR_PAIR, format);
    if (r < rows)
        outer_columns(sums + r * PANEL, x + r * DEPTH, w, depth, columns, 1, NR_ONE, format);
}

/* ---- K contiguous ------------------------------------------------------------------------------
 */

/* 16 sums of one output, folded in halves: 16 -> 8 -> 4 -> 2 -> 1. */
MLAI_INLINE float fold_lanes(const vec *s)
{
#if defined(__AVX2__)
#if defined(__AVX512F__)
    const __m256 eight =
        _mm256_add_ps(_mm512_castps512_ps256(s[0]), _mm512_extractf32x8_ps(s[0], 1));
#else
    const __m256 eight = _mm256_add_ps(s[0], s[1]);
#endif
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    const vec four = v_add(v_add(s[0], s[2]), v_add(s[1], s[3]));
    return (four[0] + four[2]) + (four[1] + four[3]);
#endif
}

#if defined(__AVX512F__)
/* The same for 4 rows x 4 columns at once, added to their sums: each step halves two vectors into
 * one, and leaves row r's columns in quarter r. */
MLAI_INLINE void fold_tile(float *sums, vec s[DOT_ROWS][DOT_ONE][DOT_VECTORS])
{
    vec by_column[4], by_pair[2];
    MLAI_UNROLL
    for (int32_t c = 0; c < 4; c++) {
        const vec a = s[0][c][0], b = s[1][c][0], d = s[2][c][0], e = s[3][c][0];
        const vec ab = v_add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        const vec de = v_add(_mm512_shuffle_f32x4(d, e, 0x44), _mm512_shuffle_f32x4(d, e, 0xee));
        by_column[c] =
            v_add(_mm512_shuffle_f32x4(ab, de, 0x88), _mm512_shuffle_f32x4(ab, de, 0xdd));
    }
    MLAI_UNROLL
    for (int32_t k = 0; k < 2; k++) {
        const __m512d a = _mm512_castps_pd(by_column[2 * k]);
        const __m512d b = _mm512_castps_pd(by_column[2 * k + 1]);
        by_pair[k] = v_add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                           _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const vec all = v_add(_mm512_shuffle_ps(by_pair[0], by_pair[1], 0x88),
                          _mm512_shuffle_ps(by_pair[0], by_pair[1], 0xdd));
    float folded[16];
    v_store(folded, all);
    MLAI_UNROLL
    for (int32_t r = 0; r < 4; r++)
        _mm_storeu_ps(sums + r * PANEL,
                      _mm_add_ps(_mm_loadu_ps(sums + r * PANEL), _mm_loadu_ps(folded + 4 * r)));
}
#endif

/* The last K % 16 products of each output, one by one. */
static void dot_tail(float *sums, const float *x, const char *w, int64_t c_bytes, int64_t depth,
                     int32_t rows, int32_t columns, int32_t format)
{
    const int64_t bytes = format == MLA_FORMAT_F32 ? 4 : 2;
    for (int32_t r = 0; r < rows; r++)
        for (int32_t c = 0; c < columns; c++)
            for (int64_t k = 0; k < depth; k++)
                sums[r * PANEL + c] =
                    add_product(x[r * DEPTH + k], load_one(w + c * c_bytes + k * bytes, format),
                                sums[r * PANEL + c]);
}

/* Adds the products of one chunk to `rows` x `columns` outputs. x has a row stride of DEPTH. */
MLAI_INLINE void dot_tile(float *sums, const float *x, const char *w, int64_t c_bytes,
                          int64_t depth, const int32_t rows, const int32_t columns,
                          const int32_t format)
{
    const int64_t bytes = format == MLA_FORMAT_F32 ? 4 : 2;
    vec s[DOT_ROWS][DOT_ONE][DOT_VECTORS];
    MLAI_UNROLL
    for (int32_t r = 0; r < rows; r++)
        MLAI_UNROLL
    for (int32_t c = 0; c < columns; c++)
        MLAI_UNROLL
    for (int32_t v = 0; v < DOT_VECTORS; v++)
        s[r][c][v] = v_set1(0.0f);
    int64_t k = 0;
    for (; k + DOT_LANES <= depth; k += DOT_LANES)
        MLAI_UNROLL
    for (int32_t v = 0; v < DOT_VECTORS; v++) {
        const int64_t at = k + v * V_LANES;
        vec row[DOT_ROWS];
        MLAI_UNROLL
        for (int32_t r = 0; r < rows; r++)
            row[r] = v_load(x + r * DEPTH + at);
        MLAI_UNROLL
        for (int32_t c = 0; c < columns; c++) {
            const vec column = load_vec(w + c * c_bytes + at * bytes, format);
            MLAI_UNROLL
            for (int32_t r = 0; r < rows; r++)
                s[r][c][v] = v_fma(row[r], column, s[r][c][v]);
        }
    }
#if defined(__AVX512F__)
    if (rows == 4 && columns == 4) {
        fold_tile(sums, s);
    } else
#endif
    {
        MLAI_UNROLL
        for (int32_t r = 0; r < rows; r++)
            MLAI_UNROLL
        for (int32_t c = 0; c < columns; c++)
            sums[r * PANEL + c] += fold_lanes(s[r][c]);
    }
    if (k < depth)
        dot_tail(sums, x + k, w + k * bytes, c_bytes, depth - k, rows, columns, format);
}

MLAI_INLINE void dot_columns(float *sums, const float *x, const weights *w, int64_t depth,
                             int64_t n_columns, const int32_t rows, const int32_t columns,
                             const int32_t format)
{
    const int64_t c_bytes = w->c_stride * (format == MLA_FORMAT_F32 ? 4 : 2);
    int64_t c = 0;
    for (; c + columns <= n_columns; c += columns)
        dot_tile(sums + c, x, w->data + c * c_bytes, c_bytes, depth, rows, columns, format);
    for (; c < n_columns; c++)
        dot_tile(sums + c, x, w->data + c * c_bytes, c_bytes, depth, rows, 1, format);
}

MLAI_INLINE void dot_rows(float *sums, const float *x, const weights *w, int64_t depth,
                          int64_t columns, int64_t rows, const int32_t format)
{
    int64_t r = 0;
    for (; DOT_ROWS > 1 && r + DOT_ROWS <= rows; r += DOT_ROWS)
        dot_columns(sums + r * PANEL, x + r * DEPTH, w, depth, columns, DOT_ROWS, DOT_COLUMNS,
                    format);
    for (; r < rows; r++)
        dot_columns(sums + r * PANEL, x + r * DEPTH, w, depth, columns, 1, DOT_ONE, format);
}

/* ---- both --------------------------------------------------------------------------------------
 */

/* One function a weight format, so that each is compiled for itself. */
#define CHUNK_FUNCTION(name, format)                                                               \
    static void name(float *sums, const float *x, const weights *w, int64_t depth,                 \
                     int64_t columns, int64_t rows)                                                \
    {                                                                                              \
        if (w->is_dot)                                                                             \
            dot_rows(sums, x, w, depth, columns, rows, format);                                    \
        else                                                                                       \
            outer_rows(sums, x, w, depth, columns, rows, format);                                  \
    }
CHUNK_FUNCTION(chunk_f32, MLA_FORMAT_F32)
CHUNK_FUNCTION(chunk_bf16, MLA_FORMAT_BF16)
CHUNK_FUNCTION(chunk_f16, MLA_FORMAT_F16)

static void widen_row(float *out, const char *in, int32_t format, int64_t n)
{
    mlai_widen(out, in, format, n);
}

static void narrow_row(char *out, int32_t format, const float *in, int64_t n)
{
    mlai_narrow(out, format, in, n);
}

/* Up to MR rows x one panel, by chunks of DEPTH, each with its part of x widened once. */
static void block(float *sums, const char *x, int64_t x_row_bytes, int32_t x_format,
                  const weights *w, int64_t depth, int64_t columns, int64_t rows)
{
    _Alignas(64) float wide[MR * DEPTH];
    const int64_t x_bytes = mlai_lane_bytes(x_format);
    for (int64_t r = 0; r < rows; r++)
        memset(sums + r * PANEL, 0, (size_t)columns * sizeof *sums);
    for (int64_t first = 0; first < depth; first += DEPTH) {
        const int64_t count = mlai_min_i64(DEPTH, depth - first);
        for (int64_t r = 0; r < rows; r++)
            widen_row(wide + r * DEPTH, x + r * x_row_bytes + first * x_bytes, x_format, count);
        weights chunk = *w;
        chunk.data += first * w->k_stride * mlai_lane_bytes(w->format);
        if (w->format == MLA_FORMAT_BF16)
            chunk_bf16(sums, wide, &chunk, count, columns, rows);
        else if (w->format == MLA_FORMAT_F16)
            chunk_f16(sums, wide, &chunk, count, columns, rows);
        else
            chunk_f32(sums, wide, &chunk, count, columns, rows);
    }
}

/* ---- output ------------------------------------------------------------------------------------
 */

/* x = x / (1 + exp(-g)), by exp of -|g| so that it cannot overflow. In vectors; n <= PANEL. */
static void apply_gate(float *x, const char *gate, int32_t format, int64_t n)
{
    float g[PANEL + V_LANES] = {0};
    const vec one = v_set1(1.0f), zero = v_set1(0.0f);
    widen_row(g, gate, format, n);
    for (int64_t i = 0; i < n; i += V_LANES) {
        const vec value = v_load(g + i);
        const vec e = v_exp2(v_mul(v_abs(value), v_set1(-1.442695040888963f)));
        const vec sigmoid = v_div(v_select(v_less(value, zero), e, one), v_add(one, e));
        v_store(g + i, sigmoid);
    }
    for (int64_t i = 0; i < n; i++)
        x[i] *= g[i];
}

static void store_row(const product *p, float *sums, int64_t token, int64_t head, int64_t first,
                      int64_t columns)
{
    const mla_tensor *out = &p->out, *gate = &p->gate;
    const int64_t at = token * out->stride[0] + head * out->stride[1] + first;
    char *row = (char *)out->data + at * mlai_lane_bytes(out->format);
    if (mlai_present(gate)) {
        const int64_t gate_at = token * gate->stride[0] + head * gate->stride[1] + first;
        narrow_row(row, out->format, sums, columns);
        widen_row(sums, row, out->format, columns);
        apply_gate(sums, (const char *)gate->data + gate_at * mlai_lane_bytes(gate->format),
                   gate->format, columns);
    }
    narrow_row(row, out->format, sums, columns);
}

static void product_item(const product *p, int64_t head, int64_t panel, int64_t group)
{
    const int64_t depth = p->x.shape[2], first = panel * p->panel;
    const int64_t columns = mlai_min_i64(p->panel, p->w.shape[2] - first);
    const int64_t end = mlai_min_i64((group + 1) * GROUP_ROWS, p->x.shape[0]);
    const int64_t x_bytes = mlai_lane_bytes(p->x.format), w_bytes = mlai_lane_bytes(p->w.format);
    weights w = {.k_stride = p->w.stride[1], .c_stride = p->w.stride[2], .format = p->w.format};
    w.is_dot = w.c_stride != 1 && p->w.shape[2] > 1;
    w.data = (const char *)p->w.data + (head * p->w.stride[0] + first * w.c_stride) * w_bytes;
    _Alignas(64) float sums[MR * PANEL];
    for (int64_t token = group * GROUP_ROWS; token < end; token += MR) {
        const int64_t rows = mlai_min_i64(MR, end - token);
        const char *x =
            (const char *)p->x.data + (token * p->x.stride[0] + head * p->x.stride[1]) * x_bytes;
        block(sums, x, p->x.stride[0] * x_bytes, p->x.format, &w, depth, columns, rows);
        for (int64_t r = 0; r < rows; r++)
            store_row(p, sums + r * PANEL, token + r, head, first, columns);
    }
}

#if defined(MLAI_PAIRS_OF_BF16)
/* ---- bf16 by pairs -----------------------------------------------------------------------------
 */

/* One item by pairs: its panel is at most PAIR_COLUMNS wide, or PAIR_FEW_COLUMNS of few rows. */
typedef struct pair_item {
    const product *p;
    pair_weights w;
    int64_t head, first, columns; /* the panel */
    bool is_direct;               /* sums go to out as bf16 at once */
} pair_item;

/* `rows` of x from `token` on, at k. */
static pair_rows pair_rows_at(const pair_item *item, int64_t token, int64_t k, float *sums)
{
    const mla_tensor *x = &item->p->x, *out = &item->p->out;
    pair_rows rows = {.x_bytes = 2 * x->stride[0], .sums = sums};
    rows.x = (const char *)x->data + 2 * (token * x->stride[0] + item->head * x->stride[1] + k);
    if (item->is_direct) {
        rows.out_bytes = 2 * out->stride[0];
        rows.out = (char *)out->data +
                   2 * (token * out->stride[0] + item->head * out->stride[1] + item->first);
    }
    return rows;
}

static void store_pair_rows(const pair_item *item, float *sums, int64_t sums_stride, int64_t token,
                            int64_t rows)
{
    for (int64_t r = 0; r < rows && !item->is_direct; r++)
        store_row(item->p, sums + r * sums_stride, token + r, item->head, item->first,
                  item->columns);
}

static void few_pairs(const pair_item *item, int64_t token, int64_t rows)
{
    float sums[PAIR_FEW_ROWS * PAIR_FEW_COLUMNS];
    const pair_rows at = pair_rows_at(item, token, 0, sums);
    const int64_t depth = item->p->x.shape[2];
    if (rows == 1)
        pair_few(&at, &item->w, depth, item->columns, 1, PAIR_FEW_VECTORS / 2);
    else
        pair_few(&at, &item->w, depth, item->columns, 2, PAIR_FEW_VECTORS / 4);
    store_pair_rows(item, sums, PAIR_FEW_COLUMNS, token, rows);
}

/* Rows [token, end). Where K is over PAIR_DEPTH the sums of PAIR_DEEP_ROWS wait for all panels. */
static void many_pairs(const pair_item *item, int64_t token, int64_t end)
{
    _Alignas(64) uint32_t packed[PAIR_DEPTH / 2 * PAIR_COLUMNS];
    float sums[PAIR_DEEP_ROWS * PAIR_COLUMNS];
    const int64_t depth = item->p->x.shape[2], padded = item->columns > 16 ? PAIR_COLUMNS : 16;
    const bool is_deep = depth > PAIR_DEPTH;
    const int64_t at_once = is_deep ? PAIR_DEEP_ROWS : end - token;
    for (; token < end; token += at_once) {
        const int64_t rows = mlai_min_i64(at_once, end - token);
        for (int64_t k = 0; k < depth; k += PAIR_DEPTH) {
            const int64_t count = mlai_min_i64(PAIR_DEPTH, depth - k);
            const bool is_last = k + count == depth;
            pair_weights w = item->w;
            w.data += k * w.k_stride;
            if (w.c_stride == 1)
                pack_columns(packed, &w, count, item->columns, padded);
            else
                pack_depth(packed, &w, count, item->columns, padded);
            for (int64_t r = 0; r < rows; r += PAIR_ROWS) {
                const int64_t n = mlai_min_i64(PAIR_ROWS, rows - r);
                float *own = sums + (is_deep ? r * PAIR_COLUMNS : 0);
                const pair_rows at = pair_rows_at(item, token + r, k, own);
                pair_tile_rows(&at, packed, count, item->columns, k == 0, is_last, n);
                if (is_last)
                    store_pair_rows(item, own, PAIR_COLUMNS, token + r, n);
            }
        }
    }
}

static bool is_paired(const product *p)
{
    return p->x.format == MLA_FORMAT_BF16 && p->w.format == MLA_FORMAT_BF16 && p->x.shape[2] > 0;
}

static bool has_few_rows(const product *p)
{
    return p->x.shape[0] <= PAIR_FEW_ROWS && (p->w.stride[2] == 1 || p->w.shape[2] == 1);
}

static void pair_product(const product *p, int64_t head, int64_t panel, int64_t group)
{
    const int64_t first = panel * p->panel, token = group * p->group_rows;
    const int64_t end = mlai_min_i64(token + p->group_rows, p->x.shape[0]);
    pair_item item = {.p = p, .head = head, .first = first};
    item.columns = mlai_min_i64(p->panel, p->w.shape[2] - first);
    item.is_direct = p->out.format == MLA_FORMAT_BF16 && !mlai_present(&p->gate);
    item.w = (pair_weights){.k_stride = p->w.stride[1], .c_stride = p->w.stride[2]};
    if (p->w.shape[2] == 1)
        item.w.c_stride = 1;
    item.w.data = (const uint16_t *)p->w.data + head * p->w.stride[0] + first * item.w.c_stride;
    if (has_few_rows(p))
        few_pairs(&item, token, end - token);
    else
        many_pairs(&item, token, end);
}

static void cut_pairs(product *p)
{
    p->group_rows = PAIR_GROUP_ROWS;
    p->panel = PAIR_COLUMNS;
    if (has_few_rows(p))
        p->panel = p->x.shape[0] == 1 ? PAIR_FEW_COLUMNS : PAIR_FEW_COLUMNS / 2;
}
#endif

static void product_items(void *arg, int32_t task, int64_t first, int64_t end)
{
    const product *p = arg;
    (void)task;
    for (int64_t item = first; item < end; item++) {
        const int64_t group = item % p->n_groups, rest = item / p->n_groups;
        const int64_t head = rest / p->n_panels, panel = rest % p->n_panels;
#if defined(MLAI_PAIRS_OF_BF16)
        if (is_paired(p)) {
            pair_product(p, head, panel, group);
            continue;
        }
#endif
        product_item(p, head, panel, group);
    }
}

/* Panels are narrowed where heads and row groups alone are too few for the threads. */
static void run_product(const mla_exec *exec, product *p)
{
    const int64_t columns = p->w.shape[2], heads = p->x.shape[1];
    p->group_rows = GROUP_ROWS;
    p->panel = PANEL;
#if defined(MLAI_PAIRS_OF_BF16)
    if (is_paired(p))
        cut_pairs(p);
#endif
    p->n_groups = mlai_ceil_div(p->x.shape[0], p->group_rows);
    while (p->panel > 64 &&
           heads * p->n_groups * mlai_ceil_div(columns, p->panel) < 4 * (int64_t)exec->n_threads)
        p->panel /= 2;
    p->n_panels = mlai_ceil_div(columns, p->panel);
    /* Products of one item; below a few ten thousand a thread is not worth waking. */
    const int64_t rows = mlai_min_i64(p->group_rows, p->x.shape[0]);
    const int64_t work = rows * p->x.shape[2] * mlai_min_i64(p->panel, columns);
    mlai_for_items(exec, heads * p->n_panels * p->n_groups, 65536 / work + 1, product_items, p);
}

mla_status MLAI_IN_FAMILY(mlai_absorb_run)(const mla_exec *exec, const mla_problem *problem,
                                           const void *params, mla_diag *diag)
{
    (void)problem;
    (void)diag;
    const mla_absorb_query_params *own = params;
    product p = {.x = own->q_nope, .w = own->w_uk, .out = own->out};
    run_product(exec, &p);
    return MLA_OK;
}

mla_status MLAI_IN_FAMILY(mlai_project_run)(const mla_exec *exec, const mla_problem *problem,
                                            const void *params, mla_diag *diag)
{
    (void)problem;
    (void)diag;
    const mla_project_value_params *own = params;
    product p = {.x = own->latent, .w = own->w_uv, .out = own->out, .gate = own->gate};
    run_product(exec, &p);
    return MLA_OK;
}
