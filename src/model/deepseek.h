/*
 * The weights of a DeepSeek-V2 or V3 model, by layer, with the views that the attention takes.
 *
 * kv_b_proj.weight [H * (N + V), R] serves both paths: as a projection (expanded keys and values),
 * and as two strided views (absorbed): w_uk[h, n, r] = row h * (N + V) + n, w_uv[h, r, v] = row
 * h * (N + V) + N + v, transposed by its strides. All matrices have the compute format, except the
 * router, which is f32. Letters as in mla/ops.h. Called by session.c, forward.c, attention.c.
 */
#ifndef MLAI_MODEL_DEEPSEEK_H
#define MLAI_MODEL_DEEPSEEK_H

#include "mla_model.h"
#include "mlp.h"

typedef struct mlai_layer {
    float *input_norm; /* [hidden] */
    float *post_norm;  /* [hidden] */
    mlai_matrix q;     /* q_proj [H * L, hidden], or q_b_proj [H * L, q_lora_rank] */
    mlai_matrix q_a;   /* [q_lora_rank, hidden], absent without q_lora_rank */
    float *q_a_norm;   /* [q_lora_rank] */
    mlai_matrix kv_a;  /* [R + P, hidden] */
    float *kv_a_norm;  /* [R] */
    mlai_matrix kv_b;  /* [H * (N + V), R] */
    mla_tensor w_uk;   /* [H, N, R] */
    mla_tensor w_uv;   /* [H, R, V] */
    mlai_matrix o;     /* [hidden, H * V] */
    mlai_mlp dense;    /* of layers without experts */
    mlai_moe moe;
    bool has_experts;
} mlai_layer;

struct mla_model {
    mla_context *ctx;
    mlai_model_config config;
    bool is_byte_level;
    float softmax_scale;
    mlai_st_reader *reader; /* borrowed weights point into it */
    mlai_compute compute;
    mlai_matrix embedding; /* [vocab, hidden] */
    mlai_matrix head;      /* [vocab, hidden]; a view of the embedding when tied */
    float *final_norm;     /* [hidden] */
    float *inv_freq;       /* [P / 2] */
    mlai_layer *layers;    /* [num_layers] */
};

#endif
