/*
 * Casts to e4m3 for FP8 attention: out[t, h, :] = saturate(in[t, h, :]), NaN stays NaN, no scale.
 * The seed's plain cast gives NaN past 448; saturating keeps a large value large.
 *
 * in is f32, bf16, f16, e4m3 or e5m2; rows of both may be strided. Rows (t, h) are cut evenly over
 * the context's tasks; a device has a kernel for it. Called by forward_decode (decode_query cast)
 * and forward_extend_chunked.
 */
#include "backend/backend.h"
#include "base/convert.h"

#define BLOCK 256

mla_status mlai_backend_check_device(const mla_backend *backend, const mla_tensor *t,
                                     const char *name, mla_diag *diag)
{
    const mla_config *c = &backend->config;
    if (t->device_type == c->device_type && t->device_index == c->device_index)
        return MLA_OK;
    return mlai_fail(diag, MLA_ERROR_DEVICE,
                     "%s is on device_type %d, index %d: this backend is on %d, index %d", name,
                     t->device_type, t->device_index, c->device_type, c->device_index);
}

typedef struct cast_job {
    const mla_tensor *in;
    const mla_tensor *out;
    int32_t n_tasks;
} cast_job;

static void cast_rows(void *arg, int32_t task)
{
    const cast_job *job = arg;
    const mla_tensor *in = job->in, *out = job->out;
    int64_t heads = in->shape[1], width = in->shape[2], rows = in->shape[0] * heads;
    int64_t first = rows * task / job->n_tasks, end = rows * (task + 1) / job->n_tasks;
    int64_t element = mla_format_bytes(in->format);
    float block[BLOCK];
    for (int64_t row = first; row < end; row++) {
        int64_t t = row / heads, h = row % heads;
        const char *from =
            (const char *)in->data + (t * in->stride[0] + h * in->stride[1]) * element;
        uint8_t *to = (uint8_t *)out->data + t * out->stride[0] + h * out->stride[1];
        for (int64_t i = 0; i < width; i += BLOCK) {
            int64_t n = mlai_min_i64(BLOCK, width - i);
            mlai_row_to_f32(block, from + i * element, in->format, n, 1.0f);
            mlai_row_from_f32(to + i, MLA_FORMAT_E4M3, block, n, 1.0f);
        }
    }
}

mla_status mlai_cast_to_e4m3(const mla_backend *backend, void *stream, const mla_tensor *in,
                             const mla_tensor *out, mla_diag *diag)
{
    const mlai_device *device = &backend->device;
    int64_t rows = in->shape[0] * in->shape[1];
    if (rows == 0 || in->shape[2] == 0)
        return MLA_OK;
    if (device->runtime != NULL)
        return device->runtime->cast(device->handle, stream, in, out, diag);
    cast_job job = {.in = in, .out = out};
    job.n_tasks = (int32_t)mlai_min_i64(mla_context_n_threads(backend->ctx), rows);
    mla_context_run(backend->ctx, job.n_tasks, cast_rows, &job);
    return MLA_OK;
}
