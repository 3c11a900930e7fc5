/*
 * safetensors reader: map a file, check its whole header, then hand out views.
 *
 * Checks, in this order: file size against the header length; JSON; for each tensor dtype, rank,
 * extents, product against the size of its data_offsets; then all tensors of a file sorted by
 * offset must tile the data from 0 to its end without overlap or gap; names are unique. Only then
 * does a pointer into the mapping leave this file. Data that is not aligned to its element (the
 * format allows it) is copied once. Sharded: each file of the weight_map is checked so, once, and
 * each mapped name must be in its file. 64-bit arithmetic, every sum and product checked.
 * The writer lives in safetensors_write.c.
 */
#include "safetensors.h"

#include "fault.h"
#include "json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_HEADER_BYTES ((uint64_t)100 << 20)
#define MAX_INDEX_BYTES ((size_t)100 << 20)

/* One mapped file; its tensors' names belong to `header`. */
typedef struct st_file {
    char *path;
    void *map;
    size_t map_bytes;
    const unsigned char *data;
    uint64_t data_bytes;
    cJSON *header;
    mlai_st_tensor *tensors; /* sorted by name */
    int64_t n_tensors;
    void **copies; /* aligned copies of misaligned tensors */
    int64_t n_copies;
} st_file;

struct mlai_st_reader {
    st_file *files;
    int64_t n_files;
    mlai_st_tensor *tensors; /* sorted by name, over all files */
    int64_t n_tensors;
    cJSON *index; /* owns the names of a sharded checkpoint's tensors */
};

static const struct {
    const char *name;
    int32_t bytes;
    int32_t format;
} dtypes[MLAI_ST_DTYPE_COUNT] = {
#define MLAI_ST_ENTRY(id, text, size, fmt) [id] = {text, size, fmt},
    MLAI_ST_DTYPE_LIST(MLAI_ST_ENTRY)
#undef MLAI_ST_ENTRY
};

const char *mlai_st_dtype_name(int32_t dtype)
{
    return dtype >= 0 && dtype < MLAI_ST_DTYPE_COUNT ? dtypes[dtype].name : "unknown";
}

int32_t mlai_st_dtype_bytes(int32_t dtype)
{
    return dtype >= 0 && dtype < MLAI_ST_DTYPE_COUNT ? dtypes[dtype].bytes : 0;
}

int32_t mlai_st_dtype_format(int32_t dtype)
{
    return dtype >= 0 && dtype < MLAI_ST_DTYPE_COUNT ? dtypes[dtype].format : MLA_FORMAT_NONE;
}

int32_t mlai_st_dtype_from_format(int32_t format)
{
    for (int32_t i = 0; i < MLAI_ST_DTYPE_COUNT; i++) {
        if (dtypes[i].format == format && format != MLA_FORMAT_NONE)
            return i;
    }
    return -1;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const mlai_st_tensor *)a)->name, ((const mlai_st_tensor *)b)->name);
}

static int compare_data(const void *a, const void *b)
{
    const mlai_st_tensor *x = a;
    const mlai_st_tensor *y = b;
    if (x->data != y->data)
        return (const char *)x->data < (const char *)y->data ? -1 : 1;
    /* An empty tensor stands in front of the one that begins at the same byte. */
    return (x->size_bytes > y->size_bytes) - (x->size_bytes < y->size_bytes);
}

static void file_close(st_file *file)
{
    for (int64_t i = 0; i < file->n_copies; i++)
        free(file->copies[i]);
    free(file->copies);
    free(file->tensors);
    cJSON_Delete(file->header);
    if (file->map != NULL)
        munmap(file->map, file->map_bytes);
    free(file->path);
    memset(file, 0, sizeof *file);
}

static mla_status file_map(st_file *file, mla_diag *diag)
{
    int fd = -1;
    uint64_t size = 0;
    mla_status status = mlai_file_open(file->path, &fd, &size, diag);
    if (status != MLA_OK)
        return status;
    if (size < 8 || size > SIZE_MAX) {
        close(fd);
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s has %llu bytes; a safetensors file has at least 8", file->path,
                               (unsigned long long)size);
    }
    void *map = mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, fd, 0);
    int map_errno = errno;
    close(fd);
    if (map == MAP_FAILED)
        return mlai_model_fail(diag, MLA_ERROR_FILE, "%s could not be mapped: %s", file->path,
                               strerror(map_errno));
    file->map = map;
    file->map_bytes = (size_t)size;
    return MLA_OK;
}

