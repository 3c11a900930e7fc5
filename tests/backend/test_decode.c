/*
 * forward_decode: which keys each token sees (verify, draft, block), what reaches the operators,
 * the write before the attention, the cast query, empty calls and refusals; then numbers against
 * the operators called by hand, and a window against its tokens one by one.
 */
#include "backend/world.h"
#include <math.h>
#include <stdlib.h>

enum { H = 2, R = 8, P = 4, D = R + P, MOST = 64 };

static float q_rows[MOST * H * D], out_rows[MOST * H * R], lse_rows[MOST * H];
static const mla_layer plain_layer = MLA_LAYER_INIT;

/* A decode of `tokens` tokens for bs requests on the shared buffers, rows written before. */
static mla_forward_decode_args make_args(int32_t bs, int64_t tokens)
{
    mla_forward_decode_args a = MLA_FORWARD_DECODE_ARGS_INIT;
    a.bs = bs;
    a.save_kv_cache = 0;
    a.q = mla_tensor_3d(q_rows, MLA_FORMAT_F32, tokens, H, D);
    a.out = mla_tensor_3d(out_rows, MLA_FORMAT_F32, tokens, H, R);
    return a;
}

static void decode(world *w, int32_t bs, int64_t tokens)
{
    mla_forward_decode_args a = make_args(bs, tokens);
    assert_ok(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag), &diag);
}

static void assert_bounds(const int64_t *want, int32_t n)
{
    assert_int_equal(spy.n_calls, 1);
    const spy_call *call = &spy.calls[0];
    assert_int_equal(call->op, MLA_OP_DECODE);
    assert_int_equal(call->n_tokens, n);
    for (int32_t i = 0; i < n; i++)
        assert_int_equal(call->bounds[i], want[i]);
    spy_forget();
}

/* ---- which keys ------------------------------------------------------------------------------ */

static void test_verify_and_draft(void **state)
{
    (void)state;
    for (int32_t is_draft = 0; is_draft < 2; is_draft++) {
        mla_config c = world_config();
        c.is_draft = is_draft;
        world *w = world_make(c, true);
        int32_t lens[] = {64, 128};
        mla_forward_batch batch = world_batch(w, 2, lens);
        assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
        decode(w, 2, 4);
        assert_int_equal(lens[0], 64); /* never written */
        assert_int_equal(lens[1], 128);
        for (int i = 0; i < 4 * H * R; i++)
            assert_true(out_rows[i] == (float)spy.calls[0].bounds[i / (H * R)]);
        assert_int_equal(spy.calls[0].pages[1], w->table[0][0]); /* a row for each request */
        assert_int_equal(spy.calls[0].pages[2], w->table[1][0]);
        assert_int_equal(spy.calls[0].decode.page_table.shape[0], 2);
        if (is_draft)
            assert_bounds((int64_t[]){64, 65, 128, 129}, 4);
        else
            assert_bounds((int64_t[]){63, 64, 127, 128}, 4);
        decode(w, 2, 2); /* one token: the whole length for both */
        assert_bounds((int64_t[]){64, 128}, 2);
        world_end(w);
    }
}

static void test_worked_example(void **state)
{
    (void)state;
    for (int32_t is_draft = 0; is_draft < 2; is_draft++) {
        mla_config c = world_config();
        c.is_draft = is_draft;
        c.chunk_capacity = 4;
        world *w = world_make(c, true);
        int32_t lens[] = {8, 11, 4}, fresh[] = {3}, prefix[] = {5};
        mla_forward_batch batch = world_batch(w, 3, lens);
        batch.forward_mode = MLA_FORWARD_MIXED;
        batch.num_extends = 1;
        batch.extend_seq_lens = world_i32(fresh, 1);
        batch.extend_prefix_lens = world_i32(prefix, 1);
        assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
        decode(w, 2, 4);
        for (int i = 0; i < 4; i++)
            assert_int_equal(spy.calls[0].pages[i], w->table[1 + i / 2][0]);
        if (is_draft)
            assert_bounds((int64_t[]){11, 12, 4, 5}, 4);
        else
            assert_bounds((int64_t[]){10, 11, 3, 4}, 4);
        /* All requests in a scope, one token each. */
        assert_ok(mla_backend_push_num_extends(w->backend, 0, &diag), &diag);
        decode(w, 3, 3);
        assert_bounds((int64_t[]){8, 11, 4}, 3);
        assert_ok(mla_backend_pop_num_extends(w->backend, &diag), &diag);
        mla_forward_decode_args a = make_args(3, 3);
        assert_fails(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag),
                     MLA_ERROR_ARGUMENT, &diag, "bs is 3: the metadata has 2 decode rows");
        world_end(w);
    }
}

