/*
 * libmla: version and visibility.
 *
 * Promise: within one major version every function, constant and struct field declared under
 * include/mla/ keeps its name, value and meaning. Structs that begin with `struct_size` may grow at
 * their tail; zero in a new field means the old behaviour. While the major version is 0 the minor
 * version takes the place of the major one. include/mla/solution.h carries a version of its own.
 */
#ifndef MLA_VERSION_H
#define MLA_VERSION_H

#include <stdint.h>

#define MLA_VERSION_MAJOR 0
#define MLA_VERSION_MINOR 1
#define MLA_VERSION_PATCH 0
#define MLA_VERSION_STRING "0.1.0"
/* To compare with mla_version_number(). */
#define MLA_VERSION_NUMBER (MLA_VERSION_MAJOR * 10000 + MLA_VERSION_MINOR * 100 + MLA_VERSION_PATCH)

#if defined(MLA_STATIC)
#define MLA_API
#elif defined(__GNUC__)
#define MLA_API __attribute__((visibility("default")))
#else
#define MLA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the library that is loaded, as major * 10000 + minor * 100 + patch. */
MLA_API int32_t mla_version_number(void);

/* The same as text, "0.1.0". Static storage. */
MLA_API const char *mla_version_string(void);

#ifdef __cplusplus
}
#endif
#endif
