/*
 * Tests of the test: an honest kernel passes the comparator, also with probabilities rounded to the
 * working format, and each planted mistake is caught. The kernel here is a plain blocked online
 * softmax in double, 64 keys a block, that makes one chosen mistake.
 */
#include "oracle/compare.h"
#include "oracle/numeric.h"
#include "oracle/problem.h"

#include "test.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum mistake {
    HONEST,
    ROUNDED_PROBABILITIES, /* honest too */
    LAST_PAGE_SKIPPED,
    MASK_ONE_LATE,
    MASK_ONE_EARLY,
    RESCALE_FORGOTTEN,
    HEADS_SWAPPED,
    LSE_IN_BASE_2,
    LSE_UNCAPPED,
    ONE_KEY_DROPPED,
    ONE_KEY_TWICE,
    SCALE_LEFT_OUT_OF_VALUES,
    ROPE_LEFT_OUT,
    CAP_LEFT_OUT,
    PAGES_EXCHANGED,
    QUERY_ROUNDED,
    EMPTY_ROW_NAN,
    EMPTY_ROW_PLUS_INFINITY,
    EMPTY_ROW_NOT_WRITTEN,
    TAIL_READ
} mistake;

static double score(const mla_decode_params *p, const double *query, const double *key, mistake m)
{
    double dot = 0.0;
    int64_t width = p->kv_lora_rank + (m == ROPE_LEFT_OUT ? 0 : p->qk_rope_head_dim);
    for (int64_t d = 0; d < width; d++)
        dot += query[d] * key[d];
    double s = dot * (double)p->softmax_scale;
    if (p->logit_cap > 0.0f && m != CAP_LEFT_OUT)
        s = (double)p->logit_cap * tanh(s / (double)p->logit_cap);
    return s;
}

/* Whether the mistaken kernel takes key i. */
static bool takes(const mla_decode_params *p, int64_t b, int64_t j, int64_t q_len, int64_t i,
                  int64_t live, mistake m)
{
    int64_t page_size = p->kv_cache.shape[1];
    if (m == LAST_PAGE_SKIPPED && i >= (live - 1) / page_size * page_size)
        return false;
    if (m == ONE_KEY_DROPPED && i == live / 2)
        return false;
    if (m == MASK_ONE_LATE)
        return i == 0 || oracle_sees(p, b, j, q_len, i - 1);
    if (m == MASK_ONE_EARLY)
        return oracle_sees(p, b, j, q_len, i + 1);
    return oracle_sees(p, b, j, q_len, i);
}

typedef struct state {
    double largest, sum, sum_uncapped;
    double out[512];
} state;

static void block(const mla_decode_params *p, state *s, const double *query, const double *keys,
                  int64_t n, mistake m)
{
    int64_t rank = p->kv_lora_rank, width = rank + p->qk_rope_head_dim;
    double scores[65], largest = s->largest;
    for (int64_t i = 0; i < n; i++) {
        scores[i] = score(p, query, keys + i * width, m);
        largest = fmax(largest, scores[i]);
    }
    double rescale = s->largest == -INFINITY ? 0.0 : exp(s->largest - largest);
    if (m == RESCALE_FORGOTTEN && s->largest != -INFINITY)
        rescale = 1.0;
    s->sum *= rescale;
    for (int64_t d = 0; d < rank; d++)
        s->out[d] *= rescale;
    for (int64_t i = 0; i < n; i++) {
        double probability = exp(scores[i] - largest);
        if (m == ROUNDED_PROBABILITIES)
            probability = numeric_round(MLA_FORMAT_BF16, probability);
        s->sum += exp(scores[i] - largest);
        for (int64_t d = 0; d < rank; d++)
            s->out[d] += probability * keys[i * width + d];
    }
    s->largest = largest;
}

static void store(const decode_problem *q, int64_t token, int64_t head, const state *s, mistake m)
{
    const mla_decode_params *p = &q->params;
    int64_t seen_head = m == HEADS_SWAPPED ? (head ^ 1) % q->shape.heads : head;
    void *out = oracle_out_row(&p->out, token, seen_head);
    bool empty = s->sum == 0.0;
    if (empty && m == EMPTY_ROW_NOT_WRITTEN)
        return;
    double factor = m == SCALE_LEFT_OUT_OF_VALUES ? 1.0 / (double)p->k_scale : 1.0;
    for (int64_t d = 0; d < p->kv_lora_rank; d++) {
        double x = empty ? 0.0 : s->out[d] / s->sum * factor;
        numeric_put(out, p->out.format, d, empty && m == EMPTY_ROW_NAN ? NAN : x);
    }
    double lse = empty ? -INFINITY : s->largest + log(s->sum);
    if (m == LSE_IN_BASE_2)
        lse *= 1.4426950408889634;
    if (empty && m == EMPTY_ROW_PLUS_INFINITY)
        lse = INFINITY;
    if (m == LSE_UNCAPPED && !empty)
        lse = s->largest + log(s->sum) + 0.01;
    int64_t q_len = p->out.rank == 4 ? p->out.shape[1] : 1;
    if (p->lse.rank == 3)
        numeric_set(&p->lse, token / q_len, token % q_len, seen_head, 0, lse);
    else
        numeric_set(&p->lse, token, seen_head, 0, 0, lse);
}

