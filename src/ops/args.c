/*
 * The checks that operators share. Each returns MLA_OK or a status with one sentence that names the
 * argument as ops.h spells it, the value found and the way out. Tensors may be changed only from a
 * shape with a unit dimension to the same without it. Called by the operator files of this room.
 */
#include "ops/ops.h"
#include <math.h>

mla_status mlai_arg_context(const mla_context *ctx, mla_diag *diag)
{
    if (ctx == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "ctx is NULL; make a context with mla_context_create");
    return MLA_OK;
}

mla_status mlai_arg_call(mlai_args *args, const mla_call *call)
{
    for (int32_t i = 0; i < 3; i++)
        if (call->reserved[i] != NULL)
            return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                             "call.reserved[%d] is not NULL; zero the fields that this version "
                             "does not name",
                             (int)i);
    return MLA_OK;
}

mla_status mlai_give_problem(mla_problem *callers, const mla_problem *own, mla_diag *diag)
{
    const uint32_t min_bytes = MLAI_PROBLEM_MIN_BYTES;
    if (callers == NULL)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "problem is NULL; give a struct to fill");
    const uint32_t struct_size = callers->struct_size;
    if (struct_size < min_bytes || struct_size > MLAI_MAX_STRUCT_BYTES)
        return mlai_fail(diag, MLA_ERROR_VERSION,
                         "problem has struct_size %u; start from MLA_PROBLEM_INIT, which sets it "
                         "to %u",
                         struct_size, (uint32_t)sizeof *own);
    const size_t bytes = struct_size < sizeof *own ? struct_size : sizeof *own;
    memcpy(callers, own, bytes);
    callers->struct_size = struct_size;
    return MLA_OK;
}

/* The first tensor of a call says where the call runs. */
static mla_status check_device(mlai_args *args, const mla_tensor *t, const char *name)
{
    if (t->device_type != MLA_DEVICE_CPU && t->device_type != MLA_DEVICE_CUDA)
        return mlai_fail(args->diag, MLA_ERROR_DEVICE,
                         "%s has device_type %d; use MLA_DEVICE_CPU (1) or MLA_DEVICE_CUDA (2)",
                         name, t->device_type);
    if (t->device_index < 0 || (t->device_type == MLA_DEVICE_CPU && t->device_index != 0))
        return mlai_fail(args->diag, MLA_ERROR_DEVICE,
                         "%s has device_index %d; the CPU is 0 and CUDA devices count from 0", name,
                         t->device_index);
    if (args->device_name[0] == '\0') {
        mlai_append(args->device_name, sizeof args->device_name, "%s", name);
        args->device_type = t->device_type;
        args->device_index = t->device_index;
        return MLA_OK;
    }
    if (t->device_type != args->device_type || t->device_index != args->device_index)
        return mlai_fail(args->diag, MLA_ERROR_DEVICE,
                         "%s is on device %d:%d and %s on %d:%d; all tensors of a call share one "
                         "device",
                         name, t->device_type, t->device_index, args->device_name,
                         args->device_type, args->device_index);
    return MLA_OK;
}

mla_status mlai_arg_tensor(mlai_args *args, const mla_tensor *t, const char *name, uint32_t formats,
                           int32_t min_rank, int32_t max_rank)
{
    MLAI_TRY(mlai_check_tensor(t, name, formats, min_rank, max_rank, args->pointers, args->diag));
    return check_device(args, t, name);
}

mla_status mlai_arg_optional(mlai_args *args, const mla_tensor *t, const char *name,
                             uint32_t formats, int32_t min_rank, int32_t max_rank)
{
    if (!mlai_present(t))
        return MLA_OK;
    return mlai_arg_tensor(args, t, name, formats, min_rank, max_rank);
}

mla_status mlai_arg_output(mlai_args *args, const mla_tensor *t, const char *name, uint32_t formats,
                           int32_t min_rank, int32_t max_rank)
{
    MLAI_TRY(mlai_arg_tensor(args, t, name, formats, min_rank, max_rank));
    for (int32_t i = 0; i < t->rank; i++)
        if (t->shape[i] > 1 && t->stride[i] == 0)
            return mlai_fail(args->diag, MLA_ERROR_STRIDE,
                             "%s is written and has stride 0 in dimension %d of extent %lld; give "
                             "each element a place of its own",
                             name, (int)i, (long long)t->shape[i]);
    return MLA_OK;
}

