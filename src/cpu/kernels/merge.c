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
#include "cpu/kernels/lanes.h"
#include "cpu/kernels/load_vec.h"
#include "cpu/kernels/stream.h"
#include <math.h>

enum { CHUNK = 512 };

typedef struct merge_weights {
    int32_t n_live; /* states that are not empty */
    int32_t index[MLA_MERGE_MAX_STATES];
    float weight[MLA_MERGE_MAX_STATES]; /* of index[i]; they sum to 1 */
    float lse;
} merge_weights;

static const float *lse_at(const mla_tensor *lse, int64_t token, int64_t head)
{
    return (const float *)lse->data + token * lse->stride[0] + head * lse->stride[1];
}

static char *row_at(const mla_tensor *t, int64_t token, int64_t head)
{
    const int64_t offset = token * t->stride[0] + head * t->stride[1];
    return (char *)t->data + offset * mlai_lane_bytes(t->format);
}

static void find_weights(const mla_merge_state_params *p, int64_t token, int64_t head,
                         merge_weights *w)
{
    float largest = -INFINITY;
    bool has_nan = false;
    w->n_live = 0;
    for (int32_t i = 0; i < p->n_states; i++) {
        const float lse = *lse_at(&p->lses[i], token, head);
        if (isinf(lse))
            continue;
        w->index[w->n_live] = i;
        w->weight[w->n_live++] = lse;
        has_nan = has_nan || isnan(lse);
        largest = lse > largest ? lse : largest;
    }
    if (w->n_live <= 1) {
        w->lse = w->n_live == 1 ? w->weight[0] : -INFINITY;
        return;
    }
    float sum = 0.0f;
    for (int32_t i = 0; i < w->n_live; i++) {
        w->weight[i] = w->weight[i] == largest ? 1.0f : expf(w->weight[i] - largest);
        sum += w->weight[i];
    }
    const float inverse = has_nan ? NAN : 1.0f / sum;
    for (int32_t i = 0; i < w->n_live; i++)
        w->weight[i] *= inverse;
    w->lse = has_nan ? NAN : largest + logf(sum);
}

static void copy_row(char *out, int32_t out_format, const char *in, int32_t in_format, int64_t n)
{
    if (out_format == in_format) {
        if (out != in)
            memcpy(out, in, (size_t)(n * mlai_lane_bytes(out_format)));
        return;
    }
    float values[CHUNK];
    const int64_t in_bytes = mlai_lane_bytes(in_format), out_bytes = mlai_lane_bytes(out_format);
    for (int64_t first = 0; first < n; first += CHUNK) {
        const int64_t count = mlai_min_i64(CHUNK, n - first);
        mlai_widen(values, in + first * in_bytes, in_format, count);
        mlai_narrow(out + first * out_bytes, out_format, values, count);
    }
}

/* sum[j] = sum over the live states of weight * in[j], in index order, state after state. */
MLAI_INLINE void sum_states(float *sum, const char *const *in, const merge_weights *w, int64_t n,
                            const int32_t format)
{
    const int64_t bytes = mlai_lane_bytes(format);
    int64_t j = 0;
    for (; j + V_LANES <= n; j += V_LANES) {
        vec s = v_mul(v_set1(w->weight[0]), load_vec(in[0] + j * bytes, format));
        for (int32_t i = 1; i < w->n_live; i++)
            s = v_add(s, v_mul(v_set1(w->weight[i]), load_vec(in[i] + j * bytes, format)));
        v_store(sum + j, s);
    }
    for (int32_t i = 0; i < w->n_live && j < n; i++) {
        float values[V_LANES];
        mlai_widen(values, in[i] + j * bytes, format, n - j);
        for (int64_t k = j; k < n; k++)
            sum[k] = i == 0 ? w->weight[i] * values[k - j] : sum[k] + w->weight[i] * values[k - j];
    }
}

static void merge_chunk(float *sum, const char *const *in, const merge_weights *w, int64_t n,
                        int32_t format)
{
    if (format == MLA_FORMAT_BF16)
        sum_states(sum, in, w, n, MLA_FORMAT_BF16);
    else if (format == MLA_FORMAT_F16)
        sum_states(sum, in, w, n, MLA_FORMAT_F16);
    else
        sum_states(sum, in, w, n, MLA_FORMAT_F32);
}

typedef struct merge_work {
    const mla_merge_state_params *params;
    bool is_streaming;
} merge_work;

static void merge_row(const merge_work *work, int64_t token, int64_t head)
{
    const mla_merge_state_params *p = work->params;
    merge_weights w;
    find_weights(p, token, head, &w);
    char *out = row_at(&p->out, token, head);
    const int32_t out_format = p->out.format, in_format = p->outs[0].format;
    const int64_t in_bytes = mlai_lane_bytes(in_format), out_bytes = mlai_lane_bytes(out_format);
    const int64_t n = p->out.shape[2];
    if (w.n_live == 0) {
        memset(out, 0, (size_t)(n * out_bytes));
    } else if (w.n_live == 1) {
        copy_row(out, out_format, row_at(&p->outs[w.index[0]], token, head), in_format, n);
    } else {
        const char *in[MLA_MERGE_MAX_STATES];
        _Alignas(64) float sum[CHUNK];
        _Alignas(64) char made[CHUNK * sizeof(float)];
        for (int32_t i = 0; i < w.n_live; i++)
            in[i] = row_at(&p->outs[w.index[i]], token, head);
        for (int64_t first = 0; first < n; first += CHUNK) {
            const int64_t count = mlai_min_i64(CHUNK, n - first);
            merge_chunk(sum, in, &w, count, in_format);
            for (int32_t i = 0; i < w.n_live; i++)
                in[i] += count * in_bytes;
            char *to = out + first * out_bytes;
            mlai_narrow(work->is_streaming ? made : to, out_format, sum, count);
            if (work->is_streaming)
                mlai_stream_copy(to, made, count * out_bytes);
        }
    }
    if (mlai_present(&p->lse)) {
        float *lse = (float *)p->lse.data + token * p->lse.stride[0] + head * p->lse.stride[1];
        *lse = w.lse;
    }
}

static void merge_rows(void *arg, int32_t task, int64_t first, int64_t end)
{
    const merge_work *work = arg;
    const int64_t heads = work->params->out.shape[1];
    (void)task;
    int64_t token = first / heads, head = first % heads;
    for (int64_t row = first; row < end; row++) {
        merge_row(work, token, head);
        if (++head == heads) {
            head = 0;
            token++;
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
