/*
 * rope: out[t, h] = x[t, h] rotated by the angles of positions[t], for x [T, H, P]. See rotate.h.
 * Called through the families' tables.
 */
#include "cpu/kernels/rotate.h"

typedef struct rope_work {
    const mla_rope_params *params;
    bool is_streaming;
} rope_work;

static void rope_rows(void *arg, int32_t task, int64_t first, int64_t end)
{
    enum { ROWS_AHEAD = 16 };
    const rope_work *work = arg;
    const mla_rope_params *p = work->params;
    const int64_t heads = p->x.shape[1];
    const int64_t x_bytes = mlai_lane_bytes(p->x.format);
    const int64_t out_bytes = mlai_lane_bytes(p->out.format);
    const int64_t row_stride = heads > 1 ? p->x.stride[1] : p->x.stride[0];
    const int64_t tokens_ahead = 1 + ROWS_AHEAD / heads;
    const int64_t angle_bytes = p->x.shape[2] / 2 * (int64_t)sizeof(float);
    (void)task;
    int64_t token = first / heads, head = first % heads;
    for (int64_t row = first; row < end;) {
        const int64_t n = mlai_min_i64(heads - head, end - row);
        const int64_t position = mlai_index_at(&p->positions, token);
        if (token + tokens_ahead < p->x.shape[0]) {
            const int64_t later = mlai_index_at(&p->positions, token + tokens_ahead);
            mlai_prefetch_bytes((const char *)mlai_angles_at(&p->cos, later), angle_bytes, false);
            mlai_prefetch_bytes((const char *)mlai_angles_at(&p->sin, later), angle_bytes, false);
        }
        const int64_t x_at = token * p->x.stride[0] + head * p->x.stride[1];
        const int64_t out_at = token * p->out.stride[0] + head * p->out.stride[1];
        const mlai_heads x = {(char *)p->x.data + x_at * x_bytes, p->x.stride[1] * x_bytes,
                              p->x.format};
        const mlai_heads out = {(char *)p->out.data + out_at * out_bytes,
                                p->out.stride[1] * out_bytes, p->out.format};
        mlai_rotate_heads(&out, &x, n, mlai_angles_at(&p->cos, position),
                          mlai_angles_at(&p->sin, position), p->x.shape[2], p->is_interleaved != 0,
                          work->is_streaming, x.data + ROWS_AHEAD * row_stride * x_bytes);
        row += n;
        head = 0;
        token++;
    }
    mlai_stream_end(work->is_streaming);
}

mla_status MLAI_IN_FAMILY(mlai_rope_run)(const mla_exec *exec, const mla_problem *problem,
                                         const void *params, mla_diag *diag)
{
    (void)diag;
    rope_work work = {.params = params};
    const int64_t rows = problem->tokens * problem->num_heads;
    const int64_t row_bytes =
        (int64_t)problem->qk_rope_head_dim *
        (mlai_lane_bytes(problem->q_format) + mlai_lane_bytes(problem->out_format));
    /* In place, the line to be written is in the cache. */
    work.is_streaming =
        work.params->out.data != work.params->x.data &&
        mlai_should_stream(rows * problem->qk_rope_head_dim * mlai_lane_bytes(problem->out_format));
    mlai_for_rows(exec, rows, row_bytes, rope_rows, &work);
    return MLA_OK;
}