static mla_status file_header(st_file *file, mla_diag *diag)
{
    const unsigned char *bytes = file->map;
    uint64_t header_bytes = 0;
    for (int i = 7; i >= 0; i--)
        header_bytes = header_bytes << 8 | bytes[i];
    if (header_bytes > MAX_HEADER_BYTES || header_bytes > file->map_bytes - 8)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s claims a header of %llu bytes; the file has %zu and headers are "
                               "read up to %llu",
                               file->path, (unsigned long long)header_bytes, file->map_bytes,
                               (unsigned long long)MAX_HEADER_BYTES);
    file->data = bytes + 8 + header_bytes;
    file->data_bytes = file->map_bytes - 8 - header_bytes;
    mla_status status = mlai_json_parse((const char *)bytes + 8, (size_t)header_bytes, file->path,
                                        &file->header, diag);
    if (status != MLA_OK)
        return status;
    if (!cJSON_IsObject(file->header))
        return mlai_model_fail(diag, MLA_ERROR_FILE, "%s: the header is not a JSON object",
                               file->path);
    return MLA_OK;
}

static int32_t dtype_from_text(const char *text)
{
    for (int32_t i = 0; i < MLAI_ST_DTYPE_COUNT; i++) {
        if (strcmp(dtypes[i].name, text) == 0)
            return i;
    }
    return -1;
}

/* Fills shape and *bytes = product of the extents times the element size, or says what is wrong. */
static mla_status parse_shape(const st_file *file, const cJSON *shape, mlai_st_tensor *tensor,
                              uint64_t *bytes, mla_diag *diag)
{
    int rank = cJSON_GetArraySize(shape);
    if (!cJSON_IsArray(shape) || rank > MLAI_ST_MAX_RANK)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: tensor %s needs a shape of at most %d extents", file->path,
                               tensor->name, MLAI_ST_MAX_RANK);
    uint64_t product = (uint64_t)dtypes[tensor->dtype].bytes;
    bool empty = false;
    const cJSON *extent = NULL;
    cJSON_ArrayForEach(extent, shape)
    {
        int64_t value = 0;
        if (!mlai_json_is_integer(extent, 0, (int64_t)MLAI_JSON_MAX_INTEGER, &value))
            return mlai_model_fail(diag, MLA_ERROR_FILE,
                                   "%s: tensor %s has an extent that is no whole number from 0 up",
                                   file->path, tensor->name);
        tensor->shape[tensor->rank++] = value;
        empty = empty || value == 0;
        /* Once over the file's size the product can only be wrong; stop before it wraps. */
        if (value != 0 && product > file->map_bytes / (uint64_t)value)
            product = UINT64_MAX;
        else if (value != 0)
            product *= (uint64_t)value;
        if (product > file->map_bytes)
            product = UINT64_MAX;
    }
    *bytes = empty ? 0 : product;
    return MLA_OK;
}

static mla_status parse_tensor(const st_file *file, const cJSON *item, mlai_st_tensor *tensor,
                               mla_diag *diag)
{
    tensor->name = item->string;
    const cJSON *dtype = mlai_json_get(item, "dtype");
    const cJSON *offsets = mlai_json_get(item, "data_offsets");
    if (!cJSON_IsObject(item) || !cJSON_IsString(dtype) || cJSON_GetArraySize(offsets) != 2)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: tensor %s needs dtype, shape and two data_offsets", file->path,
                               tensor->name);
    tensor->dtype = dtype_from_text(dtype->valuestring);
    if (tensor->dtype < 0)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: tensor %s has dtype %.20s, which is not known here", file->path,
                               tensor->name, dtype->valuestring);
    uint64_t bytes = 0;
    mla_status status = parse_shape(file, mlai_json_get(item, "shape"), tensor, &bytes, diag);
    if (status != MLA_OK)
        return status;
    int64_t first = 0;
    int64_t end = 0;
    if (!mlai_json_is_integer(cJSON_GetArrayItem(offsets, 0), 0, INT64_MAX, &first) ||
        !mlai_json_is_integer(cJSON_GetArrayItem(offsets, 1), first, INT64_MAX, &end) ||
        (uint64_t)end > file->data_bytes)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: tensor %s has data_offsets outside the %llu bytes of data",
                               file->path, tensor->name, (unsigned long long)file->data_bytes);
    if ((uint64_t)(end - first) != bytes)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: tensor %s has %lld bytes of data; its shape and dtype %s need "
                               "another number",
                               file->path, tensor->name, (long long)(end - first),
                               dtypes[tensor->dtype].name);
    tensor->data = file->data + first;
    tensor->size_bytes = end - first;
    return MLA_OK;
}