static void test_window_longer_than_the_request(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    int32_t lens[] = {1, 0, 3}; /* a padded row, an empty one, a short one; q_len 4 */
    mla_forward_batch batch = world_batch(w, 3, lens);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    decode(w, 3, 12);
    assert_bounds((int64_t[]){0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 2, 3}, 12);
    world_end(w);
}

static void test_block(void **state)
{
    (void)state;
    mla_config c = world_config();
    c.is_draft = 1;
    world *w = world_make(c, true);
    int32_t lens[] = {256, 9}; /* at context_len: a block does not reach past its length */
    uint8_t mask[4 * 2] = {1, 0, 1, 1, 1, 0, 1, 1};
    mla_forward_batch batch = world_batch(w, 2, lens);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    mla_forward_decode_args a = make_args(2, 4);
    a.is_non_causal = 1;
    assert_ok(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag), &diag);
    assert_bounds((int64_t[]){256, 256, 9, 9}, 4);
    a.mask = mla_tensor_2d(mask, MLA_FORMAT_U8, 4, 2);
    assert_ok(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag), &diag);
    assert_ptr_equal(spy.calls[0].decode.mask.data, mask);
    a.is_non_causal = 0;
    lens[0] = 100;
    assert_fails(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag),
                 MLA_ERROR_ARGUMENT, &diag, "mask");
    a.is_non_causal = 2;
    assert_fails(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag),
                 MLA_ERROR_ARGUMENT, &diag, "is_non_causal is 2");
    world_end(w);
}

/* ---- what reaches the operators -------------------------------------------------------------- */

static void test_parameters(void **state)
{
    (void)state;
    mla_config c = world_config();
    c.kv_format = MLA_FORMAT_E4M3;
    world *w = world_make(c, true);
    int32_t lens[] = {64, 128};
    mla_forward_batch batch = world_batch(w, 2, lens);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    mla_forward_decode_args a = make_args(2, 4);
    mla_layer layer = MLA_LAYER_INIT;
    /* q is a slice of wider rows, out is flat, lse is asked for. */
    static float wide[4 * H * (D + 3)];
    a.q = mla_tensor_slice(mla_tensor_3d(wide, MLA_FORMAT_F32, 4, H, D + 3), 2, 2, D);
    a.out = mla_tensor_2d(out_rows, MLA_FORMAT_F32, 4, H * R);
    a.lse = mla_tensor_2d(lse_rows, MLA_FORMAT_F32, 4, H);
    layer.layer_id = 1;
    layer.softmax_scale = 0.7f;
    layer.logit_cap = 30.0f;
    layer.k_scale = 0.5f;
    assert_ok(mla_backend_forward_decode(w->backend, &layer, w->pool, &a, &diag), &diag);
    const mla_decode_params *p = &spy.calls[0].decode;
    assert_true(p->softmax_scale == 0.7f && p->logit_cap == 30.0f && p->k_scale == 0.5f);
    assert_int_equal(p->max_seqlen_kv, 256);
    assert_int_equal(p->kv_lora_rank, R);
    assert_int_equal(p->qk_rope_head_dim, P);
    assert_ptr_equal(p->q.data, wide + 2);
    assert_int_equal(p->q.shape[0], 2);
    assert_int_equal(p->q.shape[1], 2);
    assert_int_equal(p->q.stride[0], 2 * H * (D + 3));
    assert_int_equal(p->q.stride[1], H * (D + 3));
    assert_int_equal(p->q.stride[2], D + 3);
    assert_int_equal(p->out.stride[1], H * R);
    assert_int_equal(p->out.stride[2], R);
    assert_int_equal(p->lse.stride[0], 2 * H);
    mla_tensor key_buffer;
    assert_ok(mla_kv_pool_get_key_buffer(w->pool, 1, &key_buffer, &diag), &diag);
    assert_ptr_equal(p->kv_cache.data, key_buffer.data);
    spy_forget();
    /* Zeros in the layer stand for the configuration's scale and for 1. */
    assert_ok(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag), &diag);
    assert_true(spy.calls[0].decode.softmax_scale == 0.3f && spy.calls[0].decode.k_scale == 1.0f);
    world_end(w);
}

