/*
 * The same for prefill and for the operators on rows: prefill rows keep their bits whatever the
 * batch, the order, the strides, the host's bounds, the threads, and whether a request's queries
 * come in one call or several. Every operator gives the same bytes for any number of threads and
 * any order of tasks. Rows written one by one, in any order, make the same cache as rows written at
 * once, and rope_write is rope followed by write.
 */
#include "oracle/compare.h"
#include "oracle/numeric.h"
#include "oracle/operators.h"
#include "oracle/operators_cache.h"
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_SEEDS 8

static mla_context *context;

/* ---- prefill --------------------------------------------------------------------------------- */

static prefill_problem *result_of(const prefill_shape *s, const char *row, uint64_t seed)
{
    char why[1200] = "";
    prefill_problem *p = prefill_problem_make(s, seed);
    if (!operator_run(context, &prefill_operator, &p->base, row, why, sizeof why))
        fail_msg("%s: %s\n  %s, seed %llu", row, why, p->base.text, (unsigned long long)seed);
    return p;
}

static void assert_same_row(const prefill_problem *p, int64_t tp, const prefill_problem *q,
                            int64_t tq, const char *row, const char *what)
{
    size_t bytes = (size_t)p->shape.v_head_dim * (size_t)mla_format_bytes(p->shape.out_format);
    bool by_bits = operator_keeps_bits(row);
    for (int32_t h = 0; h < p->shape.heads; h++) {
        const void *x = numeric_address(&p->params.out, tp, h, 0, 0);
        const void *y = numeric_address(&q->params.out, tq, h, 0, 0);
        bool ok = by_bits ? memcmp(x, y, bytes) == 0
                          : compare_near(x, y, p->shape.out_format, p->shape.v_head_dim);
        if (ok && p->params.lse.rank && q->params.lse.rank) {
            double lx = numeric_at(&p->params.lse, tp, h, 0, 0);
            double ly = numeric_at(&q->params.lse, tq, h, 0, 0);
            ok = lx == ly || (!by_bits && fabs(lx - ly) < 1e-4);
        }
        if (!ok)
            fail_msg("%s changes the bits of %s: token %lld head %d\n  %s\n  %s, seed %llu", what,
                     row, (long long)tp, h, p->base.text, q->base.text,
                     (unsigned long long)p->base.seed);
    }
}

static int64_t first_token(const prefill_shape *s, int32_t b)
{
    int64_t token = 0;
    for (int32_t i = 0; i < b; i++)
        token += s->q_len[i];
    return token;
}

/* Several blocks of rows come to the same keys, which a kernel may pack for all of them. */
static prefill_shape shared_keys_shape(void)
{
    prefill_shape s = prefill_shape_make();
    const int32_t q_len[] = {300, 170}, kv_len[] = {555, 170};
    prefill_shape_lengths(&s, 2, q_len, kv_len);
    s.heads = 3;
    s.kv_heads = 1;
    s.q_format = s.kv_format = s.out_format = MLA_FORMAT_BF16;
    return s;
}

static prefill_shape shape_of(uint64_t seed)
{
    if (seed > N_SEEDS)
        return shared_keys_shape();
    prefill_shape s = prefill_shape_random(seed + 500);
    if (scene_device() && seed % 2 == 0)
        s = prefill_shape_usual(seed + 500);
    s.has_lse = 1;
    s.batch = s.batch > 4 ? 4 : s.batch;
    if (s.heads > 24)
        s.heads = s.kv_heads = 6;
    for (int32_t b = 0; b < s.batch; b++) {
        s.q_len[b] = s.q_len[b] > 200 ? 200 : s.q_len[b];
        s.kv_len[b] = s.kv_len[b] > 600 ? 600 : s.kv_len[b];
    }
    return s;
}

typedef void (*relation)(const prefill_shape *s, const char *row, uint64_t seed);

static void for_all(relation check)
{
    operator_rows rows = operator_rows_here(context, MLA_OP_PREFILL, NULL);
    for (uint64_t seed = 1; seed <= N_SEEDS + 1; seed++) {
        prefill_shape s = shape_of(seed);
        prefill_problem *p = prefill_problem_make(&s, seed);
        for (int32_t i = 0; i < rows.n; i++)
            if (operator_accepts(context, &prefill_operator, &p->base, rows.name[i]))
                check(&s, rows.name[i], seed);
        prefill_problem_free(p);
    }
}

