/*
 * JSON files of a checkpoint: reading them whole and taking checked values out of them.
 *
 * Files come from strangers: a size limit, a regular file, parsing by cJSON
 * with its own depth limit (1000), no trailing garbage. Numbers arrive as doubles; integers are
 * taken only when they are whole and no larger than 2^53, where a double is exact. A getter returns
 * the default when the key is absent or null and a sentence that names file, key and value
 * otherwise. Called by config.c, safetensors.c and the tools.
 */
#ifndef MLAI_MODEL_JSON_H
#define MLAI_MODEL_JSON_H

#include <cjson/cJSON.h>
#include <mla/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Largest integer that a JSON number may carry here. */
#define MLAI_JSON_MAX_INTEGER 9007199254740992.0

/*
 * Opens `path` for reading and tells its size; the caller closes *fd. Anything but a regular file
 * is refused at once, also a FIFO that nobody writes to. Error: MLA_ERROR_FILE.
 */
mla_status mlai_file_open(const char *path, int *fd, uint64_t *size_bytes, mla_diag *diag);

/*
 * Reads `path` whole into *text (zero-terminated; the caller frees it). At most max_bytes.
 * Errors: MLA_ERROR_FILE, MLA_ERROR_OUT_OF_MEMORY.
 */
mla_status mlai_file_read(const char *path, size_t max_bytes, char **text, size_t *size_bytes,
                          mla_diag *diag);

/* Parses `length` bytes; `where` names the source in the sentence. The caller deletes *out. */
mla_status mlai_json_parse(const char *text, size_t length, const char *where, cJSON **out,
                           mla_diag *diag);

/* mlai_file_read and mlai_json_parse. */
mla_status mlai_json_read(const char *path, size_t max_bytes, cJSON **out, mla_diag *diag);

/* The member `key` of `object`, NULL when it is absent or null. Case counts. */
const cJSON *mlai_json_get(const cJSON *object, const char *key);

/* True when `item` is a whole number in [low, high], which is then in *out. */
bool mlai_json_is_integer(const cJSON *item, int64_t low, int64_t high, int64_t *out);

mla_status mlai_json_integer(const cJSON *object, const char *where, const char *key,
                             int64_t fallback, int64_t low, int64_t high, int64_t *out,
                             mla_diag *diag);
mla_status mlai_json_double(const cJSON *object, const char *where, const char *key,
                            double fallback, double low, double high, double *out, mla_diag *diag);
mla_status mlai_json_bool(const cJSON *object, const char *where, const char *key, bool fallback,
                          bool *out, mla_diag *diag);

/* A string member, or `fallback`; borrowed from the tree. */
mla_status mlai_json_string(const cJSON *object, const char *where, const char *key,
                            const char *fallback, const char **out, mla_diag *diag);

#endif
