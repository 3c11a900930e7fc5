/*
 * The suite of extend: every row that runs here times generated problems, against the oracle.
 * Problems: tests/oracle/problem.c. Options: tests/oracle/suite.h.
 */
#include "oracle/suite.h"

int main(int argc, char **argv)
{
    return suite_main(argc, argv, &extend_operator);
}
