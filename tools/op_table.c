/*
 * The operators as data (op_table.h): one row each, in the order of MLA_OP_LIST, and the rules by
 * which outputs take their shapes from inputs.
 */
#include "op_table.h"
#include <string.h>

#define AT(member) offsetof(op_params, u.member)
#define COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))

static const op_tensor decode_tensors[] = {
    {"q", AT(decode.q), OP_IN},
    {"q_rope", AT(decode.q_rope), OP_IN_OPT},
    {"kv_cache", AT(decode.kv_cache), OP_IN},
    {"kv_cache_rope", AT(decode.kv_cache_rope), OP_IN_OPT},
    {"page_table", AT(decode.page_table), OP_IN},
    {"cache_seqlens", AT(decode.cache_seqlens), OP_IN},
    {"cu_seqlens_q", AT(decode.cu_seqlens_q), OP_IN_OPT},
    {"mask", AT(decode.mask), OP_IN_OPT},
    {"global_seqlens", AT(decode.global_seqlens), OP_IN_OPT},
    {"out", AT(decode.out), OP_OUT},
    {"lse", AT(decode.lse), OP_OUT},
};

static const op_scalar decode_scalars[] = {
    {"kv_lora_rank", AT(decode.kv_lora_rank), OP_I32, false},
    {"qk_rope_head_dim", AT(decode.qk_rope_head_dim), OP_I32, false},
    {"is_causal", AT(decode.is_causal), OP_BOOL, false},
    {"seqlen_offset", AT(decode.seqlen_offset), OP_SEQLEN_OFFSET, false},
    {"max_q_len", AT(decode.max_q_len), OP_I32, false},
    {"max_seqlen_kv", AT(decode.max_seqlen_kv), OP_I64, false},
    {"softmax_scale", AT(decode.softmax_scale), OP_F32, true},
    {"logit_cap", AT(decode.logit_cap), OP_F32, false},
    {"k_scale", AT(decode.k_scale), OP_F32, false},
    {"key_position_first", AT(decode.key_position_first), OP_I64, false},
    {"key_position_stride", AT(decode.key_position_stride), OP_I64, false},
};

static const op_tensor prefill_tensors[] = {
    {"q", AT(prefill.q), OP_IN},
    {"k", AT(prefill.k), OP_IN},
    {"v", AT(prefill.v), OP_IN},
    {"cu_seqlens_q", AT(prefill.cu_seqlens_q), OP_IN},
    {"cu_seqlens_kv", AT(prefill.cu_seqlens_kv), OP_IN},
    {"out", AT(prefill.out), OP_OUT},
    {"lse", AT(prefill.lse), OP_OUT},
};

static const op_scalar prefill_scalars[] = {
    {"is_causal", AT(prefill.is_causal), OP_BOOL, false},
    {"max_seqlen_q", AT(prefill.max_seqlen_q), OP_I32, false},
    {"max_seqlen_kv", AT(prefill.max_seqlen_kv), OP_I32, false},
    {"softmax_scale", AT(prefill.softmax_scale), OP_F32, true},
    {"logit_cap", AT(prefill.logit_cap), OP_F32, false},
    {"k_scale", AT(prefill.k_scale), OP_F32, false},
    {"v_scale", AT(prefill.v_scale), OP_F32, false},
};

static const op_tensor merge_tensors[] = {
    {"out", AT(merge.out), OP_OUT},
    {"lse", AT(merge.lse), OP_OUT},
};

static const op_tensor write_tensors[] = {
    {"latent", AT(write.latent), OP_IN},
    {"rope", AT(write.rope), OP_IN_OPT},
    {"slots", AT(write.slots), OP_IN},
    {"kv_cache", AT(write.kv_cache), OP_INOUT},
    {"kv_cache_rope", AT(write.kv_cache_rope), OP_INOUT_OPT},
};

static const op_scalar write_scalars[] = {
    {"flags", AT(write.flags), OP_I32, false},
    {"k_scale", AT(write.k_scale), OP_F32, false},
    {"kv_lora_rank", AT(write.kv_lora_rank), OP_I32, false},
    {"qk_rope_head_dim", AT(write.qk_rope_head_dim), OP_I32, false},
};

static const op_tensor gather_tensors[] = {
    {"kv_cache", AT(gather.kv_cache), OP_IN},
    {"kv_cache_rope", AT(gather.kv_cache_rope), OP_IN_OPT},
    {"slots", AT(gather.slots), OP_IN},
    {"latent", AT(gather.latent), OP_OUT},
    {"rope", AT(gather.rope), OP_OUT},
};

