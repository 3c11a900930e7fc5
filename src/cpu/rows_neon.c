/*
 * Family neon: the vectors of every aarch64 processor, with fused multiply-add.
 */
#include "cpu/attention.h"
#include "cpu/cpu.h"
#include "cpu/elementwise.h"

#define MLAI_ROWS_FEATURES MLA_CPU_NEON
#define MLAI_ROWS_FEATURES_TEXT "neon"

const mla_solution mlai_rows_neon[] = {MLAI_ATTENTION_ROWS(
    neon, neon, MLAI_ATTENTION_ANY, MLAI_ATTENTION_ANY_PREFILL) MLAI_ELEMENTWISE_ROWS(neon)};
const int32_t mlai_n_rows_neon = sizeof mlai_rows_neon / sizeof mlai_rows_neon[0];
