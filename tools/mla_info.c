/*
 * mla info: what a report about this machine should begin with. --json prints one object on one
 * line: version, compiler, commit, cpu, cpu_features, cores, threads, caches_bytes, devices,
 * cuda_reason, solutions, solutions_here, solution_environment.
 */
#include "cli.h"
#include <build_info.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct feature {
    uint64_t bit;
    const char *name;
} feature;

static const feature features[] = {
#define FEATURE_ENTRY(name, bit, text) {1u << (bit), text},
    MLA_CPU_FEATURE_LIST(FEATURE_ENTRY)
#undef FEATURE_ENTRY
};

#define N_FEATURES (sizeof features / sizeof *features)

/* More are counted, not described. */
#define MAX_DEVICES 64

typedef struct machine {
    mla_device_info cpu;
    uint64_t cpu_features;
    int32_t threads;
    long cores;
    long cache_bytes[3]; /* L1 data, L2, L3; 0 = the system does not tell */
    int32_t device_type; /* --device; 0 = all */
    int32_t device_index;
    int32_t n_solutions;
    int32_t n_here;
    int32_t n_cuda;
    const char *cuda_reason; /* why there is none; the context's */
    mla_device_info cuda[MAX_DEVICES];
} machine;

static long positive(long value)
{
    return value > 0 ? value : 0;
}

static bool is_asked(const machine *m, int32_t device_type, int32_t index)
{
    return m->device_type == 0 || (m->device_type == device_type && m->device_index == index);
}

static void look(const mla_context *ctx, machine *m)
{
    m->cpu = (mla_device_info)MLA_DEVICE_INFO_INIT;
    mla_context_describe_device(ctx, MLA_DEVICE_CPU, 0, &m->cpu, NULL);
    m->cpu_features = mla_context_cpu_features(ctx);
    m->threads = mla_context_n_threads(ctx);
    m->cores = positive(sysconf(_SC_NPROCESSORS_ONLN));
#ifdef _SC_LEVEL1_DCACHE_SIZE
    m->cache_bytes[0] = positive(sysconf(_SC_LEVEL1_DCACHE_SIZE));
    m->cache_bytes[1] = positive(sysconf(_SC_LEVEL2_CACHE_SIZE));
    m->cache_bytes[2] = positive(sysconf(_SC_LEVEL3_CACHE_SIZE));
#endif
    m->n_solutions = mla_solution_count(ctx);
    for (int32_t i = 0; i < m->n_solutions; i++) {
        mla_solution_info info = MLA_SOLUTION_INFO_INIT;
        if (mla_solution_describe(ctx, i, &info, NULL) == MLA_OK)
            m->n_here += info.runs_here;
    }
    m->n_cuda = mla_context_device_count(ctx, MLA_DEVICE_CUDA);
    m->cuda_reason = mla_context_device_reason(ctx, MLA_DEVICE_CUDA);
    for (int32_t i = 0; i < m->n_cuda && i < MAX_DEVICES; i++) {
        m->cuda[i] = (mla_device_info)MLA_DEVICE_INFO_INIT;
        mla_diag diag = {{0}};
        if (mla_context_describe_device(ctx, MLA_DEVICE_CUDA, i, &m->cuda[i], &diag) != MLA_OK)
            snprintf(m->cuda[i].name, sizeof m->cuda[i].name, "%.90s", diag.text);
    }
}

static void add_devices(cJSON *devices, const machine *m)
{
    if (is_asked(m, MLA_DEVICE_CPU, 0)) {
        cJSON *cpu = cJSON_CreateObject();
        cJSON_AddStringToObject(cpu, "device", "cpu");
        cJSON_AddStringToObject(cpu, "name", m->cpu.name);
        cJSON_AddNumberToObject(cpu, "processors", m->cpu.n_processors);
        cJSON_AddItemToArray(devices, cpu);
    }
    for (int32_t i = 0; i < m->n_cuda && i < MAX_DEVICES; i++) {
        if (!is_asked(m, MLA_DEVICE_CUDA, i))
            continue;
        char text[24];
        cJSON *device = cJSON_CreateObject();
        snprintf(text, sizeof text, "cuda:%d", (int)i);
        cJSON_AddStringToObject(device, "device", text);
        cJSON_AddStringToObject(device, "name", m->cuda[i].name);
        cJSON_AddNumberToObject(device, "processors", m->cuda[i].n_processors);
        cJSON_AddNumberToObject(device, "arch", m->cuda[i].arch);
        cJSON_AddNumberToObject(device, "l2_bytes", (double)m->cuda[i].l2_bytes);
        cJSON_AddNumberToObject(device, "driver_version", m->cuda[i].driver_version);
        cJSON_AddItemToArray(devices, device);
    }
}

