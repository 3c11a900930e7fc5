/*
 * A safetensors file as the parameters of one operator, for `mla op`.
 *
 * Tensors bind by the operator's parameter names, scalars by metadata keys; dims that the shapes
 * imply are filled in. Files come from strangers: safetensors.h checks offsets and sizes, the
 * binding checks dtypes, ranks and names, the operator checks the rest. Functions print the
 * sentence and return false or NULL when they refuse.
 */
#ifndef MLA_TOOLS_OP_FILE_H
#define MLA_TOOLS_OP_FILE_H

#include "op_table.h"
#include "safetensors.h"

#define OP_FILE_MAX_BUFFERS 192

/* One run: what the file gave, and the memory that was made for it. */
typedef struct op_file {
    const char *path;
    mlai_st_reader *reader;
    const op_row *row;
    op_params params;
    void *buffers[OP_FILE_MAX_BUFFERS];
    int32_t n_buffers;
} op_file;

/* Opens file->path and binds it to file->row. op_file_close is due in any case. */
bool op_file_bind(op_file *file);
void op_file_close(op_file *file);

/* Memory aligned to 64 bytes that lives until the close. */
void *op_file_buffer(op_file *file, uint64_t bytes);

#endif
