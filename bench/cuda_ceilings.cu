/*
 * What a GPU can do at most, for `mla bench --device cuda`: kernels that only read, only copy, only
 * multiply, or do nothing. cuda_ceilings.c launches and times them.
 *
 *   bench_read       4 GiB, eight independent 16-byte loads a thread in flight
 *   bench_copy       the same with stores
 *   bench_bf16       wgmma on random data: 2 warpgroups a CTA, each 64 x 256 outputs, operands in
 *   bench_e4m3       shared memory with 128-byte rows and swizzle (one K tile = 128 bytes)
 *   bench_empty      one launch
 *   bench_spin       keeps the stream busy while the host enqueues what is timed behind it
 */
#include <stdint.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "cuda/ptx_sm90a.cuh"
#endif

enum { MOVE_THREADS = 256, MOVE_LOADS = 8, PRODUCT_THREADS = 256, STAGES = 4 };

__device__ __forceinline__ uint4 load_streaming(const uint4 *at)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

/* n counts blocks of MOVE_LOADS * MOVE_THREADS vectors. The sum is stored when it has a value that
 * it never has, so that the loads are not taken out. */
extern "C" __global__ void __launch_bounds__(MOVE_THREADS)
    bench_read(const uint4 *from, uint64_t n, uint32_t *sink)
{
    uint32_t sum = 0;
    for (uint64_t block = blockIdx.x; block < n; block += gridDim.x) {
        const uint4 *at = from + block * (MOVE_LOADS * MOVE_THREADS) + threadIdx.x;
        uint4 v[MOVE_LOADS];
#pragma unroll
        for (int i = 0; i < MOVE_LOADS; i++)
            v[i] = load_streaming(at + i * MOVE_THREADS);
#pragma unroll
        for (int i = 0; i < MOVE_LOADS; i++)
            sum |= v[i].x | v[i].y | v[i].z | v[i].w;
    }
    if (sum == 0xdeadbeefu)
        *sink = sum;
}

extern "C" __global__ void __launch_bounds__(MOVE_THREADS)
    bench_copy(uint4 *to, const uint4 *from, uint64_t n)
{
    for (uint64_t block = blockIdx.x; block < n; block += gridDim.x) {
        const uint64_t first = block * (MOVE_LOADS * MOVE_THREADS) + threadIdx.x;
        uint4 v[MOVE_LOADS];
#pragma unroll
        for (int i = 0; i < MOVE_LOADS; i++)
            v[i] = load_streaming(from + first + i * MOVE_THREADS);
#pragma unroll
        for (int i = 0; i < MOVE_LOADS; i++)
            __stcs(to + first + i * MOVE_THREADS, v[i]);
    }
}

extern "C" __global__ void bench_empty()
{
}

extern "C" __global__ void bench_spin(uint64_t nanoseconds)
{
    uint64_t begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

enum { A_BYTES = 64 * 128, B_BYTES = 256 * 128, STAGE_BYTES = 2 * A_BYTES + B_BYTES };

__device__ __forceinline__ uint32_t mix(uint32_t x)
{
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* Two values of N(0, 1) by Box and Muller. */
__device__ __forceinline__ float2 normals(uint32_t seed)
{
    const float u = ((float)(mix(seed) >> 8) + 0.5f) * 0x1p-24f;
    const float angle = (float)(mix(seed ^ 0x9e3779b9u) >> 8) * (6.2831853f * 0x1p-24f);
    const float radius = sqrtf(-2.0f * __logf(u));
    return make_float2(radius * __cosf(angle), radius * __sinf(angle));
}

/* What a word of shared memory holds does not depend on the layout: all of it is random. */
template <bool IsFp8> __device__ __forceinline__ void fill(uint32_t *words, uint32_t n)
{
    for (uint32_t i = threadIdx.x; i < n; i += PRODUCT_THREADS) {
        const uint32_t seed = (blockIdx.x * n + i) * 2;
        const float2 a = normals(seed);
        if (IsFp8) {
            const float2 b = normals(seed + 1);
            words[i] = (uint32_t)mlai_pack_e4m3x2(a.x, a.y) | (uint32_t)mlai_pack_e4m3x2(b.x, b.y)
                                                                  << 16;
        } else {
            words[i] = mlai_pack_bf16x2(a.x, a.y);
        }
    }
}

template <bool IsFp8> __device__ __forceinline__ void products(uint32_t rounds, float *sink)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    const uint32_t base = mlai_smem_u32(smem);
    const uint32_t group = threadIdx.x / 128;
    float d[128];
    fill<IsFp8>((uint32_t *)smem, STAGES * STAGE_BYTES / 4);
    mlai_fence_proxy_async_shared();
    __syncthreads();
    for (uint32_t round = 0; round < rounds; round++) {
#pragma unroll
        for (uint32_t stage = 0; stage < STAGES; stage++) {
            const uint32_t at = base + stage * STAGE_BYTES;
            mlai_wgmma_fence();
#pragma unroll
            for (uint32_t k = 0; k < 4; k++) {
                const uint64_t a =
                    mlai_wgmma_descriptor(at + group * A_BYTES + k * 32, 0, 1024, MLAI_SWIZZLE_128);
                const uint64_t b =
                    mlai_wgmma_descriptor(at + 2 * A_BYTES + k * 32, 0, 1024, MLAI_SWIZZLE_128);
                /* A new sum every 32 rounds, as long as the K of a large product. */
                const int accumulate = stage != 0 || k != 0 || round % 32 != 0;
                if (IsFp8)
                    mlai_wgmma<256>::e4m3_ss(d, a, b, accumulate);
                else
                    mlai_wgmma<256>::bf16_ss<0, 0>(d, a, b, accumulate);
            }
            mlai_wgmma_commit();
            mlai_wgmma_wait<1>();
        }
    }
    mlai_wgmma_wait<0>();
    mlai_wgmma_fence_operand(d);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 128; i++)
        sum += d[i];
    if (sum == 1234.5678f)
        *sink = sum;
}

#else

template <bool IsFp8> __device__ __forceinline__ void products(uint32_t, float *)
{
}

#endif

extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, 1)
    bench_bf16(uint32_t rounds, float *sink)
{
    products<false>(rounds, sink);
}

extern "C" __global__ void __launch_bounds__(PRODUCT_THREADS, 1)
    bench_e4m3(uint32_t rounds, float *sink)
{
    products<true>(rounds, sink);
}
