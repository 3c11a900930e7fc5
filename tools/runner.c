/*
 * Shared parts of `mla generate` and `mla logits`; see runner.h for the rules. Ids are checked as
 * numbers here and against the vocabulary by the model. Text files up to 1 GiB, id files up to 256
 * MiB. Progress goes to stderr only when it is a terminal, on one line that replaces itself.
 */
#include "runner.h"

#include "json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_TEXT_BYTES ((size_t)1 << 30)
#define MAX_IDS_BYTES ((size_t)256 << 20)

#define FORMAT_BIT(name) (1u << MLA_FORMAT_##name)

const char runner_help[] =
    "  --model DIR            checkpoint folder: config.json and safetensors\n"
    "  --prompt TEXT          prompt as text (byte-level vocabularies)\n"
    "  --prompt-file FILE     the same from a file\n"
    "  --ids 1,2,3            prompt as token ids\n"
    "  --ids-file FILE        ids as a JSON array, or an object with \"prompt_ids\"\n"
    "  --dtype f32|bf16       compute format (f32)\n"
    "  --kv-dtype FORMAT      cache format: f32 bf16 f16 e4m3 e5m2 ds656 (as --dtype)\n"
    "  --page-size N          tokens in a cache page (64)\n"
    "  --chunk-tokens N       new tokens in one forward of the prefill (4096)\n"
    "  --chunk-capacity N     tokens in one window of the replayed prefix (32768)\n"
    "  --device cpu           where to compute\n"
    "  --solution NAME        a family of kernels, or one row's full name (mla list)\n"
    "  --threads N            threads, the BLAS's too (all cores)\n"
    "  --json                 one JSON object on one line on stdout\n";

static bool set_once(const char **target, const char *option, const char *value)
{
    if (*target != NULL) {
        cli_refuse("%s is given twice", option);
        return false;
    }
    *target = value;
    return true;
}

static bool set_device(const char *value)
{
    int32_t type = 0;
    int32_t index = 0;
    if (!cli_device("--device", value, &type, &index))
        return false;
    if (type != MLA_DEVICE_CPU) {
        cli_refuse("--device is \"%.40s\"; the runner's projections are computed on the cpu",
                   value);
        return false;
    }
    return true;
}

bool runner_option(runner *r, int option, const char *value)
{
    const uint32_t compute_formats = FORMAT_BIT(F32) | FORMAT_BIT(BF16);
    const uint32_t cache_formats =
        compute_formats | FORMAT_BIT(F16) | FORMAT_BIT(E4M3) | FORMAT_BIT(E5M2) | FORMAT_BIT(DS656);
    int64_t number = 0;
    switch (option) {
    case RUNNER_MODEL:
        return set_once(&r->model_folder, "--model", value);
    case RUNNER_PROMPT:
        return set_once(&r->prompt, "--prompt", value);
    case RUNNER_PROMPT_FILE:
        return set_once(&r->prompt_file, "--prompt-file", value);
    case RUNNER_IDS:
        return set_once(&r->ids_text, "--ids", value);
    case RUNNER_IDS_FILE:
        return set_once(&r->ids_file, "--ids-file", value);
    case RUNNER_SOLUTION:
        return set_once(&r->solution, "--solution", value);
    case RUNNER_DTYPE:
        return cli_format("--dtype", value, compute_formats, &r->dtype);
    case RUNNER_KV_DTYPE:
        return cli_format("--kv-dtype", value, cache_formats, &r->options.kv_format);
    case RUNNER_PAGE_SIZE:
        if (!cli_int("--page-size", value, 1, INT32_MAX, &number))
            return false;
        r->options.page_size = (int32_t)number;
        return true;
    case RUNNER_CHUNK_TOKENS:
        return cli_int("--chunk-tokens", value, 1, 1 << 20, &r->options.chunk_tokens);
    case RUNNER_CHUNK_CAPACITY:
        return cli_int("--chunk-capacity", value, 1, INT32_MAX, &r->options.chunk_capacity);
    case RUNNER_DEVICE:
        return set_device(value);
    case RUNNER_THREADS:
        return cli_int("--threads", value, 1, 1024, &r->n_threads);
    case RUNNER_JSON:
        r->is_json = true;
        return true;
    default:
        return false;
    }
}

/* "1,2,3" to ids. */
static bool ids_from_text(runner *r, const char *text)
{
    size_t room = strlen(text) / 2 + 1;
    r->prompt_ids = malloc(room * sizeof *r->prompt_ids);
    if (r->prompt_ids == NULL) {
        cli_refuse("out of memory for %zu ids", room);
        return false;
    }
    for (const char *next = text;;) {
        char number[24] = "";
        size_t length = strcspn(next, ",");
        int64_t id = -1;
        if (length < sizeof number)
            memcpy(number, next, length);
        if (!cli_parse_int(number, &id) || id < 0 || id > INT32_MAX) {
            cli_refuse("--ids has \"%.20s\" at place %lld; it takes token ids with commas between",
                       number, (long long)r->n_prompt);
            return false;
        }
        r->prompt_ids[r->n_prompt++] = (int32_t)id;
        if (next[length] == '\0')
            return true;
        next += length + 1;
    }
}

