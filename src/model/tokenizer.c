/*
 * Byte-level text (tokenizer.h). The decoder keeps at most three bytes of an unfinished sequence. A
 * lead byte fixes how many bytes follow and which values the second may have (no overlong forms, no
 * surrogates, nothing above U+10FFFF: Unicode 15, table 3-7); a byte outside ends the prefix as one
 * U+FFFD and is then looked at afresh. Called by generate.c, the tools and the tests.
 */
#include "tokenizer.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_SPECIALS 256

static bool file_exists(const char *folder, const char *name)
{
    char path[4096];
    struct stat info;
    int length = snprintf(path, sizeof path, "%s/%s", folder, name);
    return length > 0 && (size_t)length < sizeof path && stat(path, &info) == 0;
}

bool mlai_tokenizer_is_byte_level(const mlai_model_config *config, const char *folder)
{
    if (config->vocab_size < 256 || config->vocab_size > 256 + MAX_SPECIALS)
        return false;
    if (config->bos_token_id >= 0 && config->bos_token_id < 256)
        return false;
    for (int64_t i = 0; i < config->n_eos; i++) {
        if (config->eos_token_ids[i] < 256)
            return false;
    }
    return !file_exists(folder, "tokenizer.json") && !file_exists(folder, "tokenizer.model") &&
           !file_exists(folder, "tiktoken.model");
}

int64_t mlai_tokenizer_encode(const mlai_model_config *config, const char *text, size_t length,
                              int32_t *ids)
{
    int64_t n = 0;
    if (config->bos_token_id >= 0)
        ids[n++] = (int32_t)config->bos_token_id;
    for (size_t i = 0; i < length; i++)
        ids[n++] = (unsigned char)text[i];
    return n;
}

/* Length of the sequence that a lead byte begins: 1..4, or 0 for a byte that begins none. */
static int32_t sequence_length(uint8_t lead)
{
    if (lead < 0x80)
        return 1;
    if (lead >= 0xc2 && lead <= 0xdf)
        return 2;
    if (lead >= 0xe0 && lead <= 0xef)
        return 3;
    if (lead >= 0xf0 && lead <= 0xf4)
        return 4;
    return 0;
}

/* Whether `byte` may follow what waits. */
static bool can_follow(const mlai_utf8_stream *stream, uint8_t byte)
{
    uint8_t low = 0x80;
    uint8_t high = 0xbf;
    if (stream->n_waiting == 1) {
        switch (stream->waiting[0]) {
        case 0xe0:
            low = 0xa0;
            break;
        case 0xed:
            high = 0x9f;
            break;
        case 0xf0:
            low = 0x90;
            break;
        case 0xf4:
            high = 0x8f;
            break;
        default:
            break;
        }
    }
    return byte >= low && byte <= high;
}

static int32_t put_replacement(char *out)
{
    memcpy(out, "\xef\xbf\xbd", 3);
    return 3;
}

int32_t mlai_utf8_finish(mlai_utf8_stream *stream, char *out)
{
    if (stream->n_waiting == 0)
        return 0;
    stream->n_waiting = 0;
    return put_replacement(out);
}

int32_t mlai_utf8_push(mlai_utf8_stream *stream, int64_t id, char *out)
{
    if (id < 0 || id > 255)
        return 0;
    uint8_t byte = (uint8_t)id;
    int32_t n = 0;
    if (stream->n_waiting > 0 && !can_follow(stream, byte))
        n = mlai_utf8_finish(stream, out);
    if (stream->n_waiting == 0) {
        stream->n_needed = sequence_length(byte);
        if (stream->n_needed == 0)
            return n + put_replacement(out + n);
    }
    stream->waiting[stream->n_waiting++] = byte;
    if (stream->n_waiting < stream->n_needed)
        return n;
    memcpy(out + n, stream->waiting, (size_t)stream->n_needed);
    n += stream->n_needed;
    stream->n_waiting = 0;
    return n;
}
