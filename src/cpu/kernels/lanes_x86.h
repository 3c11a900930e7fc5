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

MLAI_INLINE int64_t mlai_x86_widen_bf16(float *out, const uint16_t *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(in + i)));
        _mm512_storeu_ps(out + i, _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
    }
    return i;
}

/* bf16 of 16 values in the lower halves. */
MLAI_INLINE __m512i mlai_x86_bf16_codes(__m512 x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    sum = _mm512_mask_or_epi32(sum, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits,
                               _mm512_set1_epi32(0x00400000));
    return _mm512_srli_epi32(sum, 16);
}

MLAI_INLINE __m512i mlai_x86_to_bf16(__m512 low, __m512 high)
{
#if defined(__AVX512BF16__)
    /* The processor's conversion takes subnormals for 0: vectors that hold one go the long way. */
    enum { SUBNORMAL = 0x20 };
    if (__builtin_expect(_mm512_fpclass_ps_mask(low, SUBNORMAL) == 0 &&
                             _mm512_fpclass_ps_mask(high, SUBNORMAL) == 0,
                         1))
        return (__m512i)_mm512_cvtne2ps_pbh(high, low);
#endif
    /* The pack interleaves 128-bit quarters; the permutation puts them back in order. */
    return _mm512_permutexvar_epi64(
        _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7),
        _mm512_packus_epi32(mlai_x86_bf16_codes(low), mlai_x86_bf16_codes(high)));
}

MLAI_INLINE int64_t mlai_x86_narrow_bf16(uint16_t *out, const float *in, const int64_t n)
{
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        _mm512_storeu_si512(
            out + i, mlai_x86_to_bf16(_mm512_loadu_ps(in + i), _mm512_loadu_ps(in + i + 16)));
    return i;
}

MLAI_INLINE int64_t mlai_x86_widen_f16(float *out, const uint16_t *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(in + i))));
    return i;
}

MLAI_INLINE int64_t mlai_x86_narrow_f16(uint16_t *out, const float *in, int64_t n)
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

MLAI_INLINE int64_t mlai_x86_widen_e5m2(float *out, const uint8_t *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(in + i)));
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_slli_epi16(wide, 8)));
    }
    return i;
}

MLAI_INLINE int64_t mlai_x86_widen_e4m3(float *out, const uint8_t *in, int64_t n)
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
MLAI_INLINE __m512i mlai_x86_fp8_codes(const float *in, const mlai_fp8_narrow *f)
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

