/*
 * pack: k_out[t, h] = [k_nope[t, h] | k_pe[t]] for k_nope [T, H, N] and k_pe [T, P], and v_out a
 * copy of v [T, H, V]. fp8 outputs are saturate(x / k_scale) and saturate(x / v_scale). The rope
 * key of a token is converted once and copied to its heads. Called through the families' tables.
 */
#include "cpu/elementwise.h"
#include "cpu/kernels/lanes.h"
#include "cpu/kernels/stream.h"

enum { CHUNK = 512, KEPT_BYTES = 1024 };

typedef struct pack_work {
    const mla_pack_kv_params *params;
    bool is_streaming;
} pack_work;

static void put_bytes(char *out, const char *in, int64_t bytes, bool is_streaming)
{
    if (is_streaming)
        mlai_stream_copy(out, in, bytes);
    else
        memcpy(out, in, (size_t)bytes);
}

static void convert(char *out, int32_t out_format, const char *in, int32_t in_format, int64_t n,
                    float scale, bool is_streaming)
{
    const int64_t in_bytes = mlai_lane_bytes(in_format), out_bytes = mlai_lane_bytes(out_format);
    if (in_format == out_format) {
        put_bytes(out, in, n * out_bytes, is_streaming);
        return;
    }
    _Alignas(64) float values[CHUNK];
    _Alignas(64) char row[CHUNK * sizeof(float)];
    for (int64_t first = 0; first < n; first += CHUNK) {
        const int64_t count = mlai_min_i64(CHUNK, n - first);
        mlai_widen(values, in + first * in_bytes, in_format, count);
        if (scale != 1.0f)
            for (int64_t i = 0; i < count; i++)
                values[i] /= scale;
        char *to = out + first * out_bytes;
        mlai_narrow(is_streaming ? row : to, out_format, values, count);
        if (is_streaming)
            mlai_stream_copy(to, row, count * out_bytes);
    }
}

static char *row_at(const mla_tensor *t, int64_t token, int64_t head)
{
    return (char *)t->data +
           (token * t->stride[0] + head * t->stride[1]) * mlai_lane_bytes(t->format);
}

static void pack_rows(void *arg, int32_t task, int64_t first, int64_t end)
{
    const pack_work *work = arg;
    const mla_pack_kv_params *p = work->params;
    const bool is_streaming = work->is_streaming;
    const int64_t heads = p->k_nope.shape[1], n_nope = p->k_nope.shape[2];
    const int64_t n_rope = p->k_pe.shape[1], out_bytes = mlai_lane_bytes(p->k_out.format);
    const bool is_kept = n_rope * out_bytes <= KEPT_BYTES;
    char kept[KEPT_BYTES]; /* the rope key of kept_token in the output's format */
    int64_t kept_token = -1;
    (void)task;
    for (int64_t row = first; row < end; row++) {
        const int64_t token = row / heads, head = row % heads;
        char *out = row_at(&p->k_out, token, head);
        const char *k_pe = (const char *)p->k_pe.data +
                           token * p->k_pe.stride[0] * mlai_lane_bytes(p->k_pe.format);
        convert(out, p->k_out.format, row_at(&p->k_nope, token, head), p->k_nope.format, n_nope,
                p->k_scale, is_streaming);
        if (!is_kept) {
            convert(out + n_nope * out_bytes, p->k_out.format, k_pe, p->k_pe.format, n_rope,
                    p->k_scale, is_streaming);
        } else {
            if (kept_token != token)
                convert(kept, p->k_out.format, k_pe, p->k_pe.format, n_rope, p->k_scale, false);
            kept_token = token;
            put_bytes(out + n_nope * out_bytes, kept, n_rope * out_bytes, is_streaming);
        }
        if (mlai_present(&p->v))
            convert(row_at(&p->v_out, token, head), p->v_out.format, row_at(&p->v, token, head),
                    p->v.format, p->v.shape[2], p->v_scale, is_streaming);
    }
    mlai_stream_end(is_streaming);
}

mla_status MLAI_IN_FAMILY(mlai_pack_run)(const mla_exec *exec, const mla_problem *problem,
                                         const void *params, mla_diag *diag)
{
    (void)diag;
    pack_work work = {.params = params};
    const int64_t rows = problem->tokens * problem->num_heads;
    const int64_t width =
        (int64_t)problem->qk_nope_head_dim + problem->qk_rope_head_dim + problem->v_head_dim;
    const int64_t row_bytes =
        width * (mlai_lane_bytes(problem->q_format) + mlai_lane_bytes(problem->out_format));
    work.is_streaming = mlai_should_stream(rows * width * mlai_lane_bytes(problem->out_format));
    mlai_for_rows(exec, rows, row_bytes, pack_rows, &work);
    return MLA_OK;
}