static void kernel(const decode_problem *q, mistake m)
{
    const mla_decode_params *p = &q->params;
    int64_t width = p->kv_lora_rank + p->qk_rope_head_dim;
    int64_t tokens = 0;
    for (int32_t b = 0; b < q->shape.batch; b++)
        tokens += q->shape.q_len[b];
    double *keys = calloc((size_t)(66 * width), sizeof *keys);
    double *cache = NULL;
    int64_t loaded = -1;
    double *query = calloc((size_t)width, sizeof *query);
    assert_true(keys && query);
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < q->shape.heads; head++) {
            int64_t b, j, q_len;
            oracle_locate(p, token, &b, &j, &q_len);
            int64_t live = oracle_live_keys(p, b, q_len);
            state s = {-INFINITY, 0.0, 0.0, {0.0}};
            oracle_query_row(p, token, head, query);
            for (int64_t d = 0; d < width && m == QUERY_ROUNDED; d++)
                query[d] = numeric_round(MLA_FORMAT_BF16, query[d]);
            int64_t page_size = p->kv_cache.shape[1];
            /* a tail row is not live; reading it brings in poison */
            int64_t end =
                m == TAIL_READ && live > 0 ? (live + page_size - 1) / page_size * page_size : live;
            if (b != loaded) {
                free(cache);
                cache = calloc((size_t)((end + 1) * width), sizeof *cache);
                assert_non_null(cache);
                for (int64_t i = 0; i < end; i++)
                    oracle_cache_row(p, b, i, cache + i * width);
                loaded = b;
            }
            for (int64_t first = 0; first < end; first += 64) {
                int64_t n = 0;
                for (int64_t i = first; i < end && i < first + 64; i++) {
                    if (i < live && !takes(p, b, j, q_len, i, live, m))
                        continue;
                    int64_t from =
                        m == PAGES_EXCHANGED && live >= 2 * page_size && i < 2 * page_size
                            ? (i + 1) % (2 * page_size)
                            : i;
                    memcpy(keys + n * width, cache + from * width, (size_t)width * sizeof *keys);
                    n++;
                    if (m == ONE_KEY_TWICE && i == live / 2) {
                        memcpy(keys + n * width, keys + (n - 1) * width,
                               (size_t)width * sizeof *keys);
                        n++;
                    }
                }
                if (n > 0)
                    block(p, &s, query, keys, n, m);
            }
            store(q, token, head, &s, m);
        }
    free(keys);
    free(cache);
    free(query);
}

static bool passes(const decode_shape *shape, mistake m)
{
    char why[600] = "";
    decode_problem *p = decode_problem_make(shape, 1);
    kernel(p, m);
    oracle_result *want = oracle_decode(&p->params, 0, 1);
    compare_bound bound = compare_bound_of(shape->q_format, shape->kv_format, shape->out_format);
    bool ok = compare_attention(want, &p->params.out, &p->params.lse, bound, why, sizeof why);
    if (!ok && m == HONEST)
        print_error("%s\n", why);
    oracle_free(want);
    decode_problem_free(p);
    return ok;
}

/* Three requests, verify of 3 tokens: formats and page size vary. */
static decode_shape shape_of(int32_t q_format, int32_t kv_format, int32_t page_size)
{
    static const int32_t q_len[] = {3, 3, 3}, kv_len[] = {130, 600, 7};
    decode_shape s = decode_shape_make();
    decode_shape_lengths(&s, 3, q_len, kv_len);
    s.heads = 2;
    s.page_size = page_size;
    s.q_format = q_format;
    s.kv_format = kv_format;
    s.out_format = q_format == MLA_FORMAT_F32 ? MLA_FORMAT_F32 : MLA_FORMAT_BF16;
    s.logit_cap = 4.0f;
    if (kv_format == MLA_FORMAT_E4M3)
        s.k_scale = 0.5f;
    return s;
}

static const int32_t pairs[][2] = {{MLA_FORMAT_F32, MLA_FORMAT_F32},
                                   {MLA_FORMAT_BF16, MLA_FORMAT_BF16},
                                   {MLA_FORMAT_BF16, MLA_FORMAT_E4M3},
                                   {MLA_FORMAT_F32, MLA_FORMAT_DS656}};

