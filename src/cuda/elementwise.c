/*
 * Launchers of the portable row kernels (kernels/rows.cu): write, gather, rope, rope_write, merge,
 * pack on CUDA tensors. Each turns the validated parameter struct into the kernel's own and
 * launches it on exec->stream: asynchronous, no allocation, no synchronisation, fit for graph
 * capture.
 */
#include "cuda/elementwise.h"
#include "cuda/cuda.h"
#include "cuda/kernels/rows.h"

enum { THREADS = 256, WARPS = THREADS / 32, MAX_GROUP = 8 };

/* `warps`: as many as the work has pieces. */
static mla_status launch_rows(const mla_exec *exec, const char *kernel_name, int64_t warps,
                              void *params, mla_diag *diag)
{
    CUkernel kernel;
    const int64_t blocks = mlai_ceil_div(warps, WARPS);
    if (warps <= 0)
        return MLA_OK;
    if (blocks > INT32_MAX)
        return mlai_fail(diag, MLA_ERROR_CAPACITY, "%lld blocks; a grid has up to %d",
                         (long long)blocks, INT32_MAX);
    MLAI_TRY(mlai_cuda_kernel(exec->device, "rows", kernel_name, 0, &kernel, diag));
    const mlai_cuda_launch launch = {.grid = {(uint32_t)blocks, 1, 1}, .block = {THREADS, 1, 1}};
    return mlai_cuda_run(exec, kernel, &launch, params, diag);
}

/* Bases and strides at multiples of 16 bytes. */
static bool is_wide(const mla_tensor *t)
{
    if (!mlai_present(t))
        return true;
    bool wide = (uintptr_t)t->data % 16 == 0;
    for (int32_t i = 0; i + 1 < t->rank; i++)
        wide = wide && t->stride[i] * mla_format_bytes(t->format) % 16 == 0;
    return wide;
}

static mlai_cuda_rows rows_of(const mla_tensor *t)
{
    mlai_cuda_rows rows = {0};
    if (!mlai_present(t))
        return rows;
    rows.data = t->data;
    rows.format = t->format;
    rows.stride0 = t->stride[0];
    rows.stride1 = t->rank > 2 ? t->stride[1] : 0;
    return rows;
}

static mlai_cuda_index index_of(const mla_tensor *t)
{
    return (mlai_cuda_index){t->data, t->stride[0], t->format == MLA_FORMAT_I64};
}

static mlai_cuda_cache cache_of(const mla_tensor *kv, const mla_tensor *kv_rope,
                                int32_t kv_lora_rank, int32_t qk_rope_head_dim, float k_scale,
                                int32_t sanitize)
{
    int64_t bytes = mla_format_bytes(kv->format);
    mlai_cuda_cache cache = {.latent = kv->data,
                             .page_bytes = kv->stride[0] * bytes,
                             .row_bytes = kv->stride[1] * bytes,
                             .rows = kv->shape[0] * kv->shape[1],
                             .page_size = (int32_t)kv->shape[1],
                             .n_latent = kv_lora_rank,
                             .n_rope = qk_rope_head_dim,
                             .format = kv->format,
                             .k_scale = k_scale,
                             .sanitize = sanitize};
    cache.rope = cache.latent + (kv->format == MLA_FORMAT_DS656 ? 528 : kv_lora_rank * bytes);
    cache.rope_page_bytes = cache.page_bytes;
    cache.rope_row_bytes = cache.row_bytes;
    if (mlai_present(kv_rope)) {
        cache.rope = kv_rope->data;
        cache.rope_page_bytes = kv_rope->stride[0] * bytes;
        cache.rope_row_bytes = kv_rope->stride[1] * bytes;
    }
    return cache;
}

/* The rope part of a row operand: a tensor of its own, or the columns after the latent. */
static mlai_cuda_rows rope_rows_of(const mla_tensor *latent, const mla_tensor *rope,
                                   int32_t kv_lora_rank)
{
    if (mlai_present(rope))
        return rows_of(rope);
    mlai_cuda_rows rows = rows_of(latent);
    rows.data += (int64_t)kv_lora_rank * mla_format_bytes(latent->format);
    return rows;
}

static bool cache_is_wide(const mla_tensor *kv, const mla_tensor *kv_rope, int32_t kv_lora_rank,
                          int32_t qk_rope_head_dim)
{
    return is_wide(kv) && is_wide(kv_rope) && kv_lora_rank % 16 == 0 && qk_rope_head_dim % 8 == 0;
}

/* Tokens that a warp has at a time: few where there are few, so that all multiprocessors work. */
static int32_t group_of(const mla_exec *exec, int64_t tokens)
{
    const mlai_cuda_device *device = exec->device;
    int64_t each = tokens / ((int64_t)device->sm_count * 4 * WARPS);
    return (int32_t)mlai_min_i64(mlai_max_i64(each, 1), MAX_GROUP);
}

