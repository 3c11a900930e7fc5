/*
 * What must not change a bit of a decode or extend row: page ids, strides and layouts, the batch's
 * order, batch mates, the number of threads and the order tasks run in, the table's width, the
 * host's length bound, what unused slots and hidden keys hold, whether an LSE is asked for, and
 * whether tokens are verified together or one by one. Each relation is tried for each row that
 * accepts the problem.
 */
#include "oracle/compare.h"
#include "oracle/numeric.h"
#include "oracle/operators.h"
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_SEEDS 7

static mla_context *context;

static const operator_table *operator_of(const decode_shape *s)
{
    return s->is_extend ? &extend_operator : &decode_operator;
}

/* Runs a shape by one row and gives its problem with the outputs in place; the caller frees. */
static decode_problem *result_of(mla_context *ctx, const decode_shape *s, const char *row,
                                 uint64_t seed)
{
    char why[1200] = "";
    decode_problem *p = decode_problem_make(s, seed);
    if (!operator_run(ctx, operator_of(s), &p->base, row, why, sizeof why))
        fail_msg("%s: %s\n  %s, seed %llu", row, why, p->base.text, (unsigned long long)seed);
    return p;
}

static int64_t first_token(const decode_problem *p, int32_t b)
{
    int64_t token = 0;
    for (int32_t i = 0; i < b; i++)
        token += p->shape.q_len[i];
    return token;
}

static bool is_same(const void *x, const void *y, int32_t format, int64_t n, bool by_bits)
{
    if (!by_bits)
        return compare_near(x, y, format, n);
    return memcmp(x, y, (size_t)(n * mla_format_bytes(format))) == 0;
}

/* Token ja of request a of p against token jb of request b of q. */
static void assert_equal_row(const decode_problem *p, int32_t a, int32_t ja,
                             const decode_problem *q, int32_t b, int32_t jb, const char *row,
                             bool by_bits, const char *what)
{
    int64_t ta = first_token(p, a) + ja, tb = first_token(q, b) + jb;
    for (int32_t h = 0; h < p->shape.heads; h++) {
        const void *x = oracle_out_row(&p->params.out, ta, h);
        const void *y = oracle_out_row(&q->params.out, tb, h);
        bool ok = is_same(x, y, p->shape.out_format, p->shape.kv_lora_rank, by_bits);
        if (ok && p->params.lse.rank && q->params.lse.rank) {
            double lx = oracle_lse_at(&p->params.lse, ta, h);
            double ly = oracle_lse_at(&q->params.lse, tb, h);
            ok = lx == ly || (!by_bits && fabs(lx - ly) < 1e-4);
        }
        if (!ok)
            fail_msg(
                "%s changes the bits of %s: request %d token %d head %d\n  %s\n  %s, seed %llu",
                what, row, a, ja, h, p->base.text, q->base.text, (unsigned long long)p->base.seed);
    }
}

static void assert_same_row(const decode_problem *p, int32_t a, int32_t ja, const decode_problem *q,
                            int32_t b, int32_t jb, const char *row, const char *what)
{
    assert_equal_row(p, a, ja, q, b, jb, row, operator_keeps_bits(row), what);
}

static void assert_same(const decode_problem *p, const decode_problem *q, const char *row,
                        const char *what)
{
    for (int32_t b = 0; b < p->shape.batch; b++)
        for (int32_t j = 0; j < p->shape.q_len[b]; j++)
            assert_same_row(p, b, j, q, b, j, row, what);
}

/* Random shapes, small enough to run many times; each third one long, for splits over threads. */
static decode_shape shape_of(uint64_t seed)
{
    decode_shape s = decode_shape_random(seed, seed % 4 == 3);
    if (scene_device() && seed > N_SEEDS / 2)
        s = decode_shape_usual(seed, seed % 4 == 3);
    s.heads = s.heads > 24 ? 17 : s.heads;
    s.batch = s.batch > 5 ? 5 : s.batch;
    s.shard_count = 0;
    s.has_lse = 1;
    for (int32_t b = 0; b < s.batch; b++) {
        s.q_len[b] = s.q_len[b] > 9 ? 9 : s.q_len[b];
        s.kv_len[b] = s.kv_len[b] > 700 ? 700 : s.kv_len[b];
    }
    if (seed % 3 == 0) {
        s.heads = s.heads > 3 ? 3 : s.heads;
        s.kv_len[0] = 6500;
        s.page_size = s.page_size < 16 ? 16 : s.page_size;
    }
    return s;
}

