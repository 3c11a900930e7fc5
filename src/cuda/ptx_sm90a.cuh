/* Inline PTX for Hopper (sm_90a): one function, one instruction.
 *
 * What is here: shared-memory addresses, mbarriers (local and across a cluster), the bulk copy
 * engine (plain and tensor, multicast, cache hints), wgmma with its descriptors, ldmatrix /
 * stmatrix / movmatrix, setmaxnreg, named barriers, proxy fences, cluster barriers, and
 * programmatic dependent launch.
 *
 * Conventions
 *   - Shared addresses are 32-bit (mlai_smem_u32), global ones are plain pointers.
 *   - An mbarrier wait takes the parity of the phase waited for: a fresh barrier is in phase 0, so
 * waiting for parity 1 on it returns at once and waiting for parity 0 blocks until the first
 * completion.
 *   - wgmma accumulators are float (&d)[N / 2]: d[4 i + 0, 1] is row lane / 4 and d[4 i + 2, 3] row
 * lane / 4 + 8 of the warp's 16 rows, columns 8 i + 2 (lane % 4) + {0, 1}.
 *   - A wgmma operand is K-major when its K index is contiguous in memory, else MN-major (template
 * argument 1).
 *   - Only one thread issues a bulk copy; every thread of a warpgroup issues a wgmma.
 * Limits: needs -gencode=arch=compute_90a,code=sm_90a; includes only <cuda.h>'s CUtensorMap and
 * fixed-width integers. Called by: the *_sm90a.cu kernels of this folder.
 */
#ifndef MLAI_PTX_SM90A_CUH
#define MLAI_PTX_SM90A_CUH

#include <cuda.h>
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

MLAI_DEV uint32_t mlai_sm_id(void)
{
    uint32_t id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
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

MLAI_DEV void mlai_mbar_expect_tx(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.expect_tx.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

/* Arrives on a barrier of another CTA of the cluster; `remote_bar` comes from mlai_mapa. */
MLAI_DEV void mlai_mbar_arrive_cluster(uint32_t remote_bar)
{
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote_bar)
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

MLAI_DEV void mlai_fence_proxy_async_global(void)
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

MLAI_DEV void mlai_fence_acq_rel_gpu(void)
{
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

MLAI_DEV uint32_t mlai_cluster_ctarank(void)
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

MLAI_DEV void mlai_cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
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

MLAI_DEV void mlai_grid_dependency_wait(void)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

MLAI_DEV void mlai_grid_launch_dependents(void)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

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

MLAI_DEV uint32_t mlai_atom_add_release_gpu(uint32_t *p, uint32_t v)
{
    uint32_t old;
    asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(p), "r"(v)
                 : "memory");
    return old;
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

MLAI_DEV float mlai_ld_cg_f32(const float *p)
{
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}

/* L2 eviction policies, as the 64-bit operands that the bulk copies' cache hints take. */
MLAI_DEV uint64_t mlai_l2_policy_evict_first(void)
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

MLAI_DEV uint64_t mlai_l2_policy_evict_last(void)
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* ---- asynchronous copies by threads (cp.async) ----------------------------------------------- */

/* Copies 16 bytes; with live == 0 nothing is read and 16 zero bytes are written. */
MLAI_DEV void mlai_cp_async_16_zfill(uint32_t smem, const void *global, bool live)
{
    const int bytes = live ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global),
                 "r"(bytes)
                 : "memory");
}

MLAI_DEV void mlai_cp_async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int Pending> MLAI_DEV void mlai_cp_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/* Arrives on the barrier once this thread's earlier cp.async have landed; does not raise its
 * pending count. */
MLAI_DEV void mlai_cp_async_mbar_arrive_noinc(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

/* ---- the bulk copy engine -------------------------------------------------------------------- */

MLAI_DEV void mlai_tma_prefetch_descriptor(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

MLAI_DEV void mlai_bulk_load(uint32_t smem, const void *global, uint32_t bytes, uint32_t bar)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(smem),
        "l"(global), "r"(bytes), "r"(bar)
        : "memory");
}

MLAI_DEV void mlai_bulk_load_hint(uint32_t smem, const void *global, uint32_t bytes, uint32_t bar,
                                  uint64_t policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1], %2, [%3], %4;" ::"r"(smem),
                 "l"(global), "r"(bytes), "r"(bar), "l"(policy)
                 : "memory");
}

