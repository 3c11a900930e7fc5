/*
 * Gated MLP and mixture of experts (mlp.h). Tokens are grouped by expert with a counting sort, so
 * that each expert's weights are read once a forward and its tokens form one product: gather rows
 * [n, hidden], gate and up [n, I], SwiGLU, down [n, hidden], then y[token] += weight * row. Experts
 * run in index order, so the sum of a token's experts does not depend on its batch. f32 sums;
 * values that feed a product are rounded to the compute format. Called by deepseek.c.
 */
#include "mlp.h"

#include "convert.h"
#include "fault.h"
#include "norm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static float *floats(int64_t a, int64_t b)
{
    size_t count = 0;
    if (__builtin_mul_overflow((size_t)(a > 0 ? a : 1), (size_t)(b > 0 ? b : 1), &count) ||
        count > SIZE_MAX / sizeof(float))
        return NULL;
    return malloc(count * sizeof(float));
}

mla_status mlai_mlp_scratch_init(const mlai_model_config *config, int64_t max_tokens,
                                 mlai_mlp_scratch *out, mla_diag *diag)
{
    int64_t shared = config->moe_intermediate_size *
                     (config->n_shared_experts > 0 ? config->n_shared_experts : 1);
    int64_t widest = config->intermediate_size > shared ? config->intermediate_size : shared;
    int64_t experts = config->n_routed_experts;
    int64_t k = config->num_experts_per_tok;
    *out = (mlai_mlp_scratch){.max_tokens = max_tokens};
    out->gate = floats(max_tokens, widest);
    out->up = floats(max_tokens, widest);
    out->rows = floats(max_tokens, config->hidden_size);
    out->products = floats(max_tokens, config->hidden_size);
    out->logits = floats(max_tokens, experts);
    out->weights = floats(max_tokens, k);
    out->scores = floats(experts, 1);
    out->group_scores = floats(config->n_group, 1);
    out->chosen = (int32_t *)(void *)floats(max_tokens, k);
    out->order = (int32_t *)(void *)floats(max_tokens, k);
    out->starts = (int32_t *)(void *)floats(experts + 1, 1);
    if (out->gate == NULL || out->up == NULL || out->rows == NULL || out->products == NULL ||
        out->logits == NULL || out->weights == NULL || out->scores == NULL ||
        out->group_scores == NULL || out->chosen == NULL || out->order == NULL ||
        out->starts == NULL) {
        mlai_mlp_scratch_free(out);
        return mlai_model_fail_memory(diag, "scratch of the feed-forward layers",
                                      (unsigned long long)max_tokens *
                                          (unsigned long long)(2 * (widest + config->hidden_size)) *
                                          sizeof(float));
    }
    return MLA_OK;
}

void mlai_mlp_scratch_free(mlai_mlp_scratch *scratch)
{
    free(scratch->gate);
    free(scratch->up);
    free(scratch->rows);
    free(scratch->products);
    free(scratch->logits);
    free(scratch->weights);
    free(scratch->scores);
    free(scratch->group_scores);
    free(scratch->chosen);
    free(scratch->order);
    free(scratch->starts);
    *scratch = (mlai_mlp_scratch){0};
}

/* products = down(silu(gate(x)) * up(x)); products may not be x. */
static void mlp_product(mlai_compute *compute, const mlai_mlp *mlp, mlai_mlp_scratch *scratch,
                        const float *x, int64_t m, float *products)
{
    int64_t hidden = mlp->gate.cols;
    int64_t width = mlp->gate.rows;
    mlai_linear(compute, &mlp->gate, x, hidden, m, scratch->gate, width);
    mlai_linear(compute, &mlp->up, x, hidden, m, scratch->up, width);
    mlai_swiglu(scratch->gate, scratch->up, m * width, compute->format);
    mlai_linear(compute, &mlp->down, scratch->gate, width, m, products, hidden);
}

void mlai_mlp_add(mlai_compute *compute, const mlai_mlp *mlp, mlai_mlp_scratch *scratch,
                  const float *x, int64_t m, float *y)
{
    int64_t hidden = mlp->gate.cols;
    mlp_product(compute, mlp, scratch, x, m, scratch->products);
    for (int64_t i = 0; i < m * hidden; i++)
        y[i] += scratch->products[i];
}

/*
 * The index of the largest value among those not yet taken (taken values are NaN here and never
 * compare), the lowest among equals; -1 when all are taken.
 */
static int32_t best_index(const float *values, int64_t n)
{
    int32_t best = -1;
    for (int64_t i = 0; i < n; i++) {
        if (!isnan(values[i]) && (best < 0 || values[i] > values[best]))
            best = (int32_t)i;
    }
    return best;
}

static float two_largest(const float *values, int64_t n)
{
    float first = -INFINITY;
    float second = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        if (values[i] > first) {
            second = first;
            first = values[i];
        } else if (values[i] > second) {
            second = values[i];
        }
    }
    return first + second;
}

/* Takes the experts of all but the topk_group best groups out of the choice. */
static void mask_groups(const mlai_model_config *config, float *scores, float *group_scores)
{
    int64_t size = config->n_routed_experts / config->n_group;
    for (int64_t g = 0; g < config->n_group; g++) {
        const float *group = scores + g * size;
        if (config->topk_method == MLAI_TOPK_NOAUX_TC)
            group_scores[g] = two_largest(group, size);
        else
            group_scores[g] = group[best_index(group, size)];
    }
    for (int64_t rank = 0; rank < config->topk_group; rank++)
        group_scores[best_index(group_scores, config->n_group)] = NAN;
    for (int64_t g = 0; g < config->n_group; g++) {
        if (!isnan(group_scores[g])) {
            for (int64_t e = g * size; e < (g + 1) * size; e++)
                scores[e] = NAN;
        }
    }
}

