/*
 * Base: what every room of the house may use. Status sentences, checked sizes, struct versions and
 * tensor checks; format conversion is in convert.h. Knows only include/mla/.
 */
#ifndef MLAI_BASE_H
#define MLAI_BASE_H

#include <mla/status.h>
#include <mla/tensor.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MLAI_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define MLAI_PRINTF(fmt, args)
#endif

/* Writes the sentence to diag (NULL allowed) and returns status, so that checks read as one line:
 *   return mlai_fail(diag, MLA_ERROR_SHAPE, "q has rank %d; decode takes 4, or 3 when ragged", r);
 */
mla_status mlai_fail(mla_diag *diag, mla_status status, const char *format, ...) MLAI_PRINTF(3, 4);

/*
 * Where one room calls another on a caller's behalf, the sentence must name what that caller gave:
 * in the sentence of a failed call each whole word `from` becomes `to`. Returns status.
 *   return mlai_rename(diag, mla_write_kv(ctx, &p, diag), names, n_names);
 */
typedef struct mlai_name {
    const char *from;
    const char *to;
} mlai_name;
mla_status mlai_rename(mla_diag *diag, mla_status status, const mlai_name *names, int32_t n_names);

/* Appends to a zero-terminated string, cut at text_bytes; used for reasons and lists of names. */
void mlai_append(char *text, size_t text_bytes, const char *format, ...) MLAI_PRINTF(3, 4);

/* Checked 64-bit sizes: false when the result does not fit. */
static inline bool mlai_mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool mlai_add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

/* Sizes that stay UINT64_MAX once they do not fit: a query then says "too large", never a wrapped
 * number. */
static inline uint64_t mlai_mul_saturating(uint64_t a, uint64_t b)
{
    uint64_t out;
    return mlai_mul_u64(a, b, &out) ? out : UINT64_MAX;
}
static inline uint64_t mlai_add_saturating(uint64_t a, uint64_t b)
{
    uint64_t out;
    return mlai_add_u64(a, b, &out) ? out : UINT64_MAX;
}

static inline int64_t mlai_ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}
static inline int64_t mlai_min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
static inline int64_t mlai_max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}
static inline uint64_t mlai_align_up(uint64_t value, uint64_t alignment)
{
    return (value + alignment - 1) / alignment * alignment;
}

/*
 * Copies a caller's versioned struct into a local one of the library's own size: shorter (older)
 * structs are completed with zeros, longer (newer) ones are taken when their tail is zero. `what`
 * names the struct in the sentence. Error: MLA_ERROR_ARGUMENT (NULL), MLA_ERROR_VERSION, which also
 * a size over MLAI_MAX_STRUCT_BYTES is: no header makes one, and reading its tail could fault.
 */
#define MLAI_MAX_STRUCT_BYTES 65536
mla_status mlai_take_struct(void *own, size_t own_bytes, size_t min_bytes, const void *callers,
                            const char *what, mla_diag *diag);

/* ---- tensors -------------------------------------------------------------------------------- */

static inline bool mlai_present(const mla_tensor *t)
{
    return t->rank != 0;
}
/* Elements of a checked tensor; an empty one may have other extents whose product would not fit. */
static inline int64_t mlai_numel(const mla_tensor *t)
{
    for (int32_t i = 0; i < t->rank; i++)
        if (t->shape[i] == 0)
            return 0;
    int64_t n = 1;
    for (int32_t i = 0; i < t->rank; i++)
        n *= t->shape[i];
    return n;
}

/* Formats as a set of bits, for checks: MLAI_F(F32) | MLAI_F(BF16). */
#define MLAI_F(name) (1u << MLA_FORMAT_##name)
#define MLAI_FLOATS (MLAI_F(F32) | MLAI_F(BF16) | MLAI_F(F16))
#define MLAI_FP8 (MLAI_F(E4M3) | MLAI_F(E5M2))
#define MLAI_INDICES (MLAI_F(I32) | MLAI_F(I64))

/*
 * One tensor against what an operator wants of it: present, format in the set, rank between
 * min_rank and max_rank, extents and strides >= 0, at most 2^62 elements, none of them past 2^62
 * bytes, last dimension contiguous (when its extent is over 1), data not NULL unless empty and
 * aligned to its element (both skipped with `pointers` false). `name` is the argument as the header
 * spells it.
 */
mla_status mlai_check_tensor(const mla_tensor *t, const char *name, uint32_t formats,
                             int32_t min_rank, int32_t max_rank, bool pointers, mla_diag *diag);

/* shape[dim] must equal want; the sentence says which dimension and what it should match. */
mla_status mlai_check_extent(const mla_tensor *t, const char *name, int32_t dim, int64_t want,
                             const char *meaning, mla_diag *diag);

/* "[2, 16, 576]" */
void mlai_shape_text(const mla_tensor *t, char *text, size_t text_bytes);

/* A tensor with shape[dim] == 1 loses that dimension; others come back unchanged. */
mla_tensor mlai_drop_unit_dim(mla_tensor t, int32_t dim);

/* Index tensors: element i of a rank-1 i32 or i64 tensor. */
static inline int64_t mlai_index_at(const mla_tensor *t, int64_t i)
{
    if (t->format == MLA_FORMAT_I64)
        return ((const int64_t *)t->data)[i * t->stride[0]];
    return ((const int32_t *)t->data)[i * t->stride[0]];
}

#define MLAI_TRY(expression)                                                                       \
    do {                                                                                           \
        mla_status mlai_try_status = (expression);                                                 \
        if (mlai_try_status != MLA_OK)                                                             \
            return mlai_try_status;                                                                \
    } while (0)

#endif
