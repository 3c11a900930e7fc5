/* Tensor core building blocks for any GPU from sm_80 on: one-instruction functions for ldmatrix,
 * cp.async and mma.sync m16n8k16, and the two 16-bit types they compute in.
 *
 * Shared memory tiles are rows of 16-byte chunks (8 values). A row takes a multiple of 8 chunks and
 * chunk c of row r lies at c ^ (r % 8), so that the 8 rows that one ldmatrix matrix reads fall into
 * 8 different groups of 4 banks:
 *
 *        chunk   0 1 2 3 4 5 6 7
 *   row 0        0 1 2 3 4 5 6 7
 *   row 1        1 0 3 2 5 4 7 6
 *   row 2        2 3 0 1 6 7 4 5   ...
 *
 * Fragments of m16n8k16 in a warp, g = lane / 4, c = lane % 4: accumulators hold rows g (0, 1) and
 * g + 8 (2, 3), columns 2c and 2c + 1. Used by decode_portable, prefill_portable, absorb_project.
 */
#ifndef MLAI_MMA_PORTABLE_CUH
#define MLAI_MMA_PORTABLE_CUH

#include "cuda/kernels/formats.cuh"

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

/* bf16 and f16 as the products' type: format, packing of two values, the product. */
struct Bf16 {
    static constexpr int format = BF16;
    static constexpr uint32_t exponent = 0x7f80;
    static __device__ __forceinline__ uint32_t pack(float low, float high)
    {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *(const uint32_t *)&pair;
    }
    static __device__ __forceinline__ uint16_t narrow(float x)
    {
        return __bfloat16_as_ushort(__float2bfloat16_rn(x));
    }
    static __device__ __forceinline__ uint32_t from_halves(__half2 x)
    {
        const float2 pair = __half22float2(x);
        return pack(pair.x, pair.y);
    }
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1)
    {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct Fp16 {
    static constexpr int format = F16;
    static constexpr uint32_t exponent = 0x7c00;
    static __device__ __forceinline__ uint32_t pack(float low, float high)
    {
        const __half2 pair = __floats2half2_rn(low, high);
        return *(const uint32_t *)&pair;
    }
    static __device__ __forceinline__ uint16_t narrow(float x)
    {
        return __half_as_ushort(__float2half_rn(x));
    }
    static __device__ __forceinline__ uint32_t from_halves(__half2 x)
    {
        return *(const uint32_t *)&x;
    }
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1)
    {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

MLAI_DEVICE uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Four 8x8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8. */
MLAI_DEVICE void ldmatrix(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

MLAI_DEVICE void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* 16 bytes to shared memory without registers; not live: 16 zero bytes, the source is not read. */
MLAI_DEVICE void copy16(uint32_t to, const void *from, bool live)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(live ? 16 : 0)
                 : "memory");
}

/* Waits for all of this thread's copies; a barrier then makes them visible to the others. */
MLAI_DEVICE void copies_wait(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Closes a group of this thread's copies; copies_wait_all_but waits for all groups but the last N.
 */
MLAI_DEVICE void copies_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> MLAI_DEVICE void copies_wait_all_but(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Barrier `id` (1..15) among `threads` threads of the block; 0 is __syncthreads. */
MLAI_DEVICE void barrier(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

MLAI_DEVICE float fast_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Byte offset of chunk c of row r in a tile whose rows take row_bytes. */
MLAI_DEVICE uint32_t chunk_at(int row, int chunk, int row_bytes)
{
    return (uint32_t)(row * row_bytes + ((chunk ^ (row & 7)) << 4));
}

/* The A operand (rows x k, row-major): lane's row and chunk for 16 rows and k step `step`. */
MLAI_DEVICE uint32_t a_address(uint32_t tile, int first_row, int step, int row_bytes,
                               int lane = threadIdx.x % 32)
{
    return tile + chunk_at(first_row + lane % 16, 2 * step + lane / 16, row_bytes);
}

/* The B operand stored as columns x k (keys x dims): 16 columns, k step `step`; registers 0, 1 are
 * the first 8 columns, 2, 3 the others. */
MLAI_DEVICE uint32_t b_address(uint32_t tile, int first_column, int step, int row_bytes,
                               int lane = threadIdx.x % 32)
{
    return tile +
           chunk_at(first_column + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2, row_bytes);
}

/* The B operand stored as k x columns (keys x values), for ldmatrix_transposed: k step `step`, 16
 * columns from chunk 2 * pair; registers 0, 1 are the first 8 columns, 2, 3 the others. */
MLAI_DEVICE uint32_t v_address(uint32_t tile, int step, int pair, int row_bytes,
                               int lane = threadIdx.x % 32)
{
    return tile + chunk_at(16 * step + lane % 16, 2 * pair + lane / 16, row_bytes);
}

/* Eight fp8 codes as 8 values of T, exactly. */
template <class T> MLAI_DEVICE uint4 widen_fp8(uint2 raw, int format)
{
    const __nv_fp8_interpretation_t kind = format == E5M2 ? __NV_E5M2 : __NV_E4M3;
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t word = i < 2 ? raw.x : raw.y;
        const __nv_fp8x2_storage_t two = (__nv_fp8x2_storage_t)(word >> (16 * (i % 2)));
        out[i] = T::from_halves(__half2(__nv_cvt_fp8x2_to_halfraw2(two, kind)));
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

/* Up to 8 values of any format as T, one by one; n <= 0 gives zeros and reads nothing. Small, not
 * fast: rows that 16-byte copies cannot take. */
template <class T> MLAI_DEVICE uint4 load_chunk(const char *base, int64_t index, int format, int n)
{
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < 8 && i < n; i++) {
        const uint32_t half = T::narrow(load_value(base, index + i, format));
        const uint32_t at = half << (16 * (i & 1));
        words[0] |= i / 2 == 0 ? at : 0;
        words[1] |= i / 2 == 1 ? at : 0;
        words[2] |= i / 2 == 2 ? at : 0;
        words[3] |= i / 2 == 3 ? at : 0;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Two neighbouring outputs; `pairs`: their address is a multiple of both, n: how many exist. */
MLAI_DEVICE void store_pair(char *base, int64_t index, int format, bool pairs, int n, float x0,
                            float x1)
{
    if (pairs && n >= 2) {
        if (format == F32) {
            *(float2 *)((float *)base + index) = make_float2(x0, x1);
            return;
        }
        if (format == BF16) {
            *(uint32_t *)((uint16_t *)base + index) = Bf16::pack(x0, x1);
            return;
        }
        if (format == F16) {
            *(uint32_t *)((uint16_t *)base + index) = Fp16::pack(x0, x1);
            return;
        }
    }
    if (n >= 1)
        store_value(base, index, format, x0);
    if (n >= 2)
        store_value(base, index + 1, format, x1);
}

/* Eight values with those that are infinite or NaN replaced by 0. */
template <class T> MLAI_DEVICE uint4 finite_chunk(uint4 chunk)
{
    uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        constexpr uint32_t low = T::exponent, high = T::exponent << 16;
        if ((words[i] & low) == low)
            words[i] &= 0xffff0000u;
        if ((words[i] & high) == high)
            words[i] &= 0x0000ffffu;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

#endif