MLAI_DEV void mlai_bulk_store(void *global, uint32_t smem, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(smem), "r"(bytes)
                 : "memory");
}

/* Shared memory of this CTA to shared memory of another CTA of the cluster. */
MLAI_DEV void mlai_bulk_copy_cluster(uint32_t remote_smem, uint32_t smem, uint32_t bytes,
                                     uint32_t remote_bar)
{
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], "
                 "[%1], %2, [%3];" ::"r"(remote_smem),
                 "r"(smem), "r"(bytes), "r"(remote_bar)
                 : "memory");
}

MLAI_DEV void mlai_bulk_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until at most Pending groups still read their shared source. */
template <int Pending> MLAI_DEV void mlai_bulk_wait_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

template <int Pending> MLAI_DEV void mlai_bulk_wait(void)
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

MLAI_DEV void mlai_tma_load_2d(uint32_t smem, const CUtensorMap *map, uint32_t bar, int32_t x,
                               int32_t y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];" ::"r"(smem),
                 "l"(map), "r"(bar), "r"(x), "r"(y)
                 : "memory");
}

MLAI_DEV void mlai_tma_load_2d_hint(uint32_t smem, const CUtensorMap *map, uint32_t bar,
                                    uint64_t policy, int32_t x, int32_t y)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(smem),
        "l"(map), "r"(bar), "l"(policy), "r"(x), "r"(y)
        : "memory");
}

/* The same box to the same offset of every CTA in `cta_mask`; each one's barrier at `bar` counts
 * its bytes. */
MLAI_DEV void mlai_tma_load_2d_multicast(uint32_t smem, const CUtensorMap *map, uint32_t bar,
                                         uint16_t cta_mask, int32_t x, int32_t y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes."
                 "multicast::cluster"
                 " [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(smem),
                 "l"(map), "r"(bar), "h"(cta_mask), "r"(x), "r"(y)
                 : "memory");
}

MLAI_DEV void mlai_tma_load_2d_multicast_hint(uint32_t smem, const CUtensorMap *map, uint32_t bar,
                                              uint16_t cta_mask, uint64_t policy, int32_t x,
                                              int32_t y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes."
                 "multicast::cluster"
                 ".L2::cache_hint [%0], [%1, {%5, %6}], [%2], %3, %4;" ::"r"(smem),
                 "l"(map), "r"(bar), "h"(cta_mask), "l"(policy), "r"(x), "r"(y)
                 : "memory");
}

/* Brings the box into L2 only. */
MLAI_DEV void mlai_tma_prefetch_2d(const CUtensorMap *map, int32_t x, int32_t y)
{
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(x),
                 "r"(y)
                 : "memory");
}

MLAI_DEV void mlai_tma_store_2d(const CUtensorMap *map, uint32_t smem, int32_t x, int32_t y)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
        "r"(smem), "r"(x), "r"(y)
        : "memory");
}

MLAI_DEV void mlai_tma_load_3d(uint32_t smem, const CUtensorMap *map, uint32_t bar, int32_t x,
                               int32_t y, int32_t z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem),
                 "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

MLAI_DEV void mlai_tma_load_3d_hint(uint32_t smem, const CUtensorMap *map, uint32_t bar,
                                    uint64_t policy, int32_t x, int32_t y, int32_t z)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(smem),
        "l"(map), "r"(bar), "l"(policy), "r"(x), "r"(y), "r"(z)
        : "memory");
}

/* The same box to the same offset of every CTA in `cta_mask`; each one's barrier at `bar` counts
 * its bytes. */
MLAI_DEV void mlai_tma_load_3d_multicast(uint32_t smem, const CUtensorMap *map, uint32_t bar,
                                         uint16_t cta_mask, int32_t x, int32_t y, int32_t z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes."
                 "multicast::cluster"
                 " [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(smem),
                 "l"(map), "r"(bar), "h"(cta_mask), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

MLAI_DEV void mlai_tma_load_3d_multicast_hint(uint32_t smem, const CUtensorMap *map, uint32_t bar,
                                              uint16_t cta_mask, uint64_t policy, int32_t x,
                                              int32_t y, int32_t z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes."
                 "multicast::cluster"
                 ".L2::cache_hint [%0], [%1, {%5, %6, %7}], [%2], %3, %4;" ::"r"(smem),
                 "l"(map), "r"(bar), "h"(cta_mask), "l"(policy), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* Brings the box into L2 only. */
MLAI_DEV void mlai_tma_prefetch_3d(const CUtensorMap *map, int32_t x, int32_t y, int32_t z)
{
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map),
                 "r"(x), "r"(y), "r"(z)
                 : "memory");
}

