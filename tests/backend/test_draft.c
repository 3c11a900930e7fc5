/*
 * A draft-and-verify loop as a speculative engine runs it, with the keys that every token sees
 * noted by the watching solution at every call.
 *
 * S = 3. Each round, for a request with c cached tokens:
 *   verify   target, seq_lens = c + S:       tokens see c + 1, c + 2, c + 3
 *   catch-up draft over the same S tokens, its length buffer at what the first one sees, c + 1
 *   accept a of the S tokens; cache_start = c + a
 *   first step trimmed to the accepted token: one row a request, length c + a
 *   steps 2 ..: length cache_start + 1, one more each step, bumped in place without a new init
 * The draft's metadata is initialised once a round; a mixed first step carries an extend, and the
 * later steps run over all requests in a scope of num_extends 0.
 */
#include "backend/world.h"

enum { H = 2, R = 8, P = 4, D = R + P, S = 3 };

static float q_rows[64 * H * D], out_rows[64 * H * R];
static const mla_layer plain_layer = MLA_LAYER_INIT;

typedef struct engine {
    world *target;
    mla_backend *draft;
    int32_t seq_lens[WORLD_REQUESTS];       /* the target's */
    int32_t draft_seq_lens[WORLD_REQUESTS]; /* the drafter's own, bumped in place */
} engine;

static engine make_engine(void)
{
    engine e = {0};
    mla_config c = world_config();
    c.speculative_num_draft_tokens = S;
    e.target = world_make(c, true);
    c.is_draft = 1;
    assert_ok(mla_backend_create(e.target->ctx, &c, &e.draft, &diag), &diag);
    return e;
}

static void end_engine(engine *e)
{
    mla_backend_destroy(e->draft);
    world_end(e->target);
}

/* One decode call; what its tokens saw must be `want`, request-major. */
static void step(engine *e, mla_backend *backend, int32_t bs, int64_t tokens, const int64_t *want)
{
    mla_forward_decode_args a = MLA_FORWARD_DECODE_ARGS_INIT;
    a.bs = bs;
    a.save_kv_cache = 0;
    a.q = mla_tensor_3d(q_rows, MLA_FORMAT_F32, tokens, H, D);
    a.out = mla_tensor_3d(out_rows, MLA_FORMAT_F32, tokens, H, R);
    int32_t before[2][WORLD_REQUESTS];
    memcpy(before[0], e->seq_lens, sizeof before[0]);
    memcpy(before[1], e->draft_seq_lens, sizeof before[1]);
    spy_forget();
    assert_ok(mla_backend_forward_decode(backend, &plain_layer, e->target->pool, &a, &diag), &diag);
    assert_int_equal(spy.n_calls, 1);
    assert_int_equal(spy.calls[0].n_tokens, tokens);
    for (int64_t i = 0; i < tokens; i++)
        assert_int_equal(spy.calls[0].bounds[i], want[i]);
    assert_memory_equal(before[0], e->seq_lens, sizeof before[0]);
    assert_memory_equal(before[1], e->draft_seq_lens, sizeof before[1]);
}

static void test_loop(void **state)
{
    (void)state;
    engine e = make_engine();
    const int32_t accepts[4][3] = {{2, 1, 3}, {3, 3, 1}, {1, 2, 2}, {1, 1, 3}};
    int32_t cached[3] = {9, 60, 2};
    for (int round = 0; round < 4; round++) {
        const int32_t *accept = accepts[round];
        int64_t want[3 * S];

        for (int r = 0; r < 3; r++)
            e.seq_lens[r] = cached[r] + S;
        mla_forward_batch batch = world_batch(e.target, 3, e.seq_lens);
        assert_ok(mla_backend_init_forward_metadata(e.target->backend, &batch, &diag), &diag);
        for (int i = 0; i < 3 * S; i++)
            want[i] = cached[i / S] + 1 + i % S;
        step(&e, e.target->backend, 3, 3 * S, want);

        /* The drafter starts from the target's lengths, on its own buffer. */
        memcpy(e.draft_seq_lens, e.seq_lens, sizeof e.seq_lens);
        batch = world_batch(e.target, 3, e.draft_seq_lens);
        assert_ok(mla_backend_init_forward_metadata(e.draft, &batch, &diag), &diag);

        if (round % 2 == 0) { /* catch-up over all S tokens: what the first one sees */
            for (int r = 0; r < 3; r++)
                e.draft_seq_lens[r] = cached[r] + 1;
            step(&e, e.draft, 3, 3 * S, want);
        } else { /* trimmed by S - accept, one selected row a request */
            for (int r = 0; r < 3; r++) {
                e.draft_seq_lens[r] -= S - accept[r];
                want[r] = cached[r] + accept[r];
            }
            step(&e, e.draft, 3, 3, want);
        }
        for (int r = 0; r < 3; r++)
            e.draft_seq_lens[r] = cached[r] + accept[r] + 1;
        for (int later = 1; later < S; later++) {
            for (int r = 0; r < 3; r++)
                want[r] = cached[r] + accept[r] + later;
            step(&e, e.draft, 3, 3, want);
            for (int r = 0; r < 3; r++)
                e.draft_seq_lens[r]++;
        }
        for (int r = 0; r < 3; r++)
            cached[r] += accept[r];
    }
    assert_int_equal(cached[0], 16);
    end_engine(&e);
}

