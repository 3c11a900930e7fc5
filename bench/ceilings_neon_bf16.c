/*
 * Ceiling of NEON BF16: BFMMLA on registers, 2x4 by 4x2 products, 32 FLOP an instruction. See
 * ceilings.h.
 */
#include "ceilings.h"
#include <arm_neon.h>

#define CHAINS 16

double bench_dot_neon_bf16(int64_t rounds)
{
    float32x4_t sums[CHAINS];
    bfloat16x8_t left = vreinterpretq_bf16_u16(vdupq_n_u16(0x3f80));
    bfloat16x8_t right = vreinterpretq_bf16_u16(vdupq_n_u16(0));
    for (int c = 0; c < CHAINS; c++)
        sums[c] = vdupq_n_f32(0.0f);
    for (int64_t i = 0; i < rounds; i++) {
        /* The compiler may not know the operands, or it would drop the loop. */
        __asm__ volatile("" : "+w"(left), "+w"(right));
#pragma GCC unroll 16
        for (int c = 0; c < CHAINS; c++)
            sums[c] = vbfmmlaq_f32(sums[c], left, right);
    }
    for (int c = 1; c < CHAINS; c++)
        sums[0] = vaddq_f32(sums[0], sums[c]);
    __asm__ volatile("" : : "w"(sums[0]));
    return (double)rounds * CHAINS * 32;
}