MLAI_DEV void mlai_tma_store_3d(const CUtensorMap *map, uint32_t smem, int32_t x, int32_t y,
                                int32_t z)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
            map),
        "r"(smem), "r"(x), "r"(y), "r"(z)
        : "memory");
}

MLAI_DEV void mlai_tma_load_4d(uint32_t smem, const CUtensorMap *map, uint32_t bar, int32_t x,
                               int32_t y, int32_t z, int32_t w)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem),
                 "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

MLAI_DEV void mlai_tma_load_4d_hint(uint32_t smem, const CUtensorMap *map, uint32_t bar,
                                    uint64_t policy, int32_t x, int32_t y, int32_t z, int32_t w)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(smem),
        "l"(map), "r"(bar), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

/* The same box to the same offset of every CTA in `cta_mask`; each one's barrier at `bar` counts
 * its bytes. */
MLAI_DEV void mlai_tma_load_4d_multicast(uint32_t smem, const CUtensorMap *map, uint32_t bar,
                                         uint16_t cta_mask, int32_t x, int32_t y, int32_t z,
                                         int32_t w)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes."
                 "multicast::cluster"
                 " [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(smem),
                 "l"(map), "r"(bar), "h"(cta_mask), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

MLAI_DEV void mlai_tma_load_4d_multicast_hint(uint32_t smem, const CUtensorMap *map, uint32_t bar,
                                              uint16_t cta_mask, uint64_t policy, int32_t x,
                                              int32_t y, int32_t z, int32_t w)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes."
                 "multicast::cluster"
                 ".L2::cache_hint [%0], [%1, {%5, %6, %7, %8}], [%2], %3, %4;" ::"r"(smem),
                 "l"(map), "r"(bar), "h"(cta_mask), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

/* Brings the box into L2 only. */
MLAI_DEV void mlai_tma_prefetch_4d(const CUtensorMap *map, int32_t x, int32_t y, int32_t z,
                                   int32_t w)
{
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map),
                 "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

MLAI_DEV void mlai_tma_store_4d(const CUtensorMap *map, uint32_t smem, int32_t x, int32_t y,
                                int32_t z, int32_t w)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            map),
        "r"(smem), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

/* ---- 8x8 matrices between registers and shared memory ---------------------------------------- */

MLAI_DEV void mlai_ldmatrix_x4(uint32_t (&r)[4], uint32_t smem)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
}

MLAI_DEV void mlai_ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t smem)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
}

MLAI_DEV void mlai_stmatrix_x2(uint32_t smem, uint32_t r0, uint32_t r1)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(smem), "r"(r0),
                 "r"(r1)
                 : "memory");
}

MLAI_DEV void mlai_stmatrix_x2_trans(uint32_t smem, uint32_t r0, uint32_t r1)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(smem),
                 "r"(r0), "r"(r1)
                 : "memory");
}

MLAI_DEV void mlai_stmatrix_x4(uint32_t smem, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

MLAI_DEV void mlai_stmatrix_x4_trans(uint32_t smem, uint32_t r0, uint32_t r1, uint32_t r2,
                                     uint32_t r3)
{
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
        "r"(r0), "r"(r1), "r"(r2), "r"(r3)
        : "memory");
}

/* Transposes an 8x8 matrix of 16-bit elements held one register a lane. */
MLAI_DEV uint32_t mlai_movmatrix_trans(uint32_t r)
{
    uint32_t t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(r));
    return t;
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

MLAI_DEV float mlai_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