static void test_save(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    int32_t lens[] = {64, 128}, slots[4] = {8, 9, 20, 21};
    mla_forward_batch batch = world_batch(w, 2, lens);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    static float k[4 * D];
    mla_forward_decode_args a = make_args(2, 4);
    a.save_kv_cache = 1;
    a.k = mla_tensor_3d(k, MLA_FORMAT_F32, 4, 1, D);
    a.out_cache_loc = world_i32(slots, 4);
    assert_ok(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag), &diag);
    assert_string_equal(spy.trail, "wa"); /* rows are there when the attention runs */
    const mla_write_kv_params *p = &spy.calls[0].write;
    assert_ptr_equal(p->latent.data, k);
    assert_int_equal(p->latent.shape[1], R);
    assert_ptr_equal(p->rope.data, k + R);
    assert_int_equal(p->rope.shape[1], P);
    assert_int_equal(p->latent.stride[0], D);
    assert_ptr_equal(p->slots.data, slots);
    spy_forget();

    /* Nothing is written when the arguments of either half are wrong. */
#define REFUSED(change, status, words)                                                             \
    do {                                                                                           \
        mla_forward_decode_args bad = a;                                                           \
        change;                                                                                    \
        assert_fails(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &bad, &diag),   \
                     status, &diag, words);                                                        \
        assert_string_equal(spy.trail, "");                                                        \
    } while (0)
    REFUSED(bad.k.rank = 0, MLA_ERROR_ARGUMENT, "k is absent");
    REFUSED(bad.out_cache_loc.rank = 0, MLA_ERROR_ARGUMENT, "out_cache_loc is absent");
    REFUSED(bad.save_kv_cache = 2, MLA_ERROR_ARGUMENT, "save_kv_cache is 2");
    REFUSED(bad.k.shape[0] = 3, MLA_ERROR_SHAPE, "k has shape");
    REFUSED(bad.k.shape[2] = R, MLA_ERROR_SHAPE, "k has shape");
    REFUSED(bad.k = mla_tensor_3d(k, MLA_FORMAT_F32, 4, 2, D), MLA_ERROR_SHAPE, "one row a token");
    REFUSED(bad.out_cache_loc.shape[0] = 3, MLA_ERROR_SHAPE, "out_cache_loc");
    REFUSED(bad.out.shape[2] = R - 1, MLA_ERROR_SHAPE, "out has shape");
    REFUSED(bad.q.shape[1] = 3, MLA_ERROR_SHAPE, "q has shape");
    slots[3] = 1 << 20;
    REFUSED(bad.bs = 2, MLA_ERROR_CAPACITY, "out_cache_loc[3] is 1048576 and pool has");
    slots[3] = 21;
    REFUSED(bad.k.device_type = MLA_DEVICE_CUDA, MLA_ERROR_DEVICE, "k is on device 2:0 and pool");
    REFUSED(bad.out_cache_loc.device_type = MLA_DEVICE_CUDA, MLA_ERROR_DEVICE, "out_cache_loc is");
    REFUSED(bad.k.data = bad.out_cache_loc.data = NULL, MLA_ERROR_ARGUMENT, "out_cache_loc.data");
    REFUSED(bad.q.device_type = MLA_DEVICE_CUDA, MLA_ERROR_DEVICE, "pool is on device 1:0 and q");
#undef REFUSED
    /* These two are found after the rows were written (backend.h). */
    a.out.data = a.q.data;
    assert_fails(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag),
                 MLA_ERROR_ARGUMENT, &diag, "out starts where q does");
    assert_string_equal(spy.trail, "w");
    world_end(w);
}

/* ---- the query ------------------------------------------------------------------------------- */

