/*
 * safetensors writer: header as JSON, padded with spaces to a multiple of 8, then the data of the
 * tensors by falling element size (in the caller's order among equals), so that each is aligned
 * although the format allows no gaps.
 *
 * A regular or new file is written under a name of its own beside the target and renamed when it is
 * complete, so that a failed write leaves nothing and never half a file. Other kinds of files
 * (pipes, devices, links) are written in place. 64-bit sizes. Called by `mla logits`, `mla op` and
 * the tests.
 */
#include "fault.h"
#include "json.h"
#include "safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static mla_status check_tensors(const mlai_st_tensor *tensors, int64_t n_tensors, mla_diag *diag)
{
    for (int64_t i = 0; i < n_tensors; i++) {
        const mlai_st_tensor *tensor = &tensors[i];
        if (tensor->name == NULL || strcmp(tensor->name, "__metadata__") == 0)
            return mlai_model_fail(diag, MLA_ERROR_ARGUMENT, "tensor %lld has no usable name",
                                   (long long)i);
        if (tensor->rank < 0 || tensor->rank > MLAI_ST_MAX_RANK ||
            mlai_st_dtype_bytes(tensor->dtype) == 0)
            return mlai_model_fail(diag, MLA_ERROR_ARGUMENT, "tensor %s: rank %d or dtype %d",
                                   tensor->name, tensor->rank, tensor->dtype);
        int64_t bytes = mlai_st_dtype_bytes(tensor->dtype);
        for (int32_t d = 0; d < tensor->rank; d++) {
            if (tensor->shape[d] < 0 || __builtin_mul_overflow(bytes, tensor->shape[d], &bytes))
                return mlai_model_fail(diag, MLA_ERROR_ARGUMENT,
                                       "tensor %s: extent %d is negative or the size overflows",
                                       tensor->name, d);
        }
        if (bytes != tensor->size_bytes)
            return mlai_model_fail(diag, MLA_ERROR_ARGUMENT,
                                   "tensor %s: size_bytes is %lld, shape and dtype make %lld",
                                   tensor->name, (long long)tensor->size_bytes, (long long)bytes);
        for (int64_t j = 0; j < i; j++) {
            if (strcmp(tensors[j].name, tensor->name) == 0)
                return mlai_model_fail(diag, MLA_ERROR_ARGUMENT, "tensor %s is there twice",
                                       tensor->name);
        }
    }
    return MLA_OK;
}

/* order[] = indices by falling element size, stable. */
static void order_by_alignment(const mlai_st_tensor *tensors, int64_t n, int64_t *order)
{
    int64_t filled = 0;
    for (int32_t bytes = 8; bytes >= 1; bytes /= 2) {
        for (int64_t i = 0; i < n; i++) {
            if (mlai_st_dtype_bytes(tensors[i].dtype) == bytes)
                order[filled++] = i;
        }
    }
}

static bool add_tensor(cJSON *header, const mlai_st_tensor *tensor, int64_t first)
{
    cJSON *item = cJSON_AddObjectToObject(header, tensor->name);
    bool ok = item != NULL &&
              cJSON_AddStringToObject(item, "dtype", mlai_st_dtype_name(tensor->dtype)) != NULL;
    cJSON *shape = ok ? cJSON_AddArrayToObject(item, "shape") : NULL;
    ok = shape != NULL;
    for (int32_t d = 0; ok && d < tensor->rank; d++)
        ok = cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)tensor->shape[d]));
    cJSON *offsets = ok ? cJSON_AddArrayToObject(item, "data_offsets") : NULL;
    return offsets != NULL && cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)first)) &&
           cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)(first + tensor->size_bytes)));
}

