/*
 * The context: threads, features, rows, and the scopes that force solutions.
 */
#include "registry/context.h"

#include "cpu/cpu.h"
#include <stdlib.h>
#include <string.h>

static char *copy_text(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = malloc(bytes);
    if (copy)
        memcpy(copy, text, bytes);
    return copy;
}

static void collect_rows(mla_context *ctx)
{
    int32_t n_families;
    const mlai_family_rows *families = mlai_builtin_families(&n_families);
    for (int32_t f = 0; f < n_families; f++) {
        for (int32_t i = 0; i < *families[f].n_rows && ctx->n_rows < MLAI_MAX_ROWS; i++)
            ctx->rows[ctx->n_rows++] = &families[f].rows[i];
    }
}

static void open_devices(mla_context *ctx, bool cpu_only)
{
    const char *why = "the context was made with cpu_only";
    ctx->runtime = cpu_only ? NULL : mlai_builtin_device_runtime(&why);
    if (ctx->runtime)
        ctx->devices = ctx->runtime->open(ctx->devices_why, sizeof ctx->devices_why);
    else
        mlai_append(ctx->devices_why, sizeof ctx->devices_why, "%s", why);
}

static mla_status start(mla_context *ctx, const mla_context_options *options, mla_diag *diag)
{
    ctx->n_threads = options->n_threads > 0 ? options->n_threads : mlai_cpu_count();
    ctx->cpu_features = mlai_cpu_detect_features();
    if (options->cpu_features)
        ctx->cpu_features &= options->cpu_features;
    if (options->use_baseline)
        ctx->cpu_features = 0;
    collect_rows(ctx);
    open_devices(ctx, options->cpu_only != 0);
    if (options->solution && options->solution[0]) {
        MLAI_TRY(mlai_check_forced(ctx, options->solution, "options.solution", diag));
        ctx->forced = copy_text(options->solution);
        if (!ctx->forced)
            return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY, "no memory for a context");
    }
    const char *environment = options->ignore_environment ? NULL : getenv("MLA_SOLUTION");
    if (environment && environment[0]) {
        MLAI_TRY(
            mlai_check_forced(ctx, environment, "the environment variable MLA_SOLUTION", diag));
        ctx->environment = copy_text(environment);
        if (!ctx->environment)
            return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY, "no memory for a context");
    }
    if (options->run) {
        ctx->run = options->run;
        ctx->run_user = options->run_user;
        return MLA_OK;
    }
    MLAI_TRY(mlai_thread_pool_create(ctx->n_threads, &ctx->pool, diag));
    ctx->run = mlai_thread_pool_run;
    ctx->run_user = ctx->pool;
    return MLA_OK;
}

mla_status mla_context_create(const mla_context_options *options, mla_context **out, mla_diag *diag)
{
    mla_context_options own = MLA_CONTEXT_OPTIONS_INIT;
    if (!out)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "out is NULL; pass where the context should go");
    if (options)
        MLAI_TRY(mlai_take_struct(&own, sizeof own, sizeof own, options, "options", diag));
    if (own.n_threads < 0 || own.n_threads > 1024)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT,
                         "options.n_threads is %d; it takes 1 to 1024, or 0 for all cores",
                         own.n_threads);
    mla_context *ctx = calloc(1, sizeof *ctx);
    if (!ctx)
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY, "no memory for a context");
    mla_status status = start(ctx, &own, diag);
    if (status != MLA_OK) {
        mla_context_destroy(ctx);
        return status;
    }
    *out = ctx;
    return MLA_OK;
}

void mla_context_destroy(mla_context *ctx)
{
    if (!ctx)
        return;
    mlai_thread_pool_destroy(ctx->pool);
    while (ctx->n_scopes > 0)
        free(ctx->scopes[--ctx->n_scopes]);
    if (ctx->devices)
        ctx->runtime->close(ctx->devices);
    free(ctx->forced);
    free(ctx->environment);
    free(ctx);
}

