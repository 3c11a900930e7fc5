/* What the portable row kernels share: tensors, chunks of eight values, places in the cache and
 * what goes there. A chunk is 16 bytes of a 16-bit format; formats.cuh has the rules of conversion.
 * Used by rows.cu and rows_merge.cuh.
 */
#ifndef MLAI_ROWS_CUH
#define MLAI_ROWS_CUH

#include "cuda/kernels/formats.cuh"
#include "cuda/kernels/rows.h"

#define ALL_LANES 0xffffffffu

MLAI_DEVICE int64_t warp_index(void)
{
    return ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
}

MLAI_DEVICE int64_t index_at(const mlai_cuda_index &index, int64_t i)
{
    if (index.is_i64)
        return ((const int64_t *)index.data)[i * index.stride];
    return ((const int32_t *)index.data)[i * index.stride];
}

MLAI_DEVICE char *row_at(const mlai_cuda_rows &rows, int64_t token, int64_t head)
{
    return rows.data + (token * rows.stride0 + head * rows.stride1) * format_bytes(rows.format);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

/* Eight values as they lie in memory, 16-byte aligned (fp8: 8-byte). */
template <int FORMAT> struct Chunk {
    uint4 words[FORMAT == F32 ? 2 : 1];
};

/* Chunks that a lane has under way at once. */
template <int FORMAT> constexpr int IN_FLIGHT = MLAI_ROWS_IN_FLIGHT(FORMAT == F32);

template <int FORMAT> MLAI_DEVICE Chunk<FORMAT> load_chunk(const char *row, int first)
{
    Chunk<FORMAT> chunk;
    if constexpr (FORMAT == F32) {
        chunk.words[0] = *(const uint4 *)(row + 4 * first);
        chunk.words[1] = *(const uint4 *)(row + 4 * first + 16);
    } else if constexpr (FORMAT == BF16 || FORMAT == F16) {
        chunk.words[0] = *(const uint4 *)(row + 2 * first);
    } else {
        const uint2 codes = *(const uint2 *)(row + first);
        chunk.words[0] = make_uint4(codes.x, codes.y, 0, 0);
    }
    return chunk;
}

template <int FORMAT> MLAI_DEVICE void store_chunk(char *row, int first, const Chunk<FORMAT> &chunk)
{
    if constexpr (FORMAT == F32) {
        *(uint4 *)(row + 4 * first) = chunk.words[0];
        *(uint4 *)(row + 4 * first + 16) = chunk.words[1];
    } else if constexpr (FORMAT == BF16 || FORMAT == F16) {
        *(uint4 *)(row + 2 * first) = chunk.words[0];
    } else {
        *(uint2 *)(row + first) = make_uint2(chunk.words[0].x, chunk.words[0].y);
    }
}

template <int FORMAT> MLAI_DEVICE void widen_chunk(float (&x)[8], const Chunk<FORMAT> &chunk)
{
    if constexpr (FORMAT == F32) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            x[4 * i] = __uint_as_float(chunk.words[i].x);
            x[4 * i + 1] = __uint_as_float(chunk.words[i].y);
            x[4 * i + 2] = __uint_as_float(chunk.words[i].z);
            x[4 * i + 3] = __uint_as_float(chunk.words[i].w);
        }
        return;
    }
    const uint4 &w = chunk.words[0];
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (FORMAT == BF16)
            x[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
        else if (FORMAT == F16)
            x[i] = __half2float(__ushort_as_half((uint16_t)(words[i / 2] >> (16 * (i % 2)))));
        else
            x[i] = FORMAT == E4M3 ? e4m3_to_f32((uint8_t)(words[i / 4] >> (8 * (i % 4))))
                                  : e5m2_to_f32((uint8_t)(words[i / 4] >> (8 * (i % 4))));
    }
}

/* What would be infinite in the destination becomes its largest finite value, NaN becomes 0. */
MLAI_DEVICE void sanitize8(float (&x)[8], int format)
{
    const float largest = format == F16                       ? 65504.0f
                          : format == BF16 || format == DS656 ? 0x1.fep127f
                                                              : 3.402823466e38f;
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = x[i] == x[i] ? fminf(fmaxf(x[i], -largest), largest) : 0.0f;
}

MLAI_DEVICE void divide8(float (&x)[8], float scale)
{
    if (scale != 1.0f) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = __fdiv_rn(x[i], scale);
    }
}

/* ---- cache rows ------------------------------------------------------------------------------ */

/* The formats of a row's two parts. */
MLAI_DEVICE int latent_format(const mlai_cuda_cache &c)
{
    return c.format == DS656 ? E4M3 : c.format;
}

MLAI_DEVICE int rope_format(const mlai_cuda_cache &c)
{
    return c.format == DS656 ? BF16 : c.format;
}

/* Where a slot's two parts lie; null: there is no such slot. */
struct Place {
    char *latent, *rope;
};

MLAI_DEVICE Place place_of(const mlai_cuda_cache &c, int64_t slot)
{
    Place place = {nullptr, nullptr};
    if (slot >= 0 && slot < c.rows) {
        const int64_t page = slot / c.page_size, at = slot - page * c.page_size;
        place.latent = c.latent + page * c.page_bytes + at * c.row_bytes;
        place.rope = c.rope + page * c.rope_page_bytes + at * c.rope_row_bytes;
    }
    return place;
}

MLAI_DEVICE char *shuffled(char *pointer, int lane)
{
    return (char *)__shfl_sync(ALL_LANES, (unsigned long long)pointer, lane);
}

/* Eight values into one part of a cache row. */
MLAI_DEVICE void put8(const mlai_cuda_cache &c, char *part, int format, int64_t first, int n,
                      bool wide, float (&x)[8])
{
    if (c.sanitize)
        sanitize8(x, format);
    divide8(x, c.k_scale);
    store8(part, first, format, wide, n, x);
}

/* 16 lanes hold the 128 values of a ds656 tile: scale = max|x| / 448, or 1 when that is 0 or not
 * finite. Magnitudes compare as integers; NaN takes no part. */
MLAI_DEVICE void put_ds656_tile(const mlai_cuda_cache &c, char *row, int64_t first, bool wide,
                                float (&x)[8])
{
    if (c.sanitize)
        sanitize8(x, DS656);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t magnitude = __float_as_uint(x[i]) & 0x7fffffffu;
        largest = max(largest, magnitude > 0x7f800000u ? 0u : magnitude);
    }
#pragma unroll
    for (int step = 8; step > 0; step /= 2)
        largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, step));
    float scale = __fdiv_rn(__uint_as_float(largest), 448.0f);
    scale = scale > 0.0f && scale <= 3.402823466e38f ? scale : 1.0f;
    divide8(x, scale);
    store8(row, first, E4M3, wide, 8, x);
    if (threadIdx.x % 16 == 0)
        ((float *)(row + 512))[first / 128] = scale;
}

#endif