static int print_json(const machine *m)
{
    static const char *const cache_names[] = {"l1d", "l2", "l3"};
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "version", mla_version_string());
    cJSON_AddStringToObject(root, "commit", MLA_BUILD_COMMIT);
    cJSON_AddStringToObject(root, "compiler", MLA_BUILD_COMPILER);
    cJSON_AddStringToObject(root, "cpu", m->cpu.name);
    cJSON *list = cJSON_AddArrayToObject(root, "cpu_features");
    for (size_t i = 0; i < N_FEATURES; i++) {
        if (m->cpu_features & features[i].bit)
            cJSON_AddItemToArray(list, cJSON_CreateString(features[i].name));
    }
    cJSON_AddNumberToObject(root, "cores", (double)m->cores);
    cJSON_AddNumberToObject(root, "threads", m->threads);
    cJSON *caches = cJSON_AddObjectToObject(root, "caches_bytes");
    for (int i = 0; i < 3; i++)
        cJSON_AddNumberToObject(caches, cache_names[i], (double)m->cache_bytes[i]);
    add_devices(cJSON_AddArrayToObject(root, "devices"), m);
    cJSON_AddStringToObject(root, "cuda_reason", m->cuda_reason);
    cJSON_AddNumberToObject(root, "solutions", m->n_solutions);
    cJSON_AddNumberToObject(root, "solutions_here", m->n_here);
    const char *forced = getenv("MLA_SOLUTION");
    cJSON_AddStringToObject(root, "solution_environment", forced != NULL ? forced : "");
    return cli_print_json(root);
}

static int print_text(const machine *m)
{
    const char *forced = getenv("MLA_SOLUTION");
    printf("libmla        %s, commit %s, %s\n", mla_version_string(), MLA_BUILD_COMMIT,
           MLA_BUILD_COMPILER);
    printf("processor     %s\n", m->cpu.name);
    printf("features     ");
    for (size_t i = 0; i < N_FEATURES; i++) {
        if (m->cpu_features & features[i].bit)
            printf(" %s", features[i].name);
    }
    printf("%s\n", m->cpu_features == 0 ? " none (plain C)" : "");
    printf("cores         %ld online, %d used\n", m->cores, (int)m->threads);
    printf("caches        L1d %ld KiB, L2 %ld KiB, L3 %ld KiB\n", m->cache_bytes[0] / 1024,
           m->cache_bytes[1] / 1024, m->cache_bytes[2] / 1024);
    printf("devices       %s\n", is_asked(m, MLA_DEVICE_CPU, 0) ? "cpu" : "");
    for (int32_t i = 0; i < m->n_cuda && i < MAX_DEVICES; i++) {
        if (!is_asked(m, MLA_DEVICE_CUDA, i))
            continue;
        printf("              cuda:%d %s, sm_%d, %d multiprocessors, L2 %lld MiB, driver %d.%d\n",
               (int)i, m->cuda[i].name, (int)m->cuda[i].arch, (int)m->cuda[i].n_processors,
               (long long)(m->cuda[i].l2_bytes >> 20), (int)(m->cuda[i].driver_version / 1000),
               (int)(m->cuda[i].driver_version % 1000 / 10));
    }
    if (m->n_cuda == 0)
        printf("              no cuda: %s\n", m->cuda_reason);
    printf("solutions     %d, of which %d run here (mla list)\n", (int)m->n_solutions,
           (int)m->n_here);
    if (forced != NULL && forced[0] != '\0')
        printf("MLA_SOLUTION  %s\n", forced);
    return CLI_OK;
}

enum { OPT_DEVICE = 256, OPT_JSON, OPT_HELP };

static const struct option options[] = {
    {"device", required_argument, NULL, OPT_DEVICE},
    {"json", no_argument, NULL, OPT_JSON},
    {"help", no_argument, NULL, OPT_HELP},
    {NULL, 0, NULL, 0},
};

int mla_tool_info(int argc, char **argv)
{
    bool as_json = false;
    machine m = {.n_solutions = 0};
    for (int option; (option = cli_next(argc, argv, options)) != CLI_END;) {
        if (option == OPT_HELP) {
            printf("mla info [--device cpu|cuda[:N]] [--json]\n\n"
                   "Version, processor, features, cores and devices.\n");
            return CLI_OK;
        }
        if (option == OPT_JSON)
            as_json = true;
        else if (option != OPT_DEVICE ||
                 !cli_device("--device", optarg, &m.device_type, &m.device_index))
            return CLI_REFUSED;
    }
    mla_context *ctx = cli_context_unforced();
    if (ctx == NULL)
        return CLI_REFUSED;
    look(ctx, &m);
    int code = CLI_OK;
    if (m.device_type == MLA_DEVICE_CUDA && m.device_index >= m.n_cuda)
        code = cli_refuse("--device cuda:%d: there are %d%s%s", (int)m.device_index, (int)m.n_cuda,
                          m.n_cuda == 0 ? ": " : "", m.n_cuda == 0 ? m.cuda_reason : "");
    else
        code = as_json ? print_json(&m) : print_text(&m);
    mla_context_destroy(ctx);
    return code;
}