/* The tensors, sorted by offset, must tile [0, data_bytes). */
static mla_status check_tiling(st_file *file, mla_diag *diag)
{
    if (file->n_tensors > 0)
        qsort(file->tensors, (size_t)file->n_tensors, sizeof *file->tensors, compare_data);
    const unsigned char *next = file->data;
    for (int64_t i = 0; i < file->n_tensors; i++) {
        const mlai_st_tensor *tensor = &file->tensors[i];
        if ((const unsigned char *)tensor->data != next)
            return mlai_model_fail(diag, MLA_ERROR_FILE,
                                   "%s: the data of tensor %s overlaps another's or leaves a gap",
                                   file->path, tensor->name);
        next += tensor->size_bytes;
    }
    if (next != file->data + file->data_bytes)
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: %lld bytes at its end belong to no tensor", file->path,
                               (long long)(file->data + file->data_bytes - next));
    if (file->n_tensors > 0)
        qsort(file->tensors, (size_t)file->n_tensors, sizeof *file->tensors, compare_names);
    for (int64_t i = 1; i < file->n_tensors; i++) {
        if (strcmp(file->tensors[i - 1].name, file->tensors[i].name) == 0)
            return mlai_model_fail(diag, MLA_ERROR_FILE, "%s: tensor %s is there twice", file->path,
                                   file->tensors[i].name);
    }
    return MLA_OK;
}

/* The format does not promise alignment; callers of this reader get it. */
static mla_status align_tensors(st_file *file, mla_diag *diag)
{
    for (int64_t i = 0; i < file->n_tensors; i++) {
        mlai_st_tensor *tensor = &file->tensors[i];
        if ((uintptr_t)tensor->data % (uintptr_t)dtypes[tensor->dtype].bytes == 0)
            continue;
        if (file->copies == NULL)
            file->copies = calloc((size_t)file->n_tensors, sizeof *file->copies);
        void *copy = malloc((size_t)tensor->size_bytes + 1);
        if (file->copies == NULL || copy == NULL) {
            free(copy);
            return mlai_model_fail_memory(diag, tensor->name,
                                          (unsigned long long)tensor->size_bytes);
        }
        memcpy(copy, tensor->data, (size_t)tensor->size_bytes);
        file->copies[file->n_copies++] = copy;
        tensor->data = copy;
    }
    return MLA_OK;
}

static mla_status check_metadata(const st_file *file, mla_diag *diag)
{
    const cJSON *map = mlai_json_get(file->header, "__metadata__");
    if (map != NULL && !cJSON_IsObject(map))
        return mlai_model_fail(diag, MLA_ERROR_FILE, "%s: __metadata__ is not a JSON object",
                               file->path);
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, map)
    {
        if (!cJSON_IsString(item))
            return mlai_model_fail(diag, MLA_ERROR_FILE,
                                   "%s: metadata %s is not a string, as the format wants",
                                   file->path, item->string);
    }
    return MLA_OK;
}

/* Opens and checks one file. On failure the caller still closes `file`. */
static mla_status file_open(st_file *file, mla_diag *diag)
{
    mla_status status = file_map(file, diag);
    if (status == MLA_OK)
        status = file_header(file, diag);
    if (status == MLA_OK)
        status = check_metadata(file, diag);
    if (status != MLA_OK)
        return status;
    int64_t capacity = cJSON_GetArraySize(file->header);
    file->tensors = calloc((size_t)capacity + 1, sizeof *file->tensors);
    if (file->tensors == NULL)
        return mlai_model_fail_memory(diag, file->path, (unsigned long long)capacity);
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, file->header)
    {
        if (strcmp(item->string, "__metadata__") == 0)
            continue;
        status = parse_tensor(file, item, &file->tensors[file->n_tensors], diag);
        if (status != MLA_OK)
            return status;
        file->n_tensors++;
    }
    status = check_tiling(file, diag);
    if (status == MLA_OK)
        status = align_tensors(file, diag);
    return status;
}

