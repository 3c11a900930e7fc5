/*
 * Status names and texts from the one list in mla/status.h, the diagnostic sentence, versioned
 * structs, and the library's version.
 */
#include "base/base.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int32_t mla_version_number(void)
{
    return MLA_VERSION_NUMBER;
}

const char *mla_version_string(void)
{
    return MLA_VERSION_STRING;
}

const char *mla_status_name(mla_status status)
{
    switch (status) {
#define NAME(name, value, text)                                                                    \
    case name:                                                                                     \
        return #name;
        MLA_STATUS_LIST(NAME)
#undef NAME
    }
    return "MLA_STATUS_UNKNOWN";
}

const char *mla_status_message(mla_status status)
{
    switch (status) {
#define TEXT(name, value, text)                                                                    \
    case name:                                                                                     \
        return text;
        MLA_STATUS_LIST(TEXT)
#undef TEXT
    }
    return "not a status of this library";
}

mla_status mlai_fail(mla_diag *diag, mla_status status, const char *format, ...)
{
    if (diag) {
        va_list args;
        va_start(args, format);
        vsnprintf(diag->text, sizeof diag->text, format, args);
        va_end(args);
    }
    return status;
}

static bool is_word_byte(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

mla_status mlai_rename(mla_diag *diag, mla_status status, const mlai_name *names, int32_t n_names)
{
    if (status == MLA_OK || !diag)
        return status;
    mla_diag old = *diag;
    diag->text[0] = 0;
    for (const char *p = old.text; *p;) {
        const char *end = p + 1;
        while (is_word_byte(*p) && is_word_byte(*end))
            end++;
        const char *word = NULL;
        for (int32_t i = 0; i < n_names && !word; i++)
            if (strlen(names[i].from) == (size_t)(end - p) &&
                memcmp(names[i].from, p, (size_t)(end - p)) == 0)
                word = names[i].to;
        if (word)
            mlai_append(diag->text, sizeof diag->text, "%s", word);
        else
            mlai_append(diag->text, sizeof diag->text, "%.*s", (int)(end - p), p);
        p = end;
    }
    return status;
}

void mlai_append(char *text, size_t text_bytes, const char *format, ...)
{
    size_t used = strlen(text);
    if (used + 1 >= text_bytes)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, text_bytes - used, format, args);
    va_end(args);
}

mla_status mlai_take_struct(void *own, size_t own_bytes, size_t min_bytes, const void *callers,
                            const char *what, mla_diag *diag)
{
    if (!callers)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "%s is NULL; pass a struct made with its INIT macro", what);
    uint32_t callers_bytes;
    memcpy(&callers_bytes, callers, sizeof callers_bytes);
    if (callers_bytes < min_bytes || callers_bytes > MLAI_MAX_STRUCT_BYTES)
        return mlai_fail(
            diag, MLA_ERROR_VERSION,
            "%s.struct_size is %u; make the struct with its INIT macro, which sets it to %zu", what,
            callers_bytes, own_bytes);
    memset(own, 0, own_bytes);
    memcpy(own, callers, callers_bytes < own_bytes ? callers_bytes : own_bytes);
    const unsigned char *tail = (const unsigned char *)callers;
    for (size_t i = own_bytes; i < callers_bytes; i++) {
        if (tail[i] != 0)
            return mlai_fail(
                diag, MLA_ERROR_VERSION,
                "%s has a field at byte %zu that libmla %s does not know; it must be zero, or "
                "load a newer library",
                what, i, MLA_VERSION_STRING);
    }
    uint32_t size = (uint32_t)own_bytes;
    memcpy(own, &size, sizeof size);
    return MLA_OK;
}
