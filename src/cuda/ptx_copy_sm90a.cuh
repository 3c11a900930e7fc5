/*
 * Inline PTX for Hopper: what fills shared memory. cp.async by threads; the bulk copy engine, plain
 * and tensor, with multicast and cache hints. Only one thread issues a bulk copy. Conventions:
 * ptx_sm90a.cuh.
 */
#ifndef MLAI_PTX_COPY_SM90A_CUH
#define MLAI_PTX_COPY_SM90A_CUH

#include "ptx_sync_sm90a.cuh"
#include <cuda.h>

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

/* Four floats into the shared memory of a CTA of the cluster, counted there as 16 bytes on
 * `remote_bar`; both addresses come from mlai_mapa with the same rank. */
MLAI_DEV void mlai_st_async_f32x4(uint32_t remote, uint32_t remote_bar, float x, float y, float z,
                                  float w)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, "
                 "%4}, [%5];" ::"r"(remote),
                 "f"(x), "f"(y), "f"(z), "f"(w), "r"(remote_bar)
                 : "memory");
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

#endif
