/*
 * forward_extend, forward_extend_chunked and the dispatch: refusals, what reaches the operators,
 * the cast of k and v beside an e4m3 query, when a step is recorded; then numbers: a prefix
 * replayed in windows of any size equals one softmax over everything.
 */
#include "backend/world.h"
#include <math.h>
#include <stdlib.h>

enum { H = 2, L = 8, V = 6, R = 8, P = 4, D = R + P };

static const mla_layer plain_layer = MLA_LAYER_INIT;
static float q_rows[64 * H * L], k_rows[64 * H * L], v_rows[64 * H * V], out_rows[64 * H * V];
static float lse_rows[64 * H];

static int32_t lens[3], fresh[3], prefix[3];

/* An extend of e requests, prefix[i] cached and fresh[i] new tokens each. */
static mla_status init_extend(world *w, int32_t e)
{
    for (int32_t i = 0; i < e; i++)
        lens[i] = prefix[i] + fresh[i];
    mla_forward_batch batch = world_batch(w, e, lens);
    batch.forward_mode = MLA_FORWARD_EXTEND;
    batch.num_extends = e;
    batch.extend_seq_lens = world_i32(fresh, e);
    batch.extend_prefix_lens = world_i32(prefix, e);
    return mla_backend_init_forward_metadata(w->backend, &batch, &diag);
}

static void set_lengths(int32_t p0, int32_t f0, int32_t p1, int32_t f1, int32_t p2, int32_t f2)
{
    prefix[0] = p0;
    prefix[1] = p1;
    prefix[2] = p2;
    fresh[0] = f0;
    fresh[1] = f1;
    fresh[2] = f2;
}

static mla_forward_extend_args extend_args(int64_t tokens)
{
    mla_forward_extend_args a = MLA_FORWARD_EXTEND_ARGS_INIT;
    a.q = mla_tensor_3d(q_rows, MLA_FORMAT_F32, tokens, H, L);
    a.k = mla_tensor_3d(k_rows, MLA_FORMAT_F32, tokens, H, L);
    a.v = mla_tensor_3d(v_rows, MLA_FORMAT_F32, tokens, H, V);
    a.out = mla_tensor_3d(out_rows, MLA_FORMAT_F32, tokens, H, V);
    return a;
}

static mla_forward_extend_chunked_args chunked_args(int64_t tokens, int32_t *cum, int32_t e)
{
    mla_forward_extend_chunked_args a = MLA_FORWARD_EXTEND_CHUNKED_ARGS_INIT;
    a.q = mla_tensor_3d(q_rows, MLA_FORMAT_F32, tokens, H, L);
    a.k = mla_tensor_3d(k_rows, MLA_FORMAT_F32, tokens, H, L);
    a.v = mla_tensor_3d(v_rows, MLA_FORMAT_F32, tokens, H, V);
    a.cum_seq_lens_q = a.cum_seq_lens_kv = world_i32(cum, e + 1);
    a.out = mla_tensor_3d(out_rows, MLA_FORMAT_F32, tokens, H, V);
    a.lse = mla_tensor_2d(lse_rows, MLA_FORMAT_F32, tokens, H);
    return a;
}

/* ---- forward_extend -------------------------------------------------------------------------- */

