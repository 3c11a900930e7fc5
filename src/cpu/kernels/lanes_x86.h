/*
 * Row conversions of lanes.h with AVX2 and F16C, or AVX-512 where the family has it. Each takes the
 * whole vectors at the front of a row and returns how many values it did; the portable code does
 * the rest and gives the same bits.
 *
 *   bf16   integer rounding of the f32 bits
 *   f16    the processor's conversion; its NaN payloads are replaced by those of base/convert.h
 *   e5m2   is the upper byte of an f16: widening is a shift and the f16 conversion
 *   e4m3   shifted left by 7 is an f16 of value x / 256, subnormals included; 0x7f becomes NaN
 *   to fp8 integer rounding of the f32 bits; subnormal results by adding a power of two
 */
#ifndef MLAI_LANES_X86_H
#define MLAI_LANES_X86_H

#include <immintrin.h>
#include <stdint.h>

#if defined(__AVX512F__)

static inline int64_t mlai_x86_widen_bf16(float *out, const uint16_t *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(in + i)));
        _mm512_storeu_ps(out + i, _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
    }
    return i;
}

static inline int64_t mlai_x86_narrow_bf16(uint16_t *out, const float *in, int64_t n)
{
    const __m512i one = _mm512_set1_epi32(1), below_half = _mm512_set1_epi32(0x7fff);
    const __m512i quiet = _mm512_set1_epi32(0x00400000);
    int64_t i = 0;
#if defined(__AVX512BF16__)
    /* The processor's conversion takes subnormals for 0: vectors that hold one go the long way. */
    enum { SUBNORMAL = 0x20 };
    for (; i + 32 <= n; i += 32) {
        const __m512 low = _mm512_loadu_ps(in + i), high = _mm512_loadu_ps(in + i + 16);
        if ((_mm512_fpclass_ps_mask(low, SUBNORMAL) | _mm512_fpclass_ps_mask(high, SUBNORMAL)) != 0)
            break;
        _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
#endif
    for (; i + 16 <= n; i += 16) {
        const __m512 x = _mm512_loadu_ps(in + i);
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
        __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, odd), below_half);
        sum = _mm512_mask_or_epi32(sum, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, quiet);
        _mm256_storeu_si256((void *)(out + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
    }
    return i;
}

static inline int64_t mlai_x86_widen_f16(float *out, const uint16_t *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(in + i))));
    return i;
}

static inline int64_t mlai_x86_narrow_f16(uint16_t *out, const float *in, int64_t n)
{
    const __m256i quiet = _mm256_set1_epi16(0x7e00), sign = _mm256_set1_epi16((short)0x8000);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512 x = _mm512_loadu_ps(in + i);
        const __m256i half = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m256i nan = _mm256_or_si256(quiet, _mm256_and_si256(half, sign));
        const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        _mm256_storeu_si256((void *)(out + i), _mm256_mask_blend_epi16(is_nan, half, nan));
    }
    return i;
}

static inline int64_t mlai_x86_widen_e5m2(float *out, const uint8_t *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(in + i)));
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_slli_epi16(wide, 8)));
    }
    return i;
}

static inline int64_t mlai_x86_widen_e4m3(float *out, const uint8_t *in, int64_t n)
{
    const __m512i fields = _mm512_set1_epi16((short)0xbf80), top = _mm512_set1_epi16(0x3f80);
    const __m512i nan = _mm512_set1_epi16(0x7e00);
    const __m512 unscale = _mm512_set1_ps(256.0f);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(in + i)));
        x = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 1), fields);
        const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, top), top);
        x = _mm512_mask_blend_epi16(is_nan, x, _mm512_or_si512(x, nan));
        const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(x));
        const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1));
        _mm512_storeu_ps(out + i, _mm512_mul_ps(low, unscale));
        _mm512_storeu_ps(out + i + 16, _mm512_mul_ps(high, unscale));
    }
    return i;
}

/* 16 values as codes of an fp8 format in 32 bits each. */
static inline __m512i mlai_x86_fp8_codes(const float *in, const mlai_fp8_narrow *f)
{
    const __m512i magnitude_bits = _mm512_set1_epi32(0x7fffffff), one = _mm512_set1_epi32(1);
    const __m512i max_bits = _mm512_set1_epi32(f->max_bits);
    const __m512i min_normal = _mm512_set1_epi32(f->min_normal_bits);
    const __m512 aligner = _mm512_set1_ps(f->aligner);
    const __m128i shift = _mm_cvtsi32_si128(f->shift);
    const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(in));
    const __m512i magnitude = _mm512_and_si512(bits, magnitude_bits);
    const __m512i held = _mm512_min_epi32(magnitude, max_bits);
    const __m512i odd = _mm512_and_si512(_mm512_srl_epi32(held, shift), one);
    const __m512i sum =
        _mm512_add_epi32(_mm512_add_epi32(held, odd), _mm512_set1_epi32(f->round_and_bias));
    const __m512 aligned = _mm512_add_ps(_mm512_castsi512_ps(held), aligner);
    const __mmask16 is_subnormal = _mm512_cmplt_epi32_mask(held, min_normal);
    const __mmask16 is_nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    __m512i code = _mm512_srl_epi32(sum, shift);
    code = _mm512_mask_sub_epi32(code, is_subnormal, _mm512_castps_si512(aligned),
                                 _mm512_castps_si512(aligner));
    code = _mm512_mask_mov_epi32(code, is_nan, _mm512_set1_epi32(0x7f));
    /* code | (bits >> 24 & 0x80) */
    return _mm512_ternarylogic_epi32(code, _mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80),
                                     0xf8);
}

