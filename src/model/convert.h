/*
 * Number formats of checkpoints and activations: to f32 and back, one value and whole rows.
 *
 * bf16 is the upper half of an f32 (round to nearest even, NaN kept quiet); f16 is IEEE binary16;
 * e4m3 is OCP FP8 "fn" (no infinities, NaN 0x7f and 0xff); e5m2 is OCP FP8 with infinities. All
 * widening is exact. Pointers need the alignment of their element. No limits; called by weights.c,
 * linear.c, deepseek.c and the tests.
 */
#ifndef MLAI_MODEL_CONVERT_H
#define MLAI_MODEL_CONVERT_H

#include <stdint.h>
#include <string.h>

/* On x86-64 a loop over a row is compiled for three levels and chosen when the program is loaded.
 */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define MLAI_CPU_CLONES __attribute__((target_clones("avx512f", "arch=haswell", "default")))
#else
#define MLAI_CPU_CLONES
#endif

static inline float mlai_model_bf16_to_f32(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline uint16_t mlai_model_bf16_from_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float mlai_model_f16_to_f32(uint16_t bits);
float mlai_model_e4m3_to_f32(uint8_t bits);
float mlai_model_e5m2_to_f32(uint8_t bits);

/* dst[i] = src[i] as f32; format is an mla_format: f32 bf16 f16 e4m3 e5m2. */
void mlai_model_row_to_f32(float *dst, const void *src, int32_t format, int64_t n);

/* dst[i] = src[i] rounded to the format: f32 or bf16. dst may not overlap src. */
void mlai_model_row_from_f32(void *dst, int32_t format, const float *src, int64_t n);

/* Rounds in place to the values that the format has: f32 (nothing) or bf16. */
void mlai_model_row_round(float *row, int32_t format, int64_t n);

#endif
