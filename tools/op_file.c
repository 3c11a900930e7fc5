/*
 * Binding a file to an operator (op_file.h): names, dtypes, scalars, pages and dims.
 */
#include "op_file.h"
#include "cli.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *op_file_buffer(op_file *file, uint64_t bytes)
{
    if (file->n_buffers == OP_FILE_MAX_BUFFERS || bytes > INT64_MAX - 64) {
        cli_refuse("%s needs more memory than can be addressed", file->path);
        return NULL;
    }
    void *buffer = aligned_alloc(64, (size_t)(bytes / 64 + 1) * 64);
    if (buffer == NULL)
        cli_refuse("%llu bytes for the tensors of %s could not be allocated",
                   (unsigned long long)bytes, file->path);
    else
        file->buffers[file->n_buffers++] = buffer;
    return buffer;
}

void op_file_close(op_file *file)
{
    for (int32_t i = 0; i < file->n_buffers; i++)
        free(file->buffers[i]);
    mlai_st_close(file->reader);
}

/* ---- metadata ----------------------------------------------------------------------------------
 */

/* Keys that every operator takes, beside its scalars and "<tensor>_format". The dims among them
 * follow from the shapes where the operator has no such parameter. */
static const char *const common_keys[] = {
    "format",     "op",        "note",         "out_format",
    "return_lse", "page_size", "kv_lora_rank", "qk_rope_head_dim",
};

static bool set_scalar(op_file *file, const op_scalar *scalar, const char *text)
{
    void *field = (char *)&file->params + scalar->offset;
    int64_t integer = 0;
    double real = 0.0;
    bool truth = false;
    switch (scalar->kind) {
    case OP_I32:
        if (!cli_int(scalar->name, text, INT32_MIN, INT32_MAX, &integer))
            return false;
        *(int32_t *)field = (int32_t)integer;
        return true;
    case OP_I64:
        if (!cli_int(scalar->name, text, INT64_MIN, INT64_MAX, &integer))
            return false;
        *(int64_t *)field = integer;
        return true;
    case OP_BOOL:
        if (!cli_bool(scalar->name, text, &truth))
            return false;
        *(int32_t *)field = truth;
        return true;
    case OP_SEQLEN_OFFSET:
        if (strcmp(text, "verify") == 0)
            integer = MLA_SEQLEN_OFFSET_VERIFY;
        else if (!cli_int(scalar->name, text, -INT32_MAX, INT32_MAX, &integer))
            return false;
        *(int32_t *)field = (int32_t)integer;
        return true;
    case OP_F32:
        break;
    }
    if (!cli_parse_double(text, &real)) {
        cli_refuse("%s: metadata %s is \"%.40s\"; it takes a number", file->path, scalar->name,
                   text);
        return false;
    }
    *(float *)field = (float)real;
    return true;
}

static bool is_known_key(const op_file *file, const char *key)
{
    for (size_t i = 0; i < sizeof common_keys / sizeof *common_keys; i++) {
        if (strcmp(key, common_keys[i]) == 0)
            return true;
    }
    for (int32_t i = 0; i < file->row->n_scalars; i++) {
        if (strcmp(key, file->row->scalars[i].name) == 0)
            return true;
    }
    size_t length = strlen(key);
    if (length < 8 || strcmp(key + length - 7, "_format") != 0)
        return false;
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)(length - 7 < 63 ? length - 7 : 63), key);
    return mlai_st_find(file->reader, name) != NULL;
}

