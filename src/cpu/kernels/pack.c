/*
 * pack: k_out[t, h] = [k_nope[t, h] | k_pe[t]] for k_nope [T, H, N] and k_pe [T, P], and v_out a
 * copy of v [T, H, V]. fp8 outputs are saturate(x / k_scale) and saturate(x / v_scale). The rope
 * key of a token is converted once and copied to its heads. Called through the families' tables.
 */
#include "cpu/elementwise.h"
#include "cpu/kernels/convert_row.h"

enum { KEPT_BYTES = 1024 };

typedef struct pack_work {
    const mla_pack_kv_params *params;
    bool is_streaming;
} pack_work;

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
    const mlai_change k_change = {p->k_scale, 1.0f, INFINITY};
    const mlai_change v_change = {p->v_scale, 1.0f, INFINITY};
    (void)task;
    for (int64_t row = first; row < end; row++) {
        const int64_t token = row / heads, head = row % heads;
        char *out = row_at(&p->k_out, token, head);
        const char *k_nope = row_at(&p->k_nope, token, head);
        const char *k_pe = (const char *)p->k_pe.data +
                           token * p->k_pe.stride[0] * mlai_lane_bytes(p->k_pe.format);
        mlai_convert_row(out, p->k_out.format, k_nope, p->k_nope.format, n_nope, &k_change,
                         is_streaming, k_nope);
        if (!is_kept) {
            mlai_convert_row(out + n_nope * out_bytes, p->k_out.format, k_pe, p->k_pe.format,
                             n_rope, &k_change, is_streaming, k_pe);
        } else {
            if (kept_token != token)
                mlai_convert_row(kept, p->k_out.format, k_pe, p->k_pe.format, n_rope, &k_change,
                                 false, k_pe);
            kept_token = token;
            mlai_copy_row(out + n_nope * out_bytes, kept, n_rope * out_bytes, is_streaming, kept);
        }
        if (mlai_present(&p->v)) {
            const char *v = row_at(&p->v, token, head);
            mlai_convert_row(row_at(&p->v_out, token, head), p->v_out.format, v, p->v.format,
                             p->v.shape[2], &v_change, is_streaming, v);
        }
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
