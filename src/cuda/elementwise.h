/*
 * The CUDA solutions that are not attention, for the table in rows_cuda.c: see elementwise.c.
 */
#ifndef MLAI_CUDA_ELEMENTWISE_H
#define MLAI_CUDA_ELEMENTWISE_H

#include <mla/solution.h>

/* operator constant, stem, formats and features for people */
#define MLAI_CUDA_ELEMENTWISE_OPS(X)                                                               \
    X(MERGE, merge, "states f32 bf16 f16; out f32 bf16 f16",                                       \
      "1 to 64 states, any widths and strides, in place")                                          \
    X(WRITE, write, "rows f32 bf16 f16; cache f32 bf16 f16 e4m3 e5m2 ds656",                       \
      "any dims, page sizes and strides, split cache, k_scale, sanitize")                          \
    X(GATHER, gather, "cache f32 bf16 f16 e4m3 e5m2 ds656; rows f32 bf16 f16 e4m3 e5m2",           \
      "any dims, page sizes and strides, split cache, k_scale")                                    \
    X(ROPE, rope, "x f32 bf16 f16; out f32 bf16 f16 e4m3 e5m2",                                    \
      "interleaved and half-split, any even width, in place")                                      \
    X(ROPE_WRITE, rope_write,                                                                      \
      "rows f32 bf16 f16; q out f32 bf16 f16 e4m3 e5m2; cache f32 bf16 f16 e4m3 e5m2 ds656",       \
      "as rope and write together")                                                                \
    X(PACK, pack, "k and v f32 bf16 f16; out f32 bf16 f16 e4m3 e5m2",                              \
      "any dims and strides, scales")

#define MLAI_CUDA_ELEMENTWISE_DECLARE(constant, stem, formats, features)                           \
    mla_status mlai_cuda_##stem(const mla_exec *exec, const mla_problem *problem,                  \
                                const void *params, mla_diag *diag);
MLAI_CUDA_ELEMENTWISE_OPS(MLAI_CUDA_ELEMENTWISE_DECLARE)

#endif
