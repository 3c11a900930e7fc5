/*
 * V_LANES values of f32, bf16 or f16 as a vector of f32, for kernels that keep rows in registers.
 */
#ifndef MLAI_LOAD_VEC_H
#define MLAI_LOAD_VEC_H

#include "cpu/kernels/lanes.h"
#include "cpu/kernels/vec_f32.h"

MLAI_INLINE vec load_vec(const void *p, int32_t format)
{
#if defined(__AVX512F__)
    if (format == MLA_FORMAT_BF16)
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
    if (format == MLA_FORMAT_F16)
        return _mm512_cvtph_ps(_mm256_loadu_si256(p));
    return v_load(p);
#elif defined(__AVX2__)
    if (format == MLA_FORMAT_BF16)
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
    if (format == MLA_FORMAT_F16)
        return _mm256_cvtph_ps(_mm_loadu_si128(p));
    return v_load(p);
#elif defined(MLAI_NEON)
    if (format == MLA_FORMAT_BF16)
        return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
    if (format == MLA_FORMAT_F16)
        return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
    return v_load(p);
#else
    typedef uint16_t halves __attribute__((vector_size(8)));
    typedef uint32_t words __attribute__((vector_size(16)));
    if (format == MLA_FORMAT_F32)
        return v_load(p);
    halves in;
    memcpy(&in, p, sizeof in);
    if (format == MLA_FORMAT_BF16)
        return (vec)(__builtin_convertvector(in, words) << 16);
    return (vec){mlai_lane_from_f16(in[0]), mlai_lane_from_f16(in[1]), mlai_lane_from_f16(in[2]),
                 mlai_lane_from_f16(in[3])};
#endif
}

#endif
