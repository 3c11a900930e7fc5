/*
 * Bad calls of the operators on rows: merge, write, gather, rope, rope_write, absorb, project,
 * pack. See arguments.h. Also here: no tokens, a device that is not there, operator names.
 */
#include "ops/arguments.h"

/* ---- merge -------------------------------------------------------------------------------------
 */

static mla_tensor merge_outs[3], merge_lses[3];

static void good_merge(mla_merge_state_params *p)
{
    *p = (mla_merge_state_params)MLA_MERGE_STATE_PARAMS_INIT;
    for (int32_t i = 0; i < 3; i++) {
        merge_outs[i] = make(MLA_FORMAT_BF16, 3, 5, 4, 8, 0);
        merge_lses[i] = make(MLA_FORMAT_F32, 2, 5, 4, 0, 0);
    }
    p->n_states = 3;
    p->outs = merge_outs;
    p->lses = merge_lses;
    p->out = make(MLA_FORMAT_BF16, 3, 5, 4, 8, 0);
    p->lse = make(MLA_FORMAT_F32, 2, 5, 4, 0, 0);
}

#define SPOIL(change, status, words)                                                               \
    SPOIL_CASE(mla_merge_state_params, mla_merge_state, good_merge, 1, change, status, words)
#define SPOIL_LIVE(change, status, words)                                                          \
    SPOIL_CASE(mla_merge_state_params, mla_merge_state, good_merge, 0, change, status, words)
#define problem_function mla_merge_state_problem

static void test_merge(void **state)
{
    (void)state;
    IN_EVERY_OPERATOR(mla_merge_state_params, mla_merge_state, good_merge);
    SPOIL_TENSOR(out);
    SPOIL_STRIDES(out);
    SPOIL_OTHER(lse);
    SPOIL(p->n_states = 0, MLA_ERROR_ARGUMENT, "n_states");
    SPOIL(p->n_states = MLA_MERGE_MAX_STATES + 1, MLA_ERROR_ARGUMENT, "n_states");
    SPOIL(p->outs = NULL, MLA_ERROR_ARGUMENT, "outs");
    SPOIL(p->lses = NULL, MLA_ERROR_ARGUMENT, "lses");
    SPOIL(merge_outs[1].rank = 0, MLA_ERROR_ARGUMENT, "outs[1]");
    SPOIL(merge_outs[2].format = MLA_FORMAT_F16, MLA_ERROR_FORMAT, "outs[2]");
    SPOIL(merge_outs[0].format = MLA_FORMAT_E4M3, MLA_ERROR_FORMAT, "outs[0]");
    SPOIL(merge_outs[2].shape[2]--, MLA_ERROR_SHAPE, "outs[2]");
    SPOIL(merge_lses[1].shape[0]--, MLA_ERROR_SHAPE, "lses[1]");
    SPOIL(merge_lses[2].format = MLA_FORMAT_BF16, MLA_ERROR_FORMAT, "lses[2]");
    SPOIL(merge_outs[1].device_type = MLA_DEVICE_CUDA, MLA_ERROR_DEVICE, "outs[1]");
    SPOIL(p->out.shape[1]--, MLA_ERROR_SHAPE, "out");
    SPOIL(p->lse.shape[1]--, MLA_ERROR_SHAPE, "lse");
    SPOIL_LIVE(p->out.data = merge_outs[1].data, MLA_ERROR_ARGUMENT, "outs[1]");
    SPOIL_LIVE(p->lse.data = merge_lses[2].data, MLA_ERROR_ARGUMENT, "lses[2]");
    SPOIL_LIVE((p->out.data = merge_outs[0].data, p->out.format = MLA_FORMAT_F16),
               MLA_ERROR_ARGUMENT, "outs[0]");
    SPOIL_LIVE((p->out.data = merge_outs[0].data, p->out.stride[0] = 64), MLA_ERROR_ARGUMENT,
               "outs[0]");
}
#undef SPOIL
#undef SPOIL_LIVE
#undef problem_function

