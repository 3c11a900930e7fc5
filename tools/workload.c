/*
 * Problems by their numbers (workload.h): defaults, options, and shapes for each operator.
 */
#include "workload.h"
#include <math.h>
#include <string.h>

/* Not a number anyone can give: "follows another field". */
#define UNSET (-1)

/* Rows of the rotation tables; positions are below it. */
#define MAX_POSITIONS 4096

workload workload_default(int32_t op)
{
    workload w = {
        .op = op,
        .device_type = MLA_DEVICE_CPU,
        .heads = 128,
        .kv_heads = UNSET,
        .batch = 1,
        .q_len = 4096,
        .kv_len = UNSET,
        .page_size = 64,
        .rank = 512,
        .rope_dim = 64,
        .nope_dim = 128,
        .v_dim = 128,
        .dtype = MLA_FORMAT_BF16,
        .kv_dtype = MLA_FORMAT_NONE,
        .is_causal = true,
        .has_lse = true,
        .k_scale = 1.0,
    };
    switch (op) {
    case MLA_OP_DECODE:
        w.q_len = 1;
        w.kv_len = 4096;
        break;
    case MLA_OP_PREFILL:
        w.heads = 16;
        w.q_len = 2048;
        break;
    case MLA_OP_EXTEND:
        w.heads = 16;
        w.q_len = 128;
        w.kv_len = 4096;
        break;
    case MLA_OP_MERGE:
    case MLA_OP_ABSORB:
    case MLA_OP_PROJECT:
        w.heads = 16;
        w.q_len = 1024;
        break;
    case MLA_OP_ROPE:
    case MLA_OP_ROPE_WRITE:
        w.heads = 16;
        break;
    default:
        break;
    }
    return w;
}

void workload_settle(workload *w)
{
    if (w->kv_heads == UNSET)
        w->kv_heads = w->heads;
    if (w->kv_dtype == MLA_FORMAT_NONE)
        w->kv_dtype = w->dtype;
    if (w->kv_len == UNSET)
        w->kv_len = w->q_len;
    /* Rows to write need a slot each. */
    if ((w->op == MLA_OP_WRITE || w->op == MLA_OP_ROPE_WRITE) && w->kv_len < w->q_len)
        w->kv_len = w->q_len;
    if (w->softmax_scale == 0.0)
        w->softmax_scale = 1.0 / sqrt((double)(w->nope_dim + w->rope_dim));
}

const char *workload_option_name(int option)
{
    switch (option) {
#define NAME_ENTRY(id, text)                                                                       \
    case WORKLOAD_OPT_##id:                                                                        \
        return "--" text;
        WORKLOAD_OPTION_LIST(NAME_ENTRY)
#undef NAME_ENTRY
    default:
        return "an option";
    }
}

bool workload_set(workload *w, int option, const char *text)
{
    const char *name = workload_option_name(option);
    const uint32_t floats = 1u << MLA_FORMAT_F32 | 1u << MLA_FORMAT_BF16 | 1u << MLA_FORMAT_F16 |
                            1u << MLA_FORMAT_E4M3 | 1u << MLA_FORMAT_E5M2;
    switch (option) {
    case WORKLOAD_OPT_HEADS:
        return cli_int(name, text, 1, 65536, &w->heads);
    case WORKLOAD_OPT_KV_HEADS:
        return cli_int(name, text, 1, 65536, &w->kv_heads);
    case WORKLOAD_OPT_BATCH:
        return cli_int(name, text, 1, 1 << 20, &w->batch);
    case WORKLOAD_OPT_Q_LEN:
        return cli_int(name, text, 1, 1 << 24, &w->q_len);
    case WORKLOAD_OPT_KV_LEN:
        return cli_int(name, text, 0, 1 << 28, &w->kv_len);
    case WORKLOAD_OPT_PAGE_SIZE:
        return cli_int(name, text, 1, 1 << 20, &w->page_size);
    case WORKLOAD_OPT_RANK:
        return cli_int(name, text, 1, 65536, &w->rank);
    case WORKLOAD_OPT_ROPE_DIM:
        return cli_int(name, text, 0, 65536, &w->rope_dim);
    case WORKLOAD_OPT_NOPE_DIM:
        return cli_int(name, text, 0, 65536, &w->nope_dim);
    case WORKLOAD_OPT_V_DIM:
        return cli_int(name, text, 1, 65536, &w->v_dim);
    case WORKLOAD_OPT_DTYPE:
        return cli_format(name, text, floats, &w->dtype);
    case WORKLOAD_OPT_KV_DTYPE:
        return cli_format(name, text, floats | 1u << MLA_FORMAT_DS656, &w->kv_dtype);
    case WORKLOAD_OPT_CAUSAL:
        return cli_bool(name, text, &w->is_causal);
    case WORKLOAD_OPT_LOGIT_CAP:
        return cli_double(name, text, 0.0, 1e30, &w->logit_cap);
    case WORKLOAD_OPT_DEVICE:
        return cli_device(name, text, &w->device_type, &w->device_index);
    default:
        return false;
    }
}

