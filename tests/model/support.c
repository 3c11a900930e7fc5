/*
 * Shared parts of the runner's tests; see support.h.
 */
#include "support.h"

#include <json.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char scratch[PATH_BYTES];

static void remove_scratch(void)
{
    char command[PATH_BYTES + 16];
    snprintf(command, sizeof command, "rm -rf '%s'", scratch);
    if (system(command) != 0)
        fprintf(stderr, "%s was left behind\n", scratch);
}

static void die(const char *what, const char *detail)
{
    fprintf(stderr, "test support: %s: %s\n", what, detail);
    abort();
}

const char *scratch_path(const char *name, char path[PATH_BYTES])
{
    if (scratch[0] == '\0') {
        const char *base = getenv("TMPDIR");
        snprintf(scratch, sizeof scratch, "%s/mla-test-XXXXXX", base != NULL ? base : "/tmp");
        if (mkdtemp(scratch) == NULL)
            die("no temporary folder", scratch);
        atexit(remove_scratch);
    }
    snprintf(path, PATH_BYTES, "%.300s/%.200s", scratch, name);
    return path;
}

const char *scratch_folder(const char *name, char path[PATH_BYTES])
{
    scratch_path(name, path);
    if (mkdir(path, 0777) != 0)
        die("no folder", path);
    return path;
}

void write_bytes(const char *path, const void *data, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0)
        die("not written", path);
}

const char *model_path(const char *name, char path[PATH_BYTES])
{
    snprintf(path, PATH_BYTES, "%.300s/models/%.200s", MLA_TEST_SOURCE_DIR, name);
    return path;
}

float random_value(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(*state >> 11) * 0x1p-52 - 1.0);
}

void fill_random(float *values, int64_t n, uint64_t seed)
{
    uint64_t state = seed * 2654435761u + 1;
    for (int64_t i = 0; i < n; i++)
        values[i] = random_value(&state);
}

double relative_error(const float *got, const float *want, int64_t n)
{
    double difference = 0.0;
    double norm = 0.0;
    for (int64_t i = 0; i < n; i++) {
        double d = (double)got[i] - (double)want[i];
        difference += d * d;
        norm += (double)want[i] * (double)want[i];
    }
    return norm > 0.0 ? sqrt(difference / norm) : sqrt(difference);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

double median_row_error(const float *got, const float *want, int64_t rows, int64_t width)
{
    double *errors = calloc((size_t)rows, sizeof *errors);
    for (int64_t r = 0; r < rows; r++)
        errors[r] = relative_error(got + r * width, want + r * width, width);
    qsort(errors, (size_t)rows, sizeof *errors, compare_doubles);
    double median =
        rows % 2 != 0 ? errors[rows / 2] : 0.5 * (errors[rows / 2 - 1] + errors[rows / 2]);
    free(errors);
    return median;
}

int32_t *ids_of(const cJSON *array, int64_t *n)
{
    *n = cJSON_GetArraySize(array);
    int32_t *ids = calloc((size_t)*n + 1, sizeof *ids);
    int64_t i = 0;
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, array) ids[i++] = item->valueint;
    return ids;
}

void must(mla_status status, const mla_diag *diag, const char *what)
{
    if (status != MLA_OK)
        die(what, diag->text);
}

cJSON *read_model_json(const char *name)
{
    char path[PATH_BYTES];
    cJSON *tree = NULL;
    mla_diag diag = {{0}};
    must(mlai_json_read(model_path(name, path), (size_t)1 << 26, &tree, &diag), &diag, path);
    return tree;
}

mla_model *load_model(mla_context *ctx, const char *name, int32_t format)
{
    char path[PATH_BYTES];
    mla_model *model = NULL;
    mla_diag diag = {{0}};
    must(mla_model_load(ctx, model_path(name, path), format, &model, &diag), &diag, path);
    return model;
}

float *prefill_logits(mla_model *model, const mla_model_session_options *options,
                      const int32_t *ids, int64_t n)
{
    mla_model_session_options own = *options;
    mla_model_info info = MLA_MODEL_INFO_INIT;
    mla_model_session *session = NULL;
    mla_diag diag = {{0}};
    must(mla_model_get_info(model, &info, &diag), &diag, "info");
    own.max_length = n;
    must(mla_model_session_create(model, &own, &session, &diag), &diag, "session");
    float *logits = calloc((size_t)(n * info.vocab_size), sizeof *logits);
    must(mla_model_session_prefill(session, ids, n, logits, n, NULL, NULL, &diag), &diag,
         "prefill");
    mla_model_session_destroy(session);
    return logits;
}
