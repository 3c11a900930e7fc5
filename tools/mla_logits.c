/*
 * `mla logits`: the logits of every prompt position, f32 "logits" [tokens, vocab] in a safetensors
 * file, by the prefill path (--chunk-tokens and --chunk-capacity as in generate). Meant for
 * comparing with another implementation. For models with routed experts the file also has i32
 * "experts" [layers with experts, tokens, experts a token], best first: a position whose experts
 * differ is no rounding error. The file appears only when it is complete. With --json one object on
 * one line: tokens, vocab_size, prefill_seconds, solutions. Exit statuses as in cli.h.
 */
#include "runner.h"

#include "safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OPTION_OUT = RUNNER_OPTION_END };

static const struct option options[] = {
    RUNNER_OPTIONS,
    {"out", required_argument, NULL, OPTION_OUT},
    {NULL, 0, NULL, 0},
};

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int print_result(const runner *r, double seconds)
{
    cJSON *object = cJSON_CreateObject();
    cJSON *solutions = runner_solutions(r);
    bool ok = object != NULL && solutions != NULL &&
              cJSON_AddNumberToObject(object, "tokens", (double)r->n_prompt) != NULL &&
              cJSON_AddNumberToObject(object, "vocab_size", (double)r->info.vocab_size) != NULL &&
              cJSON_AddNumberToObject(object, "prefill_seconds", seconds) != NULL;
    if (!ok || !cJSON_AddItemToObject(object, "solutions", solutions)) {
        cJSON_Delete(solutions);
        cJSON_Delete(object);
        cli_refuse("out of memory while the JSON line was made");
        return CLI_FAILED;
    }
    return cli_print_json(object);
}

/* What is computed and written. */
typedef struct outputs {
    float *logits;    /* [tokens, vocab] */
    int32_t *experts; /* [expert layers, tokens, k], or NULL */
    int64_t n_tokens;
    int64_t k;
    int64_t layer; /* the last one that was told, and its row in experts */
    int64_t row;
} outputs;

/* Layers come in rising order, again for each chunk; those without experts are not told. */
static void on_routing(void *user, int64_t layer, int64_t first, int64_t n_tokens,
                       const int32_t *chosen)
{
    outputs *o = user;
    o->row = layer > o->layer ? o->row + 1 : 0;
    o->layer = layer;
    memcpy(o->experts + (o->row * o->n_tokens + first) * o->k, chosen,
           (size_t)(n_tokens * o->k) * sizeof *chosen);
}

static int write_outputs(const runner *r, const char *path, const outputs *o)
{
    const char *kv_format =
        mla_format_name(r->options.kv_format != 0 ? r->options.kv_format : r->dtype);
    mlai_st_tensor tensors[2] = {
        {.name = "logits",
         .dtype = MLAI_ST_F32,
         .rank = 2,
         .shape = {o->n_tokens, r->info.vocab_size},
         .data = o->logits,
         .size_bytes = o->n_tokens * r->info.vocab_size * 4},
        {.name = "experts",
         .dtype = MLAI_ST_I32,
         .rank = 3,
         .shape = {r->info.num_expert_layers, o->n_tokens, o->k},
         .data = o->experts,
         .size_bytes = r->info.num_expert_layers * o->n_tokens * o->k * 4},
    };
    const mlai_st_pair pairs[] = {{"dtype", mla_format_name(r->dtype)},
                                  {"kv_dtype", kv_format},
                                  {"libmla", MLA_VERSION_STRING}};
    mla_diag diag = {{0}};
    mla_status status = mlai_st_write(path, tensors, o->experts != NULL ? 2 : 1, pairs, 3, &diag);
    return status == MLA_OK ? CLI_OK : cli_refuse_status(status, &diag);
}

/* a * b * c elements of 4 bytes, or NULL when they cannot be had. */
static void *allocate_words(int64_t a, int64_t b, int64_t c)
{
    size_t bytes = 4;
    if (__builtin_mul_overflow(bytes, (size_t)a, &bytes) ||
        __builtin_mul_overflow(bytes, (size_t)b, &bytes) ||
        __builtin_mul_overflow(bytes, (size_t)c, &bytes))
        return NULL;
    return malloc(bytes);
}

static int run_prefill(runner *r, const char *path, outputs *o)
{
    mla_diag diag = {{0}};
    if (o->experts != NULL)
        mla_model_session_set_on_routing(r->session, on_routing, o);
    double start = now_seconds();
    mla_status status =
        mla_model_session_prefill(r->session, r->prompt_ids, r->n_prompt, o->logits, r->n_prompt,
                                  runner_prefill_progress, NULL, &diag);
    double seconds = now_seconds() - start;
    if (status != MLA_OK)
        return cli_refuse_status(status, &diag);
    int exit_status = write_outputs(r, path, o);
    if (exit_status == CLI_OK && r->is_json)
        exit_status = print_result(r, seconds);
    return exit_status;
}

/* Whether a file can be made at `path`: asked before the work, not after it. */
static bool is_writable(const char *path)
{
    const char *slash = strrchr(path, '/');
    size_t length = slash != NULL ? (size_t)(slash - path) + 1 : 0;
    char *folder = malloc(length + 2);
    bool ok = folder != NULL;
    if (ok) {
        memcpy(folder, path, length);
        memcpy(folder + length, ".", 2);
        ok = access(folder, W_OK | X_OK) == 0;
    }
    free(folder);
    if (!ok)
        cli_refuse("--out is \"%.200s\"; no file can be made in its folder", path);
    return ok;
}

static int compute_logits(runner *r, const char *path)
{
    if (!is_writable(path) || !runner_load(r) || !runner_start(r, 0))
        return CLI_REFUSED;
    outputs o = {.n_tokens = r->n_prompt, .k = r->info.num_experts_per_tok, .layer = -1, .row = -1};
    bool has_experts = r->info.num_expert_layers > 0;
    o.logits = allocate_words(r->n_prompt, r->info.vocab_size, 1);
    if (has_experts)
        o.experts = allocate_words(r->info.num_expert_layers, r->n_prompt, o.k);
    int exit_status;
    if (o.logits == NULL || (has_experts && o.experts == NULL)) {
        cli_refuse("out of memory for the logits of %lld tokens", (long long)r->n_prompt);
        exit_status = CLI_FAILED;
    } else {
        exit_status = run_prefill(r, path, &o);
    }
    free(o.logits);
    free(o.experts);
    return exit_status;
}

int mla_tool_logits(int argc, char **argv)
{
    runner r = RUNNER_INIT;
    const char *path = NULL;
    int option = 0;
    while ((option = cli_next(argc, argv, options)) != CLI_END) {
        if (option == RUNNER_HELP) {
            printf("mla logits: writes f32 logits [tokens, vocab] of a prompt\n%s"
                   "  --out FILE             the safetensors file to write\n",
                   runner_help);
            return CLI_OK;
        }
        if (option == OPTION_OUT)
            path = optarg;
        else if (option == CLI_BAD || !runner_option(&r, option, optarg))
            return CLI_REFUSED;
    }
    if (!runner_check(&r))
        return CLI_REFUSED;
    if (path == NULL)
        return cli_refuse("--out is missing: name the safetensors file to write");
    int exit_status = compute_logits(&r, path);
    runner_free(&r);
    return exit_status;
}