/* ---- shapes ------------------------------------------------------------------------------------
 */

static int64_t length_of(const workload *w, const int64_t *lens, int64_t request)
{
    return lens != NULL ? lens[request] : w->kv_len;
}

static int64_t total_keys(const workload *w, const int64_t *lens)
{
    int64_t total = 0;
    for (int64_t i = 0; i < w->batch; i++)
        total += length_of(w, lens, i);
    return total;
}

int64_t workload_pages(const workload *w, const int64_t *lens)
{
    int64_t pages = 1;
    for (int64_t i = 0; i < w->batch; i++)
        pages += (length_of(w, lens, i) + w->page_size - 1) / w->page_size;
    return pages;
}

static mla_tensor on(const workload *w, mla_tensor t)
{
    return mla_tensor_on(t, w->device_type, w->device_index);
}

static mla_tensor cache_of(const workload *w, const int64_t *lens)
{
    int64_t width = w->kv_dtype == MLA_FORMAT_DS656 ? MLA_DS656_ROW_BYTES : w->rank + w->rope_dim;
    return on(w, mla_tensor_3d(NULL, w->kv_dtype, workload_pages(w, lens), w->page_size, width));
}

static void decode_params(const workload *w, const int64_t *lens, mla_decode_params *p)
{
    int64_t width = w->rank + w->rope_dim;
    int64_t table_width = (w->kv_len + w->page_size - 1) / w->page_size;
    p->kv_lora_rank = (int32_t)w->rank;
    p->qk_rope_head_dim = (int32_t)w->rope_dim;
    p->is_causal = w->is_causal;
    p->max_seqlen_kv = w->kv_len;
    p->softmax_scale = (float)w->softmax_scale;
    p->logit_cap = (float)w->logit_cap;
    p->k_scale = (float)w->k_scale;
    p->kv_cache = cache_of(w, lens);
    p->page_table =
        on(w, mla_tensor_2d(NULL, MLA_FORMAT_I32, w->batch, table_width > 0 ? table_width : 1));
    p->cache_seqlens = on(w, mla_tensor_1d(NULL, MLA_FORMAT_I32, w->batch));
    p->q = on(w, mla_tensor_4d(NULL, w->dtype, w->batch, w->q_len, w->heads, width));
    if (w->op == MLA_OP_EXTEND) {
        p->q = on(w, mla_tensor_3d(NULL, w->dtype, w->batch * w->q_len, w->heads, width));
        p->cu_seqlens_q = on(w, mla_tensor_1d(NULL, MLA_FORMAT_I32, w->batch + 1));
        p->max_q_len = (int32_t)w->q_len;
    }
    if (w->has_mask)
        p->mask = on(w, mla_tensor_2d(NULL, MLA_FORMAT_U8, w->batch * w->q_len, w->q_len));
}

