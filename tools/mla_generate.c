/*
 * `mla generate`: a checkpoint and a prompt to text.
 *
 * Text streams to stdout as it becomes certain; models that are not byte-level print ids with
 * spaces between. With --json nothing but one object on one line is printed, when all is done:
 * prompt_ids, ids, text (null where the vocabulary is not byte-level), prefill_tokens,
 * decode_tokens, prefill_seconds, decode_seconds, solutions. Exit statuses as in cli.h.
 */
#include "runner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPTION_MAX_TOKENS = RUNNER_OPTION_END, OPTION_TEMPERATURE, OPTION_TOP_P, OPTION_SEED };

static const struct option options[] = {
    RUNNER_OPTIONS,
    {"max-tokens", required_argument, NULL, OPTION_MAX_TOKENS},
    {"temperature", required_argument, NULL, OPTION_TEMPERATURE},
    {"top-p", required_argument, NULL, OPTION_TOP_P},
    {"seed", required_argument, NULL, OPTION_SEED},
    {NULL, 0, NULL, 0},
};

static const char own_help[] =
    "  --max-tokens N         new tokens at most; an EOS ends sooner\n"
    "  --temperature T        0 = greedy (0)\n"
    "  --top-p P              sample among the most probable ids that reach P (1)\n"
    "  --seed K               of the generator (0)\n";

typedef struct generation {
    runner run;
    int64_t max_tokens; /* -1 = not given */
    double temperature;
    double top_p;
    int64_t seed;
    int32_t *ids;
    char *text; /* with --json: what was generated */
    size_t text_bytes;
    size_t text_room;
    bool is_out_of_memory;
    int64_t n_printed;
} generation;

static bool take_top_p(generation *g, const char *value)
{
    if (!cli_double("--top-p", value, 0.0, 1.0, &g->top_p))
        return false;
    if (g->top_p > 0.0)
        return true;
    cli_refuse("--top-p is \"%.40s\"; it must be above 0", value);
    return false;
}

static bool take_option(generation *g, int option, const char *value)
{
    switch (option) {
    case OPTION_MAX_TOKENS:
        return cli_int("--max-tokens", value, 0, INT32_MAX, &g->max_tokens);
    case OPTION_TEMPERATURE:
        return cli_double("--temperature", value, 0.0, 1e6, &g->temperature);
    case OPTION_TOP_P:
        return take_top_p(g, value);
    case OPTION_SEED:
        return cli_int("--seed", value, 0, INT64_MAX, &g->seed);
    default:
        return runner_option(&g->run, option, value);
    }
}

static void append_text(generation *g, const char *text, size_t bytes)
{
    if (g->text_bytes + bytes > g->text_room) {
        size_t room = 2 * (g->text_bytes + bytes) + 256;
        char *grown = realloc(g->text, room);
        if (grown == NULL) {
            g->is_out_of_memory = true;
            return;
        }
        g->text = grown;
        g->text_room = room;
    }
    if (bytes > 0)
        memcpy(g->text + g->text_bytes, text, bytes);
    g->text_bytes += bytes;
}

static void on_token(void *user, int32_t id, const char *text, size_t bytes)
{
    generation *g = user;
    if (g->run.is_json) {
        append_text(g, text, bytes);
        return;
    }
    if (g->run.info.is_byte_level)
        fwrite(text, 1, bytes, stdout);
    else if (id >= 0)
        printf("%s%d", g->n_printed++ > 0 ? " " : "", id);
    fflush(stdout);
}

/* A JSON string of bytes that are valid UTF-8 and may hold zeros, which cJSON's strings cannot. */
static cJSON *json_text(const char *text, size_t bytes)
{
    char *quoted = malloc(6 * bytes + 3);
    if (quoted == NULL)
        return NULL;
    char *out = quoted;
    *out++ = '"';
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c == '"' || c == '\\') {
            *out++ = '\\';
            *out++ = (char)c;
        } else if (c < 0x20 || c == 0x7f) {
            out += snprintf(out, 7, "\\u%04x", c);
        } else {
            *out++ = (char)c;
        }
    }
    *out++ = '"';
    *out = '\0';
    cJSON *raw = cJSON_CreateRaw(quoted);
    free(quoted);
    return raw;
}