static const op_scalar gather_scalars[] = {
    {"k_scale", AT(gather.k_scale), OP_F32, false},
    {"kv_lora_rank", AT(gather.kv_lora_rank), OP_I32, false},
    {"qk_rope_head_dim", AT(gather.qk_rope_head_dim), OP_I32, false},
};

static const op_tensor rope_tensors[] = {
    {"x", AT(rope.x), OP_IN},      {"positions", AT(rope.positions), OP_IN},
    {"cos", AT(rope.cos), OP_IN},  {"sin", AT(rope.sin), OP_IN},
    {"out", AT(rope.out), OP_OUT},
};

static const op_scalar rope_scalars[] = {
    {"is_interleaved", AT(rope.is_interleaved), OP_BOOL, false},
};

static const op_tensor rope_write_tensors[] = {
    {"q_pe", AT(rope_write.q_pe), OP_IN_OPT},
    {"latent", AT(rope_write.latent), OP_IN},
    {"k_pe", AT(rope_write.k_pe), OP_IN},
    {"positions", AT(rope_write.positions), OP_IN},
    {"cos", AT(rope_write.cos), OP_IN},
    {"sin", AT(rope_write.sin), OP_IN},
    {"slots", AT(rope_write.slots), OP_IN},
    {"kv_cache", AT(rope_write.kv_cache), OP_INOUT},
    {"kv_cache_rope", AT(rope_write.kv_cache_rope), OP_INOUT_OPT},
    {"q_pe_out", AT(rope_write.q_pe_out), OP_OUT},
    {"k_pe_out", AT(rope_write.k_pe_out), OP_OUT},
};

static const op_scalar rope_write_scalars[] = {
    {"is_interleaved", AT(rope_write.is_interleaved), OP_BOOL, false},
    {"flags", AT(rope_write.flags), OP_I32, false},
    {"k_scale", AT(rope_write.k_scale), OP_F32, false},
    {"kv_lora_rank", AT(rope_write.kv_lora_rank), OP_I32, false},
    {"qk_rope_head_dim", AT(rope_write.qk_rope_head_dim), OP_I32, false},
};

static const op_tensor absorb_tensors[] = {
    {"q_nope", AT(absorb.q_nope), OP_IN},
    {"w_uk", AT(absorb.w_uk), OP_IN},
    {"out", AT(absorb.out), OP_OUT},
};

static const op_tensor project_tensors[] = {
    {"latent", AT(project.latent), OP_IN},
    {"w_uv", AT(project.w_uv), OP_IN},
    {"gate", AT(project.gate), OP_IN_OPT},
    {"out", AT(project.out), OP_OUT},
};

static const op_tensor pack_tensors[] = {
    {"k_nope", AT(pack.k_nope), OP_IN}, {"k_pe", AT(pack.k_pe), OP_IN},
    {"v", AT(pack.v), OP_IN_OPT},       {"k_out", AT(pack.k_out), OP_OUT},
    {"v_out", AT(pack.v_out), OP_OUT},
};

static const op_scalar pack_scalars[] = {
    {"k_scale", AT(pack.k_scale), OP_F32, false},
    {"v_scale", AT(pack.v_scale), OP_F32, false},
};

/* The typed functions of ops.h behind one signature. */
#define OP_FUNCTIONS(member, type, init_macro, problem_fn, run_fn, stem)                           \
    static void stem##_init(op_params *params)                                                     \
    {                                                                                              \
        params->u.member = (type)init_macro;                                                       \
    }                                                                                              \
    static mla_status stem##_problem(const op_params *params, mla_problem *problem,                \
                                     mla_diag *diag)                                               \
    {                                                                                              \
        return problem_fn(&params->u.member, problem, diag);                                       \
    }                                                                                              \
    static mla_status stem##_run(mla_context *ctx, const op_params *params, mla_diag *diag)        \
    {                                                                                              \
        return run_fn(ctx, &params->u.member, diag);                                               \
    }

OP_FUNCTIONS(decode, mla_decode_params, MLA_DECODE_PARAMS_INIT, mla_decode_problem,
             mla_decode_with_kvcache, decode)
OP_FUNCTIONS(decode, mla_decode_params, MLA_DECODE_PARAMS_INIT, mla_extend_problem,
             mla_extend_with_kvcache, extend)
OP_FUNCTIONS(prefill, mla_prefill_params, MLA_PREFILL_PARAMS_INIT, mla_prefill_problem, mla_prefill,
             prefill)
OP_FUNCTIONS(write, mla_write_kv_params, MLA_WRITE_KV_PARAMS_INIT, mla_write_kv_problem,
             mla_write_kv, write)
OP_FUNCTIONS(gather, mla_gather_kv_params, MLA_GATHER_KV_PARAMS_INIT, mla_gather_kv_problem,
             mla_gather_kv, gather)