mla_status mlai_arg_extent(mlai_args *args, const mla_tensor *t, const char *name, int32_t dim,
                           int64_t want, const char *meaning)
{
    return mlai_check_extent(t, name, dim, want, meaning, args->diag);
}

mla_status mlai_arg_dim(mlai_args *args, int64_t value, int64_t min, const char *name, int32_t *out)
{
    if (value < min || value > INT32_MAX)
        return mlai_fail(args->diag, MLA_ERROR_SHAPE, "%s is %lld; it must be %lld to %d", name,
                         (long long)value, (long long)min, INT32_MAX);
    *out = (int32_t)value;
    return MLA_OK;
}

mla_status mlai_arg_flag(mlai_args *args, int32_t value, const char *name)
{
    if (value != 0 && value != 1)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT, "%s is %d; it must be 0 or 1", name,
                         value);
    return MLA_OK;
}

mla_status mlai_arg_reserved(mlai_args *args, int32_t value, const char *name)
{
    if (value != 0)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "%s is %d; zero the fields that this version does not name", name, value);
    return MLA_OK;
}

mla_status mlai_arg_scale(mlai_args *args, float value, const char *name, int32_t format,
                          const char *format_name)
{
    if (!(isfinite(value) && value > 0.0f))
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "%s is %g; it must be finite and above 0 (1 for no scaling)", name,
                         (double)value);
    if (value != 1.0f && format != MLA_FORMAT_E4M3 && format != MLA_FORMAT_E5M2)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "%s is %g and %s is %s; scales other than 1 are for e4m3 and e5m2", name,
                         (double)value, format_name, mla_format_name(format));
    return MLA_OK;
}

mla_status mlai_arg_softmax(mlai_args *args, float softmax_scale, float logit_cap)
{
    if (!isfinite(softmax_scale) || softmax_scale == 0.0f)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "softmax_scale is %g; it must be finite and not 0, for example "
                         "1/sqrt(qk_head_dim)",
                         (double)softmax_scale);
    if (!isfinite(logit_cap) || logit_cap < 0.0f)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "logit_cap is %g; it must be finite and at least 0 (0 for none)",
                         (double)logit_cap);
    return MLA_OK;
}

/* Whether base and strides are multiples of 16 bytes, strides under 2^40; an extent of 1 has none.
 */
static bool is_aligned(const mla_tensor *t)
{
    const int64_t bytes = mla_format_bytes(t->format), limit = INT64_C(1) << 40;
    bool aligned = (uintptr_t)t->data % 16 == 0;
    for (int32_t i = 0; i + 1 < t->rank; i++) {
        const int64_t stride = t->stride[i];
        aligned = aligned && (t->shape[i] <= 1 ||
                              (stride > 0 && stride < limit / bytes && stride * bytes % 16 == 0));
    }
    return aligned;
}

int32_t mlai_layout_aligned(const mla_tensor *const *tensors, int32_t n_tensors)
{
    for (int32_t i = 0; i < n_tensors; i++)
        if (mlai_present(tensors[i]) && !is_aligned(tensors[i]))
            return MLA_LAYOUT_UNALIGNED;
    return 0;
}

static bool same_memory(const mlai_args *args, const mla_tensor *a, const mla_tensor *b)
{
    if (!args->pointers || !mlai_present(a) || !mlai_present(b) || a->data != b->data)
        return false;
    return mlai_numel(a) > 0 && mlai_numel(b) > 0;
}

mla_status mlai_arg_apart(mlai_args *args, const mla_tensor *out, const char *out_name,
                          const mla_tensor *in, const char *in_name)
{
    if (same_memory(args, out, in))
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "%s starts where %s does (%p); give it memory of its own", out_name,
                         in_name, out->data);
    return MLA_OK;
}