static char *join_path(const char *folder, size_t folder_length, const char *name)
{
    size_t name_length = strlen(name);
    char *path = malloc(folder_length + 1 + name_length + 1);
    if (path == NULL)
        return NULL;
    memcpy(path, folder, folder_length);
    path[folder_length] = '/';
    memcpy(path + folder_length + 1, name, name_length + 1);
    return path;
}

static mla_status open_single(mlai_st_reader *reader, const char *path, mla_diag *diag)
{
    reader->files = calloc(1, sizeof *reader->files);
    char *copy = malloc(strlen(path) + 1);
    if (reader->files == NULL || copy == NULL) {
        free(copy);
        return mlai_model_fail_memory(diag, path, sizeof *reader->files);
    }
    strcpy(copy, path);
    reader->files[0].path = copy;
    reader->n_files = 1;
    mla_status status = file_open(&reader->files[0], diag);
    reader->tensors = reader->files[0].tensors;
    reader->n_tensors = reader->files[0].n_tensors;
    return status;
}

static bool is_plain_name(const char *name)
{
    return name[0] != '\0' && name[0] != '.' && strchr(name, '/') == NULL &&
           strchr(name, '\\') == NULL;
}

/* The file called `name` beside the index, opened at its first mention. */
static mla_status shard_of(mlai_st_reader *reader, const char *index_path, const char *name,
                           const st_file **out, mla_diag *diag)
{
    const char *slash = strrchr(index_path, '/');
    const char *folder = slash != NULL ? index_path : ".";
    size_t folder_length = slash != NULL ? (size_t)(slash - index_path) : 1;
    for (int64_t i = 0; i < reader->n_files; i++) {
        if (strcmp(reader->files[i].path + folder_length + 1, name) == 0) {
            *out = &reader->files[i];
            return MLA_OK;
        }
    }
    if (!is_plain_name(name))
        return mlai_model_fail(diag, MLA_ERROR_FILE,
                               "%s: weight_map names %.80s; a shard is a file beside the index",
                               index_path, name);
    st_file *file = &reader->files[reader->n_files];
    file->path = join_path(folder, folder_length, name);
    if (file->path == NULL)
        return mlai_model_fail_memory(diag, name, folder_length);
    reader->n_files++;
    *out = file;
    return file_open(file, diag);
}

static const mlai_st_tensor *find_in(const mlai_st_tensor *tensors, int64_t n, const char *name)
{
    const mlai_st_tensor key = {.name = name};
    return n > 0 ? bsearch(&key, tensors, (size_t)n, sizeof key, compare_names) : NULL;
}

static mla_status open_sharded(mlai_st_reader *reader, const char *index_path, mla_diag *diag)
{
    mla_status status = mlai_json_read(index_path, MAX_INDEX_BYTES, &reader->index, diag);
    if (status != MLA_OK)
        return status;
    const cJSON *map = mlai_json_get(reader->index, "weight_map");
    if (!cJSON_IsObject(map))
        return mlai_model_fail(diag, MLA_ERROR_FILE, "%s has no weight_map object", index_path);
    size_t n_mapped = (size_t)cJSON_GetArraySize(map);
    reader->tensors = calloc(n_mapped + 1, sizeof *reader->tensors);
    reader->files = calloc(n_mapped + 1, sizeof *reader->files);
    if (reader->tensors == NULL || reader->files == NULL)
        return mlai_model_fail_memory(diag, index_path, n_mapped * sizeof *reader->files);
    const cJSON *item = NULL;
    cJSON_ArrayForEach(item, map)
    {
        const st_file *file = NULL;
        if (!cJSON_IsString(item))
            return mlai_model_fail(diag, MLA_ERROR_FILE, "%s: weight_map of %s is not a file name",
                                   index_path, item->string);
        status = shard_of(reader, index_path, item->valuestring, &file, diag);
        if (status != MLA_OK)
            return status;
        const mlai_st_tensor *tensor = find_in(file->tensors, file->n_tensors, item->string);
        if (tensor == NULL)
            return mlai_model_fail(diag, MLA_ERROR_FILE, "%s has no tensor %s, which %s maps to it",
                                   file->path, item->string, index_path);
        reader->tensors[reader->n_tensors++] = *tensor;
    }
    if (reader->n_tensors > 0)
        qsort(reader->tensors, (size_t)reader->n_tensors, sizeof *reader->tensors, compare_names);
    for (int64_t i = 1; i < reader->n_tensors; i++) {
        if (strcmp(reader->tensors[i - 1].name, reader->tensors[i].name) == 0)
            return mlai_model_fail(diag, MLA_ERROR_FILE, "%s maps tensor %s twice", index_path,
                                   reader->tensors[i].name);
    }
    return MLA_OK;
}

