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

static int list_json(const mla_context *ctx, int32_t op)
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
        if (op != MLA_OP_NONE && info.op != op)
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

static int list_text(const mla_context *ctx, int32_t op)
{
    printf("%-32s %-10s %-4s %-9s %s\n", "solution", "operator", "dev", "here",
           "formats; features");
    for (int32_t i = 0; i < mla_solution_count(ctx); i++) {
        mla_solution_info info;
        mla_diag diag = {{0}};
        mla_status status = describe(ctx, i, &info, &diag);
        if (status != MLA_OK)
            return cli_refuse_status(status, &diag);
        if (op != MLA_OP_NONE && info.op != op)
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
        "mla list [--op OPERATOR] [--json]\n\n"
        "Every solution (kernel): operator, device, whether it runs here, formats and features.\n");
}

enum { OPT_OP = 256, OPT_JSON, OPT_HELP };

static const struct option options[] = {
    {"op", required_argument, NULL, OPT_OP},
    {"json", no_argument, NULL, OPT_JSON},
    {"help", no_argument, NULL, OPT_HELP},
    {NULL, 0, NULL, 0},
};

int mla_tool_list(int argc, char **argv)
{
    bool as_json = false;
    int32_t op = MLA_OP_NONE;
    for (int option; (option = cli_next(argc, argv, options)) != CLI_END;) {
        switch (option) {
        case OPT_OP:
            op = mla_op_from_name(optarg);
            if (op == MLA_OP_NONE)
                return cli_refuse("--op is \"%.40s\", which is no operator", optarg);
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
    int code = as_json ? list_json(ctx, op) : list_text(ctx, op);
    mla_context_destroy(ctx);
    return code;
}
