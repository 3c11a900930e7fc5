/*
 * Choosing a solution. One loop judges every row of the problem's operator and device:
 *
 *   rows -> features there? -> accepts? -> forced and another? -> lowest cost, ties by table order
 *
 * A forced list is "name,name,...": a full row name concerns its own operator only and beats a
 * family; a family concerns every operator. The first of call, scope, context, environment that
 * says something about the operator decides; lists that name only other operators' rows pass on.
 */
#include "registry/context.h"

#include <string.h>

typedef struct forced_name {
    const char *text; /* inside the list; not terminated */
    size_t length;
    bool is_row;
} forced_name;

static bool same(const char *name, const char *text, size_t length)
{
    return strlen(name) == length && memcmp(name, text, length) == 0;
}

/* Steps through a comma-separated list; spaces around names are skipped. */
static bool next_name(const char **list, const char **text, size_t *length)
{
    const char *p = *list;
    while (*p == ',' || *p == ' ')
        p++;
    const char *start = p;
    while (*p && *p != ',')
        p++;
    *list = p;
    *text = start;
    *length = (size_t)(p - start);
    while (*length > 0 && start[*length - 1] == ' ')
        (*length)--;
    return *length > 0;
}

static void list_names(const mla_context *ctx, char *text, size_t text_bytes)
{
    text[0] = 0;
    for (int32_t i = 0; i < ctx->n_rows; i++) {
        bool seen = false;
        for (int32_t j = 0; j < i && !seen; j++)
            seen = strcmp(ctx->rows[i]->family, ctx->rows[j]->family) == 0;
        if (!seen)
            mlai_append(text, text_bytes, "%s%s", text[0] ? " " : "", ctx->rows[i]->family);
    }
}

mla_status mlai_check_forced(const mla_context *ctx, const char *list, const char *whose,
                             mla_diag *diag)
{
    const char *text;
    size_t length;
    const char *rest = list;
    if (!next_name(&rest, &text, &length))
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "%s has no name in it; name families or rows",
                         whose);
    rest = list;
    while (next_name(&rest, &text, &length)) {
        bool found = false;
        for (int32_t i = 0; i < ctx->n_rows && !found; i++)
            found =
                same(ctx->rows[i]->family, text, length) || same(ctx->rows[i]->name, text, length);
        if (found)
            continue;
        char families[192];
        list_names(ctx, families, sizeof families);
        return mlai_fail(
            diag, MLA_ERROR_NOT_FOUND,
            "%s names \"%.*s\", which is neither a family (%s) nor a row; `mla list` prints "
            "all rows",
            whose, (int)(length < 80 ? length : 80), text, families);
    }
    return MLA_OK;
}

/* What one list says about an operator: a row of it, else the first family, else nothing. */
static bool read_list(const mla_context *ctx, const char *list, int32_t op, forced_name *out)
{
    bool said = false;
    const char *text;
    size_t length;
    while (list && next_name(&list, &text, &length)) {
        bool is_family = false;
        for (int32_t i = 0; i < ctx->n_rows; i++) {
            if (ctx->rows[i]->op == op && same(ctx->rows[i]->name, text, length)) {
                *out = (forced_name){text, length, true};
                return true;
            }
            is_family = is_family || same(ctx->rows[i]->family, text, length);
        }
        if (is_family && !said) {
            *out = (forced_name){text, length, false};
            said = true;
        }
    }
    return said;
}

static bool find_forced(const mla_context *ctx, const char *call, int32_t op, forced_name *out)
{
    if (read_list(ctx, call, op, out))
        return true;
    for (int32_t i = ctx->n_scopes - 1; i >= 0; i--) {
        if (read_list(ctx, ctx->scopes[i], op, out))
            return true;
    }
    return read_list(ctx, ctx->forced, op, out) || read_list(ctx, ctx->environment, op, out);
}

static bool is_forced_row(const mla_solution *row, const forced_name *forced)
{
    return same(forced->is_row ? row->name : row->family, forced->text, forced->length);
}

/* Whether the machine has what a row needs. `why` may be NULL: choosing asks every row at every
 * call and wants reasons only when none is left. */