static bool read_scalars(op_file *file)
{
    const char *op_name = mla_op_name(file->row->op);
    for (int64_t i = 0; i < mlai_st_metadata_count(file->reader); i++) {
        mlai_st_pair pair = mlai_st_metadata_at(file->reader, i);
        if (!is_known_key(file, pair.key)) {
            cli_refuse("%s: %s has no parameter %.60s; see docs/op-files.md", file->path, op_name,
                       pair.key);
            return false;
        }
    }
    const char *meant_for = mlai_st_metadata(file->reader, "op");
    if (meant_for != NULL && strcmp(meant_for, op_name) != 0) {
        cli_refuse("%s was made for op %.40s; run mla op %.40s", file->path, meant_for, meant_for);
        return false;
    }
    for (int32_t i = 0; i < file->row->n_scalars; i++) {
        const op_scalar *scalar = &file->row->scalars[i];
        const char *text = mlai_st_metadata(file->reader, scalar->name);
        if (text == NULL && scalar->is_required) {
            cli_refuse("%s: metadata %s is missing; %s needs it", file->path, scalar->name,
                       op_name);
            return false;
        }
        if (text != NULL && !set_scalar(file, scalar, text))
            return false;
    }
    return true;
}

/* ---- tensors -----------------------------------------------------------------------------------
 */

/* Parameters that hold i32 and no other index format. */
static bool is_i32_parameter(const char *name)
{
    static const char *const names[] = {"page_table", "cache_seqlens", "cu_seqlens_q",
                                        "cu_seqlens_kv", "global_seqlens"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(name, names[i]) == 0)
            return true;
    }
    return false;
}

/*
 * The format of a tensor's bytes. Most dtypes say it themselves. Files made by tools without bf16
 * or fp8 dtypes carry the bits as U16 or U8 and name the format in the metadata key
 * <tensor>_format.
 */
static bool format_of(const op_file *file, const mlai_st_tensor *stored, int32_t *format)
{
    char key[80];
    snprintf(key, sizeof key, "%.64s_format", stored->name);
    const char *text = mlai_st_metadata(file->reader, key);
    bool is_row656 = strcmp(stored->name, "kv_cache") == 0 && stored->rank > 0 &&
                     stored->shape[stored->rank - 1] == MLA_DS656_ROW_BYTES;
    int32_t own = mlai_st_dtype_format(stored->dtype);
    if (stored->dtype == MLAI_ST_BOOL)
        own = MLA_FORMAT_U8;
    else if (stored->dtype == MLAI_ST_U8 && is_row656)
        own = MLA_FORMAT_DS656;
    *format = text != NULL ? mla_format_from_name(text) : own;
    if (*format == MLA_FORMAT_NONE && text != NULL) {
        cli_refuse("%s: metadata %s is \"%.40s\", which is no format", file->path, key, text);
        return false;
    }
    bool is_bits = stored->dtype == MLAI_ST_U8 || stored->dtype == MLAI_ST_I8 ||
                   stored->dtype == MLAI_ST_U16 || stored->dtype == MLAI_ST_I16;
    if (*format == MLA_FORMAT_NONE && is_bits) {
        cli_refuse("%s: tensor %s has dtype %s; state its format as metadata %s", file->path,
                   stored->name, mlai_st_dtype_name(stored->dtype), key);
        return false;
    }
    if (*format == MLA_FORMAT_NONE) {
        cli_refuse("%s: tensor %s has dtype %s, which no operator takes; docs/op-files.md lists "
                   "those that are",
                   file->path, stored->name, mlai_st_dtype_name(stored->dtype));
        return false;
    }
    if (*format != own &&
        (!is_bits || mla_format_bytes(*format) != mlai_st_dtype_bytes(stored->dtype))) {
        cli_refuse("%s: tensor %s has dtype %s, which cannot hold format %s", file->path,
                   stored->name, mlai_st_dtype_name(stored->dtype), mla_format_name(*format));
        return false;
    }
    return true;
}

