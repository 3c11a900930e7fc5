/*
 * Operator layer: what the operators share on their way from a caller's struct to a solution.
 *
 * Each operator is one file: take the struct, check it, normalise it, make its problem, check the
 * live values (CPU only, device memory is never read here), dispatch. Solutions get the normalised
 * struct and trust it. Normalised means:
 *   caches              rank 3: [pages, PS, D], [pages, PS, R] beside [pages, PS, P], or
 *                       [pages, PS, 656]
 *   latent, rope, k_pe  rank 2: [T, width]; a rope part of width 0 is absent
 *   q and out           decode: [B, q_len, H, x], or [T, H, x] when ragged
 *   x, out of rope      rank 3: [T, H, P]; out and gate of project: [T, H, V]
 *   bounds              max_q_len, max_seqlen_q and max_seqlen_kv are filled and no larger than
 *                       the shapes allow
 *   key positions       first 0 and stride 1 unless global_seqlens is given
 */
#ifndef MLAI_OPS_H
#define MLAI_OPS_H

#include "base/base.h"
#include "registry/registry.h"
#include <mla/ops.h>

/* What one call's checks carry along. The first tensor sets the device that all must be on. */
typedef struct mlai_args {
    mla_diag *diag;
    bool pointers;        /* false: shapes and formats only, for mla_<op>_problem */
    char device_name[24]; /* of the first tensor; empty before it */
    int32_t device_type;
    int32_t device_index;
    bool is_empty; /* set where there is nothing to write although there are tokens */
} mlai_args;

/* Every parameter struct ends with its mla_call as of version 0.1. */
#define MLAI_TAKE(own, callers, type, diag)                                                        \
    mlai_take_struct((own), sizeof(type), offsetof(type, call) + sizeof(mla_call), (callers),      \
                     #type, (diag))

/*
 * The way of every operator but the attentions. `prepare` takes the caller's struct into `own`, of
 * the operator's type, checks it with its live values, and fills the problem less its device.
 * `call` is own's.
 */
typedef mla_status (*mlai_prepare)(mlai_args *args, const void *params, void *own,
                                   mla_problem *problem);
mla_status mlai_operator_run(mla_context *ctx, mlai_prepare prepare, const void *params, void *own,
                             mla_call *call, mla_diag *diag);
mla_status mlai_operator_describe(mlai_prepare prepare, const void *params, void *own,
                                  mla_problem *problem, mla_diag *diag);

/* ctx must not be NULL and the reserved words of a call must be. */
mla_status mlai_arg_context(const mla_context *ctx, mla_diag *diag);
mla_status mlai_arg_call(mlai_args *args, const mla_call *call);

/* MLA_LAYOUT_UNALIGNED unless all tensors that are present are aligned; else 0. */
int32_t mlai_layout_aligned(const mla_tensor *const *tensors, int32_t n_tensors);

/* Copies a problem to the caller's struct, as much of it as its struct_size has room for. */
mla_status mlai_give_problem(mla_problem *callers, const mla_problem *own, mla_diag *diag);

/* A tensor that must be there; one that may be absent; one that is written (no stride of 0). */
mla_status mlai_arg_tensor(mlai_args *args, const mla_tensor *t, const char *name, uint32_t formats,
                           int32_t min_rank, int32_t max_rank);
mla_status mlai_arg_optional(mlai_args *args, const mla_tensor *t, const char *name,
                             uint32_t formats, int32_t min_rank, int32_t max_rank);
mla_status mlai_arg_output(mlai_args *args, const mla_tensor *t, const char *name, uint32_t formats,
                           int32_t min_rank, int32_t max_rank);

mla_status mlai_arg_extent(mlai_args *args, const mla_tensor *t, const char *name, int32_t dim,
                           int64_t want, const char *meaning);

/* An extent as a dimension of the problem: `min` .. INT32_MAX. */
mla_status mlai_arg_dim(mlai_args *args, int64_t value, int64_t min, const char *name,
                        int32_t *out);

/* Scalars: 0 or 1; unused fields; finite and above 0; 1 unless the format is fp8. */
mla_status mlai_arg_flag(mlai_args *args, int32_t value, const char *name);
mla_status mlai_arg_reserved(mlai_args *args, int32_t value, const char *name);
mla_status mlai_arg_scale(mlai_args *args, float value, const char *name, int32_t format,
                          const char *format_name);
mla_status mlai_arg_softmax(mlai_args *args, float softmax_scale, float logit_cap);

/*
 * Overlap is refused where it is cheap to see and certain: equal pointers of two tensors that are
 * not empty. Where working in place is allowed, equal pointers need equal formats and strides.
 */
mla_status mlai_arg_apart(mlai_args *args, const mla_tensor *out, const char *out_name,
                          const mla_tensor *in, const char *in_name);
mla_status mlai_arg_in_place(mlai_args *args, const mla_tensor *out, const char *out_name,
                             const mla_tensor *in, const char *in_name);

/* The cache operand: checks it, drops the unit dimension, and tells what the problem wants. */
typedef struct mlai_cache_arg {
    mla_tensor *kv_cache;
    mla_tensor *kv_cache_rope;
    int32_t kv_lora_rank;
    int32_t qk_rope_head_dim;
    float k_scale;
    bool written;
} mlai_cache_arg;

mla_status mlai_arg_cache(mlai_args *args, const mlai_cache_arg *cache, mla_problem *problem);

/* Rows of T tokens [T, width] or [T, 1, width]: checked and made rank 2. */
mla_status mlai_arg_rows(mlai_args *args, mla_tensor *t, const char *name, uint32_t formats,
                         int64_t tokens, int64_t width, const char *width_meaning, bool written);

/* latent and, where present, rope: one format; without rope latent is R + P wide. */
mla_status mlai_arg_latent(mlai_args *args, mla_tensor *latent, mla_tensor *rope, uint32_t formats,
                           int64_t tokens, int32_t kv_lora_rank, int32_t qk_rope_head_dim,
                           bool written);

/* A weight [H, K, n] for activations [T, H, K]: n or K contiguous; their format, or f32. */
mla_status mlai_arg_weight(mlai_args *args, const mla_tensor *w, const char *name,
                           const mla_tensor *activations, const char *activations_name);

/* Angle tables and positions of the rope operators; P is their head dimension. */
mla_status mlai_arg_angles(mlai_args *args, const mla_tensor *positions, const mla_tensor *cos,
                           const mla_tensor *sin, int64_t tokens, int32_t qk_rope_head_dim);

/* ---- live values, read on the CPU only ----------------------------------------------------- */

static inline bool mlai_args_live(const mlai_args *args)
{
    return args->pointers && args->device_type == MLA_DEVICE_CPU;
}

/* Slots below the cache's rows; negative ones mean "none". */
mla_status mlai_live_slots(mlai_args *args, const mla_tensor *slots, const mla_tensor *kv_cache);

/* Positions inside the angle tables. */
mla_status mlai_live_positions(mlai_args *args, const mla_tensor *positions, const mla_tensor *cos);

/* cu[0] = 0, never falls, cu[B] = total, no step over max_step. */
mla_status mlai_live_cumulative(mlai_args *args, const mla_tensor *cu, const char *name,
                                int64_t total, const char *total_name, int64_t max_step,
                                const char *max_name);

#endif
