/*
 * Family c: plain C for every processor. It is kept for good: it takes everything.
 */
#include "cpu/attention.h"
#include "cpu/cpu.h"
#include "cpu/elementwise.h"

#define MLAI_ROWS_FEATURES 0
#define MLAI_ROWS_FEATURES_TEXT ""

const mla_solution mlai_rows_c[] = {MLAI_ATTENTION_ROWS(
    c, c, MLAI_ATTENTION_ANY, MLAI_ATTENTION_ANY_PREFILL) MLAI_ELEMENTWISE_ROWS(c)};
const int32_t mlai_n_rows_c = sizeof mlai_rows_c / sizeof mlai_rows_c[0];