/* An i64 index tensor as i32, for parameters that take no other. */
static bool narrow_indices(op_file *file, const mlai_st_tensor *stored, mla_tensor *t)
{
    int64_t n = stored->size_bytes / 8;
    const int64_t *wide = stored->data;
    int32_t *narrow = op_file_buffer(file, (uint64_t)n * sizeof *narrow);
    if (narrow == NULL)
        return false;
    for (int64_t i = 0; i < n; i++) {
        if (wide[i] < INT32_MIN || wide[i] > INT32_MAX) {
            cli_refuse("%s: tensor %s holds %lld, which does not fit i32", file->path, stored->name,
                       (long long)wide[i]);
            return false;
        }
        narrow[i] = (int32_t)wide[i];
    }
    t->data = narrow;
    t->format = MLA_FORMAT_I32;
    return true;
}

static bool bind_tensor(op_file *file, const mlai_st_tensor *stored, mla_tensor *t, bool is_written)
{
    int32_t format = MLA_FORMAT_NONE;
    if (stored->rank < 1 || stored->rank > MLA_MAX_RANK) {
        cli_refuse("%s: tensor %s has rank %d; ranks 1 to %d are taken", file->path, stored->name,
                   (int)stored->rank, MLA_MAX_RANK);
        return false;
    }
    if (!format_of(file, stored, &format))
        return false;
    *t = mla_tensor_make(stored->data, format, stored->rank, stored->shape);
    if (format == MLA_FORMAT_I64 && is_i32_parameter(stored->name))
        return narrow_indices(file, stored, t);
    if (is_written) {
        t->data = op_file_buffer(file, (uint64_t)stored->size_bytes);
        if (t->data == NULL)
            return false;
        memcpy(t->data, stored->data, (size_t)stored->size_bytes);
    }
    return true;
}

static const op_tensor *row_tensor(const op_row *row, const char *name)
{
    for (int32_t i = 0; i < row->n_tensors; i++) {
        if (strcmp(row->tensors[i].name, name) == 0)
            return &row->tensors[i];
    }
    return NULL;
}

/* The states of a merge: out_a and lse_a, out_b and lse_b ..., or out_0 and lse_0 ... */
static const mlai_st_tensor *merge_state(const op_file *file, const char *stem, int32_t index)
{
    char name[16];
    const mlai_st_tensor *found = NULL;
    if (index < 26) {
        snprintf(name, sizeof name, "%s_%c", stem, 'a' + index);
        found = mlai_st_find(file->reader, name);
    }
    if (found == NULL) {
        snprintf(name, sizeof name, "%s_%d", stem, (int)index);
        found = mlai_st_find(file->reader, name);
    }
    return found;
}

static bool bind_merge_states(op_file *file, int64_t *n_used)
{
    int32_t n = 0;
    for (; n < MLA_MERGE_MAX_STATES; n++) {
        const mlai_st_tensor *out = merge_state(file, "out", n);
        const mlai_st_tensor *lse = merge_state(file, "lse", n);
        if (out == NULL && lse == NULL)
            break;
        if (out == NULL || lse == NULL) {
            cli_refuse("%s has tensor %s without its %s", file->path,
                       out != NULL ? out->name : lse->name, out != NULL ? "lse" : "out");
            return false;
        }
        if (!bind_tensor(file, out, &file->params.outs[n], false) ||
            !bind_tensor(file, lse, &file->params.lses[n], false))
            return false;
        *n_used += 2;
    }
    if (n == 0) {
        cli_refuse("%s has no tensors out_a and lse_a; merge takes out_a, lse_a, out_b, lse_b ...",
                   file->path);
        return false;
    }
    file->params.u.merge.n_states = n;
    return true;
}

