/*
 * mla why OP: which solution a problem gets, and why not the others.
 *
 * One verdict for each row of the operator and device: chosen, accepted (costs more, or another one
 * is forced) or rejected with its reason. The problem is made by the operator's own
 * mla_<op>_problem from shapes, so that the answer is the one that a call would get. For extend,
 * the two ways to attend a cached prefix are set side by side, each as the sum of the costs of its
 * steps: absorbed: absorb the queries, extend over the cache, project the values expanded: gather
 * the prefix, expand it (kv_b_proj), pack keys, attend it, attend the new tokens causally, merge
 * the two states
 */
#include "cli.h"
#include "op_table.h"
#include "workload.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *verdict_text(int32_t kind)
{
    switch (kind) {
    case MLA_VERDICT_CHOSEN:
        return "chosen";
    case MLA_VERDICT_ACCEPTED:
        return "accepted";
    default:
        return "rejected";
    }
}

static mla_status problem_of(const workload *w, mla_problem *problem, mla_diag *diag)
{
    op_params *params = malloc(sizeof *params);
    if (params == NULL)
        return MLA_ERROR_OUT_OF_MEMORY;
    mla_status status = MLA_ERROR_CAPACITY;
    *problem = (mla_problem)MLA_PROBLEM_INIT;
    /* workload_params prints what it refuses; the empty diag keeps that the only sentence. */
    if (workload_params(w, NULL, params))
        status = op_find(w->op)->problem(params, problem, diag);
    free(params);
    return status;
}

/* Verdicts of the problem; the caller frees *verdicts. */
static mla_status explain(const mla_context *ctx, const mla_problem *problem, const char *solution,
                          mla_verdict **verdicts, int32_t *n, mla_diag *diag)
{
    int32_t room = mla_solution_count(ctx);
    *verdicts = calloc((size_t)room + 1, sizeof **verdicts);
    if (*verdicts == NULL)
        return MLA_ERROR_OUT_OF_MEMORY;
    for (int32_t i = 0; i < room; i++)
        (*verdicts)[i].struct_size = sizeof **verdicts;
    *n = room;
    return mla_explain(ctx, problem, solution, *verdicts, n, diag);
}

/* ---- absorbed or expanded prefix ---------------------------------------------------------------
 */

#define MAX_STEPS 6

typedef struct step {
    const char *what;
    const char *solution; /* NULL = nothing takes it */
    double cost_us;
} step;

static step cost_of(const mla_context *ctx, const workload *w, const char *what)
{
    step result = {.what = what};
    mla_problem problem;
    mla_verdict *verdicts = NULL;
    int32_t n = 0;
    if (problem_of(w, &problem, NULL) != MLA_OK ||
        explain(ctx, &problem, NULL, &verdicts, &n, NULL) != MLA_OK)
        n = 0;
    for (int32_t i = 0; i < n; i++) {
        if (verdicts[i].kind == MLA_VERDICT_CHOSEN) {
            result.solution = verdicts[i].name;
            result.cost_us = verdicts[i].cost_us;
        }
    }
    free(verdicts);
    return result;
}

static workload variant(const workload *w, int32_t op)
{
    workload v = *w;
    v.op = op;
    if (op == MLA_OP_EXTEND)
        return v;
    v.has_mask = false;
    /* The steps around the attention run in the model's format, which is never fp8. */
    if (mla_format_bytes(v.dtype) == 1)
        v.dtype = MLA_FORMAT_BF16;
    return v;
}

static int32_t absorbed_steps(const mla_context *ctx, const workload *w, step *steps)
{
    workload absorb = variant(w, MLA_OP_ABSORB);
    workload extend = variant(w, MLA_OP_EXTEND);
    workload project = variant(w, MLA_OP_PROJECT);
    steps[0] = cost_of(ctx, &absorb, "absorb queries");
    steps[1] = cost_of(ctx, &extend, "extend over the cache");
    steps[2] = cost_of(ctx, &project, "project values");
    return 3;
}

static int32_t expanded_steps(const mla_context *ctx, const workload *w, step *steps)
{
    int64_t prefix = w->kv_len > w->q_len ? w->kv_len - w->q_len : 0;
    workload gather = variant(w, MLA_OP_GATHER);
    gather.kv_len = prefix;
    /* kv_b_proj takes [prefix, R] to [prefix, H, N + V]: the product of project with N + V wide. */
    workload expand = variant(w, MLA_OP_PROJECT);
    expand.q_len = prefix;
    expand.v_dim = w->nope_dim + w->v_dim;
    workload pack = variant(w, MLA_OP_PACK);
    pack.kv_len = prefix;
    pack.kv_dtype = w->dtype;
    workload window = variant(w, MLA_OP_PREFILL);
    window.is_causal = false;
    window.kv_heads = w->heads;
    window.kv_len = prefix;
    window.kv_dtype = w->dtype;
    workload causal = window;
    causal.is_causal = true;
    causal.kv_len = w->q_len;
    workload merge = variant(w, MLA_OP_MERGE);
    steps[0] = cost_of(ctx, &gather, "gather the prefix");
    steps[1] = cost_of(ctx, &expand, "expand the prefix");
    steps[2] = cost_of(ctx, &pack, "pack keys");
    steps[3] = cost_of(ctx, &window, "attend the prefix");
    steps[4] = cost_of(ctx, &causal, "attend new tokens");
    steps[5] = cost_of(ctx, &merge, "merge");
    return 6;
}