/* ---- write and gather --------------------------------------------------------------------------
 */

static void good_write(mla_write_kv_params *p)
{
    const int32_t slots[3] = {7, -2, PAGES * PS - 1};
    *p = (mla_write_kv_params)MLA_WRITE_KV_PARAMS_INIT;
    p->kv_lora_rank = R;
    p->qk_rope_head_dim = P;
    p->latent = make(MLA_FORMAT_BF16, 2, 3, R, 0, 0);
    p->rope = make(MLA_FORMAT_BF16, 2, 3, P, 0, 0);
    p->slots = make_i32(3, slots);
    p->kv_cache = make(MLA_FORMAT_BF16, 3, PAGES, PS, D, 0);
}

#define SPOIL(change, status, words)                                                               \
    SPOIL_CASE(mla_write_kv_params, mla_write_kv, good_write, 1, change, status, words)
#define SPOIL_LIVE(change, status, words)                                                          \
    SPOIL_CASE(mla_write_kv_params, mla_write_kv, good_write, 0, change, status, words)
#define problem_function mla_write_kv_problem

static void test_write(void **state)
{
    (void)state;
    IN_EVERY_OPERATOR(mla_write_kv_params, mla_write_kv, good_write);
    SPOIL_TENSOR(latent);
    SPOIL_STRIDES(latent);
    SPOIL_OTHER(rope);
    SPOIL_STRIDES(rope);
    SPOIL_TENSOR(slots);
    SPOIL_TENSOR(kv_cache);
    SPOIL_STRIDES(kv_cache);
    SPOIL(p->flags = 2, MLA_ERROR_ARGUMENT, "flags");
    SPOIL(p->reserved0 = 5, MLA_ERROR_ARGUMENT, "reserved0");
    SPOIL(p->k_scale = -1.0f, MLA_ERROR_ARGUMENT, "k_scale");
    SPOIL(p->k_scale = 2.0f, MLA_ERROR_ARGUMENT, "k_scale");
    SPOIL(p->rope = (mla_tensor){0}, MLA_ERROR_SHAPE, "latent");
    SPOIL(p->latent.shape[0]--, MLA_ERROR_SHAPE, "latent");
    SPOIL(p->rope.shape[1]--, MLA_ERROR_SHAPE, "rope");
    SPOIL(p->rope.format = MLA_FORMAT_F16, MLA_ERROR_FORMAT, "rope");
    SPOIL(p->latent.format = MLA_FORMAT_E4M3, MLA_ERROR_FORMAT, "latent");
    SPOIL(p->latent = make(MLA_FORMAT_BF16, 3, 3, 2, R, 0), MLA_ERROR_SHAPE, "latent");
    SPOIL(p->kv_cache.stride[1] = 0, MLA_ERROR_STRIDE, "kv_cache");
    SPOIL(p->kv_cache_rope = make(MLA_FORMAT_BF16, 3, PAGES, PS, P, 0), MLA_ERROR_SHAPE,
          "kv_cache");
    SPOIL_LIVE(I32(slots, 0) = PAGES * PS, MLA_ERROR_CAPACITY, "slots[0]");
    SPOIL_LIVE(p->kv_cache.data = p->latent.data, MLA_ERROR_ARGUMENT, "kv_cache");
}
#undef SPOIL
#undef SPOIL_LIVE
#undef problem_function

static void good_gather(mla_gather_kv_params *p)
{
    const int32_t slots[3] = {7, -2, PAGES * PS - 1};
    *p = (mla_gather_kv_params)MLA_GATHER_KV_PARAMS_INIT;
    p->kv_lora_rank = R;
    p->qk_rope_head_dim = P;
    p->kv_cache = make(MLA_FORMAT_BF16, 3, PAGES, PS, D, 0);
    p->slots = make_i32(3, slots);
    p->latent = make(MLA_FORMAT_F32, 3, 3, 1, R, 0);
    p->rope = make(MLA_FORMAT_F32, 3, 3, 1, P, 0);
}

