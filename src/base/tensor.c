/*
 * Tensors: formats, slices, DLPack, and the checks that every operator makes of its operands.
 */
#include "base/base.h"

#include <string.h>

int32_t mla_format_bytes(int32_t format)
{
    switch (format) {
#define BYTES(name, value, text, bytes)                                                            \
    case name:                                                                                     \
        return bytes;
        MLA_FORMAT_LIST(BYTES)
#undef BYTES
    default:
        return 0;
    }
}

const char *mla_format_name(int32_t format)
{
    switch (format) {
    case MLA_FORMAT_NONE:
        return "none";
#define NAME(name, value, text, bytes)                                                             \
    case name:                                                                                     \
        return text;
        MLA_FORMAT_LIST(NAME)
#undef NAME
    default:
        return "unknown";
    }
}

int32_t mla_format_from_name(const char *name)
{
    if (!name)
        return MLA_FORMAT_NONE;
#define MATCH(value_name, value, text, bytes)                                                      \
    if (strcmp(name, text) == 0)                                                                   \
        return value_name;
    MLA_FORMAT_LIST(MATCH)
#undef MATCH
    return MLA_FORMAT_NONE;
}

mla_tensor mla_tensor_slice(mla_tensor t, int32_t dim, int64_t first, int64_t count)
{
    mla_tensor absent;
    memset(&absent, 0, sizeof absent);
    if (t.rank > MLA_MAX_RANK || dim < 0 || dim >= t.rank || first < 0 || count < 0 ||
        first > t.shape[dim] || count > t.shape[dim] - first)
        return absent;
    if (t.data)
        t.data = (char *)t.data + first * t.stride[dim] * mla_format_bytes(t.format);
    t.shape[dim] = count;
    return t;
}

mla_tensor mlai_drop_unit_dim(mla_tensor t, int32_t dim)
{
    if (dim < 0 || dim >= t.rank || t.shape[dim] != 1)
        return t;
    for (int32_t i = dim; i + 1 < t.rank; i++) {
        t.shape[i] = t.shape[i + 1];
        t.stride[i] = t.stride[i + 1];
    }
    t.rank--;
    t.shape[t.rank] = 0;
    t.stride[t.rank] = 0;
    return t;
}

void mlai_shape_text(const mla_tensor *t, char *text, size_t text_bytes)
{
    text[0] = 0;
    mlai_append(text, text_bytes, "[");
    for (int32_t i = 0; i < t->rank && i < MLA_MAX_RANK; i++)
        mlai_append(text, text_bytes, "%s%lld", i ? ", " : "", (long long)t->shape[i]);
    mlai_append(text, text_bytes, "]");
}

static void formats_text(uint32_t formats, char *text, size_t text_bytes)
{
    text[0] = 0;
    for (int32_t f = 1; f < 32; f++) {
        if (formats & (1u << f))
            mlai_append(text, text_bytes, "%s%s", text[0] ? " " : "", mla_format_name(f));
    }
}

/* Extents, strides, the number of elements and the reach of the last one in bytes: 2^62 at most. */
static mla_status check_strides(const mla_tensor *t, const char *name, mla_diag *diag)
{
    uint64_t reach = 0, elements = 1;
    bool empty = false;
    for (int32_t i = 0; i < t->rank; i++) {
        if (t->shape[i] < 0)
            return mlai_fail(diag, MLA_ERROR_SHAPE, "%s.shape[%d] is %lld; extents are 0 or more",
                             name, i, (long long)t->shape[i]);
        if (t->stride[i] < 0)
            return mlai_fail(diag, MLA_ERROR_STRIDE, "%s.stride[%d] is %lld; strides are 0 or more",
                             name, i, (long long)t->stride[i]);
        empty = empty || t->shape[i] == 0;
    }
    for (int32_t i = 0; i < t->rank && !empty; i++) {
        uint64_t part;
        if (!mlai_mul_u64((uint64_t)(t->shape[i] - 1), (uint64_t)t->stride[i], &part) ||
            !mlai_add_u64(reach, part, &reach) || reach >> 59)
            return mlai_fail(diag, MLA_ERROR_STRIDE,
                             "%s reaches past 2^62 bytes: shape[%d] is %lld with stride %lld", name,
                             i, (long long)t->shape[i], (long long)t->stride[i]);
        /* Strides of 0 let more elements than bytes be there: their count must not wrap. */
        if (!mlai_mul_u64(elements, (uint64_t)t->shape[i], &elements) || elements >> 62)
            return mlai_fail(diag, MLA_ERROR_SHAPE,
                             "%s has more than 2^62 elements: shape[%d] is %lld", name, i,
                             (long long)t->shape[i]);
    }
    int32_t last = t->rank - 1;
    if (t->shape[last] > 1 && t->stride[last] != 1)
        return mlai_fail(diag, MLA_ERROR_STRIDE,
                         "%s.stride[%d] is %lld; the last dimension must be contiguous (stride 1)",
                         name, last, (long long)t->stride[last]);
    return MLA_OK;
}

mla_status mlai_check_tensor(const mla_tensor *t, const char *name, uint32_t formats,
                             int32_t min_rank, int32_t max_rank, bool pointers, mla_diag *diag)
{
    if (t->rank == 0)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "%s is absent (rank 0); it is required", name);
    if (t->rank < min_rank || t->rank > max_rank || t->rank > MLA_MAX_RANK) {
        if (min_rank == max_rank)
            return mlai_fail(diag, MLA_ERROR_SHAPE, "%s has rank %d; it takes rank %d", name,
                             t->rank, min_rank);
        return mlai_fail(diag, MLA_ERROR_SHAPE, "%s has rank %d; it takes ranks %d to %d", name,
                         t->rank, min_rank, max_rank);
    }
    if (t->format < 1 || t->format > 31 || !(formats & (1u << t->format))) {
        char allowed[96];
        formats_text(formats, allowed, sizeof allowed);
        return mlai_fail(diag, MLA_ERROR_FORMAT, "%s has format %s; it takes %s", name,
                         mla_format_name(t->format), allowed);
    }
    MLAI_TRY(check_strides(t, name, diag));
    if (!pointers || mlai_numel(t) == 0)
        return MLA_OK;
    if (!t->data)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "%s.data is NULL but the tensor is not empty",
                         name);
    if ((uintptr_t)t->data % (uintptr_t)mla_format_bytes(t->format) != 0)
        return mlai_fail(diag, MLA_ERROR_STRIDE, "%s.data is %p; %s needs an alignment of %d bytes",
                         name, t->data, mla_format_name(t->format), mla_format_bytes(t->format));
    return MLA_OK;
}

mla_status mlai_check_extent(const mla_tensor *t, const char *name, int32_t dim, int64_t want,
                             const char *meaning, mla_diag *diag)
{
    if (dim < t->rank && t->shape[dim] == want)
        return MLA_OK;
    char shape[128];
    mlai_shape_text(t, shape, sizeof shape);
    return mlai_fail(diag, MLA_ERROR_SHAPE, "%s has shape %s; its dimension %d must be %lld (%s)",
                     name, shape, dim, (long long)want, meaning);
}
