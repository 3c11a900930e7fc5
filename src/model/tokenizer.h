/*
 * Text for byte-level vocabularies: ids 0..255 are bytes, the rest are specials without text.
 *
 * A model counts as byte-level when its vocabulary has 256 ids and at most 256 specials, its BOS
 * and EOS are specials, and no tokenizer file (tokenizer.json, tokenizer.model, tiktoken.model)
 * lies in its folder. Other models take ids. The decoder turns a stream of ids into valid UTF-8:
 * bytes of an unfinished sequence wait for the next id, a byte that cannot belong to one becomes
 * U+FFFD (one for each maximal prefix of a sequence, as browsers do). Called by generate.c, the
 * tools and the tests.
 */
#ifndef MLAI_MODEL_TOKENIZER_H
#define MLAI_MODEL_TOKENIZER_H

#include "config.h"

/* Most bytes that one id releases: a waiting prefix as U+FFFD and another character. */
#define MLAI_TEXT_MAX_BYTES 8

/* A decoder's state; all zero is the beginning. */
typedef struct mlai_utf8_stream {
    uint8_t waiting[4];
    int32_t n_waiting;
    int32_t n_needed; /* bytes of the whole sequence */
} mlai_utf8_stream;

/* Whether the model in `folder` has a byte-level vocabulary. */
bool mlai_tokenizer_is_byte_level(const mlai_model_config *config, const char *folder);

/*
 * Ids of `length` bytes of text, a BOS in front where config has one: ids has room for length + 1.
 * Returns how many.
 */
int64_t mlai_tokenizer_encode(const mlai_model_config *config, const char *text, size_t length,
                              int32_t *ids);

/* Takes one id and writes the text that became certain: returns 0..MLAI_TEXT_MAX_BYTES bytes. */
int32_t mlai_utf8_push(mlai_utf8_stream *stream, int64_t id, char *out);

/* The end: what still waits becomes one U+FFFD. */
int32_t mlai_utf8_finish(mlai_utf8_stream *stream, char *out);

#endif