#define SPOIL(change, status, words)                                                               \
    SPOIL_CASE(mla_gather_kv_params, mla_gather_kv, good_gather, 1, change, status, words)
#define SPOIL_LIVE(change, status, words)                                                          \
    SPOIL_CASE(mla_gather_kv_params, mla_gather_kv, good_gather, 0, change, status, words)
#define problem_function mla_gather_kv_problem

static void test_gather(void **state)
{
    (void)state;
    IN_EVERY_OPERATOR(mla_gather_kv_params, mla_gather_kv, good_gather);
    SPOIL_TENSOR(kv_cache);
    SPOIL_STRIDES(kv_cache);
    SPOIL_TENSOR(slots);
    SPOIL_TENSOR(latent);
    SPOIL_STRIDES(latent);
    SPOIL_OTHER(rope);
    SPOIL_STRIDES(rope);
    SPOIL(p->k_scale = INFINITY, MLA_ERROR_ARGUMENT, "k_scale");
    SPOIL(p->k_scale = 3.0f, MLA_ERROR_ARGUMENT, "k_scale");
    SPOIL(p->latent.shape[0]--, MLA_ERROR_SHAPE, "latent");
    SPOIL(p->latent.shape[2]--, MLA_ERROR_SHAPE, "latent");
    SPOIL(p->rope.format = MLA_FORMAT_F16, MLA_ERROR_FORMAT, "rope");
    SPOIL(p->latent.stride[0] = 0, MLA_ERROR_STRIDE, "latent");
    SPOIL(p->slots.format = MLA_FORMAT_F32, MLA_ERROR_FORMAT, "slots");
    SPOIL_LIVE(I32(slots, 2) = PAGES * PS, MLA_ERROR_CAPACITY, "slots[2]");
    SPOIL_LIVE(p->rope.data = p->latent.data, MLA_ERROR_ARGUMENT, "rope");
}
#undef SPOIL
#undef SPOIL_LIVE
#undef problem_function

/* ---- rope --------------------------------------------------------------------------------------
 */

static void good_rope(mla_rope_params *p)
{
    const int32_t positions[3] = {0, 5, 2};
    *p = (mla_rope_params)MLA_ROPE_PARAMS_INIT;
    p->x = make(MLA_FORMAT_BF16, 3, 3, H, P, 0);
    p->positions = make_i32(3, positions);
    p->cos = make(MLA_FORMAT_F32, 2, 6, P / 2, 0, 0);
    p->sin = make(MLA_FORMAT_F32, 2, 6, P / 2, 0, 0);
    p->out = make(MLA_FORMAT_F32, 3, 3, H, P, 0);
}

#define SPOIL(change, status, words)                                                               \
    SPOIL_CASE(mla_rope_params, mla_rope, good_rope, 1, change, status, words)
#define SPOIL_LIVE(change, status, words)                                                          \
    SPOIL_CASE(mla_rope_params, mla_rope, good_rope, 0, change, status, words)
#define problem_function mla_rope_problem

static void test_rope(void **state)
{
    (void)state;
    IN_EVERY_OPERATOR(mla_rope_params, mla_rope, good_rope);
    SPOIL_TENSOR(x);
    SPOIL_STRIDES(x);
    SPOIL_TENSOR(positions);
    SPOIL_TENSOR(cos);
    SPOIL_STRIDES(cos);
    SPOIL_TENSOR(sin);
    SPOIL_TENSOR(out);
    SPOIL_STRIDES(out);
    SPOIL(p->is_interleaved = 3, MLA_ERROR_ARGUMENT, "is_interleaved");
    SPOIL((p->x.shape[2]--, p->out.shape[2]--), MLA_ERROR_SHAPE, "even");
    SPOIL(p->x.format = MLA_FORMAT_E4M3, MLA_ERROR_FORMAT, "x");
    SPOIL(p->out.shape[1]--, MLA_ERROR_SHAPE, "out");
    SPOIL(p->positions.shape[0]--, MLA_ERROR_SHAPE, "positions");
    SPOIL(p->cos.shape[1]++, MLA_ERROR_SHAPE, "cos");
    SPOIL(p->cos.format = MLA_FORMAT_BF16, MLA_ERROR_FORMAT, "cos");
    SPOIL(p->sin.shape[0]--, MLA_ERROR_SHAPE, "sin");
    SPOIL_LIVE(I32(positions, 1) = 6, MLA_ERROR_CAPACITY, "positions[1]");
    SPOIL_LIVE(I32(positions, 1) = -1, MLA_ERROR_CAPACITY, "positions[1]");
    SPOIL_LIVE(p->out.data = p->x.data, MLA_ERROR_ARGUMENT, "out");
}
#undef SPOIL
#undef SPOIL_LIVE
#undef problem_function