mla_status mlai_arg_in_place(mlai_args *args, const mla_tensor *out, const char *out_name,
                             const mla_tensor *in, const char *in_name)
{
    if (!same_memory(args, out, in))
        return MLA_OK;
    bool equal = out->format == in->format && out->rank == in->rank;
    for (int32_t i = 0; equal && i < out->rank; i++)
        equal = out->shape[i] == in->shape[i] &&
                (out->shape[i] <= 1 || out->stride[i] == in->stride[i]);
    if (!equal)
        return mlai_fail(args->diag, MLA_ERROR_ARGUMENT,
                         "%s starts where %s does (%p) with another format or other strides; work "
                         "in place needs both equal",
                         out_name, in_name, out->data);
    return MLA_OK;
}

static mla_status take_cache(mlai_args *args, mla_tensor *t, const char *name, uint32_t formats,
                             int64_t width, const char *meaning, bool written)
{
    if (written)
        MLAI_TRY(mlai_arg_output(args, t, name, formats, 3, 4));
    else
        MLAI_TRY(mlai_arg_tensor(args, t, name, formats, 3, 4));
    if (t->rank == 4)
        *t = mlai_drop_unit_dim(*t, 2);
    if (t->rank != 3) {
        char shape[96];
        mlai_shape_text(t, shape, sizeof shape);
        return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                         "%s has shape %s; give [pages, page_size, width] or [pages, page_size, "
                         "1, width]",
                         name, shape);
    }
    return mlai_arg_extent(args, t, name, 2, width, meaning);
}

mla_status mlai_arg_cache(mlai_args *args, const mlai_cache_arg *cache, mla_problem *problem)
{
    const uint32_t plain = MLAI_FLOATS | MLAI_FP8;
    mla_tensor *kv = cache->kv_cache;
    mla_tensor *kv_rope = cache->kv_cache_rope;
    const int64_t rank = cache->kv_lora_rank, rope_dim = cache->qk_rope_head_dim;

    MLAI_TRY(mlai_arg_dim(args, rank, 1, "kv_lora_rank", &problem->kv_lora_rank));
    MLAI_TRY(mlai_arg_dim(args, rope_dim, 0, "qk_rope_head_dim", &problem->qk_rope_head_dim));
    if (kv->rank != 0 && kv->format == MLA_FORMAT_DS656) {
        if (rank != 512 || rope_dim != 64)
            return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                             "kv_cache is ds656 with kv_lora_rank %lld and qk_rope_head_dim %lld; "
                             "ds656 rows hold 512 and 64",
                             (long long)rank, (long long)rope_dim);
        if (mlai_present(kv_rope))
            return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                             "kv_cache_rope is given beside a ds656 kv_cache; its rows hold the "
                             "rope part themselves, leave kv_cache_rope absent");
        MLAI_TRY(take_cache(args, kv, "kv_cache", MLAI_F(DS656), MLA_DS656_ROW_BYTES,
                            "the bytes of a ds656 row", cache->written));
    } else if (mlai_present(kv_rope)) {
        MLAI_TRY(take_cache(args, kv, "kv_cache", plain, rank,
                            "kv_lora_rank (kv_cache_rope holds the rope part)", cache->written));
        MLAI_TRY(take_cache(args, kv_rope, "kv_cache_rope", plain, rope_dim, "qk_rope_head_dim",
                            cache->written));
        if (kv_rope->format != kv->format)
            return mlai_fail(args->diag, MLA_ERROR_FORMAT,
                             "kv_cache_rope is %s and kv_cache %s; both parts share one format",
                             mla_format_name(kv_rope->format), mla_format_name(kv->format));
        MLAI_TRY(mlai_arg_extent(args, kv_rope, "kv_cache_rope", 0, kv->shape[0],
                                 "the pages of kv_cache"));
        MLAI_TRY(mlai_arg_extent(args, kv_rope, "kv_cache_rope", 1, kv->shape[1],
                                 "the page_size of kv_cache"));
        if (cache->written)
            MLAI_TRY(mlai_arg_apart(args, kv_rope, "kv_cache_rope", kv, "kv_cache"));
        if (rope_dim == 0)
            *kv_rope = (mla_tensor){0};
    } else {
        MLAI_TRY(take_cache(args, kv, "kv_cache", plain | MLAI_F(DS656), rank + rope_dim,
                            "kv_lora_rank + qk_rope_head_dim", cache->written));
    }
    if (kv->shape[1] < 1)
        return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                         "kv_cache has a page_size (dimension 1) of 0; it must be at least 1");
    MLAI_TRY(mlai_arg_scale(args, cache->k_scale, "k_scale", kv->format, "kv_cache"));
    if (__builtin_mul_overflow(kv->shape[0], kv->shape[1], &(int64_t){0}))
        return mlai_fail(args->diag, MLA_ERROR_SHAPE,
                         "kv_cache has %lld pages of %lld rows; their product must fit 63 bits",
                         (long long)kv->shape[0], (long long)kv->shape[1]);
    problem->kv_format = kv->format;
    problem->page_size = kv->shape[1];
    problem->has_k_scale = cache->k_scale != 1.0f;
    problem->is_split_cache = mlai_present(kv_rope);
    return MLA_OK;
}