static bool runs_on(const mla_context *ctx, const mla_solution *row, int32_t device_index,
                    char *why, size_t why_bytes)
{
    if (why)
        why[0] = 0;
    if (row->device_type != MLA_DEVICE_CPU) {
        void *device = NULL;
        if (ctx->devices && ctx->runtime->device_type == row->device_type)
            device = ctx->runtime->device(ctx->devices, device_index, why, why_bytes);
        else if (why)
            mlai_append(why, why_bytes, "%s", mla_context_device_reason(ctx, row->device_type));
        if (!device)
            return false;
        const int32_t arch = ctx->runtime->arch(device);
        if (arch >= row->cuda_arch_min && arch <= row->cuda_arch_max)
            return true;
        if (!why)
            return false;
        mla_device_info info = MLA_DEVICE_INFO_INIT;
        ctx->runtime->describe(device, &info);
        mlai_append(why, why_bytes, "%s is sm_%d; it runs on sm_%d to sm_%d", info.name, info.arch,
                    row->cuda_arch_min, row->cuda_arch_max);
        return false;
    }
    uint64_t missing = row->cpu_features & ~ctx->cpu_features;
    if (!missing || !why)
        return !missing;
    mlai_append(why, why_bytes, "this context has no");
#define MISSING(name, bit, text)                                                                   \
    if (missing & (1u << (bit)))                                                                   \
        mlai_append(why, why_bytes, " %s", text);
    MLA_CPU_FEATURE_LIST(MISSING)
#undef MISSING
    return false;
}

/* Judges one row: false = rejected with a reason, where `why` is not NULL. */
static bool judge(const mla_context *ctx, const mla_solution *row, const mla_problem *problem,
                  char *why, size_t why_bytes)
{
    if (!runs_on(ctx, row, problem->device_index, why, why_bytes))
        return false;
    if (row->accepts(problem, why, why_bytes))
        return true;
    if (why && !why[0])
        mlai_append(why, why_bytes, "it does not take this problem");
    return false;
}

/* A workspace has at most some kilobytes for each of these rows: up to 2^48 it cannot wrap. */
#define MAX_CAPACITY (INT64_C(1) << 48)

/* Refuses numbers that no row could compute a workspace or a cost from. */
static mla_status check_capacities(const mla_problem *p, mla_diag *diag)
{
    const struct {
        const char *name;
        int64_t value;
    } fields[] = {{"batch", p->batch},
                  {"tokens", p->tokens},
                  {"max_q_len", p->max_q_len},
                  {"max_kv_len", p->max_kv_len},
                  {"page_size", p->page_size},
                  {"num_heads", p->num_heads},
                  {"num_kv_heads", p->num_kv_heads},
                  {"kv_lora_rank", p->kv_lora_rank},
                  {"qk_rope_head_dim", p->qk_rope_head_dim},
                  {"qk_nope_head_dim", p->qk_nope_head_dim},
                  {"qk_head_dim", p->qk_head_dim},
                  {"v_head_dim", p->v_head_dim}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (fields[i].value < 0)
            return mlai_fail(diag, MLA_ERROR_ARGUMENT, "problem.%s is %lld; it must be 0 or more",
                             fields[i].name, (long long)fields[i].value);
        if (fields[i].value > MAX_CAPACITY)
            return mlai_fail(diag, MLA_ERROR_CAPACITY,
                             "problem.%s is %lld; workspaces are sized up to 2^48", fields[i].name,
                             (long long)fields[i].value);
    }
    int64_t rows;
    if (__builtin_mul_overflow(mlai_max_i64(p->batch, 1), mlai_max_i64(p->max_q_len, 1), &rows) ||
        __builtin_mul_overflow(rows, mlai_max_i64(p->num_heads, 1), &rows) || rows > MAX_CAPACITY)
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "problem.batch %lld times max_q_len %lld and %d heads is over 2^48 rows; "
                         "give smaller capacities",
                         (long long)p->batch, (long long)p->max_q_len, p->num_heads);
    return MLA_OK;
}

static mla_status check_problem(const mla_context *ctx, const mla_problem *problem,
                                mla_problem *own, mla_diag *diag)
{
    if (!ctx)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "ctx is NULL");
    MLAI_TRY(mlai_take_struct(own, sizeof *own, MLAI_PROBLEM_MIN_BYTES, problem, "problem", diag));
    if (!strcmp(mla_op_name(own->op), "unknown"))
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "problem.op is %d, which is no operator",
                         own->op);
    return check_capacities(own, diag);
}

