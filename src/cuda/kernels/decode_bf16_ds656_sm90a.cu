/*
 * Absorbed MLA decode, bf16 queries over a cache of 656-byte rows, on Hopper: see
 * decode_fp8_sm90a.cuh.
 */
#include "decode_fp8_sm90a.cuh"

MLAI_DECODE_WIDE_KERNELS(decode_bf16_ds656_sm90a, mlai_decode::QUERY_BF16, mlai_decode::CACHE_DS656)