mla_status mlai_arg_rows(mlai_args *args, mla_tensor *t, const char *name, uint32_t formats,
                         int64_t tokens, int64_t width, const char *width_meaning, bool written)
{
    if (written)
        MLAI_TRY(mlai_arg_output(args, t, name, formats, 2, 3));
    else
        MLAI_TRY(mlai_arg_tensor(args, t, name, formats, 2, 3));
    if (t->rank == 3) {
        MLAI_TRY(mlai_arg_extent(args, t, name, 1, 1, "the one key head of MLA"));
        t->shape[1] = t->shape[2];
        t->stride[1] = t->stride[2];
        t->rank = 2;
    }
    MLAI_TRY(mlai_arg_extent(args, t, name, 0, tokens, "the tokens of the call"));
    return mlai_arg_extent(args, t, name, 1, width, width_meaning);
}

mla_status mlai_arg_latent(mlai_args *args, mla_tensor *latent, mla_tensor *rope, uint32_t formats,
                           int64_t tokens, int32_t kv_lora_rank, int32_t qk_rope_head_dim,
                           bool written)
{
    if (!mlai_present(rope))
        return mlai_arg_rows(args, latent, "latent", formats, tokens,
                             (int64_t)kv_lora_rank + qk_rope_head_dim,
                             "kv_lora_rank + qk_rope_head_dim (no rope is given)", written);
    MLAI_TRY(mlai_arg_rows(args, latent, "latent", formats, tokens, kv_lora_rank,
                           "kv_lora_rank (rope holds the rest)", written));
    MLAI_TRY(mlai_arg_rows(args, rope, "rope", formats, tokens, qk_rope_head_dim,
                           "qk_rope_head_dim", written));
    if (rope->format != latent->format)
        return mlai_fail(args->diag, MLA_ERROR_FORMAT,
                         "rope is %s and latent %s; both share one format",
                         mla_format_name(rope->format), mla_format_name(latent->format));
    if (qk_rope_head_dim == 0)
        *rope = (mla_tensor){0};
    return MLA_OK;
}

mla_status mlai_arg_weight(mlai_args *args, const mla_tensor *w, const char *name,
                           const mla_tensor *activations, const char *activations_name)
{
    /* With K contiguous the transposed view is the one whose last dimension has stride 1. */
    mla_tensor view = *w;
    if (w->rank == 3 && w->stride[2] != 1 && w->stride[1] == 1) {
        view.shape[1] = w->shape[2];
        view.stride[1] = w->stride[2];
        view.shape[2] = w->shape[1];
        view.stride[2] = w->stride[1];
    }
    MLAI_TRY(mlai_arg_tensor(args, &view, name, MLAI_FLOATS, 3, 3));
    if (w->format != activations->format && w->format != MLA_FORMAT_F32)
        return mlai_fail(args->diag, MLA_ERROR_FORMAT,
                         "%s is %s and %s %s; weights take the same format or f32", name,
                         mla_format_name(w->format), activations_name,
                         mla_format_name(activations->format));
    MLAI_TRY(mlai_arg_extent(args, w, name, 0, activations->shape[1], "the heads"));
    return mlai_arg_extent(args, w, name, 1, activations->shape[2], "the width it multiplies");
}

