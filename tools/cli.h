/*
 * What every `mla` command shares: options, checked values, one sentence on an error, JSON lines.
 *
 * Exit statuses: 0 done; 1 the machine failed (output could not be written); 2 the request was
 * refused: bad arguments, bad files, a problem that no solution takes. A refusal prints one line
 * "mla: <sentence>" on stderr and nothing on stdout.
 *
 * Options are getopt_long's, long names only; "--name value" and "--name=value" are the same. A
 * value parser takes the whole text or refuses it; its sentence names the option, the value and
 * what is taken. The parsers return false after printing, so that a command reads
 *   if (!cli_int("--heads", optarg, 1, 65536, &heads)) return CLI_REFUSED;
 */
#ifndef MLA_TOOLS_CLI_H
#define MLA_TOOLS_CLI_H

#include <cjson/cJSON.h>
#include <getopt.h>
#include <mla/mla.h>
#include <stdbool.h>
#include <stdint.h>

#define CLI_OK 0
#define CLI_FAILED 1
#define CLI_REFUSED 2

/* What cli_next returns beside an option's own value. */
#define CLI_END (-1)
#define CLI_BAD (-2)

#if defined(__GNUC__)
#define CLI_PRINTF __attribute__((format(printf, 1, 2)))
#else
#define CLI_PRINTF
#endif

/* Prints "mla: <sentence>" on stderr, with '?' for what is no UTF-8 or would
 * move a terminal's cursor, and returns CLI_REFUSED. */
int cli_refuse(const char *format, ...) CLI_PRINTF;

/* The same for a status of the library: its sentence, or the status's own text when it is empty. */
int cli_refuse_status(mla_status status, const mla_diag *diag);

/*
 * The next option of argv (argv[0] is the command's name): its `val`, CLI_END when all are read, or
 * CLI_BAD after a sentence about an unknown option, a missing or an unwanted value, or a stray
 * argument. Values must lie above 255. optarg is the value.
 */
int cli_next(int argc, char **argv, const struct option *options);

/* Values. `low` and `high` are inclusive. */
bool cli_int(const char *option, const char *text, int64_t low, int64_t high, int64_t *out);
bool cli_double(const char *option, const char *text, double low, double high, double *out);
/* 1 true yes on / 0 false no off */
bool cli_bool(const char *option, const char *text, bool *out);
/* A format's spelling out of a set of bits 1 << MLA_FORMAT_x. */
bool cli_format(const char *option, const char *text, uint32_t formats, int32_t *out);
/* "cpu", "cuda" or "cuda:N" */
bool cli_device(const char *option, const char *text, int32_t *device_type, int32_t *device_index);

/* Whole-text number parsers without a message, for values that come from files. */
bool cli_parse_int(const char *text, int64_t *out);
bool cli_parse_double(const char *text, double *out);

/*
 * A context for a command: n_threads 0 = all cores, solution NULL = none forced. Prints the
 * sentence and returns NULL on failure. Other devices than the CPU are looked for only when one is
 * asked for.
 */
mla_context *cli_context(int64_t n_threads, const char *solution);
mla_context *cli_context_for(int32_t device_type, int64_t n_threads, const char *solution);

/* The same on all cores without regard to MLA_SOLUTION, for commands that only describe. */
mla_context *cli_context_unforced(void);

/* Prints the object as one line on stdout and deletes it. */
int cli_print_json(cJSON *object);

/* Commands, one a file. */
int mla_tool_generate(int argc, char **argv);
int mla_tool_logits(int argc, char **argv);
int mla_tool_op(int argc, char **argv);
int mla_tool_list(int argc, char **argv);
int mla_tool_why(int argc, char **argv);
int mla_tool_info(int argc, char **argv);
int mla_tool_bench(int argc, char **argv);

#endif
