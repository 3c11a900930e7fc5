/*
 * Absorbed MLA decode, e4m3 queries over an e4m3 cache, on Hopper: see decode_fp8_sm90a.cuh.
 */
#include "decode_fp8_sm90a.cuh"

MLAI_DECODE_WIDE_KERNELS(decode_e4m3_sm90a, mlai_decode::QUERY_E4M3, mlai_decode::CACHE_E4M3)
MLAI_DECODE_WIDE_KERNELS_64(decode_e4m3_sm90a, mlai_decode::QUERY_E4M3, mlai_decode::CACHE_E4M3)
