/*
 * Family avx512: AVX-512 F, BW, DQ, VL, CD.
 */
#include "cpu/attention.h"
#include "cpu/cpu.h"
#include "cpu/elementwise.h"

#define MLAI_ROWS_FEATURES MLA_CPU_AVX512
#define MLAI_ROWS_FEATURES_TEXT "avx512"

const mla_solution mlai_rows_avx512[] = {MLAI_ATTENTION_ROWS(
    avx512, avx512, MLAI_ATTENTION_ANY, MLAI_ATTENTION_ANY_PREFILL) MLAI_ELEMENTWISE_ROWS(avx512)};
const int32_t mlai_n_rows_avx512 = sizeof mlai_rows_avx512 / sizeof mlai_rows_avx512[0];