static void good_rope_write(mla_rope_write_kv_params *p)
{
    const int32_t positions[3] = {0, 5, 2}, slots[3] = {7, -2, PAGES * PS - 1};
    *p = (mla_rope_write_kv_params)MLA_ROPE_WRITE_KV_PARAMS_INIT;
    p->kv_lora_rank = R;
    p->qk_rope_head_dim = P;
    p->q_pe = make(MLA_FORMAT_BF16, 3, 3, H, P, 0);
    p->q_pe_out = make(MLA_FORMAT_F32, 3, 3, H, P, 0);
    p->latent = make(MLA_FORMAT_BF16, 2, 3, R, 0, 0);
    p->k_pe = make(MLA_FORMAT_BF16, 3, 3, 1, P, 0);
    p->k_pe_out = make(MLA_FORMAT_F32, 2, 3, P, 0, 0);
    p->positions = make_i32(3, positions);
    p->cos = make(MLA_FORMAT_F32, 2, 6, P / 2, 0, 0);
    p->sin = make(MLA_FORMAT_F32, 2, 6, P / 2, 0, 0);
    p->slots = make_i32(3, slots);
    p->kv_cache = make(MLA_FORMAT_BF16, 4, PAGES, PS, 1, D);
}

#define SPOIL(change, status, words)                                                               \
    SPOIL_CASE(mla_rope_write_kv_params, mla_rope_write_kv, good_rope_write, 1, change, status,    \
               words)
#define SPOIL_LIVE(change, status, words)                                                          \
    SPOIL_CASE(mla_rope_write_kv_params, mla_rope_write_kv, good_rope_write, 0, change, status,    \
               words)
#define problem_function mla_rope_write_kv_problem

static void test_rope_write(void **state)
{
    (void)state;
    IN_EVERY_OPERATOR(mla_rope_write_kv_params, mla_rope_write_kv, good_rope_write);
    SPOIL_OTHER(q_pe);
    SPOIL_OTHER(q_pe_out);
    SPOIL_TENSOR(latent);
    SPOIL_STRIDES(latent);
    SPOIL_TENSOR(k_pe);
    SPOIL_OTHER(k_pe_out);
    SPOIL_TENSOR(positions);
    SPOIL_TENSOR(cos);
    SPOIL_TENSOR(sin);
    SPOIL_TENSOR(slots);
    SPOIL_TENSOR(kv_cache);
    SPOIL(p->flags = -1, MLA_ERROR_ARGUMENT, "flags");
    SPOIL(p->is_interleaved = 2, MLA_ERROR_ARGUMENT, "is_interleaved");
    SPOIL(p->k_scale = 2.0f, MLA_ERROR_ARGUMENT, "k_scale");
    SPOIL(p->q_pe_out = (mla_tensor){0}, MLA_ERROR_ARGUMENT, "q_pe_out");
    SPOIL(p->q_pe = (mla_tensor){0}, MLA_ERROR_ARGUMENT, "q_pe");
    SPOIL(p->q_pe.shape[2]--, MLA_ERROR_SHAPE, "q_pe");
    SPOIL(p->q_pe_out.shape[1]--, MLA_ERROR_SHAPE, "q_pe_out");
    SPOIL(p->k_pe.format = MLA_FORMAT_F16, MLA_ERROR_FORMAT, "k_pe");
    SPOIL(p->k_pe.shape[2]--, MLA_ERROR_SHAPE, "k_pe");
    SPOIL(p->k_pe_out.shape[1]--, MLA_ERROR_SHAPE, "k_pe_out");
    SPOIL(p->latent.shape[1]--, MLA_ERROR_SHAPE, "latent");
    SPOIL_LIVE(I32(positions, 0) = 6, MLA_ERROR_CAPACITY, "positions[0]");
    SPOIL_LIVE(I32(slots, 1) = PAGES * PS, MLA_ERROR_CAPACITY, "slots[1]");
    SPOIL_LIVE(p->kv_cache.data = p->latent.data, MLA_ERROR_ARGUMENT, "kv_cache");
    SPOIL_LIVE(p->k_pe_out.data = p->q_pe.data, MLA_ERROR_ARGUMENT, "k_pe_out");
    SPOIL_LIVE(p->k_pe_out.data = p->q_pe_out.data, MLA_ERROR_ARGUMENT, "k_pe_out");
}
#undef SPOIL
#undef SPOIL_LIVE
#undef problem_function

