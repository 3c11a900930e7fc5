/*
 * What every test includes: cmocka with the headers it needs, in the order it needs them.
 */
#ifndef MLA_TEST_H
#define MLA_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#endif
