/*
 * Absorbed MLA decode, f16 queries over a f16 cache, on Hopper: see decode_sm90a.cuh.
 */
#include "decode_sm90a.cuh"

MLAI_DECODE_KERNELS(decode_f16_sm90a, mlai_decode::FORMAT_F16)