MLAI_INLINE int64_t mlai_x86_narrow_fp8(uint8_t *out, const float *in, int64_t n,
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

/*
 * 32 bf16 as e4m3 in 16 bits each. With magnitude c = exponent : mantissa and the implied bit,
 * code = c - 0x3c00 shifted right by 4 where the result is normal, and the significand shifted by
 * 125
 * - exponent where it is subnormal: one shift s and one addend a for each exponent from 116 (below
 * half the smallest value) to 135 (448), taken by its low five bits. a holds half a unit less one;
 * bit s of c, added too, makes ties go to even. It is the wrong bit for exponents 118, where the
 * implied bit is meant, and 116, where 0 is: their addends make up for it.
 */
MLAI_INLINE __m512i mlai_x86_e4m3_codes(__m512i x)
{
#define NORMAL_SHIFTS 4, 4, 4, 4, 4, 4, 4, 4
#define NORMAL_ADDENDS -15353, -15353, -15353, -15353, -15353, -15353, -15353, -15353
    static const _Alignas(64) int16_t shifts[32] = {
        NORMAL_SHIFTS, NORMAL_SHIFTS, 4, 4, 4, 4, 9, 8, 7, 6, 5, 4, 4, 4, 4, 4, 4, 4};
    static const _Alignas(64) int16_t addends[32] = {NORMAL_ADDENDS,
                                                     NORMAL_ADDENDS,
                                                     0,
                                                     0,
                                                     0,
                                                     0,
                                                     128 - 116 * 128 + 254,
                                                     128 - 117 * 128 + 127,
                                                     128 - 118 * 128 + 64,
                                                     128 - 119 * 128 + 31,
                                                     128 - 120 * 128 + 15,
                                                     -15353,
                                                     -15353,
                                                     -15353,
                                                     -15353,
                                                     -15353,
                                                     -15353,
                                                     -15353};
#undef NORMAL_SHIFTS
#undef NORMAL_ADDENDS
    const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
    const __mmask32 is_nan = _mm512_cmpgt_epi16_mask(magnitude, _mm512_set1_epi16(0x7f80));
    const __m512i c = _mm512_max_epi16(_mm512_min_epi16(magnitude, _mm512_set1_epi16(0x43e0)),
                                       _mm512_set1_epi16(0x3a00));
    const __m512i exponent = _mm512_srli_epi16(c, 7);
    const __m512i s = _mm512_permutexvar_epi16(exponent, _mm512_load_si512(shifts));
    const __m512i a = _mm512_permutexvar_epi16(exponent, _mm512_load_si512(addends));
    const __m512i odd = _mm512_and_si512(_mm512_srlv_epi16(c, s), _mm512_set1_epi16(1));
    __m512i code = _mm512_srlv_epi16(_mm512_add_epi16(_mm512_add_epi16(c, a), odd), s);
    code = _mm512_mask_mov_epi16(code, is_nan, _mm512_set1_epi16(0x7f));
    /* code | (x >> 8 & 0x80) */
    return _mm512_ternarylogic_epi32(code, _mm512_srli_epi16(x, 8), _mm512_set1_epi16(0x80), 0xf8);
}

/* 64 of them; returns how many it did, like the others. */
MLAI_INLINE int64_t mlai_x86_e4m3_of_bf16(void *out, const void *in)
{
    const __m512i low = mlai_x86_e4m3_codes(_mm512_loadu_si512(in));
    const __m512i high = mlai_x86_e4m3_codes(_mm512_loadu_si512((const char *)in + 64));
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi64(order, _mm512_packus_epi16(low, high)));
    return 64;
}

/* The largest magnitude of 128 bf16, as its bits. */
MLAI_INLINE int32_t mlai_x86_largest_bf16(const char *in)
{
    __m512i m = _mm512_setzero_si512();
    for (int32_t i = 0; i < 256; i += 64)
        m = _mm512_max_epu16(
            m, _mm512_and_si512(_mm512_loadu_si512(in + i), _mm512_set1_epi16(0x7fff)));
    const __m256i half =
        _mm256_max_epu16(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64(m, 1));
    const __m128i quarter =
        _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
    return ~_mm_cvtsi128_si32(least) & 0xffff;
}

/* 16 magnitudes over a scale as e4m3 codes: the quotient x r, r the rounded reciprocal, corrected
 * once by its exact remainder. */
MLAI_INLINE __m512i mlai_x86_divided_codes(__m512i magnitude, __m512 r, __m512 minus_scale)
{
    const mlai_fp8_narrow *f = &mlai_narrow_e4m3;
    const __m512 x = _mm512_castsi512_ps(magnitude), aligner = _mm512_set1_ps(f->aligner);
    const __m512 q = _mm512_mul_ps(x, r);
    const __m512 quotient = _mm512_fmadd_ps(_mm512_fmadd_ps(q, minus_scale, x), r, q);
    const __m512i bits = _mm512_castps_si512(quotient);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    const __m512i sum =
        _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(f->round_and_bias));
    const __mmask16 is_subnormal =
        _mm512_cmplt_epi32_mask(bits, _mm512_set1_epi32(f->min_normal_bits));
    return _mm512_mask_sub_epi32(_mm512_srli_epi32(sum, 20), is_subnormal,
                                 _mm512_castps_si512(_mm512_add_ps(quotient, aligner)),
                                 _mm512_castps_si512(aligner));
}

/*
 * The 512 codes and four scales of a ds656 row from bf16. Returns 0 when the row goes the long way:
 * a tile of zeros, an infinity or NaN, or a scale far from 1. The codes are those of the rounded
 * quotient for every pair of significands (128 of x, as many of the scale) and of exponents.
 * `ahead` is asked for.
 */