static void placement(const prefill_shape *s, const char *row, uint64_t seed)
{
    prefill_problem *p = result_of(s, row, seed);
    prefill_shape moved = *s;
    moved.placement_seed += 99;
    moved.layout = (scene_layout)((s->layout + 1) % 3);
    if (!operator_keeps_bits(row)) /* which takes aligned operands */
        moved.layout = s->layout == SCENE_PACKED ? SCENE_ALIGNED : SCENE_PACKED;
    moved.max_mode = (s->max_mode + 1) % 3;
    moved.has_lse = 0;
    prefill_problem *q = result_of(&moved, row, seed);
    for (int64_t t = 0; t < first_token(s, s->batch); t++)
        assert_same_row(p, t, q, t, row, "moving memory and bounds");
    prefill_problem_free(p);
    prefill_problem_free(q);
}

static void batch_order(const prefill_shape *s, const char *row, uint64_t seed)
{
    prefill_problem *p = result_of(s, row, seed);
    prefill_shape turned = *s;
    for (int32_t b = 0; b < s->batch; b++) {
        turned.identity[b] = s->identity[s->batch - 1 - b];
        turned.q_len[b] = s->q_len[s->batch - 1 - b];
        turned.kv_len[b] = s->kv_len[s->batch - 1 - b];
    }
    prefill_problem *q = result_of(&turned, row, seed);
    for (int32_t b = 0; b < s->batch; b++)
        for (int32_t i = 0; i < s->q_len[b]; i++)
            assert_same_row(p, first_token(s, b) + i, q, first_token(&turned, s->batch - 1 - b) + i,
                            row, "turning the batch around");
    prefill_problem_free(p);
    prefill_problem_free(q);
}

/* A request alone, and its queries in two calls: the second half sees all keys, the first fewer. */
static void alone_and_in_halves(const prefill_shape *s, const char *row, uint64_t seed)
{
    prefill_problem *p = result_of(s, row, seed);
    for (int32_t b = 0; b < s->batch; b++) {
        prefill_shape part = *s;
        part.batch = 1;
        part.identity[0] = s->identity[b];
        part.q_len[0] = s->q_len[b];
        part.kv_len[0] = s->kv_len[b];
        prefill_problem *q = result_of(&part, row, seed);
        for (int32_t i = 0; i < s->q_len[b]; i++)
            assert_same_row(p, first_token(s, b) + i, q, i, row, "being alone");
        prefill_problem_free(q);
        if (s->kv_len[b] < s->q_len[b] || s->q_len[b] < 2)
            continue; /* the bottom-right rule makes halves differ */
        int32_t half = s->q_len[b] / 2 + 1;
        part.q_len[0] = s->q_len[b] - half;
        part.query_first[0] = half;
        q = result_of(&part, row, seed);
        for (int32_t i = 0; i < part.q_len[0]; i++)
            assert_same_row(p, first_token(s, b) + half + i, q, i, row, "leaving queries out");
        prefill_problem_free(q);
        if (!s->is_causal)
            continue;
        part.q_len[0] = half;
        part.query_first[0] = 0;
        part.kv_len[0] = s->kv_len[b] - (s->q_len[b] - half);
        q = result_of(&part, row, seed);
        for (int32_t i = 0; i < half; i++)
            assert_same_row(p, first_token(s, b) + i, q, i, row, "leaving later tokens out");
        prefill_problem_free(q);
    }
    prefill_problem_free(p);
}

/* NaN in the last key of each request reaches only the queries that see it. */
static void hidden_keys(const prefill_shape *s, const char *row, uint64_t seed)
{
    char why[1200] = "";
    if (!s->is_causal)
        return;
    prefill_problem *p = result_of(s, row, seed), *q = prefill_problem_make(s, seed);
    int64_t key = 0;
    for (int32_t b = 0; b < s->batch; b++) {
        key += s->kv_len[b];
        size_t bytes = (size_t)mla_format_bytes(s->kv_format);
        for (int32_t h = 0; h < s->kv_heads && s->kv_len[b] > 0; h++) {
            memset(numeric_address(&q->params.k, key - 1, h, 0, 0), 0xff,
                   (size_t)s->qk_head_dim * bytes);
            memset(numeric_address(&q->params.v, key - 1, h, 0, 0), 0xff,
                   (size_t)s->v_head_dim * bytes);
        }
    }
    scene_seal(&q->base.scene);
    if (!operator_run(context, &prefill_operator, &q->base, row, why, sizeof why))
        fail_msg("%s: %s", row, why);
    for (int32_t b = 0; b < s->batch; b++) {
        int32_t shift = s->kv_len[b] > s->q_len[b] ? s->kv_len[b] - s->q_len[b] : 0;
        for (int32_t i = 0; i < s->q_len[b] && i + shift < s->kv_len[b] - 1; i++)
            assert_same_row(p, first_token(s, b) + i, q, first_token(s, b) + i, row,
                            "NaN in a key that the query does not see");
    }
    prefill_problem_free(p);
    prefill_problem_free(q);
}