static double total_us(const step *steps, int32_t n)
{
    double total = 0.0;
    for (int32_t i = 0; i < n; i++)
        total += steps[i].cost_us;
    return total;
}

static void print_steps(const char *way, const step *steps, int32_t n)
{
    printf("  %-9s %12.1f us\n", way, total_us(steps, n));
    for (int32_t i = 0; i < n; i++)
        printf("    %-22s %10.1f us  %s\n", steps[i].what, steps[i].cost_us,
               steps[i].solution != NULL ? steps[i].solution : "no solution");
}

static void add_steps(cJSON *root, const char *way, const step *steps, int32_t n)
{
    cJSON *object = cJSON_AddObjectToObject(root, way);
    cJSON_AddNumberToObject(object, "cost_us", total_us(steps, n));
    cJSON *list = cJSON_AddArrayToObject(object, "steps");
    for (int32_t i = 0; i < n; i++) {
        cJSON *item = cJSON_CreateObject();
        cJSON_AddStringToObject(item, "step", steps[i].what);
        cJSON_AddNumberToObject(item, "cost_us", steps[i].cost_us);
        cJSON_AddStringToObject(item, "solution",
                                steps[i].solution != NULL ? steps[i].solution : "");
        cJSON_AddItemToArray(list, item);
    }
}

/* ---- output ------------------------------------------------------------------------------------
 */

static void print_text(const workload *w, const mla_problem *p, const mla_verdict *verdicts,
                       int32_t n)
{
    printf(
        "%s: q %s, kv %s, out %s, heads %d, batch %lld, q_len %lld, kv_len %lld, page_size %lld\n",
        mla_op_name(w->op), mla_format_name(p->q_format), mla_format_name(p->kv_format),
        mla_format_name(p->out_format), (int)p->num_heads, (long long)w->batch, (long long)w->q_len,
        (long long)w->kv_len, (long long)w->page_size);
    printf("  %-9s %-32s %14s %16s  %s\n", "verdict", "solution", "cost", "workspace", "reason");
    for (int32_t i = 0; i < n; i++) {
        const mla_verdict *v = &verdicts[i];
        if (v->kind == MLA_VERDICT_REJECTED)
            printf("  %-9s %-32s %14s %16s  %s\n", "rejected", v->name, "-", "-", v->reason);
        else
            printf("  %-9s %-32s %11.1f us %10llu bytes  %s\n", verdict_text(v->kind), v->name,
                   v->cost_us, (unsigned long long)v->workspace_bytes, v->reason);
    }
}

static cJSON *json_of(const workload *w, const mla_problem *p, const mla_verdict *verdicts,
                      int32_t n)
{
    cJSON *root = cJSON_CreateObject();
    const char *chosen = "";
    cJSON_AddStringToObject(root, "op", mla_op_name(w->op));
    cJSON *problem = cJSON_AddObjectToObject(root, "problem");
    cJSON_AddStringToObject(problem, "dtype", mla_format_name(p->q_format));
    cJSON_AddStringToObject(problem, "kv_dtype", mla_format_name(p->kv_format));
    cJSON_AddStringToObject(problem, "out_dtype", mla_format_name(p->out_format));
    cJSON_AddNumberToObject(problem, "heads", p->num_heads);
    cJSON_AddNumberToObject(problem, "batch", (double)p->batch);
    cJSON_AddNumberToObject(problem, "tokens", (double)p->tokens);
    cJSON_AddNumberToObject(problem, "max_q_len", (double)p->max_q_len);
    cJSON_AddNumberToObject(problem, "max_kv_len", (double)p->max_kv_len);
    cJSON_AddNumberToObject(problem, "page_size", (double)p->page_size);
    cJSON *list = cJSON_AddArrayToObject(root, "verdicts");
    for (int32_t i = 0; i < n; i++) {
        const mla_verdict *v = &verdicts[i];
        cJSON *item = cJSON_CreateObject();
        cJSON_AddStringToObject(item, "name", v->name);
        cJSON_AddStringToObject(item, "family", v->family);
        cJSON_AddStringToObject(item, "verdict", verdict_text(v->kind));
        cJSON_AddNumberToObject(item, "cost_us", v->cost_us);
        cJSON_AddNumberToObject(item, "workspace_bytes", (double)v->workspace_bytes);
        cJSON_AddStringToObject(item, "reason", v->reason);
        cJSON_AddItemToArray(list, item);
        if (v->kind == MLA_VERDICT_CHOSEN)
            chosen = v->name;
    }
    cJSON_AddStringToObject(root, "chosen", chosen);
    return root;
}

