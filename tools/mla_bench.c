/*
 * mla bench: verified timings of operators beside the machine's measured ceilings.
 *
 *   mla bench decode|prefill|extend|merge|write|gather|rope|rope_write|absorb|project|pack|all
 *
 * An option of the problem may list several values (--heads 16,128); every combination is a row.
 * "all" is a set of rows that covers every operator at sizes that matter. A row that does not
 * verify is not timed: the sentence on stderr says by how much it is off, the other rows go on and
 * the exit status is 1. bench/measure.h says how a row is timed.
 */
#include "mla_bench.h"
#include "cli.h"
#include "cuda_command.h"
#include "formats.h"
#include "report.h"
#include "workload.h"
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_VALUES 32
#define MAX_ROWS 1024
#define MAX_LENGTHS_FILE_BYTES (16u << 20)

/* The values given for one option of the problem. */
typedef struct axis {
    int option;
    int32_t n;
    char *values[MAX_VALUES];
} axis;

#define N_AXES (WORKLOAD_OPTION_END - WORKLOAD_OPTION_FIRST)

typedef struct bench_command {
    axis axes[N_AXES];
    int64_t threads;
    bool as_json;
    bool is_cold_given;
    bool has_cpu_options; /* --cold, --rounds or --seconds */
    const char *plot;
    const char *against;
    cuda_command cuda;
    const char *lengths;
    int64_t *lens; /* from --lengths, or NULL */
    int64_t n_lens;
    bench_settings settings;
    mla_device_info device;
    mla_context *ctx;
    bench_row *rows;
    int32_t n_rows;
    int32_t n_failed;
} bench_command;

/* ---- lengths ------------------------------------------------------------------------------- */

/* loguniform:LOW:HIGH[:SEED]: as many lengths as the batch, log-uniform between the two. */
static bool draw_lengths(bench_command *c, const char *text, int64_t batch)
{
    long long low = 0;
    long long high = 0;
    long long seed = (long long)c->settings.seed;
    int used = 0;
    int fields = sscanf(text, "loguniform:%lld:%lld%n:%lld%n", &low, &high, &used, &seed, &used);
    if (fields < 2 || text[used] != '\0' || low < 1 || high < low || high > INT32_MAX) {
        cli_refuse("--lengths is \"%.60s\"; it takes a file or loguniform:LOW:HIGH[:SEED]", text);
        return false;
    }
    uint64_t state = (uint64_t)seed * 2 + 1;
    c->lens = malloc((size_t)batch * sizeof *c->lens);
    if (c->lens == NULL) {
        cli_refuse("out of memory for %lld lengths", (long long)batch);
        return false;
    }
    for (int64_t i = 0; i < batch; i++) {
        double at =
            log((double)low) + (log((double)high) - log((double)low)) * bench_random_unit(&state);
        c->lens[i] = llround(exp(at));
    }
    c->n_lens = batch;
    fprintf(stderr, "mla: %lld lengths, log-uniform %lld to %lld, seed %lld\n", (long long)batch,
            low, high, seed);
    return true;
}

/* Whole numbers separated by anything that is no digit, so that a JSON array will do. */
static bool parse_lengths(bench_command *c, const char *text)
{
    int64_t room = 0;
    for (const char *at = text; *at != '\0'; at++)
        room += isdigit((unsigned char)*at) && !isdigit((unsigned char)at[1]);
    c->lens = malloc((size_t)(room + 1) * sizeof *c->lens);
    if (c->lens == NULL) {
        cli_refuse("out of memory for %lld lengths", (long long)room);
        return false;
    }
    for (const char *at = text; *at != '\0';) {
        if (!isdigit((unsigned char)*at)) {
            if (strchr(" \t\r\n,;[]", *at) == NULL) {
                cli_refuse("--lengths: %.60s holds the character '%c'; it takes whole numbers",
                           c->lengths, *at);
                return false;
            }
            at++;
            continue;
        }
        char *end = NULL;
        long long value = strtoll(at, &end, 10);
        if (value > INT32_MAX) {
            cli_refuse("--lengths: %.60s holds %lld; lengths are below 2^31", c->lengths, value);
            return false;
        }
        c->lens[c->n_lens++] = value;
        at = end;
    }
    if (c->n_lens > 0)
        return true;
    cli_refuse("--lengths: %.60s holds no number", c->lengths);
    return false;
}