/* What write and gather share; `converts`: more than copies, even from a format to itself. */
static mlai_cuda_write_params moves_of(const mla_exec *exec, mlai_cuda_cache cache,
                                       const mla_tensor *kv, const mla_tensor *kv_rope,
                                       const mla_tensor *latent, const mla_tensor *rope,
                                       const mla_tensor *slots, bool converts)
{
    mlai_cuda_write_params own = {.cache = cache,
                                  .slots = index_of(slots),
                                  .latent = rows_of(latent),
                                  .rope = rope_rows_of(latent, rope, cache.n_latent),
                                  .tokens = slots->shape[0],
                                  .wide = is_wide(latent) && is_wide(rope) &&
                                          cache_is_wide(kv, kv_rope, cache.n_latent, cache.n_rope)};
    own.copies = own.wide && !converts && cache.format == latent->format;
    own.group = group_of(exec, own.tokens);
    return own;
}

mla_status mlai_cuda_write(const mla_exec *exec, const mla_problem *problem, const void *params,
                           mla_diag *diag)
{
    (void)problem;
    const mla_write_kv_params *p = params;
    const bool sanitizes = p->flags & MLA_WRITE_SANITIZE;
    mlai_cuda_write_params own = moves_of(exec,
                                          cache_of(&p->kv_cache, &p->kv_cache_rope, p->kv_lora_rank,
                                                   p->qk_rope_head_dim, p->k_scale, sanitizes),
                                          &p->kv_cache, &p->kv_cache_rope, &p->latent, &p->rope,
                                          &p->slots, sanitizes || p->k_scale != 1.0f);
    return launch_rows(exec, "mla_write_rows", mlai_ceil_div(own.tokens, own.group), &own, diag);
}

mla_status mlai_cuda_gather(const mla_exec *exec, const mla_problem *problem, const void *params,
                            mla_diag *diag)
{
    (void)problem;
    const mla_gather_kv_params *p = params;
    mlai_cuda_write_params own = moves_of(exec,
                                          cache_of(&p->kv_cache, &p->kv_cache_rope, p->kv_lora_rank,
                                                   p->qk_rope_head_dim, p->k_scale, false),
                                          &p->kv_cache, &p->kv_cache_rope, &p->latent, &p->rope,
                                          &p->slots, p->k_scale != 1.0f);
    return launch_rows(exec, "mla_gather_rows", mlai_ceil_div(own.tokens, own.group), &own, diag);
}

/* A head over P / 16 lanes, two chunks each, with angles as four 16-byte loads. */
static bool rotates_wide(const mla_tensor *x, const mla_tensor *out, const mla_tensor *cos,
                         const mla_tensor *sin)
{
    const int64_t lanes = cos->shape[1] / 8;
    return cos->shape[1] % 8 == 0 && lanes >= 1 && lanes <= 32 && (lanes & (lanes - 1)) == 0 &&
           is_wide(x) && is_wide(out) && is_wide(cos) && is_wide(sin);
}

static mlai_cuda_rope_params rope_of(const mla_tensor *x, const mla_tensor *out,
                                     const mla_tensor *positions, const mla_tensor *cos,
                                     const mla_tensor *sin, int32_t is_interleaved)
{
    mlai_cuda_rope_params own = {.x = rows_of(x),
                                 .out = rows_of(out),
                                 .positions = index_of(positions),
                                 .cos = cos->data,
                                 .sin = sin->data,
                                 .cos_stride = cos->stride[0],
                                 .sin_stride = sin->stride[0],
                                 .max_positions = cos->shape[0],
                                 .tokens = positions->shape[0],
                                 .heads = x->rank > 2 ? (int32_t)x->shape[1] : 1,
                                 .width = 2 * (int32_t)cos->shape[1],
                                 .is_interleaved = is_interleaved,
                                 .wide = rotates_wide(x, out, cos, sin),
                                 .lanes = (int32_t)cos->shape[1] / 8};
    own.heads_of_part =
        own.wide ? 32 / own.lanes * (MLAI_ROWS_IN_FLIGHT(x->format == MLA_FORMAT_F32) / 2) : 1;
    own.parts = (int32_t)mlai_ceil_div(own.heads, own.heads_of_part);
    return own;
}

mla_status mlai_cuda_rope(const mla_exec *exec, const mla_problem *problem, const void *params,
                          mla_diag *diag)
{
    (void)problem;
    const mla_rope_params *p = params;
    mlai_cuda_rope_params own =
        rope_of(&p->x, &p->out, &p->positions, &p->cos, &p->sin, p->is_interleaved);
    return launch_rows(exec, "mla_rope_rows", own.tokens * own.parts, &own, diag);
}

