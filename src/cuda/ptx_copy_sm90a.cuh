/*
 * Inline PTX for Hopper: what fills shared memory. cp.async and st.async by threads; the bulk copy
 * engine, of which only one thread issues a copy. Conventions: ptx_sm90a.cuh.
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

/* 4, 8 or 16 bytes into the shared memory of a CTA of the cluster, counted there on `remote_bar`;
 * both addresses come from mlai_mapa with the same rank. */
MLAI_DEV void mlai_st_async_b32(uint32_t remote, uint32_t remote_bar, uint32_t x)
{
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote),
        "r"(x), "r"(remote_bar)
        : "memory");
}

MLAI_DEV void mlai_st_async_b32x2(uint32_t remote, uint32_t remote_bar, uint32_t x, uint32_t y)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, "
                 "[%3];" ::"r"(remote),
                 "r"(x), "r"(y), "r"(remote_bar)
                 : "memory");
}

MLAI_DEV void mlai_st_async_b32x4(uint32_t remote, uint32_t remote_bar, uint32_t x, uint32_t y,
                                  uint32_t z, uint32_t w)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, "
                 "%4}, [%5];" ::"r"(remote),
                 "r"(x), "r"(y), "r"(z), "r"(w), "r"(remote_bar)
                 : "memory");
}

/* ---- the bulk copy engine -------------------------------------------------------------------- */

MLAI_DEV void mlai_tma_prefetch_descriptor(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
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

#endif