/* ---- absorb and project ------------------------------------------------------------------------
 */

static void good_absorb(mla_absorb_query_params *p)
{
    *p = (mla_absorb_query_params)MLA_ABSORB_QUERY_PARAMS_INIT;
    p->q_nope = make(MLA_FORMAT_BF16, 3, 3, H, 6, 0);
    p->w_uk = make(MLA_FORMAT_BF16, 3, H, 6, R, 0);
    p->out = make(MLA_FORMAT_E4M3, 3, 3, H, R, 0);
}

#define SPOIL(change, status, words)                                                               \
    SPOIL_CASE(mla_absorb_query_params, mla_absorb_query, good_absorb, 1, change, status, words)
#define SPOIL_LIVE(change, status, words)                                                          \
    SPOIL_CASE(mla_absorb_query_params, mla_absorb_query, good_absorb, 0, change, status, words)
#define problem_function mla_absorb_query_problem

static void test_absorb(void **state)
{
    (void)state;
    IN_EVERY_OPERATOR(mla_absorb_query_params, mla_absorb_query, good_absorb);
    SPOIL_TENSOR(q_nope);
    SPOIL_STRIDES(q_nope);
    SPOIL_TENSOR(w_uk);
    SPOIL_STRIDES(w_uk);
    SPOIL_TENSOR(out);
    SPOIL(p->out.stride[2] = 2, MLA_ERROR_STRIDE, "out");
    SPOIL(p->reserved0 = 1, MLA_ERROR_ARGUMENT, "reserved0");
    SPOIL(p->w_uk.format = MLA_FORMAT_F16, MLA_ERROR_FORMAT, "w_uk");
    SPOIL(p->w_uk.shape[0]--, MLA_ERROR_SHAPE, "w_uk");
    SPOIL(p->w_uk.shape[1]--, MLA_ERROR_SHAPE, "w_uk");
    SPOIL(p->out.shape[2]--, MLA_ERROR_SHAPE, "out");
    SPOIL(p->out.shape[0]--, MLA_ERROR_SHAPE, "out");
    SPOIL_LIVE(p->out.data = p->q_nope.data, MLA_ERROR_ARGUMENT, "out");
}
#undef SPOIL
#undef SPOIL_LIVE
#undef problem_function

static void good_project(mla_project_value_params *p)
{
    *p = (mla_project_value_params)MLA_PROJECT_VALUE_PARAMS_INIT;
    p->latent = make(MLA_FORMAT_BF16, 3, 3, H, R, 0);
    p->w_uv = make(MLA_FORMAT_F32, 3, H, R, 6, 0);
    p->gate = make(MLA_FORMAT_F16, 2, 3, H * 6, 0, 0);
    p->out = make(MLA_FORMAT_BF16, 2, 3, H * 6, 0, 0);
}

