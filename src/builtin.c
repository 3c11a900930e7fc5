/*
 * The solutions that are built in, by family, in table order. The one file that names both the CPU
 * and, where built, the CUDA families.
 */
#include "cpu/cpu.h"
#include "registry/registry.h"
#if defined(MLAI_WITH_CUDA)
#include "cuda/rows.h"
#endif

static const mlai_family_rows families[] = {
#if defined(MLAI_WITH_X86_FAMILIES)
    {mlai_rows_amx_bf16, &mlai_n_rows_amx_bf16},
    {mlai_rows_avx512_bf16, &mlai_n_rows_avx512_bf16},
    {mlai_rows_avx512, &mlai_n_rows_avx512},
    {mlai_rows_avx2, &mlai_n_rows_avx2},
#endif
#if defined(MLAI_WITH_NEON_FAMILIES)
    {mlai_rows_neon_bf16, &mlai_n_rows_neon_bf16},
    {mlai_rows_neon, &mlai_n_rows_neon},
#endif
    {mlai_rows_c, &mlai_n_rows_c},
#if defined(MLAI_WITH_CUDA)
    {mlai_rows_cuda, &mlai_n_rows_cuda},
#endif
};

const mlai_family_rows *mlai_builtin_families(int32_t *n_families)
{
    *n_families = (int32_t)(sizeof families / sizeof families[0]);
    return families;
}

const mlai_device_runtime *mlai_builtin_device_runtime(const char **why)
{
#if defined(MLAI_WITH_CUDA)
    *why = "";
    return &mlai_cuda_runtime;
#else
    *why = "this libmla was built without CUDA";
    return NULL;
#endif
}
