/*
 * The GPU's ceilings (cuda_ceilings.h): the driver functions that device_memory.h does not offer,
 * NVML for clocks, and the measuring.
 */
#include "cuda_ceilings.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef BENCH_CUDA_IMAGE
__asm__(".pushsection .rodata\n"
        ".balign 64\n"
        ".global bench_cuda_image\n"
        ".hidden bench_cuda_image\n"
        "bench_cuda_image:\n"
        ".incbin \"" BENCH_CUDA_IMAGE "\"\n"
        ".popsection\n");
extern const unsigned char bench_cuda_image[];
#endif

/* The fatbin of cuda_ceilings.cu; NULL in a build without nvcc. */
static const void *image(void)
{
#ifdef BENCH_CUDA_IMAGE
    return bench_cuda_image;
#else
    return NULL;
#endif
}

#define MOVE_BYTES (UINT64_C(4) << 30)
#define MOVE_BLOCK_BYTES (8 * 256 * 16) /* MOVE_LOADS, MOVE_THREADS vectors of 16 bytes */
#define PRODUCT_SMEM_BYTES (4 * (2 * 64 + 256) * 128)
/* Of one round of one CTA: 4 stages, 4 steps, 2 warpgroups. */
#define PRODUCT_MACS_BF16 (4.0 * 4.0 * 2.0 * 64.0 * 256.0 * 16.0)
#define PRODUCT_ROUNDS 8192
#define MAX_REPEATS 32

/* member, symbol, parameters; types as in device_memory.c */
#define GPU_FUNCTIONS(X)                                                                           \
    X(device_get, "cuDeviceGet", (int *, int))                                                     \
    X(attribute, "cuDeviceGetAttribute", (int *, int, int))                                        \
    X(bus_id, "cuDeviceGetPCIBusId", (char *, int, int))                                           \
    X(driver_version, "cuDriverGetVersion", (int *))                                               \
    X(memory_info, "cuMemGetInfo_v2", (size_t *, size_t *))                                        \
    X(module_load, "cuModuleLoadData", (void **, const void *))                                    \
    X(module_unload, "cuModuleUnload", (void *))                                                   \
    X(get_function, "cuModuleGetFunction", (void **, void *, const char *))                        \
    X(set_attribute, "cuFuncSetAttribute", (void *, int, int))                                     \
    X(launch, "cuLaunchKernel",                                                                    \
      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,       \
       void **, void **))

#define NVML_FUNCTIONS(X)                                                                          \
    X(nvml_init, "nvmlInit_v2", (void))                                                            \
    X(nvml_shutdown, "nvmlShutdown", (void))                                                       \
    X(nvml_device, "nvmlDeviceGetHandleByPciBusId_v2", (const char *, void **))                    \
    X(nvml_clock, "nvmlDeviceGetClockInfo", (void *, int, unsigned *))                             \
    X(nvml_max_clock, "nvmlDeviceGetMaxClockInfo", (void *, int, unsigned *))                      \
    X(nvml_driver, "nvmlSystemGetDriverVersion", (char *, unsigned))

enum {
    ATTRIBUTE_CLOCK_KHZ = 13,
    ATTRIBUTE_PROCESSORS = 16,
    ATTRIBUTE_MEMORY_CLOCK_KHZ = 36,
    ATTRIBUTE_MAJOR = 75,
    FUNCTION_DYNAMIC_SMEM = 8,
    CLOCK_SM = 1,
    CLOCK_MEMORY = 2
};

struct cuda_gpu {
#define MEMBER(member, symbol, parameters) int(*member) parameters;
    GPU_FUNCTIONS(MEMBER)
    NVML_FUNCTIONS(MEMBER)
#undef MEMBER
    device_memory *memory;
    void *library;
    void *nvml_library;
    void *nvml; /* the device's handle, or NULL */
    void *module;
    int device;
    int n_processors;
    int major;
    char driver[96];
};

