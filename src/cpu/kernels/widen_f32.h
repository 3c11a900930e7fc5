/*
 * Rows of any float format to f32 and back with the instruction set of the file that includes this:
 * F16C, AVX2, AVX-512 or NEON where they are, else base/convert.h. Widening is exact; narrowing
 * rounds to nearest even. fp8 goes through f16 (its exponent range covers both formats, subnormals
 * included): e5m2 is the upper byte of an f16; e4m3 shifted into f16's fields is too small by 2^8.
 */
#ifndef MLAI_WIDEN_F32_H
#define MLAI_WIDEN_F32_H

#include "base/convert.h"
#if defined(MLAI_NEON)
#include "cpu/kernels/lanes.h"
#endif
#if defined(__AVX2__)
#include <immintrin.h>

static inline __m256 widen8_f16(__m128i x)
{
    return _mm256_cvtph_ps(x);
}

static inline __m256 widen8_bf16(__m128i x)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

/* 8 bytes in the low half. */
static inline __m256 widen8_e5m2(__m128i x)
{
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(x), 8));
}

static inline __m256 widen8_e4m3(__m128i x)
{
    __m128i h =
        _mm_cvtepi8_epi16(x); /* the sign goes to bit 15, and stays in 8..14 until the mask */
    __m128i magnitude = _mm_and_si128(_mm_slli_epi16(h, 7), _mm_set1_epi16(0x3f80));
    __m128i is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x3f80));
    __m128i sign = _mm_and_si128(h, _mm_set1_epi16((short)0x8000));
    __m128i bits =
        _mm_or_si128(_mm_or_si128(magnitude, sign), _mm_and_si128(is_nan, _mm_set1_epi16(0x7f80)));
    return _mm256_mul_ps(_mm256_cvtph_ps(bits), _mm256_set1_ps(256.0f));
}
#endif

static inline void widen_row(float *out, const void *in, int32_t format, int32_t n)
{
    int32_t i = 0;
#if defined(__AVX2__)
    const uint8_t *bytes = in;
    switch (format) {
    case MLA_FORMAT_BF16:
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(
                out + i, widen8_bf16(_mm_loadu_si128((const __m128i *)(bytes + 2 * (int64_t)i))));
        break;
    case MLA_FORMAT_F16:
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(
                out + i, widen8_f16(_mm_loadu_si128((const __m128i *)(bytes + 2 * (int64_t)i))));
        break;
    case MLA_FORMAT_E4M3:
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(out + i, widen8_e4m3(_mm_loadl_epi64((const __m128i *)(bytes + i))));
        break;
    case MLA_FORMAT_E5M2:
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(out + i, widen8_e5m2(_mm_loadl_epi64((const __m128i *)(bytes + i))));
        break;
    default:
        break;
    }
#elif defined(MLAI_NEON)
    switch (format) {
    case MLA_FORMAT_BF16:
        i = (int32_t)mlai_neon_widen_bf16(out, in, n);
        break;
    case MLA_FORMAT_F16:
        i = (int32_t)mlai_neon_widen_f16(out, in, n);
        break;
    case MLA_FORMAT_E4M3:
        i = (int32_t)mlai_neon_widen_e4m3(out, in, n);
        break;
    case MLA_FORMAT_E5M2:
        i = (int32_t)mlai_neon_widen_e5m2(out, in, n);
        break;
    default:
        break;
    }
#endif
    mlai_row_to_f32(out + i, (const char *)in + (int64_t)i * mla_format_bytes(format), format,
                    n - i, 1.0f);
}

/* The 512 latent values of a 656-byte row. */
static inline void widen_ds656_latent(float *out, const void *row)
{
    const uint8_t *bytes = row;
    for (int32_t tile = 0; tile < 4; tile++) {
        float scale;
        memcpy(&scale, bytes + 512 + 4 * tile, sizeof scale);
        float *to = out + 128 * tile;
        widen_row(to, bytes + 128 * tile, MLA_FORMAT_E4M3, 128);
        for (int32_t i = 0; i < 128; i++)
            to[i] *= scale;
    }
}

static inline void narrow_row(void *out, int32_t format, const float *in, int32_t n)
{
    if (format == MLA_FORMAT_BF16) {
        uint16_t *to = out;
        for (int32_t i = 0; i < n; i++) {
            uint32_t bits = mlai_f32_bits(in[i]);
            uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
            uint32_t quiet = (bits >> 16) | 0x40u;
            to[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
        }
    } else if (format == MLA_FORMAT_F32) {
        memcpy(out, in, (size_t)n * sizeof(float));
    } else {
        int32_t i = 0;
#if defined(__AVX2__)
        for (; format == MLA_FORMAT_F16 && i + 8 <= n; i += 8)
            _mm_storeu_si128((__m128i *)((uint16_t *)out + i),
                             _mm256_cvtps_ph(_mm256_loadu_ps(in + i),
                                             _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(MLAI_NEON)
        if (format == MLA_FORMAT_F16)
            i = (int32_t)mlai_neon_narrow_f16(out, in, n);
#endif
        mlai_row_from_f32((char *)out + (int64_t)i * mla_format_bytes(format), format, in + i,
                          n - i, 1.0f);
    }
}

#endif