int32_t mla_context_device_count(const mla_context *ctx, int32_t device_type)
{
    if (device_type == MLA_DEVICE_CPU)
        return 1;
    if (!ctx || !ctx->devices || device_type != ctx->runtime->device_type)
        return 0;
    return ctx->runtime->count(ctx->devices);
}

const char *mla_context_device_reason(const mla_context *ctx, int32_t device_type)
{
    if (device_type != MLA_DEVICE_CPU && device_type != MLA_DEVICE_CUDA)
        return "libmla does not know this type of device";
    if (device_type == MLA_DEVICE_CPU || (ctx && ctx->devices))
        return "";
    return ctx ? ctx->devices_why : "there is no context";
}

mla_status mla_context_describe_device(const mla_context *ctx, int32_t device_type,
                                       int32_t device_index, mla_device_info *info, mla_diag *diag)
{
    if (!ctx || !info)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "%s is NULL", ctx ? "info" : "ctx");
    if (info->struct_size != sizeof *info)
        return mlai_fail(diag, MLA_ERROR_VERSION, "info.struct_size is %u; use its INIT macro",
                         info->struct_size);
    mlai_device device;
    MLAI_TRY(mlai_context_device(ctx, device_type, device_index, &device, diag));
    mla_device_info own = {
        .struct_size = sizeof own, .device_type = device_type, .device_index = device_index};
    if (device_type == MLA_DEVICE_CPU) {
        own.n_processors = mlai_cpu_count();
        mlai_cpu_name(own.name, sizeof own.name);
    } else {
        device.runtime->describe(device.handle, &own);
    }
    *info = own;
    return MLA_OK;
}

mla_status mlai_context_device(const mla_context *ctx, int32_t device_type, int32_t device_index,
                               mlai_device *device, mla_diag *diag)
{
    *device = (mlai_device){NULL, NULL};
    if (device_type == MLA_DEVICE_CPU && device_index == 0)
        return MLA_OK;
    const int32_t count = mla_context_device_count(ctx, device_type);
    if (device_type == MLA_DEVICE_CPU || device_index < 0 || device_index >= count)
        return mlai_fail(diag, MLA_ERROR_DEVICE,
                         "there is no device %d of type %d; this context has %d%s%s", device_index,
                         device_type, count, count ? "" : ": ",
                         mla_context_device_reason(ctx, device_type));
    char why[160];
    device->runtime = ctx->runtime;
    device->handle = ctx->runtime->device(ctx->devices, device_index, why, sizeof why);
    return MLA_OK;
}

uint64_t mla_context_cpu_features(const mla_context *ctx)
{
    return ctx ? ctx->cpu_features : 0;
}

int32_t mla_context_n_threads(const mla_context *ctx)
{
    return ctx ? ctx->n_threads : 0;
}

void mla_context_run(mla_context *ctx, int32_t n_tasks, mla_task fn, void *arg)
{
    if (ctx && fn)
        ctx->run(ctx->run_user, n_tasks, fn, arg);
}

mla_status mla_context_push_solution(mla_context *ctx, const char *solution, mla_diag *diag)
{
    if (!ctx || !solution || !solution[0])
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "%s",
                         ctx ? "solution is empty; name a family or a row" : "ctx is NULL");
    if (ctx->n_scopes == MLAI_MAX_SCOPES)
        return mlai_fail(diag, MLA_ERROR_CAPACITY, "solution scopes nest at most %d deep",
                         MLAI_MAX_SCOPES);
    MLAI_TRY(mlai_check_forced(ctx, solution, "solution", diag));
    char *copy = copy_text(solution);
    if (!copy)
        return mlai_fail(diag, MLA_ERROR_OUT_OF_MEMORY, "no memory for a solution scope");
    ctx->scopes[ctx->n_scopes++] = copy;
    return MLA_OK;
}

mla_status mla_context_pop_solution(mla_context *ctx, mla_diag *diag)
{
    if (!ctx)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "ctx is NULL");
    if (ctx->n_scopes == 0)
        return mlai_fail(diag, MLA_ERROR_STATE, "no solution scope is open; push one first");
    free(ctx->scopes[--ctx->n_scopes]);
    return MLA_OK;
}