static void test_extend(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    mla_forward_extend_args a = extend_args(9);
    assert_fails(mla_backend_forward_extend(w->backend, &plain_layer, &a, &diag), MLA_ERROR_STATE,
                 &diag, "prefill metadata is not defined");
    set_lengths(0, 5, 0, 0, 0, 4);
    assert_ok(init_extend(w, 3), &diag);
    mla_layer layer = MLA_LAYER_INIT;
    layer.softmax_scale = 0.9f;
    layer.logit_cap = 20.0f;
    assert_ok(mla_backend_forward_extend(w->backend, &layer, &a, &diag), &diag);
    const mla_prefill_params *p = &spy.calls[0].prefill;
    assert_int_equal(p->is_causal, 1);
    assert_int_equal(p->max_seqlen_q, 5);
    assert_true(p->softmax_scale == 0.9f && p->logit_cap == 20.0f);
    assert_int_equal(p->lse.rank, 0);
    const int32_t want[] = {0, 5, 5, 9};
    assert_memory_equal(p->cu_seqlens_q.data, want, sizeof want);
    assert_ptr_equal(p->cu_seqlens_kv.data, p->cu_seqlens_q.data);
    /* Fewer key heads, and a flat output. */
    a.k = mla_tensor_3d(k_rows, MLA_FORMAT_F32, 9, 1, L);
    a.v = mla_tensor_3d(v_rows, MLA_FORMAT_F32, 9, 1, V);
    a.out = mla_tensor_2d(out_rows, MLA_FORMAT_F32, 9, H * V);
    assert_ok(mla_backend_forward_extend(w->backend, &plain_layer, &a, &diag), &diag);
    assert_int_equal(spy.calls[1].prefill.k.shape[1], 1);
    assert_int_equal(spy.calls[1].prefill.out.shape[2], V);
    assert_true(spy.calls[1].prefill.softmax_scale == 0.3f);

    a = extend_args(9);
    a.save_kv_cache = 1;
    assert_fails(mla_backend_forward_extend(w->backend, &plain_layer, &a, &diag),
                 MLA_ERROR_UNSUPPORTED, &diag, "save_kv_cache is 1");
    a = extend_args(8);
    assert_fails(mla_backend_forward_extend(w->backend, &plain_layer, &a, &diag),
                 MLA_ERROR_CAPACITY, &diag, "cum_extend_seq_lens ends at 9 and q has 8 rows");
    a = extend_args(9);
    a.out = mla_tensor_2d(out_rows, MLA_FORMAT_F32, 9, H * V - 1);
    assert_fails(mla_backend_forward_extend(w->backend, &plain_layer, &a, &diag), MLA_ERROR_SHAPE,
                 &diag, "out has shape");
    a = extend_args(9);
    a.q.shape[1] = 1;
    assert_fails(mla_backend_forward_extend(w->backend, &plain_layer, &a, &diag), MLA_ERROR_SHAPE,
                 &diag, "local heads");
    a = extend_args(65);
    assert_fails(mla_backend_forward_extend(w->backend, &plain_layer, &a, &diag),
                 MLA_ERROR_CAPACITY, &diag, "max_tokens 64");
    /* All that the backend was made for. */
    set_lengths(0, 64, 0, 0, 0, 0);
    assert_ok(init_extend(w, 1), &diag);
    a = extend_args(64);
    assert_ok(mla_backend_forward_extend(w->backend, &plain_layer, &a, &diag), &diag);
    /* Nothing new anywhere: legal, and nothing runs. */
    set_lengths(0, 0, 0, 0, 0, 0);
    assert_ok(init_extend(w, 3), &diag);
    a = extend_args(0);
    assert_ok(mla_backend_forward_extend(w->backend, &plain_layer, &a, &diag), &diag);
    set_lengths(0, 5, 1, 4, 0, 0);
    assert_ok(init_extend(w, 2), &diag);
    a = extend_args(9);
    assert_fails(mla_backend_forward_extend(w->backend, &plain_layer, &a, &diag),
                 MLA_ERROR_UNSUPPORTED, &diag, "a cached prefix of 1 tokens");
    assert_int_equal(spy.n_calls, 3);
    world_end(w);
}

/* ---- forward_extend_chunked ------------------------------------------------------------------ */

