/*
 * Ceilings of AVX2: 256-bit FMA on registers and 256-bit loads. See ceilings.h. 12 independent
 * chains cover the latency of two units (4 to 5 cycles each).
 */
#include "ceilings.h"
#include <immintrin.h>

#define CHAINS 12

double bench_fma_avx2(int64_t rounds)
{
    __m256 sums[CHAINS];
    __m256 factor = _mm256_set1_ps(1.0f);
    __m256 addend = _mm256_setzero_ps();
    for (int c = 0; c < CHAINS; c++)
        sums[c] = _mm256_setzero_ps();
    for (int64_t i = 0; i < rounds; i++) {
        /* The compiler may not know the operands, or it would drop the loop. */
        __asm__ volatile("" : "+x"(factor), "+x"(addend));
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; c++)
            sums[c] = _mm256_fmadd_ps(sums[c], factor, addend);
    }
    for (int c = 1; c < CHAINS; c++)
        sums[0] = _mm256_add_ps(sums[0], sums[c]);
    __asm__ volatile("" : : "x"(sums[0]));
    return (double)rounds * CHAINS * 8 * 2;
}

uint64_t bench_read_avx2(const void *buffer, uint64_t bytes)
{
    const char *at = buffer;
    const char *end = at + bytes / 512 * 512;
    __m256i sums[4];
    for (int j = 0; j < 4; j++)
        sums[j] = _mm256_setzero_si256();
    for (; at < end; at += 512) {
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++)
            sums[j % 4] = _mm256_or_si256(
                sums[j % 4], _mm256_load_si256((const __m256i *)(const void *)(at + j * 32)));
    }
    sums[0] = _mm256_or_si256(_mm256_or_si256(sums[0], sums[1]), _mm256_or_si256(sums[2], sums[3]));
    uint64_t words[4];
    _mm256_storeu_si256((void *)words, sums[0]);
    return words[0] | words[3];
}