mla_status mlai_cuda_rope_write(const mla_exec *exec, const mla_problem *problem,
                                const void *params, mla_diag *diag)
{
    (void)problem;
    const mla_rope_write_kv_params *p = params;
    const bool sanitizes = p->flags & MLA_WRITE_SANITIZE;
    const mla_tensor none = {0};
    mlai_cuda_rope_write_params own = {
        .q = rope_of(&p->q_pe, &p->q_pe_out, &p->positions, &p->cos, &p->sin, p->is_interleaved),
        .kv = moves_of(exec,
                       cache_of(&p->kv_cache, &p->kv_cache_rope, p->kv_lora_rank,
                                p->qk_rope_head_dim, p->k_scale, sanitizes),
                       &p->kv_cache, &p->kv_cache_rope, &p->latent, &none, &p->slots,
                       sanitizes || p->k_scale != 1.0f),
        .k_out = rows_of(&p->k_pe_out),
        .k_wide =
            rotates_wide(&p->k_pe, &p->k_pe_out, &p->cos, &p->sin) &&
            cache_is_wide(&p->kv_cache, &p->kv_cache_rope, p->kv_lora_rank, p->qk_rope_head_dim)};
    own.kv.rope = rows_of(&p->k_pe);
    if (!mlai_present(&p->q_pe))
        own.q.parts = 0;
    const int64_t groups = mlai_ceil_div(own.kv.tokens, own.kv.group);
    return launch_rows(exec, "mla_rope_write_rows", groups + own.kv.tokens * own.q.parts, &own,
                       diag);
}

/* Lanes of a merged row: each has two chunks, or more where 32 lanes do not do. */
static int32_t merge_lanes(int64_t width)
{
    int32_t lanes = 1;
    while (lanes < 32 && 16 * lanes < width)
        lanes *= 2;
    return lanes;
}

mla_status mlai_cuda_merge(const mla_exec *exec, const mla_problem *problem, const void *params,
                           mla_diag *diag)
{
    (void)problem;
    const mla_merge_state_params *p = params;
    mlai_cuda_merge_params own = {.out = rows_of(&p->out),
                                  .tokens = p->out.shape[0],
                                  .heads = (int32_t)p->out.shape[1],
                                  .width = (int32_t)p->out.shape[2],
                                  .n_states = p->n_states,
                                  .in_format = p->outs[0].format,
                                  .wide = is_wide(&p->out) && p->out.shape[2] % 8 == 0,
                                  .lanes = merge_lanes(p->out.shape[2])};
    for (int32_t i = 0; i < p->n_states; i++) {
        own.outs[i] = p->outs[i].data;
        own.lses[i] = p->lses[i].data;
        for (int32_t k = 0; k < 2; k++) {
            own.out_strides[i][k] = p->outs[i].stride[k];
            own.lse_strides[i][k] = p->lses[i].stride[k];
        }
        own.wide = own.wide && is_wide(&p->outs[i]);
    }
    if (mlai_present(&p->lse)) {
        own.lse = p->lse.data;
        own.lse_stride0 = p->lse.stride[0];
        own.lse_stride1 = p->lse.stride[1];
    }
    const int64_t rows = own.tokens * own.heads, rows_of_warp = own.wide ? 32 / own.lanes : 1;
    return launch_rows(exec, "mla_merge_rows", mlai_ceil_div(rows, rows_of_warp), &own, diag);
}

mla_status mlai_cuda_pack(const mla_exec *exec, const mla_problem *problem, const void *params,
                          mla_diag *diag)
{
    (void)problem;
    const mla_pack_kv_params *p = params;
    mlai_cuda_pack_params own = {.k_nope = rows_of(&p->k_nope),
                                 .k_pe = rows_of(&p->k_pe),
                                 .v = rows_of(&p->v),
                                 .k_out = rows_of(&p->k_out),
                                 .v_out = rows_of(&p->v_out),
                                 .tokens = p->k_nope.shape[0],
                                 .heads = (int32_t)p->k_nope.shape[1],
                                 .n_nope = (int32_t)p->k_nope.shape[2],
                                 .n_rope = (int32_t)p->k_pe.shape[p->k_pe.rank - 1],
                                 .n_v = mlai_present(&p->v) ? (int32_t)p->v.shape[2] : 0,
                                 .k_scale = p->k_scale,
                                 .v_scale = p->v_scale};
    own.wide = is_wide(&p->k_nope) && is_wide(&p->k_pe) && is_wide(&p->v) && is_wide(&p->k_out) &&
               is_wide(&p->v_out) && own.n_nope % 16 == 0;
    return launch_rows(exec, "mla_pack_rows", own.tokens * own.heads, &own, diag);
}