static void test_chunked_parameters(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    int32_t cum_q[] = {0, 3, 7}, cum_kv[] = {0, 0, 9}, too_many[10] = {0};
    mla_forward_extend_chunked_args a = chunked_args(7, cum_q, 2);
    a.is_causal = 0;
    a.logit_cap = 5.0f;
    a.max_q_len = 4;
    a.max_kv_len = 9;
    a.k = mla_tensor_3d(k_rows, MLA_FORMAT_F32, 9, H, L);
    a.v = mla_tensor_3d(v_rows, MLA_FORMAT_F32, 9, H, V);
    a.cum_seq_lens_kv = world_i32(cum_kv, 3);
    assert_ok(mla_backend_forward_extend_chunked(w->backend, &a, &diag), &diag);
    const mla_prefill_params *p = &spy.calls[0].prefill;
    assert_int_equal(p->is_causal, 0);
    assert_int_equal(p->max_seqlen_q, 4);
    assert_int_equal(p->max_seqlen_kv, 9);
    assert_true(p->softmax_scale == 0.3f && p->logit_cap == 5.0f);
    assert_ptr_equal(p->lse.data, lse_rows);
    assert_ptr_equal(p->cu_seqlens_kv.data, cum_kv);
#define REFUSED(change, status, words)                                                             \
    do {                                                                                           \
        mla_forward_extend_chunked_args bad = a;                                                   \
        change;                                                                                    \
        assert_fails(mla_backend_forward_extend_chunked(w->backend, &bad, &diag), status, &diag,   \
                     words);                                                                       \
    } while (0)
    REFUSED(bad.lse.rank = 0, MLA_ERROR_ARGUMENT, "lse is absent");
    REFUSED(bad.out.rank = 0, MLA_ERROR_ARGUMENT, "out is absent");
    REFUSED(bad.k.shape[1] = 1, MLA_ERROR_SHAPE, "heads of k");
    REFUSED(bad.k.shape[1] = bad.v.shape[1] = 1, MLA_ERROR_SHAPE, "the local heads");
    REFUSED(bad.v.shape[2] = V - 1, MLA_ERROR_SHAPE, "v_head_dim");
    REFUSED(bad.k.shape[0] = bad.v.shape[0] = 65, MLA_ERROR_CAPACITY, "chunk_capacity 64");
    REFUSED(bad.cum_seq_lens_q = world_i32(too_many, 10), MLA_ERROR_CAPACITY, "max_bs 8");
    REFUSED(bad.k.device_type = MLA_DEVICE_CUDA, MLA_ERROR_DEVICE, "k is on device_type 2");
    REFUSED(bad.out.device_type = MLA_DEVICE_CUDA, MLA_ERROR_DEVICE, "out");
    REFUSED(bad.is_causal = 3, MLA_ERROR_ARGUMENT, "is_causal");
    REFUSED(cum_kv[2] = 8, MLA_ERROR_CAPACITY, "cum_seq_lens_kv ends at 8 and k");
    cum_kv[2] = 9;
    REFUSED(cum_q[2] = 8, MLA_ERROR_CAPACITY, "over max_q_len 4; raise max_q_len");
    cum_q[2] = 7;
    REFUSED(bad.max_kv_len = 8, MLA_ERROR_CAPACITY, "cum_seq_lens_kv gives request 1 9 tokens");
    REFUSED(bad.max_q_len = -1, MLA_ERROR_ARGUMENT, "max_q_len is -1 and max_kv_len 9");
    REFUSED(bad.cum_seq_lens_kv.shape[0] = 2, MLA_ERROR_SHAPE, "as long as cum_seq_lens_q");
#undef REFUSED
    assert_int_equal(spy.n_calls, 1);
    world_end(w);
}

static void test_chunked_fp8(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    int32_t cum[] = {0, 3};
    static uint8_t q8[3 * H * L], k8[3 * H * L];
    mla_forward_extend_chunked_args a = chunked_args(3, cum, 1);
    for (int i = 0; i < 3 * H * L; i++)
        k_rows[i] = i % 3 == 0 ? 1000.0f : -1.0f;
    for (int i = 0; i < 3 * H * V; i++)
        v_rows[i] = i % 2 == 0 ? 2.0f : -500.0f;
    a.q = mla_tensor_3d(q8, MLA_FORMAT_E4M3, 3, H, L);
    assert_ok(mla_backend_forward_extend_chunked(w->backend, &a, &diag), &diag);
    const mla_prefill_params *p = &spy.calls[0].prefill;
    assert_int_equal(p->k.format, MLA_FORMAT_E4M3);
    assert_int_equal(p->v.format, MLA_FORMAT_E4M3);
    for (int i = 0; i < 3 * H * L; i++)
        assert_int_equal(((const uint8_t *)p->k.data)[i], i % 3 == 0 ? 0x7e : 0xb8);
    for (int i = 0; i < 3 * H * V; i++)
        assert_int_equal(((const uint8_t *)p->v.data)[i], i % 2 == 0 ? 0x40 : 0xfe);
    /* What is e4m3 already is not copied. */
    a.k = mla_tensor_3d(k8, MLA_FORMAT_E4M3, 3, H, L);
    assert_ok(mla_backend_forward_extend_chunked(w->backend, &a, &diag), &diag);
    assert_ptr_equal(spy.calls[1].prefill.k.data, k8);
    assert_int_equal(((const uint8_t *)spy.calls[1].prefill.v.data)[1], 0xfe);
    world_end(w);
}

/* ---- recording ------------------------------------------------------------------------------- */

static void record(void *user, void *stream)
{
    assert_string_equal(user, "engine");
    assert_ptr_equal(stream, (void *)q_rows);
    spy_event('r');
}

