/*
 * The suite of prefill: every row that runs here times generated problems, against the oracle.
 * Problems: tests/oracle/problem_prefill.c. Options: tests/oracle/suite.h.
 */
#include "oracle/suite.h"

int main(int argc, char **argv)
{
    return suite_main(argc, argv, &prefill_operator);
}
