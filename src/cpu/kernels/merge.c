/*
 * merge: n partial attention states (out_i [T, H, d], lse_i f32 [T, H]) -> one.
 *
 *   m = max lse_i ; w_i = exp(lse_i - m) ; out = sum w_i out_i / sum w_i ; lse = m + ln sum w_i
 *
 * in f32, in index order, over the states that are not empty (lse neither -inf nor +inf). None:
 * out 0, lse -inf. One: copied, bit for bit where the formats are equal. A NaN lse gives NaN. Each
 * chunk of a row is read from all states before it is written, so out may be the first state's.
 * Any strides with a contiguous last dimension. Called through the families' tables.
 */
#include "cpu/elementwise.h"
#include "cpu/kernels/convert_row.h"
#include "cpu/kernels/load_vec.h"

enum { GROUP = 16 };

typedef struct merge_work {
    const mla_merge_state_params *params;
    bool is_streaming;
} merge_work;

/* Up to GROUP rows in order, heads of one or several tokens. */
typedef struct merge_group {
    int32_t n;
    int64_t token[GROUP], head[GROUP];
} merge_group;

/* What a group's rows take from each state. */
typedef struct merge_weights {
    float weight[MLA_MERGE_MAX_STATES][GROUP]; /* 0 for an empty state; they sum to 1 */
    uint64_t live[GROUP];                      /* bit i: state i is not empty */
    float lse[GROUP];
} merge_weights;

/* ---- weights -----------------------------------------------------------------------------------
 */

/*
 * exp(x) for x <= 0, exactly 1 at 0 and 0 below -87, without fused operations or branches: the same
 * bits in every family. x = n ln 2 + f; ln 2 in two parts, n times the first of which is exact.
 */
static inline float exp_of(float x)
{
    const float shift = 12582912.0f; /* adding it rounds to an integer */
    const float held = x < -87.0f ? -87.0f : x;
    const float shifted = held * 1.44269504f + shift, n = shifted - shift;
    const float f = (held - n * 0x1.63p-1f) - n * -0x1.bd0106p-13f;
    float p = 1.0f / 5040.0f;
    p = p * f + 1.0f / 720.0f;
    p = p * f + 1.0f / 120.0f;
    p = p * f + 1.0f / 24.0f;
    p = p * f + 1.0f / 6.0f;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    const float power = mlai_f32_from_bits(mlai_f32_bits(p) + (mlai_f32_bits(shifted) << 23));
    return x < -87.0f ? 0.0f : power;
}

/* ln(x) for 1 <= x <= 64: x = 2^e m with m around 1, ln m = 2 atanh((m - 1) / (m + 1)). */
static inline float log_of(float x)
{
    const uint32_t bits = mlai_f32_bits(x), exponent = (bits - 0x3f3504f3u) >> 23;
    const float m = mlai_f32_from_bits(bits - (exponent << 23)), e = (float)(int32_t)exponent;
    const float s = (m - 1.0f) / (m + 1.0f), z = s * s;
    float p = 2.0f / 9.0f;
    p = p * z + 2.0f / 7.0f;
    p = p * z + 2.0f / 5.0f;
    p = p * z + 2.0f / 3.0f;
    return e * 0x1.63p-1f + (2.0f * s + (s * z * p + e * -0x1.bd0106p-13f));
}

static void copy_lses(float *lse, const mla_tensor *t, const merge_group *rows)
{
    const float *from = t->data;
    if (rows->n == GROUP && rows->token[0] == rows->token[GROUP - 1] && t->stride[1] == 1) {
        memcpy(lse, from + rows->token[0] * t->stride[0] + rows->head[0], GROUP * sizeof *lse);
        return;
    }
    for (int32_t r = 0; r < GROUP; r++)
        lse[r] =
            r < rows->n ? from[rows->token[r] * t->stride[0] + rows->head[r] * t->stride[1]] : 0.0f;
}

