/*
 * Options, values and messages of the `mla` commands; see cli.h for the rules.
 */
#include "cli.h"
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Long enough for a diag text with a file name around it. */
#define SENTENCE_BYTES 1024

/* Bytes of the UTF-8 character at text, 0 when it is none. Overlong forms and surrogates are none.
 */
static int utf8_length(const unsigned char *text)
{
    unsigned char lead = text[0];
    int n = lead < 0x80   ? 1
            : lead < 0xc2 ? 0
            : lead < 0xe0 ? 2
            : lead < 0xf0 ? 3
            : lead < 0xf5 ? 4
                          : 0;
    for (int i = 1; i < n; i++) {
        if ((text[i] & 0xc0) != 0x80)
            return 0;
    }
    if ((lead == 0xe0 && text[1] < 0xa0) || (lead == 0xed && text[1] > 0x9f) ||
        (lead == 0xf0 && text[1] < 0x90) || (lead == 0xf4 && text[1] > 0x8f))
        return 0;
    return n;
}

/* Sentences may quote names out of files: what is no text or moves a terminal's cursor becomes '?'.
 */
static void print_sentence(char *text)
{
    unsigned char *at = (unsigned char *)text;
    while (*at != '\0') {
        int n = utf8_length(at);
        bool is_control = *at < 0x20 || *at == 0x7f || (*at == 0xc2 && n == 2 && at[1] < 0xa0);
        if (n == 0 || is_control)
            memset(at, '?', (size_t)(n > 0 ? n : 1));
        at += n > 0 ? n : 1;
    }
    fprintf(stderr, "mla: %s\n", text);
}

int cli_refuse(const char *format, ...)
{
    char text[SENTENCE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    print_sentence(text);
    return CLI_REFUSED;
}

int cli_refuse_status(mla_status status, const mla_diag *diag)
{
    if (diag != NULL && diag->text[0] != '\0')
        return cli_refuse("%s", diag->text);
    return cli_refuse("%s", mla_status_message(status));
}

/* The option that getopt stopped at: "--name" without its "=value". */
static void option_text(char *const *argv, char *text, size_t text_bytes)
{
    const char *word = optind > 0 ? argv[optind - 1] : "";
    snprintf(text, text_bytes, "%.80s", word);
    char *equals = strchr(text, '=');
    if (equals != NULL && strncmp(text, "--", 2) == 0)
        *equals = '\0';
}

int cli_next(int argc, char **argv, const struct option *options)
{
    char text[96];
    opterr = 0;
    /* '+': stop at the first word that is no option, so that it can be named; ':': tell a missing
     * value from an unknown option. */
    int value = getopt_long(argc, argv, "+:", options, NULL);
    if (value == -1) {
        if (optind < argc) {
            cli_refuse("%s takes no argument %.80s; options begin with --", argv[0], argv[optind]);
            return CLI_BAD;
        }
        return CLI_END;
    }
    if (value == ':') {
        option_text(argv, text, sizeof text);
        cli_refuse("%s needs a value", text);
        return CLI_BAD;
    }
    if (value == '?') {
        option_text(argv, text, sizeof text);
        for (const struct option *o = options; o->name != NULL; o++) {
            if (o->val == optopt && optopt != 0) {
                cli_refuse("--%s takes no value", o->name);
                return CLI_BAD;
            }
        }
        cli_refuse("%s has no option %s, or it is ambiguous; see mla %s --help", argv[0], text,
                   argv[0]);
        return CLI_BAD;
    }
    return value;
}

bool cli_parse_int(const char *text, int64_t *out)
{
    /* strtoll skips spaces and takes "+1"; a number in a file or an option has neither. */
    if (text == NULL || !(isdigit((unsigned char)text[0]) || text[0] == '-'))
        return false;
    char *end = NULL;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0')
        return false;
    *out = value;
    return true;
}

bool cli_parse_double(const char *text, double *out)
{
    if (text == NULL || text[0] == '\0' || isspace((unsigned char)text[0]))
        return false;
    char *end = NULL;
    errno = 0;
    double value = strtod(text, &end);
    /* ERANGE is also set for tiny values, which round to something usable. */
    if (end == text || *end != '\0' || (errno == ERANGE && isinf(value)))
        return false;
    *out = value;
    return true;
}

bool cli_int(const char *option, const char *text, int64_t low, int64_t high, int64_t *out)
{
    int64_t value = 0;
    if (cli_parse_int(text, &value) && value >= low && value <= high) {
        *out = value;
        return true;
    }
    cli_refuse("%s is \"%.40s\"; it takes a whole number from %lld to %lld", option, text,
               (long long)low, (long long)high);
    return false;
}

bool cli_double(const char *option, const char *text, double low, double high, double *out)
{
    double value = 0.0;
    if (cli_parse_double(text, &value) && value >= low && value <= high) {
        *out = value;
        return true;
    }
    cli_refuse("%s is \"%.40s\"; it takes a number from %g to %g", option, text, low, high);
    return false;
}

bool cli_bool(const char *option, const char *text, bool *out)
{
    static const char *const yes[] = {"1", "true", "yes", "on"};
    static const char *const no[] = {"0", "false", "no", "off"};
    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++) {
        if (strcmp(text, yes[i]) == 0 || strcmp(text, no[i]) == 0) {
            *out = strcmp(text, yes[i]) == 0;
            return true;
        }
    }
    cli_refuse("%s is \"%.40s\"; it takes 1 or 0", option, text);
    return false;
}

