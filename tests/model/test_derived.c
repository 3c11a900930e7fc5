/*
 * Checkpoints derived from a shipped one in ways that must not change the logits: config.json in
 * the hub's spelling, sharded files, tied embeddings, zero biases, half-split instead of
 * interleaved rotary dimensions; and what is missing is named.
 */
#include "support.h"
#include "test.h"

#include <json.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TENSORS = 256, N_IDS = 14, VOCAB = 96 };

/* A checkpoint being changed: tensors in memory of their own. */
typedef struct checkpoint {
    mlai_st_tensor tensors[MAX_TENSORS];
    char names[MAX_TENSORS][128];
    int64_t n;
    cJSON *config;
} checkpoint;

static mla_context *ctx;
static checkpoint work;
static float original[N_IDS * VOCAB];

static mlai_st_tensor *add_tensor(const char *name, int32_t dtype, int32_t rank, int64_t rows,
                                  int64_t cols, const void *data)
{
    mlai_st_tensor *tensor = &work.tensors[work.n];
    snprintf(work.names[work.n], sizeof work.names[0], "%s", name);
    *tensor = (mlai_st_tensor){
        .name = work.names[work.n++], .dtype = dtype, .rank = rank, .shape = {rows, cols}};
    tensor->size_bytes = rows * (rank > 1 ? cols : 1) * mlai_st_dtype_bytes(dtype);
    void *copy = calloc(1, (size_t)tensor->size_bytes);
    if (data != NULL)
        memcpy(copy, data, (size_t)tensor->size_bytes);
    tensor->data = copy;
    return tensor;
}

static mlai_st_tensor *tensor_named(const char *name)
{
    for (int64_t i = 0; i < work.n; i++) {
        if (strcmp(work.tensors[i].name, name) == 0)
            return &work.tensors[i];
    }
    return NULL;
}

static void clear_work(void)
{
    for (int64_t i = 0; i < work.n; i++)
        free((void *)(uintptr_t)work.tensors[i].data);
    cJSON_Delete(work.config);
    work.n = 0;
    work.config = NULL;
}

static void open_work(const char *model)
{
    char path[PATH_BYTES];
    char name[128];
    mlai_st_reader *reader = NULL;
    mla_diag diag = {{0}};
    clear_work();
    must(mlai_st_open(model_path(model, path), &reader, &diag), &diag, path);
    for (int64_t i = 0; i < mlai_st_count(reader); i++) {
        const mlai_st_tensor *t = mlai_st_at(reader, i);
        add_tensor(t->name, t->dtype, t->rank, t->shape[0], t->shape[1], t->data);
    }
    mlai_st_close(reader);
    snprintf(name, sizeof name, "%s/config.json", model);
    work.config = read_model_json(name);
}

static void write_config(const char *folder)
{
    char path[PATH_BYTES + 32];
    char *text = cJSON_Print(work.config);
    snprintf(path, sizeof path, "%s/config.json", folder);
    write_bytes(path, text, strlen(text));
    cJSON_free(text);
}

/* Writes the work as one file and returns its folder. */
static const char *write_work(const char *name, char folder[PATH_BYTES])
{
    char path[PATH_BYTES + 32];
    mla_diag diag = {{0}};
    scratch_folder(name, folder);
    write_config(folder);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    must(mlai_st_write(path, work.tensors, work.n, NULL, 0, &diag), &diag, path);
    return folder;
}

static double error_of(const char *folder, const float *want)
{
    static const int32_t ids[N_IDS] = {1, 44, 95, 7, 7, 63, 20, 88, 31, 0, 52, 9, 71, 17};
    mla_model *model = NULL;
    mla_model_session_options options = MLA_MODEL_SESSION_OPTIONS_INIT;
    mla_diag diag = {{0}};
    options.chunk_tokens = 6;
    must(mla_model_load(ctx, folder, MLA_FORMAT_F32, &model, &diag), &diag, folder);
    float *logits = prefill_logits(model, &options, ids, N_IDS);
    double error = want != NULL ? relative_error(logits, want, N_IDS * VOCAB) : 0.0;
    if (want == NULL)
        memcpy(original, logits, sizeof original);
    free(logits);
    mla_model_destroy(model);
    return error;
}

