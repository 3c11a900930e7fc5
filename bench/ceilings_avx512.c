/*
 * Ceilings of AVX-512: 512-bit FMA on registers and 512-bit loads. See ceilings.h. 24 independent
 * chains cover the latency of two units (4 to 5 cycles each).
 */
#include "ceilings.h"
#include <immintrin.h>

#define CHAINS 24

double bench_fma_avx512(int64_t rounds)
{
    __m512 sums[CHAINS];
    __m512 factor = _mm512_set1_ps(1.0f);
    __m512 addend = _mm512_setzero_ps();
    for (int c = 0; c < CHAINS; c++)
        sums[c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < rounds; i++) {
        /* The compiler may not know the operands, or it would drop the loop. */
        __asm__ volatile("" : "+v"(factor), "+v"(addend));
#pragma GCC unroll 24
        for (int c = 0; c < CHAINS; c++)
            sums[c] = _mm512_fmadd_ps(sums[c], factor, addend);
    }
    for (int c = 1; c < CHAINS; c++)
        sums[0] = _mm512_add_ps(sums[0], sums[c]);
    __asm__ volatile("" : : "v"(sums[0]));
    return (double)rounds * CHAINS * 16 * 2;
}

uint64_t bench_read_avx512(const void *buffer, uint64_t bytes)
{
    const char *at = buffer;
    const char *end = at + bytes / 512 * 512;
    __m512i sums[4];
    for (int j = 0; j < 4; j++)
        sums[j] = _mm512_setzero_si512();
    for (; at < end; at += 512) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            sums[j % 4] = _mm512_or_si512(sums[j % 4], _mm512_load_si512((at + j * 64)));
    }
    sums[0] = _mm512_or_si512(_mm512_or_si512(sums[0], sums[1]), _mm512_or_si512(sums[2], sums[3]));
    uint64_t words[8];
    _mm512_storeu_si512((void *)words, sums[0]);
    return words[0] | words[7];
}
