/*
 * Reading a baseline file (baseline.h). Values hold no commas and no quotes.
 */
#include "baseline.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BYTES (1u << 20)
#define MAX_FIELDS 32

typedef enum column {
    COLUMN_OP,
    COLUMN_BATCH,
    COLUMN_HEADS,
    COLUMN_Q_LEN,
    COLUMN_KV_LEN,
    COLUMN_US,
    N_REQUIRED,
    COLUMN_PEER = N_REQUIRED,
    COLUMN_DTYPE,
    COLUMN_KV_DTYPE,
    COLUMN_PAGE_SIZE,
    COLUMN_CAUSAL,
    N_COLUMNS
} column;

static const char *const column_names[N_COLUMNS] = {
    "op",   "batch", "heads",    "q_len",     "kv_len", "us_per_layer_call",
    "peer", "dtype", "kv_dtype", "page_size", "causal"};

/* The workload option that takes a column's text; 0 = none. */
static const int column_options[N_COLUMNS] = {
    [COLUMN_BATCH] = WORKLOAD_OPT_BATCH,         [COLUMN_HEADS] = WORKLOAD_OPT_HEADS,
    [COLUMN_Q_LEN] = WORKLOAD_OPT_Q_LEN,         [COLUMN_KV_LEN] = WORKLOAD_OPT_KV_LEN,
    [COLUMN_DTYPE] = WORKLOAD_OPT_DTYPE,         [COLUMN_KV_DTYPE] = WORKLOAD_OPT_KV_DTYPE,
    [COLUMN_PAGE_SIZE] = WORKLOAD_OPT_PAGE_SIZE, [COLUMN_CAUSAL] = WORKLOAD_OPT_CAUSAL};

/* Cuts a line at its commas. */
static int32_t split(char *line, char **fields)
{
    int32_t n = 0;
    for (char *at = line; at != NULL && n < MAX_FIELDS;) {
        char *comma = strchr(at, ',');
        fields[n++] = at;
        if (comma != NULL)
            *comma++ = '\0';
        at = comma;
    }
    return n;
}

/* place[c]: which field holds column c, -1 = none. */
static bool read_header(const char *name, char *line, int32_t *place)
{
    char *fields[MAX_FIELDS];
    int32_t n = split(line, fields);
    for (int c = 0; c < N_COLUMNS; c++) {
        place[c] = -1;
        for (int32_t i = 0; i < n; i++) {
            if (strcmp(fields[i], column_names[c]) == 0)
                place[c] = i;
        }
        if (place[c] < 0 && c < N_REQUIRED) {
            cli_refuse("%s has no column %s in its first line", name, column_names[c]);
            return false;
        }
    }
    return true;
}

static bool read_row(const char *name, int line, char *const *fields, int32_t n,
                     const int32_t *place, baseline_row *row)
{
    const char *text[N_COLUMNS];
    for (int c = 0; c < N_COLUMNS; c++) {
        text[c] = place[c] >= 0 && place[c] < n ? fields[place[c]] : "";
        if (text[c][0] == '\0' && c < N_REQUIRED) {
            cli_refuse("%s, line %d: no %s", name, line, column_names[c]);
            return false;
        }
    }
    int32_t op = mla_op_from_name(text[COLUMN_OP]);
    if (op_find(op) == NULL) {
        cli_refuse("%s, line %d: \"%.40s\" is no operator", name, line, text[COLUMN_OP]);
        return false;
    }
    row->w = workload_default(op);
    for (int c = 0; c < N_COLUMNS; c++) {
        if (column_options[c] == 0 || text[c][0] == '\0')
            continue;
        if (!workload_set(&row->w, column_options[c], text[c])) {
            cli_refuse("%s, line %d: the column %s is wrong", name, line, column_names[c]);
            return false;
        }
    }
    workload_settle(&row->w);
    if (!cli_parse_double(text[COLUMN_US], &row->us) || !(row->us > 0.0)) {
        cli_refuse("%s, line %d: %s is \"%.40s\"; it takes a number above 0", name, line,
                   column_names[COLUMN_US], text[COLUMN_US]);
        return false;
    }
    snprintf(row->peer, sizeof row->peer, "%s",
             text[COLUMN_PEER][0] != '\0' ? text[COLUMN_PEER] : "peer");
    return true;
}

static bool parse_lines(const char *name, char *text, baseline *out)
{
    int32_t place[N_COLUMNS];
    char *fields[MAX_FIELDS];
    int number = 0;
    for (char *at = text; at != NULL && *at != '\0';) {
        char *line = at;
        char *end = strchr(at, '\n');
        at = end != NULL ? end + 1 : NULL;
        if (end != NULL)
            *end = '\0';
        line[strcspn(line, "\r")] = '\0';
        number++;
        if (number == 1 && !read_header(name, line, place))
            return false;
        if (number == 1 || line[0] == '\0')
            continue;
        int32_t n = split(line, fields);
        if (!read_row(name, number, fields, n, place, &out->rows[out->n]))
            return false;
        out->n++;
    }
    if (out->n > 0)
        return true;
    cli_refuse("%s holds no row", name);
    return false;
}

bool baseline_parse(const char *name, const char *text, baseline *out)
{
    size_t lines = 1;
    for (const char *at = text; *at != '\0'; at++)
        lines += *at == '\n';
    size_t length = strlen(text);
    char *copy = malloc(length + 1);
    out->n = 0;
    out->rows = calloc(lines, sizeof *out->rows);
    bool good = copy != NULL && out->rows != NULL;
    if (good) {
        memcpy(copy, text, length + 1);
        good = parse_lines(name, copy, out);
    } else {
        cli_refuse("out of memory for %s", name);
    }
    free(copy);
    if (!good)
        baseline_free(out);
    return good;
}

bool baseline_read(const char *path, baseline *out)
{
    FILE *file = fopen(path, "rb");
    char *text = malloc(MAX_BYTES + 1);
    out->rows = NULL;
    out->n = 0;
    if (file == NULL || text == NULL) {
        cli_refuse("--against: %.200s could not be opened", path);
        free(text);
        if (file != NULL)
            fclose(file);
        return false;
    }
    size_t n = fread(text, 1, MAX_BYTES, file);
    bool good = !ferror(file) && feof(file);
    fclose(file);
    text[n] = '\0';
    if (!good)
        cli_refuse("--against: %.200s could not be read or is over 1 MiB", path);
    good = good && baseline_parse(path, text, out);
    free(text);
    return good;
}

void baseline_free(baseline *b)
{
    free(b->rows);
    b->rows = NULL;
    b->n = 0;
}

const baseline_row *baseline_find(const baseline *b, const workload *w)
{
    for (int32_t i = 0; i < b->n; i++) {
        const workload *theirs = &b->rows[i].w;
        if (theirs->op == w->op && theirs->batch == w->batch && theirs->heads == w->heads &&
            theirs->q_len == w->q_len && theirs->kv_len == w->kv_len &&
            theirs->is_causal == w->is_causal)
            return &b->rows[i];
    }
    return NULL;
}
