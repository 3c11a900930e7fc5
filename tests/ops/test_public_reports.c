/*
 * Attention inputs that went wrong in other MLA kernels, by their number in a log of public
 * reports; each stands for a class. Every row that takes the input must equal the oracle. Classes
 * that the suites cover in general are not repeated: strides and misaligned bases (110-112),
 * is_causal 0 (113), workspace sizes (63, 88), rejected rows (134); those of bits that may not
 * change (38, 114-116) are in test_invariance.c, of prefix replay and shards (13-16, 26, 29, 62) in
 * test_merging.c, of merges, arguments and large pools in test_public_reports_calls.c, of graphs
 * and metadata (35-46, 52) in tests/backend.
 */
#include "oracle/compare.h"
#include "oracle/numeric.h"
#include "oracle/operators.h"
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static mla_context *context;

/* Every row that takes the shape equals the oracle; at least one does. */
static void all_rows_agree(const decode_shape *s)
{
    char why[1200] = "";
    const operator_table *op = s->is_extend ? &extend_operator : &decode_operator;
    operator_rows rows = operator_rows_here(context, op->op, NULL);
    decode_problem *p = decode_problem_make(s, 1);
    int32_t tried = 0;
    for (int32_t i = 0; i < rows.n; i++) {
        if (!operator_accepts(context, op, &p->base, rows.name[i]))
            continue;
        if (!operator_verify(context, op, &p->base, rows.name[i], NULL, why, sizeof why))
            fail_msg("%s: %s\n  %s", rows.name[i], why, p->base.text);
        tried++;
    }
    assert_true(tried > 0);
    decode_problem_free(p);
}

static void all_prefill_rows_agree(const prefill_shape *s)
{
    char why[1200] = "";
    operator_rows rows = operator_rows_here(context, MLA_OP_PREFILL, NULL);
    prefill_problem *p = prefill_problem_make(s, 1);
    int32_t tried = 0;
    for (int32_t i = 0; i < rows.n; i++) {
        if (!operator_accepts(context, &prefill_operator, &p->base, rows.name[i]))
            continue;
        if (!operator_verify(context, &prefill_operator, &p->base, rows.name[i], NULL, why,
                             sizeof why))
            fail_msg("%s: %s\n  %s", rows.name[i], why, p->base.text);
        tried++;
    }
    assert_true(tried > 0);
    prefill_problem_free(p);
}

/* batch requests of one q_len; kv_len[b] given. */
static decode_shape shape_with(int32_t heads, int32_t page_size, int32_t q_format,
                               int32_t kv_format, int32_t batch, int32_t q_len,
                               const int32_t *kv_len)
{
    int32_t q_lens[PROBLEM_MAX_BATCH];
    decode_shape s = decode_shape_make();
    for (int32_t b = 0; b < batch; b++)
        q_lens[b] = q_len;
    decode_shape_lengths(&s, batch, q_lens, kv_len);
    s.heads = heads;
    s.page_size = page_size;
    s.q_format = q_format;
    s.kv_format = kv_format;
    s.out_format = q_format == MLA_FORMAT_F32 ? MLA_FORMAT_F32 : MLA_FORMAT_BF16;
    return s;
}

#define BF16 MLA_FORMAT_BF16
#define E4M3 MLA_FORMAT_E4M3

/* ---- zero lengths and masked rows ------------------------------------------------------------ */

static void report_1_2_4_padding_rows_of_length_zero(void **unused)
{
    (void)unused;
    static const int32_t kv_len[] = {97, 301, 64, 1, 40, 0, 0, 0, 0};
    static const int32_t heads[] = {8, 128};
    for (int32_t i = 0; i < 4; i++) {
        decode_shape s =
            shape_with(heads[i % 2], i < 2 ? 32 : 64, BF16, i < 2 ? BF16 : E4M3, 9, 1, kv_len);
        s.extra_columns = i % 2 ? 2000 : 0; /* a table and a bound for 128k tokens */
        s.max_seqlen_kv = i % 2 ? 120000 : -1;
        all_rows_agree(&s);
    }
}