static void test_cast_query(void **state)
{
    (void)state;
    mla_config c = world_config();
    c.kv_format = MLA_FORMAT_E4M3;
    c.decode_query = MLA_DECODE_QUERY_CAST;
    world *w = world_make(c, true);
    int32_t lens[] = {5};
    mla_forward_batch batch = world_batch(w, 1, lens);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    const float values[D] = {1.0f,   -1.0f, 448.0f, 464.0f,  1e9f,  -1e9f,
                             0.001f, 0.0f,  -0.0f,  1.0625f, 17.0f, NAN};
    const uint8_t want[D] = {0x38, 0xb8, 0x7e, 0x7e, 0x7e, 0xfe,
                             0x01, 0x00, 0x80, 0x38, 0x58, 0x7f};
    float q[2 * H][D], latent[2][H][R], rope[2][H][P];
    for (int i = 0; i < 2 * H; i++) {
        memcpy(q[i], values, sizeof values);
        memcpy(latent[i / H][i % H], values, sizeof latent[0][0]);
        memcpy(rope[i / H][i % H], values + R, sizeof rope[0][0]);
    }
    mla_forward_decode_args a = make_args(1, 2);
    a.q = mla_tensor_3d(q, MLA_FORMAT_F32, 2, H, D);
    assert_ok(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag), &diag);
    a.q = mla_tensor_3d(latent, MLA_FORMAT_F32, 2, H, R);
    a.q_rope = mla_tensor_3d(rope, MLA_FORMAT_F32, 2, H, P);
    const mla_tensor *seen = &spy.calls[0].decode.q;
    for (int round = 0; round < 2; round++) {
        assert_int_equal(seen->format, MLA_FORMAT_E4M3);
        assert_int_equal(seen->shape[3], D);
        for (int i = 0; i < 2 * H; i++)
            assert_memory_equal((const uint8_t *)seen->data + i * D, want, sizeof want);
        if (round == 0) { /* and in two parts */
            memset(seen->data, 0, 2 * H * D);
            assert_ok(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag),
                      &diag);
            seen = &spy.calls[1].decode.q;
            assert_int_equal(spy.calls[1].decode.q_rope.rank, 0);
        }
    }
    a.q.device_type = MLA_DEVICE_CUDA;
    assert_fails(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag),
                 MLA_ERROR_DEVICE, &diag, "q is on device_type 2");
    /* A query that is fp8 already is used as it is. */
    static uint8_t fp8[2 * H * D];
    a = make_args(1, 2);
    a.q = mla_tensor_3d(fp8, MLA_FORMAT_E5M2, 2, H, D);
    assert_ok(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag), &diag);
    assert_ptr_equal(spy.calls[2].decode.q.data, fp8);
    world_end(w);

    /* keep: the query stays what it is. */
    c.decode_query = MLA_DECODE_QUERY_KEEP;
    w = world_make(c, true);
    batch = world_batch(w, 1, lens);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    decode(w, 1, 2);
    assert_ptr_equal(spy.calls[0].decode.q.data, q_rows);
    world_end(w);
}

/* ---- empty calls and refusals ---------------------------------------------------------------- */

static void test_empty(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    mla_forward_batch batch = world_batch(w, 0, NULL);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    mla_forward_decode_args a = MLA_FORWARD_DECODE_ARGS_INIT;
    assert_ok(mla_backend_forward_decode(w->backend, &plain_layer, NULL, &a, &diag), &diag);
    a = make_args(0, 0);
    assert_ok(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag), &diag);
    a = make_args(0, 1);
    assert_fails(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag),
                 MLA_ERROR_ARGUMENT, &diag, "bs is 0 and q has 1 tokens");
    assert_int_equal(spy.n_calls, 0);
    world_end(w);
}