static bool add_item(cJSON *object, const char *key, cJSON *item)
{
    if (item == NULL)
        return false;
    if (!cJSON_AddItemToObject(object, key, item)) {
        cJSON_Delete(item);
        return false;
    }
    return true;
}

static int print_result(const generation *g, const mla_model_generate_result *result)
{
    cJSON *object = cJSON_CreateObject();
    cJSON *text =
        g->run.info.is_byte_level ? json_text(g->text, g->text_bytes) : cJSON_CreateNull();
    bool ok = object != NULL && !g->is_out_of_memory;
    ok = ok && add_item(object, "prompt_ids",
                        cJSON_CreateIntArray(g->run.prompt_ids, (int)g->run.n_prompt));
    ok = ok && add_item(object, "ids", cJSON_CreateIntArray(g->ids, (int)result->n_ids));
    if (!ok)
        cJSON_Delete(text);
    ok = ok && add_item(object, "text", text);
    ok = ok && cJSON_AddNumberToObject(object, "prefill_tokens", (double)result->prefill_tokens);
    ok = ok && cJSON_AddNumberToObject(object, "decode_tokens", (double)result->decode_tokens);
    ok = ok && cJSON_AddNumberToObject(object, "prefill_seconds", result->prefill_seconds);
    ok = ok && cJSON_AddNumberToObject(object, "decode_seconds", result->decode_seconds);
    ok = ok && add_item(object, "solutions", runner_solutions(&g->run));
    if (!ok) {
        cJSON_Delete(object);
        cli_refuse("out of memory while the JSON line was made");
        return CLI_FAILED;
    }
    return cli_print_json(object);
}

static int generate(generation *g)
{
    if (!runner_load(&g->run))
        return CLI_REFUSED;
    /* The last new id is sampled but never attended, so it needs no place in the cache. */
    if (!runner_start(&g->run, g->max_tokens > 0 ? g->max_tokens - 1 : 0))
        return CLI_REFUSED;
    g->ids = malloc((size_t)(g->max_tokens + 1) * sizeof *g->ids);
    if (g->ids == NULL) {
        cli_refuse("out of memory for %lld ids", (long long)g->max_tokens);
        return CLI_FAILED;
    }
    mla_model_generate_params params = MLA_MODEL_GENERATE_PARAMS_INIT;
    mla_model_generate_result result = MLA_MODEL_GENERATE_RESULT_INIT;
    mla_diag diag = {{0}};
    params.prompt_ids = g->run.prompt_ids;
    params.n_prompt = g->run.n_prompt;
    params.max_tokens = g->max_tokens;
    params.temperature = g->temperature;
    params.top_p = g->top_p;
    params.seed = (uint64_t)g->seed;
    params.on_progress = runner_prefill_progress;
    params.on_token = on_token;
    params.user = g;
    params.ids = g->ids;
    mla_status status = mla_model_generate(g->run.session, &params, &result, &diag);
    if (status != MLA_OK)
        return cli_refuse_status(status, &diag);
    if (g->run.is_json)
        return print_result(g, &result);
    putchar('\n');
    return CLI_OK;
}

int mla_tool_generate(int argc, char **argv)
{
    generation g = {.run = RUNNER_INIT, .max_tokens = -1, .top_p = 1.0};
    int option = 0;
    while ((option = cli_next(argc, argv, options)) != CLI_END) {
        if (option == RUNNER_HELP) {
            printf("mla generate: continues a prompt with a DeepSeek-V2 or V3 checkpoint\n%s%s",
                   runner_help, own_help);
            return CLI_OK;
        }
        if (option == CLI_BAD || !take_option(&g, option, optarg))
            return CLI_REFUSED;
    }
    if (!runner_check(&g.run))
        return CLI_REFUSED;
    if (g.max_tokens < 0)
        return cli_refuse("--max-tokens is missing: say how many new tokens there may be");
    int exit_status = generate(&g);
    if (exit_status == CLI_OK && (fflush(stdout) != 0 || ferror(stdout))) {
        cli_refuse("stdout could not be written");
        exit_status = CLI_FAILED;
    }
    runner_free(&g.run);
    free(g.ids);
    free(g.text);
    return exit_status;
}