/* What a token's experts are ranked and weighted by, before the correction. */
static void affinities(const mlai_model_config *config, const float *logits, float *scores)
{
    int64_t n = config->n_routed_experts;
    float sum = 0.0f;
    float largest = -INFINITY;
    for (int64_t e = 0; e < n; e++)
        largest = logits[e] > largest ? logits[e] : largest;
    for (int64_t e = 0; e < n; e++) {
        if (config->topk_method == MLAI_TOPK_NOAUX_TC)
            scores[e] = 1.0f / (1.0f + expf(-logits[e]));
        else
            scores[e] = expf(logits[e] - largest);
        /* A model that has broken down gives NaN; it still has to route somewhere. */
        scores[e] = isnan(scores[e]) ? 0.0f : scores[e];
        sum += scores[e];
    }
    if (config->topk_method != MLAI_TOPK_NOAUX_TC && sum > 0.0f) {
        for (int64_t e = 0; e < n; e++)
            scores[e] /= sum;
    }
}

void mlai_route(const mlai_model_config *config, const float *logits, const float *correction_bias,
                float *scores, float *group_scores, int32_t *chosen, float *weights)
{
    bool is_noaux = config->topk_method == MLAI_TOPK_NOAUX_TC;
    int64_t k = config->num_experts_per_tok;
    affinities(config, logits, scores);
    for (int64_t e = 0; is_noaux && e < config->n_routed_experts; e++)
        scores[e] += isnan(correction_bias[e]) ? 0.0f : correction_bias[e];
    if (config->n_group > 1)
        mask_groups(config, scores, group_scores);
    float sum = 0.0f;
    for (int64_t i = 0; i < k; i++) {
        int32_t e = best_index(scores, config->n_routed_experts);
        chosen[i] = e;
        weights[i] = is_noaux ? 1.0f / (1.0f + expf(-logits[e])) : scores[e];
        scores[e] = NAN;
        sum += weights[i];
    }
    bool is_normalized = config->norm_topk_prob && (is_noaux || k > 1);
    float factor = is_normalized ? 1.0f / (sum + 1e-20f) : 1.0f;
    if (is_noaux || !is_normalized)
        factor *= (float)config->routed_scaling_factor;
    for (int64_t i = 0; i < k; i++)
        weights[i] *= factor;
}

/* order = (token * k + choice) grouped by expert, starts[e] .. starts[e + 1] the part of e. */
static void sort_by_expert(const mlai_model_config *config, mlai_mlp_scratch *scratch, int64_t m)
{
    int64_t n = config->n_routed_experts;
    int64_t pairs = m * config->num_experts_per_tok;
    memset(scratch->starts, 0, (size_t)(n + 1) * sizeof *scratch->starts);
    for (int64_t i = 0; i < pairs; i++)
        scratch->starts[scratch->chosen[i] + 1]++;
    for (int64_t e = 0; e < n; e++)
        scratch->starts[e + 1] += scratch->starts[e];
    for (int64_t i = 0; i < pairs; i++)
        scratch->order[scratch->starts[scratch->chosen[i]]++] = (int32_t)i;
    /* The fill moved each start to the next one's place. */
    for (int64_t e = n; e > 0; e--)
        scratch->starts[e] = scratch->starts[e - 1];
    scratch->starts[0] = 0;
}

void mlai_moe_add(mlai_compute *compute, const mlai_model_config *config, const mlai_moe *moe,
                  mlai_mlp_scratch *scratch, const float *x, int64_t m, float *y)
{
    int64_t hidden = config->hidden_size;
    int64_t n = config->n_routed_experts;
    int64_t k = config->num_experts_per_tok;
    mlai_linear(compute, &moe->router, x, hidden, m, scratch->logits, n);
    for (int64_t t = 0; t < m; t++)
        mlai_route(config, scratch->logits + t * n, moe->correction_bias, scratch->scores,
                   scratch->group_scores, scratch->chosen + t * k, scratch->weights + t * k);
    sort_by_expert(config, scratch, m);
    for (int64_t e = 0; e < n; e++) {
        const int32_t *pairs = scratch->order + scratch->starts[e];
        int64_t count = scratch->starts[e + 1] - scratch->starts[e];
        if (count == 0)
            continue;
        for (int64_t i = 0; i < count; i++)
            memcpy(scratch->rows + i * hidden, x + pairs[i] / k * hidden,
                   (size_t)hidden * sizeof *x);
        mlp_product(compute, &moe->experts[e], scratch, scratch->rows, count, scratch->products);
        for (int64_t i = 0; i < count; i++) {
            const float *product = scratch->products + i * hidden;
            float *out = y + pairs[i] / k * hidden;
            float weight = scratch->weights[pairs[i]];
            for (int64_t c = 0; c < hidden; c++)
                out[c] += weight * product[c];
        }
    }
    if (moe->shared.gate.data != NULL)
        mlai_mlp_add(compute, &moe->shared, scratch, x, m, y);
}

void mlai_mlp_free(mlai_mlp *mlp)
{
    mlai_matrix_free(&mlp->gate);
    mlai_matrix_free(&mlp->up);
    mlai_matrix_free(&mlp->down);
}

void mlai_moe_free(mlai_moe *moe, int64_t n_experts)
{
    for (int64_t e = 0; moe->experts != NULL && e < n_experts; e++)
        mlai_mlp_free(&moe->experts[e]);
    free(moe->experts);
    free(moe->correction_bias);
    mlai_matrix_free(&moe->router);
    mlai_mlp_free(&moe->shared);
    *moe = (mlai_moe){0};
}