/* Why no row of the problem's operator and device is left. */
static mla_status refuse(const mla_context *ctx, const mla_problem *problem,
                         const forced_name *forced, mla_diag *diag)
{
    char why[160], reasons[320] = "";
    for (int32_t i = 0; i < ctx->n_rows; i++) {
        const mla_solution *r = ctx->rows[i];
        if (r->op == problem->op && r->device_type == problem->device_type &&
            (!forced || is_forced_row(r, forced)) && !judge(ctx, r, problem, why, sizeof why))
            mlai_append(reasons, sizeof reasons, "%s%s: %s", reasons[0] ? "; " : "", r->name, why);
    }
    if (forced)
        return mlai_fail(
            diag, MLA_ERROR_UNSUPPORTED,
            "the forced solution \"%.*s\" does not take this %s (%s); unforce it or see "
            "`mla why`",
            (int)forced->length, forced->text, mla_op_name(problem->op),
            reasons[0] ? reasons : "it has no row for this operator and device");
    return mlai_fail(diag, MLA_ERROR_UNSUPPORTED, "no solution takes this %s: %s",
                     mla_op_name(problem->op),
                     reasons[0] ? reasons : "none is built in for this device");
}

mla_status mlai_choose(const mla_context *ctx, const mla_problem *problem, const char *solution,
                       const mla_solution **row, mla_diag *diag)
{
    if (solution && solution[0])
        MLAI_TRY(mlai_check_forced(ctx, solution, "solution", diag));
    forced_name forced = {NULL, 0, false};
    bool is_forced = find_forced(ctx, solution, problem->op, &forced);
    mla_exec exec = mlai_exec_make(ctx, problem, NULL);
    const mla_solution *best = NULL;
    double best_cost = 0.0;
    for (int32_t i = 0; i < ctx->n_rows; i++) {
        const mla_solution *r = ctx->rows[i];
        if (r->op != problem->op || r->device_type != problem->device_type)
            continue;
        if ((is_forced && !is_forced_row(r, &forced)) || !judge(ctx, r, problem, NULL, 0))
            continue;
        double cost = r->cost_us(problem, &exec);
        if (!best || cost < best_cost) {
            best = r;
            best_cost = cost;
        }
    }
    *row = best;
    return best ? MLA_OK : refuse(ctx, problem, is_forced ? &forced : NULL, diag);
}

mla_exec mlai_exec_make(const mla_context *ctx, const mla_problem *problem, const mla_call *call)
{
    mla_exec exec = {.struct_size = sizeof exec,
                     .n_threads = ctx->n_threads,
                     .run = ctx->run,
                     .run_user = ctx->run_user,
                     .cpu_features = ctx->cpu_features};
    if (problem->device_type != MLA_DEVICE_CPU && ctx->devices) {
        char why[160];
        exec.device = ctx->runtime->device(ctx->devices, problem->device_index, why, sizeof why);
    }
    if (call) {
        exec.stream = call->stream;
        exec.workspace = call->workspace;
        exec.workspace_bytes = call->workspace_bytes;
    }
    return exec;
}

mla_status mlai_dispatch(mla_context *ctx, const mla_problem *problem, const mla_call *call,
                         const void *params, mla_diag *diag)
{
    const mla_solution *row;
    MLAI_TRY(mlai_choose(ctx, problem, call->solution, &row, diag));
    mla_exec exec = mlai_exec_make(ctx, problem, call);
    uint64_t need = row->workspace_bytes(problem, &exec);
    if (need > 0 && (!call->workspace || call->workspace_bytes < need))
        return mlai_fail(
            diag, MLA_ERROR_WORKSPACE,
            "call.workspace has %llu bytes; %s needs %llu here (mla_workspace_bytes tells "
            "for a capacity)",
            call->workspace ? (unsigned long long)call->workspace_bytes : 0ULL, row->name,
            (unsigned long long)need);
    uintptr_t alignment = problem->device_type == MLA_DEVICE_CPU ? 64 : 256;
    if (need > 0 && (uintptr_t)call->workspace % alignment != 0)
        return mlai_fail(diag, MLA_ERROR_WORKSPACE,
                         "call.workspace is %p; it must be aligned to %d bytes", call->workspace,
                         (int)alignment);
    if (call->device_error && problem->device_type != MLA_DEVICE_CPU)
        MLAI_TRY(ctx->runtime->validate(&exec, problem, params, call->device_error, diag));
    return row->run(&exec, problem, params, diag);
}