MLAI_INLINE int64_t mlai_x86_ds656_of_bf16(char *row, const char *in, const char *ahead)
{
    enum { TILE_BYTES = 256, SCALES_AT = 512 };
    const __m128i largest = _mm_setr_epi32(
        mlai_x86_largest_bf16(in), mlai_x86_largest_bf16(in + TILE_BYTES),
        mlai_x86_largest_bf16(in + 2 * TILE_BYTES), mlai_x86_largest_bf16(in + 3 * TILE_BYTES));
    const __m128 scales =
        _mm_div_ps(_mm_castsi128_ps(_mm_slli_epi32(largest, 16)), _mm_set1_ps(448.0f));
    const __m128 inverses = _mm_div_ps(_mm_set1_ps(1.0f), scales);
    const __m128 is_near = _mm_and_ps(_mm_cmpgt_ps(scales, _mm_set1_ps(0x1p-60f)),
                                      _mm_cmplt_ps(scales, _mm_set1_ps(0x1p60f)));
    if (_mm_movemask_ps(is_near) != 15)
        return 0;
    _Alignas(16) float scale[4], inverse[4];
    _mm_store_ps(scale, scales);
    _mm_store_ps(inverse, inverses);
    memcpy(row + SCALES_AT, scale, sizeof scale);
    const __m512i zero = _mm512_setzero_si512(), sign = _mm512_set1_epi16(0x80);
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    for (int32_t i = 0; i < 8; i++) {
        __builtin_prefetch(ahead + 128 * i);
        __builtin_prefetch(ahead + 128 * i + 64);
        const __m512 r = _mm512_set1_ps(inverse[i / 2]);
        const __m512 minus_scale = _mm512_set1_ps(-scale[i / 2]);
        __m512i words[2];
        for (int32_t k = 0; k < 2; k++) {
            const __m512i x = _mm512_loadu_si512(in + 128 * i + 64 * k);
            const __m512i m = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
            /* The unpacks and the pack interleave 128-bit quarters in the same way. */
            const __m512i codes = _mm512_packus_epi32(
                mlai_x86_divided_codes(_mm512_unpacklo_epi16(zero, m), r, minus_scale),
                mlai_x86_divided_codes(_mm512_unpackhi_epi16(zero, m), r, minus_scale));
            words[k] = _mm512_ternarylogic_epi32(codes, _mm512_srli_epi16(x, 8), sign, 0xf8);
        }
        _mm512_storeu_si512(
            row + 64 * i, _mm512_permutexvar_epi64(order, _mm512_packus_epi16(words[0], words[1])));
    }
    return SCALES_AT;
}

#else

MLAI_INLINE int64_t mlai_x86_widen_bf16(float *out, const uint16_t *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(in + i)));
        _mm256_storeu_ps(out + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
    }
    return i;
}

MLAI_INLINE __m256i mlai_x86_bf16_codes(const float *in)
{
    const __m256 x = _mm256_loadu_ps(in);
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(sum, nan, is_nan), 16);
}

MLAI_INLINE int64_t mlai_x86_narrow_bf16(uint16_t *out, const float *in, int64_t n)
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

MLAI_INLINE int64_t mlai_x86_widen_f16(float *out, const uint16_t *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(in + i))));
    return i;
}

MLAI_INLINE int64_t mlai_x86_narrow_f16(uint16_t *out, const float *in, int64_t n)
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

MLAI_INLINE int64_t mlai_x86_widen_e5m2(float *out, const uint8_t *in, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const void *)(in + i)));
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_slli_epi16(wide, 8)));
    }
    return i;
}

MLAI_INLINE int64_t mlai_x86_widen_e4m3(float *out, const uint8_t *in, int64_t n)
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

MLAI_INLINE __m256i mlai_x86_fp8_codes(const float *in, const mlai_fp8_narrow *f)
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

MLAI_INLINE int64_t mlai_x86_narrow_fp8(uint8_t *out, const float *in, int64_t n,
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