static void test_refusals(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    int32_t lens[] = {64, 128};
    mla_forward_decode_args a = make_args(2, 4);
    mla_layer layer = MLA_LAYER_INIT;
    assert_fails(mla_backend_forward_decode(w->backend, &layer, w->pool, &a, &diag),
                 MLA_ERROR_STATE, &diag, "decode metadata is not defined");
    mla_forward_batch batch = world_batch(w, 2, lens);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
#define REFUSED(change, status, words)                                                             \
    do {                                                                                           \
        mla_forward_decode_args bad = make_args(2, 4);                                             \
        mla_kv_pool *pool = w->pool;                                                               \
        layer = plain_layer;                                                                       \
        change;                                                                                    \
        assert_fails(mla_backend_forward_decode(w->backend, &layer, pool, &bad, &diag), status,    \
                     &diag, words);                                                                \
        assert_int_equal(spy.n_calls, 0);                                                          \
    } while (0)
    REFUSED(bad.bs = 1, MLA_ERROR_ARGUMENT, "bs is 1: the metadata has 2 decode rows");
    REFUSED(bad.bs = -1, MLA_ERROR_ARGUMENT, "bs is -1");
    REFUSED(bad.q.shape[0] = 3, MLA_ERROR_ARGUMENT, "q has 3 tokens for bs 2");
    REFUSED(bad.q.shape[0] = 66, MLA_ERROR_CAPACITY, "max_tokens 64");
    REFUSED(bad.q.format = MLA_FORMAT_F16, MLA_ERROR_FORMAT, "q has format f16");
    REFUSED(bad.q.rank = 2, MLA_ERROR_SHAPE, "q has rank 2");
    REFUSED(bad.q.rank = 0, MLA_ERROR_ARGUMENT, "q is absent");
    REFUSED(bad.out.rank = 0, MLA_ERROR_ARGUMENT, "out is absent");
    REFUSED(bad.lse = mla_tensor_2d(lse_rows, MLA_FORMAT_F32, 4, 1), MLA_ERROR_SHAPE, "lse");
    REFUSED(pool = NULL, MLA_ERROR_ARGUMENT, "pool is NULL");
    REFUSED(layer.layer_id = 2, MLA_ERROR_ARGUMENT, "layer_id 2");
    REFUSED(layer.layer_id = -1, MLA_ERROR_ARGUMENT, "layer_id -1");
    REFUSED(layer.softmax_scale = NAN, MLA_ERROR_ARGUMENT, "softmax_scale");
    REFUSED(layer.logit_cap = -1.0f, MLA_ERROR_ARGUMENT, "logit_cap");
    REFUSED(layer.k_scale = 2.0f, MLA_ERROR_ARGUMENT, "k_scale");
    static uint8_t mask[4];
    REFUSED(bad.mask = mla_tensor_2d(mask, MLA_FORMAT_U8, 4, 1), MLA_ERROR_ARGUMENT,
            "is_non_causal 0");
    REFUSED((bad.is_non_causal = 1, bad.mask = mla_tensor_2d(mask, MLA_FORMAT_U8, 4, 1)),
            MLA_ERROR_SHAPE, "mask has 1 columns and T / bs is 2");
    REFUSED(layer.struct_size = 0, MLA_ERROR_VERSION, "mla_layer");
    REFUSED(bad.struct_size = 0, MLA_ERROR_VERSION, "mla_forward_decode_args");
    /* Lengths bumped wrongly between the init and the call. */
    REFUSED(lens[0] = 257, MLA_ERROR_CAPACITY, "context_len is 256");
    REFUSED(lens[0] = -1, MLA_ERROR_ARGUMENT, "seq_lens[0] is -1");
    lens[0] = 64;
#undef REFUSED
    /* Pools of another kind. */
    mla_kv_pool_config p = *mla_kv_pool_get_config(w->pool);
    p.memory = NULL;
    p.row_stride_bytes = p.page_stride_bytes = p.layer_stride_bytes = 0;
    for (int i = 0; i < 3; i++) {
        mla_kv_pool_config other = p;
        mla_kv_pool *pool = NULL;
        other.format = i == 0 ? MLA_FORMAT_BF16 : p.format;
        other.page_size = i == 1 ? 8 : p.page_size;
        other.kv_lora_rank = i == 2 ? 4 : p.kv_lora_rank;
        assert_ok(mla_kv_pool_create(w->ctx, &other, &pool, &diag), &diag);
        a = make_args(2, 4);
        assert_fails(mla_backend_forward_decode(w->backend, &plain_layer, pool, &a, &diag),
                     MLA_ERROR_FORMAT, &diag, "this backend was made for f32, 4, 8 and 4");
        mla_kv_pool_destroy(pool);
    }
    /* A page id that the pool does not have is found by the operator. */
    int32_t page = w->table[1][31];
    w->table[1][31] = 2147480000;
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    a = make_args(2, 4);
    assert_fails(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag),
                 MLA_ERROR_CAPACITY, &diag,
                 "page_table[num_extends:][1, 31] is 2147480000 and pool has");
    w->table[1][31] = page;
    w->table[1][32] = 2147480000; /* past the live pages: nobody looks */
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    decode(w, 2, 4);
    world_end(w);
}