static bool read_lengths(bench_command *c, int64_t batch)
{
    if (strncmp(c->lengths, "loguniform:", 11) == 0)
        return draw_lengths(c, c->lengths, batch);
    FILE *file = fopen(c->lengths, "rb");
    char *text = malloc(MAX_LENGTHS_FILE_BYTES + 1);
    if (file == NULL || text == NULL) {
        cli_refuse("--lengths: %.200s could not be opened", c->lengths);
        free(text);
        if (file != NULL)
            fclose(file);
        return false;
    }
    size_t n = fread(text, 1, MAX_LENGTHS_FILE_BYTES, file);
    bool good = !ferror(file) && feof(file);
    text[n] = '\0';
    fclose(file);
    if (!good)
        cli_refuse("--lengths: %.200s could not be read or is over 16 MiB", c->lengths);
    good = good && parse_lengths(c, text);
    free(text);
    return good;
}

/* ---- rows ---------------------------------------------------------------------------------- */

static int run_row(bench_command *c, workload w, const int64_t *lens)
{
    workload_settle(&w);
    if (lens != NULL) {
        w.kv_len = 0;
        for (int64_t i = 0; i < w.batch; i++)
            w.kv_len = lens[i] > w.kv_len ? lens[i] : w.kv_len;
    }
    if (w.device_type == MLA_DEVICE_CUDA)
        return cuda_command_row(&c->cuda, &w, lens);
    if (c->n_rows == MAX_ROWS)
        return cli_refuse("more than %d rows", MAX_ROWS);
    bench_row *row = &c->rows[c->n_rows];
    if (!bench_measure(c->ctx, &w, lens, &c->settings, row)) {
        c->n_failed++;
        return row->verdict.n_samples > 0 && !row->verdict.is_good ? CLI_FAILED : CLI_REFUSED;
    }
    c->n_rows++;
    int code = CLI_OK;
    if (c->as_json) {
        code = bench_print_json(row, c->device.name, c->settings.seed);
    } else {
        if (c->n_rows == 1)
            bench_print_header();
        bench_print_row(row);
    }
    fflush(stdout);
    row->lens = NULL; /* they belong to the caller and end with it */
    return code;
}

/* Every combination of the listed values, the last option running fastest. */
static int run_combinations(bench_command *c, workload w, int32_t from)
{
    while (from < N_AXES && c->axes[from].n == 0)
        from++;
    if (from == N_AXES) {
        if (c->lengths == NULL)
            return run_row(c, w, NULL);
        int code = CLI_REFUSED;
        c->n_lens = 0;
        if (read_lengths(c, w.batch)) {
            w.batch = c->n_lens;
            code = run_row(c, w, c->lens);
        }
        free(c->lens);
        c->lens = NULL;
        return code;
    }
    for (int32_t i = 0; i < c->axes[from].n; i++) {
        workload next = w;
        if (!workload_set(&next, c->axes[from].option, c->axes[from].values[i]))
            return CLI_REFUSED;
        int code = run_combinations(c, next, from + 1);
        /* A wrong solution is told and passed over; a refused request ends the command. */
        if (code == CLI_REFUSED)
            return code;
    }
    return CLI_OK;
}

typedef struct suite_row {
    int32_t op;
    int64_t heads, batch, q_len, kv_len;
    int32_t dtype, kv_dtype;
    bool is_cold;
} suite_row;

