/*
 * What the runner's tests share: a folder of their own for files, whole-file writing, pseudo-random
 * values, relative errors, and the golden ids and logits that ship in models/.
 *
 * Relative error: norm of the difference over norm of the reference, in f64. Functions that cannot
 * do their work print a line and abort the test program.
 */
#ifndef MLA_TESTS_MODEL_SUPPORT_H
#define MLA_TESTS_MODEL_SUPPORT_H

#include <cjson/cJSON.h>
#include <mla/mla.h>
#include <mla_model.h>
#include <safetensors.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PATH_BYTES 512

/* folder/name of the program's own temporary folder, made at the first call, emptied at exit. */
const char *scratch_path(const char *name, char path[PATH_BYTES]);

/* Makes a folder in it. */
const char *scratch_folder(const char *name, char path[PATH_BYTES]);

void write_bytes(const char *path, const void *data, size_t bytes);

/* The source tree's models/<name>. */
const char *model_path(const char *name, char path[PATH_BYTES]);

/* Uniform in [-1, 1). */
float random_value(uint64_t *state);
void fill_random(float *values, int64_t n, uint64_t seed);

double relative_error(const float *got, const float *want, int64_t n);

/* The median over rows of the rows' relative errors. */
double median_row_error(const float *got, const float *want, int64_t rows, int64_t width);

/* The ids of a JSON array; *n is their number; the caller frees them. */
int32_t *ids_of(const cJSON *array, int64_t *n);

/* A JSON file of the source tree's models folder. */
cJSON *read_model_json(const char *name);

/* Ends the program with a sentence unless the status is MLA_OK. */
void must(mla_status status, const mla_diag *diag, const char *what);

/* A model of the models folder. */
mla_model *load_model(mla_context *ctx, const char *name, int32_t format);

/* Logits [n, vocab] of ids by the prefill path; the caller frees them. */
float *prefill_logits(mla_model *model, const mla_model_session_options *options,
                      const int32_t *ids, int64_t n);

#endif
