/*
 * libmla: status codes and the diagnostic sentence.
 *
 * Every fallible function returns an mla_status and takes `mla_diag *diag` as its last parameter.
 * diag may be NULL. It belongs to the caller, is written only when the status is not MLA_OK, and
 * then holds one sentence that names the argument, the value found and the way out. The library
 * never exits, aborts, throws or prints. Nothing is written to any output when a call fails on its
 * arguments.
 */
#ifndef MLA_STATUS_H
#define MLA_STATUS_H

#include <mla/version.h>

/* name, value, short text. Values are pinned and append-only. */
#define MLA_STATUS_LIST(X)                                                                         \
    X(MLA_OK, 0, "success")                                                                        \
    X(MLA_ERROR_ARGUMENT, 1, "an argument has a value that is not allowed")                        \
    X(MLA_ERROR_SHAPE, 2, "a tensor has the wrong rank or shape")                                  \
    X(MLA_ERROR_FORMAT, 3, "a tensor has a format that is not allowed here")                       \
    X(MLA_ERROR_STRIDE, 4, "a tensor has strides or an alignment that are not allowed here")       \
    X(MLA_ERROR_DEVICE, 5, "a tensor or a call is on the wrong or a failing device")               \
    X(MLA_ERROR_CAPACITY, 6, "a length or a count is larger than the capacity it was made for")    \
    X(MLA_ERROR_WORKSPACE, 7, "the workspace is missing or too small")                             \
    X(MLA_ERROR_UNSUPPORTED, 8, "no solution takes this problem, or the operation is refused")     \
    X(MLA_ERROR_NOT_FOUND, 9, "no such name")                                                      \
    X(MLA_ERROR_STATE, 10, "the object is not in a state that allows this call")                   \
    X(MLA_ERROR_OUT_OF_PAGES, 11, "the page allocator has too few free pages")                     \
    X(MLA_ERROR_OUT_OF_MEMORY, 12, "memory could not be allocated")                                \
    X(MLA_ERROR_VERSION, 13, "a struct comes from another version of the headers")                 \
    X(MLA_ERROR_FILE, 14, "a file could not be read or written, or its content is wrong")          \
    X(MLA_ERROR_INTERNAL, 15, "libmla broke a promise of its own: please report it")

typedef enum mla_status {
#define MLA_STATUS_ENTRY(name, value, text) name = value,
    MLA_STATUS_LIST(MLA_STATUS_ENTRY)
#undef MLA_STATUS_ENTRY
} mla_status;

#define MLA_DIAG_TEXT_BYTES 512

/* Zero-terminated UTF-8; text[0] == 0 when nothing was said. */
typedef struct mla_diag {
    char text[MLA_DIAG_TEXT_BYTES];
} mla_diag;

#ifdef __cplusplus
extern "C" {
#endif

/* "MLA_ERROR_SHAPE"; "MLA_STATUS_UNKNOWN" for a value outside the list. Static storage. */
MLA_API const char *mla_status_name(mla_status status);

/* The short text of the list above. Static storage. */
MLA_API const char *mla_status_message(mla_status status);

#ifdef __cplusplus
}
#endif
#endif