static void report_3_12_all_lengths_zero_and_a_table_of_no_columns(void **unused)
{
    (void)unused;
    static const int32_t kv_len[16] = {0};
    decode_shape s = shape_with(16, 64, BF16, BF16, 16, 1, kv_len);
    s.extra_columns = 0;
    all_rows_agree(&s);
    s.extra_pages = 0;
    s.extra_columns = 5;
    s.q_format = s.kv_format = s.out_format = MLA_FORMAT_F32;
    all_rows_agree(&s);
}

static void report_6_9_masks_that_hide_every_key(void **unused)
{
    (void)unused;
    static const int32_t kv_len[] = {4, 4, 3};
    decode_shape s = shape_with(16, 16, BF16, BF16, 3, 4, kv_len);
    s.mask = PROBLEM_NOISE;
    decode_problem *p = decode_problem_make(&s, 1);
    for (int64_t t = 0; t < 12; t++)
        memset(numeric_address(&p->params.mask, t, 0, 0, 0), 0, 4);
    scene_seal(&p->base.scene);
    operator_rows rows = operator_rows_here(context, MLA_OP_DECODE, NULL);
    for (int32_t i = 0; i < rows.n; i++) {
        char why[1200] = "";
        if (operator_accepts(context, &decode_operator, &p->base, rows.name[i]) &&
            !operator_verify(context, &decode_operator, &p->base, rows.name[i], NULL, why,
                             sizeof why))
            fail_msg("%s: %s", rows.name[i], why);
    }
    decode_problem_free(p);
}

static void report_7_53_more_query_tokens_than_keys(void **unused)
{
    (void)unused;
    static const int32_t kv_len[] = {2, 0, 5}, few[] = {64};
    decode_shape s = shape_with(16, 64, BF16, BF16, 3, 6, kv_len);
    all_rows_agree(&s);
    s = shape_with(16, 64, BF16, BF16, 1, 300, few);
    all_rows_agree(&s);
    s.is_extend = s.is_ragged = 1;
    all_rows_agree(&s);
}

static void report_8_25_prefill_without_keys_and_lse_without_a_mask(void **unused)
{
    (void)unused;
    static const int32_t q_len[] = {5, 40, 1, 0, 130}, kv_len[] = {0, 17, 300, 12, 129};
    for (int32_t i = 0; i < 4; i++) {
        prefill_shape s = prefill_shape_make();
        prefill_shape_lengths(&s, 5, q_len, kv_len);
        s.is_causal = i % 2;
        s.q_format = s.kv_format = s.out_format = i < 2 ? MLA_FORMAT_F32 : BF16;
        all_prefill_rows_agree(&s);
    }
}

/* ---- poison ---------------------------------------------------------------------------------- */

static void report_30_32_33_unused_slots_of_the_last_page(void **unused)
{
    (void)unused;
    static const int32_t one[] = {13}, four[] = {32, 64, 96, 48};
    static const int32_t formats[] = {MLA_FORMAT_F32, MLA_FORMAT_BF16, MLA_FORMAT_F16,
                                      MLA_FORMAT_E4M3, MLA_FORMAT_DS656};
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        int32_t q = formats[f] == MLA_FORMAT_F32 ? MLA_FORMAT_F32 : BF16;
        decode_shape s = shape_with(16, 4, q, formats[f], 1, 1, one);
        all_rows_agree(&s);
        s.mask = PROBLEM_FULL;
        all_rows_agree(&s);
        s = shape_with(16, 128, q, formats[f], 4, 1, four);
        all_rows_agree(&s);
    }
}