/* The header's JSON text (freed with cJSON_free), or NULL when memory is short. */
static char *make_header(const mlai_st_tensor *tensors, const int64_t *order, int64_t n_tensors,
                         const mlai_st_pair *pairs, int64_t n_pairs)
{
    cJSON *header = cJSON_CreateObject();
    bool ok = header != NULL;
    cJSON *map = ok && n_pairs > 0 ? cJSON_AddObjectToObject(header, "__metadata__") : NULL;
    for (int64_t i = 0; ok && i < n_pairs; i++)
        ok = map != NULL && cJSON_AddStringToObject(map, pairs[i].key, pairs[i].value) != NULL;
    int64_t first = 0;
    for (int64_t i = 0; ok && i < n_tensors; i++) {
        ok = add_tensor(header, &tensors[order[i]], first);
        first += tensors[order[i]].size_bytes;
    }
    char *text = ok ? cJSON_PrintUnformatted(header) : NULL;
    cJSON_Delete(header);
    return text;
}

static bool write_all(FILE *file, const char *header, const mlai_st_tensor *tensors,
                      const int64_t *order, int64_t n_tensors)
{
    uint64_t length = strlen(header);
    uint64_t padded = (length + 7) / 8 * 8;
    unsigned char prefix[8];
    for (int i = 0; i < 8; i++)
        prefix[i] = (unsigned char)(padded >> (8 * i));
    bool ok = fwrite(prefix, 1, 8, file) == 8 && fwrite(header, 1, length, file) == length &&
              fwrite("        ", 1, padded - length, file) == padded - length;
    for (int64_t i = 0; ok && i < n_tensors; i++) {
        size_t bytes = (size_t)tensors[order[i]].size_bytes;
        ok = bytes == 0 || fwrite(tensors[order[i]].data, 1, bytes, file) == bytes;
    }
    return ok && fflush(file) == 0;
}

/* Opens the file to write: *temporary holds the name to rename from, or is empty for "in place". */
static FILE *open_target(const char *path, char *temporary, size_t temporary_bytes)
{
    struct stat info;
    temporary[0] = '\0';
    if (lstat(path, &info) == 0 && !S_ISREG(info.st_mode))
        return fopen(path, "wb");
    for (int attempt = 0; attempt < 100; attempt++) {
        snprintf(temporary, temporary_bytes, "%s.part-%ld-%d", path, (long)getpid(), attempt);
        int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd >= 0) {
            FILE *file = fdopen(fd, "wb");
            if (file == NULL) {
                close(fd);
                unlink(temporary);
            }
            return file;
        }
        if (errno != EEXIST)
            return NULL;
    }
    return NULL;
}

mla_status mlai_st_write(const char *path, const mlai_st_tensor *tensors, int64_t n_tensors,
                         const mlai_st_pair *pairs, int64_t n_pairs, mla_diag *diag)
{
    mla_status status = check_tensors(tensors, n_tensors, diag);
    if (status != MLA_OK)
        return status;
    size_t temporary_bytes = strlen(path) + 48;
    char *temporary = malloc(temporary_bytes);
    int64_t *order = calloc((size_t)n_tensors + 1, sizeof *order);
    char *header = NULL;
    if (order != NULL) {
        order_by_alignment(tensors, n_tensors, order);
        header = make_header(tensors, order, n_tensors, pairs, n_pairs);
    }
    if (temporary == NULL || header == NULL) {
        status = mlai_model_fail_memory(diag, path, temporary_bytes);
    } else {
        errno = 0;
        FILE *file = open_target(path, temporary, temporary_bytes);
        bool ok = file != NULL && write_all(file, header, tensors, order, n_tensors);
        int write_errno = errno;
        if (file != NULL && fclose(file) != 0 && ok) {
            ok = false;
            write_errno = errno;
        }
        if (ok && temporary[0] != '\0' && rename(temporary, path) != 0) {
            ok = false;
            write_errno = errno;
        }
        if (!ok) {
            if (file != NULL && temporary[0] != '\0')
                unlink(temporary);
            status = mlai_model_fail(diag, MLA_ERROR_FILE, "%s could not be written: %s", path,
                                     strerror(write_errno));
        }
    }
    cJSON_free(header);
    free(order);
    free(temporary);
    return status;
}