#define SPOIL(change, status, words)                                                               \
    SPOIL_CASE(mla_project_value_params, mla_project_value, good_project, 1, change, status, words)
#define SPOIL_LIVE(change, status, words)                                                          \
    SPOIL_CASE(mla_project_value_params, mla_project_value, good_project, 0, change, status, words)
#define problem_function mla_project_value_problem

static void test_project(void **state)
{
    (void)state;
    IN_EVERY_OPERATOR(mla_project_value_params, mla_project_value, good_project);
    SPOIL_TENSOR(latent);
    SPOIL_STRIDES(latent);
    SPOIL_TENSOR(w_uv);
    SPOIL_OTHER(gate);
    SPOIL_TENSOR(out);
    SPOIL_STRIDES(out);
    SPOIL(p->reserved0 = 1, MLA_ERROR_ARGUMENT, "reserved0");
    SPOIL(p->w_uv.stride[2] = 2, MLA_ERROR_STRIDE, "w_uv");
    SPOIL(p->w_uv.shape[1]--, MLA_ERROR_SHAPE, "w_uv");
    SPOIL(p->gate.shape[1]--, MLA_ERROR_SHAPE, "gate");
    SPOIL(p->gate.shape[0]--, MLA_ERROR_SHAPE, "gate");
    SPOIL(p->out.shape[1]--, MLA_ERROR_SHAPE, "out");
    SPOIL(p->out.format = MLA_FORMAT_E4M3, MLA_ERROR_FORMAT, "out");
    SPOIL_LIVE(p->out.data = p->latent.data, MLA_ERROR_ARGUMENT, "out");
    SPOIL_LIVE(p->out.data = p->gate.data, MLA_ERROR_ARGUMENT, "out");
}
#undef SPOIL
#undef SPOIL_LIVE
#undef problem_function

/* ---- pack --------------------------------------------------------------------------------------
 */

static void good_pack(mla_pack_kv_params *p)
{
    *p = (mla_pack_kv_params)MLA_PACK_KV_PARAMS_INIT;
    p->k_nope = make(MLA_FORMAT_BF16, 3, 3, H, 6, 0);
    p->k_pe = make(MLA_FORMAT_BF16, 2, 3, P, 0, 0);
    p->v = make(MLA_FORMAT_BF16, 3, 3, H, 7, 0);
    p->k_out = make(MLA_FORMAT_BF16, 3, 3, H, 6 + P, 0);
    p->v_out = make(MLA_FORMAT_BF16, 3, 3, H, 7, 0);
}

#define SPOIL(change, status, words)                                                               \
    SPOIL_CASE(mla_pack_kv_params, mla_pack_kv, good_pack, 1, change, status, words)
#define SPOIL_LIVE(change, status, words)                                                          \
    SPOIL_CASE(mla_pack_kv_params, mla_pack_kv, good_pack, 0, change, status, words)
#define problem_function mla_pack_kv_problem

static void test_pack(void **state)
{
    (void)state;
    IN_EVERY_OPERATOR(mla_pack_kv_params, mla_pack_kv, good_pack);
    SPOIL_TENSOR(k_nope);
    SPOIL_STRIDES(k_nope);
    SPOIL_TENSOR(k_pe);
    SPOIL_STRIDES(k_pe);
    SPOIL_OTHER(v);
    SPOIL_TENSOR(k_out);
    SPOIL_STRIDES(k_out);
    SPOIL_OTHER(v_out);
    SPOIL(p->reserved0 = 1, MLA_ERROR_ARGUMENT, "reserved0");
    SPOIL(p->k_scale = 2.0f, MLA_ERROR_ARGUMENT, "k_scale");
    SPOIL(p->v_scale = 0.0f, MLA_ERROR_ARGUMENT, "v_scale");
    SPOIL(p->v_out = (mla_tensor){0}, MLA_ERROR_ARGUMENT, "v_out");
    SPOIL(p->v = (mla_tensor){0}, MLA_ERROR_ARGUMENT, "v is absent");
    SPOIL(p->v_out.format = MLA_FORMAT_F16, MLA_ERROR_FORMAT, "v_out");
    SPOIL(p->k_out.shape[2]--, MLA_ERROR_SHAPE, "k_out");
    SPOIL(p->k_pe.shape[0]--, MLA_ERROR_SHAPE, "k_pe");
    SPOIL(p->v.shape[1]--, MLA_ERROR_SHAPE, "v");
    SPOIL(p->k_out.stride[1] = 0, MLA_ERROR_STRIDE, "k_out");
    SPOIL_LIVE(p->k_out.data = p->k_nope.data, MLA_ERROR_ARGUMENT, "k_out");
    SPOIL_LIVE(p->v_out.data = p->v.data, MLA_ERROR_ARGUMENT, "v_out");
}
#undef SPOIL
#undef SPOIL_LIVE
#undef problem_function

