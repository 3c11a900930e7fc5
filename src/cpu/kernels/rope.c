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
    const rope_work *work = arg;
    const mla_rope_params *p = work->params;
    const int64_t heads = p->x.shape[1], rope_dim = p->x.shape[2];
    const int64_t x_bytes = mlai_lane_bytes(p->x.format);
    const int64_t out_bytes = mlai_lane_bytes(p->out.format);
    (void)task;
    int64_t token = first / heads, head = first % heads;
    for (int64_t row = first; row < end; row++) {
        const int64_t position = mlai_index_at(&p->positions, token);
        const int64_t x_at = token * p->x.stride[0] + head * p->x.stride[1];
        const int64_t out_at = token * p->out.stride[0] + head * p->out.stride[1];
        mlai_rotate_head((char *)p->out.data + out_at * out_bytes, p->out.format,
                         (const char *)p->x.data + x_at * x_bytes, p->x.format,
                         mlai_angles_at(&p->cos, position), mlai_angles_at(&p->sin, position),
                         rope_dim, p->is_interleaved != 0, work->is_streaming);
        if (++head == heads) {
            head = 0;
            token++;
        }
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
    work.is_streaming =
        mlai_should_stream(rows * problem->qk_rope_head_dim * mlai_lane_bytes(problem->out_format));
    mlai_for_rows(exec, rows, row_bytes, rope_rows, &work);
    return MLA_OK;
}
