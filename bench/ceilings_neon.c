/*
 * Ceilings of NEON: 128-bit FMA on registers. See ceilings.h. 16 independent chains cover the
 * latency of four units (4 cycles each).
 */
#include "ceilings.h"
#include <arm_neon.h>

#define CHAINS 16

double bench_fma_neon(int64_t rounds)
{
    float32x4_t sums[CHAINS];
    float32x4_t factor = vdupq_n_f32(1.0f);
    float32x4_t addend = vdupq_n_f32(0.0f);
    for (int c = 0; c < CHAINS; c++)
        sums[c] = vdupq_n_f32(0.0f);
    for (int64_t i = 0; i < rounds; i++) {
        /* The compiler may not know the operands, or it would drop the loop. */
        __asm__ volatile("" : "+w"(factor), "+w"(addend));
#pragma GCC unroll 16
        for (int c = 0; c < CHAINS; c++)
            sums[c] = vfmaq_f32(sums[c], factor, addend);
    }
    for (int c = 1; c < CHAINS; c++)
        sums[0] = vaddq_f32(sums[0], sums[c]);
    __asm__ volatile("" : : "w"(sums[0]));
    return (double)rounds * CHAINS * 4 * 2;
}
