/*
 * Family neon_bf16: NEON with the bf16 matrix product. f32 and f16 run in f32 arithmetic.
 */
#include "cpu/attention.h"
#include "cpu/cpu.h"
#include "cpu/elementwise.h"

#define MLAI_ROWS_FEATURES (MLA_CPU_NEON | MLA_CPU_NEON_BF16)
#define MLAI_ROWS_FEATURES_TEXT "neon neon_bf16"

/* clang-format off */
const mla_solution mlai_rows_neon_bf16[] = {
    MLAI_ATTENTION_ROWS(bf16_neon_bf16, neon_bf16, MLAI_ATTENTION_BF16, MLAI_ATTENTION_BF16_PREFILL)
    MLAI_ATTENTION_ROWS(neon_bf16, neon_bf16, MLAI_ATTENTION_ANY, MLAI_ATTENTION_ANY_PREFILL)
    MLAI_ELEMENTWISE_ROWS(neon_bf16)
};
/* clang-format on */
const int32_t mlai_n_rows_neon_bf16 = sizeof mlai_rows_neon_bf16 / sizeof mlai_rows_neon_bf16[0];