static int open_all(void **state)
{
    (void)state;
    char path[PATH_BYTES];
    mla_diag diag = {{0}};
    must(mla_context_create(NULL, &ctx, &diag), &diag, "context");
    error_of(model_path("variants/v3_yarn_vdim_differs", path), NULL);
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    clear_work();
    mla_context_destroy(ctx);
    return 0;
}

static void test_hub_spelling(void **state)
{
    (void)state;
    char folder[PATH_BYTES];
    open_work("variants/v3_yarn_vdim_differs");
    cJSON *rope = cJSON_DetachItemFromObject(work.config, "rope_parameters");
    cJSON_AddItemToObject(work.config, "rope_theta",
                          cJSON_DetachItemFromObject(rope, "rope_theta"));
    cJSON_AddItemToObject(rope, "type", cJSON_DetachItemFromObject(rope, "rope_type"));
    cJSON_AddItemToObject(work.config, "rope_scaling", rope);
    assert_true(error_of(write_work("hub", folder), original) == 0.0);
}

static void test_shards(void **state)
{
    (void)state;
    char folder[PATH_BYTES];
    char path[PATH_BYTES + 48];
    mla_diag diag = {{0}};
    open_work("variants/v3_yarn_vdim_differs");
    scratch_folder("shards", folder);
    write_config(folder);
    cJSON *index = cJSON_CreateObject();
    cJSON *map = cJSON_AddObjectToObject(index, "weight_map");
    for (int64_t part = 0; part < 3; part++) {
        int64_t first = work.n * part / 3;
        int64_t end = work.n * (part + 1) / 3;
        char name[32];
        snprintf(name, sizeof name, "part-%d.safetensors", (int)part);
        snprintf(path, sizeof path, "%s/%s", folder, name);
        must(mlai_st_write(path, work.tensors + first, end - first, NULL, 0, &diag), &diag, path);
        for (int64_t i = first; i < end; i++)
            cJSON_AddStringToObject(map, work.tensors[i].name, name);
    }
    char *text = cJSON_Print(index);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
    write_bytes(path, text, strlen(text));
    cJSON_free(text);
    cJSON_Delete(index);
    assert_true(error_of(folder, original) == 0.0);
}

static void test_tied_embeddings(void **state)
{
    (void)state;
    char folder[PATH_BYTES];
    float untied[N_IDS * VOCAB];
    open_work("variants/v3_yarn_vdim_differs");
    mlai_st_tensor *head = tensor_named("lm_head.weight");
    const mlai_st_tensor *embedding = tensor_named("model.embed_tokens.weight");
    memcpy((void *)(uintptr_t)head->data, embedding->data, (size_t)head->size_bytes);
    float kept[N_IDS * VOCAB];
    memcpy(kept, original, sizeof kept);
    error_of(write_work("untied", folder), NULL);
    memcpy(untied, original, sizeof untied);
    memcpy(original, kept, sizeof kept);
    snprintf((char *)(uintptr_t)head->name, 16, "unused");
    cJSON_ReplaceItemInObject(work.config, "tie_word_embeddings", cJSON_CreateTrue());
    assert_true(error_of(write_work("tied", folder), untied) == 0.0);
}

static void test_biases(void **state)
{
    (void)state;
    static const char *const biased[] = {"q_a_proj", "kv_a_proj_with_mqa", "o_proj"};
    char folder[PATH_BYTES];
    char name[128];
    open_work("variants/v3_yarn_vdim_differs");
    cJSON_ReplaceItemInObject(work.config, "attention_bias", cJSON_CreateTrue());
    mla_model *model = NULL;
    mla_diag diag = {{0}};
    assert_int_equal(
        mla_model_load(ctx, write_work("no-bias", folder), MLA_FORMAT_F32, &model, &diag),
        MLA_ERROR_FILE);
    assert_non_null(strstr(diag.text, "q_a_proj.bias"));
    for (int layer = 0; layer < 2; layer++) {
        for (int i = 0; i < 3; i++) {
            snprintf(name, sizeof name, "model.layers.%d.self_attn.%s.weight", layer, biased[i]);
            int64_t rows = tensor_named(name)->shape[0];
            snprintf(name, sizeof name, "model.layers.%d.self_attn.%s.bias", layer, biased[i]);
            add_tensor(name, MLAI_ST_F32, 1, rows, 1, NULL);
        }
    }
    assert_true(error_of(write_work("zero-bias", folder), original) == 0.0);
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "model.layers.0.self_attn.%s.bias", biased[i]);
        ((float *)(uintptr_t)tensor_named(name)->data)[0] = 0.5f;
        char folder_name[32];
        snprintf(folder_name, sizeof folder_name, "bias-%d", i);
        assert_true(error_of(write_work(folder_name, folder), original) > 1e-4);
        ((float *)(uintptr_t)tensor_named(name)->data)[0] = 0.0f;
    }
}