/* A draft's window reaches past the length it is given. */
static void test_draft_at_the_end_of_the_context(void **state)
{
    (void)state;
    mla_config c = world_config();
    c.is_draft = 1;
    world *w = world_make(c, true);
    int32_t lens[] = {255};
    mla_forward_batch batch = world_batch(w, 1, lens);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    decode(w, 1, 2);
    assert_bounds((int64_t[]){255, 256}, 2);
    mla_forward_decode_args a = make_args(1, 3);
    assert_fails(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag),
                 MLA_ERROR_CAPACITY, &diag, "its last token sees 257 rows");
    world_end(w);
}

/* ---- solutions and workspace ----------------------------------------------------------------- */

static void test_forced_solutions(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    int32_t lens[] = {8};
    assert_ok(mla_kv_pool_clear(w->pool, NULL, &diag), &diag);
    mla_forward_batch batch = world_batch(w, 1, lens);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    decode(w, 1, 1);
    assert_int_equal(spy.n_calls, 1);
    /* A scope of the context holds for a backend that forces nothing, within its workspace. */
    assert_ok(mla_context_push_solution(w->ctx, "c", &diag), &diag);
    decode(w, 1, 1);
    assert_int_equal(spy.n_calls, 1);
    /* What the backend forces comes first. */
    assert_ok(mla_backend_set_solution(w->backend, "decode_spy", &diag), &diag);
    decode(w, 1, 1);
    assert_int_equal(spy.n_calls, 2);
    assert_ok(mla_backend_set_solution(w->backend, NULL, &diag), &diag);
    decode(w, 1, 1);
    assert_int_equal(spy.n_calls, 2);
    assert_ok(mla_context_pop_solution(w->ctx, &diag), &diag);
    world_end(w);
}

static void test_workspace(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    int32_t lens[WORLD_REQUESTS];
    for (int r = 0; r < WORLD_REQUESTS; r++)
        lens[r] = 256;
    mla_forward_batch batch = world_batch(w, WORLD_REQUESTS, lens);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    decode(w, WORLD_REQUESTS, 64); /* all capacities at once */
    batch = world_batch(w, 1, lens);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    decode(w, 1, 64); /* one request with all tokens */

    /* Rows that come later may need more: an error until the backend is told to look again. */
    spy_need(1000);
    mla_forward_decode_args a = make_args(1, 64);
    assert_fails(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag),
                 MLA_ERROR_WORKSPACE, &diag, "workspace");
    assert_ok(mla_backend_set_solution(w->backend, NULL, &diag), &diag);
    decode(w, 1, 64);
    /* A captured step holds the workspace's address. */
    assert_ok(mla_backend_init_graph_state(w->backend, 1, world_i32(lens, 1), &diag), &diag);
    assert_ok(
        mla_backend_init_forward_metadata_capture_graph(w->backend, 1, MLA_FORWARD_DECODE, &diag),
        &diag);
    spy_need(2000);
    assert_fails(mla_backend_set_solution(w->backend, NULL, &diag), MLA_ERROR_STATE, &diag,
                 "while batches are captured");
    assert_ok(mla_backend_init_graph_state(w->backend, 1, world_i32(lens, 1), &diag), &diag);
    assert_ok(mla_backend_set_solution(w->backend, NULL, &diag), &diag);
    spy_need(1);
    world_end(w);
}

/* ---- numbers --------------------------------------------------------------------------------- */

