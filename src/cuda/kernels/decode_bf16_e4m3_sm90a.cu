/*
 * Absorbed MLA decode, bf16 queries over an e4m3 cache, on Hopper: see decode_fp8_sm90a.cuh.
 */
#include "decode_fp8_sm90a.cuh"

MLAI_DECODE_WIDE_KERNELS(decode_bf16_e4m3_sm90a, mlai_decode::QUERY_BF16, mlai_decode::CACHE_E4M3)