/* A NaN in a live row of one request reaches its own outputs only. */
static void report_31_requests_are_isolated(void **unused)
{
    (void)unused;
    static const int32_t kv_len[] = {65, 33, 100}, pages[] = {1, 16};
    operator_rows rows = operator_rows_here(context, MLA_OP_DECODE, NULL);
    for (size_t f = 0; f < 4; f++) {
        decode_shape s = shape_with(12, pages[f % 2], f < 2 ? BF16 : MLA_FORMAT_F32,
                                    f < 2 ? BF16 : MLA_FORMAT_F32, 3, 2, kv_len);
        decode_problem *clean = decode_problem_make(&s, 1), *bad = decode_problem_make(&s, 1);
        int32_t page =
            *(int32_t *)numeric_address(&bad->params.page_table, 1, 20 / s.page_size, 0, 0);
        memset(numeric_address(&bad->params.kv_cache, page, 20 % s.page_size, 0, 0), 0xff,
               (size_t)(576 * mla_format_bytes(s.kv_format)));
        scene_seal(&bad->base.scene);
        for (int32_t i = 0; i < rows.n; i++) {
            char why[1200] = "";
            if (!operator_accepts(context, &decode_operator, &bad->base, rows.name[i]))
                continue;
            if (!operator_run(context, &decode_operator, &clean->base, rows.name[i], why,
                              sizeof why) ||
                !operator_run(context, &decode_operator, &bad->base, rows.name[i], why, sizeof why))
                fail_msg("%s: %s", rows.name[i], why);
            for (int64_t b = 0; b < 3; b++) {
                mla_tensor x = mla_tensor_slice(clean->params.out, 0, b, 1);
                mla_tensor y = mla_tensor_slice(bad->params.out, 0, b, 1);
                if (b == 1)
                    assert_true(isnan(numeric_at(&y, 0, 0, 0, 0)));
                else if (!compare_bits(&x, &y, why, sizeof why))
                    fail_msg("%s: request %d is changed: %s", rows.name[i], (int)b, why);
            }
        }
        decode_problem_free(clean);
        decode_problem_free(bad);
    }
}

/* ---- several tokens a request ---------------------------------------------------------------- */

static void report_47_positions_of_strided_shards(void **unused)
{
    (void)unused;
    static const int32_t kv_len[] = {257, 10, 7, 1};
    for (int32_t world = 2; world <= 4; world += 2)
        for (int32_t rank = 0; rank < world; rank++)
            for (int32_t q_len = 1; q_len <= 8; q_len += 3) {
                decode_shape s = shape_with(12, 16, BF16, BF16, 4, q_len, kv_len);
                s.shard_count = world;
                s.shard_first = rank;
                all_rows_agree(&s);
            }
}

/* Live rows of a shard past the global length, and shards whose bound is no causal one. */
static void report_47_shards_without_causality(void **unused)
{
    (void)unused;
    static const int32_t kv_len[] = {257, 10, 7, 1};
    for (int32_t rank = 0; rank < 3; rank++)
        for (int32_t mask = PROBLEM_CAUSAL; mask <= PROBLEM_NOISE; mask++)
            for (int32_t slack = 0; slack <= 5; slack += 5) {
                decode_shape s = shape_with(12, 16, BF16, BF16, 4, 3, kv_len);
                s.mask = mask;
                s.shard_count = 3;
                s.shard_first = rank;
                s.shard_slack = slack;
                all_rows_agree(&s);
            }
}

static void report_48_54_58_59_60_uniform_ragged_and_mixed_tokens(void **unused)
{
    (void)unused;
    static const int32_t long_kv[] = {700, 128, 33, 512, 4, 90};
    static const int32_t mixed_q[] = {1, 4, 4, 4}, mixed_kv[] = {300, 64, 129, 17};
    static const int32_t turned_q[] = {4, 1, 4, 2}, nine_q[] = {1, 2, 3, 3, 2, 1, 1, 3, 2};
    static const int32_t nine_kv[] = {9, 80, 81, 3, 2, 1, 260, 64, 65};
    decode_shape s = shape_with(8, 64, BF16, BF16, 6, 3, long_kv); /* 48 */
    all_rows_agree(&s);
    s = shape_with(8, 64, BF16, BF16, 6, 2, long_kv); /* 59, 60 */
    all_rows_agree(&s);
    s = shape_with(16, 64, BF16, BF16, 1, 1, long_kv);
    decode_shape_lengths(&s, 4, mixed_q, mixed_kv); /* 58 */
    all_rows_agree(&s);
    decode_shape_lengths(&s, 4, turned_q, mixed_kv);
    all_rows_agree(&s);
    decode_shape_lengths(&s, 9, nine_q, nine_kv); /* 54 */
    s.heads = 32;
    all_rows_agree(&s);
}