/* ---- what is legal though it looks odd ---------------------------------------------------------
 */

static void test_empty(void **state)
{
    mla_write_kv_params write;
    (void)state;
    fresh();
    good_write(&write);
    write.latent.shape[0] = write.rope.shape[0] = write.slots.shape[0] = 0;
    write.latent.data = NULL;
    memcpy(before, arena, sizeof arena);
    assert_ok(mla_write_kv(ctx, &write, &diag), &diag);
    assert_memory_equal(before, arena, sizeof arena);
    /* No values, but more heads than 64 bits count: nothing to do, and nobody counts them. */
    const int64_t tokens = INT64_C(1) << 40, heads = INT64_C(1) << 30;
    mla_pack_kv_params pack = MLA_PACK_KV_PARAMS_INIT;
    pack.k_nope = mla_tensor_3d(NULL, MLA_FORMAT_F32, tokens, heads, 0);
    pack.k_pe = mla_tensor_2d(NULL, MLA_FORMAT_F32, tokens, 0);
    pack.k_out = mla_tensor_3d(NULL, MLA_FORMAT_F32, tokens, heads, 0);
    assert_ok(mla_pack_kv(ctx, &pack, &diag), &diag);
}

static void on_cuda(mla_tensor *t)
{
    t->device_type = MLA_DEVICE_CUDA;
}

/* A context without devices refuses device tensors before it looks at their memory. */
static void test_no_device(void **state)
{
    mla_write_kv_params p;
    (void)state;
    fresh();
    good_write(&p);
    on_cuda(&p.latent);
    on_cuda(&p.rope);
    on_cuda(&p.slots);
    on_cuda(&p.kv_cache);
    p.slots.data = (void *)(uintptr_t)64;
    diag.text[0] = 0;
    const mla_status status = mla_write_kv(ctx, &p, &diag);
    assert_true(status == MLA_ERROR_UNSUPPORTED || status == MLA_ERROR_DEVICE);
    assert_true(diag.text[0] != 0);
}

static void test_names(void **state)
{
    (void)state;
#define CHECK_NAME(name, value, text)                                                              \
    assert_int_equal(name, value);                                                                 \
    assert_string_equal(mla_op_name(name), text);                                                  \
    assert_int_equal(mla_op_from_name(text), name);
    MLA_OP_LIST(CHECK_NAME)
#undef CHECK_NAME
    assert_string_equal(mla_op_name(0), "unknown");
    assert_string_equal(mla_op_name(1000), "unknown");
    assert_int_equal(mla_op_from_name("nothing"), MLA_OP_NONE);
    assert_int_equal(mla_op_from_name(NULL), MLA_OP_NONE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),     cmocka_unit_test(test_merge),
        cmocka_unit_test(test_write),     cmocka_unit_test(test_gather),
        cmocka_unit_test(test_rope),      cmocka_unit_test(test_rope_write),
        cmocka_unit_test(test_absorb),    cmocka_unit_test(test_project),
        cmocka_unit_test(test_pack),      cmocka_unit_test(test_empty),
        cmocka_unit_test(test_no_device),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