static void by_hand(world *w, const mla_forward_decode_args *a, int32_t bs, int32_t *lens,
                    float *out, float *lse)
{
    int64_t tokens = a->q.shape[0], q_len = tokens / bs;
    static int32_t table[WORLD_REQUESTS][WORLD_COLUMNS];
    mla_decode_params p = MLA_DECODE_PARAMS_INIT;
    memcpy(table, w->table, sizeof table);
    p.kv_lora_rank = R;
    p.qk_rope_head_dim = P;
    p.softmax_scale = w->config.softmax_scale;
    p.q = mla_tensor_4d(a->q.data, MLA_FORMAT_F32, bs, q_len, H, D);
    assert_ok(mla_kv_pool_get_key_buffer(w->pool, 0, &p.kv_cache, &diag), &diag);
    p.page_table = mla_tensor_2d(table, MLA_FORMAT_I32, bs, WORLD_COLUMNS);
    p.cache_seqlens = world_i32(lens, bs);
    p.out = mla_tensor_4d(out, MLA_FORMAT_F32, bs, q_len, H, R);
    p.lse = mla_tensor_3d(lse, MLA_FORMAT_F32, bs, q_len, H);
    mla_problem problem = MLA_PROBLEM_INIT;
    uint64_t bytes = 0;
    assert_ok(mla_decode_problem(&p, &problem, &diag), &diag);
    assert_ok(mla_workspace_bytes(w->ctx, &problem, NULL, &bytes, &diag), &diag);
    void *workspace = aligned_alloc(64, (bytes + 127) / 64 * 64);
    p.call.workspace = workspace;
    p.call.workspace_bytes = bytes;
    assert_ok(mla_decode_with_kvcache(w->ctx, &p, &diag), &diag);
    free(workspace);
}

static void test_numbers(void **state)
{
    (void)state;
    world *w = world_make(world_config(), false);
    int32_t lens[] = {7, 100, 256};
    int64_t slots[6];
    static float k[6 * D], want[6 * H * R], want_lse[6 * H], one[3 * H * R];
    world_random(q_rows, 6 * H * D, 1);
    world_random(k, 6 * D, 2);
    for (int32_t r = 0; r < 3; r++) {
        world_fill(w, r, 0, lens[r] - 2);
        for (int j = 0; j < 2; j++)
            slots[2 * r + j] = world_slot(w, r, lens[r] - 2 + j);
    }
    mla_forward_batch batch = world_batch(w, 3, lens);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    mla_forward_decode_args a = make_args(3, 6);
    a.save_kv_cache = 1;
    a.k = mla_tensor_2d(k, MLA_FORMAT_F32, 6, D);
    a.out_cache_loc = mla_tensor_1d(slots, MLA_FORMAT_I64, 6);
    a.lse = mla_tensor_2d(lse_rows, MLA_FORMAT_F32, 6, H);
    assert_ok(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag), &diag);
    by_hand(w, &a, 3, lens, want, want_lse);
    assert_memory_equal(out_rows, want, sizeof want);
    assert_memory_equal(lse_rows, want_lse, sizeof want_lse);
    for (int i = 0; i < 6 * H * R; i++)
        assert_true(isfinite(want[i]) && want[i] != 0.0f);

    /* The window's tokens one by one: the same bits. */
    for (int j = 0; j < 2; j++) {
        int32_t shorter[3];
        static float q[3 * H * D];
        for (int r = 0; r < 3; r++) {
            shorter[r] = lens[r] - 1 + j;
            memcpy(q + r * H * D, q_rows + (2 * r + j) * H * D, sizeof(float) * H * D);
        }
        batch = world_batch(w, 3, shorter);
        assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
        mla_forward_decode_args single = make_args(3, 3);
        single.q = mla_tensor_3d(q, MLA_FORMAT_F32, 3, H, D);
        single.out = mla_tensor_3d(one, MLA_FORMAT_F32, 3, H, R);
        assert_ok(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &single, &diag),
                  &diag);
        for (int r = 0; r < 3; r++)
            assert_memory_equal(one + r * H * R, want + (2 * r + j) * H * R, sizeof(float) * H * R);
    }
    world_end(w);
}

/* Every cache format, also without a rope part: rows written by the backend and attended, against
 * rows written through the pool and attended by hand. */