static void test_recorded_chunks(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    int32_t cum[] = {0, 7};
    mla_forward_extend_chunked_args a = chunked_args(7, cum, 1);
    a.stream = q_rows;
    mla_backend_set_step_recorder(w->backend, record, "engine");
    assert_ok(mla_backend_forward_extend_chunked(w->backend, &a, &diag), &diag);
    assert_string_equal(spy.trail, "ra"); /* the causal pass, before its attention */
    a.is_causal = 0;
    assert_ok(mla_backend_forward_extend_chunked(w->backend, &a, &diag), &diag);
    assert_ok(mla_backend_forward_extend_chunked(w->backend, &a, &diag), &diag);
    assert_string_equal(spy.trail, "raaa"); /* windows never */
    a.is_causal = 1;
    a.lse.rank = 0;
    assert_fails(mla_backend_forward_extend_chunked(w->backend, &a, &diag), MLA_ERROR_ARGUMENT,
                 &diag, "lse");
    assert_string_equal(spy.trail, "raaa"); /* nor a call that is refused */
    a.lse.rank = 2;
    mla_backend_set_step_recorder(w->backend, NULL, NULL);
    assert_ok(mla_backend_forward_extend_chunked(w->backend, &a, &diag), &diag);
    assert_string_equal(spy.trail, "raaaa");
    world_end(w);
}

static void test_forward(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    static float q[4 * H * D], k[4 * D], out[4 * H * R];
    int32_t slots[4] = {4, 5, 6, 7};
    mla_forward_decode_args d = MLA_FORWARD_DECODE_ARGS_INIT;
    mla_forward_extend_args x = extend_args(7);
    d.bs = 2;
    d.q = mla_tensor_3d(q, MLA_FORMAT_F32, 4, H, D);
    d.k = mla_tensor_2d(k, MLA_FORMAT_F32, 4, D);
    d.out_cache_loc = world_i32(slots, 4);
    d.out = mla_tensor_3d(out, MLA_FORMAT_F32, 4, H, R);
    d.stream = x.stream = q_rows;
    mla_backend_set_step_recorder(w->backend, record, "engine");

    /* A mixed batch: one extend without prefix, two decodes. */
    int32_t all[] = {7, 20, 30};
    set_lengths(0, 7, 0, 0, 0, 0);
    mla_forward_batch batch = world_batch(w, 3, all);
    batch.forward_mode = MLA_FORWARD_MIXED;
    batch.num_extends = 1;
    batch.extend_seq_lens = world_i32(fresh, 1);
    batch.extend_prefix_lens = world_i32(prefix, 1);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);

    const struct {
        int32_t mode, record, save;
        const char *trail;
    } cases[] = {
        {MLA_FORWARD_DECODE, -1, 1, "wa"}, {MLA_FORWARD_DECODE, -1, 0, "a"},
        {MLA_FORWARD_DECODE, 1, 1, "war"}, /* the rows are there after it only */
        {MLA_FORWARD_DECODE, 1, 0, "ra"},  {MLA_FORWARD_DECODE, 0, 1, "wa"},
        {MLA_FORWARD_EXTEND, -1, 0, "ra"}, {MLA_FORWARD_EXTEND, 0, 0, "a"},
        {MLA_FORWARD_EXTEND, 1, 0, "ra"},  {MLA_FORWARD_MIXED, -1, 0, "ra"},
        {MLA_FORWARD_IDLE, -1, 0, "a"},    {MLA_FORWARD_IDLE, 1, 0, "ra"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        spy_forget();
        d.save_kv_cache = cases[i].save;
        assert_ok(mla_backend_forward(w->backend, cases[i].mode, cases[i].record, &plain_layer,
                                      w->pool, cases[i].mode == MLA_FORWARD_DECODE ? &d : NULL,
                                      cases[i].mode == MLA_FORWARD_DECODE ? NULL : &x, &diag),
                  &diag);
        assert_string_equal(spy.trail, cases[i].trail);
    }
    spy_forget();
    assert_fails(mla_backend_forward(w->backend, 0, -1, &plain_layer, w->pool, &d, &x, &diag),
                 MLA_ERROR_ARGUMENT, &diag, "forward_mode is 0");
    assert_fails(mla_backend_forward(w->backend, MLA_FORWARD_DECODE, 2, &plain_layer, w->pool, &d,
                                     &x, &diag),
                 MLA_ERROR_ARGUMENT, &diag, "record_kv_cache is 2");
    assert_fails(mla_backend_forward(w->backend, MLA_FORWARD_DECODE, 1, &plain_layer, w->pool, NULL,
                                     &x, &diag),
                 MLA_ERROR_ARGUMENT, &diag, "mla_forward_decode_args is NULL");
    assert_fails(mla_backend_forward(w->backend, MLA_FORWARD_EXTEND, 1, &plain_layer, w->pool, &d,
                                     NULL, &diag),
                 MLA_ERROR_ARGUMENT, &diag, "mla_forward_extend_args is NULL");
    x.save_kv_cache = 1;
    assert_fails(mla_backend_forward(w->backend, MLA_FORWARD_EXTEND, -1, &plain_layer, w->pool, &d,
                                     &x, &diag),
                 MLA_ERROR_UNSUPPORTED, &diag, "save_kv_cache");
    d.out.shape[2] = 1;
    assert_fails(mla_backend_forward(w->backend, MLA_FORWARD_DECODE, 1, &plain_layer, w->pool, &d,
                                     NULL, &diag),
                 MLA_ERROR_SHAPE, &diag, "out");
    assert_string_equal(spy.trail, ""); /* refused calls leave no trace */
    world_end(w);
}