/* One key head for all query heads is the same as key heads that lie on top of each other. */
static void broadcast_heads(const prefill_shape *s, const char *row, uint64_t seed)
{
    char why[1200] = "";
    prefill_shape one = *s;
    one.kv_heads = 1;
    prefill_problem *p = result_of(&one, row, seed), *q = prefill_problem_make(&one, seed);
    q->params.k.shape[1] = q->params.v.shape[1] = s->heads;
    q->params.k.stride[1] = q->params.v.stride[1] = 0;
    if (!operator_accepts(context, &prefill_operator, &q->base, row)) {
        prefill_problem_free(p);
        prefill_problem_free(q);
        return;
    }
    if (!operator_run(context, &prefill_operator, &q->base, row, why, sizeof why))
        fail_msg("%s: %s", row, why);
    for (int64_t t = 0; t < first_token(s, s->batch); t++)
        assert_same_row(p, t, q, t, row, "broadcasting heads");
    prefill_problem_free(p);
    prefill_problem_free(q);
}

static void prefill_placement_changes_nothing(void **unused)
{
    (void)unused;
    for_all(placement);
}

static void prefill_batch_order_changes_nothing(void **unused)
{
    (void)unused;
    for_all(batch_order);
}

static void prefill_rows_stand_alone(void **unused)
{
    (void)unused;
    for_all(alone_and_in_halves);
}

static void prefill_hidden_keys_change_nothing(void **unused)
{
    (void)unused;
    for_all(hidden_keys);
}

static void prefill_broadcast_heads_change_nothing(void **unused)
{
    (void)unused;
    for_all(broadcast_heads);
}

/* ---- every operator, any threads ------------------------------------------------------------- */

static uint8_t *outputs_of(const scene *s, size_t *bytes)
{
    *bytes = 0;
    for (int32_t i = 0; i < s->n_blocks; i++)
        *bytes += s->blocks[i].role == SCENE_OUTPUT ? s->blocks[i].size : 0;
    uint8_t *copy = malloc(*bytes + 1), *at = copy;
    assert_non_null(copy);
    for (int32_t i = 0; i < s->n_blocks; i++) {
        if (s->blocks[i].role != SCENE_OUTPUT)
            continue;
        memcpy(at, s->blocks[i].bytes, s->blocks[i].size);
        at += s->blocks[i].size;
    }
    return copy;
}

static void threads_change_nothing(void **unused)
{
    (void)unused;
    static const operator_table *const operators[] = {
        &prefill_operator,    &merge_operator,  &write_operator,   &gather_operator, &rope_operator,
        &rope_write_operator, &absorb_operator, &project_operator, &pack_operator};
    static const int32_t counts[] = {1, 2, 3, 7, 0};
    char why[1200] = "";
    mla_context *contexts[5];
    for (int32_t c = 0; c < 5; c++)
        contexts[c] = operator_context(counts[c]);
    for (size_t o = 0; o < sizeof operators / sizeof operators[0]; o++)
        for (uint64_t seed = 1; seed <= 12; seed++) {
            problem_base *p = operators[o]->make(seed);
            operator_rows rows = operator_rows_here(context, operators[o]->op, NULL);
            for (int32_t i = 0; i < rows.n; i++) {
                if (!operator_accepts(context, operators[o], p, rows.name[i]))
                    continue;
                uint8_t *first = NULL;
                size_t bytes = 0;
                for (int32_t c = 0; c < 5; c++) {
                    if (!operator_run(contexts[c], operators[o], p, rows.name[i], why, sizeof why))
                        fail_msg("%s: %s\n  %s", rows.name[i], why, p->text);
                    uint8_t *now = outputs_of(&p->scene, &bytes);
                    if (first && memcmp(first, now, bytes) != 0)
                        fail_msg(
                            "%s gives other bits with %d threads (0: backwards)\n  %s, seed %llu",
                            rows.name[i], counts[c], p->text, (unsigned long long)seed);
                    free(first);
                    first = now;
                }
                free(first);
            }
            operators[o]->free(p);
        }
    for (int32_t c = 0; c < 5; c++)
        mla_context_destroy(contexts[c]);
}