/* Request 0 extends by 4 after a prefix of 3; requests 1 and 2 decode. */
static void test_mixed_first_step(void **state)
{
    (void)state;
    engine e = make_engine();
    int32_t cached[3] = {3, 20, 50}, accept[3] = {0, 2, 1}, fresh[] = {4}, prefix[] = {3};
    int64_t want[8];
    e.seq_lens[0] = 7;
    e.seq_lens[1] = 20 + S;
    e.seq_lens[2] = 50 + S;
    mla_forward_batch batch = world_batch(e.target, 3, e.seq_lens);
    batch.forward_mode = MLA_FORWARD_MIXED;
    batch.num_extends = 1;
    batch.extend_seq_lens = world_i32(fresh, 1);
    batch.extend_prefix_lens = world_i32(prefix, 1);
    assert_ok(mla_backend_init_forward_metadata(e.target->backend, &batch, &diag), &diag);
    for (int i = 0; i < 2 * S; i++)
        want[i] = cached[1 + i / S] + 1 + i % S;
    step(&e, e.target->backend, 2, 2 * S, want);

    memcpy(e.draft_seq_lens, e.seq_lens, sizeof e.seq_lens);
    batch.seq_lens = world_i32(e.draft_seq_lens, 3);
    assert_ok(mla_backend_init_forward_metadata(e.draft, &batch, &diag), &diag);
    /* First step: decode rows trimmed, extends keep their whole length, one row for each. */
    assert_ok(mla_backend_push_num_extends(e.draft, 0, &diag), &diag);
    for (int r = 1; r < 3; r++)
        e.draft_seq_lens[r] -= S - accept[r];
    step(&e, e.draft, 3, 3, (int64_t[]){7, 22, 51});
    e.draft_seq_lens[0] = 7 + 1;
    e.draft_seq_lens[1] = 22 + 1;
    e.draft_seq_lens[2] = 51 + 1;
    for (int later = 1; later < S; later++) {
        step(&e, e.draft, 3, 3, (int64_t[]){7 + later, 22 + later, 51 + later});
        for (int r = 0; r < 3; r++)
            e.draft_seq_lens[r]++;
    }
    assert_ok(mla_backend_pop_num_extends(e.draft, &diag), &diag);
    const mla_decode_metadata *d = NULL;
    assert_ok(mla_backend_decode_metadata(e.draft, &d, &diag), &diag);
    assert_int_equal(d->num_extends, 1);
    end_engine(&e);
}

/* The draft's extend defines decode metadata too: one init serves its prefill and later steps. */
static void test_extend_then_steps(void **state)
{
    (void)state;
    engine e = make_engine();
    int32_t fresh[] = {4, 9}, prefix[] = {3, 0};
    e.draft_seq_lens[0] = 7;
    e.draft_seq_lens[1] = 9;
    mla_forward_batch batch = world_batch(e.target, 2, e.draft_seq_lens);
    batch.forward_mode = MLA_FORWARD_EXTEND;
    batch.num_extends = 2;
    batch.extend_seq_lens = world_i32(fresh, 2);
    batch.extend_prefix_lens = world_i32(prefix, 2);
    assert_ok(mla_backend_init_forward_metadata(e.draft, &batch, &diag), &diag);
    const mla_prefill_metadata *p = NULL;
    assert_ok(mla_backend_prefill_metadata(e.draft, &p, &diag), &diag);
    assert_int_equal(p->max_extend_seq_len, 9);
    assert_ok(mla_backend_push_num_extends(e.draft, 0, &diag), &diag);
    for (int later = 1; later < S; later++) {
        e.draft_seq_lens[0]++;
        e.draft_seq_lens[1]++;
        step(&e, e.draft, 2, 2, (int64_t[]){7 + later, 9 + later});
    }
    end_engine(&e);
}

/* The same loop in a captured step: contents change, addresses do not. */
static void test_loop_in_a_graph(void **state)
{
    (void)state;
    engine e = make_engine();
    const int32_t sentinel = WORLD_REQUESTS;
    int64_t rows[4] = {0, 1, 2, sentinel};
    assert_ok(mla_backend_init_graph_state(e.draft, 4, world_i32(e.draft_seq_lens, 8), &diag),
              &diag);
    for (int r = 0; r < 4; r++)
        e.draft_seq_lens[r] = mla_backend_graph_seq_len_fill_value();
    assert_ok(
        mla_backend_init_forward_metadata_capture_graph(e.draft, 4, MLA_FORWARD_DECODE, &diag),
        &diag);
    step(&e, e.draft, 4, 4, (int64_t[]){1, 1, 1, 1});
    for (int round = 0; round < 3; round++) {
        int32_t start[3] = {10 + round, 30 + 2 * round, 60 + 3 * round};
        for (int r = 0; r < 3; r++)
            e.draft_seq_lens[r] = start[r] + 1;
        assert_ok(
            mla_backend_init_forward_metadata_replay_graph(
                e.draft, 4, mla_tensor_1d(rows, MLA_FORMAT_I64, 4),
                mla_tensor_2d(e.target->table, MLA_FORMAT_I32, WORLD_REQUESTS + 1, WORLD_COLUMNS),
                MLA_FORWARD_DECODE, NULL, &diag),
            &diag);
        for (int later = 1; later < S; later++) {
            step(&e, e.draft, 4, 4,
                 (int64_t[]){start[0] + later, start[1] + later, start[2] + later, 1});
            assert_int_equal(spy.calls[0].pages[1], e.target->table[1][0]);
            assert_int_equal(spy.calls[0].pages[3], 0); /* padding reads page 0 */
            for (int r = 0; r < 3; r++)
                e.draft_seq_lens[r]++;
        }
    }
    end_engine(&e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_loop),
        cmocka_unit_test(test_mixed_first_step),
        cmocka_unit_test(test_extend_then_steps),
        cmocka_unit_test(test_loop_in_a_graph),
    };
    return cmocka_run_group_tests_name("backend_draft", tests, NULL, NULL);
}
