/*
 * Family avx2: AVX2 with FMA and F16C.
 */
#include "cpu/attention.h"
#include "cpu/cpu.h"
#include "cpu/elementwise.h"

#define MLAI_ROWS_FEATURES MLA_CPU_AVX2
#define MLAI_ROWS_FEATURES_TEXT "avx2"

const mla_solution mlai_rows_avx2[] = {MLAI_ATTENTION_ROWS(
    avx2, avx2, MLAI_ATTENTION_ANY, MLAI_ATTENTION_ANY_PREFILL) MLAI_ELEMENTWISE_ROWS(avx2)};
const int32_t mlai_n_rows_avx2 = sizeof mlai_rows_avx2 / sizeof mlai_rows_avx2[0];