bool cli_format(const char *option, const char *text, uint32_t formats, int32_t *out)
{
    int32_t format = mla_format_from_name(text);
    if (format > MLA_FORMAT_NONE && format < 32 && (formats >> format & 1u) != 0) {
        *out = format;
        return true;
    }
    char names[160] = "";
    for (int32_t i = 1; i < 32; i++) {
        if ((formats >> i & 1u) == 0)
            continue;
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", used > 0 ? ", " : "",
                 mla_format_name(i));
    }
    cli_refuse("%s is \"%.40s\"; it takes one of %s", option, text, names);
    return false;
}

bool cli_device(const char *option, const char *text, int32_t *device_type, int32_t *device_index)
{
    int64_t index = 0;
    if (strcmp(text, "cpu") == 0) {
        *device_type = MLA_DEVICE_CPU;
        *device_index = 0;
        return true;
    }
    if (strcmp(text, "cuda") == 0 ||
        (strncmp(text, "cuda:", 5) == 0 && cli_parse_int(text + 5, &index) && index >= 0 &&
         index <= INT32_MAX)) {
        *device_type = MLA_DEVICE_CUDA;
        *device_index = (int32_t)index;
        return true;
    }
    cli_refuse("%s is \"%.40s\"; it takes cpu, cuda or cuda:N", option, text);
    return false;
}

static mla_context *make_context(const mla_context_options *options)
{
    mla_context *context = NULL;
    mla_diag diag = {{0}};
    mla_status status = mla_context_create(options, &context, &diag);
    if (status == MLA_OK)
        return context;
    cli_refuse_status(status, &diag);
    return NULL;
}

mla_context *cli_context_for(int32_t device_type, int64_t n_threads, const char *solution)
{
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.n_threads = (int32_t)n_threads;
    options.solution = solution;
    options.cpu_only = device_type == MLA_DEVICE_CPU;
    return make_context(&options);
}

mla_context *cli_context(int64_t n_threads, const char *solution)
{
    return cli_context_for(MLA_DEVICE_CPU, n_threads, solution);
}

mla_context *cli_context_unforced(void)
{
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.ignore_environment = 1;
    return make_context(&options);
}

int cli_print_json(cJSON *object)
{
    char *text = cJSON_PrintUnformatted(object);
    cJSON_Delete(object);
    if (text == NULL) {
        cli_refuse("out of memory while the JSON line was made");
        return CLI_FAILED;
    }
    printf("%s\n", text);
    cJSON_free(text);
    return CLI_OK;
}
