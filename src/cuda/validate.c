/*
 * Launcher of the kernel that checks live values (kernels/validate.cu): what each operator has to
 * check, taken from its parameters.
 */
#include "cuda/validate.h"
#include "cuda/cuda.h"
#include "cuda/kernels/validate.h"

enum { BLOCKS_PER_SM = 4 };

static mlai_cuda_index index_of(const mla_tensor *t)
{
    if (!mlai_present(t))
        return (mlai_cuda_index){0};
    return (mlai_cuda_index){t->data, t->stride[0], t->format == MLA_FORMAT_I64};
}

static void check_decode(mlai_validate_params *own, const mla_decode_params *p)
{
    own->cu_q = index_of(&p->cu_seqlens_q);
    own->seqlens = index_of(&p->cache_seqlens);
    own->global = index_of(&p->global_seqlens);
    own->page_table = p->page_table.data;
    own->table_stride = p->page_table.stride[0];
    own->pages = p->kv_cache.shape[0];
    own->page_size = p->kv_cache.shape[1];
    own->capacity = p->page_table.shape[1] * own->page_size;
    own->max_q_len = p->max_q_len;
    own->max_kv_len = p->max_seqlen_kv;
    own->position_first = p->key_position_first;
    own->position_stride = p->key_position_stride;
    own->is_causal = p->is_causal;
    own->has_offset = p->seqlen_offset != MLA_SEQLEN_OFFSET_VERIFY;
    own->seqlen_offset = own->has_offset ? p->seqlen_offset : 0;
}

static void check_prefill(mlai_validate_params *own, const mla_prefill_params *p)
{
    own->cu_q = index_of(&p->cu_seqlens_q);
    own->cu_kv = index_of(&p->cu_seqlens_kv);
    own->tokens_kv = p->k.shape[0];
    own->max_q_len = p->max_seqlen_q;
    own->max_kv_len = p->max_seqlen_kv;
}

static void check_slots(mlai_validate_params *own, const mla_tensor *slots, const mla_tensor *kv)
{
    own->slots = index_of(slots);
    own->n_slots = slots->shape[0];
    own->slot_end = kv->shape[0] * kv->shape[1];
}

static void check_positions(mlai_validate_params *own, const mla_tensor *positions,
                            const mla_tensor *cos)
{
    own->positions = index_of(positions);
    own->n_positions = positions->shape[0];
    own->position_end = cos->shape[0];
}

/* False: the operator reads nothing live. */
static bool check(mlai_validate_params *own, const mla_problem *problem, const void *params)
{
    switch (problem->op) {
    case MLA_OP_DECODE:
    case MLA_OP_EXTEND:
        check_decode(own, params);
        own->has_positions = problem->has_positions;
        break;
    case MLA_OP_PREFILL:
        check_prefill(own, params);
        break;
    case MLA_OP_WRITE: {
        const mla_write_kv_params *p = params;
        check_slots(own, &p->slots, &p->kv_cache);
        return true;
    }
    case MLA_OP_GATHER: {
        const mla_gather_kv_params *p = params;
        check_slots(own, &p->slots, &p->kv_cache);
        return true;
    }
    case MLA_OP_ROPE: {
        const mla_rope_params *p = params;
        check_positions(own, &p->positions, &p->cos);
        return true;
    }
    case MLA_OP_ROPE_WRITE: {
        const mla_rope_write_kv_params *p = params;
        check_slots(own, &p->slots, &p->kv_cache);
        check_positions(own, &p->positions, &p->cos);
        return true;
    }
    default:
        return false;
    }
    own->batch = problem->batch;
    own->tokens_q = problem->tokens;
    return true;
}

mla_status mlai_cuda_validate(const mla_exec *exec, const mla_problem *problem, const void *params,
                              mla_device_error *error, mla_diag *diag)
{
    mlai_cuda_device *device = exec->device;
    mlai_validate_params own = {.error = error};
    if (!check(&own, problem, params))
        return MLA_OK;
    const int64_t threads =
        mlai_max_i64(32 * own.batch, mlai_max_i64(own.n_slots, own.n_positions));
    const int64_t blocks = mlai_min_i64(mlai_ceil_div(threads, MLAI_VALIDATE_THREADS),
                                        (int64_t)device->sm_count * BLOCKS_PER_SM);
    if (blocks == 0)
        return MLA_OK;
    CUkernel kernel;
    MLAI_TRY(mlai_cuda_kernel(device, "validate", "mla_validate", 0, &kernel, diag));
    const mlai_cuda_launch launch = {.grid = {(uint32_t)blocks, 1, 1},
                                     .block = {MLAI_VALIDATE_THREADS, 1, 1}};
    return mlai_cuda_run(exec, kernel, &launch, &own, diag);
}