/* NaN in a state that counts makes all weights of the row NaN. */
static void find_weights(const mla_merge_state_params *p, const merge_group *rows, merge_weights *w)
{
    float largest[GROUP], sum[GROUP], last[GROUP];
    int32_t has_nan[GROUP];
    for (int32_t r = 0; r < GROUP; r++) {
        largest[r] = -INFINITY;
        sum[r] = 0.0f;
        last[r] = -INFINITY;
        has_nan[r] = 0;
        w->live[r] = 0;
    }
    for (int32_t i = 0; i < p->n_states; i++) {
        float *lse = w->weight[i];
        copy_lses(lse, &p->lses[i], rows);
        for (int32_t r = 0; r < GROUP; r++) {
            const uint32_t magnitude = mlai_f32_bits(lse[r]) & 0x7fffffffu;
            const bool is_live = magnitude != 0x7f800000u;
            w->live[r] |= (uint64_t)is_live << i;
            has_nan[r] |= magnitude > 0x7f800000u ? 1 : 0;
            last[r] = is_live ? lse[r] : last[r];
            const float value = is_live ? lse[r] : -INFINITY;
            largest[r] = value > largest[r] ? value : largest[r];
        }
    }
    for (int32_t i = 0; i < p->n_states; i++) {
        float *weight = w->weight[i];
        for (int32_t r = 0; r < GROUP; r++) {
            const uint32_t magnitude = mlai_f32_bits(weight[r]) & 0x7fffffffu;
            const float e = exp_of(weight[r] - largest[r]);
            weight[r] = magnitude == 0x7f800000u ? 0.0f : e;
            sum[r] += weight[r];
        }
    }
    float inverse[GROUP];
    for (int32_t r = 0; r < GROUP; r++) {
        inverse[r] = has_nan[r] ? NAN : 1.0f / sum[r];
        const float lse = has_nan[r] ? NAN : largest[r] + log_of(sum[r]);
        w->lse[r] = (w->live[r] & (w->live[r] - 1)) != 0 ? lse : last[r];
    }
    for (int32_t i = 0; i < p->n_states; i++)
        for (int32_t r = 0; r < GROUP; r++)
            w->weight[i][r] *= inverse[r];
}

/* ---- rows --------------------------------------------------------------------------------------
 */

static char *row_at(const mla_tensor *t, int64_t token, int64_t head)
{
    const int64_t offset = token * t->stride[0] + head * t->stride[1];
    return (char *)t->data + offset * mlai_lane_bytes(t->format);
}

/* The states of one row that are not empty, in index order. */
typedef struct live_states {
    int32_t n;
    int32_t ahead_bytes; /* the states' rows this much later are asked for */
    const char *in[MLA_MERGE_MAX_STATES];
    float weight[MLA_MERGE_MAX_STATES];
} live_states;

enum { VECTORS = MLAI_BLOCK / V_LANES };

/* weight * in for one block; the block `ahead_bytes` later is asked for. */
MLAI_INLINE void weigh_block(vec *out, const char *in, float weight, const int32_t format,
                             int64_t ahead_bytes)
{
    const int64_t bytes = mlai_lane_bytes(format);
    mlai_prefetch_lines(in + ahead_bytes, MLAI_BLOCK * bytes);
    MLAI_UNROLL
    for (int32_t v = 0; v < VECTORS; v++)
        out[v] = v_mul(v_set1(weight), load_vec(in + v * V_LANES * bytes, format));
}

/* sum over the live states of weight * in, state after state, by blocks; returns the values done.
 */
MLAI_INLINE int64_t merge_blocks(char *out, const int32_t out_format, const live_states *s,
                                 const int32_t format, int64_t n, bool is_streaming)
{
    const int64_t bytes = mlai_lane_bytes(format), out_bytes = mlai_lane_bytes(out_format);
    int64_t j = 0;
    for (; j + MLAI_BLOCK <= n; j += MLAI_BLOCK) {
        _Alignas(64) float values[MLAI_BLOCK];
        _Alignas(64) char made[MLAI_BLOCK * sizeof(float)];
        vec sum[VECTORS];
        weigh_block(sum, s->in[0] + j * bytes, s->weight[0], format, s->ahead_bytes);
        for (int32_t i = 1; i < s->n; i++) {
            vec next[VECTORS];
            weigh_block(next, s->in[i] + j * bytes, s->weight[i], format, s->ahead_bytes);
            MLAI_UNROLL
            for (int32_t v = 0; v < VECTORS; v++)
                sum[v] = v_add(sum[v], next[v]);
        }
        MLAI_UNROLL
        for (int32_t v = 0; v < VECTORS; v++)
            v_store(values + v * V_LANES, sum[v]);
        mlai_narrow_block(made, out_format, values, MLAI_BLOCK);
        mlai_put_lines(out + j * out_bytes, made, MLAI_BLOCK * out_bytes, is_streaming);
    }
    return j;
}

