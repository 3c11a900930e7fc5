/*
 * What `mla generate` and `mla logits` share: their common options, the prompt as ids, and a loaded
 * model with a session.
 *
 * A prompt comes from exactly one of --prompt, --prompt-file (text: byte-level models only, a BOS
 * in front where config.json has one), --ids ("1,2,3") and --ids-file (a JSON array, or an object
 * with "prompt_ids"); ids are taken as they are. Every function that returns false or a status
 * other than CLI_OK has printed its one sentence. Called by mla_generate.c and mla_logits.c.
 */
#ifndef MLA_TOOLS_RUNNER_H
#define MLA_TOOLS_RUNNER_H

#include "cli.h"

#include <mla_model.h>

/* Option values of the shared options; a command's own begin at RUNNER_OPTION_END. */
enum {
    RUNNER_MODEL = 256,
    RUNNER_PROMPT,
    RUNNER_PROMPT_FILE,
    RUNNER_IDS,
    RUNNER_IDS_FILE,
    RUNNER_DTYPE,
    RUNNER_KV_DTYPE,
    RUNNER_PAGE_SIZE,
    RUNNER_CHUNK_TOKENS,
    RUNNER_CHUNK_CAPACITY,
    RUNNER_DEVICE,
    RUNNER_SOLUTION,
    RUNNER_THREADS,
    RUNNER_JSON,
    RUNNER_HELP,
    RUNNER_OPTION_END
};

#define RUNNER_OPTIONS                                                                             \
    {"model", required_argument, NULL, RUNNER_MODEL},                                              \
        {"prompt", required_argument, NULL, RUNNER_PROMPT},                                        \
        {"prompt-file", required_argument, NULL, RUNNER_PROMPT_FILE},                              \
        {"ids", required_argument, NULL, RUNNER_IDS},                                              \
        {"ids-file", required_argument, NULL, RUNNER_IDS_FILE},                                    \
        {"dtype", required_argument, NULL, RUNNER_DTYPE},                                          \
        {"kv-dtype", required_argument, NULL, RUNNER_KV_DTYPE},                                    \
        {"page-size", required_argument, NULL, RUNNER_PAGE_SIZE},                                  \
        {"chunk-tokens", required_argument, NULL, RUNNER_CHUNK_TOKENS},                            \
        {"chunk-capacity", required_argument, NULL, RUNNER_CHUNK_CAPACITY},                        \
        {"device", required_argument, NULL, RUNNER_DEVICE},                                        \
        {"solution", required_argument, NULL, RUNNER_SOLUTION},                                    \
        {"threads", required_argument, NULL, RUNNER_THREADS},                                      \
        {"json", no_argument, NULL, RUNNER_JSON},                                                  \
    {                                                                                              \
        "help", no_argument, NULL, RUNNER_HELP                                                     \
    }

/* The lines of --help for the shared options. */
extern const char runner_help[];

typedef struct runner {
    const char *model_folder;
    const char *prompt;
    const char *prompt_file;
    const char *ids_text;
    const char *ids_file;
    const char *solution;
    int64_t n_threads; /* 0 = all cores */
    int32_t dtype;
    bool is_json;
    mla_model_session_options options;

    mla_context *context;
    mla_model *model;
    mla_model_info info;
    mla_model_session *session;
    int32_t *prompt_ids;
    int64_t n_prompt;
} runner;

#define RUNNER_INIT                                                                                \
    {                                                                                              \
        .dtype = MLA_FORMAT_F32, .options = MLA_MODEL_SESSION_OPTIONS_INIT,                        \
        .info = MLA_MODEL_INFO_INIT                                                                \
    }

/* Takes one shared option. */
bool runner_option(runner *r, int option, const char *value);

/* Whether --model and exactly one prompt were given. */
bool runner_check(const runner *r);

/* Loads the model and the prompt of checked options. */
bool runner_load(runner *r);

/* Makes the session for the prompt and `new_tokens` more in the cache. */
bool runner_start(runner *r, int64_t new_tokens);

void runner_free(runner *r);

/* {"decode": row, ...} of the operators that the session uses, or NULL when memory is short. */
cJSON *runner_solutions(const runner *r);

/* A line on stderr that replaces itself, when stderr is a terminal; NULL clears it. */
void runner_progress(const char *text);

/* mla_model_progress for prefills. */
void runner_prefill_progress(void *user, int64_t done, int64_t total);

#endif
