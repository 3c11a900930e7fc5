/*
 * Feed-forward parts of a decoder layer: the gated dense MLP, and routed experts with shared ones.
 *
 *   mlp(x) = down(silu(gate(x)) * up(x))
 *   moe(x) = sum over chosen experts e of weight_e * mlp_e(x)  +  mlp_shared(x)
 * Routing, on logits g = x W_g^T in f32, k experts a token:
 *   greedy                 s = softmax(g); the k largest s.
 *   group_limited_greedy   s = softmax(g); a group's score is its largest s; the topk_group best
 *                          groups; of their experts the k largest s.
 *   noaux_tc               s = sigmoid(g), choice by c = s + bias; a group's score is the sum of
 *                          its two largest c; the topk_group best groups; of their experts the k
 *                          largest c; weights are s.
 * Softmax kinds: weights s / (sum s + 1e-20) if norm_topk_prob and k > 1, else s * scaling factor.
 * noaux_tc: weights s, divided by (sum s + 1e-20) if norm_topk_prob, then times the scaling factor.
 * Equal values: the lower index. Sums in f32. Called by deepseek.c and the tests.
 */
#ifndef MLAI_MODEL_MLP_H
#define MLAI_MODEL_MLP_H

#include "linear.h"

typedef struct mlai_mlp {
    mlai_matrix gate; /* [I, hidden] */
    mlai_matrix up;   /* [I, hidden] */
    mlai_matrix down; /* [hidden, I] */
} mlai_mlp;

typedef struct mlai_moe {
    mlai_matrix router;     /* [E, hidden], always f32 */
    float *correction_bias; /* [E] for noaux_tc, else NULL */
    mlai_mlp *experts;      /* [E] */
    mlai_mlp shared;        /* gate.data NULL = none */
} mlai_moe;

/* Scratch for forwards of at most max_tokens tokens. */
typedef struct mlai_mlp_scratch {
    int64_t max_tokens;
    float *gate;         /* [max_tokens, widest] */
    float *up;           /* [max_tokens, widest] */
    float *rows;         /* [max_tokens, hidden]: inputs of one expert */
    float *products;     /* [max_tokens, hidden]: its outputs */
    float *logits;       /* [max_tokens, E] */
    int32_t *chosen;     /* [max_tokens, k] */
    float *weights;      /* [max_tokens, k] */
    int32_t *order;      /* [max_tokens * k]: (token, choice) pairs by expert */
    int32_t *starts;     /* [E + 1] */
    float *scores;       /* [E]: one token's values for the choice */
    float *group_scores; /* [n_group] */
} mlai_mlp_scratch;

mla_status mlai_mlp_scratch_init(const mlai_model_config *config, int64_t max_tokens,
                                 mlai_mlp_scratch *out, mla_diag *diag);
void mlai_mlp_scratch_free(mlai_mlp_scratch *scratch);

/*
 * Chooses experts for one token from its logits [E]: chosen[k] and weights[k], best first by the
 * value of the choice. scores [E] and group_scores [n_group] are scratch.
 */
void mlai_route(const mlai_model_config *config, const float *logits, const float *correction_bias,
                float *scores, float *group_scores, int32_t *chosen, float *weights);

/* y += mlp(x) for m rows of `hidden`; products are rounded to the compute format. */
void mlai_mlp_add(mlai_compute *compute, const mlai_mlp *mlp, mlai_mlp_scratch *scratch,
                  const float *x, int64_t m, float *y);

/* y += moe(x). After it scratch->chosen holds the experts of each token. */
void mlai_moe_add(mlai_compute *compute, const mlai_model_config *config, const mlai_moe *moe,
                  mlai_mlp_scratch *scratch, const float *x, int64_t m, float *y);

void mlai_mlp_free(mlai_mlp *mlp);
void mlai_moe_free(mlai_moe *moe, int64_t n_experts);

#endif