#define MERGE_CASE(from, to)                                                                       \
    case MLAI_PAIR(MLA_FORMAT_##from, MLA_FORMAT_##to):                                            \
        return merge_blocks(out, MLA_FORMAT_##to, s, MLA_FORMAT_##from, n, is_streaming);

static int64_t merge_front(char *out, int32_t out_format, const live_states *s, int32_t format,
                           int64_t n, bool is_streaming)
{
    switch (MLAI_PAIR(format, out_format)) {
        MERGE_CASE(F32, F32)
        MERGE_CASE(F32, BF16)
        MERGE_CASE(F32, F16)
        MERGE_CASE(BF16, F32)
        MERGE_CASE(BF16, BF16)
        MERGE_CASE(BF16, F16)
        MERGE_CASE(F16, F32)
        MERGE_CASE(F16, BF16)
        MERGE_CASE(F16, F16)
    default:
        return 0;
    }
}

/* The values from `first` on, fewer than a block at a time. */
static void merge_rest(char *out, int32_t out_format, const live_states *s, int32_t format,
                       int64_t first, int64_t n)
{
    const int64_t bytes = mlai_lane_bytes(format), out_bytes = mlai_lane_bytes(out_format);
    for (int64_t j = first; j < n; j += MLAI_BLOCK) {
        const int64_t count = mlai_min_i64(MLAI_BLOCK, n - j);
        float sum[MLAI_BLOCK], values[MLAI_BLOCK];
        for (int32_t i = 0; i < s->n; i++) {
            mlai_widen(values, s->in[i] + j * bytes, format, count);
            for (int64_t k = 0; k < count; k++)
                sum[k] = i == 0 ? s->weight[i] * values[k] : sum[k] + s->weight[i] * values[k];
        }
        mlai_narrow(out + j * out_bytes, out_format, sum, count);
    }
}

static void merge_row(const merge_work *work, const merge_weights *w, int32_t row, int64_t token,
                      int64_t head)
{
    enum { AHEAD_BYTES = 2048 };
    const mla_merge_state_params *p = work->params;
    char *out = row_at(&p->out, token, head);
    const int32_t out_format = p->out.format, format = p->outs[0].format;
    const int64_t n = p->out.shape[2];
    live_states s;
    s.n = 0;
    s.ahead_bytes = AHEAD_BYTES;
    for (uint64_t live = w->live[row]; live != 0; live &= live - 1) {
        const int32_t i = __builtin_ctzll(live);
        s.in[s.n] = row_at(&p->outs[i], token, head);
        s.weight[s.n++] = w->weight[i][row];
    }
    if (s.n == 0) {
        memset(out, 0, (size_t)(n * mlai_lane_bytes(out_format)));
        return;
    }
    if (s.n == 1) {
        if (out_format != format || out != s.in[0])
            mlai_convert_row(out, out_format, s.in[0], format, n, &mlai_no_change,
                             work->is_streaming, s.in[0] + AHEAD_BYTES);
        return;
    }
    const bool is_streaming = work->is_streaming && (uintptr_t)out % MLAI_STREAM_LINE == 0;
    const int64_t done = merge_front(out, out_format, &s, format, n, is_streaming);
    if (done < n)
        merge_rest(out, out_format, &s, format, done, n);
}

static void merge_rows(void *arg, int32_t task, int64_t first, int64_t end)
{
    const merge_work *work = arg;
    const mla_tensor *lse = &work->params->lse;
    const int64_t heads = work->params->out.shape[1];
    (void)task;
    int64_t token = first / heads, head = first % heads;
    for (int64_t row = first; row < end; row += GROUP) {
        merge_group rows = {.n = (int32_t)mlai_min_i64(GROUP, end - row)};
        for (int32_t r = 0; r < rows.n; r++) {
            rows.token[r] = token;
            rows.head[r] = head++;
            if (head == heads) {
                head = 0;
                token++;
            }
        }
        merge_weights w;
        find_weights(work->params, &rows, &w);
        for (int32_t r = 0; r < rows.n; r++) {
            merge_row(work, &w, r, rows.token[r], rows.head[r]);
            if (mlai_present(lse))
                ((float *)
                     lse->data)[rows.token[r] * lse->stride[0] + rows.head[r] * lse->stride[1]] =
                    w.lse[r];
        }
    }
    mlai_stream_end(work->is_streaming);
}

mla_status MLAI_IN_FAMILY(mlai_merge_run)(const mla_exec *exec, const mla_problem *problem,
                                          const void *params, mla_diag *diag)
{
    (void)diag;
    merge_work work = {.params = params};
    const int64_t rows = problem->tokens * problem->num_heads;
    const int64_t values = problem->qk_head_dim;
    const int64_t row_bytes = values * (mlai_lane_bytes(problem->q_format) * work.params->n_states +
                                        mlai_lane_bytes(problem->out_format));
    work.is_streaming = mlai_should_stream(rows * values * mlai_lane_bytes(problem->out_format));
    mlai_for_rows(exec, rows, row_bytes, merge_rows, &work);
    return MLA_OK;
}