MLAI_DEV float mlai_log2(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

MLAI_DEV float mlai_rcp(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Packs two floats, rounded to nearest even, into one register: `lo` in the low half. */
MLAI_DEV uint32_t mlai_pack_bf16x2(float lo, float hi)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

MLAI_DEV uint32_t mlai_pack_f16x2(float lo, float hi)
{
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

/* Two floats to e4m3, saturating, `lo` in the low byte. */
MLAI_DEV uint16_t mlai_pack_e4m3x2(float lo, float hi)
{
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    return r;
}

/* ---- wgmma ----------------------------------------------------------------------------------- */

/* Orders register accesses of this warpgroup before the wgmma that follow. */
MLAI_DEV void mlai_wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

MLAI_DEV void mlai_wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int Pending> MLAI_DEV void mlai_wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/* Ties accumulators to this point of the program, so that the compiler moves no read of them above
 * a wait. */
template <int Count> MLAI_DEV void mlai_wgmma_fence_operand(float (&d)[Count])
{
#pragma unroll
    for (int i = 0; i < Count; i++) {
        asm volatile("" : "+f"(d[i]) : : "memory");
    }
}

enum mlai_swizzle {
    MLAI_SWIZZLE_NONE = 0,
    MLAI_SWIZZLE_128 = 1,
    MLAI_SWIZZLE_64 = 2,
    MLAI_SWIZZLE_32 = 3
};

/* Matrix descriptor of an operand in shared memory; offsets in bytes, multiples of 16.
 * K-major, 128-byte swizzle: rows of 128 bytes, 8 rows an atom of 1024 bytes; stride = bytes from
 * one group of 8 rows to the next (1024 when packed), leading unused; the next 16 bf16 along K are
 * 32 bytes further. MN-major, 128-byte swizzle: each atom is 64 bf16 along MN by 8 along K; leading
 * = bytes from one such 64 to the next, stride = bytes from one group of 8 K rows to the next. */
MLAI_DEV uint64_t mlai_wgmma_descriptor(uint32_t smem, uint32_t leading_bytes,
                                        uint32_t stride_bytes, mlai_swizzle mode)
{
    return (uint64_t)((smem & 0x3ffffu) >> 4) | ((uint64_t)(leading_bytes >> 4) << 16) |
           ((uint64_t)(stride_bytes >> 4) << 32) | ((uint64_t)mode << 62);
}

/* mlai_wgmma<N>: D[64 x N] (+)= A[64 x K] B[K x N], f32 accumulators. `accumulate` 0 starts from
 * zero.
 *   *_ss: A and B in shared memory; *_rs: A in registers (a[0]: row lane / 4, K 2 (lane % 4) + {0,
 * 1}; a[1]: row + 8; a[2], a[3]: the same rows, K + 8). K is 16 for bf16 and f16, 32 for e4m3
 * (K-major operands only). TransA / TransB: 1 = that operand is MN-major. */
template <int N> struct mlai_wgmma;

#define MLAI_WGMMA_S_8 "%0,%1,%2,%3"
#define MLAI_WGMMA_S_16 MLAI_WGMMA_S_8 ",%4,%5,%6,%7"
#define MLAI_WGMMA_S_24 MLAI_WGMMA_S_16 ",%8,%9,%10,%11"
#define MLAI_WGMMA_S_32 MLAI_WGMMA_S_24 ",%12,%13,%14,%15"
#define MLAI_WGMMA_S_40 MLAI_WGMMA_S_32 ",%16,%17,%18,%19"
#define MLAI_WGMMA_S_48 MLAI_WGMMA_S_40 ",%20,%21,%22,%23"
#define MLAI_WGMMA_S_56 MLAI_WGMMA_S_48 ",%24,%25,%26,%27"
#define MLAI_WGMMA_S_64 MLAI_WGMMA_S_56 ",%28,%29,%30,%31"
#define MLAI_WGMMA_S_72 MLAI_WGMMA_S_64 ",%32,%33,%34,%35"
#define MLAI_WGMMA_S_80 MLAI_WGMMA_S_72 ",%36,%37,%38,%39"
#define MLAI_WGMMA_S_88 MLAI_WGMMA_S_80 ",%40,%41,%42,%43"
#define MLAI_WGMMA_S_96 MLAI_WGMMA_S_88 ",%44,%45,%46,%47"
#define MLAI_WGMMA_S_104 MLAI_WGMMA_S_96 ",%48,%49,%50,%51"
#define MLAI_WGMMA_S_112 MLAI_WGMMA_S_104 ",%52,%53,%54,%55"
#define MLAI_WGMMA_S_120 MLAI_WGMMA_S_112 ",%56,%57,%58,%59"
#define MLAI_WGMMA_S_128 MLAI_WGMMA_S_120 ",%60,%61,%62,%63"
#define MLAI_WGMMA_S_136 MLAI_WGMMA_S_128 ",%64,%65,%66,%67"
#define MLAI_WGMMA_S_144 MLAI_WGMMA_S_136 ",%68,%69,%70,%71"
#define MLAI_WGMMA_S_152 MLAI_WGMMA_S_144 ",%72,%73,%74,%75"
#define MLAI_WGMMA_S_160 MLAI_WGMMA_S_152 ",%76,%77,%78,%79"
#define MLAI_WGMMA_S_168 MLAI_WGMMA_S_160 ",%80,%81,%82,%83"
#define MLAI_WGMMA_S_176 MLAI_WGMMA_S_168 ",%84,%85,%86,%87"
#define MLAI_WGMMA_S_184 MLAI_WGMMA_S_176 ",%88,%89,%90,%91"
#define MLAI_WGMMA_S_192 MLAI_WGMMA_S_184 ",%92,%93,%94,%95"
#define MLAI_WGMMA_S_200 MLAI_WGMMA_S_192 ",%96,%97,%98,%99"
#define MLAI_WGMMA_S_208 MLAI_WGMMA_S_200 ",%100,%101,%102,%103"
#define MLAI_WGMMA_S_216 MLAI_WGMMA_S_208 ",%104,%105,%106,%107"
#define MLAI_WGMMA_S_224 MLAI_WGMMA_S_216 ",%108,%109,%110,%111"
#define MLAI_WGMMA_S_232 MLAI_WGMMA_S_224 ",%112,%113,%114,%115"
#define MLAI_WGMMA_S_240 MLAI_WGMMA_S_232 ",%116,%117,%118,%119"
#define MLAI_WGMMA_S_248 MLAI_WGMMA_S_240 ",%120,%121,%122,%123"
#define MLAI_WGMMA_S_256 MLAI_WGMMA_S_248 ",%124,%125,%126,%127"
#define MLAI_WGMMA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MLAI_WGMMA_D_8 MLAI_WGMMA_D4(0)
#define MLAI_WGMMA_D_16 MLAI_WGMMA_D_8, MLAI_WGMMA_D4(4)
#define MLAI_WGMMA_D_24 MLAI_WGMMA_D_16, MLAI_WGMMA_D4(8)
#define MLAI_WGMMA_D_32 MLAI_WGMMA_D_24, MLAI_WGMMA_D4(12)
#define MLAI_WGMMA_D_40 MLAI_WGMMA_D_32, MLAI_WGMMA_D4(16)
#define MLAI_WGMMA_D_48 MLAI_WGMMA_D_40, MLAI_WGMMA_D4(20)
#define MLAI_WGMMA_D_56 MLAI_WGMMA_D_48, MLAI_WGMMA_D4(24)
#define MLAI_WGMMA_D_64 MLAI_WGMMA_D_56, MLAI_WGMMA_D4(28)
#define MLAI_WGMMA_D_72 MLAI_WGMMA_D_64, MLAI_WGMMA_D4(32)
#define MLAI_WGMMA_D_80 MLAI_WGMMA_D_72, MLAI_WGMMA_D4(36)
#define MLAI_WGMMA_D_88 MLAI_WGMMA_D_80, MLAI_WGMMA_D4(40)
#define MLAI_WGMMA_D_96 MLAI_WGMMA_D_88, MLAI_WGMMA_D4(44)
#define MLAI_WGMMA_D_104 MLAI_WGMMA_D_96, MLAI_WGMMA_D4(48)
#define MLAI_WGMMA_D_112 MLAI_WGMMA_D_104, MLAI_WGMMA_D4(52)
#define MLAI_WGMMA_D_120 MLAI_WGMMA_D_112, MLAI_WGMMA_D4(56)
#define MLAI_WGMMA_D_128 MLAI_WGMMA_D_120, MLAI_WGMMA_D4(60)
#define MLAI_WGMMA_D_136 MLAI_WGMMA_D_128, MLAI_WGMMA_D4(64)
#define MLAI_WGMMA_D_144 MLAI_WGMMA_D_136, MLAI_WGMMA_D4(68)
#define MLAI_WGMMA_D_152 MLAI_WGMMA_D_144, MLAI_WGMMA_D4(72)
#define MLAI_WGMMA_D_160 MLAI_WGMMA_D_152, MLAI_WGMMA_D4(76)
#define MLAI_WGMMA_D_168 MLAI_WGMMA_D_160, MLAI_WGMMA_D4(80)
#define MLAI_WGMMA_D_176 MLAI_WGMMA_D_168, MLAI_WGMMA_D4(84)
#define MLAI_WGMMA_D_184 MLAI_WGMMA_D_176, MLAI_WGMMA_D4(88)
#define MLAI_WGMMA_D_192 MLAI_WGMMA_D_184, MLAI_WGMMA_D4(92)
#define MLAI_WGMMA_D_200 MLAI_WGMMA_D_192, MLAI_WGMMA_D4(96)
#define MLAI_WGMMA_D_208 MLAI_WGMMA_D_200, MLAI_WGMMA_D4(100)
#define MLAI_WGMMA_D_216 MLAI_WGMMA_D_208, MLAI_WGMMA_D4(104)
#define MLAI_WGMMA_D_224 MLAI_WGMMA_D_216, MLAI_WGMMA_D4(108)
#define MLAI_WGMMA_D_232 MLAI_WGMMA_D_224, MLAI_WGMMA_D4(112)
#define MLAI_WGMMA_D_240 MLAI_WGMMA_D_232, MLAI_WGMMA_D4(116)
#define MLAI_WGMMA_D_248 MLAI_WGMMA_D_240, MLAI_WGMMA_D4(120)
#define MLAI_WGMMA_D_256 MLAI_WGMMA_D_248, MLAI_WGMMA_D4(124)

/* One shape: N, then the operand numbers that follow its N / 2 accumulators. */
#define MLAI_WGMMA_SHAPE(N, n0, n1, n2, n3, n4, n5, n6)                                            \
    template <> struct mlai_wgmma<N> {                                                             \
        template <int TransA, int TransB>                                                          \
        MLAI_DEV void bf16_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate)           \
        {                                                                                          \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #n2 ", 0;\n"                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N                                    \
                         "k16.f32.bf16.bf16 {" MLAI_WGMMA_S_##N                                    \
                         "}, %" #n0 ", %" #n1 ", p, 1, 1, %" #n3 ", %" #n4 ";\n}"                  \
                         : MLAI_WGMMA_D_##N                                                        \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB));             \
        }                                                                                          \
        template <int TransB>                                                                      \
        MLAI_DEV void bf16_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,               \
                              int accumulate)                                                      \
        {                                                                                          \
            asm volatile(                                                                          \
                "{\n .reg .pred p;\n setp.ne.b32 p, %" #n5 ", 0;\n"                                \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" MLAI_WGMMA_S_##N      \
                "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1, %" #n6 ";\n}"     \
                : MLAI_WGMMA_D_##N                                                                 \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),             \
                  "n"(TransB));                                                                    \
        }                                                                                          \
        template <int TransA, int TransB>                                                          \
        MLAI_DEV void f16_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate)            \
        {                                                                                          \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #n2 ", 0;\n"                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N                                    \
                         "k16.f32.f16.f16 {" MLAI_WGMMA_S_##N "}, %" #n0 ", %" #n1                 \
                                                              ", p, 1, 1, %" #n3 ", %" #n4 ";\n}"  \
                         : MLAI_WGMMA_D_##N                                                        \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB));             \
        }                                                                                          \
        template <int TransB>                                                                      \
        MLAI_DEV void f16_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,                \
                             int accumulate)                                                       \
        {                                                                                          \
            asm volatile(                                                                          \
                "{\n .reg .pred p;\n setp.ne.b32 p, %" #n5 ", 0;\n"                                \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" MLAI_WGMMA_S_##N        \
                "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1, %" #n6 ";\n}"     \
                : MLAI_WGMMA_D_##N                                                                 \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),             \
                  "n"(TransB));                                                                    \
        }                                                                                          \
        MLAI_DEV void e4m3_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate)           \
        {                                                                                          \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #n2 ", 0;\n"                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N                                    \
                         "k32.f32.e4m3.e4m3 {" MLAI_WGMMA_S_##N "}, %" #n0 ", %" #n1               \
                                                                ", p, 1, 1;\n}"                    \
                         : MLAI_WGMMA_D_##N                                                        \
                         : "l"(a), "l"(b), "r"(accumulate));                                       \
        }                                                                                          \
        MLAI_DEV void e4m3_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,               \
                              int accumulate)                                                      \
        {                                                                                          \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #n5 ", 0;\n"                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N                                    \
                         "k32.f32.e4m3.e4m3 {" MLAI_WGMMA_S_##N                                    \
                         "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1;\n}"      \
                         : MLAI_WGMMA_D_##N                                                        \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));   \
        }                                                                                          \
    };