/* Calls a relation for each seed and each row that takes the seed's shape. */
typedef void (*relation)(const decode_shape *s, const char *row, uint64_t seed);

static void for_all(relation check)
{
    for (uint64_t seed = 1; seed <= N_SEEDS; seed++) {
        decode_shape s = shape_of(seed);
        decode_problem *p = decode_problem_make(&s, seed);
        operator_rows rows = operator_rows_here(context, operator_of(&s)->op, NULL);
        for (int32_t i = 0; i < rows.n; i++)
            if (operator_accepts(context, operator_of(&s), &p->base, rows.name[i]))
                check(&s, rows.name[i], seed);
        decode_problem_free(p);
    }
}

static void placement(const decode_shape *s, const char *row, uint64_t seed)
{
    decode_problem *p = result_of(context, s, row, seed);
    decode_shape moved = *s;
    moved.placement_seed += 99;
    moved.extra_pages += 11;
    moved.layout = (scene_layout)((s->layout + 1) % 3);
    moved.rank4_cache = !s->rank4_cache;
    if (s->kv_format != MLA_FORMAT_DS656 && s->qk_rope_head_dim > 0)
        moved.split_cache = !s->split_cache;
    if (s->qk_rope_head_dim > 0)
        moved.split_q = !s->split_q;
    if (!operator_keeps_bits(row)) { /* which takes aligned operands in one piece */
        moved.layout = s->layout == SCENE_PACKED ? SCENE_ALIGNED : SCENE_PACKED;
        moved.split_cache = moved.split_q = 0;
    }
    decode_problem *q = result_of(context, &moved, row, seed);
    assert_same(p, q, row, "moving pages and strides");
    decode_problem_free(p);
    decode_problem_free(q);
}

static void capacities(const decode_shape *s, const char *row, uint64_t seed)
{
    decode_problem *p = result_of(context, s, row, seed);
    decode_shape wide = *s;
    wide.extra_columns += 60;
    wide.max_seqlen_kv = s->max_seqlen_kv == 0 ? 5 : 0;
    decode_problem *q = result_of(context, &wide, row, seed);
    assert_same(p, q, row, "a wider table");
    decode_problem_free(q);
    wide.max_seqlen_kv = 100000;
    q = result_of(context, &wide, row, seed);
    assert_same(p, q, row, "a larger max_seqlen_kv");
    decode_problem_free(q);
    wide = *s;
    wide.has_lse = 0;
    q = result_of(context, &wide, row, seed);
    assert_same(p, q, row, "leaving the LSE out");
    decode_problem_free(q);
    decode_problem_free(p);
}

static void unused_slots(const decode_shape *s, const char *row, uint64_t seed)
{
    decode_problem *p = result_of(context, s, row, seed);
    decode_shape clean = *s;
    clean.clean = 1;
    decode_problem *q = result_of(context, &clean, row, seed);
    assert_same(p, q, row, "NaN in unused slots");
    decode_problem_free(p);
    decode_problem_free(q);
}

static void batch_order(const decode_shape *s, const char *row, uint64_t seed)
{
    decode_problem *p = result_of(context, s, row, seed);
    decode_shape turned = *s;
    for (int32_t b = 0; b < s->batch; b++) {
        int32_t from = s->batch - 1 - b;
        turned.identity[b] = s->identity[from];
        turned.q_len[b] = s->q_len[from];
        turned.kv_len[b] = s->kv_len[from];
    }
    decode_problem *q = result_of(context, &turned, row, seed);
    for (int32_t b = 0; b < s->batch; b++)
        for (int32_t j = 0; j < s->q_len[b]; j++)
            assert_same_row(p, b, j, q, s->batch - 1 - b, j, row, "turning the batch around");
    decode_problem_free(p);
    decode_problem_free(q);
}