static void report_49_50_51_verify_is_causal(void **unused)
{
    (void)unused;
    static const int32_t kv_len[] = {1024, 77, 8, 300};
    for (int32_t q_len = 2; q_len <= 4; q_len++) {
        decode_shape s =
            shape_with(q_len == 4 ? 128 : 16, 64, q_len == 3 ? E4M3 : BF16, E4M3, 4, q_len, kv_len);
        all_rows_agree(&s);
        s.mask = PROBLEM_FULL;
        all_rows_agree(&s);
    }
}

static void report_57_long_queries_through_absorbed_decode(void **unused)
{
    (void)unused;
    static const int32_t q_len[] = {128, 200, 1}, kv_len[] = {256, 200, 400};
    decode_shape s = decode_shape_make();
    decode_shape_lengths(&s, 3, q_len, kv_len);
    s.heads = 4;
    s.q_format = s.kv_format = s.out_format = BF16;
    all_rows_agree(&s);
    s.is_extend = 1;
    all_rows_agree(&s);
}

/* ---- heads, pages, dims ---------------------------------------------------------------------- */

static void report_20_64_to_74_head_counts(void **unused)
{
    (void)unused;
    static const int32_t heads[] = {1, 2, 4, 5, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 126, 128};
    static const int32_t kv_len[] = {65, 0, 130};
    for (size_t h = 0; h < sizeof heads / sizeof heads[0]; h++)
        for (int32_t q_len = 1; q_len <= 2; q_len++) {
            decode_shape s =
                shape_with(heads[h], 64, BF16, q_len == 1 ? BF16 : E4M3, 3, q_len, kv_len);
            all_rows_agree(&s);
        }
}

static void report_61_76_80_large_and_odd_pages(void **unused)
{
    (void)unused;
    static const int32_t pages[] = {256, 512, 544, 1600, 2848};
    static const int32_t kv_len[] = {1100, 300, 3000};
    for (size_t i = 0; i < sizeof pages / sizeof pages[0]; i++) {
        decode_shape s = shape_with(6, pages[i], BF16, i % 2 ? E4M3 : BF16, 3, 3, kv_len);
        s.mask = i > 2 ? PROBLEM_TREE : PROBLEM_CAUSAL;
        all_rows_agree(&s);
    }
}

/* The page size is the cache's own: rows seen as pages of one token need a table of single rows. */
static void report_75_scattered_pages(void **unused)
{
    (void)unused;
    static const int32_t kv_len[] = {150, 40};
    decode_shape s = shape_with(16, 64, BF16, BF16, 2, 1, kv_len);
    s.extra_pages = 9;
    for (uint64_t placement = 1; placement <= 4; placement++) {
        s.placement_seed = placement;
        all_rows_agree(&s);
        s.page_size = 1;
        all_rows_agree(&s);
        s.page_size = 64;
    }
}

static void report_105_other_latent_and_rope_dims(void **unused)
{
    (void)unused;
    static const int32_t dims[][2] = {{256, 64}, {512, 128}, {512, 0}, {320, 32}, {96, 8}, {1, 1}};
    static const int32_t kv_len[] = {300, 7};
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        decode_shape s = shape_with(16, 64, i % 2 ? MLA_FORMAT_F32 : BF16,
                                    i % 2 ? MLA_FORMAT_F32 : BF16, 2, 2, kv_len);
        s.kv_lora_rank = dims[i][0];
        s.qk_rope_head_dim = dims[i][1];
        s.softmax_scale = 1.0f / sqrtf((float)(dims[i][0] + dims[i][1]));
        all_rows_agree(&s);
    }
}