/* ---- rows one by one ------------------------------------------------------------------------- */

static mla_write_kv_params write_params_of(const cache_problem *p)
{
    mla_write_kv_params q = MLA_WRITE_KV_PARAMS_INIT;
    q.flags = p->flags;
    q.k_scale = p->k_scale;
    q.latent = p->latent;
    q.rope = p->rope;
    q.slots = p->slots;
    q.kv_cache = p->kv_cache;
    q.kv_cache_rope = p->kv_cache_rope;
    q.kv_lora_rank = p->kv_lora_rank;
    q.qk_rope_head_dim = p->qk_rope_head_dim;
    return q;
}

/* Appending one token a call, or the last first, leaves the bytes that one call leaves. */
static void appending_equals_rebuilding(void **unused)
{
    (void)unused;
    char why[1200] = "";
    operator_rows rows = operator_rows_here(context, MLA_OP_WRITE, NULL);
    for (uint64_t seed = 1; seed <= 40; seed++) {
        cache_problem *p = cache_problem_make(MLA_OP_WRITE, seed);
        for (int32_t i = 0; i < rows.n; i++) {
            size_t bytes = 0;
            if (!operator_accepts(context, &write_operator, &p->base, rows.name[i]))
                continue;
            if (!operator_run(context, &write_operator, &p->base, rows.name[i], why, sizeof why))
                fail_msg("%s: %s\n  %s", rows.name[i], why, p->base.text);
            uint8_t *at_once = outputs_of(&p->base.scene, &bytes);
            scene_reset(&p->base.scene);
            for (int32_t t = p->tokens - 1; t >= 0; t--) {
                mla_write_kv_params q = write_params_of(p);
                mla_diag diag = {{0}};
                q.latent = mla_tensor_slice(p->latent, 0, t, 1);
                if (p->rope.rank)
                    q.rope = mla_tensor_slice(p->rope, 0, t, 1);
                q.slots = mla_tensor_slice(p->slots, 0, t, 1);
                q.call.solution = rows.name[i];
                if (mla_write_kv(context, &q, &diag) != MLA_OK)
                    fail_msg("%s: %s", rows.name[i], diag.text);
            }
            uint8_t *one_by_one = outputs_of(&p->base.scene, &bytes);
            if (memcmp(at_once, one_by_one, bytes) != 0)
                fail_msg("%s: appending and rebuilding differ\n  %s", rows.name[i], p->base.text);
            free(at_once);
            free(one_by_one);
        }
        scene_free(&p->base.scene);
        free(p);
    }
}

/* All padded tokens of a step write to slot 0: it has to hold one row, not parts of several. */
static void equal_slots_hold_one_of_the_rows(void **unused)
{
    (void)unused;
    enum { TOKENS = 600, WIDTH = 576 };
    static float rows_in[TOKENS][WIDTH], pool[WIDTH];
    static int32_t slots[TOKENS];
    for (int32_t t = 0; t < TOKENS; t++)
        for (int32_t d = 0; d < WIDTH; d++)
            rows_in[t][d] = (float)(t + 1);
    mla_context *many = operator_context(7);
    operator_rows rows = operator_rows_here(many, MLA_OP_WRITE, NULL);
    for (int32_t i = 0; i < 40 * rows.n; i++) {
        mla_diag diag = {{0}};
        mla_write_kv_params q = MLA_WRITE_KV_PARAMS_INIT;
        q.latent = mla_tensor_2d(rows_in, MLA_FORMAT_F32, TOKENS, WIDTH);
        q.slots = mla_tensor_1d(slots, MLA_FORMAT_I32, TOKENS);
        q.kv_cache = mla_tensor_3d(pool, MLA_FORMAT_F32, 1, 1, WIDTH);
        q.kv_lora_rank = 512;
        q.qk_rope_head_dim = 64;
        q.call.solution = rows.name[i % rows.n];
        if (mla_write_kv(many, &q, &diag) != MLA_OK)
            fail_msg("%s", diag.text);
        for (int32_t d = 1; d < WIDTH; d++)
            if (pool[d] != pool[0])
                fail_msg("%s: slot 0 holds parts of rows %d and %d", rows.name[i % rows.n],
                         (int)pool[0], (int)pool[d]);
        assert_true(pool[0] >= 1.0f && pool[0] <= (float)TOKENS);
    }
    mla_context_destroy(many);
}

/* rope_write = rope of q_pe, rope of k_pe to f32, write of both. f32 rows only: write takes latent
 * and rope in one format, and the rotated key must not be rounded on the way. */