static bool ends_with(const char *text, const char *tail)
{
    size_t n = strlen(text);
    size_t k = strlen(tail);
    return n >= k && strcmp(text + n - k, tail) == 0;
}

static mla_status open_folder(mlai_st_reader *reader, const char *folder, mla_diag *diag)
{
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
    for (int i = 0; i < 2; i++) {
        char *path = join_path(folder, strlen(folder), names[i]);
        if (path == NULL)
            return mlai_model_fail_memory(diag, folder, strlen(folder));
        struct stat info;
        if (stat(path, &info) == 0) {
            mla_status status =
                i == 0 ? open_single(reader, path, diag) : open_sharded(reader, path, diag);
            free(path);
            return status;
        }
        free(path);
    }
    return mlai_model_fail(diag, MLA_ERROR_FILE, "%s has neither %s nor %s", folder, names[0],
                           names[1]);
}

mla_status mlai_st_open(const char *path, mlai_st_reader **out, mla_diag *diag)
{
    if (path == NULL || path[0] == '\0')
        return mlai_model_fail(diag, MLA_ERROR_ARGUMENT, "path is empty: name a file or a folder");
    struct stat info;
    if (stat(path, &info) != 0)
        return mlai_model_fail(diag, MLA_ERROR_FILE, "%s could not be opened: %s", path,
                               strerror(errno));
    mlai_st_reader *reader = calloc(1, sizeof *reader);
    if (reader == NULL)
        return mlai_model_fail_memory(diag, path, sizeof *reader);
    mla_status status;
    if (S_ISDIR(info.st_mode))
        status = open_folder(reader, path, diag);
    else if (ends_with(path, ".json"))
        status = open_sharded(reader, path, diag);
    else
        status = open_single(reader, path, diag);
    if (status != MLA_OK) {
        mlai_st_close(reader);
        return status;
    }
    *out = reader;
    return MLA_OK;
}

void mlai_st_close(mlai_st_reader *reader)
{
    if (reader == NULL)
        return;
    /* A single file's table is the reader's own; a sharded one has a table beside the files'. */
    if (reader->n_files == 0 || reader->tensors != reader->files[0].tensors)
        free(reader->tensors);
    for (int64_t i = 0; i < reader->n_files; i++)
        file_close(&reader->files[i]);
    free(reader->files);
    cJSON_Delete(reader->index);
    free(reader);
}

int64_t mlai_st_count(const mlai_st_reader *reader)
{
    return reader->n_tensors;
}

const mlai_st_tensor *mlai_st_at(const mlai_st_reader *reader, int64_t index)
{
    return &reader->tensors[index];
}

const mlai_st_tensor *mlai_st_find(const mlai_st_reader *reader, const char *name)
{
    return find_in(reader->tensors, reader->n_tensors, name);
}

static const cJSON *metadata_map(const mlai_st_reader *reader)
{
    return reader->index == NULL ? mlai_json_get(reader->files[0].header, "__metadata__") : NULL;
}

const char *mlai_st_metadata(const mlai_st_reader *reader, const char *key)
{
    const cJSON *map = metadata_map(reader);
    const cJSON *item = map != NULL ? mlai_json_get(map, key) : NULL;
    return item != NULL ? item->valuestring : NULL;
}

int64_t mlai_st_metadata_count(const mlai_st_reader *reader)
{
    const cJSON *map = metadata_map(reader);
    return map != NULL ? cJSON_GetArraySize(map) : 0;
}

mlai_st_pair mlai_st_metadata_at(const mlai_st_reader *reader, int64_t index)
{
    const cJSON *item = cJSON_GetArrayItem(metadata_map(reader), (int)index);
    return (mlai_st_pair){.key = item->string, .value = item->valuestring};
}
