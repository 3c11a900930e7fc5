/*
 * JSON files of a checkpoint: whole-file reading with a limit, parsing through cJSON, and getters
 * that check type and range and name file, key and value when they refuse. Integers are exact up to
 * 2^53 (they arrive as doubles). Called by config.c, safetensors.c and the tools.
 */
#include "json.h"

#include "fault.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

mla_status mlai_file_open(const char *path, int *fd, uint64_t *size_bytes, mla_diag *diag)
{
    int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (opened < 0)
        return mlai_model_fail(diag, MLA_ERROR_FILE, "%s could not be opened: %s", path,
                               strerror(errno));
    struct stat info;
    if (fstat(opened, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(opened);
        return mlai_model_fail(diag, MLA_ERROR_FILE, "%s is not a regular file", path);
    }
    *fd = opened;
    *size_bytes = (uint64_t)info.st_size;
    return MLA_OK;
}

/* True when all of `size` bytes came. */
static bool read_bytes(int fd, char *data, size_t size)
{
    size_t done = 0;
    while (done < size) {
        ssize_t n = read(fd, data + done, size - done);
        if (n > 0)
            done += (size_t)n;
        else if (n == 0 || errno != EINTR)
            return false;
    }
    return true;
}

static mla_status read_whole(int fd, const char *path, uint64_t file_bytes, size_t max_bytes,
                             char **text, size_t *size_bytes, mla_diag *diag)
{
    if (file_bytes > max_bytes)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s has %llu bytes; files of its kind are read up to %zu bytes",
                               path, (unsigned long long)file_bytes, max_bytes);
    size_t size = (size_t)file_bytes;
    char *data = malloc(size + 1);
    if (data == NULL)
        return mlai_model_fail_memory(diag, path, size + 1);
    if (!read_bytes(fd, data, size)) {
        free(data);
        return mlai_model_fail(diag, MLA_ERROR_FILE, "%s could not be read to its end", path);
    }
    data[size] = '\0';
    *text = data;
    *size_bytes = size;
    return MLA_OK;
}

mla_status mlai_file_read(const char *path, size_t max_bytes, char **text, size_t *size_bytes,
                          mla_diag *diag)
{
    int fd = -1;
    uint64_t file_bytes = 0;
    mla_status status = mlai_file_open(path, &fd, &file_bytes, diag);
    if (status != MLA_OK)
        return status;
    status = read_whole(fd, path, file_bytes, max_bytes, text, size_bytes, diag);
    close(fd);
    return status;
}

mla_status mlai_json_parse(const char *text, size_t length, const char *where, cJSON **out,
                           mla_diag *diag)
{
    const char *end = NULL;
    cJSON *tree = cJSON_ParseWithLengthOpts(text, length, &end, 0);
    if (tree == NULL) {
        long long offset = end != NULL ? (long long)(end - text) : 0;
        return mlai_model_fail(diag, MLA_ERROR_FILE, "%s is not valid JSON near byte %lld", where,
                               offset);
    }
    for (; end < text + length; end++) {
        if (strchr(" \t\r\n", *end) == NULL || *end == '\0') {
            cJSON_Delete(tree);
            return mlai_model_fail(diag, MLA_ERROR_FILE,
                                   "%s has something after its JSON value at byte %lld", where,
                                   (long long)(end - text));
        }
    }
    *out = tree;
    return MLA_OK;
}

mla_status mlai_json_read(const char *path, size_t max_bytes, cJSON **out, mla_diag *diag)
{
    char *text = NULL;
    size_t size = 0;
    mla_status status = mlai_file_read(path, max_bytes, &text, &size, diag);
    if (status != MLA_OK)
        return status;
    status = mlai_json_parse(text, size, path, out, diag);
    free(text);
    return status;
}

const cJSON *mlai_json_get(const cJSON *object, const char *key)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return item == NULL || cJSON_IsNull(item) ? NULL : item;
}

bool mlai_json_is_integer(const cJSON *item, int64_t low, int64_t high, int64_t *out)
{
    if (!cJSON_IsNumber(item))
        return false;
    double value = item->valuedouble;
    if (!(value >= -MLAI_JSON_MAX_INTEGER && value <= MLAI_JSON_MAX_INTEGER) ||
        value != floor(value))
        return false;
    int64_t whole = (int64_t)value;
    if (whole < low || whole > high)
        return false;
    *out = whole;
    return true;
}

/* Short text of a value for a sentence. */
static const char *value_text(const cJSON *item, char *buffer, size_t buffer_bytes)
{
    if (cJSON_IsNumber(item))
        snprintf(buffer, buffer_bytes, "%.17g", item->valuedouble);
    else if (cJSON_IsString(item))
        snprintf(buffer, buffer_bytes, "\"%.60s\"", item->valuestring);
    else if (cJSON_IsBool(item))
        snprintf(buffer, buffer_bytes, "%s", cJSON_IsTrue(item) ? "true" : "false");
    else
        snprintf(buffer, buffer_bytes, "%s", cJSON_IsArray(item) ? "an array" : "an object");
    return buffer;
}

mla_status mlai_json_integer(const cJSON *object, const char *where, const char *key,
                             int64_t fallback, int64_t low, int64_t high, int64_t *out,
                             mla_diag *diag)
{
    const cJSON *item = mlai_json_get(object, key);
    *out = fallback;
    if (item == NULL || mlai_json_is_integer(item, low, high, out))
        return MLA_OK;
    char buffer[80];
    return mlai_model_fail(
        diag, MLA_ERROR_FILE, "%s: %s is %s; it must be a whole number from %lld to %lld", where,
        key, value_text(item, buffer, sizeof buffer), (long long)low, (long long)high);
}

mla_status mlai_json_double(const cJSON *object, const char *where, const char *key,
                            double fallback, double low, double high, double *out, mla_diag *diag)
{
    const cJSON *item = mlai_json_get(object, key);
    *out = fallback;
    if (item == NULL)
        return MLA_OK;
    if (cJSON_IsNumber(item) && item->valuedouble >= low && item->valuedouble <= high) {
        *out = item->valuedouble;
        return MLA_OK;
    }
    char buffer[80];
    return mlai_model_fail(diag, MLA_ERROR_FILE, "%s: %s is %s; it must be a number from %g to %g",
                           where, key, value_text(item, buffer, sizeof buffer), low, high);
}

mla_status mlai_json_bool(const cJSON *object, const char *where, const char *key, bool fallback,
                          bool *out, mla_diag *diag)
{
    const cJSON *item = mlai_json_get(object, key);
    *out = fallback;
    if (item == NULL)
        return MLA_OK;
    if (cJSON_IsBool(item)) {
        *out = cJSON_IsTrue(item);
        return MLA_OK;
    }
    char buffer[80];
    return mlai_model_fail(diag, MLA_ERROR_FILE, "%s: %s is %s; it must be true or false", where,
                           key, value_text(item, buffer, sizeof buffer));
}

mla_status mlai_json_string(const cJSON *object, const char *where, const char *key,
                            const char *fallback, const char **out, mla_diag *diag)
{
    const cJSON *item = mlai_json_get(object, key);
    *out = fallback;
    if (item == NULL)
        return MLA_OK;
    if (cJSON_IsString(item)) {
        *out = item->valuestring;
        return MLA_OK;
    }
    char buffer[80];
    return mlai_model_fail(diag, MLA_ERROR_FILE, "%s: %s is %s; it must be a string", where, key,
                           value_text(item, buffer, sizeof buffer));
}