static void rope_write_equals_rope_then_write(void **unused)
{
    (void)unused;
    char why[1200] = "";
    int32_t tried = 0;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        cache_problem *p = cache_problem_make(MLA_OP_ROPE_WRITE, seed);
        bool in_place = p->k_pe_out.rank && p->k_pe_out.data == p->rope.data;
        if (p->row_format != MLA_FORMAT_F32 || p->tokens == 0 || in_place) {
            scene_free(&p->base.scene);
            free(p);
            continue;
        }
        operator_rows families = operator_families_here(context, MLA_OP_ROPE_WRITE);
        for (int32_t f = 0; f < families.n; f++) {
            if (!operator_accepts(context, &rope_write_operator, &p->base, families.name[f]))
                continue;
            mla_call call = {.solution = families.name[f]};
            mla_diag diag = {{0}};
            size_t bytes = 0;
            if (!operator_run(context, &rope_write_operator, &p->base, families.name[f], why,
                              sizeof why))
                fail_msg("%s: %s\n  %s", families.name[f], why, p->base.text);
            uint8_t *joined = outputs_of(&p->base.scene, &bytes);
            scene_reset(&p->base.scene);
            float *key = malloc((size_t)(p->tokens * p->qk_rope_head_dim) * sizeof *key);
            assert_non_null(key);
            mla_rope_params rope = MLA_ROPE_PARAMS_INIT;
            rope.is_interleaved = p->is_interleaved;
            rope.positions = p->positions;
            rope.cos = p->cos;
            rope.sin = p->sin;
            rope.call = call;
            rope.x = p->rope;
            if (rope.x.rank == 3) { /* [T, 1, P] */
                rope.x.rank = 2;
                rope.x.shape[1] = rope.x.shape[2];
                rope.x.stride[1] = 1;
            }
            rope.out = mla_tensor_2d(key, MLA_FORMAT_F32, p->tokens, p->qk_rope_head_dim);
            if (mla_rope(context, &rope, &diag) != MLA_OK)
                fail_msg("%s", diag.text);
            mla_write_kv_params write = write_params_of(p);
            write.rope = rope.out;
            if (write.latent.rank == 3) {
                write.latent.rank = 2;
                write.latent.shape[1] = write.latent.shape[2];
                write.latent.stride[1] = 1;
            }
            write.call = call;
            if (mla_write_kv(context, &write, &diag) != MLA_OK)
                fail_msg("%s", diag.text);
            if (p->k_pe_out.rank) {
                rope.out = p->k_pe_out;
                if (rope.out.rank == 3) {
                    rope.out.rank = 2;
                    rope.out.shape[1] = rope.out.shape[2];
                    rope.out.stride[1] = 1;
                }
                if (mla_rope(context, &rope, &diag) != MLA_OK)
                    fail_msg("%s", diag.text);
            }
            if (p->q_pe.rank) {
                rope.x = p->q_pe;
                rope.out = p->q_pe_out;
                if (mla_rope(context, &rope, &diag) != MLA_OK)
                    fail_msg("%s", diag.text);
            }
            uint8_t *apart = outputs_of(&p->base.scene, &bytes);
            if (memcmp(joined, apart, bytes) != 0)
                fail_msg("%s: rope_write is not rope then write\n  %s, seed %llu", families.name[f],
                         p->base.text, (unsigned long long)seed);
            free(joined);
            free(apart);
            free(key);
            tried++;
        }
        scene_free(&p->base.scene);
        free(p);
    }
    assert_true(tried > 0);
}

int main(int argc, char **argv)
{
    operator_take_device(&argc, argv);
    context = operator_context(2);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prefill_placement_changes_nothing),
        cmocka_unit_test(prefill_batch_order_changes_nothing),
        cmocka_unit_test(prefill_rows_stand_alone),
        cmocka_unit_test(prefill_hidden_keys_change_nothing),
        cmocka_unit_test(prefill_broadcast_heads_change_nothing),
        cmocka_unit_test(threads_change_nothing),
        cmocka_unit_test(appending_equals_rebuilding),
        cmocka_unit_test(equal_slots_hold_one_of_the_rows),
        cmocka_unit_test(rope_write_equals_rope_then_write),
    };
    /* the first five run problems; the others call operators on the host's tensors themselves */
    const size_t n = scene_device() ? 5 : sizeof tests / sizeof tests[0];
    int failed = _cmocka_run_group_tests("invariance_rows", tests, n, NULL, NULL);
    mla_context_destroy(context);
    return failed;
}
