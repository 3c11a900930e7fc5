/*
 * Family avx512_bf16: AVX-512 with the bf16 dot product. f32 and f16 run in f32 arithmetic.
 */
#include "cpu/attention.h"
#include "cpu/cpu.h"
#include "cpu/elementwise.h"

#define MLAI_ROWS_FEATURES (MLA_CPU_AVX512 | MLA_CPU_AVX512_BF16 | MLA_CPU_AVX512_VBMI)
#define MLAI_ROWS_FEATURES_TEXT "avx512 avx512_bf16 avx512_vbmi"

/* clang-format off */
const mla_solution mlai_rows_avx512_bf16[] = {
    MLAI_ATTENTION_ROWS(bf16_avx512_bf16, avx512_bf16, MLAI_ATTENTION_BF16, MLAI_ATTENTION_BF16_PREFILL)
    MLAI_ATTENTION_ROWS(avx512_bf16, avx512_bf16, MLAI_ATTENTION_ANY, MLAI_ATTENTION_ANY_PREFILL)
    MLAI_ELEMENTWISE_ROWS(avx512_bf16)
};
/* clang-format on */
const int32_t mlai_n_rows_avx512_bf16 =
    sizeof mlai_rows_avx512_bf16 / sizeof mlai_rows_avx512_bf16[0];