static bool ids_from_tree(runner *r, const cJSON *tree)
{
    const cJSON *list = cJSON_IsObject(tree) ? mlai_json_get(tree, "prompt_ids") : tree;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) == 0) {
        cli_refuse("%s is no JSON array of ids and no object with such \"prompt_ids\"",
                   r->ids_file);
        return false;
    }
    r->prompt_ids = malloc((size_t)cJSON_GetArraySize(list) * sizeof *r->prompt_ids);
    if (r->prompt_ids == NULL) {
        cli_refuse("out of memory for the ids of %s", r->ids_file);
        return false;
    }
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, list)
    {
        int64_t id = 0;
        if (!mlai_json_is_integer(item, 0, INT32_MAX, &id)) {
            cli_refuse("%s: entry %lld is no token id", r->ids_file, (long long)r->n_prompt);
            return false;
        }
        r->prompt_ids[r->n_prompt++] = (int32_t)id;
    }
    return true;
}

static bool ids_from_file(runner *r)
{
    cJSON *tree = NULL;
    mla_diag diag = {{0}};
    mla_status status = mlai_json_read(r->ids_file, MAX_IDS_BYTES, &tree, &diag);
    if (status != MLA_OK) {
        cli_refuse_status(status, &diag);
        return false;
    }
    bool ok = ids_from_tree(r, tree);
    cJSON_Delete(tree);
    return ok;
}

static bool ids_from_prompt(runner *r, const char *text, size_t length)
{
    mla_diag diag = {{0}};
    r->n_prompt = (int64_t)length + 1;
    r->prompt_ids = malloc((length + 1) * sizeof *r->prompt_ids);
    if (r->prompt_ids == NULL) {
        cli_refuse("out of memory for a prompt of %zu bytes", length);
        return false;
    }
    mla_status status =
        mla_model_encode(r->model, text, length, r->prompt_ids, &r->n_prompt, &diag);
    if (status != MLA_OK) {
        cli_refuse_status(status, &diag);
        return false;
    }
    if (r->n_prompt == 0) {
        cli_refuse("the prompt is empty, and the model has no BOS to begin with");
        return false;
    }
    return true;
}

static bool load_prompt(runner *r)
{
    if (r->ids_text != NULL)
        return ids_from_text(r, r->ids_text);
    if (r->ids_file != NULL)
        return ids_from_file(r);
    if (r->prompt != NULL)
        return ids_from_prompt(r, r->prompt, strlen(r->prompt));
    char *text = NULL;
    size_t size = 0;
    mla_diag diag = {{0}};
    mla_status status = mlai_file_read(r->prompt_file, MAX_TEXT_BYTES, &text, &size, &diag);
    if (status != MLA_OK) {
        cli_refuse_status(status, &diag);
        return false;
    }
    bool ok = ids_from_prompt(r, text, size);
    free(text);
    return ok;
}

bool runner_check(const runner *r)
{
    int sources = (r->prompt != NULL) + (r->prompt_file != NULL) + (r->ids_text != NULL) +
                  (r->ids_file != NULL);
    if (r->model_folder == NULL) {
        cli_refuse("--model is missing: name the folder of a checkpoint");
        return false;
    }
    if (sources != 1) {
        cli_refuse(
            "exactly one of --prompt, --prompt-file, --ids and --ids-file is needed; %d were "
            "given",
            sources);
        return false;
    }
    return true;
}

bool runner_load(runner *r)
{
    r->context = cli_context(r->n_threads, r->solution);
    if (r->context == NULL)
        return false;
    mla_diag diag = {{0}};
    runner_progress("loading");
    mla_status status = mla_model_load(r->context, r->model_folder, r->dtype, &r->model, &diag);
    runner_progress(NULL);
    if (status == MLA_OK)
        status = mla_model_get_info(r->model, &r->info, &diag);
    if (status != MLA_OK) {
        cli_refuse_status(status, &diag);
        return false;
    }
    return load_prompt(r);
}

bool runner_start(runner *r, int64_t new_tokens)
{
    mla_diag diag = {{0}};
    r->options.max_length = r->n_prompt + new_tokens;
    mla_status status = mla_model_session_create(r->model, &r->options, &r->session, &diag);
    if (status != MLA_OK)
        cli_refuse_status(status, &diag);
    return status == MLA_OK;
}

void runner_free(runner *r)
{
    mla_model_session_destroy(r->session);
    mla_model_destroy(r->model);
    mla_context_destroy(r->context);
    free(r->prompt_ids);
}

cJSON *runner_solutions(const runner *r)
{
    cJSON *object = cJSON_CreateObject();
    for (int32_t op = MLA_OP_DECODE; object != NULL && op <= MLA_OP_PACK; op++) {
        const char *name = mla_model_session_solution(r->session, op);
        if (name != NULL && cJSON_AddStringToObject(object, mla_op_name(op), name) == NULL) {
            cJSON_Delete(object);
            return NULL;
        }
    }
    return object;
}

void runner_progress(const char *text)
{
    if (!isatty(STDERR_FILENO))
        return;
    fprintf(stderr, "\r\033[K%s", text != NULL ? text : "");
    fflush(stderr);
}

void runner_prefill_progress(void *user, int64_t done, int64_t total)
{
    (void)user;
    char text[64];
    snprintf(text, sizeof text, "prefill %lld of %lld tokens", (long long)done, (long long)total);
    runner_progress(done < total ? text : NULL);
}
