/* Loads and stores of the float formats, one value or eight at a time, through f32.
 *
 * Narrowing rounds to nearest even; fp8 saturates and keeps NaN, as in src/base/convert.h. Eight
 * values move as one or two 16-byte (fp8: 8-byte) accesses when `wide` is set, else one by one; the
 * caller guarantees the alignment. Used by the portable kernels; any GPU from sm_80 on.
 */
#ifndef MLAI_FORMATS_CUH
#define MLAI_FORMATS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

/* mla_format, restated since the public header is C. */
enum { F32 = 1, BF16 = 2, F16 = 3, E4M3 = 4, E5M2 = 5, DS656 = 9 };

#define MLAI_DEVICE static __device__ __forceinline__

MLAI_DEVICE int format_bytes(int format)
{
    return format == F32 ? 4 : format <= F16 ? 2 : 1;
}

MLAI_DEVICE float e4m3_to_f32(uint8_t x)
{
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3)));
}

MLAI_DEVICE float e5m2_to_f32(uint8_t x)
{
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, __NV_E5M2)));
}

MLAI_DEVICE float load_value(const char *base, int64_t index, int format)
{
    switch (format) {
    case F32:
        return ((const float *)base)[index];
    case BF16:
        return __bfloat162float(((const __nv_bfloat16 *)base)[index]);
    case F16:
        return __half2float(((const __half *)base)[index]);
    case E4M3:
        return e4m3_to_f32(((const uint8_t *)base)[index]);
    default:
        return e5m2_to_f32(((const uint8_t *)base)[index]);
    }
}

MLAI_DEVICE void store_value(char *base, int64_t index, int format, float x)
{
    switch (format) {
    case F32:
        ((float *)base)[index] = x;
        break;
    case BF16:
        ((__nv_bfloat16 *)base)[index] = __float2bfloat16_rn(x);
        break;
    case F16:
        ((__half *)base)[index] = __float2half_rn(x);
        break;
    case E4M3:
        ((uint8_t *)base)[index] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
        break;
    default:
        ((uint8_t *)base)[index] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
        break;
    }
}

/* x[0..7] = base[index .. index + 7]; n < 8 reads only n of them, the others are 0. */
MLAI_DEVICE void load8(float (&x)[8], const char *base, int64_t index, int format, bool wide, int n)
{
    if (!wide || n < 8) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = i < n ? load_value(base, index + i, format) : 0.0f;
        return;
    }
    if (format == F32) {
        const float4 *p = (const float4 *)((const float *)base + index);
        const float4 a = p[0], b = p[1];
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else if (format <= F16) {
        const uint4 a = *(const uint4 *)((const uint16_t *)base + index);
        const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (format == BF16) {
                x[2 * i] = __uint_as_float(words[i] << 16);
                x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
            } else {
                const float2 pair = __half22float2(*(const __half2 *)&words[i]);
                x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
            }
        }
    } else {
        const uint2 a = *(const uint2 *)((const uint8_t *)base + index);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint8_t code = (uint8_t)((i < 4 ? a.x : a.y) >> (8 * (i % 4)));
            x[i] = format == E4M3 ? e4m3_to_f32(code) : e5m2_to_f32(code);
        }
    }
}

MLAI_DEVICE void store8(char *base, int64_t index, int format, bool wide, int n,
                        const float (&x)[8])
{
    if (!wide || n < 8) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i < n)
                store_value(base, index + i, format, x[i]);
        }
        return;
    }
    if (format == F32) {
        float4 *p = (float4 *)((float *)base + index);
        p[0] = make_float4(x[0], x[1], x[2], x[3]);
        p[1] = make_float4(x[4], x[5], x[6], x[7]);
    } else if (format <= F16) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (format == BF16) {
                const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
                words[i] = *(const uint32_t *)&pair;
            } else {
                const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
                words[i] = *(const uint32_t *)&pair;
            }
        }
        *(uint4 *)((uint16_t *)base + index) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
        const __nv_fp8_interpretation_t kind = format == E4M3 ? __NV_E4M3 : __NV_E5M2;
        uint32_t words[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 8; i++)
            words[i / 4] |= (uint32_t)__nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, kind)
                            << (8 * (i % 4));
        *(uint2 *)((uint8_t *)base + index) = make_uint2(words[0], words[1]);
    }
}

#endif