/* The rows of "all". kv_len 0 = as many as q_len. */
static const suite_row suite[] = {
    {MLA_OP_DECODE, 128, 1, 1, 4096, MLA_FORMAT_BF16, MLA_FORMAT_BF16, false},
    {MLA_OP_DECODE, 128, 1, 1, 16384, MLA_FORMAT_BF16, MLA_FORMAT_BF16, false},
    {MLA_OP_DECODE, 16, 1, 1, 4096, MLA_FORMAT_BF16, MLA_FORMAT_BF16, false},
    {MLA_OP_DECODE, 16, 1, 1, 16384, MLA_FORMAT_BF16, MLA_FORMAT_BF16, false},
    {MLA_OP_DECODE, 16, 1, 1, 4096, MLA_FORMAT_BF16, MLA_FORMAT_BF16, true},
    {MLA_OP_DECODE, 4, 1, 1, 4096, MLA_FORMAT_BF16, MLA_FORMAT_BF16, true},
    {MLA_OP_DECODE, 4, 1, 1, 4096, MLA_FORMAT_BF16, MLA_FORMAT_E4M3, true},
    {MLA_OP_DECODE, 128, 1, 1, 4096, MLA_FORMAT_BF16, MLA_FORMAT_E4M3, false},
    {MLA_OP_DECODE, 128, 1, 1, 4096, MLA_FORMAT_BF16, MLA_FORMAT_DS656, false},
    {MLA_OP_DECODE, 128, 1, 1, 4096, MLA_FORMAT_F16, MLA_FORMAT_F16, false},
    {MLA_OP_DECODE, 128, 1, 1, 4096, MLA_FORMAT_F32, MLA_FORMAT_F32, false},
    {MLA_OP_DECODE, 16, 1, 4, 4096, MLA_FORMAT_BF16, MLA_FORMAT_BF16, false},
    {MLA_OP_EXTEND, 16, 1, 128, 4096, MLA_FORMAT_BF16, MLA_FORMAT_BF16, false},
    {MLA_OP_PREFILL, 16, 1, 2048, 0, MLA_FORMAT_BF16, MLA_FORMAT_BF16, false},
    {MLA_OP_PREFILL, 16, 1, 1024, 0, MLA_FORMAT_F32, MLA_FORMAT_F32, false},
    {MLA_OP_MERGE, 16, 1, 4096, 0, MLA_FORMAT_BF16, MLA_FORMAT_BF16, true},
    {MLA_OP_WRITE, 16, 1, 16384, 0, MLA_FORMAT_BF16, MLA_FORMAT_BF16, true},
    {MLA_OP_WRITE, 16, 1, 16384, 0, MLA_FORMAT_BF16, MLA_FORMAT_E4M3, true},
    {MLA_OP_GATHER, 16, 1, 16384, 16384, MLA_FORMAT_BF16, MLA_FORMAT_BF16, true},
    {MLA_OP_ROPE, 16, 1, 16384, 0, MLA_FORMAT_BF16, MLA_FORMAT_BF16, true},
    {MLA_OP_ROPE_WRITE, 16, 1, 16384, 0, MLA_FORMAT_BF16, MLA_FORMAT_BF16, true},
    {MLA_OP_PACK, 16, 1, 4096, 0, MLA_FORMAT_BF16, MLA_FORMAT_BF16, true},
    {MLA_OP_ABSORB, 16, 1, 1024, 0, MLA_FORMAT_BF16, MLA_FORMAT_BF16, false},
    {MLA_OP_PROJECT, 16, 1, 1024, 0, MLA_FORMAT_BF16, MLA_FORMAT_BF16, false},
};

static int run_suite(bench_command *c)
{
    bool is_cold = c->settings.is_cold;
    for (size_t i = 0; i < sizeof suite / sizeof *suite; i++) {
        const suite_row *s = &suite[i];
        workload w = workload_default(s->op);
        w.heads = s->heads;
        w.batch = s->batch;
        w.q_len = s->q_len;
        if (s->kv_len > 0)
            w.kv_len = s->kv_len;
        w.dtype = s->dtype;
        w.kv_dtype = s->kv_dtype;
        c->settings.is_cold = c->is_cold_given ? is_cold : s->is_cold;
        if (run_combinations(c, w, 0) == CLI_REFUSED)
            return CLI_REFUSED;
    }
    return CLI_OK;
}

