/*
 * Ceiling of AVX-512 BF16: VDPBF16PS on registers, 32 bf16 products and 32 additions an
 * instruction. See ceilings.h.
 */
#include "ceilings.h"
#include <immintrin.h>

#define CHAINS 24

double bench_dot_avx512_bf16(int64_t rounds)
{
    __m512 sums[CHAINS];
    __m512i bits = _mm512_set1_epi32(0x3f803f80); /* pairs of 1.0 */
    __m512i zero = _mm512_setzero_si512();
    for (int c = 0; c < CHAINS; c++)
        sums[c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < rounds; i++) {
        /* The compiler may not know the operands, or it would drop the loop. */
        __asm__ volatile("" : "+v"(bits), "+v"(zero));
#pragma GCC unroll 24
        for (int c = 0; c < CHAINS; c++)
            sums[c] = _mm512_dpbf16_ps(sums[c], (__m512bh)bits, (__m512bh)zero);
    }
    for (int c = 1; c < CHAINS; c++)
        sums[0] = _mm512_add_ps(sums[0], sums[c]);
    __asm__ volatile("" : : "v"(sums[0]));
    return (double)rounds * CHAINS * 64;
}
