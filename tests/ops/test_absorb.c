/*
 * The suite of absorb: every row that runs here times generated problems, against the oracle.
 * Problems: tests/oracle/operators_linear.c. Options: tests/oracle/suite.h.
 */
#include "oracle/suite.h"

int main(int argc, char **argv)
{
    return suite_main(argc, argv, &absorb_operator);
}
