/*
 * The GPU part of `mla bench` (cuda_command.h).
 */
#include "cuda_command.h"
#include "cuda_report.h"
#include <stdlib.h>
#include <string.h>

static bool make_room(cuda_command *c)
{
    if (c->n_rows + 2 <= c->room)
        return true;
    int32_t room = c->room > 0 ? 2 * c->room : 64;
    cuda_row *rows = realloc(c->rows, (size_t)room * sizeof *rows);
    if (rows == NULL) {
        cli_refuse("out of memory for %d rows", (int)room);
        return false;
    }
    c->rows = rows;
    c->room = room;
    return true;
}

/* The header stands once, above the first row. */
static bool open_device(cuda_command *c, int32_t index)
{
    if (c->bench.gpu != NULL) {
        if (c->bench.info.device_index == index)
            return true;
        cli_refuse("--device names cuda:%d and cuda:%d; one GPU a command",
                   (int)c->bench.info.device_index, (int)index);
        return false;
    }
    if (!cuda_bench_open(&c->bench, index, c->threads))
        return false;
    if (!c->as_json) {
        cuda_print_ceilings(stdout, &c->bench, cuda_gpu_driver(c->bench.gpu));
        cuda_print_header(stdout);
    }
    return true;
}

/* The rows outlive the caller's lengths. */
static bool keep_lengths(cuda_row *rows, int32_t n, const int64_t *lens, int64_t batch)
{
    if (lens == NULL)
        return true;
    for (int32_t i = 0; i < n; i++) {
        int64_t *copy = malloc((size_t)batch * sizeof *copy);
        if (copy != NULL)
            memcpy(copy, lens, (size_t)batch * sizeof *copy);
        rows[i].lens = copy;
        if (copy == NULL)
            return false;
    }
    return true;
}

static int measure(cuda_command *c, const workload *w, const int64_t *lens,
                   const baseline_row *peer)
{
    if (!make_room(c) || !open_device(c, w->device_index))
        return CLI_REFUSED;
    cuda_row *rows = &c->rows[c->n_rows];
    int32_t n = cuda_measure(&c->bench, w, lens, rows);
    int code = CLI_OK;
    if (!keep_lengths(rows, n, lens, w->batch)) {
        cli_refuse("out of memory for lengths");
        return CLI_REFUSED;
    }
    c->n_rows += n;
    for (int32_t i = 0; i < n; i++) {
        cuda_row *row = &rows[i];
        if (peer != NULL) {
            memcpy(row->peer, peer->peer, sizeof row->peer);
            row->peer_us = peer->us;
        }
        if (row->is_timed)
            cuda_row_finish(row, &c->bench.ceilings);
        else
            code = row->is_wrong ? CLI_FAILED : CLI_REFUSED;
        c->n_failed += !row->is_timed;
        if (c->as_json)
            cuda_print_json(row, &c->bench, cuda_gpu_driver(c->bench.gpu));
        else
            cuda_print_row(stdout, row);
    }
    fflush(stdout);
    return code;
}

int cuda_command_row(cuda_command *c, const workload *w, const int64_t *lens)
{
    int code = measure(c, w, lens, NULL);
    for (int32_t i = 0; code != CLI_OK && i < 2 && i < c->n_rows; i++) {
        const cuda_row *row = &c->rows[c->n_rows - 1 - i];
        if (!row->is_timed)
            cli_refuse("%s: %s", mla_op_name(row->w.op), row->reason);
    }
    return code;
}

static int measure_extras(cuda_command *c, const baseline *b, int32_t op, const workload *like)
{
    for (int32_t i = 0; i < cuda_n_extras; i++) {
        if (op != MLA_OP_NONE && cuda_extras[i].op != op)
            continue;
        workload w = cuda_extra_workload(&cuda_extras[i]);
        w.device_type = like->device_type;
        w.device_index = like->device_index;
        const int64_t *lens = cuda_extras[i].lens;
        measure(c, &w, lens, lens == NULL ? baseline_find(b, &w) : NULL);
        if (c->bench.gpu == NULL)
            return CLI_REFUSED;
    }
    return CLI_OK;
}

int cuda_command_against(cuda_command *c, const char *path, int32_t op, const workload *like)
{
    baseline b;
    if (!baseline_read(path, &b))
        return CLI_REFUSED;
    int code = CLI_OK;
    for (int32_t i = 0; code == CLI_OK && i < b.n; i++) {
        workload w = b.rows[i].w;
        if (op != MLA_OP_NONE && w.op != op)
            continue;
        w.device_type = like->device_type;
        w.device_index = like->device_index;
        measure(c, &w, NULL, &b.rows[i]);
        if (c->bench.gpu == NULL)
            code = CLI_REFUSED;
    }
    if (code == CLI_OK && c->with_extras)
        code = measure_extras(c, &b, op, like);
    baseline_free(&b);
    if (code == CLI_OK && c->n_rows == 0)
        code = cli_refuse("--against: %s has no row of %s", path, mla_op_name(op));
    if (code == CLI_OK && !c->as_json)
        cuda_print_groups(stdout, c->rows, c->n_rows);
    return code == CLI_OK && c->n_failed > 0 ? CLI_FAILED : code;
}

int cuda_command_end(cuda_command *c, int code)
{
    const char *driver = c->bench.gpu != NULL ? cuda_gpu_driver(c->bench.gpu) : "";
    if (c->n_rows > 0 && c->markdown != NULL &&
        !cuda_write_markdown(c->markdown, &c->bench, driver, c->rows, c->n_rows))
        code = CLI_REFUSED;
    if (c->n_rows > 0 && c->plot != NULL &&
        !cuda_plot(c->plot, c->bench.info.name, c->rows, c->n_rows))
        code = CLI_REFUSED;
    for (int32_t i = 0; i < c->n_rows; i++)
        free((void *)(uintptr_t)c->rows[i].lens);
    free(c->rows);
    cuda_bench_close(&c->bench);
    return code;
}