static int print_answer(const mla_context *ctx, const workload *w, const char *solution,
                        bool as_json)
{
    mla_diag diag = {{0}};
    mla_problem problem;
    mla_verdict *verdicts = NULL;
    int32_t n = 0;
    mla_status status = problem_of(w, &problem, &diag);
    if (status != MLA_OK && diag.text[0] == '\0')
        return CLI_REFUSED;
    if (status == MLA_OK)
        status = explain(ctx, &problem, solution, &verdicts, &n, &diag);
    if (status != MLA_OK) {
        free(verdicts);
        return cli_refuse_status(status, &diag);
    }
    step absorbed[MAX_STEPS];
    step expanded[MAX_STEPS];
    int32_t n_absorbed = 0;
    int32_t n_expanded = 0;
    if (w->op == MLA_OP_EXTEND) {
        n_absorbed = absorbed_steps(ctx, w, absorbed);
        n_expanded = expanded_steps(ctx, w, expanded);
    }
    int code = CLI_OK;
    if (as_json) {
        cJSON *root = json_of(w, &problem, verdicts, n);
        if (w->op == MLA_OP_EXTEND) {
            cJSON *prefix = cJSON_AddObjectToObject(root, "prefix");
            add_steps(prefix, "absorbed", absorbed, n_absorbed);
            add_steps(prefix, "expanded", expanded, n_expanded);
        }
        code = cli_print_json(root);
    } else {
        print_text(w, &problem, verdicts, n);
        if (w->op == MLA_OP_EXTEND) {
            printf("the prefix of %lld tokens, by the rows' cost models:\n",
                   (long long)(w->kv_len > w->q_len ? w->kv_len - w->q_len : 0));
            print_steps("absorbed", absorbed, n_absorbed);
            print_steps("expanded", expanded, n_expanded);
        }
    }
    free(verdicts);
    return code;
}

static void print_help(void)
{
    printf("mla why OPERATOR [options]\n\n"
           "  --heads H --kv-heads H --batch B --q-len L --kv-len K --page-size P\n"
           "  --rank R --rope-dim P --nope-dim N --v-dim V\n"
           "  --dtype FORMAT --kv-dtype FORMAT   f32 bf16 f16 e4m3 e5m2, caches also ds656\n"
           "  --causal 0|1 --lse 0|1 --mask --logit-cap C\n"
           "  --solution NAME --threads N --device cpu|cuda[:N] --json\n");
}

enum { OPT_LSE = 256, OPT_MASK, OPT_SOLUTION, OPT_THREADS, OPT_JSON, OPT_HELP };

static const struct option options[] = {
    WORKLOAD_OPTIONS,
    {"lse", required_argument, NULL, OPT_LSE},
    {"mask", no_argument, NULL, OPT_MASK},
    {"solution", required_argument, NULL, OPT_SOLUTION},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"json", no_argument, NULL, OPT_JSON},
    {"help", no_argument, NULL, OPT_HELP},
    {NULL, 0, NULL, 0},
};

int mla_tool_why(int argc, char **argv)
{
    const char *solution = NULL;
    int64_t threads = 0;
    bool as_json = false;
    if (argc >= 2 && strcmp(argv[1], "--help") == 0) {
        print_help();
        return CLI_OK;
    }
    int32_t op = argc >= 2 ? mla_op_from_name(argv[1]) : MLA_OP_NONE;
    if (op_find(op) == NULL)
        return cli_refuse("mla why takes an operator: decode, prefill, extend, merge, write, "
                          "gather, rope, rope_write, absorb, project or pack");
    workload w = workload_default(op);
    optind = 2;
    for (int option; (option = cli_next(argc, argv, options)) != CLI_END;) {
        bool good = true;
        switch (option) {
        case OPT_LSE:
            good = cli_bool("--lse", optarg, &w.has_lse);
            break;
        case OPT_MASK:
            w.has_mask = true;
            break;
        case OPT_SOLUTION:
            solution = optarg;
            break;
        case OPT_THREADS:
            good = cli_int("--threads", optarg, 1, 1024, &threads);
            break;
        case OPT_JSON:
            as_json = true;
            break;
        case OPT_HELP:
            print_help();
            return CLI_OK;
        default:
            good = option != CLI_BAD && workload_set(&w, option, optarg);
            break;
        }
        if (!good)
            return CLI_REFUSED;
    }
    workload_settle(&w);
    mla_context *ctx = cli_context_for(w.device_type, threads, NULL);
    if (ctx == NULL)
        return CLI_REFUSED;
    int code = print_answer(ctx, &w, solution, as_json);
    mla_context_destroy(ctx);
    return code;
}