mla_status mlai_arg_angles(mlai_args *args, const mla_tensor *positions, const mla_tensor *cos,
                           const mla_tensor *sin, int64_t tokens, int32_t qk_rope_head_dim)
{
    const int64_t half = qk_rope_head_dim / 2;
    MLAI_TRY(mlai_arg_tensor(args, positions, "positions", MLAI_INDICES, 1, 1));
    MLAI_TRY(mlai_arg_extent(args, positions, "positions", 0, tokens, "the tokens of the call"));
    MLAI_TRY(mlai_arg_tensor(args, cos, "cos", MLAI_F(F32), 2, 2));
    MLAI_TRY(mlai_arg_extent(args, cos, "cos", 1, half, "half the rope head dimension"));
    MLAI_TRY(mlai_arg_tensor(args, sin, "sin", MLAI_F(F32), 2, 2));
    MLAI_TRY(mlai_arg_extent(args, sin, "sin", 1, half, "half the rope head dimension"));
    return mlai_arg_extent(args, sin, "sin", 0, cos->shape[0], "the positions of cos");
}

mla_status mlai_live_slots(mlai_args *args, const mla_tensor *slots, const mla_tensor *kv_cache)
{
    if (!mlai_args_live(args))
        return MLA_OK;
    const int64_t n_rows = kv_cache->shape[0] * kv_cache->shape[1];
    for (int64_t i = 0; i < slots->shape[0]; i++) {
        const int64_t slot = mlai_index_at(slots, i);
        if (slot >= n_rows)
            return mlai_fail(args->diag, MLA_ERROR_CAPACITY,
                             "slots[%lld] is %lld and kv_cache has %lld rows; give page * "
                             "page_size + offset, or a negative slot for none",
                             (long long)i, (long long)slot, (long long)n_rows);
    }
    return MLA_OK;
}

mla_status mlai_live_positions(mlai_args *args, const mla_tensor *positions, const mla_tensor *cos)
{
    if (!mlai_args_live(args))
        return MLA_OK;
    for (int64_t i = 0; i < positions->shape[0]; i++) {
        const int64_t position = mlai_index_at(positions, i);
        if (position < 0 || position >= cos->shape[0])
            return mlai_fail(args->diag, MLA_ERROR_CAPACITY,
                             "positions[%lld] is %lld and the tables cos and sin have %lld rows; "
                             "make them longer",
                             (long long)i, (long long)position, (long long)cos->shape[0]);
    }
    return MLA_OK;
}

mla_status mlai_live_cumulative(mlai_args *args, const mla_tensor *cu, const char *name,
                                int64_t total, const char *total_name, int64_t max_step,
                                const char *max_name)
{
    if (!mlai_args_live(args))
        return MLA_OK;
    const int64_t batch = cu->shape[0] - 1;
    if (mlai_index_at(cu, 0) != 0)
        return mlai_fail(args->diag, MLA_ERROR_CAPACITY, "%s starts at %lld; it must start at 0",
                         name, (long long)mlai_index_at(cu, 0));
    for (int64_t b = 0; b < batch; b++) {
        const int64_t first = mlai_index_at(cu, b), end = mlai_index_at(cu, b + 1);
        if (end < first)
            return mlai_fail(args->diag, MLA_ERROR_CAPACITY,
                             "%s falls from %lld to %lld at request %lld; it must not fall", name,
                             (long long)first, (long long)end, (long long)b);
        if (end - first > max_step)
            return mlai_fail(args->diag, MLA_ERROR_CAPACITY,
                             "%s gives request %lld %lld tokens, over %s %lld; raise %s", name,
                             (long long)b, (long long)(end - first), max_name, (long long)max_step,
                             max_name);
    }
    if (mlai_index_at(cu, batch) != total)
        return mlai_fail(args->diag, MLA_ERROR_CAPACITY,
                         "%s ends at %lld and %s has %lld rows; both must agree", name,
                         (long long)mlai_index_at(cu, batch), total_name, (long long)total);
    return MLA_OK;
}
