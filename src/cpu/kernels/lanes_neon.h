/*
 * Row conversions of lanes.h with NEON. Each takes the groups of 8 values at the front of a row and
 * returns how many values it did; the portable code does the rest and gives the same bits.
 *
 *   bf16   integer rounding of the f32 bits, or the bf16 conversion where the family has it
 *   f16    the processor's conversion; its NaN payloads are replaced by those of base/convert.h
 *   e5m2   is the upper byte of an f16: widening is a shift and the f16 conversion
 *   e4m3   shifted left by 7 is an f16 of value x / 256, subnormals included; 0x7f becomes NaN
 *   to fp8 integer rounding of the f32 bits; subnormal results by adding a power of two
 */
#ifndef MLAI_LANES_NEON_H
#define MLAI_LANES_NEON_H

#include <arm_neon.h>
#include <stdint.h>

/* ---- 8 values --------------------------------------------------------------------------------
 */

static inline float32x4x2_t mlai_neon_from_bf16(uint16x8_t x)
{
    float32x4x2_t wide = {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)),
                           vreinterpretq_f32_u32(vshll_high_n_u16(x, 16))}};
    return wide;
}

static inline float32x4x2_t mlai_neon_from_f16(uint16x8_t x)
{
    float16x8_t half = vreinterpretq_f16_u16(x);
    float32x4x2_t wide = {{vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)}};
    return wide;
}

static inline float32x4x2_t mlai_neon_from_e5m2(uint8x8_t x)
{
    return mlai_neon_from_f16(vshll_n_u8(x, 8));
}

static inline float32x4x2_t mlai_neon_from_e4m3(uint8x8_t x)
{
    const uint16x8_t top = vdupq_n_u16(0x3f80), nan = vdupq_n_u16(0x7e00);
    const uint16x8_t magnitude = vandq_u16(vshll_n_u8(x, 7), top);
    const uint16x8_t sign = vandq_u16(vshll_n_u8(x, 8), vdupq_n_u16(0x8000));
    const uint16x8_t bits = vbslq_u16(vceqq_u16(magnitude, top), nan, magnitude);
    float32x4x2_t wide = mlai_neon_from_f16(vorrq_u16(bits, sign));
    wide.val[0] = vmulq_n_f32(wide.val[0], 256.0f);
    wide.val[1] = vmulq_n_f32(wide.val[1], 256.0f);
    return wide;
}

static inline uint16x8_t mlai_neon_to_f16(float32x4_t low, float32x4_t high)
{
    const uint16x8_t half = vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(low), high));
    const uint16x8_t is_number = vuzp1q_u16(vreinterpretq_u16_u32(vceqq_f32(low, low)),
                                            vreinterpretq_u16_u32(vceqq_f32(high, high)));
    const uint16x8_t sign = vandq_u16(half, vdupq_n_u16(0x8000));
    return vbslq_u16(is_number, half, vorrq_u16(sign, vdupq_n_u16(0x7e00)));
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
static inline uint16x8_t mlai_neon_to_bf16(float32x4_t low, float32x4_t high)
{
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
}
#else
/* The rounded bf16 in the upper half. */
static inline uint16x8_t mlai_neon_round_bf16(float32x4_t x)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fff));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
    return vreinterpretq_u16_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet));
}

static inline uint16x8_t mlai_neon_to_bf16(float32x4_t low, float32x4_t high)
{
    return vuzp2q_u16(mlai_neon_round_bf16(low), mlai_neon_round_bf16(high));
}
#endif

static inline uint16x4_t mlai_neon_to_fp8(float32x4_t x, const mlai_fp8_narrow *f)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t magnitude = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
    const uint32x4_t held = vminq_u32(magnitude, vdupq_n_u32((uint32_t)f->max_bits));
    const int32x4_t shift = vdupq_n_s32(-f->shift);
    const float32x4_t aligner = vdupq_n_f32(f->aligner);
    const uint32x4_t odd = vandq_u32(vshlq_u32(held, shift), vdupq_n_u32(1));
    const uint32x4_t sum =
        vaddq_u32(vaddq_u32(held, odd), vdupq_n_u32((uint32_t)f->round_and_bias));
    const uint32x4_t subnormal =
        vsubq_u32(vreinterpretq_u32_f32(vaddq_f32(vreinterpretq_f32_u32(held), aligner)),
                  vreinterpretq_u32_f32(aligner));
    uint32x4_t code = vbslq_u32(vcltq_u32(held, vdupq_n_u32((uint32_t)f->min_normal_bits)),
                                subnormal, vshlq_u32(sum, shift));
    code = vbslq_u32(vceqq_f32(x, x), code, vdupq_n_u32(0x7f));
    return vmovn_u32(vorrq_u32(code, vandq_u32(vshrq_n_u32(bits, 24), vdupq_n_u32(0x80))));
}

/* ---- rows ------------------------------------------------------------------------------------
 */

#define MLAI_NEON_WIDEN(format, type, load)                                                        \
    static inline int64_t mlai_neon_widen_##format(float *out, const type *in, int64_t n)          \
    {                                                                                              \
        int64_t i = 0;                                                                             \
        for (; i + 8 <= n; i += 8) {                                                               \
            const float32x4x2_t wide = mlai_neon_from_##format(load(in + i));                      \
            vst1q_f32(out + i, wide.val[0]);                                                       \
            vst1q_f32(out + i + 4, wide.val[1]);                                                   \
        }                                                                                          \
        return i;                                                                                  \
    }
MLAI_NEON_WIDEN(bf16, uint16_t, vld1q_u16)
MLAI_NEON_WIDEN(f16, uint16_t, vld1q_u16)
MLAI_NEON_WIDEN(e4m3, uint8_t, vld1_u8)
MLAI_NEON_WIDEN(e5m2, uint8_t, vld1_u8)

static inline int64_t mlai_neon_narrow_bf16(uint16_t *out, const float *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        vst1q_u16(out + i, mlai_neon_to_bf16(vld1q_f32(in + i), vld1q_f32(in + i + 4)));
    return i;
}

static inline int64_t mlai_neon_narrow_f16(uint16_t *out, const float *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        vst1q_u16(out + i, mlai_neon_to_f16(vld1q_f32(in + i), vld1q_f32(in + i + 4)));
    return i;
}

static inline int64_t mlai_neon_narrow_fp8(uint8_t *out, const float *in, int64_t n,
                                           const mlai_fp8_narrow *f)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        vst1_u8(out + i, vmovn_u16(vcombine_u16(mlai_neon_to_fp8(vld1q_f32(in + i), f),
                                                mlai_neon_to_fp8(vld1q_f32(in + i + 4), f))));
    return i;
}

#endif
