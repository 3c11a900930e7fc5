/*
 * Bad calls of every operator: each gets the expected status and a sentence that names the argument,
 * and changes no byte of its operands. A case starts from a good call and spoils one thing; what
 * needs no live value is refused by mla_<op>_problem alike. Also here: versions of structs, empty
 * batches, devices.
 */
#include "statuses.h"
#include "test.h"
#include <math.h>
#include <mla/ops.h>
#include <stdlib.h>
#include <string.h>

/* All operands of a case lie here, so that one comparison shows that nothing was written. */
enum { ARENA_BYTES = 1 << 18 };
static _Alignas(64) unsigned char arena[ARENA_BYTES];
static unsigned char before[ARENA_BYTES];
static size_t arena_used;
static mla_context *ctx;
static mla_diag diag;

static void *take(size_t bytes)
{
    const size_t aligned = (bytes + 127) / 64 * 64;
    assert_true(arena_used + aligned <= sizeof arena);
    void *p = arena + arena_used;
    arena_used += aligned;
    return p;
}

static mla_tensor make(int32_t format, int32_t rank, int64_t n0, int64_t n1, int64_t n2, int64_t n3)
{
    const int64_t shape[4] = {n0, n1, n2, n3};
    int64_t n = 1;
    for (int32_t i = 0; i < rank; i++)
        n *= shape[i];
    return mla_tensor_make(take((size_t)(n * mla_format_bytes(format))), format, rank, shape);
}

static mla_tensor make_i32(int64_t n, const int32_t *values)
{
    mla_tensor t = make(MLA_FORMAT_I32, 1, n, 0, 0, 0);
    memcpy(t.data, values, (size_t)n * sizeof *values);
    return t;
}

static void fresh(void)
{
    memset(arena, 0, sizeof arena);
    arena_used = 0;
}

static void *workspace_for(const mla_problem *problem, uint64_t *bytes)
{
    assert_ok(mla_workspace_bytes(ctx, problem, NULL, bytes, &diag), &diag);
    return *bytes > 0 ? aligned_alloc(64, (size_t)(*bytes + 63) / 64 * 64) : NULL;
}

/*
 * For operator `name` with parameters `type`: SPOIL refuses with and without pointers, SPOIL_LIVE
 * only in the call, since only the values are wrong.
 */
#define SPOIL_CASE(type, name, good, problem_status, change, status, words)                        \
    do {                                                                                           \
        type params, *p = &params;                                                                 \
        mla_problem problem = MLA_PROBLEM_INIT;                                                    \
        fresh();                                                                                   \
        good(p);                                                                                   \
        change;                                                                                    \
        memcpy(before, arena, sizeof arena);                                                       \
        assert_fails(name(ctx, p, &diag), status, &diag, words);                                   \
        assert_memory_equal(before, arena, sizeof arena);                                          \
        assert_int_equal(name(ctx, p, NULL), status);                                              \
        if (problem_status)                                                                        \
            assert_fails(problem_function(p, &problem, &diag), status, &diag, words);              \
    } while (0)

