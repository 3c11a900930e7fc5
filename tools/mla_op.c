/*
 * mla op: one operator on the tensors of a safetensors file, the way to send a report that others
 * can run. docs/op-files.md gives names, shapes and dtypes.
 *
 * Tensors are read by the operator's parameter names, scalars from the metadata map (texts, parsed
 * whole or refused). Names that the operator does not know are refused, since a misspelt optional
 * one would otherwise change the result in silence; tensors that carry the names of outputs are
 * ignored, so that a report may hold what its sender got. The result file has the outputs (for
 * writes the cache as it is afterwards) and in its metadata the operator, the solution that ran and
 * the library's version. It appears only when everything went well.
 */
#include "cli.h"
#include "device_memory.h"
#include "op_file.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool make_outputs(op_file *file)
{
    int32_t format = MLA_FORMAT_NONE;
    bool with_lse = true;
    const char *text = mlai_st_metadata(file->reader, "out_format");
    const uint32_t floats = 1u << MLA_FORMAT_F32 | 1u << MLA_FORMAT_BF16 | 1u << MLA_FORMAT_F16 |
                            1u << MLA_FORMAT_E4M3 | 1u << MLA_FORMAT_E5M2;
    if (text != NULL && !cli_format("out_format", text, floats, &format))
        return false;
    text = mlai_st_metadata(file->reader, "return_lse");
    if (text != NULL && !cli_bool("return_lse", text, &with_lse))
        return false;
    op_shape_outputs(&file->params, format, with_lse);
    for (int32_t i = 0; i < file->row->n_tensors; i++) {
        if (file->row->tensors[i].role != OP_OUT)
            continue;
        mla_tensor *t = op_tensor_at(&file->params, file->row->tensors[i].offset);
        uint64_t bytes = 0;
        if (t->rank == 0)
            continue;
        if (!op_tensor_bytes(t, &bytes)) {
            cli_refuse("%s: the shape of output %s does not fit memory", file->path,
                       file->row->tensors[i].name);
            return false;
        }
        t->data = op_file_buffer(file, bytes);
        if (t->data == NULL)
            return false;
        memset(t->data, 0, (size_t)bytes);
    }
    return true;
}

/* A tensor's memory on both sides. */
typedef struct mirror {
    mla_tensor *t;
    void *host;
    uint64_t bytes;
    bool is_written;
} mirror;

/* Where the call's memory lies: on the host, or mirrored on a GPU. */
typedef struct placement {
    device_memory *device; /* NULL = the host */
    mirror mirrors[OP_FILE_MAX_BUFFERS];
    int32_t n;
} placement;

static void send_tensor(placement *place, mla_tensor *t, op_role role)
{
    mirror *m = &place->mirrors[place->n++];
    *m = (mirror){t, t->data, 0, role != OP_IN && role != OP_IN_OPT};
    op_tensor_bytes(t, &m->bytes);
    t->data = device_alloc(place->device, m->bytes);
    device_upload(place->device, t->data, m->host, m->bytes);
    *t = mla_tensor_on(*t, MLA_DEVICE_CUDA, device_index(place->device));
}

/* Copies every tensor to the device and says in the parameters that it lies there. */
static void send_tensors(placement *place, op_file *file)
{
    for (int32_t i = 0; i < file->row->n_tensors; i++) {
        mla_tensor *t = op_tensor_at(&file->params, file->row->tensors[i].offset);
        if (t->rank > 0)
            send_tensor(place, t, file->row->tensors[i].role);
    }
    int32_t n_states = file->row->op == MLA_OP_MERGE ? file->params.u.merge.n_states : 0;
    for (int32_t i = 0; i < n_states; i++) {
        send_tensor(place, &file->params.outs[i], OP_IN);
        send_tensor(place, &file->params.lses[i], OP_IN);
    }
}

/* Brings back what was written; the parameters point at host memory again. */
static void fetch_tensors(placement *place)
{
    for (int32_t i = 0; i < place->n; i++) {
        mirror *m = &place->mirrors[i];
        if (m->is_written)
            device_download(place->device, m->host, m->t->data, m->bytes);
        device_free(place->device, m->t->data);
        m->t->data = m->host;
    }
}