static bool bind_tensors(op_file *file)
{
    const op_row *row = file->row;
    int64_t n_used = 0;
    for (int32_t i = 0; i < row->n_tensors; i++) {
        const op_tensor *spec = &row->tensors[i];
        const mlai_st_tensor *stored = mlai_st_find(file->reader, spec->name);
        n_used += stored != NULL;
        if (spec->role == OP_OUT)
            continue;
        bool is_required = spec->role == OP_IN || spec->role == OP_INOUT;
        if (stored == NULL && is_required) {
            cli_refuse("%s has no tensor %s; %s needs it", file->path, spec->name,
                       mla_op_name(row->op));
            return false;
        }
        bool is_written = spec->role == OP_INOUT || spec->role == OP_INOUT_OPT;
        if (stored != NULL &&
            !bind_tensor(file, stored, op_tensor_at(&file->params, spec->offset), is_written))
            return false;
    }
    if (row->op == MLA_OP_MERGE && !bind_merge_states(file, &n_used))
        return false;
    if (n_used == mlai_st_count(file->reader))
        return true;
    for (int64_t i = 0; i < mlai_st_count(file->reader); i++) {
        const char *name = mlai_st_at(file->reader, i)->name;
        bool is_state = row->op == MLA_OP_MERGE &&
                        (strncmp(name, "out_", 4) == 0 || strncmp(name, "lse_", 4) == 0);
        if (row_tensor(row, name) != NULL || (is_state && strlen(name) == 5))
            continue;
        cli_refuse("%s: %s has no tensor %.60s; see docs/op-files.md", file->path,
                   mla_op_name(row->op), name);
        return false;
    }
    cli_refuse("%s: the merge states must be numbered without a gap", file->path);
    return false;
}

/* ---- dims and pages ----------------------------------------------------------------------------
 */

/* The caches are [pages, page_size, width] or flat rows, [rows, width] or [rows, 1, width], with
 * page_size in the metadata. */
static bool page_cache(const op_file *file, mla_tensor *cache, const char *name, int64_t page_size)
{
    bool is_flat = cache->rank == 2 || (cache->rank == 3 && cache->shape[1] == 1);
    if (cache->rank == 0 || (page_size == 0 && cache->rank != 2))
        return true;
    if (is_flat) {
        int64_t size = page_size > 0 ? page_size : 1;
        if (cache->shape[0] % size != 0) {
            cli_refuse("%s: %s has %lld rows, which is no multiple of page_size %lld", file->path,
                       name, (long long)cache->shape[0], (long long)size);
            return false;
        }
        *cache = mla_tensor_3d(cache->data, cache->format, cache->shape[0] / size, size,
                               cache->shape[cache->rank - 1]);
        return true;
    }
    if (cache->rank >= 3 && cache->shape[1] != page_size) {
        cli_refuse("%s: %s has pages of %lld rows, but page_size is %lld", file->path, name,
                   (long long)cache->shape[1], (long long)page_size);
        return false;
    }
    return true;
}

static bool page_caches(op_file *file)
{
    int64_t page_size = 0;
    const char *text = mlai_st_metadata(file->reader, "page_size");
    if (text != NULL && !cli_int("page_size", text, 1, INT32_MAX, &page_size))
        return false;
    const op_tensor *cache = row_tensor(file->row, "kv_cache");
    const op_tensor *cache_rope = row_tensor(file->row, "kv_cache_rope");
    if (cache == NULL)
        return true;
    mla_tensor *t = op_tensor_at(&file->params, cache->offset);
    /* Slots do not depend on pages, so writes and gathers take flat rows as they are. */
    bool needs_pages = row_tensor(file->row, "page_table") != NULL;
    if (needs_pages && t->rank == 2 && page_size == 0) {
        cli_refuse("%s: kv_cache is [rows, width] and metadata page_size is missing", file->path);
        return false;
    }
    return page_cache(file, t, "kv_cache", page_size) &&
           page_cache(file, op_tensor_at(&file->params, cache_rope->offset), "kv_cache_rope",
                      page_size);
}

static int64_t width_of(const mla_tensor *t)
{
    return t->rank > 0 ? t->shape[t->rank - 1] : 0;
}

/*
 * kv_lora_rank and qk_rope_head_dim, where the metadata leaves them out: from tensors that are
 * split into latent and rope, from ds656 rows, or one of the two from the other and the joint
 * width.
 */
