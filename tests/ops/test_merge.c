/*
 * The suite of merge: every row that runs here times generated problems, against the oracle.
 * Problems: tests/oracle/operators_rows.c. Options: tests/oracle/suite.h.
 */
#include "oracle/suite.h"

int main(int argc, char **argv)
{
    return suite_main(argc, argv, &merge_operator);
}