static void honest_kernels_pass(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        decode_shape s = shape_of(pairs[i][0], pairs[i][1], 64);
        assert_true(passes(&s, HONEST));
        if (pairs[i][0] != MLA_FORMAT_F32)
            assert_true(passes(&s, ROUNDED_PROBABILITIES));
        else
            assert_false(passes(&s, ROUNDED_PROBABILITIES));
    }
}

static void planted_mistakes_are_caught(void **unused)
{
    (void)unused;
    static const mistake all[] = {
        LAST_PAGE_SKIPPED, MASK_ONE_LATE, MASK_ONE_EARLY, RESCALE_FORGOTTEN, HEADS_SWAPPED,
        LSE_IN_BASE_2,     LSE_UNCAPPED,  ROPE_LEFT_OUT,  CAP_LEFT_OUT,      TAIL_READ};
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++) {
            decode_shape s = shape_of(pairs[i][0], pairs[i][1], 64);
            if (passes(&s, all[k]))
                fail_msg("mistake %d passes with q %s and cache %s", (int)all[k],
                         mla_format_name(pairs[i][0]), mla_format_name(pairs[i][1]));
        }
}

/* One key among two thousand: what a bound relative to the largest value would never see. */
static void one_key_among_thousands_is_caught(void **unused)
{
    (void)unused;
    static const int32_t q_len[] = {1}, kv_len[] = {2100};
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        decode_shape s = shape_of(pairs[i][0], pairs[i][1], 64);
        decode_shape_lengths(&s, 1, q_len, kv_len);
        assert_true(passes(&s, HONEST));
        assert_false(passes(&s, ONE_KEY_DROPPED));
        assert_false(passes(&s, ONE_KEY_TWICE));
        assert_false(passes(&s, MASK_ONE_EARLY));
        assert_false(passes(&s, LAST_PAGE_SKIPPED));
    }
}

static void value_scale_and_page_order_are_seen(void **unused)
{
    (void)unused;
    decode_shape s = shape_of(MLA_FORMAT_BF16, MLA_FORMAT_E4M3, 16);
    assert_false(passes(&s, SCALE_LEFT_OUT_OF_VALUES));
    s = shape_of(MLA_FORMAT_BF16, MLA_FORMAT_BF16, 16);
    /* attention does not depend on the order of keys, so only a causal edge shows an exchange */
    s.kv_len[0] = s.kv_len[1] = s.kv_len[2] = 32;
    assert_false(passes(&s, PAGES_EXCHANGED));
    s = shape_of(MLA_FORMAT_F32, MLA_FORMAT_F32, 16);
    assert_false(passes(&s, QUERY_ROUNDED));
}

static void empty_rows_are_held_to_the_contract(void **unused)
{
    (void)unused;
    static const int32_t q_len[] = {4, 4}, kv_len[] = {2, 0};
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        decode_shape s = shape_of(pairs[i][0], pairs[i][1], 16);
        decode_shape_lengths(&s, 2, q_len, kv_len);
        assert_true(passes(&s, HONEST));
        assert_false(passes(&s, EMPTY_ROW_NAN));
        assert_false(passes(&s, EMPTY_ROW_PLUS_INFINITY));
        assert_false(passes(&s, EMPTY_ROW_NOT_WRITTEN));
    }
}

static void writes_beside_the_output_are_seen(void **unused)
{
    (void)unused;
    char why[200];
    decode_shape s = shape_of(MLA_FORMAT_BF16, MLA_FORMAT_BF16, 16);
    s.layout = SCENE_GAPS;
    decode_problem *p = decode_problem_make(&s, 1);
    kernel(p, HONEST);
    assert_true(scene_intact(&p->base.scene, why, sizeof why));
    scene_block *out = scene_find(&p->base.scene, &p->params.out);
    out->bytes[out->size - 1] = 0;
    assert_false(scene_intact(&p->base.scene, why, sizeof why));
    scene_reset(&p->base.scene);
    assert_true(scene_untouched(&p->base.scene, why, sizeof why));
    *(int32_t *)p->params.cache_seqlens.data += 1;
    assert_false(scene_intact(&p->base.scene, why, sizeof why));
    decode_problem_free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(honest_kernels_pass),
        cmocka_unit_test(planted_mistakes_are_caught),
        cmocka_unit_test(one_key_among_thousands_is_caught),
        cmocka_unit_test(value_scale_and_page_order_are_seen),
        cmocka_unit_test(empty_rows_are_held_to_the_contract),
        cmocka_unit_test(writes_beside_the_output_are_seen),
    };
    return cmocka_run_group_tests_name("compare", tests, NULL, NULL);
}
