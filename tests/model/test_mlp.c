/*
 * Routing against a slow statement of its rules (try every set of groups and experts by rank), the
 * mixture against a plain double loop over tokens and experts.
 */
#include "support.h"
#include "test.h"

#include <math.h>
#include <mlp.h>
#include <stdlib.h>
#include <string.h>

enum { EXPERTS = 16, MAX_K = 6 };

/* How many of values[0..n) stand before index i: larger, or equal with a lower index. */
static int rank_of(const double *values, int n, int i)
{
    int rank = 0;
    for (int j = 0; j < n; j++)
        rank += values[j] > values[i] || (values[j] == values[i] && j < i);
    return rank;
}

static void slow_route(const mlai_model_config *c, const float *logits, const float *bias,
                       int *is_chosen, double *weights)
{
    bool is_noaux = c->topk_method == MLAI_TOPK_NOAUX_TC;
    double score[EXPERTS];
    double choice[EXPERTS];
    double groups[EXPERTS];
    double total = 0.0;
    int n_group = (int)c->n_group;
    int size = EXPERTS / n_group;
    for (int e = 0; e < EXPERTS; e++)
        total += exp(logits[e]);
    for (int e = 0; e < EXPERTS; e++) {
        score[e] = is_noaux ? 1.0 / (1.0 + exp(-(double)logits[e])) : exp(logits[e]) / total;
        choice[e] = score[e] + (is_noaux ? bias[e] : 0.0);
    }
    for (int g = 0; g < n_group; g++) {
        groups[g] = 0.0;
        for (int e = 0; e < size; e++) {
            if (rank_of(choice + g * size, size, e) < (is_noaux ? 2 : 1))
                groups[g] += choice[g * size + e];
        }
    }
    for (int e = 0; e < EXPERTS; e++) {
        if (rank_of(groups, n_group, e / size) >= c->topk_group)
            choice[e] = -INFINITY;
    }
    double sum = 0.0;
    for (int e = 0; e < EXPERTS; e++) {
        is_chosen[e] = rank_of(choice, EXPERTS, e) < c->num_experts_per_tok;
        sum += is_chosen[e] ? score[e] : 0.0;
    }
    for (int e = 0; e < EXPERTS; e++) {
        bool is_normal = c->norm_topk_prob && (is_noaux || c->num_experts_per_tok > 1);
        double factor = is_normal ? 1.0 / sum : 1.0;
        if (is_noaux || !is_normal)
            factor *= c->routed_scaling_factor;
        weights[e] = is_chosen[e] ? score[e] * factor : 0.0;
    }
}

static void test_routing(void **state)
{
    (void)state;
    static const mlai_topk_method methods[] = {MLAI_TOPK_GREEDY, MLAI_TOPK_GROUP_LIMITED_GREEDY,
                                               MLAI_TOPK_NOAUX_TC};
    uint64_t random = 3;
    for (int round = 0; round < 6000; round++) {
        mlai_model_config c = {.n_routed_experts = EXPERTS, .routed_scaling_factor = 2.5};
        c.topk_method = methods[round % 3];
        c.n_group = c.topk_method == MLAI_TOPK_GREEDY ? 1 : 1 << (round / 3 % 4);
        c.topk_group = 1 + round / 12 % c.n_group;
        c.num_experts_per_tok = 1 + round / 7 % MAX_K;
        if (c.num_experts_per_tok > c.topk_group * (EXPERTS / c.n_group))
            c.num_experts_per_tok = c.topk_group * (EXPERTS / c.n_group);
        c.norm_topk_prob = round / 5 % 2 == 0;
        float logits[EXPERTS];
        float bias[EXPERTS];
        for (int e = 0; e < EXPERTS; e++) {
            logits[e] = 4.0f * random_value(&random);
            /* Negative enough that a masked expert would win if it counted as 0. */
            bias[e] = random_value(&random) - 1.5f;
            /* Ties in some rounds: equal logits and biases. */
            if (round % 11 == 0 && e % 3 == 0) {
                logits[e] = 0.5f;
                bias[e] = -0.25f;
            }
        }
        float scores[EXPERTS];
        float groups[EXPERTS];
        int32_t chosen[MAX_K];
        float weights[MAX_K];
        int want_chosen[EXPERTS];
        double want_weights[EXPERTS];
        mlai_route(&c, logits, bias, scores, groups, chosen, weights);
        slow_route(&c, logits, bias, want_chosen, want_weights);
        for (int i = 0; i < c.num_experts_per_tok; i++) {
            assert_in_range(chosen[i], 0, EXPERTS - 1);
            assert_true(want_chosen[chosen[i]]);
            want_chosen[chosen[i]] = 0;
            assert_true(fabs(weights[i] - want_weights[chosen[i]]) <
                        1e-5 * fabs(want_weights[chosen[i]]) + 1e-12);
        }
    }
}