static void prefill_params(const workload *w, const int64_t *lens, mla_prefill_params *p)
{
    int64_t keys = total_keys(w, lens);
    int64_t width = w->nope_dim + w->rope_dim;
    p->is_causal = w->is_causal;
    p->max_seqlen_q = (int32_t)w->q_len;
    p->max_seqlen_kv = (int32_t)w->kv_len;
    p->softmax_scale = (float)w->softmax_scale;
    p->logit_cap = (float)w->logit_cap;
    p->k_scale = (float)w->k_scale;
    p->q = on(w, mla_tensor_3d(NULL, w->dtype, w->batch * w->q_len, w->heads, width));
    p->k = on(w, mla_tensor_3d(NULL, w->kv_dtype, keys, w->kv_heads, width));
    p->v = on(w, mla_tensor_3d(NULL, w->kv_dtype, keys, w->kv_heads, w->v_dim));
    p->cu_seqlens_q = on(w, mla_tensor_1d(NULL, MLA_FORMAT_I32, w->batch + 1));
    p->cu_seqlens_kv = on(w, mla_tensor_1d(NULL, MLA_FORMAT_I32, w->batch + 1));
}

static void rope_write_params(const workload *w, const int64_t *lens, int64_t tokens,
                              mla_rope_write_kv_params *p)
{
    p->k_scale = (float)w->k_scale;
    p->q_pe = on(w, mla_tensor_3d(NULL, w->dtype, tokens, w->heads, w->rope_dim));
    p->latent = on(w, mla_tensor_2d(NULL, w->dtype, tokens, w->rank));
    p->k_pe = on(w, mla_tensor_2d(NULL, w->dtype, tokens, w->rope_dim));
    p->positions = on(w, mla_tensor_1d(NULL, MLA_FORMAT_I32, tokens));
    p->cos = on(w, mla_tensor_2d(NULL, MLA_FORMAT_F32, MAX_POSITIONS, w->rope_dim / 2));
    p->sin = p->cos;
    p->slots = on(w, mla_tensor_1d(NULL, MLA_FORMAT_I32, tokens));
    p->kv_cache = cache_of(w, lens);
    p->kv_lora_rank = (int32_t)w->rank;
    p->qk_rope_head_dim = (int32_t)w->rope_dim;
}

static void write_params(const workload *w, const int64_t *lens, int64_t tokens,
                         mla_write_kv_params *p)
{
    p->k_scale = (float)w->k_scale;
    p->latent = on(w, mla_tensor_2d(NULL, w->dtype, tokens, w->rank));
    if (w->rope_dim > 0)
        p->rope = on(w, mla_tensor_2d(NULL, w->dtype, tokens, w->rope_dim));
    p->slots = on(w, mla_tensor_1d(NULL, MLA_FORMAT_I32, tokens));
    p->kv_cache = cache_of(w, lens);
    p->kv_lora_rank = (int32_t)w->rank;
    p->qk_rope_head_dim = (int32_t)w->rope_dim;
}

static void gather_params(const workload *w, const int64_t *lens, mla_gather_kv_params *p)
{
    p->k_scale = (float)w->k_scale;
    p->kv_cache = cache_of(w, lens);
    p->slots = on(w, mla_tensor_1d(NULL, MLA_FORMAT_I32, total_keys(w, lens)));
    p->kv_lora_rank = (int32_t)w->rank;
    p->qk_rope_head_dim = (int32_t)w->rope_dim;
}

static void merge_params(const workload *w, int64_t tokens, op_params *params)
{
    params->u.merge.n_states = 2;
    for (int32_t i = 0; i < 2; i++) {
        params->outs[i] = on(w, mla_tensor_3d(NULL, w->dtype, tokens, w->heads, w->v_dim));
        params->lses[i] = on(w, mla_tensor_2d(NULL, MLA_FORMAT_F32, tokens, w->heads));
    }
}

/* The largest tensors have fewer than 2^62 elements for every value that the options take, but the
 * i32 arrays (cumulative lengths, slots) bound the totals. */