/* ---- the command --------------------------------------------------------------------------- */

static void print_help(void)
{
    printf("mla bench decode|prefill|extend|merge|write|gather|rope|rope_write|absorb|project|pack|"
           "all\n\n"
           "  --heads H --kv-heads H --batch B --q-len L --kv-len K --page-size P\n"
           "  --rank R --rope-dim P --nope-dim N --v-dim V --dtype FORMAT --kv-dtype FORMAT\n"
           "  --causal 0|1 --logit-cap C         each may list values: --heads 16,128\n"
           "  --lengths F                        keys of each request: a file of numbers, or\n"
           "                                     loguniform:LOW:HIGH[:SEED] for --batch requests\n"
           "  --cold [0|1]                       rotate over more data than the caches hold\n"
           "  --rounds N --seconds S             rounds, and seconds of work in all (7, 0.7)\n"
           "  --solution NAME --threads N --seed N --device cpu|cuda[:N]\n"
           "  --json                             a JSON line for each row\n"
           "  --plot F.svg                       the rows on the measured roofline\n\n"
           "mla bench [OPERATOR] --device cuda[:N] --against F.csv\n\n"
           "  every row of the file beside its peer, with bars; --plot draws both\n"
           "  --extra                            also the rows that the bars need and no file has\n"
           "  --also NAME                        a second solution on each attention row\n"
           "  --markdown F.md                    the tables as Markdown\n");
}

static bool add_values(axis *a, int option, char *text)
{
    a->option = option;
    a->n = 0;
    for (char *at = strtok(text, ","); at != NULL; at = strtok(NULL, ",")) {
        if (a->n == MAX_VALUES) {
            cli_refuse("%s lists more than %d values", workload_option_name(option), MAX_VALUES);
            return false;
        }
        a->values[a->n++] = at;
    }
    if (a->n > 0)
        return true;
    cli_refuse("%s has no value", workload_option_name(option));
    return false;
}

enum {
    OPT_THREADS = 256,
    OPT_COLD,
    OPT_SOLUTION,
    OPT_JSON,
    OPT_PLOT,
    OPT_LENGTHS,
    OPT_ROUNDS,
    OPT_SECONDS,
    OPT_SEED,
    OPT_AGAINST,
    OPT_EXTRA,
    OPT_ALSO,
    OPT_MARKDOWN,
    OPT_HELP
};

static const struct option options[] = {
    WORKLOAD_OPTIONS,
    {"threads", required_argument, NULL, OPT_THREADS},
    {"cold", optional_argument, NULL, OPT_COLD},
    {"solution", required_argument, NULL, OPT_SOLUTION},
    {"json", no_argument, NULL, OPT_JSON},
    {"plot", required_argument, NULL, OPT_PLOT},
    {"lengths", required_argument, NULL, OPT_LENGTHS},
    {"rounds", required_argument, NULL, OPT_ROUNDS},
    {"seconds", required_argument, NULL, OPT_SECONDS},
    {"seed", required_argument, NULL, OPT_SEED},
    {"against", required_argument, NULL, OPT_AGAINST},
    {"extra", no_argument, NULL, OPT_EXTRA},
    {"also", required_argument, NULL, OPT_ALSO},
    {"markdown", required_argument, NULL, OPT_MARKDOWN},
    {"help", no_argument, NULL, OPT_HELP},
    {NULL, 0, NULL, 0},
};

