/*
 * libmla: tensors as plain values.
 *
 * A tensor is a pointer with a format, a device, a shape and strides, 104 bytes passed by value or
 * inside a parameter struct. It owns nothing. rank == 0 means "absent" for an optional operand; a
 * tensor with a zero extent is present and empty, and its data may be NULL.
 *
 * Strides count elements of the format. The last dimension must have stride 1 unless an operator
 * says otherwise. Strides are non-negative. Index arithmetic is 64-bit everywhere.
 *
 * The 656-byte row (ds656) is FlashMLA's public layout of one cached token with kv_lora_rank 512
 * and qk_rope_head_dim 64: 512 bytes of e4m3, four f32 scales (one for each 128 values; value =
 * e4m3 * scale), 64 bf16 of rotated rope key. A ds656 tensor counts bytes: its last extent is 656.
 */
#ifndef MLA_TENSOR_H
#define MLA_TENSOR_H

#include <mla/status.h>
#include <string.h>

/* name, value, spelling (used by the command line, files and docs), bytes of one element. */
#define MLA_FORMAT_LIST(X)                                                                         \
    X(MLA_FORMAT_F32, 1, "f32", 4)                                                                 \
    X(MLA_FORMAT_BF16, 2, "bf16", 2)                                                               \
    X(MLA_FORMAT_F16, 3, "f16", 2)                                                                 \
    X(MLA_FORMAT_E4M3, 4, "e4m3", 1) /* OCP FP8 E4M3 "fn": max 448, no infinity, NaN 0x7f 0xff */  \
    X(MLA_FORMAT_E5M2, 5, "e5m2", 1) /* OCP FP8 E5M2: max 57344, infinities and NaN */             \
    X(MLA_FORMAT_I32, 6, "i32", 4)                                                                 \
    X(MLA_FORMAT_I64, 7, "i64", 8)                                                                 \
    X(MLA_FORMAT_U8, 8, "u8", 1)                                                                   \
    X(MLA_FORMAT_DS656, 9, "ds656", 1)

typedef enum mla_format {
    MLA_FORMAT_NONE = 0,
#define MLA_FORMAT_ENTRY(name, value, text, bytes) name = value,
    MLA_FORMAT_LIST(MLA_FORMAT_ENTRY)
#undef MLA_FORMAT_ENTRY
} mla_format;

/* Values equal DLPack's DLDeviceType. */
typedef enum mla_device_type { MLA_DEVICE_CPU = 1, MLA_DEVICE_CUDA = 2 } mla_device_type;

#define MLA_MAX_RANK 5
#define MLA_DS656_ROW_BYTES 656

typedef struct mla_tensor {
    void *data;
    int32_t format;       /* mla_format */
    int32_t device_type;  /* mla_device_type */
    int32_t device_index; /* 0 on the CPU */
    int32_t rank;         /* 0 = absent, else 1..MLA_MAX_RANK */
    int64_t shape[MLA_MAX_RANK];
    int64_t stride[MLA_MAX_RANK]; /* in elements */
} mla_tensor;

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of one element (ds656: 1, since its last extent counts bytes); 0 for an unknown value. */
MLA_API int32_t mla_format_bytes(int32_t format);

/* "bf16"; "none" for MLA_FORMAT_NONE; "unknown" otherwise. Static storage. */
MLA_API const char *mla_format_name(int32_t format);

/* The format spelled so, or MLA_FORMAT_NONE. NULL gives MLA_FORMAT_NONE. */
MLA_API int32_t mla_format_from_name(const char *name);

/* A contiguous tensor on the CPU; shape has rank extents. Ranks outside 1..5 give an absent one.
 * Strides that would not fit are INT64_MAX: operators refuse them unless the tensor is empty. */
static inline mla_tensor mla_tensor_make(const void *data, int32_t format, int32_t rank,
                                         const int64_t *shape)
{
    mla_tensor t;
    memset(&t, 0, sizeof t);
    if (rank < 1 || rank > MLA_MAX_RANK)
        return t;
    t.data = (void *)(uintptr_t)data;
    t.format = format;
    t.device_type = MLA_DEVICE_CPU;
    t.rank = rank;
    int64_t stride = 1;
    for (int32_t i = rank - 1; i >= 0; i--) {
        t.shape[i] = shape[i];
        t.stride[i] = stride;
        if (shape[i] > 0)
            stride = stride > INT64_MAX / shape[i] ? INT64_MAX : stride * shape[i];
    }
    return t;
}

static inline mla_tensor mla_tensor_1d(const void *data, int32_t format, int64_t n0)
{
    return mla_tensor_make(data, format, 1, &n0);
}

static inline mla_tensor mla_tensor_2d(const void *data, int32_t format, int64_t n0, int64_t n1)
{
    int64_t shape[2] = {n0, n1};
    return mla_tensor_make(data, format, 2, shape);
}

static inline mla_tensor mla_tensor_3d(const void *data, int32_t format, int64_t n0, int64_t n1,
                                       int64_t n2)
{
    int64_t shape[3] = {n0, n1, n2};
    return mla_tensor_make(data, format, 3, shape);
}

static inline mla_tensor mla_tensor_4d(const void *data, int32_t format, int64_t n0, int64_t n1,
                                       int64_t n2, int64_t n3)
{
    int64_t shape[4] = {n0, n1, n2, n3};
    return mla_tensor_make(data, format, 4, shape);
}

/*
 * The view t[..., first : first + count] of dimension dim. Out-of-range arguments give an absent
 * tensor. The pointer moves by first * stride elements.
 */
MLA_API mla_tensor mla_tensor_slice(mla_tensor t, int32_t dim, int64_t first, int64_t count);

/* The same tensor said to lie on another device. */
static inline mla_tensor mla_tensor_on(mla_tensor t, int32_t device_type, int32_t device_index)
{
    t.device_type = device_type;
    t.device_index = device_index;
    return t;
}

/*
 * From DLPack (v1, https://github.com/dmlc/dlpack): `dltensor` points at a DLTensor. Takes float
 * 32, bfloat 16, float 16, float8 e4m3fn (code 10), float8 e5m2 (code 12), int 32, int 64, uint 8,
 * one lane, on kDLCPU and kDLCUDA, at most 5 dimensions; NULL strides mean contiguous; byte_offset
 * is added. Errors: MLA_ERROR_FORMAT, _SHAPE, _STRIDE (negative), _DEVICE, _ARGUMENT (NULL).
 * Borrowing: the result points into the DLTensor's memory. DLPack has no ds656: such rows come as
 * uint8, the caller then sets format to MLA_FORMAT_DS656.
 */
MLA_API mla_status mla_tensor_from_dlpack(const void *dltensor, mla_tensor *out, mla_diag *diag);

/*
 * To DLPack: fills the caller's DLTensor at `dltensor`; its shape and strides pointers point into
 * *t, which must outlive it. A ds656 tensor becomes uint8. A rank-0 (absent) tensor is an error.
 */
MLA_API mla_status mla_tensor_to_dlpack(mla_tensor *t, void *dltensor, mla_diag *diag);

#ifdef __cplusplus
}
#endif
#endif
