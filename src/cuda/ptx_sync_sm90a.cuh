/*
 * Inline PTX for Hopper: threads and shared addresses, mbarriers, named and cluster barriers,
 * fences, programmatic dependent launch, register hand-over, and ordered or cache-hinted accesses
 * to global memory. Conventions: ptx_sm90a.cuh.
 *
 * An mbarrier wait takes the parity of the phase waited for: a fresh barrier is in phase 0, so
 * waiting for parity 1 on it returns at once and waiting for parity 0 blocks until the first
 * completion.
 */
#ifndef MLAI_PTX_SYNC_SM90A_CUH
#define MLAI_PTX_SYNC_SM90A_CUH

#include <stdint.h>

#define MLAI_DEV static __device__ __forceinline__

/* ---- threads and addresses ------------------------------------------------------------------- */

MLAI_DEV uint32_t mlai_smem_u32(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* True in exactly one lane of a converged warp. */
MLAI_DEV bool mlai_elect_one(void)
{
    uint32_t elected;
    asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(elected));
    return elected != 0;
}

/* ---- mbarriers ------------------------------------------------------------------------------- */

MLAI_DEV void mlai_mbar_init(uint32_t bar, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

/* Makes mbarrier inits visible to the copy engine and to the other CTAs of the cluster. */
MLAI_DEV void mlai_fence_mbar_init(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

MLAI_DEV void mlai_mbar_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

MLAI_DEV void mlai_mbar_arrive_expect_tx(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

MLAI_DEV bool mlai_mbar_test(uint32_t bar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 " selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done != 0;
}

MLAI_DEV bool mlai_mbar_try_wait(uint32_t bar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 " selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done != 0;
}

MLAI_DEV void mlai_mbar_wait(uint32_t bar, uint32_t parity)
{
    while (!mlai_mbar_try_wait(bar, parity)) {
    }
}

/* The same with acquire semantics over the cluster: for barriers that remote CTAs arrive on. */
MLAI_DEV void mlai_mbar_wait_cluster(uint32_t bar, uint32_t parity)
{
    uint32_t done;
    do {
        asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 "
                     "p, [%1], %2;\n"
                     " selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
    } while (!done);
}

/* ---- named barriers, fences, cluster --------------------------------------------------------- */

MLAI_DEV void mlai_bar_sync(uint32_t id, uint32_t threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

MLAI_DEV void mlai_bar_arrive(uint32_t id, uint32_t threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* A barrier that also ORs a predicate over its threads. */
MLAI_DEV bool mlai_bar_red_or(uint32_t id, uint32_t threads, bool value)
{
    uint32_t any;
    asm volatile(
        "{\n .reg .pred p, q;\n setp.ne.u32 p, %1, 0;\n barrier.cta.red.or.pred q, %2, %3, p;\n"
        " selp.u32 %0, 1, 0, q;\n}"
        : "=r"(any)
        : "r"((uint32_t)value), "r"(id), "r"(threads)
        : "memory");
    return any != 0;
}

/* Orders this thread's earlier ordinary shared stores before later reads by wgmma or the copy
 * engine. */
MLAI_DEV void mlai_fence_proxy_async_shared(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

MLAI_DEV uint32_t mlai_cluster_ctarank(void)
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

MLAI_DEV uint32_t mlai_cluster_nctarank(void)
{
    uint32_t count;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
    return count;
}

MLAI_DEV void mlai_cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

/* Without order for this thread's earlier accesses, which costs a fence to memory: enough behind
 * mlai_fence_mbar_init. */
MLAI_DEV void mlai_cluster_arrive_relaxed(void)
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

MLAI_DEV void mlai_cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The address, in the cluster's shared window, of `smem` as CTA `rank` holds it. */
MLAI_DEV uint32_t mlai_mapa(uint32_t smem, uint32_t rank)
{
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem), "r"(rank));
    return remote;
}

/* ---- programmatic dependent launch, register hand-over --------------------------------------- */

template <int Regs> MLAI_DEV void mlai_setmaxnreg_inc(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Regs));
}

template <int Regs> MLAI_DEV void mlai_setmaxnreg_dec(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Regs));
}

/* ---- global memory: relaxed / acquire / release and cache-hinted accesses -------------------- */

MLAI_DEV uint32_t mlai_ld_acquire_gpu(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

MLAI_DEV uint32_t mlai_atom_add_acq_rel_gpu(uint32_t *p, uint32_t v)
{
    uint32_t old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(p), "r"(v)
                 : "memory");
    return old;
}

MLAI_DEV void mlai_red_add_release_gpu(uint32_t *p, uint32_t v)
{
    asm volatile("red.add.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

MLAI_DEV uint32_t mlai_ld_relaxed_gpu(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

MLAI_DEV void mlai_prefetch_l2(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

/* One 16-byte or 8-byte store, whatever the compiler makes of an assignment. */
MLAI_DEV void mlai_st_f32x4(float *p, float x, float y, float z, float w)
{
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x), "f"(y), "f"(z), "f"(w)
                 : "memory");
}

MLAI_DEV void mlai_st_u32x4(void *p, uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

MLAI_DEV void mlai_st_f32x2(float *p, float x, float y)
{
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(x), "f"(y) : "memory");
}

MLAI_DEV void mlai_st_shared_zero_16(uint32_t smem)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(smem), "r"(0) : "memory");
}

/* A load that bypasses L1: for data that other SMs wrote in this launch. */
MLAI_DEV float4 mlai_ld_cg_f32x4(const float *p)
{
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

MLAI_DEV float2 mlai_ld_cg_f32x2(const float *p)
{
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    return v;
}

MLAI_DEV void mlai_ld_cg_u32x4(uint32_t (&v)[4], const void *p)
{
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "l"(p)
                 : "memory");
}

MLAI_DEV float mlai_ld_cg_f32(const float *p)
{
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}

#endif