static void batch_mates(const decode_shape *s, const char *row, uint64_t seed)
{
    decode_problem *p = result_of(context, s, row, seed);
    for (int32_t b = 0; b < s->batch; b++) {
        if (s->q_len[b] == 0)
            continue;
        decode_shape alone = *s;
        alone.batch = 1;
        alone.identity[0] = s->identity[b];
        alone.q_len[0] = s->q_len[b];
        alone.kv_len[0] = s->kv_len[b];
        alone.is_ragged = s->is_extend; /* uniform alone, ragged or not with mates */
        decode_problem *q = result_of(context, &alone, row, seed);
        for (int32_t j = 0; j < s->q_len[b]; j++)
            assert_same_row(p, b, j, q, 0, j, row, "being alone");
        decode_problem_free(q);
    }
    decode_problem_free(p);
}

static void threads(const decode_shape *s, const char *row, uint64_t seed)
{
    static const int32_t counts[] = {1, 2, 3, 7, 16, 0};
    decode_problem *p = result_of(context, s, row, seed);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        mla_context *other = operator_context(counts[i]);
        decode_problem *q = result_of(other, s, row, seed);
        assert_same(p, q, row, counts[i] ? "the number of threads" : "running tasks backwards");
        decode_problem_free(q);
        mla_context_destroy(other);
    }
    decode_problem_free(p);
}

static void repeated_runs(const decode_shape *s, const char *row, uint64_t seed)
{
    decode_problem *p = result_of(context, s, row, seed);
    for (int32_t i = 0; i < 3; i++) {
        decode_problem *q = result_of(context, s, row, seed);
        for (int32_t b = 0; b < s->batch; b++)
            for (int32_t j = 0; j < s->q_len[b]; j++)
                assert_equal_row(p, b, j, q, b, j, row, true, "running again");
        decode_problem_free(q);
    }
    decode_problem_free(p);
}

/* Token j of a verify of n sees len - n + 1 + j keys: one token with that length is the same. */
static void token_by_token(const decode_shape *s, const char *row, uint64_t seed)
{
    if (s->mask != PROBLEM_CAUSAL)
        return;
    decode_problem *p = result_of(context, s, row, seed);
    for (int32_t b = 0; b < s->batch; b++)
        for (int32_t j = 0; j < s->q_len[b]; j++) {
            int32_t offset =
                s->seqlen_offset == MLA_SEQLEN_OFFSET_VERIFY ? 1 - s->q_len[b] : s->seqlen_offset;
            int32_t visible = s->kv_len[b] + offset + j;
            decode_shape one = *s;
            one.batch = 1;
            one.identity[0] = s->identity[b];
            one.q_len[0] = 1;
            one.query_first[0] = j;
            one.kv_len[0] = visible > 0 ? visible : 0;
            one.seqlen_offset = MLA_SEQLEN_OFFSET_VERIFY;
            one.is_ragged = s->is_extend;
            decode_problem *q = result_of(context, &one, row, seed);
            /* a device chooses a block's size by a request's tokens, and with it the sums' order */
            assert_equal_row(p, b, j, q, 0, 0, row, !scene_device(), "going token by token");
            decode_problem_free(q);
        }
    decode_problem_free(p);
}

/* A mask that is a causal triangle is the verify rule. */
static void causal_mask(const decode_shape *s, const char *row, uint64_t seed)
{
    if (s->is_extend || s->mask != PROBLEM_CAUSAL || s->seqlen_offset != MLA_SEQLEN_OFFSET_VERIFY)
        return;
    decode_problem *p = result_of(context, s, row, seed);
    decode_shape masked = *s;
    masked.mask = PROBLEM_TREE;
    decode_problem *q = decode_problem_make(&masked, seed);
    if (!operator_accepts(context, &decode_operator, &q->base, row)) {
        decode_problem_free(p);
        decode_problem_free(q);
        return;
    }
    for (int32_t b = 0; b < s->batch; b++)
        for (int32_t j = 0; j < s->q_len[b]; j++)
            for (int32_t i = 0; i < s->q_len[b]; i++)
                *(uint8_t *)numeric_address(&q->params.mask, first_token(q, b) + j, i, 0, 0) =
                    i <= j;
    scene_seal(&q->base.scene);
    char why[1200] = "";
    if (!operator_run(context, &decode_operator, &q->base, row, why, sizeof why))
        fail_msg("%s: %s", row, why);
    assert_same(p, q, row, "a mask in place of is_causal");
    decode_problem_free(p);
    decode_problem_free(q);
}

