/*
 * safetensors files: a reader that maps checkpoints into memory and a writer.
 *
 * File: 8 bytes little-endian header length n, n bytes of JSON {name: {dtype, shape, data_offsets},
 * "__metadata__": {text: text}}, then the data; data_offsets [first, end) count from byte 8 + n and
 * the tensors tile the data exactly. A sharded checkpoint is a folder with
 * model.safetensors.index.json whose weight_map names the file of each tensor.
 *
 * Files come from strangers: lengths, offsets, shapes, sizes, overlaps, gaps and names are checked
 * before a byte of data is used. Limits: header 100 MiB, rank 8, extents up to 2^53, file names
 * without a path. Little-endian machines only, as the format is. The mapping is read-only and
 * private; a file must not shrink while it is open.
 *
 * Called by weights.c, by `mla logits`, `mla op` and the tests.
 */
#ifndef MLAI_MODEL_SAFETENSORS_H
#define MLAI_MODEL_SAFETENSORS_H

#include <mla/tensor.h>
#include <stdint.h>

#define MLAI_ST_MAX_RANK 8

/* name, spelling in the file, bytes of one element, the libmla format or MLA_FORMAT_NONE */
#define MLAI_ST_DTYPE_LIST(X)                                                                      \
    X(MLAI_ST_BOOL, "BOOL", 1, MLA_FORMAT_NONE)                                                    \
    X(MLAI_ST_U8, "U8", 1, MLA_FORMAT_U8)                                                          \
    X(MLAI_ST_I8, "I8", 1, MLA_FORMAT_NONE)                                                        \
    X(MLAI_ST_F8_E4M3, "F8_E4M3", 1, MLA_FORMAT_E4M3)                                              \
    X(MLAI_ST_F8_E5M2, "F8_E5M2", 1, MLA_FORMAT_E5M2)                                              \
    X(MLAI_ST_I16, "I16", 2, MLA_FORMAT_NONE)                                                      \
    X(MLAI_ST_U16, "U16", 2, MLA_FORMAT_NONE)                                                      \
    X(MLAI_ST_F16, "F16", 2, MLA_FORMAT_F16)                                                       \
    X(MLAI_ST_BF16, "BF16", 2, MLA_FORMAT_BF16)                                                    \
    X(MLAI_ST_I32, "I32", 4, MLA_FORMAT_I32)                                                       \
    X(MLAI_ST_U32, "U32", 4, MLA_FORMAT_NONE)                                                      \
    X(MLAI_ST_F32, "F32", 4, MLA_FORMAT_F32)                                                       \
    X(MLAI_ST_I64, "I64", 8, MLA_FORMAT_I64)                                                       \
    X(MLAI_ST_U64, "U64", 8, MLA_FORMAT_NONE)                                                      \
    X(MLAI_ST_F64, "F64", 8, MLA_FORMAT_NONE)

typedef enum mlai_st_dtype {
#define MLAI_ST_ENTRY(name, text, bytes, format) name,
    MLAI_ST_DTYPE_LIST(MLAI_ST_ENTRY)
#undef MLAI_ST_ENTRY
        MLAI_ST_DTYPE_COUNT
} mlai_st_dtype;

/* One tensor. In a reader, `data` is aligned to its element and lives until close. */
typedef struct mlai_st_tensor {
    const char *name;
    int32_t dtype; /* mlai_st_dtype */
    int32_t rank;  /* 0 = a scalar */
    int64_t shape[MLAI_ST_MAX_RANK];
    const void *data;
    int64_t size_bytes;
} mlai_st_tensor;

/* One pair of the metadata map. */
typedef struct mlai_st_pair {
    const char *key;
    const char *value;
} mlai_st_pair;

typedef struct mlai_st_reader mlai_st_reader;

const char *mlai_st_dtype_name(int32_t dtype);
int32_t mlai_st_dtype_bytes(int32_t dtype);
int32_t mlai_st_dtype_format(int32_t dtype);

/* The dtype that stores an mla_format (ds656 and unknown values: -1). */
int32_t mlai_st_dtype_from_format(int32_t format);

/*
 * Opens a file, an index (*.json), or a checkpoint folder (model.safetensors, else the index).
 * *out belongs to the caller. Errors: MLA_ERROR_FILE, MLA_ERROR_OUT_OF_MEMORY.
 */
mla_status mlai_st_open(const char *path, mlai_st_reader **out, mla_diag *diag);

/* NULL is allowed. Every pointer taken from the reader ends here. */
void mlai_st_close(mlai_st_reader *reader);

/* Tensors sorted by name. */
int64_t mlai_st_count(const mlai_st_reader *reader);
const mlai_st_tensor *mlai_st_at(const mlai_st_reader *reader, int64_t index);

/* The tensor of that name, or NULL. */
const mlai_st_tensor *mlai_st_find(const mlai_st_reader *reader, const char *name);

/* The metadata value of that key in a single file, or NULL (always NULL for a sharded one). */
const char *mlai_st_metadata(const mlai_st_reader *reader, const char *key);

/* Metadata pairs in file order, for callers that refuse keys they do not know. */
int64_t mlai_st_metadata_count(const mlai_st_reader *reader);
mlai_st_pair mlai_st_metadata_at(const mlai_st_reader *reader, int64_t index);

/*
 * Writes a file: tensors ordered by element size and then as given, so that data is aligned without
 * gaps. size_bytes must fit shape and dtype. A regular file appears under its name only when it is
 * complete. Errors: MLA_ERROR_ARGUMENT (size, rank, a name twice), MLA_ERROR_FILE,
 * MLA_ERROR_OUT_OF_MEMORY.
 */
mla_status mlai_st_write(const char *path, const mlai_st_tensor *tensors, int64_t n_tensors,
                         const mlai_st_pair *pairs, int64_t n_pairs, mla_diag *diag);

#endif