OP_FUNCTIONS(rope, mla_rope_params, MLA_ROPE_PARAMS_INIT, mla_rope_problem, mla_rope, rope)
OP_FUNCTIONS(rope_write, mla_rope_write_kv_params, MLA_ROPE_WRITE_KV_PARAMS_INIT,
             mla_rope_write_kv_problem, mla_rope_write_kv, rope_write)
OP_FUNCTIONS(absorb, mla_absorb_query_params, MLA_ABSORB_QUERY_PARAMS_INIT,
             mla_absorb_query_problem, mla_absorb_query, absorb)
OP_FUNCTIONS(project, mla_project_value_params, MLA_PROJECT_VALUE_PARAMS_INIT,
             mla_project_value_problem, mla_project_value, project)
OP_FUNCTIONS(pack, mla_pack_kv_params, MLA_PACK_KV_PARAMS_INIT, mla_pack_kv_problem, mla_pack_kv,
             pack)

static void merge_init(op_params *params)
{
    params->u.merge = (mla_merge_state_params)MLA_MERGE_STATE_PARAMS_INIT;
}

/* The arrays belong to the op_params at hand, which may be a copy of the one they were set in. */
static mla_merge_state_params merge_params(const op_params *params)
{
    mla_merge_state_params merge = params->u.merge;
    merge.outs = params->outs;
    merge.lses = params->lses;
    return merge;
}

static mla_status merge_problem(const op_params *params, mla_problem *problem, mla_diag *diag)
{
    mla_merge_state_params merge = merge_params(params);
    return mla_merge_state_problem(&merge, problem, diag);
}

static mla_status merge_run(mla_context *ctx, const op_params *params, mla_diag *diag)
{
    mla_merge_state_params merge = merge_params(params);
    return mla_merge_state(ctx, &merge, diag);
}

#define ROW(id, tensors, scalars, member, stem)                                                    \
    {                                                                                              \
        id, tensors, COUNT(tensors), scalars, COUNT(scalars), AT(member.call), stem##_init,        \
            stem##_problem, stem##_run                                                             \
    }
#define ROW_WITHOUT_SCALARS(id, tensors, member, stem)                                             \
    {                                                                                              \
        id, tensors, COUNT(tensors), NULL, 0, AT(member.call), stem##_init, stem##_problem,        \
            stem##_run                                                                             \
    }

static const op_row rows[] = {
    ROW(MLA_OP_DECODE, decode_tensors, decode_scalars, decode, decode),
    ROW(MLA_OP_PREFILL, prefill_tensors, prefill_scalars, prefill, prefill),
    ROW(MLA_OP_EXTEND, decode_tensors, decode_scalars, decode, extend),
    ROW_WITHOUT_SCALARS(MLA_OP_MERGE, merge_tensors, merge, merge),
    ROW(MLA_OP_WRITE, write_tensors, write_scalars, write, write),
    ROW(MLA_OP_GATHER, gather_tensors, gather_scalars, gather, gather),
    ROW(MLA_OP_ROPE, rope_tensors, rope_scalars, rope, rope),
    ROW(MLA_OP_ROPE_WRITE, rope_write_tensors, rope_write_scalars, rope_write, rope_write),
    ROW_WITHOUT_SCALARS(MLA_OP_ABSORB, absorb_tensors, absorb, absorb),
    ROW_WITHOUT_SCALARS(MLA_OP_PROJECT, project_tensors, project, project),
    ROW(MLA_OP_PACK, pack_tensors, pack_scalars, pack, pack),
};

const op_row *op_find(int32_t op)
{
    for (int32_t i = 0; i < COUNT(rows); i++) {
        if (rows[i].op == op)
            return &rows[i];
    }
    return NULL;
}

void op_init(const op_row *row, op_params *params)
{
    memset(params, 0, sizeof *params);
    params->op = row->op;
    row->init(params);
}

/* ---- outputs ------------------------------------------------------------------------------- */

/* A tensor of like's shape whose last extent is `last`. */
static mla_tensor shaped_like(const mla_tensor *like, int32_t format, int64_t last)
{
    int64_t shape[MLA_MAX_RANK];
    if (like->rank < 1)
        return mla_tensor_make(NULL, format, 0, NULL);
    memcpy(shape, like->shape, sizeof shape);
    shape[like->rank - 1] = last;
    return mla_tensor_make(NULL, format, like->rank, shape);
}

/* like's shape without its last dimension. */
static mla_tensor shaped_as_lse(const mla_tensor *like)
{
    return mla_tensor_make(NULL, MLA_FORMAT_F32, like->rank - 1, like->shape);
}