static inline int64_t mlai_x86_narrow_fp8(uint8_t *out, const float *in, int64_t n,
                                          const mlai_fp8_narrow *f)
{
    /* The packs interleave 128-bit quarters; this puts the groups of four bytes back in order. */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const __m512i a =
            _mm512_packus_epi32(mlai_x86_fp8_codes(in + i, f), mlai_x86_fp8_codes(in + i + 16, f));
        const __m512i b = _mm512_packus_epi32(mlai_x86_fp8_codes(in + i + 32, f),
                                              mlai_x86_fp8_codes(in + i + 48, f));
        _mm512_storeu_si512(out + i, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(a, b)));
    }
    for (; i + 16 <= n; i += 16)
        _mm_storeu_si128((void *)(out + i), _mm512_cvtepi32_epi8(mlai_x86_fp8_codes(in + i, f)));
    return i;
}

#else

static inline int64_t mlai_x86_widen_bf16(float *out, const uint16_t *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(in + i)));
        _mm256_storeu_ps(out + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
    }
    return i;
}

static inline __m256i mlai_x86_bf16_codes(const float *in)
{
    const __m256 x = _mm256_loadu_ps(in);
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(sum, nan, is_nan), 16);
}

static inline int64_t mlai_x86_narrow_bf16(uint16_t *out, const float *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        /* The pack interleaves 128-bit halves; the permutation puts them back in order. */
        const __m256i both =
            _mm256_packus_epi32(mlai_x86_bf16_codes(in + i), mlai_x86_bf16_codes(in + i + 8));
        _mm256_storeu_si256((void *)(out + i), _mm256_permute4x64_epi64(both, 0xd8));
    }
    return i;
}

static inline int64_t mlai_x86_widen_f16(float *out, const uint16_t *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(in + i))));
    return i;
}

static inline int64_t mlai_x86_narrow_f16(uint16_t *out, const float *in, int64_t n)
{
    const __m128i quiet = _mm_set1_epi16(0x7e00), sign = _mm_set1_epi16((short)0x8000);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 x = _mm256_loadu_ps(in + i);
        const __m128i half = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m128i nan = _mm_or_si128(quiet, _mm_and_si128(half, sign));
        const __m256i wide = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        const __m128i is_nan =
            _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
        _mm_storeu_si128((void *)(out + i), _mm_blendv_epi8(half, nan, is_nan));
    }
    return i;
}

static inline int64_t mlai_x86_widen_e5m2(float *out, const uint8_t *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const void *)(in + i)));
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_slli_epi16(wide, 8)));
    }
    return i;
}

static inline int64_t mlai_x86_widen_e4m3(float *out, const uint8_t *in, int64_t n)
{
    const __m256i fields = _mm256_set1_epi16((short)0xbf80), top = _mm256_set1_epi16(0x3f80);
    const __m256i nan = _mm256_set1_epi16(0x7e00);
    const __m256 unscale = _mm256_set1_ps(256.0f);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(in + i)));
        x = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 1), fields);
        const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(x, top), top);
        x = _mm256_or_si256(x, _mm256_and_si256(is_nan, nan));
        const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(x));
        const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(low, unscale));
        _mm256_storeu_ps(out + i + 8, _mm256_mul_ps(high, unscale));
    }
    return i;
}

static inline __m256i mlai_x86_fp8_codes(const float *in, const mlai_fp8_narrow *f)
{
    const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(in));
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i held = _mm256_min_epi32(magnitude, _mm256_set1_epi32(f->max_bits));
    const __m128i shift = _mm_cvtsi32_si128(f->shift);
    const __m256i odd = _mm256_and_si256(_mm256_srl_epi32(held, shift), _mm256_set1_epi32(1));
    const __m256i sum =
        _mm256_add_epi32(_mm256_add_epi32(held, odd), _mm256_set1_epi32(f->round_and_bias));
    const __m256 aligner = _mm256_set1_ps(f->aligner);
    const __m256i subnormal =
        _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(held), aligner)),
                         _mm256_castps_si256(aligner));
    const __m256i is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(f->min_normal_bits), held);
    const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    __m256i code = _mm256_blendv_epi8(_mm256_srl_epi32(sum, shift), subnormal, is_subnormal);
    code = _mm256_or_si256(code, _mm256_and_si256(is_nan, _mm256_set1_epi32(0x7f)));
    return _mm256_or_si256(code,
                           _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80)));
}

static inline int64_t mlai_x86_narrow_fp8(uint8_t *out, const float *in, int64_t n,
                                          const mlai_fp8_narrow *f)
{
    /* The packs interleave 128-bit halves; this puts the groups of four bytes back in order. */
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i a =
            _mm256_packus_epi32(mlai_x86_fp8_codes(in + i, f), mlai_x86_fp8_codes(in + i + 8, f));
        const __m256i b = _mm256_packus_epi32(mlai_x86_fp8_codes(in + i + 16, f),
                                              mlai_x86_fp8_codes(in + i + 24, f));
        const __m256i bytes = _mm256_packus_epi16(a, b);
        _mm256_storeu_si256((void *)(out + i), _mm256_permutevar8x32_epi32(bytes, order));
    }
    return i;
}

#endif
#endif