/* ---- scales, caps, sizes of numbers ---------------------------------------------------------- */

static void report_92_to_96_scales_with_fp8_caches(void **unused)
{
    (void)unused;
    static const int32_t kv_len[] = {260, 9};
    static const float softmax_scales[] = {0.0722f, 0.1352f}, k_scales[] = {1.0f, 0.06f, 2.5f};
    static const int32_t pairs[][2] = {
        {BF16, E4M3}, {E4M3, E4M3}, {MLA_FORMAT_F32, MLA_FORMAT_E5M2}};
    for (size_t i = 0; i < 3; i++)
        for (size_t k = 0; k < 3; k++)
            for (size_t x = 0; x < 2; x++) {
                decode_shape s = shape_with(16, 64, pairs[i][0], pairs[i][1], 2, 2, kv_len);
                s.k_scale = k_scales[k];
                s.softmax_scale = softmax_scales[x];
                all_rows_agree(&s);
            }
}

static void report_99_101_caps_after_the_scale(void **unused)
{
    (void)unused;
    static const int32_t kv_len[] = {200, 31};
    static const float caps[] = {1.0f, 50.0f};
    for (int32_t i = 0; i < 4; i++) {
        decode_shape s = shape_with(16, 64, i < 2 ? MLA_FORMAT_F32 : BF16,
                                    i < 2 ? MLA_FORMAT_F32 : BF16, 2, 2, kv_len);
        s.logit_cap = caps[i % 2];
        s.softmax_scale = 4.0f; /* scores far beyond the cap on both sides */
        all_rows_agree(&s);
        prefill_shape q = prefill_shape_make();
        static const int32_t q_len[] = {33, 5};
        prefill_shape_lengths(&q, 2, q_len, kv_len);
        q.q_format = q.kv_format = q.out_format = s.q_format;
        q.logit_cap = s.logit_cap;
        q.softmax_scale = 4.0f;
        all_prefill_rows_agree(&q);
    }
}

static void report_102_120_long_contexts_end_and_split(void **unused)
{
    (void)unused;
    static const int32_t kv_len[] = {20011, 5, 9000};
    decode_shape s = shape_with(2, 64, BF16, BF16, 3, 1, kv_len);
    all_rows_agree(&s);
    mla_context *kept = context;
    context = operator_context(24);
    all_rows_agree(&s);
    mla_context_destroy(context);
    context = kept;
}

static void report_103_104_prefill_lengths_off_the_tile(void **unused)
{
    (void)unused;
    static const int32_t lengths[] = {1, 63, 64, 65, 127, 128, 129, 200, 255, 257};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        prefill_shape s = prefill_shape_make();
        prefill_shape_lengths(&s, 1, &lengths[i], &lengths[i]);
        s.heads = s.kv_heads = 2;
        s.is_causal = i % 2;
        s.q_format = s.kv_format = s.out_format = i % 3 ? BF16 : MLA_FORMAT_F32;
        all_prefill_rows_agree(&s);
    }
    prefill_shape s = prefill_shape_make();
    int32_t ragged[44];
    for (int32_t b = 0; b < 44; b++)
        ragged[b] = b == 20 ? 1200 : b % 3 ? 79 : 34 + 5 * b;
    prefill_shape_lengths(&s, 44, ragged, ragged);
    s.heads = s.kv_heads = 3;
    s.q_format = s.kv_format = s.out_format = BF16;
    all_prefill_rows_agree(&s);
}

/* Scores add up to millions before the scale: no step may be in f16. */
static void report_107_sums_beyond_the_range_of_f16(void **unused)
{
    (void)unused;
    static const int32_t kv_len[] = {130, 3};
    decode_shape s = shape_with(128, 64, MLA_FORMAT_F16, MLA_FORMAT_F16, 2, 1, kv_len);
    s.out_format = MLA_FORMAT_F16;
    s.q_spread = 100.0;
    s.kv_spread = 60.0;
    s.softmax_scale = 1.7f / (24.0f * 6000.0f);
    all_rows_agree(&s);
}