static void *make_workspace(placement *place, op_file *file, uint64_t bytes)
{
    if (place->device == NULL)
        return op_file_buffer(file, bytes);
    void *memory = device_alloc(place->device, bytes);
    device_fill(place->device, memory, 0, bytes);
    return memory;
}

/* Runs the call on the device. Lengths, page ids, slots and positions are checked there: a GPU's
 * kernels only clamp what would be an error on the CPU. */
static mla_status run_on_device(placement *place, op_file *file, mla_context *ctx, mla_diag *diag)
{
    mla_device_error error;
    mla_call *call = op_call_of(file->row, &file->params);
    call->device_error = device_alloc(place->device, sizeof error);
    device_fill(place->device, call->device_error, 0, sizeof error);
    mla_status status = file->row->run(ctx, &file->params, diag);
    device_download(place->device, &error, call->device_error, sizeof error);
    device_free(place->device, call->device_error);
    return status == MLA_OK ? mla_device_error_status(&error, diag) : status;
}

/* Runs on ctx; *name is the solution that was chosen. */
static bool run_file(op_file *file, mla_context *ctx, placement *place, const char *solution,
                     const char **name)
{
    mla_diag diag = {{0}};
    mla_problem problem = MLA_PROBLEM_INIT;
    uint64_t bytes = 0;
    mla_call *call = op_call_of(file->row, &file->params);
    call->solution = solution;
    if (place->device != NULL) {
        send_tensors(place, file);
        call->stream = device_stream(place->device);
    }
    mla_status status = file->row->problem(&file->params, &problem, &diag);
    /* An empty problem needs no solution and no workspace. */
    bool is_empty = problem.tokens == 0 && problem.batch == 0;
    if (status == MLA_OK && !is_empty)
        status = mla_workspace_bytes(ctx, &problem, solution, &bytes, &diag);
    if (status == MLA_OK && !is_empty)
        status = mla_solution_choose(ctx, &problem, solution, name, &diag);
    if (status == MLA_OK && bytes > 0) {
        call->workspace = make_workspace(place, file, bytes);
        call->workspace_bytes = bytes;
        if (call->workspace == NULL)
            return false;
    }
    if (status == MLA_OK && place->device == NULL)
        status = file->row->run(ctx, &file->params, &diag);
    if (status == MLA_OK && place->device != NULL)
        status = run_on_device(place, file, ctx, &diag);
    if (place->device != NULL) {
        device_free(place->device, call->workspace);
        fetch_tensors(place);
    }
    if (status == MLA_OK)
        return true;
    cli_refuse_status(status, &diag);
    return false;
}

static int write_result(op_file *file, const char *path, const char *solution)
{
    mlai_st_tensor results[16];
    int64_t n = 0;
    for (int32_t i = 0; i < file->row->n_tensors; i++) {
        const op_tensor *spec = &file->row->tensors[i];
        const mla_tensor *t = op_tensor_at(&file->params, spec->offset);
        if (t->rank == 0 || spec->role == OP_IN || spec->role == OP_IN_OPT)
            continue;
        mlai_st_tensor *result = &results[n++];
        memset(result, 0, sizeof *result);
        if (spec->role == OP_OUT) {
            uint64_t bytes = 0;
            op_tensor_bytes(t, &bytes);
            result->dtype = mlai_st_dtype_from_format(t->format);
            result->rank = t->rank;
            memcpy(result->shape, t->shape, sizeof t->shape);
            result->size_bytes = (int64_t)bytes;
        } else {
            *result = *mlai_st_find(file->reader, spec->name);
        }
        result->name = spec->name;
        result->data = t->data;
    }
    const mlai_st_pair pairs[] = {{"op", mla_op_name(file->row->op)},
                                  {"solution", solution},
                                  {"libmla", mla_version_string()}};
    mla_diag diag = {{0}};
    mla_status status = mlai_st_write(path, results, n, pairs, 3, &diag);
    return status == MLA_OK ? CLI_OK : cli_refuse_status(status, &diag);
}