/*
 * The largest need among all rows that a call of this kind may end up with: costs cross over with
 * the size of a call, so a smaller one may choose another row, and so may one whose operands lie
 * more plainly.
 */
mla_status mla_workspace_bytes(mla_context *ctx, const mla_problem *problem, const char *solution,
                               uint64_t *bytes, mla_diag *diag)
{
    mla_problem own;
    MLAI_TRY(check_problem(ctx, problem, &own, diag));
    if (!bytes)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "bytes is NULL; pass where the size should go");
    const mla_solution *chosen;
    MLAI_TRY(mlai_choose(ctx, &own, solution, &chosen, diag));
    forced_name forced = {NULL, 0, false};
    bool is_forced = find_forced(ctx, solution, own.op, &forced);
    mla_exec exec = mlai_exec_make(ctx, &own, NULL);
    uint64_t need = 0;
    own.layout = 0;
    for (int32_t i = 0; i < ctx->n_rows; i++) {
        const mla_solution *row = ctx->rows[i];
        if (row->op != own.op || row->device_type != own.device_type ||
            (is_forced && !is_forced_row(row, &forced)) || !judge(ctx, row, &own, NULL, 0))
            continue;
        uint64_t bytes_here = row->workspace_bytes(&own, &exec);
        need = bytes_here > need ? bytes_here : need;
    }
    if (need >> 62)
        return mlai_fail(diag, MLA_ERROR_CAPACITY,
                         "this problem would need more than 2^62 bytes of workspace; %s was chosen",
                         chosen->name);
    *bytes = need;
    return MLA_OK;
}

mla_status mla_solution_choose(const mla_context *ctx, const mla_problem *problem,
                               const char *solution, const char **name, mla_diag *diag)
{
    mla_problem own;
    MLAI_TRY(check_problem(ctx, problem, &own, diag));
    if (!name)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "name is NULL; pass where the name should go");
    const mla_solution *row;
    MLAI_TRY(mlai_choose(ctx, &own, solution, &row, diag));
    *name = row->name;
    return MLA_OK;
}

static void fill_verdict(const mla_context *ctx, const mla_solution *row,
                         const mla_problem *problem, const mla_exec *exec, mla_verdict *verdict)
{
    mla_verdict v = {.struct_size = sizeof v, .name = row->name, .family = row->family};
    if (judge(ctx, row, problem, v.reason, sizeof v.reason)) {
        v.kind = MLA_VERDICT_ACCEPTED;
        v.cost_us = row->cost_us(problem, exec);
        v.workspace_bytes = row->workspace_bytes(problem, exec);
    } else {
        v.kind = MLA_VERDICT_REJECTED;
    }
    *verdict = v;
}

mla_status mla_explain(const mla_context *ctx, const mla_problem *problem, const char *solution,
                       mla_verdict *verdicts, int32_t *n_verdicts, mla_diag *diag)
{
    mla_problem own;
    MLAI_TRY(check_problem(ctx, problem, &own, diag));
    if (!n_verdicts || (*n_verdicts > 0 && !verdicts))
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "verdicts and n_verdicts must not be NULL");
    int32_t room = *n_verdicts, n = 0;
    for (int32_t i = 0; i < ctx->n_rows; i++)
        n += ctx->rows[i]->op == own.op && ctx->rows[i]->device_type == own.device_type;
    *n_verdicts = n;
    if (n > room)
        return mlai_fail(diag, MLA_ERROR_CAPACITY, "there are %d verdicts and room for %d", n,
                         room);
    for (int32_t i = 0; i < n; i++)
        if (verdicts[i].struct_size != sizeof verdicts[i])
            return mlai_fail(diag, MLA_ERROR_VERSION,
                             "verdicts[%d].struct_size is %u; set each to sizeof(mla_verdict), %zu",
                             i, verdicts[i].struct_size, sizeof verdicts[i]);
    const mla_solution *chosen;
    mla_diag refusal; /* that no row takes the problem is an answer here, not an error */
    mla_status status = mlai_choose(ctx, &own, solution, &chosen, &refusal);
    if (status != MLA_OK && status != MLA_ERROR_UNSUPPORTED)
        return mlai_fail(diag, status, "%s", refusal.text);
    mla_exec exec = mlai_exec_make(ctx, &own, NULL);
    n = 0;
    for (int32_t i = 0; i < ctx->n_rows; i++) {
        const mla_solution *row = ctx->rows[i];
        if (row->op != own.op || row->device_type != own.device_type)
            continue;
        fill_verdict(ctx, row, &own, &exec, &verdicts[n]);
        if (row == chosen)
            verdicts[n].kind = MLA_VERDICT_CHOSEN;
        n++;
    }
    return MLA_OK;
}

