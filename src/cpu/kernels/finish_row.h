/*
 * The last step of a row for the attention kernels whose o has its columns in order:
 * out = o / l * out_scale in out_format; zeros where l is 0, a row that sees nothing.
 */
#ifndef MLAI_FINISH_ROW_H
#define MLAI_FINISH_ROW_H

#include "cpu/attention_kernel.h"
#include "cpu/kernels/widen_f32.h"

static void finish(const mlai_attention_shape *shape, void *out, const float *o, float l,
                   float out_scale)
{
    enum { CHUNK = 256 };
    float chunk[CHUNK];
    int32_t bytes = mla_format_bytes(shape->out_format);
    for (int32_t at = 0; at < shape->value_dims; at += CHUNK) {
        int32_t n = shape->value_dims - at < CHUNK ? shape->value_dims - at : CHUNK;
        if (l == 0.0f) {
            for (int32_t i = 0; i < n; i++)
                chunk[i] = 0.0f;
        } else {
            float factor = out_scale / l;
            for (int32_t i = 0; i < n; i++)
                chunk[i] = o[at + i] * factor;
        }
        narrow_row((char *)out + (int64_t)at * bytes, shape->out_format, chunk, n);
    }
}

#endif
