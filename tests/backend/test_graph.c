/*
 * Captured steps: buffers with fixed addresses, a solution and a capacity fixed at capture, replays
 * that equal eager calls bit for bit, and every refusal. Slots that hold no live row are NaN.
 */
#include "backend/world.h"
#include <math.h>

enum { H = 2, R = 8, P = 4, D = R + P, S = 2, BS = 8 };

static float q_rows[BS * S * H * D];
static const mla_layer plain_layer = MLA_LAYER_INIT;
static const int64_t sentinel = WORLD_REQUESTS;

static mla_tensor table_of(world *w)
{
    return mla_tensor_2d(w->table, MLA_FORMAT_I32, WORLD_REQUESTS + 1, WORLD_COLUMNS);
}

static mla_forward_decode_args make_args(int32_t bs, int64_t tokens, float *out)
{
    mla_forward_decode_args a = MLA_FORWARD_DECODE_ARGS_INIT;
    a.bs = bs;
    a.save_kv_cache = 0;
    a.q = mla_tensor_3d(q_rows, MLA_FORMAT_F32, tokens, H, D);
    a.out = mla_tensor_3d(out, MLA_FORMAT_F32, tokens, H, R);
    return a;
}

static void decode(world *w, int32_t bs, int64_t tokens, float *out)
{
    mla_forward_decode_args a = make_args(bs, tokens, out);
    assert_ok(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag), &diag);
}

static void capture(world *w, int32_t bs)
{
    assert_ok(
        mla_backend_init_forward_metadata_capture_graph(w->backend, bs, MLA_FORWARD_DECODE, &diag),
        &diag);
}

static mla_status replay(world *w, int32_t bs, int64_t *rows)
{
    return mla_backend_init_forward_metadata_replay_graph(
        w->backend, bs, mla_tensor_1d(rows, MLA_FORMAT_I64, bs), table_of(w), MLA_FORWARD_DECODE,
        NULL, &diag);
}

static void test_replay_equals_eager(void **state)
{
    (void)state;
    world *w = world_make(world_config(), false);
    static float captured[BS * S * H * R], replayed[BS * S * H * R], eager[BS * S * H * R];
    int32_t lens[BS];
    const int32_t live[3][5] = {{7, 64, 3, 200, 31}, {256, 2, 100, 65, 9}, {8, 65, 4, 201, 32}};
    for (int32_t r = 0; r < 5; r++)
        world_fill(w, r, 0, 256);
    assert_ok(mla_backend_init_graph_state(w->backend, BS, world_i32(lens, BS), &diag), &diag);
    for (int i = 0; i < BS; i++)
        lens[i] = mla_backend_graph_seq_len_fill_value();
    world_random(q_rows, BS * S * H * D, 3);
    capture(w, BS);
    decode(w, BS, BS * S, captured);
    const mla_decode_metadata *d = NULL;
    assert_ok(mla_backend_decode_metadata(w->backend, &d, &diag), &diag);
    const void *page_table = d->page_table.data;
    assert_ptr_equal(d->seq_lens.data, lens);
    for (int i = 0; i < BS * S * H * R; i++) /* zeroed table: page 0, which is zero and finite */
        assert_true(captured[i] == 0.0f);

    for (int round = 0; round < 3; round++) {
        int64_t rows[BS] = {4, 2, 0, 1, 3, sentinel, sentinel, sentinel};
        for (int i = 0; i < BS; i++)
            lens[i] = i < 5 ? live[round][i] : 1;
        world_random(q_rows, BS * S * H * D, 10 + (uint32_t)round);
        assert_ok(replay(w, BS, rows), &diag);
        assert_ok(mla_backend_decode_metadata(w->backend, &d, &diag), &diag);
        assert_ptr_equal(d->page_table.data, page_table);
        assert_ptr_equal(d->seq_lens.data, lens);
        decode(w, BS, BS * S, replayed);
        for (int i = 0; i < BS * S * H * R; i++)
            assert_true(isfinite(replayed[i]));

        mla_forward_batch batch = world_batch(w, BS, lens);
        batch.req_pool_indices = mla_tensor_1d(rows, MLA_FORMAT_I64, BS);
        assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
        decode(w, BS, BS * S, eager);
        assert_memory_equal(replayed, eager, sizeof eager);
        /* And as the five live requests alone. */
        batch.bs = 5;
        assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
        decode(w, 5, 5 * S, eager);
        assert_memory_equal(replayed, eager, sizeof(float) * 5 * S * H * R);
        for (int i = 5 * S * H * R; i < BS * S * H * R; i++)
            assert_true(replayed[i] == 0.0f);
    }
    world_end(w);
}