static bool fill_dims(const op_file *file, const mla_tensor *joint, const mla_tensor *rope,
                      const mla_tensor *cache, const mla_tensor *cache_rope, int32_t *rank,
                      int32_t *rope_dim)
{
    bool has_rank = mlai_st_metadata(file->reader, "kv_lora_rank") != NULL;
    bool has_rope = mlai_st_metadata(file->reader, "qk_rope_head_dim") != NULL;
    int64_t width = width_of(joint);
    if (has_rank && has_rope)
        return true;
    if (rope->rank > 0) {
        *rank = has_rank ? *rank : (int32_t)width;
        *rope_dim = has_rope ? *rope_dim : (int32_t)width_of(rope);
        return true;
    }
    if (has_rank || has_rope) {
        int64_t other = width - (has_rank ? *rank : *rope_dim);
        *(has_rank ? rope_dim : rank) = (int32_t)(other > 0 ? other : 0);
        return true;
    }
    if (cache->format == MLA_FORMAT_DS656) {
        *rank = 512;
        *rope_dim = 64;
        return true;
    }
    if (cache_rope->rank > 0) {
        *rank = (int32_t)width_of(cache);
        *rope_dim = (int32_t)width_of(cache_rope);
        return true;
    }
    cli_refuse("%s: metadata kv_lora_rank or qk_rope_head_dim is missing", file->path);
    return false;
}

/* Host-known bounds that a ragged call wants and that a file need not repeat. */
static int32_t largest_step(const mla_tensor *cumulative)
{
    int64_t largest = 0;
    const int32_t *at = cumulative->data;
    for (int64_t i = 1; cumulative->rank == 1 && i < cumulative->shape[0]; i++) {
        int64_t step = (int64_t)at[i] - at[i - 1];
        largest = step > largest ? step : largest;
    }
    return (int32_t)(largest < INT32_MAX ? largest : INT32_MAX);
}

static bool derive_dims(op_file *file)
{
    op_params *p = &file->params;
    mla_decode_params *decode = &p->u.decode;
    mla_write_kv_params *write = &p->u.write;
    mla_gather_kv_params *gather = &p->u.gather;
    mla_rope_write_kv_params *rope_write = &p->u.rope_write;
    switch (p->op) {
    case MLA_OP_DECODE:
    case MLA_OP_EXTEND:
        if (decode->cu_seqlens_q.format == MLA_FORMAT_I32 && decode->max_q_len == 0)
            decode->max_q_len = largest_step(&decode->cu_seqlens_q);
        return fill_dims(file, &decode->q, &decode->q_rope, &decode->kv_cache,
                         &decode->kv_cache_rope, &decode->kv_lora_rank, &decode->qk_rope_head_dim);
    case MLA_OP_WRITE:
        return fill_dims(file, &write->latent, &write->rope, &write->kv_cache,
                         &write->kv_cache_rope, &write->kv_lora_rank, &write->qk_rope_head_dim);
    case MLA_OP_GATHER:
        return fill_dims(file, &gather->kv_cache, &gather->kv_cache_rope, &gather->kv_cache,
                         &gather->kv_cache_rope, &gather->kv_lora_rank, &gather->qk_rope_head_dim);
    case MLA_OP_ROPE_WRITE:
        return fill_dims(file, &rope_write->latent, &rope_write->k_pe, &rope_write->kv_cache,
                         &rope_write->kv_cache_rope, &rope_write->kv_lora_rank,
                         &rope_write->qk_rope_head_dim);
    default:
        return true;
    }
}

bool op_file_bind(op_file *file)
{
    mla_diag diag = {{0}};
    mla_status status = mlai_st_open(file->path, &file->reader, &diag);
    if (status != MLA_OK) {
        cli_refuse_status(status, &diag);
        return false;
    }
    op_init(file->row, &file->params);
    return bind_tensors(file) && read_scalars(file) && page_caches(file) && derive_dims(file);
}