static void check_format(int32_t kv_format, int32_t rank, int32_t rope, float k_scale)
{
    enum { LEN = 70 };
    mla_config c = world_config();
    c.kv_format = kv_format;
    c.kv_lora_rank = rank;
    c.qk_rope_head_dim = rope;
    c.softmax_scale = 0.05f;
    world *w = world_make(c, false);
    int64_t width = rank + rope, slots[LEN];
    float *k = calloc((size_t)(LEN * width), sizeof *k),
          *q = calloc((size_t)(H * width), sizeof *q);
    float *out = calloc((size_t)(H * rank), sizeof *out);
    float *want = calloc((size_t)(H * rank), sizeof *want);
    int32_t lens[1] = {LEN};
    mla_tensor none = {.rank = 0};
    mla_layer layer = MLA_LAYER_INIT;
    layer.k_scale = k_scale;
    world_random(k, LEN * width, 1);
    world_random(q, H * width, 2);
    for (int i = 0; i < LEN; i++)
        slots[i] = world_slot(w, 0, i);
    mla_forward_batch batch = world_batch(w, 1, lens);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    /* All rows but the last through the pool, the last one by the backend. */
    assert_ok(mla_kv_pool_set_mla_kv_buffer(
                  w->pool, 0, mla_tensor_1d(slots, MLA_FORMAT_I64, LEN - 1),
                  mla_tensor_2d(k, MLA_FORMAT_F32, LEN - 1, width), none, k_scale, 0, NULL, &diag),
              &diag);
    mla_forward_decode_args a = MLA_FORWARD_DECODE_ARGS_INIT;
    a.bs = 1;
    a.q = mla_tensor_3d(q, MLA_FORMAT_F32, 1, H, width);
    a.k = mla_tensor_2d(k + (LEN - 1) * width, MLA_FORMAT_F32, 1, width);
    a.out_cache_loc = mla_tensor_1d(slots + LEN - 1, MLA_FORMAT_I64, 1);
    a.out = mla_tensor_3d(out, MLA_FORMAT_F32, 1, H, rank);
    assert_ok(mla_backend_forward_decode(w->backend, &layer, w->pool, &a, &diag), &diag);

    /* The rows as they are stored, and plain softmax in double. */
    float *rows = calloc((size_t)(LEN * width), sizeof *rows);
    assert_ok(mla_kv_pool_get_mla_kv_buffer(w->pool, 0, mla_tensor_1d(slots, MLA_FORMAT_I64, LEN),
                                            mla_tensor_2d(rows, MLA_FORMAT_F32, LEN, width), none,
                                            k_scale, NULL, &diag),
              &diag);
    double coarse = kv_format == MLA_FORMAT_E5M2 ? 0.13 : 0.07; /* half a step of the mantissa */
    for (int64_t i = (LEN - 1) * width; i < LEN * width; i++)
        assert_true(fabs((double)rows[i] - (double)k[i]) <= coarse * fabs((double)k[i]) + 2e-3);
    for (int h = 0; h < H; h++) {
        double sum = 0.0, weights[LEN];
        for (int j = 0; j < LEN; j++) {
            double s = 0.0;
            for (int64_t i = 0; i < width; i++)
                s += (double)q[h * width + i] * (double)rows[j * width + i];
            weights[j] = exp((double)c.softmax_scale * s);
            sum += weights[j];
        }
        for (int32_t i = 0; i < rank; i++) {
            double value = 0.0;
            for (int j = 0; j < LEN; j++)
                value += weights[j] * (double)rows[j * width + i];
            want[h * rank + i] = (float)(value / sum);
        }
    }
    double error = 0.0, norm = 0.0;
    for (int64_t i = 0; i < H * rank; i++) {
        error += pow((double)out[i] - (double)want[i], 2);
        norm += pow((double)want[i], 2);
    }
    if (!(sqrt(error / norm) < 1e-5))
        fail_msg("%s R %d P %d: relative error %g", mla_format_name(kv_format), rank, rope,
                 sqrt(error / norm));
    free(rows);
    free(want);
    free(out);
    free(q);
    free(k);
    world_end(w);
}

static void test_formats(void **state)
{
    (void)state;
    for (int32_t format = MLA_FORMAT_F32; format <= MLA_FORMAT_E5M2; format++) {
        check_format(format, 512, 64, 1.0f);
        check_format(format, 40, 0, 1.0f);
    }
    check_format(MLA_FORMAT_DS656, 512, 64, 1.0f);
    check_format(MLA_FORMAT_E4M3, 64, 8, 0.01f);
    check_format(MLA_FORMAT_E5M2, 64, 8, 3.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_verify_and_draft),
        cmocka_unit_test(test_worked_example),
        cmocka_unit_test(test_window_longer_than_the_request),
        cmocka_unit_test(test_block),
        cmocka_unit_test(test_parameters),
        cmocka_unit_test(test_save),
        cmocka_unit_test(test_cast_query),
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_draft_at_the_end_of_the_context),
        cmocka_unit_test(test_forced_solutions),
        cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_formats),
    };
    return cmocka_run_group_tests_name("backend_decode", tests, NULL, NULL);
}
