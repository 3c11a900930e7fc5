/*
 * The suite of one operator: every row of the registry that runs here times generated problems. A
 * row that accepts a problem must equal the oracle; one that rejects it must say why and refuse the
 * call. New kernels are tested by existing. Each row becomes one cmocka test.
 *
 *   test_<op> [--device cuda[:N]] [--solution NAME] [--seed S] [--count N] [--verbose]
 *
 * Problem i has the seed S + i; a failure prints the line that replays it alone. With --device the
 * rows are the device's and each accepted call is repeated, which must not change a bit.
 */
#ifndef MLA_TESTS_ORACLE_SUITE_H
#define MLA_TESTS_ORACLE_SUITE_H

#include "oracle/operators.h"

/* The whole of a test program's main. */
int suite_main(int argc, char **argv, const operator_table *op);

#endif
