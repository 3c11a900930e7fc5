/*
 * Calls that went wrong in other MLA libraries, by their number in a log of public reports: merges
 * of empty states and bases of LSEs, empty batches of every operator, arguments that contradict
 * each other, and pools whose offsets pass 2^31 elements and 2^32 bytes (in address space that is
 * never touched but for a few rows). The attention inputs are in test_public_reports.c.
 */
#include "oracle/compare.h"
#include "oracle/numeric.h"
#include "oracle/operators.h"
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static mla_context *context;

static void must(mla_status status, const mla_diag *diag)
{
    if (status != MLA_OK)
        fail_msg("%s: %s", mla_status_name(status), diag->text);
}

/* ---- merges ---------------------------------------------------------------------------------- */

#define WIDTH 19

typedef struct states {
    float out[4][WIDTH], lse[4];
    float merged[WIDTH], merged_lse;
} states;

/* Merges n states of one token and head, by one row, in place or not. */
static void merge(states *s, int32_t n, const char *row, bool in_place)
{
    mla_tensor outs[4], lses[4];
    mla_diag diag = {{0}};
    float *out = in_place ? s->out[0] : s->merged, *lse = in_place ? &s->lse[0] : &s->merged_lse;
    for (int32_t i = 0; i < n; i++) {
        outs[i] = mla_tensor_3d(s->out[i], MLA_FORMAT_F32, 1, 1, WIDTH);
        lses[i] = mla_tensor_2d(&s->lse[i], MLA_FORMAT_F32, 1, 1);
    }
    mla_merge_state_params p = MLA_MERGE_STATE_PARAMS_INIT;
    p.n_states = n;
    p.outs = outs;
    p.lses = lses;
    p.out = mla_tensor_3d(out, MLA_FORMAT_F32, 1, 1, WIDTH);
    p.lse = mla_tensor_2d(lse, MLA_FORMAT_F32, 1, 1);
    p.call.solution = row;
    must(mla_merge_state(context, &p, &diag), &diag);
    if (in_place) {
        memcpy(s->merged, s->out[0], sizeof s->merged);
        s->merged_lse = s->lse[0];
    }
}

static states make_states(const float *lse, int32_t n)
{
    states s;
    memset(&s, 0xff, sizeof s);
    for (int32_t i = 0; i < n; i++) {
        s.lse[i] = lse[i];
        for (int32_t d = 0; d < WIDTH && !isinf(lse[i]); d++)
            s.out[i][d] = (float)(d + 1) * (i % 2 ? -0.75f : 1.5f);
    }
    return s;
}

static void report_17_weights_follow_the_natural_logarithm(void **unused)
{
    (void)unused;
    const float lse[2] = {logf(2.0f), logf(8.0f)};
    operator_rows rows = operator_rows_here(context, MLA_OP_MERGE, NULL);
    for (int32_t i = 0; i < rows.n; i++) {
        states s = make_states(lse, 2);
        merge(&s, 2, rows.name[i], false);
        for (int32_t d = 0; d < WIDTH; d++) {
            float want = 0.2f * 1.5f * (float)(d + 1) + 0.8f * -0.75f * (float)(d + 1);
            assert_true(fabsf(s.merged[d] - want) <= 1e-6f * (float)(d + 1));
        }
        assert_true(fabsf(s.merged_lse - logf(10.0f)) < 1e-6f);
    }
}