/* NaN in a row that only some tokens of the request see leaves the others alone. */
static void hidden_keys(const decode_shape *s, const char *row, uint64_t seed)
{
    char why[1200] = "";
    if (!operator_keeps_bits(row))
        return; /* its tiles want finite keys: docs/kernels/cuda_testing.md */
    decode_problem *p = result_of(context, s, row, seed), *q = decode_problem_make(s, seed);
    int64_t bad[PROBLEM_MAX_BATCH];
    for (int32_t b = 0; b < s->batch; b++) {
        int64_t live = oracle_live_keys(&q->params, b, s->q_len[b]);
        bad[b] = live - 1;
        if (live <= 0 || s->q_len[b] == 0)
            continue;
        int64_t page_size = s->page_size;
        int32_t page =
            *(int32_t *)numeric_address(&q->params.page_table, b, bad[b] / page_size, 0, 0);
        const mla_tensor *cache = &q->params.kv_cache;
        memset(numeric_address(cache, page, bad[b] % page_size, 0, 0), 0xff,
               (size_t)(cache->shape[cache->rank - 1] * mla_format_bytes(cache->format)));
    }
    scene_seal(&q->base.scene);
    if (!operator_run(context, operator_of(s), &q->base, row, why, sizeof why))
        fail_msg("%s: %s", row, why);
    for (int32_t b = 0; b < s->batch; b++)
        for (int32_t j = 0; j < s->q_len[b]; j++)
            if (bad[b] < 0 || !oracle_sees(&q->params, b, j, s->q_len[b], bad[b]))
                assert_same_row(p, b, j, q, b, j, row, "NaN in a key that the token does not see");
    decode_problem_free(p);
    decode_problem_free(q);
}

#define RELATION_TEST(name, relation)                                                              \
    static void name(void **unused)                                                                \
    {                                                                                              \
        (void)unused;                                                                              \
        for_all(relation);                                                                         \
    }

RELATION_TEST(pages_strides_and_layouts_change_nothing, placement)
RELATION_TEST(capacities_change_nothing, capacities)
RELATION_TEST(unused_slots_change_nothing, unused_slots)
RELATION_TEST(batch_order_changes_nothing, batch_order)
RELATION_TEST(batch_mates_change_nothing, batch_mates)
RELATION_TEST(threads_change_nothing, threads)
RELATION_TEST(runs_are_repeatable, repeated_runs)
RELATION_TEST(verify_equals_token_by_token, token_by_token)
RELATION_TEST(causal_mask_equals_is_causal, causal_mask)
RELATION_TEST(hidden_keys_change_nothing, hidden_keys)

int main(int argc, char **argv)
{
    operator_take_device(&argc, argv);
    context = operator_context(2);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_strides_and_layouts_change_nothing),
        cmocka_unit_test(capacities_change_nothing),
        cmocka_unit_test(unused_slots_change_nothing),
        cmocka_unit_test(batch_order_changes_nothing),
        cmocka_unit_test(batch_mates_change_nothing),
        cmocka_unit_test(threads_change_nothing),
        cmocka_unit_test(runs_are_repeatable),
        cmocka_unit_test(verify_equals_token_by_token),
        cmocka_unit_test(causal_mask_equals_is_causal),
        cmocka_unit_test(hidden_keys_change_nothing),
    };
    int failed = cmocka_run_group_tests_name("invariance", tests, NULL, NULL);
    mla_context_destroy(context);
    return failed;
}