/* False after a sentence. */
static bool take_option(bench_command *c, int option, char *text)
{
    int64_t integer = 0;
    workload trial = workload_default(MLA_OP_DECODE);
    switch (option) {
    case OPT_THREADS:
        return cli_int("--threads", text, 1, 1024, &c->threads);
    case OPT_COLD:
        c->is_cold_given = true;
        c->has_cpu_options = true;
        c->settings.is_cold = true;
        return text == NULL || cli_bool("--cold", text, &c->settings.is_cold);
    case OPT_SOLUTION:
        c->settings.solution = text;
        return true;
    case OPT_JSON:
        c->as_json = true;
        return true;
    case OPT_PLOT:
        c->plot = text;
        return true;
    case OPT_LENGTHS:
        c->lengths = text;
        return true;
    case OPT_ROUNDS:
        c->has_cpu_options = true;
        if (!cli_int("--rounds", text, 1, 1000, &integer))
            return false;
        c->settings.rounds = (int32_t)integer;
        return true;
    case OPT_SECONDS:
        c->has_cpu_options = true;
        return cli_double("--seconds", text, 0.0, 3600.0, &c->settings.seconds);
    case OPT_SEED:
        if (!cli_int("--seed", text, 0, INT64_C(1) << 53, &integer))
            return false;
        c->settings.seed = (uint64_t)integer;
        return true;
    case OPT_AGAINST:
        c->against = text;
        return true;
    case OPT_EXTRA:
        c->cuda.with_extras = true;
        return true;
    case OPT_ALSO:
        c->cuda.bench.also = text;
        return true;
    case OPT_MARKDOWN:
        c->cuda.markdown = text;
        return true;
    default:
        break;
    }
    if (option < WORKLOAD_OPTION_FIRST)
        return false;
    axis *a = &c->axes[option - WORKLOAD_OPTION_FIRST];
    if (!add_values(a, option, text))
        return false;
    /* All values are looked at now, so that a mistake in the last does not cost the first rows. */
    for (int32_t i = 0; i < a->n; i++) {
        if (!workload_set(&trial, option, a->values[i]))
            return false;
    }
    return true;
}

/* Ceilings that the machine did not reach make shares look better than they are. */
static void tell_disturbance(const bench_command *c)
{
    int32_t n = 0;
    double least = 0.0;
    for (int32_t i = 0; i < c->n_rows; i++) {
        const bench_row *row = &c->rows[i];
        if (!row->is_disturbed)
            continue;
        least = n == 0 ? row->dot_flop_per_cycle : fmin(least, row->dot_flop_per_cycle);
        n++;
    }
    if (n > 0)
        fprintf(stderr,
                "mla: the machine is disturbed: in %d of %d rows the bf16 dot stayed under 0.95 of "
                "%.0f FLOP a cycle a thread (least %.1f)\n",
                (int)n, (int)c->n_rows, bench_dot_flop_per_cycle(), least);
}

/* Which devices the rows run on. */
typedef struct devices {
    bool has_cpu, has_cuda;
    workload cuda; /* with the last GPU named */
} devices;

static devices named_devices(const bench_command *c)
{
    devices d = {.cuda = workload_default(MLA_OP_DECODE)};
    const axis *a = &c->axes[WORKLOAD_OPT_DEVICE - WORKLOAD_OPTION_FIRST];
    for (int32_t i = 0; i < a->n; i++) {
        workload w = workload_default(MLA_OP_DECODE);
        workload_set(&w, WORKLOAD_OPT_DEVICE, a->values[i]);
        if (w.device_type == MLA_DEVICE_CUDA)
            d.cuda = w;
        d.has_cuda = d.has_cuda || w.device_type == MLA_DEVICE_CUDA;
        d.has_cpu = d.has_cpu || w.device_type == MLA_DEVICE_CPU;
    }
    d.has_cpu = d.has_cpu || a->n == 0;
    return d;
}

/* Options that do not go together. */
static bool check_options(const bench_command *c, const devices *d, int32_t op, bool is_all)
{
    int32_t n_axes = 0;
    for (int32_t i = 0; i < N_AXES; i++)
        n_axes += c->axes[i].n > 0 && i != WORKLOAD_OPT_DEVICE - WORKLOAD_OPTION_FIRST;
    bool wants_cuda = c->against != NULL || c->cuda.with_extras || c->cuda.bench.also != NULL ||
                      c->cuda.markdown != NULL;
    if (wants_cuda && (!d->has_cuda || d->has_cpu))
        cli_refuse("--against, --extra, --also and --markdown need --device cuda, alone");
    else if (d->has_cpu && d->has_cuda)
        cli_refuse("--device takes cpu or cuda[:N], one a command");
    else if (c->has_cpu_options && d->has_cuda)
        cli_refuse("--cold, --rounds and --seconds are for the CPU; a GPU replays a graph 20 times "
                   "on the same tensors");
    else if (c->cuda.with_extras && c->against == NULL)
        cli_refuse("--extra goes with --against");
    else if (c->against != NULL && (n_axes > 0 || c->lengths != NULL || is_all))
        cli_refuse("--against takes its problems from the file; leave out \"all\" and the options "
                   "of the problem");
    else if (c->against == NULL && !is_all && op == MLA_OP_NONE)
        cli_refuse("mla bench takes an operator, all, or --against F.csv");
    else
        return true;
    return false;
}