static void require(int result, const char *what)
{
    if (result == 0)
        return;
    fprintf(stderr, "%s: CUDA error %d\n", what, result);
    exit(1);
}

static int attribute(const cuda_gpu *gpu, int which)
{
    int value = 0;
    require(gpu->attribute(&value, which, gpu->device), "cuDeviceGetAttribute");
    return value;
}

/* Clocks are told where NVML is installed and knows the device. */
static void open_nvml(cuda_gpu *gpu)
{
    char id[32] = "";
    int version = 0;
    require(gpu->driver_version(&version), "cuDriverGetVersion");
    snprintf(gpu->driver, sizeof gpu->driver, "CUDA %d.%d", version / 1000, version % 1000 / 10);
    gpu->nvml_library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (gpu->nvml_library == NULL)
        return;
#define LOAD(member, symbol, parameters)                                                           \
    *(void **)&gpu->member = dlsym(gpu->nvml_library, symbol);                                     \
    if (gpu->member == NULL)                                                                       \
        return;
    NVML_FUNCTIONS(LOAD)
#undef LOAD
    if (gpu->nvml_init() != 0)
        return;
    require(gpu->bus_id(id, (int)sizeof id, gpu->device), "cuDeviceGetPCIBusId");
    if (gpu->nvml_driver(gpu->driver, (unsigned)sizeof gpu->driver) != 0 ||
        gpu->nvml_device(id, &gpu->nvml) != 0) {
        gpu->nvml = NULL;
        gpu->nvml_shutdown();
    }
}

static bool load(cuda_gpu *gpu, char *why, size_t why_bytes)
{
    gpu->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
#define LOAD(member, symbol, parameters)                                                           \
    *(void **)&gpu->member = gpu->library != NULL ? dlsym(gpu->library, symbol) : NULL;            \
    if (gpu->member == NULL) {                                                                     \
        snprintf(why, why_bytes, "the NVIDIA driver has no %s", symbol);                           \
        return false;                                                                              \
    }
    GPU_FUNCTIONS(LOAD)
#undef LOAD
    require(gpu->device_get(&gpu->device, device_index(gpu->memory)), "cuDeviceGet");
    gpu->n_processors = attribute(gpu, ATTRIBUTE_PROCESSORS);
    gpu->major = attribute(gpu, ATTRIBUTE_MAJOR);
    int result = gpu->module_load(&gpu->module, image());
    if (result != 0) {
        snprintf(why, why_bytes, "the ceiling kernels do not run on this GPU (CUDA error %d)",
                 result);
        return false;
    }
    open_nvml(gpu);
    return true;
}

cuda_gpu *cuda_gpu_open(int32_t index, char *why, size_t why_bytes)
{
    if (image() == NULL) {
        snprintf(why, why_bytes, "this mla was built without CUDA (MLA_CUDA)");
        return NULL;
    }
    cuda_gpu *gpu = calloc(1, sizeof *gpu);
    if (gpu == NULL) {
        snprintf(why, why_bytes, "out of memory");
        return NULL;
    }
    gpu->memory = device_open(index, why, why_bytes);
    if (gpu->memory != NULL && load(gpu, why, why_bytes))
        return gpu;
    cuda_gpu_close(gpu);
    return NULL;
}

void cuda_gpu_close(cuda_gpu *gpu)
{
    if (gpu == NULL)
        return;
    if (gpu->nvml != NULL)
        gpu->nvml_shutdown();
    if (gpu->nvml_library != NULL)
        dlclose(gpu->nvml_library);
    if (gpu->module != NULL)
        require(gpu->module_unload(gpu->module), "cuModuleUnload");
    device_close(gpu->memory);
    if (gpu->library != NULL)
        dlclose(gpu->library);
    free(gpu);
}

device_memory *cuda_gpu_memory(cuda_gpu *gpu)
{
    return gpu->memory;
}