/* ---- numbers --------------------------------------------------------------------------------- */

enum { MOST = 128 };

/* Keys and values of request r at position p, all heads. */
static void key_of(int32_t r, int32_t p, float *k, float *v)
{
    world_random(k, H * L, (uint32_t)(r * 1000 + p) * 2);
    world_random(v, H * V, (uint32_t)(r * 1000 + p) * 2 + 1);
}

/* Plain softmax in double for the query of request r at position p. */
static void expected(int32_t r, int32_t p, float scale, double *out, double *lse)
{
    float q[H * L], k[H * L], v[H * V];
    world_random(q, H * L, (uint32_t)(r * 1000 + p) + 777777);
    for (int h = 0; h < H; h++) {
        double sum = 0.0, acc[V] = {0};
        for (int32_t j = 0; j <= p; j++) {
            double s = 0.0;
            key_of(r, j, k, v);
            for (int i = 0; i < L; i++)
                s += (double)q[h * L + i] * (double)k[h * L + i];
            double weight = exp((double)scale * s);
            sum += weight;
            for (int i = 0; i < V; i++)
                acc[i] += weight * (double)v[h * V + i];
        }
        for (int i = 0; i < V; i++)
            out[h * V + i] = acc[i] / sum;
        lse[h] = log(sum);
    }
}

/* The causal pass and every window of the metadata, merged, as an engine does it. */
static void run_chunked(world *w, int32_t e, int64_t tokens, float *out, float *lse)
{
    static float q[MOST * H * L], k[MOST * H * L], v[MOST * H * V];
    static float window_out[MOST * H * V], window_lse[MOST * H];
    const mla_prefill_metadata *m = NULL;
    assert_ok(mla_backend_prefill_metadata(w->backend, &m, &diag), &diag);
    int64_t t = 0;
    for (int32_t r = 0; r < e; r++)
        for (int32_t p = prefix[r]; p < prefix[r] + fresh[r]; p++, t++) {
            world_random(q + t * H * L, H * L, (uint32_t)(r * 1000 + p) + 777777);
            key_of(r, p, k + t * H * L, v + t * H * V);
        }
    assert_int_equal(t, tokens);
    mla_forward_extend_chunked_args a = MLA_FORWARD_EXTEND_CHUNKED_ARGS_INIT;
    a.q = mla_tensor_3d(q, MLA_FORMAT_F32, tokens, H, L);
    a.k = mla_tensor_3d(k, MLA_FORMAT_F32, tokens, H, L);
    a.v = mla_tensor_3d(v, MLA_FORMAT_F32, tokens, H, V);
    a.cum_seq_lens_q = a.cum_seq_lens_kv = m->cum_extend_seq_lens;
    a.max_q_len = a.max_kv_len = m->max_extend_seq_len;
    a.out = mla_tensor_3d(out, MLA_FORMAT_F32, tokens, H, V);
    a.lse = mla_tensor_2d(lse, MLA_FORMAT_F32, tokens, H);
    assert_ok(mla_backend_forward_extend_chunked(w->backend, &a, &diag), &diag);

    mla_tensor outs[2] = {a.out, mla_tensor_3d(window_out, MLA_FORMAT_F32, tokens, H, V)};
    mla_tensor lses[2] = {a.lse, mla_tensor_2d(window_lse, MLA_FORMAT_F32, tokens, H)};
    for (int32_t i = 0; i < m->chunked_loop_num; i++) {
        const int32_t *len = (const int32_t *)m->chunked_seq_len.data + i * e;
        int64_t win = w->config.chunk_capacity / e, n = 0;
        for (int32_t r = 0; r < e; r++)
            for (int64_t p = i * win; p < i * win + len[r]; p++, n++)
                key_of(r, (int32_t)p, k + n * H * L, v + n * H * V);
        assert_int_equal(n, m->chunk_kv_indices_list[i].shape[0]);
        a.is_causal = 0;
        a.k = mla_tensor_3d(k, MLA_FORMAT_F32, n, H, L);
        a.v = mla_tensor_3d(v, MLA_FORMAT_F32, n, H, V);
        a.cum_seq_lens_kv = mla_tensor_slice(m->cu_chunked_seq_len, 0, i, 1);
        a.cum_seq_lens_kv = mla_tensor_1d(a.cum_seq_lens_kv.data, MLA_FORMAT_I32, e + 1);
        a.max_kv_len = m->max_chunk_len_per_loop[i];
        a.out = outs[1];
        a.lse = lses[1];
        assert_ok(mla_backend_forward_extend_chunked(w->backend, &a, &diag), &diag);
        mla_merge_state_params merge = MLA_MERGE_STATE_PARAMS_INIT;
        merge.n_states = 2;
        merge.outs = outs;
        merge.lses = lses;
        merge.out = outs[0];
        merge.lse = lses[0];
        assert_ok(mla_merge_state(w->ctx, &merge, &diag), &diag);
    }
}

