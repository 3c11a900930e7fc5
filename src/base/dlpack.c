/*
 * DLPack conversion. The DLTensor layout is fixed by the DLPack ABI (major version 1) and restated
 * here so that no header of theirs is needed: data, device {type, id}, ndim, dtype {code, bits,
 * lanes}, shape, strides (NULL = contiguous), byte_offset.
 */
#include "base/base.h"

#include <stddef.h>

typedef struct dl_tensor {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} dl_tensor;

_Static_assert(sizeof(void *) != 8 || sizeof(dl_tensor) == 48, "DLTensor is 48 bytes on 64-bit");
_Static_assert(sizeof(void *) != 8 || offsetof(dl_tensor, shape) == 24, "DLTensor.shape");

enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_E4M3FN = 10, DL_E5M2 = 12 };

static const struct {
    int32_t format;
    uint8_t code;
    uint8_t bits;
} dl_types[] = {
    {MLA_FORMAT_F32, DL_FLOAT, 32}, {MLA_FORMAT_BF16, DL_BFLOAT, 16},
    {MLA_FORMAT_F16, DL_FLOAT, 16}, {MLA_FORMAT_E4M3, DL_E4M3FN, 8},
    {MLA_FORMAT_E5M2, DL_E5M2, 8},  {MLA_FORMAT_I32, DL_INT, 32},
    {MLA_FORMAT_I64, DL_INT, 64},   {MLA_FORMAT_U8, DL_UINT, 8},
    {MLA_FORMAT_DS656, DL_UINT, 8},
};

mla_status mla_tensor_from_dlpack(const void *dltensor, mla_tensor *out, mla_diag *diag)
{
    if (!dltensor || !out)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "%s is NULL; pass a DLTensor and a result",
                         dltensor ? "out" : "dltensor");
    const dl_tensor *d = dltensor;
    if (d->ndim < 1 || d->ndim > MLA_MAX_RANK)
        return mlai_fail(diag, MLA_ERROR_SHAPE, "dltensor has %d dimensions; libmla takes 1 to %d",
                         d->ndim, MLA_MAX_RANK);
    if (d->device_type != MLA_DEVICE_CPU && d->device_type != MLA_DEVICE_CUDA)
        return mlai_fail(
            diag, MLA_ERROR_DEVICE,
            "dltensor lies on DLPack device type %d; libmla takes 1 (CPU) and 2 (CUDA)",
            d->device_type);
    if (!d->shape)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "dltensor.shape is NULL");
    mla_tensor t = {.device_type = d->device_type, .device_index = d->device_id, .rank = d->ndim};
    if (d->device_type == MLA_DEVICE_CPU)
        t.device_index = 0;
    for (size_t i = 0; i < sizeof dl_types / sizeof dl_types[0] && !t.format; i++) {
        if (dl_types[i].code == d->code && dl_types[i].bits == d->bits && d->lanes == 1)
            t.format = dl_types[i].format;
    }
    if (!t.format)
        return mlai_fail(
            diag, MLA_ERROR_FORMAT,
            "dltensor has dtype code %d, %d bits, %d lanes; libmla takes f32 bf16 f16 e4m3 "
            "e5m2 i32 i64 u8 with one lane",
            d->code, d->bits, d->lanes);
    t.data = d->data ? (char *)d->data + d->byte_offset : NULL;
    int64_t stride = 1;
    for (int32_t i = d->ndim - 1; i >= 0; i--) {
        if (d->shape[i] < 0)
            return mlai_fail(diag, MLA_ERROR_SHAPE,
                             "dltensor has extent %lld in dimension %d; extents are 0 or more",
                             (long long)d->shape[i], i);
        if (d->strides && d->strides[i] < 0)
            return mlai_fail(diag, MLA_ERROR_STRIDE,
                             "dltensor has stride %lld in dimension %d; libmla takes none below 0, "
                             "make it contiguous",
                             (long long)d->strides[i], i);
        t.shape[i] = d->shape[i];
        t.stride[i] = d->strides ? d->strides[i] : stride;
        if (__builtin_mul_overflow(stride, d->shape[i] > 0 ? d->shape[i] : 1, &stride))
            return mlai_fail(diag, MLA_ERROR_SHAPE, "dltensor has more than 2^63 elements");
    }
    *out = t;
    return MLA_OK;
}

mla_status mla_tensor_to_dlpack(mla_tensor *t, void *dltensor, mla_diag *diag)
{
    if (!t || !dltensor)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "%s is NULL; pass a tensor and a DLTensor",
                         t ? "dltensor" : "t");
    if (t->rank < 1 || t->rank > MLA_MAX_RANK)
        return mlai_fail(diag, MLA_ERROR_SHAPE,
                         "t has rank %d; an absent tensor has no DLPack form", t->rank);
    dl_tensor *d = dltensor;
    for (size_t i = 0; i < sizeof dl_types / sizeof dl_types[0]; i++) {
        if (dl_types[i].format != t->format)
            continue;
        *d = (dl_tensor){.data = t->data,
                         .device_type = t->device_type,
                         .device_id = t->device_index,
                         .ndim = t->rank,
                         .code = dl_types[i].code,
                         .bits = dl_types[i].bits,
                         .lanes = 1,
                         .shape = t->shape,
                         .strides = t->stride};
        return MLA_OK;
    }
    return mlai_fail(diag, MLA_ERROR_FORMAT, "t has format %s, which DLPack does not know",
                     mla_format_name(t->format));
}