static void print_help(void)
{
    printf(
        "mla op decode|prefill|extend|merge|write|gather|rope|rope_write|absorb|project|pack\n"
        "       --in F.safetensors --out F.safetensors\n"
        "       [--solution NAME] [--threads N] [--device cpu|cuda[:N]]\n\n"
        "Runs one operator on the tensors and metadata of --in and writes its outputs to --out.\n"
        "docs/op-files.md gives the names, shapes and dtypes.\n");
}

enum { OPT_IN = 256, OPT_OUT, OPT_SOLUTION, OPT_THREADS, OPT_DEVICE, OPT_HELP };

static const struct option options[] = {
    {"in", required_argument, NULL, OPT_IN},
    {"out", required_argument, NULL, OPT_OUT},
    {"solution", required_argument, NULL, OPT_SOLUTION},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"device", required_argument, NULL, OPT_DEVICE},
    {"help", no_argument, NULL, OPT_HELP},
    {NULL, 0, NULL, 0},
};

/* Where and how the operator is run. */
typedef struct op_options {
    const char *out;
    const char *solution;
    int64_t threads;
    int32_t device_type;
    int32_t device_index;
} op_options;

static int run_op(op_file *file, const op_options *o)
{
    placement place = {.device = NULL};
    const char *name = "none";
    char why[256] = "";
    if (!op_file_bind(file) || !make_outputs(file))
        return CLI_REFUSED;
    mla_context *ctx = cli_context_for(o->device_type, o->threads, NULL);
    if (ctx == NULL)
        return CLI_REFUSED;
    int code = CLI_OK;
    if (o->device_type == MLA_DEVICE_CUDA) {
        place.device = device_open(o->device_index, why, sizeof why);
        if (place.device == NULL)
            code = cli_refuse("--device cuda:%d: %s", (int)o->device_index, why);
    }
    if (code == CLI_OK && !run_file(file, ctx, &place, o->solution, &name))
        code = CLI_REFUSED;
    if (code == CLI_OK)
        code = write_result(file, o->out, name);
    mla_context_destroy(ctx);
    device_close(place.device);
    return code;
}

int mla_tool_op(int argc, char **argv)
{
    op_options o = {.device_type = MLA_DEVICE_CPU};
    if (argc >= 2 && strcmp(argv[1], "--help") == 0) {
        print_help();
        return CLI_OK;
    }
    if (argc < 2 || op_find(mla_op_from_name(argv[1])) == NULL)
        return cli_refuse(
            "mla op takes an operator: decode, prefill, extend, merge, write, gather, "
            "rope, rope_write, absorb, project or pack");
    op_file *file = calloc(1, sizeof *file);
    if (file == NULL)
        return cli_refuse("out of memory");
    file->row = op_find(mla_op_from_name(argv[1]));
    int code = CLI_OK;
    optind = 2;
    for (int option; code == CLI_OK && (option = cli_next(argc, argv, options)) != CLI_END;) {
        if (option == OPT_HELP) {
            print_help();
            free(file);
            return CLI_OK;
        }
        if (option == OPT_IN)
            file->path = optarg;
        else if (option == OPT_OUT)
            o.out = optarg;
        else if (option == OPT_SOLUTION)
            o.solution = optarg;
        else if (option == CLI_BAD ||
                 (option == OPT_THREADS && !cli_int("--threads", optarg, 1, 1024, &o.threads)) ||
                 (option == OPT_DEVICE &&
                  !cli_device("--device", optarg, &o.device_type, &o.device_index)))
            code = CLI_REFUSED;
    }
    if (code == CLI_OK && (file->path == NULL || o.out == NULL))
        code = cli_refuse("mla op needs --in F.safetensors and --out F.safetensors");
    if (code == CLI_OK)
        code = run_op(file, &o);
    op_file_close(file);
    free(file);
    return code;
}