static void check_replay(int64_t capacity, int32_t e)
{
    mla_config c = world_config();
    c.chunk_capacity = capacity;
    c.max_tokens = MOST;
    world *w = world_make(c, false);
    int64_t tokens = 0;
    for (int32_t r = 0; r < e; r++)
        tokens += fresh[r];
    assert_ok(init_extend(w, e), &diag);
    static float out[MOST * H * V], lse[MOST * H];
    run_chunked(w, e, tokens, out, lse);
    int64_t t = 0;
    for (int32_t r = 0; r < e; r++)
        for (int32_t p = prefix[r]; p < prefix[r] + fresh[r]; p++, t++) {
            double want[H * V], want_lse[H];
            expected(r, p, c.softmax_scale, want, want_lse);
            for (int i = 0; i < H * V; i++)
                assert_true(fabs((double)out[t * H * V + i] - want[i]) < 2e-6);
            for (int h = 0; h < H; h++)
                assert_true(fabs((double)lse[t * H + h] - want_lse[h]) < 2e-6);
        }
    world_end(w);
}

static void test_replay_equals_one_softmax(void **state)
{
    (void)state;
    const int64_t capacities[] = {3, 7, 12, 64, 100, 128};
    for (size_t i = 0; i < 6; i++) {
        set_lengths(37, 3, 0, 4, 5, 1);
        check_replay(capacities[i], 3);
        set_lengths(90, 1, 2, 0, 0, 6); /* one long, one short, one without new tokens */
        check_replay(capacities[i], 3);
        set_lengths(0, 9, 0, 0, 0, 0); /* nothing cached */
        check_replay(capacities[i], 1);
    }
}

static void test_extend_numbers(void **state)
{
    (void)state;
    mla_config c = world_config();
    world *w = world_make(c, false);
    set_lengths(0, 20, 0, 0, 0, 11);
    assert_ok(init_extend(w, 3), &diag);
    mla_forward_extend_args a = extend_args(31);
    int64_t t = 0;
    for (int32_t r = 0; r < 3; r++)
        for (int32_t p = 0; p < fresh[r]; p++, t++) {
            world_random(q_rows + t * H * L, H * L, (uint32_t)(r * 1000 + p) + 777777);
            key_of(r, p, k_rows + t * H * L, v_rows + t * H * V);
        }
    assert_ok(mla_backend_forward_extend(w->backend, &plain_layer, &a, &diag), &diag);
    t = 0;
    for (int32_t r = 0; r < 3; r++)
        for (int32_t p = 0; p < fresh[r]; p++, t++) {
            double want[H * V], want_lse[H];
            expected(r, p, c.softmax_scale, want, want_lse);
            for (int i = 0; i < H * V; i++)
                assert_true(fabs((double)out_rows[t * H * V + i] - want[i]) < 2e-6);
        }
    world_end(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_extend),         cmocka_unit_test(test_chunked_parameters),
        cmocka_unit_test(test_chunked_fp8),    cmocka_unit_test(test_recorded_chunks),
        cmocka_unit_test(test_forward),        cmocka_unit_test(test_replay_equals_one_softmax),
        cmocka_unit_test(test_extend_numbers),
    };
    return cmocka_run_group_tests_name("backend_extend", tests, NULL, NULL);
}