static void report_19_20_22_23_empty_states_are_the_identity(void **unused)
{
    (void)unused;
    static const float minus = -INFINITY, plus = INFINITY;
    const float cases[][4] = {{minus, minus, minus, minus},   {plus, plus, plus, plus},
                              {minus, plus, minus, plus},     {0.5f, minus, minus, minus},
                              {minus, 0.5f, minus, minus},    {plus, 0.5f, plus, minus},
                              {minus, minus, minus, -300.25f}};
    operator_rows rows = operator_rows_here(context, MLA_OP_MERGE, NULL);
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++)
        for (int32_t n = 1; n <= 4; n++)
            for (int32_t i = 0; i < 2 * rows.n; i++) {
                int32_t live = -1;
                for (int32_t k = 0; k < n; k++)
                    live = isinf(cases[c][k]) ? live : k;
                states s = make_states(cases[c], n), before = s;
                merge(&s, n, rows.name[i / 2], i % 2 == 1);
                if (live < 0) {
                    for (int32_t d = 0; d < WIDTH; d++)
                        assert_true(s.merged[d] == 0.0f);
                    assert_true(s.merged_lse == -INFINITY);
                    continue;
                }
                assert_memory_equal(s.merged, before.out[live], sizeof s.merged);
                assert_true(s.merged_lse == before.lse[live]);
            }
}

/* ---- nothing to do --------------------------------------------------------------------------- */

static void report_5_10_11_empty_batches_are_no_error(void **unused)
{
    (void)unused;
    static const int32_t none[1] = {0};
    char why[1200] = "";
    for (int32_t q_len = 1; q_len <= 4; q_len += 3)
        for (int32_t kind = 0; kind < 3; kind++) {
            decode_shape s = decode_shape_make();
            s.q_len[0] = q_len;
            s.batch = 0;
            s.is_ragged = kind > 0;
            s.is_extend = kind == 2;
            decode_problem *p = decode_problem_make(&s, 1);
            if (!operator_run(context, kind == 2 ? &extend_operator : &decode_operator, &p->base,
                              NULL, why, sizeof why))
                fail_msg("%s", why);
            decode_problem_free(p);
        }
    /* requests without tokens, and no requests at all */
    for (int32_t batch = 0; batch <= 1; batch++) {
        prefill_shape s = prefill_shape_make();
        prefill_shape_lengths(&s, batch, none, none);
        prefill_problem *p = prefill_problem_make(&s, 1);
        if (!operator_run(context, &prefill_operator, &p->base, NULL, why, sizeof why))
            fail_msg("%s", why);
        prefill_problem_free(p);
    }
}

/* ---- contradictions -------------------------------------------------------------------------- */

typedef void (*spoil)(mla_decode_params *p);

static void refused(spoil change, mla_status expected, const char *word, bool is_ragged)
{
    static const int32_t q_len[] = {2, 3}, kv_len[] = {40, 100};
    decode_shape s = decode_shape_make();
    decode_shape_lengths(&s, 2, q_len, kv_len);
    if (!is_ragged) {
        s.q_len[1] = 2;
        s.is_ragged = 0;
    }
    s.q_format = s.kv_format = s.out_format = MLA_FORMAT_BF16;
    decode_problem *p = decode_problem_make(&s, 1);
    change(&p->params);
    char why[1200] = "";
    mla_diag diag = {{0}};
    scene_seal(&p->base.scene);
    mla_status status = mla_decode_with_kvcache(context, &p->params, &diag);
    if (status != expected || !strstr(diag.text, word))
        fail_msg("gave %s (%s), should give %s and name %s", mla_status_name(status), diag.text,
                 mla_status_name(expected), word);
    if (!scene_untouched(&p->base.scene, why, sizeof why))
        fail_msg("%s", why);
    decode_problem_free(p);
}

static void too_few_rows(mla_decode_params *p)
{
    ((int32_t *)p->cu_seqlens_q.data)[2] = 8;
}

static void too_many_rows(mla_decode_params *p)
{
    ((int32_t *)p->cu_seqlens_q.data)[2] = 4;
}

static void table_of_tokens(mla_decode_params *p)
{
    p->page_table.shape[0] = 4;
}

static void scale_on_bf16(mla_decode_params *p)
{
    p->k_scale = 0.06f;
}

static void lengths_of_rank_4(mla_decode_params *p)
{
    int64_t shape[4] = {2, 1, 1, 1};
    p->cache_seqlens = mla_tensor_make(p->cache_seqlens.data, MLA_FORMAT_I32, 4, shape);
}

static void whole_number_cache(mla_decode_params *p)
{
    p->kv_cache.format = MLA_FORMAT_I32;
}