/* Rows whose scores all lie around -1e5, or +1e5. */
static void report_109_scores_far_from_zero(void **unused)
{
    (void)unused;
    static const int32_t kv_len[] = {700, 1, 300};
    for (int32_t i = 0; i < 2; i++) {
        decode_shape s =
            shape_with(16, 64, i ? BF16 : MLA_FORMAT_F32, i ? BF16 : MLA_FORMAT_F32, 3, 2, kv_len);
        s.kv_mean = 8.0;
        s.softmax_scale = 500.0f;
        all_rows_agree(&s);
        s.softmax_scale = -500.0f;
        all_rows_agree(&s);
    }
}

/* Views of one tensor: q [B, q_len, H, 576] as 512 + 64, the pool's rows likewise. */
static void report_110_views_of_joined_rows(void **unused)
{
    (void)unused;
    static const int32_t kv_len[] = {150, 40};
    operator_rows rows = operator_rows_here(context, MLA_OP_DECODE, NULL);
    decode_shape s = shape_with(16, 64, BF16, BF16, 2, 2, kv_len);
    decode_problem *p = decode_problem_make(&s, 1);
    mla_decode_params *q = &p->params;
    q->q_rope = mla_tensor_slice(q->q, 3, 512, 64);
    q->q = mla_tensor_slice(q->q, 3, 0, 512);
    q->kv_cache_rope = mla_tensor_slice(q->kv_cache, 2, 512, 64);
    q->kv_cache = mla_tensor_slice(q->kv_cache, 2, 0, 512);
    for (int32_t i = 0; i < rows.n; i++) {
        char why[1200] = "";
        if (operator_accepts(context, &decode_operator, &p->base, rows.name[i]) &&
            !operator_verify(context, &decode_operator, &p->base, rows.name[i], NULL, why,
                             sizeof why))
            fail_msg("%s: %s", rows.name[i], why);
    }
    decode_problem_free(p);
}

int main(void)
{
    context = operator_context(2);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(report_1_2_4_padding_rows_of_length_zero),
        cmocka_unit_test(report_3_12_all_lengths_zero_and_a_table_of_no_columns),
        cmocka_unit_test(report_6_9_masks_that_hide_every_key),
        cmocka_unit_test(report_7_53_more_query_tokens_than_keys),
        cmocka_unit_test(report_8_25_prefill_without_keys_and_lse_without_a_mask),
        cmocka_unit_test(report_30_32_33_unused_slots_of_the_last_page),
        cmocka_unit_test(report_31_requests_are_isolated),
        cmocka_unit_test(report_47_positions_of_strided_shards),
        cmocka_unit_test(report_47_shards_without_causality),
        cmocka_unit_test(report_48_54_58_59_60_uniform_ragged_and_mixed_tokens),
        cmocka_unit_test(report_49_50_51_verify_is_causal),
        cmocka_unit_test(report_57_long_queries_through_absorbed_decode),
        cmocka_unit_test(report_20_64_to_74_head_counts),
        cmocka_unit_test(report_61_76_80_large_and_odd_pages),
        cmocka_unit_test(report_75_scattered_pages),
        cmocka_unit_test(report_105_other_latent_and_rope_dims),
        cmocka_unit_test(report_92_to_96_scales_with_fp8_caches),
        cmocka_unit_test(report_99_101_caps_after_the_scale),
        cmocka_unit_test(report_102_120_long_contexts_end_and_split),
        cmocka_unit_test(report_103_104_prefill_lengths_off_the_tile),
        cmocka_unit_test(report_107_sums_beyond_the_range_of_f16),
        cmocka_unit_test(report_109_scores_far_from_zero),
        cmocka_unit_test(report_110_views_of_joined_rows),
    };
    int failed = cmocka_run_group_tests_name("public_reports", tests, NULL, NULL);
    mla_context_destroy(context);
    return failed;
}