static bool is_fp8(int32_t format)
{
    return format == MLA_FORMAT_E4M3 || format == MLA_FORMAT_E5M2;
}

static int32_t pick(int32_t wanted, int32_t source)
{
    if (wanted != MLA_FORMAT_NONE)
        return wanted;
    return is_fp8(source) ? MLA_FORMAT_BF16 : source;
}

static int64_t last_extent(const mla_tensor *t)
{
    return t->rank > 0 ? t->shape[t->rank - 1] : 0;
}

static void shape_gather(mla_gather_kv_params *gather, int32_t out_format)
{
    int32_t stored = gather->kv_cache.format;
    bool is_narrow = is_fp8(stored) || stored == MLA_FORMAT_DS656;
    int32_t format = out_format != MLA_FORMAT_NONE ? out_format
                     : is_narrow                   ? MLA_FORMAT_F32
                                                   : stored;
    int64_t rows_out = gather->slots.rank == 1 ? gather->slots.shape[0] : 0;
    gather->latent = mla_tensor_2d(NULL, format, rows_out, gather->kv_lora_rank);
    if (gather->qk_rope_head_dim > 0)
        gather->rope = mla_tensor_2d(NULL, format, rows_out, gather->qk_rope_head_dim);
}

void op_shape_outputs(op_params *params, int32_t out_format, bool with_lse)
{
    mla_decode_params *decode = &params->u.decode;
    mla_prefill_params *prefill = &params->u.prefill;
    mla_merge_state_params *merge = &params->u.merge;
    mla_rope_write_kv_params *rope_write = &params->u.rope_write;
    mla_pack_kv_params *pack = &params->u.pack;
    switch (params->op) {
    case MLA_OP_DECODE:
    case MLA_OP_EXTEND:
        decode->out =
            shaped_like(&decode->q, pick(out_format, decode->q.format), decode->kv_lora_rank);
        if (with_lse)
            decode->lse = shaped_as_lse(&decode->q);
        break;
    case MLA_OP_PREFILL:
        prefill->out =
            shaped_like(&prefill->q, pick(out_format, prefill->q.format), last_extent(&prefill->v));
        if (with_lse)
            prefill->lse = shaped_as_lse(&prefill->q);
        break;
    case MLA_OP_MERGE:
        merge->out = shaped_like(&params->outs[0], pick(out_format, params->outs[0].format),
                                 last_extent(&params->outs[0]));
        if (with_lse)
            merge->lse = shaped_as_lse(&params->outs[0]);
        break;
    case MLA_OP_GATHER:
        shape_gather(&params->u.gather, out_format);
        break;
    case MLA_OP_ROPE:
        params->u.rope.out =
            shaped_like(&params->u.rope.x, pick(out_format, params->u.rope.x.format),
                        last_extent(&params->u.rope.x));
        break;
    case MLA_OP_ROPE_WRITE:
        if (rope_write->q_pe.rank > 0)
            rope_write->q_pe_out =
                shaped_like(&rope_write->q_pe, pick(out_format, rope_write->q_pe.format),
                            last_extent(&rope_write->q_pe));
        rope_write->k_pe_out =
            shaped_like(&rope_write->k_pe, rope_write->k_pe.format, last_extent(&rope_write->k_pe));
        break;
    case MLA_OP_ABSORB:
        params->u.absorb.out =
            shaped_like(&params->u.absorb.q_nope, pick(out_format, params->u.absorb.q_nope.format),
                        last_extent(&params->u.absorb.w_uk));
        break;
    case MLA_OP_PROJECT:
        params->u.project.out = shaped_like(&params->u.project.latent,
                                            pick(out_format, params->u.project.latent.format),
                                            last_extent(&params->u.project.w_uv));
        break;
    case MLA_OP_PACK:
        pack->k_out = shaped_like(&pack->k_nope, pick(out_format, pack->k_nope.format),
                                  last_extent(&pack->k_nope) + last_extent(&pack->k_pe));
        if (pack->v.rank > 0)
            pack->v_out = shaped_like(&pack->v, pack->k_out.format, last_extent(&pack->v));
        break;
    default: /* write has no output of its own */
        break;
    }
}

bool op_tensor_bytes(const mla_tensor *t, uint64_t *bytes)
{
    uint64_t total = (uint64_t)mla_format_bytes(t->format);
    for (int32_t i = 0; i < t->rank; i++) {
        if (t->shape[i] < 0 || __builtin_mul_overflow(total, (uint64_t)t->shape[i], &total) ||
            total > INT64_MAX)
            return false;
    }
    *bytes = t->rank > 0 ? total : 0;
    return true;
}
