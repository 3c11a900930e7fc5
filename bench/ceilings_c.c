/*
 * Ceilings that need no special instruction set: multiply-adds as the compiler makes them for the
 * base ISA (16-byte vectors), and reading memory. See ceilings.h.
 */
#include "ceilings.h"
#include <stddef.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#include <string.h>

#define CHAINS 12

typedef float vector4 __attribute__((vector_size(16)));

double bench_fma_c(int64_t rounds)
{
    vector4 sums[CHAINS];
    vector4 factor = {1.0f, 1.0f, 1.0f, 1.0f};
    vector4 addend = {0.0f, 0.0f, 0.0f, 0.0f};
    memset(sums, 0, sizeof sums);
    for (int64_t i = 0; i < rounds; i++) {
        /* The compiler may not know the operands, or it would drop the loop. */
        __asm__ volatile("" : "+m"(factor), "+m"(addend));
        for (int c = 0; c < CHAINS; c++)
            sums[c] = sums[c] * factor + addend;
    }
    for (int c = 1; c < CHAINS; c++)
        sums[0] += sums[c];
    __asm__ volatile("" : : "m"(sums[0]));
    return (double)rounds * CHAINS * 4 * 2;
}

uint64_t bench_read_c(const void *buffer, uint64_t bytes)
{
    const uint64_t *words = buffer;
    uint64_t n = bytes / 512 * 64;
    uint64_t sums[8] = {0};
    for (uint64_t i = 0; i < n; i += 8) {
        for (int j = 0; j < 8; j++)
            sums[j] |= words[i + (uint64_t)j];
    }
    for (int j = 1; j < 8; j++)
        sums[0] |= sums[j];
    return sums[0];
}

#if defined(__SSE2__)
static void copy_past_caches(void *to, const void *from, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i += 64) {
#pragma GCC unroll 4
        for (int j = 0; j < 64; j += 16) {
            const __m128i part = _mm_load_si128((const void *)((const char *)from + i + j));
            _mm_stream_si128((void *)((char *)to + i + j), part);
        }
    }
    _mm_sfence();
}
const bench_copy bench_copy_past_caches = copy_past_caches;
#else
const bench_copy bench_copy_past_caches = NULL;
#endif