/* NaN and infinite logits still choose k different experts. */
static void test_routing_broken(void **state)
{
    (void)state;
    mlai_model_config c = {.n_routed_experts = EXPERTS,
                           .routed_scaling_factor = 1.0,
                           .n_group = 4,
                           .topk_group = 2,
                           .num_experts_per_tok = MAX_K};
    float bias[EXPERTS] = {0};
    for (int method = 0; method < 2; method++) {
        c.topk_method = method == 0 ? MLAI_TOPK_NOAUX_TC : MLAI_TOPK_GROUP_LIMITED_GREEDY;
        for (int kind = 0; kind < 3; kind++) {
            float logits[EXPERTS];
            float scores[EXPERTS];
            float groups[EXPERTS];
            int32_t chosen[MAX_K];
            float weights[MAX_K];
            for (int e = 0; e < EXPERTS; e++)
                logits[e] = kind == 0 ? NAN : kind == 1 ? INFINITY : -INFINITY;
            mlai_route(&c, logits, bias, scores, groups, chosen, weights);
            for (int i = 0; i < MAX_K; i++) {
                assert_in_range(chosen[i], 0, EXPERTS - 1);
                for (int j = 0; j < i; j++)
                    assert_int_not_equal(chosen[i], chosen[j]);
            }
        }
    }
}

enum { HIDDEN = 24, WIDTH = 20, TOKENS = 19 };

static void random_matrix(mlai_matrix *matrix, int64_t rows, int64_t cols, uint64_t seed)
{
    float *data = calloc((size_t)(rows * cols), sizeof *data);
    fill_random(data, rows * cols, seed);
    *matrix = (mlai_matrix){
        .format = MLA_FORMAT_F32, .rows = rows, .cols = cols, .data = data, .owned = data};
}

static double dot(const float *a, const float *b, int64_t n)
{
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)a[i] * b[i];
    return sum;
}

static void add_mlp(const mlai_mlp *mlp, const float *x, double weight, double *y)
{
    double inner[2 * WIDTH];
    int64_t width = mlp->gate.rows;
    for (int64_t i = 0; i < width; i++) {
        double gate = dot((const float *)mlp->gate.data + i * HIDDEN, x, HIDDEN);
        double up = dot((const float *)mlp->up.data + i * HIDDEN, x, HIDDEN);
        inner[i] = gate / (1.0 + exp(-gate)) * up;
    }
    for (int64_t h = 0; h < HIDDEN; h++) {
        for (int64_t i = 0; i < width; i++)
            y[h] += weight * inner[i] * ((const float *)mlp->down.data)[h * width + i];
    }
}

static void test_mixture(void **state)
{
    (void)state;
    mlai_model_config c = {.hidden_size = HIDDEN,
                           .intermediate_size = WIDTH,
                           .moe_intermediate_size = WIDTH,
                           .n_routed_experts = EXPERTS,
                           .n_shared_experts = 2,
                           .num_experts_per_tok = 3,
                           .n_group = 4,
                           .topk_group = 2,
                           .topk_method = MLAI_TOPK_NOAUX_TC,
                           .norm_topk_prob = true,
                           .routed_scaling_factor = 1.5};
    mla_context *ctx = NULL;
    mlai_compute compute;
    mlai_mlp_scratch scratch;
    mla_diag diag = {{0}};
    must(mla_context_create(NULL, &ctx, &diag), &diag, "context");
    must(mlai_compute_init(ctx, MLA_FORMAT_F32, &compute, &diag), &diag, "compute");
    must(mlai_mlp_scratch_init(&c, TOKENS, &scratch, &diag), &diag, "scratch");
    mlai_moe moe = {.experts = calloc(EXPERTS, sizeof(mlai_mlp)),
                    .correction_bias = calloc(EXPERTS, sizeof(float))};
    fill_random(moe.correction_bias, EXPERTS, 4);
    random_matrix(&moe.router, EXPERTS, HIDDEN, 1);
    for (int e = 0; e <= EXPERTS; e++) {
        mlai_mlp *mlp = e < EXPERTS ? &moe.experts[e] : &moe.shared;
        int64_t width = e < EXPERTS ? WIDTH : 2 * WIDTH;
        random_matrix(&mlp->gate, width, HIDDEN, 100 + (uint64_t)e);
        random_matrix(&mlp->up, width, HIDDEN, 200 + (uint64_t)e);
        random_matrix(&mlp->down, HIDDEN, width, 300 + (uint64_t)e);
    }
    float x[TOKENS * HIDDEN];
    float y[TOKENS * HIDDEN];
    fill_random(x, TOKENS * HIDDEN, 8);
    fill_random(y, TOKENS * HIDDEN, 9);
    double want[TOKENS * HIDDEN];
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        want[i] = y[i];
    mlai_moe_add(&compute, &c, &moe, &scratch, x, TOKENS, y);
    for (int t = 0; t < TOKENS; t++) {
        float logits[EXPERTS];
        int is_chosen[EXPERTS];
        double weights[EXPERTS];
        for (int e = 0; e < EXPERTS; e++)
            logits[e] =
                (float)dot((const float *)moe.router.data + e * HIDDEN, x + t * HIDDEN, HIDDEN);
        slow_route(&c, logits, moe.correction_bias, is_chosen, weights);
        for (int e = 0; e < EXPERTS; e++) {
            if (is_chosen[e])
                add_mlp(&moe.experts[e], x + t * HIDDEN, weights[e], want + t * HIDDEN);
        }
        add_mlp(&moe.shared, x + t * HIDDEN, 1.0, want + t * HIDDEN);
    }
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        assert_true(fabs(y[i] - want[i]) < 1e-4);
    mlai_moe_free(&moe, EXPERTS);
    mlai_mlp_scratch_free(&scratch);
    mlai_compute_free(&compute);
    mla_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_routing),
        cmocka_unit_test(test_routing_broken),
        cmocka_unit_test(test_mixture),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
