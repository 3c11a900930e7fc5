/*
 * A CUDA driver without a GPU: what libmla asks of it goes to a log, a line a call, which the test
 * reads. It is loaded in place of libcuda.so.1 and shows one device like an H200.
 *
 *   look up <kernel>
 *   smem <bytes> <kernel>
 *   map <dims> | <strides in bytes> | <box>
 *   launch <kernel> grid <x> <y> <z> block <x> smem <bytes>[ cluster <n>][ cooperative]
 */
#ifndef MLA_TESTS_FAKE_DRIVER_H
#define MLA_TESTS_FAKE_DRIVER_H

#include <stdint.h>

enum { FAKE_LINE_BYTES = 256, FAKE_LINES = 64, FAKE_SM_COUNT = 132 };

typedef struct fake_log {
    int32_t n_lines;
    char lines[FAKE_LINES][FAKE_LINE_BYTES];
    uintptr_t map_addresses[FAKE_LINES]; /* of the maps, in order */
    int32_t n_maps;
    int32_t n_bad_maps; /* maps that a real driver refuses */
} fake_log;

/* The name of the symbol that points to the log. */
#define FAKE_LOG_SYMBOL "fake_driver_log"

#endif
