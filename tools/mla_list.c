/*
 * mla list: every solution that the library holds, in table order, and whether it runs on this
 * machine. As a table for people or, with --json, as one object on one line:
 *   {"version", "solutions": [{"name", "op", "device", "family", "formats", "features",
 *                              "runs_here", "reason"}]}
 */
#include "cli.h"
#include <stdio.h>
#include <string.h>

static const char *device_name(int32_t device_type)
{
    return device_type == MLA_DEVICE_CUDA ? "cuda" : "cpu";
}

static mla_status describe(const mla_context *ctx, int32_t index, mla_solution_info *info,
                           mla_diag *diag)
{
    *info = (mla_solution_info)MLA_SOLUTION_INFO_INIT;
    return mla_solution_describe(ctx, index, info, diag);
}

/* Which rows are told; 0 = all. */
typedef struct selection {
    int32_t op;
    int32_t device_type;
} selection;

static bool is_selected(const selection *s, const mla_solution_info *info)
{
    return (s->op == MLA_OP_NONE || info->op == s->op) &&
           (s->device_type == 0 || info->device_type == s->device_type);
}

static int list_json(const mla_context *ctx, const selection *s)
{
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "version", mla_version_string());
    cJSON *list = cJSON_AddArrayToObject(root, "solutions");
    for (int32_t i = 0; i < mla_solution_count(ctx); i++) {
        mla_solution_info info;
        mla_diag diag = {{0}};
        mla_status status = describe(ctx, i, &info, &diag);
        if (status != MLA_OK) {
            cJSON_Delete(root);
            return cli_refuse_status(status, &diag);
        }
        if (!is_selected(s, &info))
            continue;
        cJSON *row = cJSON_CreateObject();
        cJSON_AddStringToObject(row, "name", info.name);
        cJSON_AddStringToObject(row, "op", mla_op_name(info.op));
        cJSON_AddStringToObject(row, "device", device_name(info.device_type));
        cJSON_AddStringToObject(row, "family", info.family);
        cJSON_AddStringToObject(row, "formats", info.formats);
        cJSON_AddStringToObject(row, "features", info.features);
        cJSON_AddBoolToObject(row, "runs_here", info.runs_here);
        cJSON_AddStringToObject(row, "reason", info.runs_here ? "" : info.reason);
        cJSON_AddItemToArray(list, row);
    }
    return cli_print_json(root);
}

static int list_text(const mla_context *ctx, const selection *s)
{
    printf("%-32s %-10s %-4s %-9s %s\n", "solution", "operator", "dev", "here",
           "formats; features");
    for (int32_t i = 0; i < mla_solution_count(ctx); i++) {
        mla_solution_info info;
        mla_diag diag = {{0}};
        mla_status status = describe(ctx, i, &info, &diag);
        if (status != MLA_OK)
            return cli_refuse_status(status, &diag);
        if (!is_selected(s, &info))
            continue;
        printf("%-32s %-10s %-4s %-9s %s; %s%s%s\n", info.name, mla_op_name(info.op),
               device_name(info.device_type), info.runs_here ? "runs" : "does not", info.formats,
               info.features, info.runs_here ? "" : " -- ", info.runs_here ? "" : info.reason);
    }
    return CLI_OK;
}

static void print_help(void)
{
    printf(
        "mla list [--op OPERATOR] [--device cpu|cuda[:N]] [--json]\n\n"
        "Every solution (kernel): operator, device, whether it runs here, formats and features.\n");
}

enum { OPT_OP = 256, OPT_DEVICE, OPT_JSON, OPT_HELP };

static const struct option options[] = {
    {"op", required_argument, NULL, OPT_OP},
    {"device", required_argument, NULL, OPT_DEVICE},
    {"json", no_argument, NULL, OPT_JSON},
    {"help", no_argument, NULL, OPT_HELP},
    {NULL, 0, NULL, 0},
};

int mla_tool_list(int argc, char **argv)
{
    bool as_json = false;
    selection s = {MLA_OP_NONE, 0};
    int32_t device_index = 0;
    for (int option; (option = cli_next(argc, argv, options)) != CLI_END;) {
        switch (option) {
        case OPT_OP:
            s.op = mla_op_from_name(optarg);
            if (s.op == MLA_OP_NONE)
                return cli_refuse("--op is \"%.40s\", which is no operator", optarg);
            break;
        case OPT_DEVICE:
            if (!cli_device("--device", optarg, &s.device_type, &device_index))
                return CLI_REFUSED;
            break;
        case OPT_JSON:
            as_json = true;
            break;
        case OPT_HELP:
            print_help();
            return CLI_OK;
        default:
            return CLI_REFUSED;
        }
    }
    mla_context *ctx = cli_context_unforced();
    if (ctx == NULL)
        return CLI_REFUSED;
    int32_t n_devices = mla_context_device_count(ctx, MLA_DEVICE_CUDA);
    int code = CLI_OK;
    /* Without any GPU the list still says of each row why it does not run. */
    if (n_devices > 0 && device_index >= n_devices)
        code = cli_refuse("--device cuda:%d: there are %d", (int)device_index, (int)n_devices);
    else
        code = as_json ? list_json(ctx, &s) : list_text(ctx, &s);
    mla_context_destroy(ctx);
    return code;
}