/* Lengths go through the buffer: bumped in place, no new init. */
static void test_bumped_in_place(void **state)
{
    (void)state;
    mla_config c = world_config();
    c.is_draft = 1;
    world *w = world_make(c, false);
    static float first[2 * H * R], second[2 * H * R], want[2 * H * R];
    int32_t lens[2] = {50, 17}, longer[2] = {51, 18};
    int64_t rows[2] = {0, 1};
    world_fill(w, 0, 0, 51);
    world_fill(w, 1, 0, 18);
    world_random(q_rows, 2 * H * D, 5);
    assert_ok(mla_backend_init_graph_state(w->backend, 2, world_i32(lens, 2), &diag), &diag);
    capture(w, 2);
    decode(w, 2, 2, first);
    assert_ok(replay(w, 2, rows), &diag);
    decode(w, 2, 2, first);
    lens[0]++;
    lens[1]++;
    decode(w, 2, 2, second);
    mla_forward_batch batch = world_batch(w, 2, longer);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    decode(w, 2, 2, want);
    assert_memory_equal(second, want, sizeof want);
    assert_memory_not_equal(first, second, sizeof first);
    /* A row past the length is never read: it may be NaN. */
    world_poison(w, 0, 51);
    decode(w, 2, 2, second);
    assert_memory_equal(second, want, sizeof want);
    world_end(w);
}

static void test_solution_stays(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    assert_ok(spy_add_twins(w->ctx, &diag), &diag);
    assert_ok(mla_backend_set_solution(w->backend, NULL, &diag), &diag); /* rows were added */
    static float out[4 * H * R];
    int32_t lens[2] = {9, 9};
    int64_t rows[2] = {0, 1};
    assert_ok(mla_backend_init_graph_state(w->backend, 2, world_i32(lens, 2), &diag), &diag);
    spy_prefer_twin('a');
    capture(w, 2);
    decode(w, 2, 4, out);
    assert_int_equal(spy_last_twin, 'a');
    spy_prefer_twin('b'); /* from here on b is what a new choice would take */
    decode(w, 2, 4, out);
    assert_int_equal(spy_last_twin, 'a'); /* the same kind of call, remembered */
    decode(w, 2, 2, out);
    assert_int_equal(spy_last_twin, 'b'); /* another kind, chosen now */
    for (int i = 0; i < 2; i++) {
        spy_prefer_twin(i == 0 ? 'a' : 'b');
        assert_ok(replay(w, 2, rows), &diag);
        decode(w, 2, 4, out);
        assert_int_equal(spy_last_twin, 'a');
        decode(w, 2, 2, out);
        assert_int_equal(spy_last_twin, 'b');
    }
    /* Eager calls choose again. */
    mla_forward_batch batch = world_batch(w, 2, lens);
    assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);
    decode(w, 2, 4, out);
    assert_int_equal(spy_last_twin, 'b');
    /* So does the same batch size captured again. */
    capture(w, 2);
    decode(w, 2, 4, out);
    assert_int_equal(spy_last_twin, 'b');
    /* What was not captured is not replayed. */
    assert_ok(replay(w, 2, rows), &diag);
    mla_forward_decode_args a = make_args(2, 2, out);
    assert_fails(mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag),
                 MLA_ERROR_STATE, &diag, "a decode of 2 tokens for bs 2");
    /* A forced name keeps too. */
    assert_ok(mla_backend_set_solution(w->backend, "decode_twin_a", &diag), &diag);
    assert_ok(replay(w, 2, rows), &diag);
    decode(w, 2, 4, out);
    assert_int_equal(spy_last_twin, 'b');
    world_end(w);
}