#define IN_EVERY_OPERATOR(type, name, good)                                                        \
    do {                                                                                           \
        type own, *base = &own;                                                                    \
        mla_problem made = MLA_PROBLEM_INIT;                                                       \
        uint64_t bytes;                                                                            \
        fresh();                                                                                   \
        good(base);                                                                                \
        assert_ok(problem_function(base, &made, &diag), &diag);                                    \
        assert_int_equal(made.struct_size, sizeof made);                                           \
        assert_int_equal(made.device_type, MLA_DEVICE_CPU);                                        \
        void *workspace = workspace_for(&made, &bytes);                                            \
        base->call.workspace = workspace;                                                          \
        base->call.workspace_bytes = bytes;                                                        \
        assert_ok(name(ctx, base, &diag), &diag);                                                  \
        struct {                                                                                   \
            type params;                                                                           \
            int64_t tail[2];                                                                       \
        } longer = {.params = own};                                                                \
        longer.params.struct_size = sizeof longer;                                                 \
        assert_ok(name(ctx, &longer.params, &diag), &diag);                                        \
        longer.tail[1] = 1;                                                                        \
        assert_fails(name(ctx, &longer.params, &diag), MLA_ERROR_VERSION, &diag, #type);           \
        free(workspace);                                                                           \
        assert_fails(name(NULL, base, &diag), MLA_ERROR_ARGUMENT, &diag, "ctx");                   \
        assert_fails(name(ctx, NULL, &diag), MLA_ERROR_ARGUMENT, &diag, #type);                    \
        assert_fails(problem_function(NULL, &made, &diag), MLA_ERROR_ARGUMENT, &diag, #type);      \
        assert_fails(problem_function(base, NULL, &diag), MLA_ERROR_ARGUMENT, &diag, "problem");   \
        made.struct_size = 8;                                                                      \
        assert_fails(problem_function(base, &made, &diag), MLA_ERROR_VERSION, &diag, "problem");   \
        SPOIL(p->struct_size = 0, MLA_ERROR_VERSION, "struct_size");                               \
        SPOIL(p->struct_size -= 8, MLA_ERROR_VERSION, "struct_size");                              \
        SPOIL(p->call.reserved[2] = p, MLA_ERROR_ARGUMENT, "call.reserved[2]");                    \
        SPOIL_LIVE(p->call.solution = "no_such_row", MLA_ERROR_NOT_FOUND, "no_such_row");          \
    } while (0)

/* One required tensor: absent, of another format, wrong device, no data, not contiguous. */
#define SPOIL_TENSOR(field)                                                                        \
    do {                                                                                           \
        SPOIL(p->field = (mla_tensor){0}, MLA_ERROR_ARGUMENT, #field);                             \
        SPOIL(p->field.rank = 6, MLA_ERROR_SHAPE, #field);                                         \
        SPOIL(p->field.rank = -1, MLA_ERROR_SHAPE, #field);                                        \
        SPOIL_OTHER(field);                                                                        \
    } while (0)

#define SPOIL_OTHER(field)                                                                         \
    do {                                                                                           \
        SPOIL(p->field.format = 77, MLA_ERROR_FORMAT, #field);                                     \
        SPOIL(p->field.device_type = 9, MLA_ERROR_DEVICE, "device");                               \
        SPOIL(p->field.device_index = 1, MLA_ERROR_DEVICE, "device");                              \
        SPOIL(p->field.device_type = MLA_DEVICE_CUDA, MLA_ERROR_DEVICE, "device");                 \
        SPOIL(p->field.shape[0] = -1, MLA_ERROR_SHAPE, #field);                                    \
        SPOIL(p->field.stride[0] = -1, MLA_ERROR_STRIDE, #field);                                  \
        SPOIL_LIVE(p->field.data = NULL, MLA_ERROR_ARGUMENT, #field);                              \
    } while (0)

#define SPOIL_STRIDES(field)                                                                       \
    do {                                                                                           \
        SPOIL(p->field.stride[p->field.rank - 1] = 2, MLA_ERROR_STRIDE, #field);                   \
        SPOIL_LIVE(p->field.data = (char *)p->field.data + 1, MLA_ERROR_STRIDE, #field);           \
    } while (0)

/* ---- decode ------------------------------------------------------------------------------------ */

enum { B = 2, Q = 3, H = 4, R = 8, P = 4, D = R + P, PAGES = 5, PS = 4, W = 3 };

static void good_decode(mla_decode_params *p)
{
    const int32_t lengths[B] = {9, 3}, table[B * W] = {4, 2, 1, 3, -1, 2147480000};
    *p = (mla_decode_params)MLA_DECODE_PARAMS_INIT;
    p->kv_lora_rank = R;
    p->qk_rope_head_dim = P;
    p->softmax_scale = 0.25f;
    p->q = make(MLA_FORMAT_BF16, 4, B, Q, H, D);
    p->kv_cache = make(MLA_FORMAT_BF16, 3, PAGES, PS, D, 0);
    p->page_table = make(MLA_FORMAT_I32, 2, B, W, 0, 0);
    memcpy(p->page_table.data, table, sizeof table);
    p->cache_seqlens = make_i32(B, lengths);
    p->out = make(MLA_FORMAT_BF16, 4, B, Q, H, R);
    p->lse = make(MLA_FORMAT_F32, 3, B, Q, H, 0);
}

static void good_ragged(mla_decode_params *p)
{
    const int32_t cu[B + 1] = {0, 1, 4};
    good_decode(p);
    p->q = make(MLA_FORMAT_BF16, 3, 4, H, D, 0);
    p->cu_seqlens_q = make_i32(B + 1, cu);
    p->max_q_len = 3;
    p->out = make(MLA_FORMAT_F32, 3, 4, H, R, 0);
    p->lse = make(MLA_FORMAT_F32, 2, 4, H, 0, 0);
}

static void good_split(mla_decode_params *p)
{
    good_decode(p);
    p->q = make(MLA_FORMAT_BF16, 4, B, Q, H, R);
    p->q_rope = make(MLA_FORMAT_BF16, 4, B, Q, H, P);
    p->kv_cache = make(MLA_FORMAT_BF16, 3, PAGES, PS, R, 0);
    p->kv_cache_rope = make(MLA_FORMAT_BF16, 3, PAGES, PS, P, 0);
}

static void good_masked(mla_decode_params *p)
{
    good_decode(p);
    p->is_causal = 0;
    p->mask = make(MLA_FORMAT_U8, 2, B * Q, Q, 0, 0);
}

static void good_shard(mla_decode_params *p)
{
    const int32_t global[B] = {18, 6};
    good_decode(p);
    p->global_seqlens = make_i32(B, global);
    p->key_position_first = 1;
    p->key_position_stride = 2;
}

#define SPOIL(change, status, words)                                                               \
    SPOIL_CASE(mla_decode_params, mla_decode_with_kvcache, good, 1, change, status, words)
#define SPOIL_LIVE(change, status, words)                                                          \
    SPOIL_CASE(mla_decode_params, mla_decode_with_kvcache, good, 0, change, status, words)
#define problem_function mla_decode_problem
#define I32(field, i) ((int32_t *)p->field.data)[i]

static void test_decode(void **state)
{
    void (*good)(mla_decode_params *) = good_decode;
    (void)state;
    IN_EVERY_OPERATOR(mla_decode_params, mla_decode_with_kvcache, good);
    SPOIL_TENSOR(q);
    SPOIL_STRIDES(q);
    SPOIL_TENSOR(kv_cache);
    SPOIL_STRIDES(kv_cache);
    SPOIL_TENSOR(page_table);
    SPOIL_STRIDES(page_table);
    SPOIL_TENSOR(cache_seqlens);
    SPOIL_TENSOR(out);
    SPOIL_STRIDES(out);
    SPOIL_OTHER(lse);
    SPOIL_STRIDES(lse);
    SPOIL(p->softmax_scale = 0.0f, MLA_ERROR_ARGUMENT, "softmax_scale");
    SPOIL(p->softmax_scale = NAN, MLA_ERROR_ARGUMENT, "softmax_scale");
    SPOIL(p->softmax_scale = INFINITY, MLA_ERROR_ARGUMENT, "softmax_scale");
    SPOIL(p->logit_cap = -1.0f, MLA_ERROR_ARGUMENT, "logit_cap");
    SPOIL(p->logit_cap = NAN, MLA_ERROR_ARGUMENT, "logit_cap");
    SPOIL(p->logit_cap = INFINITY, MLA_ERROR_ARGUMENT, "logit_cap");
    SPOIL(p->k_scale = 0.0f, MLA_ERROR_ARGUMENT, "k_scale");
    SPOIL(p->k_scale = NAN, MLA_ERROR_ARGUMENT, "k_scale");
    SPOIL(p->k_scale = 2.0f, MLA_ERROR_ARGUMENT, "k_scale");
    SPOIL(p->is_causal = 2, MLA_ERROR_ARGUMENT, "is_causal");
    SPOIL(p->reserved0 = 1, MLA_ERROR_ARGUMENT, "reserved0");
    SPOIL(p->kv_lora_rank = 0, MLA_ERROR_SHAPE, "kv_lora_rank");
    SPOIL(p->kv_lora_rank = R + 1, MLA_ERROR_SHAPE, "kv_lora_rank");
    SPOIL(p->qk_rope_head_dim = -1, MLA_ERROR_SHAPE, "qk_rope_head_dim");
    SPOIL(p->max_q_len = -1, MLA_ERROR_ARGUMENT, "max_q_len");
    SPOIL(p->max_seqlen_kv = -1, MLA_ERROR_ARGUMENT, "max_seqlen_kv");
    SPOIL(p->key_position_stride = 0, MLA_ERROR_ARGUMENT, "key_position_stride");
    SPOIL(p->key_position_first = 3, MLA_ERROR_ARGUMENT, "global_seqlens");
    SPOIL(p->q.shape[2] = 0, MLA_ERROR_SHAPE, "head count of q");
    SPOIL(p->q.shape[3]--, MLA_ERROR_SHAPE, "q has shape");
    SPOIL(p->q = mla_tensor_slice(p->q, 0, 0, 1), MLA_ERROR_SHAPE, "page_table");
    SPOIL(p->kv_cache.shape[2]--, MLA_ERROR_SHAPE, "kv_cache");
    SPOIL(p->kv_cache.shape[1] = 0, MLA_ERROR_SHAPE, "page_size");
    SPOIL(p->kv_cache = make(MLA_FORMAT_BF16, 4, PAGES, PS, 2, D), MLA_ERROR_SHAPE, "kv_cache");
    SPOIL(p->kv_cache.format = MLA_FORMAT_DS656, MLA_ERROR_SHAPE, "ds656");
    SPOIL(p->page_table.format = MLA_FORMAT_I64, MLA_ERROR_FORMAT, "page_table");
    SPOIL(p->cache_seqlens.shape[0] = 1, MLA_ERROR_SHAPE, "cache_seqlens");
    SPOIL(p->cu_seqlens_q = p->cache_seqlens, MLA_ERROR_SHAPE, "cu_seqlens_q");
    SPOIL(p->out.shape[3]++, MLA_ERROR_SHAPE, "out");
    SPOIL(p->out.format = MLA_FORMAT_E4M3, MLA_ERROR_FORMAT, "out");
    SPOIL(p->out.stride[2] = 0, MLA_ERROR_STRIDE, "out");
    SPOIL(p->lse.shape[2]++, MLA_ERROR_SHAPE, "lse");
    SPOIL(p->lse.format = MLA_FORMAT_BF16, MLA_ERROR_FORMAT, "lse");
    SPOIL(p->mask = make(MLA_FORMAT_U8, 2, B * Q, Q, 0, 0), MLA_ERROR_ARGUMENT, "mask");
    SPOIL_LIVE(p->out.data = p->q.data, MLA_ERROR_ARGUMENT, "out");
    SPOIL_LIVE(p->out.data = p->kv_cache.data, MLA_ERROR_ARGUMENT, "out");
    SPOIL_LIVE(p->lse.data = p->out.data, MLA_ERROR_ARGUMENT, "lse");
}

static void test_decode_live(void **state)
{
    void (*good)(mla_decode_params *) = good_decode;
    (void)state;
    SPOIL_LIVE(I32(cache_seqlens, 0) = W * PS + 1, MLA_ERROR_CAPACITY, "cache_seqlens[0]");
    SPOIL_LIVE(I32(cache_seqlens, 1) = -1, MLA_ERROR_ARGUMENT, "cache_seqlens[1]");
    SPOIL_LIVE(p->max_seqlen_kv = 8, MLA_ERROR_CAPACITY, "max_seqlen_kv");
    SPOIL_LIVE(I32(page_table, 2) = PAGES, MLA_ERROR_CAPACITY, "page_table[0, 2]");
    SPOIL_LIVE(I32(page_table, 0) = -1, MLA_ERROR_CAPACITY, "page_table[0, 0]");
    SPOIL_LIVE(I32(cache_seqlens, 1) = 5, MLA_ERROR_CAPACITY, "page_table[1, 1]");
    /* A draft's last token sees q_len - 1 rows past the length: those must fit too. */
    SPOIL_LIVE((p->seqlen_offset = 0, I32(cache_seqlens, 0) = W * PS - 1), MLA_ERROR_CAPACITY,
               "cache_seqlens[0]");
    SPOIL_LIVE((p->seqlen_offset = 0, I32(cache_seqlens, 1) = 3), MLA_ERROR_CAPACITY,
               "page_table[1, 1]");
    SPOIL_LIVE(p->kv_cache.shape[0] = 0, MLA_ERROR_CAPACITY, "page_table[0, 0]");
    good = good_shard;
    SPOIL_LIVE(I32(global_seqlens, 1) = -4, MLA_ERROR_ARGUMENT, "global_seqlens[1]");
}

static void test_decode_variants(void **state)
{
    void (*good)(mla_decode_params *) = good_ragged;
    (void)state;
    IN_EVERY_OPERATOR(mla_decode_params, mla_decode_with_kvcache, good);
    SPOIL_OTHER(cu_seqlens_q);
    SPOIL(p->cu_seqlens_q = (mla_tensor){0}, MLA_ERROR_SHAPE, "cu_seqlens_q");
    SPOIL(p->cu_seqlens_q.shape[0] = 0, MLA_ERROR_SHAPE, "cu_seqlens_q");
    SPOIL(p->cu_seqlens_q.shape[0] = 2, MLA_ERROR_SHAPE, "page_table");
    SPOIL_LIVE(p->max_q_len = 2, MLA_ERROR_CAPACITY, "max_q_len");
    SPOIL_LIVE(I32(cu_seqlens_q, 0) = 1, MLA_ERROR_CAPACITY, "cu_seqlens_q");
    SPOIL_LIVE(I32(cu_seqlens_q, 1) = 5, MLA_ERROR_CAPACITY, "cu_seqlens_q");
    SPOIL_LIVE(I32(cu_seqlens_q, 2) = 3, MLA_ERROR_CAPACITY, "cu_seqlens_q");

    good = good_split;
    IN_EVERY_OPERATOR(mla_decode_params, mla_decode_with_kvcache, good);
    SPOIL_OTHER(q_rope);
    SPOIL_OTHER(kv_cache_rope);
    SPOIL(p->q_rope.format = MLA_FORMAT_F32, MLA_ERROR_FORMAT, "q_rope");
    SPOIL(p->q_rope.shape[3]--, MLA_ERROR_SHAPE, "q_rope");
    SPOIL(p->q_rope.shape[2]--, MLA_ERROR_SHAPE, "q_rope");
    SPOIL(p->kv_cache_rope.format = MLA_FORMAT_F16, MLA_ERROR_FORMAT, "kv_cache_rope");
    SPOIL(p->kv_cache_rope.shape[0]--, MLA_ERROR_SHAPE, "kv_cache_rope");
    SPOIL(p->kv_cache_rope.shape[1]--, MLA_ERROR_SHAPE, "kv_cache_rope");
    SPOIL(p->kv_cache_rope.shape[2]--, MLA_ERROR_SHAPE, "kv_cache_rope");
    SPOIL(p->q_rope = (mla_tensor){0}, MLA_ERROR_SHAPE, "q has shape");

    good = good_masked;
    IN_EVERY_OPERATOR(mla_decode_params, mla_decode_with_kvcache, good);
    SPOIL_OTHER(mask);
    SPOIL(p->is_causal = 1, MLA_ERROR_ARGUMENT, "mask");
    SPOIL(p->mask.shape[0]--, MLA_ERROR_SHAPE, "mask");
    SPOIL(p->mask.shape[1]--, MLA_ERROR_SHAPE, "mask");

    good = good_shard;
    IN_EVERY_OPERATOR(mla_decode_params, mla_decode_with_kvcache, good);
    SPOIL_OTHER(global_seqlens);
    SPOIL(p->global_seqlens.shape[0]--, MLA_ERROR_SHAPE, "global_seqlens");
    SPOIL(p->key_position_first = -1, MLA_ERROR_ARGUMENT, "key_position_first");
}

/* Extents and strides whose products leave 64 bits are refused, not computed with. */
static void test_decode_overflow(void **state)
{
    void (*good)(mla_decode_params *) = good_decode;
    const int64_t huge = INT64_C(1) << 40;
    (void)state;
    SPOIL(p->q.stride[0] = INT64_MAX, MLA_ERROR_STRIDE, "q");
    SPOIL(p->kv_cache.stride[0] = INT64_MAX / 2, MLA_ERROR_STRIDE, "kv_cache");
    SPOIL((p->q.shape[0] = p->q.shape[1] = huge, p->q.stride[0] = p->q.stride[1] = 0),
          MLA_ERROR_SHAPE, "q");
    SPOIL((p->page_table.shape[1] = INT64_MAX / 2, p->page_table.stride[0] = 0), MLA_ERROR_STRIDE,
          "page_table");
    SPOIL((p->kv_cache.shape[0] = p->kv_cache.shape[1] = huge,
           p->kv_cache.stride[0] = p->kv_cache.stride[1] = 0),
          MLA_ERROR_SHAPE, "kv_cache");
}
#undef SPOIL
#undef SPOIL_LIVE
#undef problem_function

/* ---- extend ------------------------------------------------------------------------------------ */

#define SPOIL(change, status, words)                                                               \
    SPOIL_CASE(mla_decode_params, mla_extend_with_kvcache, good_ragged, 1, change, status, words)
#define SPOIL_LIVE(change, status, words)                                                          \
    SPOIL_CASE(mla_decode_params, mla_extend_with_kvcache, good_ragged, 0, change, status, words)
#define problem_function mla_extend_problem

static void test_extend(void **state)
{
    (void)state;
    IN_EVERY_OPERATOR(mla_decode_params, mla_extend_with_kvcache, good_ragged);
    SPOIL(p->cu_seqlens_q = (mla_tensor){0}, MLA_ERROR_ARGUMENT, "cu_seqlens_q");
    SPOIL(p->is_causal = 0, MLA_ERROR_ARGUMENT, "is_causal");
    SPOIL(p->seqlen_offset = 0, MLA_ERROR_ARGUMENT, "seqlen_offset");
    SPOIL(p->mask = make(MLA_FORMAT_U8, 2, 4, 3, 0, 0), MLA_ERROR_ARGUMENT, "mask");
    SPOIL_LIVE(I32(cu_seqlens_q, 2) = 3, MLA_ERROR_CAPACITY, "cu_seqlens_q");
    SPOIL_LIVE(I32(cache_seqlens, 0) = W * PS + 1, MLA_ERROR_CAPACITY, "cache_seqlens[0]");
}
#undef SPOIL
#undef SPOIL_LIVE
#undef problem_function

/* ---- prefill ----------------------------------------------------------------------------------- */

static void good_prefill(mla_prefill_params *p)
{
    const int32_t cu_q[3] = {0, 2, 5}, cu_kv[3] = {0, 4, 7};
    *p = (mla_prefill_params)MLA_PREFILL_PARAMS_INIT;
    p->softmax_scale = 0.5f;
    p->q = make(MLA_FORMAT_BF16, 3, 5, 4, 12, 0);
    p->k = make(MLA_FORMAT_BF16, 3, 7, 2, 12, 0);
    p->v = make(MLA_FORMAT_BF16, 3, 7, 2, 8, 0);
    p->cu_seqlens_q = make_i32(3, cu_q);
    p->cu_seqlens_kv = make_i32(3, cu_kv);
    p->out = make(MLA_FORMAT_BF16, 3, 5, 4, 8, 0);
    p->lse = make(MLA_FORMAT_F32, 2, 5, 4, 0, 0);
}

#define SPOIL(change, status, words)                                                               \
    SPOIL_CASE(mla_prefill_params, mla_prefill, good_prefill, 1, change, status, words)
#define SPOIL_LIVE(change, status, words)                                                          \
    SPOIL_CASE(mla_prefill_params, mla_prefill, good_prefill, 0, change, status, words)
#define problem_function mla_prefill_problem

static void test_prefill(void **state)
{
    (void)state;
    IN_EVERY_OPERATOR(mla_prefill_params, mla_prefill, good_prefill);
    SPOIL_TENSOR(q);
    SPOIL_STRIDES(q);
    SPOIL_TENSOR(k);
    SPOIL_STRIDES(k);
    SPOIL_TENSOR(v);
    SPOIL_STRIDES(v);
    SPOIL_TENSOR(cu_seqlens_q);
    SPOIL_TENSOR(cu_seqlens_kv);
    SPOIL_TENSOR(out);
    SPOIL_STRIDES(out);
    SPOIL_OTHER(lse);
    SPOIL(p->softmax_scale = 0.0f, MLA_ERROR_ARGUMENT, "softmax_scale");
    SPOIL(p->logit_cap = -2.0f, MLA_ERROR_ARGUMENT, "logit_cap");
    SPOIL(p->is_causal = -1, MLA_ERROR_ARGUMENT, "is_causal");
    SPOIL(p->k_scale = 0.5f, MLA_ERROR_ARGUMENT, "k_scale");
    SPOIL(p->v_scale = 0.5f, MLA_ERROR_ARGUMENT, "v_scale");
    SPOIL(p->max_seqlen_q = -1, MLA_ERROR_ARGUMENT, "max_seqlen_q");
    SPOIL(p->max_seqlen_kv = -1, MLA_ERROR_ARGUMENT, "max_seqlen_kv");
    SPOIL(p->k.shape[2]--, MLA_ERROR_SHAPE, "k has shape");
    SPOIL(p->v.shape[0]--, MLA_ERROR_SHAPE, "v has shape");
    SPOIL(p->v.shape[1]--, MLA_ERROR_SHAPE, "v has shape");
    SPOIL(p->v.format = MLA_FORMAT_F16, MLA_ERROR_FORMAT, "v is");
    SPOIL(p->q.shape[1] = 3, MLA_ERROR_SHAPE, "k has 2 heads");
    SPOIL(p->cu_seqlens_kv.shape[0] = 2, MLA_ERROR_SHAPE, "cu_seqlens_kv");
    SPOIL(p->cu_seqlens_q.shape[0] = 0, MLA_ERROR_SHAPE, "cu_seqlens_q");
    SPOIL(p->out.shape[0]--, MLA_ERROR_SHAPE, "out");
    SPOIL(p->lse.shape[1]--, MLA_ERROR_SHAPE, "lse");
    SPOIL(p->out.format = MLA_FORMAT_E5M2, MLA_ERROR_FORMAT, "out");
    SPOIL_LIVE(p->out.data = p->v.data, MLA_ERROR_ARGUMENT, "out");
    SPOIL_LIVE(I32(cu_seqlens_q, 0) = -1, MLA_ERROR_CAPACITY, "cu_seqlens_q");
    SPOIL_LIVE(I32(cu_seqlens_q, 1) = 6, MLA_ERROR_CAPACITY, "cu_seqlens_q");
    SPOIL_LIVE(I32(cu_seqlens_q, 2) = 6, MLA_ERROR_CAPACITY, "cu_seqlens_q");
    SPOIL_LIVE(I32(cu_seqlens_kv, 2) = 6, MLA_ERROR_CAPACITY, "cu_seqlens_kv");
    SPOIL_LIVE(p->max_seqlen_q = 2, MLA_ERROR_CAPACITY, "max_seqlen_q");
    SPOIL_LIVE(p->max_seqlen_kv = 3, MLA_ERROR_CAPACITY, "max_seqlen_kv");
}
#undef SPOIL
#undef SPOIL_LIVE
#undef problem_function

/* ---- merge ------------------------------------------------------------------------------------- */

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

/* ---- write and gather -------------------------------------------------------------------------- */

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
    SPOIL(p->kv_cache_rope = make(MLA_FORMAT_BF16, 3, PAGES, PS, P, 0), MLA_ERROR_SHAPE, "kv_cache");
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

/* ---- rope -------------------------------------------------------------------------------------- */

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

/* ---- absorb and project ------------------------------------------------------------------------ */

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

/* ---- pack -------------------------------------------------------------------------------------- */

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

/* ---- what is legal though it looks odd --------------------------------------------------------- */

static void test_empty(void **state)
{
    mla_decode_params decode;
    mla_prefill_params prefill;
    (void)state;
    fresh();
    good_decode(&decode);
    decode.q.shape[0] = decode.page_table.shape[0] = decode.cache_seqlens.shape[0] = 0;
    decode.out.shape[0] = decode.lse.shape[0] = 0;
    decode.q.data = decode.out.data = decode.lse.data = NULL;
    memcpy(before, arena, sizeof arena);
    assert_ok(mla_decode_with_kvcache(ctx, &decode, &diag), &diag);
    good_prefill(&prefill);
    memset(prefill.cu_seqlens_q.data, 0, 3 * sizeof(int32_t));
    memset(prefill.cu_seqlens_kv.data, 0, 3 * sizeof(int32_t));
    prefill.q.shape[0] = prefill.k.shape[0] = prefill.v.shape[0] = 0;
    prefill.out.shape[0] = prefill.lse.shape[0] = 0;
    memcpy(before, arena, sizeof arena);
    assert_ok(mla_prefill(ctx, &prefill, &diag), &diag);
    mla_write_kv_params write;
    good_write(&write);
    write.latent.shape[0] = write.rope.shape[0] = write.slots.shape[0] = 0;
    write.latent.data = NULL;
    memcpy(before, arena, sizeof arena);
    assert_ok(mla_write_kv(ctx, &write, &diag), &diag);
    assert_memory_equal(before, arena, sizeof arena);
}

/* Rows that see nothing get the empty state: with no live key, no page and no table column. */
static void test_no_keys(void **state)
{
    mla_decode_params p;
    mla_problem problem = MLA_PROBLEM_INIT;
    (void)state;
    fresh();
    good_decode(&p);
    memset(p.out.data, 0xff, B * Q * H * R * 2);
    memset(p.cache_seqlens.data, 0, B * sizeof(int32_t));
    p.page_table.shape[1] = 0;
    p.page_table.data = NULL;
    p.kv_cache.shape[0] = 0;
    assert_ok(mla_decode_problem(&p, &problem, &diag), &diag);
    assert_int_equal(problem.max_kv_len, 0);
    void *workspace = workspace_for(&problem, &p.call.workspace_bytes);
    p.call.workspace = workspace;
    assert_ok(mla_decode_with_kvcache(ctx, &p, &diag), &diag);
    free(workspace);
    for (int32_t i = 0; i < B * Q * H * R; i++)
        assert_int_equal(((uint16_t *)p.out.data)[i], 0);
    for (int32_t i = 0; i < B * Q * H; i++)
        assert_true(((float *)p.lse.data)[i] == -INFINITY);
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

static int start(void **state)
{
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    (void)state;
    options.ignore_environment = 1;
    options.cpu_only = 1;
    return mla_context_create(&options, &ctx, &diag) == MLA_OK ? 0 : -1;
}

static int stop(void **state)
{
    (void)state;
    mla_context_destroy(ctx);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),           cmocka_unit_test(test_decode),
        cmocka_unit_test(test_decode_live),     cmocka_unit_test(test_decode_variants),
        cmocka_unit_test(test_decode_overflow), cmocka_unit_test(test_extend),
        cmocka_unit_test(test_prefill),         cmocka_unit_test(test_merge),
        cmocka_unit_test(test_write),           cmocka_unit_test(test_gather),
        cmocka_unit_test(test_rope),            cmocka_unit_test(test_rope_write),
        cmocka_unit_test(test_absorb),          cmocka_unit_test(test_project),
        cmocka_unit_test(test_pack),            cmocka_unit_test(test_empty),
        cmocka_unit_test(test_no_keys),         cmocka_unit_test(test_no_device),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
