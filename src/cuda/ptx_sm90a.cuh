/*
 * Inline PTX for Hopper (sm_90a): one function, one instruction.
 *
 *   ptx_sync_sm90a.cuh    addresses, mbarriers, named and cluster barriers, fences, global memory
 *   ptx_copy_sm90a.cuh    cp.async, the bulk copy engine
 *   ptx_wgmma_sm90a.cuh   the warpgroup's matrix product
 *   here                  8x8 matrices between registers and shared memory, arithmetic
 *
 * Shared addresses are 32-bit (mlai_smem_u32), global ones are plain pointers. Limits: needs
 * -gencode=arch=compute_90a,code=sm_90a; includes only <cuda.h>'s CUtensorMap and fixed-width
 * integers. Called by: the *_sm90a kernels of this folder.
 */
#ifndef MLAI_PTX_SM90A_CUH
#define MLAI_PTX_SM90A_CUH

#include "ptx_copy_sm90a.cuh"
#include "ptx_sync_sm90a.cuh"
#include "ptx_wgmma_sm90a.cuh"

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

MLAI_DEV void mlai_unpack_f16x2(uint32_t x, float &lo, float &hi)
{
    asm("{\n .reg .f16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}"
        : "=f"(lo), "=f"(hi)
        : "r"(x));
}

/* Two floats to e4m3, saturating, `lo` in the low byte. */
MLAI_DEV uint16_t mlai_pack_e4m3x2(float lo, float hi)
{
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    return r;
}

#endif