static void length_over_the_table(mla_decode_params *p)
{
    ((int32_t *)p->cache_seqlens.data)[1] = 100000;
}

static void absurd_live_page(mla_decode_params *p)
{
    *(int32_t *)numeric_address(&p->page_table, 1, 0, 0, 0) = 2147480000;
}

static void negative_live_page(mla_decode_params *p)
{
    *(int32_t *)numeric_address(&p->page_table, 0, 0, 0, 0) = -1;
}

static void no_scale(mla_decode_params *p)
{
    p->softmax_scale = 0.0f;
}

static void negative_cap(mla_decode_params *p)
{
    p->logit_cap = -5.0f;
}

static void narrow_cache(mla_decode_params *p)
{
    p->kv_cache.shape[2] = 512;
}

static void report_37_44_48_75_89_90_96_98_118_contradictions_are_named(void **unused)
{
    (void)unused;
    refused(too_few_rows, MLA_ERROR_CAPACITY, "cu_seqlens_q", true);
    refused(too_many_rows, MLA_ERROR_CAPACITY, "cu_seqlens_q", true);
    refused(table_of_tokens, MLA_ERROR_SHAPE, "page_table", false);
    refused(scale_on_bf16, MLA_ERROR_ARGUMENT, "k_scale", false);
    refused(lengths_of_rank_4, MLA_ERROR_SHAPE, "cache_seqlens", false);
    refused(whole_number_cache, MLA_ERROR_FORMAT, "kv_cache", false);
    refused(length_over_the_table, MLA_ERROR_CAPACITY, "cache_seqlens", false);
    refused(absurd_live_page, MLA_ERROR_CAPACITY, "page_table", false);
    refused(negative_live_page, MLA_ERROR_CAPACITY, "page_table", false);
    refused(no_scale, MLA_ERROR_ARGUMENT, "softmax_scale", false);
    refused(negative_cap, MLA_ERROR_ARGUMENT, "logit_cap", false);
    refused(narrow_cache, MLA_ERROR_SHAPE, "kv_cache", false);
}

/* ---- large pools ----------------------------------------------------------------------------- */

/* Rows near the end of a pool of 5.2 GB of bf16: written, gathered and attended. Offsets pass 2^31
 * elements and 2^32 bytes; a 32-bit product anywhere lands in memory that holds zeros. */
