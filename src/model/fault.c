/*
 * Sentences for mla_diag, made safe to print: control characters become '?', and a sentence longer
 * than the buffer is cut in front of the character that does not fit (UTF-8 continuation bytes are
 * 10xxxxxx, so the cut moves back to a byte that is not one). Called by every file of src/model.
 */
#include "fault.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

mla_status mlai_model_fail(mla_diag *diag, mla_status status, const char *format, ...)
{
    if (diag == NULL)
        return status;
    va_list args;
    va_start(args, format);
    int length = vsnprintf(diag->text, sizeof diag->text, format, args);
    va_end(args);
    if (length < 0) {
        diag->text[0] = '\0';
        return status;
    }
    if ((size_t)length >= sizeof diag->text) {
        size_t cut = sizeof diag->text - 1;
        /* The cut stands in front of text[cut], which vsnprintf did not keep; step back over a
         * sequence that may have lost its tail, at most three bytes and its lead. */
        size_t lead = cut;
        while (lead > 0 && cut - lead < 4 && ((unsigned char)diag->text[lead - 1] & 0xc0) == 0x80)
            lead--;
        if (lead > 0 && (unsigned char)diag->text[lead - 1] >= 0xc0)
            cut = lead - 1;
        diag->text[cut] = '\0';
    }
    for (char *c = diag->text; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
    }
    return status;
}

mla_status mlai_model_fail_memory(mla_diag *diag, const char *what, unsigned long long bytes)
{
    return mlai_model_fail(diag, MLA_ERROR_OUT_OF_MEMORY,
                           "%s needs %llu bytes that could not be allocated: free memory or take a "
                           "smaller model, context or format",
                           what, bytes);
}
