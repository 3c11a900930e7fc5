/*
 * How the model library says what went wrong: one sentence in the caller's mla_diag and a status.
 *
 * Model files come from strangers, so a sentence may quote bytes of theirs. Control characters are
 * replaced with '?' and a sentence that is too long is cut between two characters, so that the
 * text is always one line that is safe to print. No limits; called by every file of src/model.
 */
#ifndef MLAI_MODEL_FAULT_H
#define MLAI_MODEL_FAULT_H

#include <mla/status.h>

#if defined(__GNUC__)
#define MLAI_PRINTF_LIKE(format_index, first_index)                                                \
    __attribute__((format(printf, format_index, first_index)))
#else
#define MLAI_PRINTF_LIKE(format_index, first_index)
#endif

/* Writes the sentence (diag may be NULL) and returns `status`, to stand after return. */
mla_status mlai_model_fail(mla_diag *diag, mla_status status, const char *format, ...)
    MLAI_PRINTF_LIKE(3, 4);

/* The sentence for an allocation of `bytes` for `what` that failed. */
mla_status mlai_model_fail_memory(mla_diag *diag, const char *what, unsigned long long bytes);

#endif