static void report_81_to_86_offsets_beyond_32_bits(void **unused)
{
    (void)unused;
    const int64_t page_size = 64, pages = 70000, rank = 512, rope = 64, width = 576;
    const size_t bytes = (size_t)(pages * page_size * width) * 2;
    void *pool = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pool == MAP_FAILED)
        skip();
    enum { KEYS = 130 };
    static const int32_t table[3] = {69990, 69999, 60001};
    static float latent[KEYS][512], key[KEYS][64], query[4][576], out[4][512], lse[4];
    static float read_latent[KEYS][512], read_key[KEYS][64];
    int64_t slots[KEYS];
    rng r = rng_stream(81, 1);
    for (int32_t i = 0; i < KEYS; i++) {
        slots[i] = table[i / page_size] * page_size + i % page_size;
        for (int32_t d = 0; d < 512; d++)
            latent[i][d] = (float)numeric_round(MLA_FORMAT_BF16, rng_normal(&r));
        for (int32_t d = 0; d < 64; d++)
            key[i][d] = (float)numeric_round(MLA_FORMAT_BF16, rng_normal(&r));
    }
    for (int32_t i = 0; i < 4 * 576; i++)
        query[i / 576][i % 576] = (float)rng_normal(&r);
    int32_t length = KEYS;
    mla_tensor cache = mla_tensor_3d(pool, MLA_FORMAT_BF16, pages, page_size, width);
    operator_rows families = operator_families_here(context, MLA_OP_WRITE);
    for (int32_t f = 0; f < families.n; f++) {
        char why[1200] = "";
        mla_diag diag = {{0}};
        for (int32_t i = 0; i < KEYS; i++)
            memset(numeric_address(&cache, slots[i] / page_size, slots[i] % page_size, 0, 0), 0xff,
                   (size_t)width * 2);
        mla_write_kv_params write = MLA_WRITE_KV_PARAMS_INIT;
        write.latent = mla_tensor_2d(latent, MLA_FORMAT_F32, KEYS, rank);
        write.rope = mla_tensor_2d(key, MLA_FORMAT_F32, KEYS, rope);
        write.slots = mla_tensor_1d(slots, MLA_FORMAT_I64, KEYS);
        write.kv_cache = cache;
        write.kv_lora_rank = (int32_t)rank;
        write.qk_rope_head_dim = (int32_t)rope;
        write.call.solution = families.name[f];
        must(mla_write_kv(context, &write, &diag), &diag);
        mla_gather_kv_params gather = MLA_GATHER_KV_PARAMS_INIT;
        gather.latent = mla_tensor_2d(read_latent, MLA_FORMAT_F32, KEYS, rank);
        gather.rope = mla_tensor_2d(read_key, MLA_FORMAT_F32, KEYS, rope);
        gather.slots = write.slots;
        gather.kv_cache = cache;
        gather.kv_lora_rank = (int32_t)rank;
        gather.qk_rope_head_dim = (int32_t)rope;
        gather.call.solution = families.name[f];
        must(mla_gather_kv(context, &gather, &diag), &diag);
        assert_memory_equal(read_latent, latent, sizeof latent);
        assert_memory_equal(read_key, key, sizeof key);

        mla_decode_params decode = MLA_DECODE_PARAMS_INIT;
        decode.kv_lora_rank = (int32_t)rank;
        decode.qk_rope_head_dim = (int32_t)rope;
        decode.softmax_scale = 0.0722f;
        decode.q = mla_tensor_4d(query, MLA_FORMAT_F32, 1, 1, 4, width);
        decode.kv_cache = cache;
        decode.page_table = mla_tensor_2d(table, MLA_FORMAT_I32, 1, 3);
        decode.cache_seqlens = mla_tensor_1d(&length, MLA_FORMAT_I32, 1);
        decode.out = mla_tensor_4d(out, MLA_FORMAT_F32, 1, 1, 4, rank);
        decode.lse = mla_tensor_3d(lse, MLA_FORMAT_F32, 1, 1, 4);
        mla_problem problem = MLA_PROBLEM_INIT;
        must(mla_decode_problem(&decode, &problem, &diag), &diag);
        must(mla_workspace_bytes(context, &problem, families.name[f], &decode.call.workspace_bytes,
                                 &diag),
             &diag);
        assert_int_equal(
            posix_memalign(&decode.call.workspace, 64, (size_t)decode.call.workspace_bytes + 64),
            0);
        decode.call.solution = families.name[f];
        must(mla_decode_with_kvcache(context, &decode, &diag), &diag);
        oracle_result *want = oracle_decode(&decode, 0, 1);
        compare_bound bound = compare_bound_of(MLA_FORMAT_F32, MLA_FORMAT_BF16, MLA_FORMAT_F32);
        if (!compare_attention(want, &decode.out, &decode.lse, bound, why, sizeof why))
            fail_msg("%s: %s", families.name[f], why);
        oracle_free(want);
        free(decode.call.workspace);
    }
    munmap(pool, bytes);
}

int main(void)
{
    context = operator_context(2);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(report_17_weights_follow_the_natural_logarithm),
        cmocka_unit_test(report_19_20_22_23_empty_states_are_the_identity),
        cmocka_unit_test(report_5_10_11_empty_batches_are_no_error),
        cmocka_unit_test(report_37_44_48_75_89_90_96_98_118_contradictions_are_named),
        cmocka_unit_test(report_81_to_86_offsets_beyond_32_bits),
    };
    int failed = cmocka_run_group_tests_name("public_reports_calls", tests, NULL, NULL);
    mla_context_destroy(context);
    return failed;
}