MLAI_WGMMA_SHAPE(8, 4, 5, 6, 7, 8, 9, 10)
MLAI_WGMMA_SHAPE(16, 8, 9, 10, 11, 12, 13, 14)
MLAI_WGMMA_SHAPE(24, 12, 13, 14, 15, 16, 17, 18)
MLAI_WGMMA_SHAPE(32, 16, 17, 18, 19, 20, 21, 22)
MLAI_WGMMA_SHAPE(40, 20, 21, 22, 23, 24, 25, 26)
MLAI_WGMMA_SHAPE(48, 24, 25, 26, 27, 28, 29, 30)
MLAI_WGMMA_SHAPE(56, 28, 29, 30, 31, 32, 33, 34)
MLAI_WGMMA_SHAPE(64, 32, 33, 34, 35, 36, 37, 38)
MLAI_WGMMA_SHAPE(72, 36, 37, 38, 39, 40, 41, 42)
MLAI_WGMMA_SHAPE(80, 40, 41, 42, 43, 44, 45, 46)
MLAI_WGMMA_SHAPE(88, 44, 45, 46, 47, 48, 49, 50)
MLAI_WGMMA_SHAPE(96, 48, 49, 50, 51, 52, 53, 54)
MLAI_WGMMA_SHAPE(104, 52, 53, 54, 55, 56, 57, 58)
MLAI_WGMMA_SHAPE(112, 56, 57, 58, 59, 60, 61, 62)
MLAI_WGMMA_SHAPE(120, 60, 61, 62, 63, 64, 65, 66)
MLAI_WGMMA_SHAPE(128, 64, 65, 66, 67, 68, 69, 70)
MLAI_WGMMA_SHAPE(136, 68, 69, 70, 71, 72, 73, 74)
MLAI_WGMMA_SHAPE(144, 72, 73, 74, 75, 76, 77, 78)
MLAI_WGMMA_SHAPE(152, 76, 77, 78, 79, 80, 81, 82)
MLAI_WGMMA_SHAPE(160, 80, 81, 82, 83, 84, 85, 86)
MLAI_WGMMA_SHAPE(168, 84, 85, 86, 87, 88, 89, 90)
MLAI_WGMMA_SHAPE(176, 88, 89, 90, 91, 92, 93, 94)
MLAI_WGMMA_SHAPE(184, 92, 93, 94, 95, 96, 97, 98)
MLAI_WGMMA_SHAPE(192, 96, 97, 98, 99, 100, 101, 102)
MLAI_WGMMA_SHAPE(200, 100, 101, 102, 103, 104, 105, 106)
MLAI_WGMMA_SHAPE(208, 104, 105, 106, 107, 108, 109, 110)
MLAI_WGMMA_SHAPE(216, 108, 109, 110, 111, 112, 113, 114)
MLAI_WGMMA_SHAPE(224, 112, 113, 114, 115, 116, 117, 118)
MLAI_WGMMA_SHAPE(232, 116, 117, 118, 119, 120, 121, 122)
MLAI_WGMMA_SHAPE(240, 120, 121, 122, 123, 124, 125, 126)
MLAI_WGMMA_SHAPE(248, 124, 125, 126, 127, 128, 129, 130)
MLAI_WGMMA_SHAPE(256, 128, 129, 130, 131, 132, 133, 134)

#undef MLAI_WGMMA_SHAPE
#endif