/* ---- rows ------------------------------------------------------------------------------------ */

static bool name_is_well_formed(const char *name)
{
    if (!name || !name[0] || strlen(name) > 63)
        return false;
    for (const char *p = name; *p; p++) {
        if (!((*p >= 'a' && *p <= 'z') || (*p >= '0' && *p <= '9') || *p == '_'))
            return false;
    }
    return true;
}

static mla_status check_row(const mla_solution *row, int32_t index, mla_diag *diag)
{
    if (row->struct_size != sizeof *row || row->version != MLA_SOLUTION_VERSION)
        return mlai_fail(
            diag, MLA_ERROR_VERSION,
            "rows[%d] has struct_size %u and version %d; this library takes %zu and %d", index,
            row->struct_size, row->version, sizeof *row, MLA_SOLUTION_VERSION);
    if (!name_is_well_formed(row->name) || !name_is_well_formed(row->family))
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "rows[%d] has a bad name or family; use 1 to 63 of a-z, 0-9 and _", index);
    if (!row->accepts || !row->workspace_bytes || !row->cost_us || !row->run || !row->formats ||
        !row->features || !row->cpu_features_text)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "rows[%d] (%s) has a NULL function or text",
                         index, row->name);
    if (!strcmp(mla_op_name(row->op), "unknown"))
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "rows[%d] (%s) has op %d, which is no operator",
                         index, row->name, row->op);
    return MLA_OK;
}

/* Where the row of a name stands; n_rows when there is none. */
static int32_t row_index(const mla_context *ctx, const char *name)
{
    int32_t at = 0;
    while (at < ctx->n_rows && strcmp(ctx->rows[at]->name, name) != 0)
        at++;
    return at;
}

mla_status mla_context_add_solutions(mla_context *ctx, const mla_solution *rows, int32_t n_rows,
                                     mla_diag *diag)
{
    if (!ctx || n_rows < 0 || (n_rows > 0 && !rows))
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "ctx or rows is NULL, or n_rows is %d", n_rows);
    for (int32_t i = 0; i < n_rows; i++)
        MLAI_TRY(check_row(&rows[i], i, diag));
    int32_t n_fresh = 0; /* the others replace a row of their name */
    for (int32_t i = 0; i < n_rows; i++)
        n_fresh += row_index(ctx, rows[i].name) == ctx->n_rows;
    if (n_fresh > MLAI_MAX_ROWS - ctx->n_rows)
        return mlai_fail(diag, MLA_ERROR_CAPACITY, "a context holds %d rows and has %d already",
                         MLAI_MAX_ROWS, ctx->n_rows);
    for (int32_t i = 0; i < n_rows; i++) {
        int32_t at = row_index(ctx, rows[i].name);
        ctx->rows[at] = &rows[i];
        if (at == ctx->n_rows)
            ctx->n_rows++;
    }
    return MLA_OK;
}

int32_t mla_solution_count(const mla_context *ctx)
{
    return ctx ? ctx->n_rows : 0;
}

mla_status mla_solution_describe(const mla_context *ctx, int32_t index, mla_solution_info *info,
                                 mla_diag *diag)
{
    if (!ctx || !info || index < 0 || index >= ctx->n_rows)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "index is %d; rows are 0 to %d", index,
                         ctx ? ctx->n_rows - 1 : -1);
    if (info->struct_size != sizeof *info)
        return mlai_fail(diag, MLA_ERROR_VERSION, "info.struct_size is %u; use its INIT macro",
                         info->struct_size);
    const mla_solution *row = ctx->rows[index];
    mla_solution_info own = {.struct_size = sizeof own,
                             .op = row->op,
                             .device_type = row->device_type,
                             .name = row->name,
                             .family = row->family,
                             .formats = row->formats,
                             .features = row->features};
    own.runs_here = runs_on(ctx, row, 0, own.reason, sizeof own.reason);
    *info = own;
    return MLA_OK;
}