static bool totals_fit(const workload *w, const int64_t *lens)
{
    int64_t slots = workload_pages(w, lens);
    if (w->batch * w->q_len <= INT32_MAX && total_keys(w, lens) <= INT32_MAX &&
        !__builtin_mul_overflow(slots, w->page_size, &slots) && slots <= INT32_MAX)
        return true;
    cli_refuse("batch %lld times q-len %lld or kv-len %lld is over %d tokens", (long long)w->batch,
               (long long)w->q_len, (long long)w->kv_len, INT32_MAX);
    return false;
}

bool workload_params(const workload *w, const int64_t *lens, op_params *params)
{
    const op_row *row = op_find(w->op);
    int64_t tokens = w->batch * w->q_len;
    if (!totals_fit(w, lens))
        return false;
    if (w->kv_dtype == MLA_FORMAT_DS656 && (w->op == MLA_OP_PREFILL || w->op == MLA_OP_PACK)) {
        cli_refuse("--kv-dtype is ds656, which is a cache row; %s takes f32, bf16, f16, e4m3 or "
                   "e5m2",
                   mla_op_name(w->op));
        return false;
    }
    int64_t keys = total_keys(w, lens);
    op_init(row, params);
    mla_pack_kv_params *pack = &params->u.pack;
    switch (w->op) {
    case MLA_OP_DECODE:
    case MLA_OP_EXTEND:
        decode_params(w, lens, &params->u.decode);
        break;
    case MLA_OP_PREFILL:
        prefill_params(w, lens, &params->u.prefill);
        break;
    case MLA_OP_MERGE:
        merge_params(w, tokens, params);
        break;
    case MLA_OP_WRITE:
        write_params(w, lens, tokens, &params->u.write);
        break;
    case MLA_OP_GATHER:
        gather_params(w, lens, &params->u.gather);
        break;
    case MLA_OP_ROPE:
        params->u.rope.x = on(w, mla_tensor_3d(NULL, w->dtype, tokens, w->heads, w->rope_dim));
        params->u.rope.positions = on(w, mla_tensor_1d(NULL, MLA_FORMAT_I32, tokens));
        params->u.rope.cos =
            on(w, mla_tensor_2d(NULL, MLA_FORMAT_F32, MAX_POSITIONS, w->rope_dim / 2));
        params->u.rope.sin = params->u.rope.cos;
        break;
    case MLA_OP_ROPE_WRITE:
        rope_write_params(w, lens, tokens, &params->u.rope_write);
        break;
    case MLA_OP_ABSORB:
        params->u.absorb.q_nope =
            on(w, mla_tensor_3d(NULL, w->dtype, tokens, w->heads, w->nope_dim));
        params->u.absorb.w_uk =
            on(w, mla_tensor_3d(NULL, w->dtype, w->heads, w->nope_dim, w->rank));
        break;
    case MLA_OP_PROJECT:
        params->u.project.latent = on(w, mla_tensor_3d(NULL, w->dtype, tokens, w->heads, w->rank));
        params->u.project.w_uv = on(w, mla_tensor_3d(NULL, w->dtype, w->heads, w->rank, w->v_dim));
        break;
    default:
        pack->k_nope = on(w, mla_tensor_3d(NULL, w->dtype, keys, w->heads, w->nope_dim));
        pack->k_pe = on(w, mla_tensor_2d(NULL, w->dtype, keys, w->rope_dim));
        pack->v = on(w, mla_tensor_3d(NULL, w->dtype, keys, w->heads, w->v_dim));
        break;
    }
    int32_t out = w->op == MLA_OP_GATHER ? w->dtype : MLA_FORMAT_NONE;
    if (w->op == MLA_OP_PACK)
        out = w->kv_dtype;
    op_shape_outputs(params, out, w->has_lse);
    for (int32_t i = 0; i < row->n_tensors; i++) {
        mla_tensor *t = op_tensor_at(params, row->tensors[i].offset);
        if (row->tensors[i].role == OP_OUT && t->rank > 0)
            *t = on(w, *t);
    }
    return true;
}