/* Moves pairs (2i, 2i + 1) of the rope rows to (i, i + P / 2). */
static void split_pairs(const char *name, int64_t first_row, int64_t rope_dim)
{
    const mlai_st_tensor *tensor = tensor_named(name);
    size_t row_bytes = (size_t)tensor->shape[1] * 2;
    char *rows = (char *)(uintptr_t)tensor->data + (size_t)first_row * row_bytes;
    char *copy = malloc((size_t)rope_dim * row_bytes);
    memcpy(copy, rows, (size_t)rope_dim * row_bytes);
    for (int64_t i = 0; i < rope_dim; i++) {
        int64_t to = i / 2 + i % 2 * (rope_dim / 2);
        memcpy(rows + (size_t)to * row_bytes, copy + (size_t)i * row_bytes, row_bytes);
    }
    free(copy);
}

static void test_half_split(void **state)
{
    (void)state;
    enum { HEADS = 5, NOPE = 32, ROPE = 16, RANK = 128 };
    char folder[PATH_BYTES];
    char name[128];
    open_work("variants/v3_yarn_vdim_differs");
    for (int layer = 0; layer < 2; layer++) {
        snprintf(name, sizeof name, "model.layers.%d.self_attn.q_b_proj.weight", layer);
        for (int h = 0; h < HEADS; h++)
            split_pairs(name, h * (NOPE + ROPE) + NOPE, ROPE);
        snprintf(name, sizeof name, "model.layers.%d.self_attn.kv_a_proj_with_mqa.weight", layer);
        split_pairs(name, RANK, ROPE);
    }
    assert_true(error_of(write_work("wrong-split", folder), original) > 1e-3);
    cJSON_ReplaceItemInObject(work.config, "rope_interleave", cJSON_CreateFalse());
    assert_true(error_of(write_work("split", folder), original) < 1e-5);
}

static void test_missing_tensor(void **state)
{
    (void)state;
    char folder[PATH_BYTES];
    mla_model *model = NULL;
    open_work("variants/v3_yarn_vdim_differs");
    for (int64_t i = 0; i < work.n; i += 7) {
        char name[128];
        char folder_name[32];
        mla_diag diag = {{0}};
        snprintf(name, sizeof name, "%s", work.names[i]);
        snprintf(work.names[i], sizeof work.names[0], "renamed");
        snprintf(folder_name, sizeof folder_name, "missing-%d", (int)i);
        assert_int_equal(
            mla_model_load(ctx, write_work(folder_name, folder), MLA_FORMAT_BF16, &model, &diag),
            MLA_ERROR_FILE);
        assert_non_null(strstr(diag.text, name));
        assert_null(model);
        snprintf(work.names[i], sizeof work.names[0], "%s", name);
    }
    mlai_st_tensor *bias = tensor_named("model.layers.1.mlp.gate.e_score_correction_bias");
    ((uint16_t *)(uintptr_t)bias->data)[2] = 0x7f80;
    mla_diag diag = {{0}};
    assert_int_equal(
        mla_model_load(ctx, write_work("infinite", folder), MLA_FORMAT_F32, &model, &diag),
        MLA_ERROR_FILE);
    assert_non_null(strstr(diag.text, "inf"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hub_spelling),    cmocka_unit_test(test_shards),
        cmocka_unit_test(test_tied_embeddings), cmocka_unit_test(test_biases),
        cmocka_unit_test(test_half_split),      cmocka_unit_test(test_missing_tensor),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
