/*
 * Absorbed MLA decode, bf16 queries over a bf16 cache, on Hopper: see decode_sm90a.cuh.
 */
#include "decode_sm90a.cuh"

MLAI_DECODE_KERNELS(decode_bf16_sm90a, mlai_decode::FORMAT_BF16)