uint64_t cuda_gpu_free_bytes(cuda_gpu *gpu)
{
    size_t free_bytes = 0;
    size_t all = 0;
    require(gpu->memory_info(&free_bytes, &all), "cuMemGetInfo");
    return free_bytes;
}

const char *cuda_gpu_driver(const cuda_gpu *gpu)
{
    return gpu->driver;
}

int32_t cuda_gpu_clock_mhz(const cuda_gpu *gpu)
{
    unsigned mhz = 0;
    if (gpu->nvml == NULL || gpu->nvml_clock(gpu->nvml, CLOCK_SM, &mhz) != 0)
        return 0;
    return (int32_t)mhz;
}

/* ---- measuring ------------------------------------------------------------------------------- */

static void *kernel(const cuda_gpu *gpu, const char *name)
{
    void *function = NULL;
    require(gpu->get_function(&function, gpu->module, name), name);
    return function;
}

static void launch(cuda_gpu *gpu, void *function, int blocks, int threads, unsigned smem_bytes,
                   void **arguments)
{
    require(gpu->launch(function, (unsigned)blocks, 1, 1, (unsigned)threads, 1, 1, smem_bytes,
                        device_stream(gpu->memory), arguments, NULL),
            "cuLaunchKernel");
}

void cuda_gpu_spin(cuda_gpu *gpu, double us)
{
    uint64_t nanoseconds = (uint64_t)(us * 1e3);
    void *arguments[] = {&nanoseconds};
    launch(gpu, kernel(gpu, "bench_spin"), 1, 1, 0, arguments);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

double cuda_median(double *values, int32_t n)
{
    qsort(values, (size_t)n, sizeof *values, compare_doubles);
    return 0.5 * (values[(n - 1) / 2] + values[n / 2]);
}

void cuda_time_graph(cuda_gpu *gpu, const device_graph *graph, int32_t n, bool is_idle, double *us)
{
    device_memory *memory = gpu->memory;
    device_event *begin[MAX_REPEATS];
    device_event *end[MAX_REPEATS];
    n = n < MAX_REPEATS ? n : MAX_REPEATS;
    for (int32_t i = 0; i < n; i++) {
        begin[i] = device_event_make(memory);
        end[i] = device_event_make(memory);
    }
    device_sync(memory);
    if (!is_idle)
        cuda_gpu_spin(gpu, 100.0 + 15.0 * n);
    for (int32_t i = 0; i < n; i++) {
        device_event_record(memory, begin[i]);
        device_replay(memory, graph);
        device_event_record(memory, end[i]);
        if (is_idle)
            device_sync(memory);
    }
    for (int32_t i = 0; i < n; i++)
        us[i] = device_elapsed_us(memory, begin[i], end[i]);
    for (int32_t i = 0; i < n; i++) {
        device_event_free(memory, begin[i]);
        device_event_free(memory, end[i]);
    }
}

/* Median of `n` launches after one that is not timed. */
static double time_kernel(cuda_gpu *gpu, const char *name, int blocks, unsigned smem_bytes,
                          void **arguments, int32_t n)
{
    double us[MAX_REPEATS];
    void *function = kernel(gpu, name);
    if (smem_bytes > 0)
        require(gpu->set_attribute(function, FUNCTION_DYNAMIC_SMEM, (int)smem_bytes),
                "cuFuncSetAttribute");
    device_event *begin = device_event_make(gpu->memory);
    device_event *end = device_event_make(gpu->memory);
    launch(gpu, function, blocks, 256, smem_bytes, arguments);
    for (int32_t i = 0; i < n; i++) {
        device_event_record(gpu->memory, begin);
        launch(gpu, function, blocks, 256, smem_bytes, arguments);
        device_event_record(gpu->memory, end);
        us[i] = device_elapsed_us(gpu->memory, begin, end);
    }
    device_event_free(gpu->memory, begin);
    device_event_free(gpu->memory, end);
    return cuda_median(us, n);
}

static void measure_moving(cuda_gpu *gpu, void *sink, cuda_ceilings *c)
{
    void *buffer = device_alloc(gpu->memory, MOVE_BYTES);
    void *half = (char *)buffer + MOVE_BYTES / 2;
    uint64_t n = MOVE_BYTES / MOVE_BLOCK_BYTES;
    uint64_t n_half = n / 2;
    void *read_arguments[] = {&buffer, &n, &sink};
    void *copy_arguments[] = {&half, &buffer, &n_half};
    device_fill(gpu->memory, buffer, 0x3c, MOVE_BYTES);
    int blocks = 8 * gpu->n_processors;
    c->read_gbps =
        (double)MOVE_BYTES / time_kernel(gpu, "bench_read", blocks, 0, read_arguments, 11) * 1e-3;
    c->copy_gbps =
        (double)MOVE_BYTES / time_kernel(gpu, "bench_copy", blocks, 0, copy_arguments, 11) * 1e-3;
    device_free(gpu->memory, buffer);
}

/* Also reads the clock while one more launch runs. */
static double measure_products(cuda_gpu *gpu, const char *name, double macs, void *sink,
                               int32_t *clock_mhz)
{
    uint32_t rounds = PRODUCT_ROUNDS;
    void *arguments[] = {&rounds, &sink};
    double us = time_kernel(gpu, name, gpu->n_processors, PRODUCT_SMEM_BYTES, arguments, 7);
    launch(gpu, kernel(gpu, name), gpu->n_processors, 256, PRODUCT_SMEM_BYTES, arguments);
    *clock_mhz = cuda_gpu_clock_mhz(gpu);
    device_sync(gpu->memory);
    return 2.0 * macs * rounds * gpu->n_processors / us * 1e-6;
}

static void measure_empty(cuda_gpu *gpu, cuda_ceilings *c)
{
    double us[MAX_REPEATS];
    device_capture_begin(gpu->memory);
    launch(gpu, kernel(gpu, "bench_empty"), 1, 32, 0, NULL);
    device_graph *graph = device_capture_end(gpu->memory);
    cuda_time_graph(gpu, graph, 20, false, us);
    cuda_time_graph(gpu, graph, 20, false, us);
    c->empty_queued_us = cuda_median(us, 20);
    cuda_time_graph(gpu, graph, 20, true, us);
    c->empty_us = cuda_median(us, 20);
    device_graph_free(gpu->memory, graph);
}

cuda_ceilings cuda_ceilings_measure(cuda_gpu *gpu)
{
    cuda_ceilings c = {.clock_max_mhz = attribute(gpu, ATTRIBUTE_CLOCK_KHZ) / 1000,
                       .memory_clock_mhz = attribute(gpu, ATTRIBUTE_MEMORY_CLOCK_KHZ) / 1000};
    unsigned mhz = 0;
    if (gpu->nvml != NULL && gpu->nvml_clock(gpu->nvml, CLOCK_MEMORY, &mhz) == 0)
        c.memory_clock_mhz = (int32_t)mhz;
    if (gpu->nvml != NULL && gpu->nvml_max_clock(gpu->nvml, CLOCK_SM, &mhz) == 0)
        c.clock_max_mhz = (int32_t)mhz;
    void *sink = device_alloc(gpu->memory, 4);
    measure_moving(gpu, sink, &c);
    if (gpu->major == 9) {
        c.fp8_tflops =
            measure_products(gpu, "bench_e4m3", 2.0 * PRODUCT_MACS_BF16, sink, &c.clock_mhz);
        c.bf16_tflops = measure_products(gpu, "bench_bf16", PRODUCT_MACS_BF16, sink, &c.clock_mhz);
    }
    measure_empty(gpu, &c);
    device_sync(gpu->memory);
    device_free(gpu->memory, sink);
    return c;
}
