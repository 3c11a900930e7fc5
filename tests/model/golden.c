/*
 * Loads the golden data and runs prompts against it; see golden.h.
 */
#include "golden.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CASES = 32 };

static golden_case cases[MAX_CASES];
static int n_cases;

static golden_case *new_case(const char *model, const char *name, const cJSON *prompt,
                             const cJSON *greedy)
{
    golden_case *c = &cases[n_cases++];
    snprintf(c->model, sizeof c->model, "%s", model);
    snprintf(c->name, sizeof c->name, "%s %s", model, name);
    c->prompt = ids_of(prompt, &c->n_prompt);
    if (greedy != NULL)
        c->greedy = ids_of(greedy, &c->n_greedy);
    return c;
}

static void set_logits(golden_case *c, const mlai_st_reader *reader, const char *name)
{
    const mlai_st_tensor *tensor = mlai_st_find(reader, name);
    if (tensor == NULL)
        return;
    c->tail = tensor->shape[0];
    c->vocab = tensor->shape[1];
    c->logits = malloc((size_t)tensor->size_bytes);
    memcpy(c->logits, tensor->data, (size_t)tensor->size_bytes);
}

static mlai_st_reader *open_logits(const char *name)
{
    char path[PATH_BYTES];
    mlai_st_reader *reader = NULL;
    mla_diag diag = {{0}};
    must(mlai_st_open(model_path(name, path), &reader, &diag), &diag, path);
    return reader;
}

static void load_tiny(void)
{
    cJSON *tree = read_model_json("tiny/golden.json");
    mlai_st_reader *reader = open_logits("tiny/golden_logits.safetensors");
    char name[64];
    int i = 0;
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, cJSON_GetObjectItem(tree, "cases"))
    {
        const cJSON *prompt = cJSON_GetObjectItem(item, "prompt_ids");
        snprintf(name, sizeof name, "case%d", i);
        golden_case *c = new_case("tiny/target", name, prompt, cJSON_GetObjectItem(item, "greedy"));
        snprintf(name, sizeof name, "case%d.logits", i);
        set_logits(c, reader, name);
        snprintf(name, sizeof name, "case%d", i);
        c = new_case("tiny/draft", name, prompt, cJSON_GetObjectItem(item, "draft_greedy"));
        snprintf(name, sizeof name, "draft.case%d.logits", i++);
        set_logits(c, reader, name);
    }
    const cJSON *longest = cJSON_GetObjectItem(tree, "long");
    golden_case *c = new_case("tiny/target", "long", cJSON_GetObjectItem(longest, "prompt_ids"),
                              cJSON_GetObjectItem(longest, "greedy"));
    c->is_long = true;
    set_logits(c, reader, "long.logits_last16");
    mlai_st_close(reader);
    cJSON_Delete(tree);
}

static void load_variant(const char *variant)
{
    char name[PATH_BYTES];
    char model[64];
    snprintf(model, sizeof model, "variants/%s", variant);
    snprintf(name, sizeof name, "%s/golden.json", model);
    cJSON *tree = read_model_json(name);
    golden_case *c = new_case(model, "", cJSON_GetObjectItem(tree, "prompt_ids"),
                              cJSON_GetObjectItem(tree, "greedy"));
    snprintf(name, sizeof name, "%s/golden_logits.safetensors", model);
    mlai_st_reader *reader = open_logits(name);
    set_logits(c, reader, "logits");
    mlai_st_close(reader);
    cJSON_Delete(tree);
}

const golden_case *golden_cases(int *n)
{
    if (n_cases == 0) {
        load_tiny();
        load_variant("v2_grouped");
        load_variant("v3_full_dims_16heads");
        load_variant("v3_noqlora_small_dims");
        load_variant("v3_yarn_vdim_differs");
    }
    *n = n_cases;
    return cases;
}

float *golden_run_logits(mla_model *model, const golden_case *c, int32_t kv_format,
                         int64_t chunk_tokens, int64_t chunk_capacity)
{
    mla_model_session_options options = MLA_MODEL_SESSION_OPTIONS_INIT;
    options.kv_format = kv_format;
    options.chunk_tokens = chunk_tokens;
    options.chunk_capacity = chunk_capacity;
    return prefill_logits(model, &options, c->prompt, c->n_prompt);
}

int64_t first_difference(mla_model *model, const golden_case *c, int32_t page_size,
                         int64_t chunk_tokens, int64_t chunk_capacity)
{
    mla_model_session_options options = MLA_MODEL_SESSION_OPTIONS_INIT;
    mla_model_session *session = NULL;
    mla_diag diag = {{0}};
    options.page_size = page_size;
    options.chunk_tokens = chunk_tokens;
    options.chunk_capacity = chunk_capacity;
    options.max_length = c->n_prompt + c->n_greedy;
    must(mla_model_session_create(model, &options, &session, &diag), &diag, c->name);
    mla_model_generate_params params = MLA_MODEL_GENERATE_PARAMS_INIT;
    mla_model_generate_result result = MLA_MODEL_GENERATE_RESULT_INIT;
    int32_t *ids = calloc((size_t)c->n_greedy, sizeof *ids);
    params.prompt_ids = c->prompt;
    params.n_prompt = c->n_prompt;
    params.max_tokens = c->n_greedy;
    params.ids = ids;
    must(mla_model_generate(session, &params, &result, &diag), &diag, c->name);
    int64_t at = -1;
    for (int64_t i = 0; at < 0 && i < c->n_greedy; i++) {
        if (i >= result.n_ids || ids[i] != c->greedy[i])
            at = i;
    }
    free(ids);
    mla_model_session_destroy(session);
    return at;
}
