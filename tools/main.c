/*
 * The command `mla`: runs one of the commands below with the rest of the arguments. Each command is
 * a file of its own and prints its own --help; cli.h has the exit statuses.
 */
#include "cli.h"
#include <stdio.h>
#include <string.h>

typedef struct command {
    const char *name;
    const char *help;
    int (*run)(int argc, char **argv);
} command;

static const command commands[] = {
    {"generate", "text or ids from a DeepSeek V2/V3 checkpoint", mla_tool_generate},
    {"logits", "the logits of every position of a prompt, as a file", mla_tool_logits},
    {"op", "one operator on the tensors of a file", mla_tool_op},
    {"list", "every solution, and whether it runs here", mla_tool_list},
    {"why", "which solution a problem gets, and why not the others", mla_tool_why},
    {"info", "version, processor, features, cores, devices", mla_tool_info},
    {"bench", "verified timings against the machine's measured ceilings", mla_tool_bench},
};

#define N_COMMANDS (sizeof commands / sizeof *commands)

static void print_help(void)
{
    printf("mla <command> [options]\n\n");
    for (size_t i = 0; i < N_COMMANDS; i++)
        printf("  %-9s %s\n", commands[i].name, commands[i].help);
    printf("\nmla <command> --help tells a command's options; mla --version the version.\n"
           "The environment variable MLA_SOLUTION forces solutions as --solution does.\n");
}

static int run_command(int argc, char **argv)
{
    if (argc < 2)
        return cli_refuse("no command; mla --help lists them");
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "help") == 0) {
        print_help();
        return CLI_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("mla %s\n", mla_version_string());
        return CLI_OK;
    }
    for (size_t i = 0; i < N_COMMANDS; i++) {
        if (strcmp(argv[1], commands[i].name) == 0)
            return commands[i].run(argc - 1, argv + 1);
    }
    return cli_refuse("there is no command %.40s; mla --help lists them", argv[1]);
}

int main(int argc, char **argv)
{
    int code = run_command(argc, argv);
    /* A full disk or a closed pipe shows only now. */
    if ((fflush(stdout) != 0 || ferror(stdout)) && code == CLI_OK) {
        cli_refuse("the output could not be written");
        code = CLI_FAILED;
    }
    return code;
}