static void test_too_many_kinds(void **state)
{
    (void)state;
    mla_config c = world_config();
    c.max_tokens = 64;
    world *w = world_make(c, true);
    static float out[64 * H * R];
    static float q[64 * H * D];
    int32_t lens[1] = {99};
    assert_ok(mla_backend_init_graph_state(w->backend, 1, world_i32(lens, 1), &diag), &diag);
    capture(w, 1);
    for (int64_t tokens = 1; tokens <= 17; tokens++) {
        mla_forward_decode_args a = make_args(1, tokens, out);
        a.q = mla_tensor_3d(q, MLA_FORMAT_F32, tokens, H, D);
        mla_status status =
            mla_backend_forward_decode(w->backend, &plain_layer, w->pool, &a, &diag);
        assert_int_equal(status, tokens <= 16 ? MLA_OK : MLA_ERROR_CAPACITY);
    }
    world_end(w);
}

static void test_refusals(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    mla_backend *b = w->backend;
    int32_t lens[BS] = {1, 1, 1, 1, 1, 1, 1, 1};
    int64_t rows[BS] = {0, 1, 2, 3, 4, 5, 6, 7};
    mla_tensor t_lens = world_i32(lens, BS);
    assert_int_equal(mla_backend_graph_seq_len_fill_value(), 1);
    assert_fails(mla_backend_init_forward_metadata_capture_graph(b, 2, MLA_FORWARD_DECODE, &diag),
                 MLA_ERROR_STATE, &diag, "no graph state");
    assert_fails(replay(w, 2, rows), MLA_ERROR_STATE, &diag, "no graph state");
    assert_fails(mla_backend_init_graph_state(b, 0, t_lens, &diag), MLA_ERROR_ARGUMENT, &diag,
                 "max_bs is 0");
    assert_fails(mla_backend_init_graph_state(b, 9, t_lens, &diag), MLA_ERROR_CAPACITY, &diag,
                 "max_bs 8");
    assert_fails(mla_backend_init_graph_state(b, 8, world_i32(lens, 7), &diag), MLA_ERROR_SHAPE,
                 &diag, "seq_lens_buf has 7 entries");
    assert_fails(mla_backend_init_graph_state(b, 4, mla_tensor_1d(rows, MLA_FORMAT_I64, 8), &diag),
                 MLA_ERROR_FORMAT, &diag, "seq_lens_buf");
    assert_fails(
        mla_backend_init_graph_state(b, 4, mla_tensor_2d(lens, MLA_FORMAT_I32, 4, 2), &diag),
        MLA_ERROR_SHAPE, &diag, "seq_lens_buf");
    assert_fails(
        mla_backend_init_graph_state(b, 4, mla_tensor_on(t_lens, MLA_DEVICE_CUDA, 0), &diag),
        MLA_ERROR_DEVICE, &diag, "seq_lens_buf");
    assert_ok(mla_backend_init_graph_state(b, 6, t_lens, &diag), &diag);

    assert_fails(mla_backend_init_forward_metadata_capture_graph(b, 2, MLA_FORWARD_EXTEND, &diag),
                 MLA_ERROR_UNSUPPORTED, &diag, "extend");
    assert_fails(mla_backend_init_forward_metadata_capture_graph(b, 2, MLA_FORWARD_MIXED, &diag),
                 MLA_ERROR_UNSUPPORTED, &diag, "mixed");
    assert_fails(mla_backend_init_forward_metadata_capture_graph(b, 0, MLA_FORWARD_DECODE, &diag),
                 MLA_ERROR_ARGUMENT, &diag, "bs is 0");
    assert_fails(mla_backend_init_forward_metadata_capture_graph(b, 7, MLA_FORWARD_DECODE, &diag),
                 MLA_ERROR_CAPACITY, &diag, "max_bs 6");
    assert_fails(mla_backend_init_forward_metadata_capture_graph(b, 2, 9, &diag),
                 MLA_ERROR_ARGUMENT, &diag, "forward_mode is 9");
    capture(w, 2);
    capture(w, 4);
    const mla_decode_metadata *d = NULL;
    assert_fails(replay(w, 3, rows), MLA_ERROR_NOT_FOUND, &diag, "captured: 2 4");
    assert_fails(mla_backend_decode_metadata(b, &d, &diag), MLA_ERROR_STATE, &diag, "not defined");
    assert_ok(replay(w, 4, rows), &diag);
    assert_fails(
        mla_backend_init_forward_metadata_replay_graph(b, 4, mla_tensor_1d(rows, MLA_FORMAT_I64, 4),
                                                       table_of(w), MLA_FORWARD_MIXED, NULL, &diag),
        MLA_ERROR_UNSUPPORTED, &diag, "mixed");
    mla_tensor narrow = table_of(w);
    narrow.shape[1] = WORLD_COLUMNS - 1;
    assert_fails(mla_backend_init_forward_metadata_replay_graph(
                     b, 4, mla_tensor_1d(rows, MLA_FORMAT_I64, 4), narrow, 0, NULL, &diag),
                 MLA_ERROR_SHAPE, &diag, "req_to_page has 63 columns");
    assert_fails(mla_backend_init_forward_metadata_replay_graph(
                     b, 4, mla_tensor_1d(rows, MLA_FORMAT_I64, 3), table_of(w), 0, NULL, &diag),
                 MLA_ERROR_SHAPE, &diag, "req_pool_indices has 3 entries");
    rows[1] = 9;
    assert_fails(replay(w, 4, rows), MLA_ERROR_CAPACITY, &diag, "req_pool_indices[1] is 9");
    rows[1] = 1;
    lens[3] = 257;
    assert_fails(replay(w, 4, rows), MLA_ERROR_CAPACITY, &diag, "context_len is 256");
    lens[3] = -1;
    assert_fails(replay(w, 4, rows), MLA_ERROR_ARGUMENT, &diag, "seq_lens[3] is -1");
    assert_ok(replay(w, 2, rows), &diag); /* row 3 is none of its */
    lens[3] = 1;
    assert_fails(mla_backend_prefill_metadata(b, &(const mla_prefill_metadata *){NULL}, &diag),
                 MLA_ERROR_STATE, &diag, "not defined");
    /* Replay ends scopes, as init does. */
    assert_ok(mla_backend_push_num_extends(b, 1, &diag), &diag);
    assert_ok(replay(w, 4, rows), &diag);
    assert_ok(mla_backend_decode_metadata(b, &d, &diag), &diag);
    assert_int_equal(d->num_extends, 0);
    assert_fails(mla_backend_pop_num_extends(b, &diag), MLA_ERROR_STATE, &diag, "no scope");
    /* A new graph state forgets what was captured, and the metadata that viewed it. */
    assert_ok(mla_backend_init_graph_state(b, 6, t_lens, &diag), &diag);
    assert_fails(mla_backend_decode_metadata(b, &d, &diag), MLA_ERROR_STATE, &diag, "not defined");
    assert_fails(replay(w, 4, rows), MLA_ERROR_NOT_FOUND, &diag, "captured: none");
    world_end(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_replay_equals_eager),
        cmocka_unit_test(test_bumped_in_place),
        cmocka_unit_test(test_solution_stays),
        cmocka_unit_test(test_too_many_kinds),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests_name("backend_graph", tests, NULL, NULL);
}