static int run_problems(bench_command *c, int32_t op)
{
    return op == MLA_OP_NONE ? run_suite(c) : run_combinations(c, workload_default(op), 0);
}

static int run_on_cpu(bench_command *c, int32_t op)
{
    c->ctx = cli_context(c->threads, NULL);
    c->rows = calloc(MAX_ROWS, sizeof *c->rows);
    if (c->ctx == NULL || c->rows == NULL) {
        free(c->rows);
        return CLI_REFUSED;
    }
    c->device = (mla_device_info)MLA_DEVICE_INFO_INIT;
    mla_context_describe_device(c->ctx, MLA_DEVICE_CPU, 0, &c->device, NULL);
    int code = run_problems(c, op);
    if (code == CLI_OK && c->n_failed > 0)
        code = CLI_FAILED;
    tell_disturbance(c);
    if (c->plot != NULL && c->n_rows > 0 && code != CLI_REFUSED &&
        !bench_plot(c->plot, c->rows, c->n_rows, c->device.name))
        code = CLI_REFUSED;
    free(c->rows);
    mla_context_destroy(c->ctx);
    return code;
}

static int run_on_cuda(bench_command *c, int32_t op, const workload *like)
{
    c->cuda.threads = c->threads;
    c->cuda.as_json = c->as_json;
    c->cuda.plot = c->plot;
    c->cuda.bench.seed = c->settings.seed;
    c->cuda.bench.solution = c->settings.solution;
    int code = c->against != NULL ? cuda_command_against(&c->cuda, c->against, op, like)
                                  : run_problems(c, op);
    if (code == CLI_OK && c->cuda.n_failed > 0)
        code = CLI_FAILED;
    return cuda_command_end(&c->cuda, code);
}

int mla_bench_run(int argc, char **argv, const bench_peer *const *peers, int32_t n_peers)
{
    bench_command command = {
        .settings = {.rounds = 7, .seconds = 0.7, .seed = 1, .peers = peers, .n_peers = n_peers}};
    if (argc >= 2 && strcmp(argv[1], "--help") == 0) {
        print_help();
        return CLI_OK;
    }
    /* The operator may be left out before options only: --against then takes all of its rows. */
    bool has_word = argc >= 2 && strncmp(argv[1], "--", 2) != 0;
    bool is_all = has_word && strcmp(argv[1], "all") == 0;
    int32_t op = has_word ? mla_op_from_name(argv[1]) : MLA_OP_NONE;
    if (has_word && !is_all && op_find(op) == NULL)
        return cli_refuse("mla bench takes an operator or all: decode, prefill, extend, merge, "
                          "write, gather, rope, rope_write, absorb, project, pack");
    optind = has_word ? 2 : 1;
    for (int option; (option = cli_next(argc, argv, options)) != CLI_END;) {
        if (option == OPT_HELP) {
            print_help();
            return CLI_OK;
        }
        if (option == CLI_BAD || !take_option(&command, option, optarg))
            return CLI_REFUSED;
    }
    devices d = named_devices(&command);
    if (!check_options(&command, &d, op, is_all))
        return CLI_REFUSED;
    return d.has_cuda ? run_on_cuda(&command, op, &d.cuda) : run_on_cpu(&command, op);
}

int mla_tool_bench(int argc, char **argv)
{
    return mla_bench_run(argc, argv, NULL, 0);
}
